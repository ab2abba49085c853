"""Searches the weights of a scheduling policy and of prefix eviction in the simulator.

A point of the search is a `LinearScore`, with weights for the order of admission and
for preemption, a rate of ageing, a chunk size and a watermark, and a `LinearEviction`
of the prefix cache. The first stage compares rules such as oldest job first on all
train hours; CMA-ES and random search start at the best one, with equal budgets, and
minimise the objective over all train hours. The best candidates are compared on the
validation hours. Test hours are read only then, and give the comparison with the
policies of the library.
"""

import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

from experiments import lab
from experiments.decisions.policy_search import loads
from experiments.decisions.policy_search.config import CONFIGS, Config
from experiments.decisions.policy_search.hour_simulation import (
    HourMetrics,
    Rules,
    Simulator,
)
from experiments.decisions.policy_search.loads import TRAFFICS, Hour, HourSplit
from experiments.decisions.policy_search.optimizer import (
    CMASearch,
    Optimizer,
    RandomSearch,
)
from experiments.decisions.policy_search.search_space import (
    RULES,
    point_of,
    rules_of,
)
from jaxkv import scheduling, validation
from jaxkv.memory import LRU, linear_eviction
from jaxkv.scheduling import Policy, linear_score
from jaxkv.verification import check_chains, verify_policy

FOUND = "CMA-ES"
RANDOM = "random search"
BASE = "FCFS + LRU"
ORACLE = "oracle of the remaining job"
OLDEST = "oldest job"
SPLIT = Path(__file__).with_name("split.json")
"""Part and SHA-256 of each hour of the config `cpu`, committed before the search."""


class HourTable(lab.ResultTable):
    """Metrics of each policy and hour."""

    family: lab.Texts = lab.column("sessions, or recorded requests")
    test: lab.Texts = lab.column("test, or transfer to another rate")
    traffic: lab.Texts = lab.column("traffic")
    hour: lab.Texts = lab.column("hour")
    policy: lab.Texts = lab.column("policy")
    job_p90_s: lab.Floats = lab.column("90th percentile of job time")
    job_max_s: lab.Floats = lab.column("longest job time")
    attained_share: lab.Floats = lab.column("requests that meet both objectives")


class GenerationTable(lab.ResultTable):
    """Progress of the searches."""

    family: lab.Texts = lab.column("sessions, or recorded requests")
    search: lab.Texts = lab.column("search")
    generation: lab.Ints = lab.column("generation")
    best_objective: lab.Floats = lab.column("least objective of the generation")
    median_objective: lab.Floats = lab.column("median objective")


class WinnerTable(lab.ResultTable):
    """Selected policies."""

    family: lab.Texts = lab.column("sessions, or recorded requests")
    search: lab.Texts = lab.column("search")
    validation_objective: lab.Floats = lab.column("objective of the validation hours")
    formula: lab.Texts = lab.column("policy")
    policy_file: lab.Texts = lab.column("its file", is_reported=False)


class RatioTable(lab.ResultTable):
    """Job time relative to first come, first served, paired by hour."""

    family: lab.Texts = lab.column("sessions, or recorded requests")
    test: lab.Texts = lab.column("test, or transfer to another rate")
    traffic: lab.Texts = lab.column("traffic, or all")
    policy: lab.Texts = lab.column("policy")
    p90_ratio: lab.Floats = lab.column("geometric mean of P90 ratios", form="{:.3f}")
    low: lab.Floats = lab.column("lower end, 95 %", form="{:.3f}")
    high: lab.Floats = lab.column("upper end, 95 %", form="{:.3f}")
    attained_share: lab.Floats = lab.column("requests that meet both objectives")


class Result(lab.ResultRecord):
    """Results of both searches."""

    ratios: RatioTable = lab.column("P90 job time", heading="against FCFS + LRU")
    winners: WinnerTable = lab.column("policies", heading="selected policies")
    generations: GenerationTable = lab.column("progress", heading="searches")
    hours: HourTable = lab.column("by policy and hour", heading="test hours")
    skipped: str = lab.column("traces that are absent")
    num_early: int = lab.column("test hours read before the end of the searches")
    num_faults: int = lab.column("failed checks of the winners in the engine")
    simulated_hours: float = lab.column("simulated hours of the searches")
    recorded_hours: float = lab.column("those of recorded requests without sessions")
    hours_per_minute: float = lab.column("simulated hours per minute of the searches")


