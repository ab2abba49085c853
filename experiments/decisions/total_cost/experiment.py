"""Finds the cheapest model to train and to serve, for loads, prices and rules.

The law is fitted to simulated runs whose true law is known, and resampled. Servers come
from the fit of public tables, with draws of its posterior. Each load is solved for a
loss and for a budget, and compared with the compute optimum (Hoffmann et al. 2022) and
with the optimum for 2 N operations per token (Sardana et al. 2024). Servers of a few
sizes are simulated, with requests that arrive at random, to check their largest loads.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments import lab
from experiments.decisions.total_cost import drawing
from experiments.decisions.total_cost.config import CONFIGS, Config, parse_traffic
from experiments.decisions.total_cost.simulated import simulate_goodput
from experiments.decisions.total_cost.tables import (
    ClosedForms,
    LoadRows,
    PriceRows,
    Result,
    ServerRows,
    TrafficRows,
)
from scaling import cli, fits
from scaling.calibration import LatencyLimits, load_loops, make_replica
from scaling.costs import find_device
from scaling.laws import (
    CHINCHILLA,
    COEFFICIENTS,
    CONSTANTS,
    Optimum,
    TwoPowers,
    simulate_isoflop_runs,
)
from scaling.plan import (
    DAY_S,
    HOUR_S,
    CostOptimum,
    DesignFamily,
    ServingLadder,
    allocate_budget,
    cheapest_model,
    closed_form_ladder,
    design_ladder,
    ladder_cost,
    law_two_powers,
    lifetime_flops,
    parse_offer,
    total_cost,
    total_cost_spread,
)

LOSS = "loss"
BUDGET = "budget"


class StudySetting(NamedTuple):
    """What all parts of a run share."""

    config: Config
    powers: TwoPowers
    """Law of the fit."""
    laws: list[TwoPowers]
    """Laws of its resamples."""
    sizes: cli.ServedSizes
    flop_cost: float
    """USD of an operation in training."""

    @property
    def aims(self) -> dict[str, dict[str, float]]:
        """Arguments of `total_cost` by aim."""
        c = self.config
        return {
            LOSS: {"flop_cost": self.flop_cost, "target_loss": c.target_loss},
            BUDGET: {"flop_cost": self.flop_cost, "budget": c.budget_usd},
        }

    def load(self, rate_per_s: float) -> cli.ServedLoad:
        """Returns the load of a rate."""
        c = self.config
        duration_s = c.days * DAY_S
        return cli.ServedLoad(c.prompt_tokens, c.answer_tokens, rate_per_s, duration_s)


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Solves all loads and prices; servers of some sizes are simulated."""
    progress.show("fit of the law")
    data = simulate_isoflop_runs(config.num_runs, seed=config.seed)
    fit = fits.fit(CHINCHILLA, data)
    fit = fits.bootstrap(fit, data, num_resamples=config.num_draws, seed=config.seed)
    laws = [
        law_two_powers(
            CHINCHILLA, dict(zip(CHINCHILLA.coefficients, x.tolist(), strict=True))
        )
        for x in fit.sampled()
    ]
    powers = law_two_powers(CHINCHILLA, fit.coefficients)
    offer = parse_offer(config.offer)
    assert offer.usd_per_hour is not None
    flop_cost = offer.usd_per_hour / (HOUR_S * offer.flops_per_s * config.mfu)
    largest = max(
        cheapest_model(powers, config.target_loss).num_params,
        allocate_budget(powers, config.budget_usd / flop_cost).num_params,
    )
    progress.show("servers")
    family = DesignFamily(kv_heads=config.kv_heads)
    designs = design_ladder(family, 1.5 * largest, num_sizes=config.num_sizes)
    sizes = cli.serve_designs(
        designs,
        [offer],
        (config.prompt_tokens, config.answer_tokens),
        LatencyLimits(config.first_token_s, config.token_s),
        load_loops(),
        num_draws=config.num_draws,
    )
    setting = StudySetting(config, powers, laws, sizes, flop_cost)
    loads = [
        _solve_load(setting, aim, rate)
        for rate in progress.track(config.rates, "loads", "solving")
        for aim in setting.aims
    ]
    sardana = _sardana_example()
    servers = ServerRows.of(list(_servers(setting, progress)))
    return Result(
        powers=np.array([*powers], float),
        flop_cost=flop_cost,
        zero_load_error=max(_zero_load_error(setting, aim) for aim in setting.aims),
        closed_forms=ClosedForms.of(list(_closed_forms(setting))),
        loads=LoadRows.of(loads),
        traffics=TrafficRows.of(list(_traffics(setting, progress))),
        prices=PriceRows.of(list(_prices(setting))),
        servers=servers,
        simulated_shift=_simulated_shift(setting, servers),
        sardana_params=sardana[0],
        sardana_saved=sardana[1],
    )