def search_objective(
    config: Config, ours: list[HourMetrics], base: list[HourMetrics]
) -> Float[np.ndarray, " policies"]:
    """Returns the objective: 0 for FCFS, smaller is better.

    It is the mean over hours of the log ratio of P90 job times, plus the loss of
    attainment and the log ratio of the longest job times, by their weights.
    """
    terms = [
        np.log(x.job_p90_s / b.job_p90_s)
        + config.goodput_weight * (b.attained_share - x.attained_share)
        + config.fairness_weight * np.log(x.job_max_s / b.job_max_s)
        for x, b in zip(ours, base, strict=True)
    ]
    return np.mean(terms, axis=0)


class TrafficFamily(NamedTuple):
    """Traffics that are searched together."""

    name: str
    split: HourSplit
    transfer: HourSplit
    """The same hours at another rate."""


def make_families(config: Config) -> tuple[list[TrafficFamily], list[str]]:
    """Returns the families with their hours, and the traces that are absent."""
    fields = ("num_jobs", "jobs_per_s", "hours")
    fields += ("num_requests", "recorded_per_s", "recorded_hours")
    digests: dict[str, str] = {}
    if all(getattr(config, x) == getattr(CONFIGS["cpu"], x) for x in fields):
        committed = json.loads(SPLIT.read_text())
        digests = {name: digest for name, (_, digest) in committed.items()}
    rates = dict(zip(config.traffics, config.jobs_per_s, strict=False))
    rates |= dict(zip(config.recorded, config.recorded_per_s, strict=False))
    paths = {x: loads.find_trace(x) for x in config.recorded}

    def read(name: str, *, factor: float) -> Hour:
        traffic = name.split("/")[-2]
        rate = factor * rates[traffic]
        if (path := paths.get(traffic)) is not None:
            return loads.read_recorded_hour(
                name, path, num_requests=config.num_requests, rate=rate
            )
        return loads.read_session_hour(
            name, TRAFFICS[traffic], num_jobs=config.num_jobs, rate=rate
        )

    absent = [x for x, path in paths.items() if path is None]
    families = []
    present = [x for x in config.recorded if x not in absent]
    for family, prefix, traffics, shares in (
        ("sessions", "sessions/", config.traffics, config.hours),
        ("recorded", "", present, config.recorded_hours),
    ):
        parts: dict[str, str] = {}
        for traffic in traffics:
            names = [f"{prefix}{traffic}/{i}" for i in range(sum(shares))]
            parts |= loads.part_of(names, shares)
        if parts:
            splits = [
                HourSplit(parts, functools.partial(read, factor=factor), known)
                for factor, known in ((1.0, digests), (config.transfer, {}))
            ]
            families.append(TrafficFamily(family, *splits))
    return families, absent


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Searches, selects, then tests, for each family."""
    validation.check_installed("policy_search", "search", "cmaes")
    simulator = Simulator(config, progress)
    families, absent = make_families(config)
    begin_s = time.perf_counter()
    searches = [_search(config, simulator, x, progress) for x in families]
    search_s = time.perf_counter() - begin_s
    simulated_hours = sum(x.simulated_hours for x in searches)
    hours: list[lab.Row] = []
    num_faults = 0
    for family, search in zip(families, searches, strict=True):
        family.split.search_ended = family.transfer.search_ended = True
        hours += _test(config, simulator, family, search.rules)
        policy, eviction = search.rules[FOUND]
        report = verify_policy(policy, num_loads=config.verified_loads)
        num_faults += report.fault is not None
        progress.show(str(report))
        for seed in range(config.verified_loads):
            difference = check_chains(policy, eviction, seed=seed)
            num_faults += difference is not None
            progress.show(f"sessions with prefix cache {seed}: {difference or 'equal'}")
    table = HourTable.of(hours)
    return Result(
        ratios=find_ratios(table),
        winners=WinnerTable.of([row for x in searches for row in x.winners]),
        generations=GenerationTable.of([row for x in searches for row in x.progress]),
        hours=table,
        skipped=", ".join(absent) or "none",
        num_early=sum(x.split.num_early + x.transfer.num_early for x in families),
        num_faults=num_faults,
        simulated_hours=simulated_hours,
        recorded_hours=sum(
            search.simulated_hours
            for family, search in zip(families, searches, strict=True)
            if family.name == "recorded"
        ),
        hours_per_minute=simulated_hours / search_s * 60,
    )


class _Search(NamedTuple):
    """Both searches of a family: their winners, and rows of the tables."""

    rules: dict[str, Rules]
    winners: list[lab.Row]
    progress: list[lab.Row]
    simulated_hours: float = 0.0


def _search(
    config: Config, simulator: Simulator, family: TrafficFamily, progress: lab.Progress
) -> _Search:
    """Runs both searches on the train hours, and selects on the validation hours."""
    result = _Search({}, [], [])
    begin_s = simulator.simulated_s
    train, held_out = (family.split.hours(x) for x in ("train", "validation"))
    plain = [(linear_score(), linear_eviction())]
    metrics = simulator.run(plain, [*train, *held_out])
    base = {hour.name: x for hour, x in zip([*train, *held_out], metrics, strict=True)}

    def score(points: Sequence[np.ndarray], hours: list[Hour]) -> np.ndarray:
        metrics = simulator.run([rules_of(x) for x in points], hours)
        return search_objective(config, metrics, [base[x.name] for x in hours])

    def note(search: str, generation: int, values: np.ndarray) -> None:
        result.progress.append(
            {
                "family": family.name,
                "search": search,
                "generation": generation,
                "best_objective": float(values.min()),
                "median_objective": float(np.median(values)),
            }
        )
        progress.show(
            f"{family.name}, {search}: generation {generation + 1}, best "
            f"{values.min():+.3f}, median {np.median(values):+.3f}"
        )

    points = [point_of(x) for x in RULES]
    values = score(points, train)
    note("rules", 0, values)
    start = points[int(np.argmin(values))]
    for name, kind in ((FOUND, CMASearch), (RANDOM, RandomSearch)):
        optimizer: Optimizer = kind(
            start, population=config.population, sigma=config.sigma, seed=config.seed
        )
        scored: list[tuple[float, np.ndarray]] = []
        for generation in range(config.generations):
            asked = optimizer.ask()
            values = score([*asked], train)
            optimizer.tell(asked, values)
            note(name, generation, values)
            scored += [*zip(values.tolist(), asked, strict=True)]
        center = optimizer.center()
        finalists = [start] if center is None else [start, center]
        scored.sort(key=lambda x: x[0])
        finalists += [x for _, x in scored[: config.population - len(finalists)]]
        values = score(finalists, held_out)
        best = rules_of(finalists[int(np.argmin(values))])
        result.rules[name] = best
        result.winners.append(
            {
                "family": family.name,
                "search": name,
                "validation_objective": float(values.min()),
                "formula": scheduling.format_formula(*best),
                "policy_file": scheduling.format_linear_score(*best),
            }
        )
    return result._replace(simulated_hours=(simulator.simulated_s - begin_s) / 3600)


def make_rivals(config: Config, family: str) -> dict[str, Policy]:
    """Returns the policies of the library by name."""
    policies: dict[str, Policy] = {
        "vLLM": scheduling.vllm_scheduler(rule="vllm-0.19"),
        "shortest remaining": scheduling.shortest_remaining(),
        "ageing": scheduling.ageing_priority(level_ms=100),
        "earliest deadline": scheduling.earliest_deadline(),
        "fair share": scheduling.fair_share(),
    }
    names = [x for x in config.rivals if x != "fair share" or family == "sessions"]
    return {BASE: scheduling.fcfs()} | {name: policies[name] for name in names}


def _test(
    config: Config,
    simulator: Simulator,
    family: TrafficFamily,
    rules: dict[str, Rules],
) -> list[lab.Row]:
    """Simulates the winners and the policies of the library on the test hours."""
    named: dict[str, Rules] = dict(rules)
    if family.name == "sessions":
        oldest = linear_score(admission={"younger": 1.0})
        named[OLDEST] = oldest, linear_eviction()
    # Rules of one type share a program.
    groups = [named]
    groups += [{x: (y, LRU())} for x, y in make_rivals(config, family.name).items()]
    # No request waits for 1,000 s, so a priority always precedes the arrival.
    groups.append({ORACLE: (scheduling.ageing_priority(level_ms=1_000_000), LRU())})
    rows: list[lab.Row] = []
    for test, split in (("test", family.split), ("transfer", family.transfer)):
        hours = split.hours("test")
        for group in groups:
            metrics = simulator.run([*group.values()], hours, is_oracle=ORACLE in group)
            rows += [
                {"family": family.name, "test": test, "traffic": hour.traffic}
                | {"hour": hour.name, "policy": name}
                | {key: float(x[i]) for key, x in columns._asdict().items()}
                for hour, columns in zip(hours, metrics, strict=True)
                for i, name in enumerate(group)
            ]
    return rows


def find_ratios(table: HourTable) -> RatioTable:
    """Returns geometric means of P90 ratios to FCFS + LRU, paired by hour."""
    rows = []
    for family, test in dict.fromkeys(zip(table.family, table.test, strict=True)):
        part = table.where(family=family, test=test)
        base = part.where(policy=BASE)
        for policy in part.distinct("policy"):
            ours = part.where(policy=policy)
            assert (ours.hour == base.hour).all()
            logs = np.log(ours.job_p90_s / base.job_p90_s)
            for traffic in (*part.distinct("traffic"), "all"):
                mask = (ours.traffic == traffic) | (traffic == "all")
                x = logs[mask]
                half = 0.0
                if x.size > 1:
                    half = float(stats.t.ppf(0.975, x.size - 1) * stats.sem(x))
                ends = np.exp(x.mean() + np.array([0.0, -half, half])).tolist()
                rows.append(
                    {"family": family, "test": test, "traffic": traffic}
                    | {"policy": policy}
                    | dict(zip(("p90_ratio", "low", "high"), ends, strict=True))
                    | {"attained_share": float(ours.attained_share[mask].mean())}
                )
    return RatioTable.of(rows)


def best_shipped(ratios: RatioTable, family: str, test: str) -> str:
    """Returns the policy of the library with the least ratio, oracles excluded."""
    part = ratios.where(family=family, test=test, traffic="all")
    excluded = (FOUND, RANDOM, ORACLE, OLDEST)
    pairs = zip(part.p90_ratio.tolist(), part.policy.tolist(), strict=True)
    return min(x for x in pairs if x[1] not in excluded)[1]


def ratio_of(
    ratios: RatioTable, family: str, test: str, traffic: str, policy: str
) -> float:
    """Returns the P90 ratio of a policy."""
    part = ratios.where(family=family, test=test, traffic=traffic, policy=policy)
    return float(part.p90_ratio[0])


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws the progress of the search, and ratios by traffic."""
    family = result.generations.family[0]
    for name in (FOUND, RANDOM):
        part = result.generations.where(family=family, search=name)
        x = part.generation + 1
        lab.draw_curve(axes[0], x, part.median_objective, name, name)
    lab.draw_reference_line(axes[0], 0)
    title = "Objective of a generation"
    lab.set_labels(axes[0], title, "generation [1]", "median, FCFS is 0 [1]")
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(loc="best")
    part = result.ratios.where(family=family, test="test", policy=BASE)
    traffics = [x for x in part.distinct("traffic") if x != "all"]
    place = np.arange(len(traffics))
    shipped = best_shipped(result.ratios, family, "test")
    for name, style in ((FOUND, FOUND), (shipped, "best shipped"), (ORACLE, ORACLE)):
        ratio = [ratio_of(result.ratios, family, "test", x, name) for x in traffics]
        lab.draw_curve(axes[1], place, np.array(ratio), style, name, linestyle="")
    lab.draw_reference_line(axes[1], 1)
    axes[1].set_xticks(place, [x.rpartition("/")[2] for x in traffics])
    y = "P90 job time / FCFS + LRU [ratio]"
    all_ratio = ratio_of(result.ratios, family, "test", "all", FOUND)
    title = f"Test hours: {100 * (all_ratio - 1):+.0f} % by the policy found"
    lab.set_labels(axes[1], title, "traffic of sessions", y)
    axes[1].margins(x=0.15, y=0.15)
    axes[1].legend(loc="best")