def _free_optimum(
    setting: StudySetting, aim: str, inference_tokens: float = 0.0
) -> Optimum:
    """Returns the optimum if each served token takes 2 N operations."""
    c = setting.config
    if aim == LOSS:
        return cheapest_model(
            setting.powers, c.target_loss, inference_tokens=inference_tokens
        )
    flops = c.budget_usd / setting.flop_cost
    return allocate_budget(setting.powers, flops, inference_tokens=inference_tokens)


def _zero_load_error(setting: StudySetting, aim: str) -> float:
    """Returns the largest relative distance from the compute optimum."""
    ladder = setting.sizes.ladders(setting.load(0.0), "usd")[0]
    best = total_cost(setting.powers, ladder, **setting.aims[aim])
    free = _free_optimum(setting, aim)
    return max(abs(x / y - 1) for x, y in zip(best[:3], free, strict=True))


def _closed_forms(setting: StudySetting) -> Iterator[tuple[Any, ...]]:
    """Yields the optima for 2 N operations per token, by ladder and closed form."""
    num_params = setting.sizes.num_params
    for rate in setting.config.rates:
        served = setting.load(rate).num_tokens
        ladder = closed_form_ladder(num_params, served, setting.flop_cost)
        for aim, arguments in setting.aims.items():
            exact = _free_optimum(setting, aim, served)
            # The ladder ends at a 200th of its largest size.
            if exact.num_params < num_params[0]:
                continue
            best = total_cost(setting.powers, ladder, **arguments)
            used = lifetime_flops(exact.num_params, exact.num_tokens, served)
            errors = [x / y - 1 for x, y in zip(best[:3], exact, strict=True)]
            errors.append(best.cost / (used * setting.flop_cost) - 1)
            largest = max(map(abs, errors))
            yield aim, served, best.num_params, exact.num_params, largest


def _solve_load(setting: StudySetting, aim: str, rate: float) -> tuple[Any, ...]:
    """Returns a row of `LoadRows`."""
    load = setting.load(rate)
    ladders = setting.sizes.ladders(load, "usd")
    arguments = setting.aims[aim]
    best = total_cost(setting.powers, ladders[0], **arguments)
    spread = total_cost_spread(setting.laws, ladders[1:], **arguments)
    if spread is None:
        raise ValueError(f"{rate=:g} has no draw with an optimum for a {aim}")
    joules = setting.sizes.ladders(load, "joules")[0]
    truth = law_two_powers(CHINCHILLA, COEFFICIENTS)
    whole_ladder = setting.sizes.ladders(load, "usd", is_whole=True)[0]
    try:
        whole_params = total_cost(setting.powers, whole_ladder, **arguments).num_params
    except ValueError:  # whole servers take more than the budget
        whole_params = math.nan
    return (
        *(aim, rate, best.num_params, *spread.num_params),
        *(best.num_tokens, *spread.num_tokens, best.loss, *spread.loss),
        *(best.cost, *spread.cost, best.serving_cost),
        float(ladder_cost(joules, best.num_params)),
        total_cost(truth, ladders[0], **arguments).num_params,
        whole_params,
        *_excess(setting, ladders[0], best, load.num_tokens),
    )


def _excess(
    setting: StudySetting, ladder: ServingLadder, best: CostOptimum, num_tokens: float
) -> Iterator[float]:
    """Yields the costs of the closed forms of a loss over the best, minus 1."""
    for served in (0.0, num_tokens):
        model = cheapest_model(setting.powers, best.loss, inference_tokens=served)
        training = 6 * setting.flop_cost * model.num_params * model.num_tokens
        cost = training + float(ladder_cost(ladder, model.num_params))
        yield cost / best.cost - 1


def _traffics(
    setting: StudySetting, progress: lab.Progress
) -> Iterator[tuple[Any, ...]]:
    """Yields rows of `TrafficRows` at the largest rate, for a loss."""
    c = setting.config
    rate = max(c.rates)
    for text in progress.track(c.traffics, "kinds of requests", "solving"):
        traffic = parse_traffic(text)
        sizes = cli.serve_designs(
            setting.sizes.designs,
            [parse_offer(c.offer)],
            (traffic.prompt_tokens, traffic.answer_tokens),
            LatencyLimits(traffic.first_token_s, traffic.token_s),
            load_loops(),
        )
        load = cli.ServedLoad(*traffic[:2], rate, c.days * DAY_S)
        ladder = sizes.ladders(load, "usd")[0]
        best = total_cost(setting.powers, ladder, **setting.aims[LOSS])
        closed = cheapest_model(
            setting.powers, c.target_loss, inference_tokens=load.num_tokens
        )
        # Operations of 2 N per token, over those that the price of serving buys.
        paid = best.serving_cost / (setting.flop_cost * c.mfu)
        used = 2 * best.num_params * load.num_tokens / paid
        share = best.serving_cost / best.cost
        yield (
            *(text, rate, best.num_params, closed.num_params, best.cost, share, used),
            *_excess(setting, ladder, best, load.num_tokens),
        )