FAMILY_CLAIMS = {
    "sessions": ("sessions_shipped", "sessions_random", "sessions_transfer"),
    "recorded": ("recorded_shipped", "recorded_random", "recorded_transfer"),
}
"""Claims of each family of hours."""


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares the found policy with the bar."""
    ratios = result.ratios
    yield lab.measured("no_peeking", result.num_early)
    yield lab.measured("engine", result.num_faults)
    winner_rows = ratios.where(family="sessions", test="test", policy=FOUND)
    reduced = [
        ratio <= 0.9
        for ratio, traffic in zip(
            winner_rows.p90_ratio, winner_rows.traffic, strict=True
        )
        if traffic != "all"
    ]
    yield lab.measured("sessions_reduced", sum(reduced))
    for family in ratios.distinct("family"):
        ours = ratio_of(ratios, family, "test", "all", FOUND)
        name = best_shipped(ratios, family, "test")
        shipped = ratio_of(ratios, family, "test", "all", name)
        random = ratio_of(ratios, family, "test", "all", RANDOM)
        transfer = ratio_of(ratios, family, "transfer", "all", FOUND)
        against_shipped, against_random, at_other_rate = FAMILY_CLAIMS[family]
        yield lab.measured(against_shipped, ours / shipped, best=name)
        yield lab.measured(against_random, ours / random)
        yield lab.measured(at_other_rate, transfer)


def files(result: Result) -> dict[str, str]:
    """Returns the policy file of the winner."""
    winner = result.winners.where(family="sessions", search=FOUND)
    return {"policy.json": str(winner.policy_file[0])}


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    plot,
    claims,
    panels=lab.Panels(1, 2, 3.6),
    files=files,
)