def _prices(setting: StudySetting) -> Iterator[tuple[Any, ...]]:
    """Yields the best size by price of serving, at the middle load."""
    rates = setting.config.rates
    ladder = setting.sizes.ladders(setting.load(rates[len(rates) // 2]), "usd")[0]
    for factor in setting.config.price_factors:
        scaled = ladder._replace(cost=ladder.cost * factor)
        for aim, arguments in setting.aims.items():
            best = total_cost(setting.powers, scaled, **arguments)
            yield aim, factor, best.num_params, best.loss, best.cost


def _servers(
    setting: StudySetting, progress: lab.Progress
) -> Iterator[tuple[Any, ...]]:
    """Yields rows of `ServerRows`: the cheapest kind of server of each size."""
    c = setting.config
    sizes = setting.sizes
    load = setting.load(1.0)
    costs = sizes.costs(load, "usd")
    usable = np.flatnonzero(np.isfinite(costs[0].min(axis=1)))
    logs = np.log(sizes.num_params[usable])
    simulated = {
        int(usable[np.argmin(np.abs(logs - math.log(x)))]) for x in c.simulated_sizes
    }
    for place in progress.track(usable.tolist(), "servers", "simulating"):
        kind = int(costs[0, place].argmin())
        rates = sizes.goodput.requests_per_s[:, place, kind]
        size = sizes.num_params[place]
        degree = sizes.kinds[kind].num_devices
        tokens = (c.prompt_tokens + c.answer_tokens) * rates[0]
        peak = sizes.kinds[kind].offer.flops_per_s * degree
        drawn = np.array([math.nan])
        if place in simulated:
            drawn = _simulate(setting, place, kind)
        yield (
            *(size, degree, sizes.goodput.concurrency[0, place, kind], rates[0]),
            *np.quantile(rates[1:], [0.05, 0.95]),
            costs[0, place, kind] / load.num_requests * 1e3,
            sizes.request_joules[0, place, kind],
            2 * size * tokens / peak,
            *(float(np.median(drawn)), float(drawn.min()), float(drawn.max())),
        )


def _simulate(
    setting: StudySetting, place: int, kind: int
) -> Float[np.ndarray, " draws"]:
    """Simulates the largest load of a server."""
    c = setting.config
    sizes = setting.sizes
    replica = sizes.kinds[kind]
    server = make_replica(
        sizes.designs[place].model,
        find_device(replica.offer.name),
        replica.num_devices,
        prompt_tokens=c.prompt_tokens,
        answer_tokens=c.answer_tokens,
    )
    concurrency = float(sizes.goodput.concurrency[0, place, kind])
    return simulate_goodput(
        dataclasses.replace(server, concurrency=concurrency),
        LatencyLimits(c.first_token_s, c.token_s),
        float(sizes.goodput.requests_per_s[0, place, kind]),
        num_draws=c.num_simulated_draws,
        seed=c.seed,
    )


def _simulated_shift(setting: StudySetting, servers: ServerRows) -> float:
    """Returns the largest change of N if servers take the simulated loads."""
    ran = servers.at(servers.simulated_per_s > 0)
    if not len(ran):
        return math.nan
    logs = np.log(ran.requests_per_s / ran.simulated_per_s)
    sizes = np.log(setting.sizes.num_params)
    factors = np.exp(np.interp(sizes, np.log(ran.num_params), logs))
    shifts = []
    for rate in setting.config.rates:
        ladder = setting.sizes.ladders(setting.load(rate), "usd")[0]
        corrected = ladder._replace(cost=ladder.cost * factors)
        for arguments in setting.aims.values():
            before, after = (
                total_cost(setting.powers, x, **arguments).num_params
                for x in (ladder, corrected)
            )
            shifts.append(abs(after / before - 1))
    return max(shifts)


def _sardana_example() -> tuple[float, float]:
    """Returns the best size to serve 2e12 tokens at the quality of a 13B, and savings.

    Source: Sardana et al. 2024, arXiv:2401.00448, section 1.
    """
    constants = CONSTANTS["hoffmann"] | {"alpha": 0.336, "beta": 0.283}
    powers = law_two_powers(CHINCHILLA, constants)
    # The operations whose optimum has 13 billion parameters: N* = G (C/6)^a.
    scale = allocate_budget(powers, 6.0).num_params
    exponent = float(powers.beta / (powers.alpha + powers.beta))
    usual = allocate_budget(powers, 6 * (13e9 / scale) ** (1 / exponent))
    ladder = closed_form_ladder(np.geomspace(1e9, 2e10, 30), 2e12, 1.0)
    best = total_cost(powers, ladder, flop_cost=1.0, target_loss=usual.loss)
    before = lifetime_flops(usual.num_params, usual.num_tokens, 2e12)
    return best.num_params, 1 - best.cost / before


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares with closed forms, and judges order, coverage and servers."""
    yield lab.measured("zero_load", result.zero_load_error)
    closed = result.closed_forms
    yield lab.measured("closed_form", 100 * float(closed.error.max()), num=len(closed))
    yield lab.measured("published_size", result.sardana_params / 1e9)
    yield lab.measured("published_saving", 100 * result.sardana_saved)
    for name, table in (("load", result.loads), ("price", result.prices)):
        rises = [
            float(np.max(sizes[1:] / sizes[:-1] - 1))
            for aim in (LOSS, BUDGET)
            if (sizes := table.where(aim=aim).num_params).size > 1
        ]
        yield lab.measured("never_rises", max(rises), quantity=name)
    loads = result.loads
    true_params = loads.true_params
    is_inside = (loads.params_low <= true_params) & (true_params <= loads.params_high)
    yield lab.measured("coverage", float(is_inside.mean()), num=len(loads))
    ran = result.servers.at(result.servers.simulated_per_s > 0)
    if len(ran):
        is_near = (ran.simulated_per_s >= ran.low_per_s) & (
            ran.simulated_per_s <= ran.high_per_s
        )
        ratios = ran.simulated_per_s / ran.requests_per_s
        yield lab.measured(
            "simulated",
            float(is_near.mean()),
            num=len(ran),
            low=float(ratios.min()),
            high=float(ratios.max()),
        )
        yield lab.measured("simulated_shift", 100 * result.simulated_shift)


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns the tables, and the largest rise of N if whole servers are paid."""
    whole_params = result.loads.where(aim=LOSS).whole_params
    rise = (
        float(np.nanmax(whole_params[1:] / whole_params[:-1] - 1))
        if whole_params.size > 1
        else 0.0
    )
    words = "never rises with the rate" if rise <= 0 else "rises once or more"
    text = (
        f"If whole servers are paid, the best N {words}: at most by {100 * rise:.3g} % "
        "from one rate to the next."
    )
    return [*lab.sheets(result), lab.paragraph("Whole servers", text)]


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    drawing.plot,
    claims,
    summary,
    panels=lab.Panels(2, 2, 3.4),
)
