"""How many scheduler steps per second are simulated, in one run and in mapped runs?

Requests with lengths like those of ShareGPT arrive at a simulated OPT-13B at rates up
to its saturation. One run, all runs mapped together, and a scheduler of the same policy
in plain Python run in rotation, each from an idle machine; a row is one round. All of
them record the same step statistics; Python is also timed without them.
"""

import concurrent.futures
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import lab
from experiments.bench.simulate import plain_scheduler
from experiments.bench.simulate.plain_scheduler import SimpleRequest
from experiments.bench.tables import draw_bars
from experiments.harness import draw_lengths
from jaxkv import clock, scheduling, simulation
from jaxkv.simulation import Capacity, Cost, ProgramSizes, SimulationMember, part_size
from jaxkv.simulation import MemberBatch as Runner
from jaxkv.workloads import SHAREGPT, Workload, make_workload
from scaling.costs import LinearCost, figure_12_cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPEED_KEYS = ("steps_per_s", "steps_per_s_vmapped", "steps_per_s_python")
SPEED_NAMES = {
    "": "one run",
    "_vmapped": "all mapped, in parts on all threads",
    "_vmapped_at_once": "all mapped in one call",
    "_python": "plain Python",
    "_python_bare": "plain Python, no statistics",
}
"""Timed systems, by suffix of the names of their rates."""
PAGE_SIZE = 16
MAX_LENGTH = 2048
TOKEN_BUDGET = 2048
NUM_PAGES = 15_728 // PAGE_SIZE
"""Pages of an A100 of 40 GB with OPT-13B.

Source: Kwon et al. 2023, arXiv:2309.06180, table 1."""


class Config(lab.ConfigRecord):
    """Workload and repetitions."""

    num_runs: int = 64
    """Mapped runs, at rates from `min_rate` to `max_rate`."""
    num_steps: lab.PositiveInt = 4000
    """Steps of each run, from an idle machine."""
    min_rate: float = 0.5
    """Lowest rate in requests/s."""
    max_rate: float = 2.2
    """Highest rate in requests/s; the machine serves about 2."""
    max_slots: lab.PositiveInt = 64
    """Sequences that run concurrently."""
    head: lab.PositiveInt = 16
    """Waiting requests visible to the policy."""
    num_python: int = 8
    """Runs in plain Python, spread over the rates."""
    rounds: lab.PositiveInt = 3
    """Turns of every system."""
    seed: int = 0
    """Seed of the requests."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if not 1 <= self.num_python <= self.num_runs:
            raise ValueError(
                f"num_python={self.num_python!r} must be in [1, "
                f"num_runs={self.num_runs!r}]"
            )
        if not 0 < self.min_rate <= self.max_rate:
            raise ValueError(
                f"min_rate={self.min_rate!r} must be in (0, max_rate={self.max_rate!r}]"
            )


CONFIGS = {
    "real": Config(),
    "smoke": Config(num_runs=2, num_steps=150, max_slots=8, num_python=2, rounds=1),
}


def run(config: Config, progress: lab.Progress = lab.QUIET) -> list[dict[str, float]]:
    """Times all systems, round after round; a stopped run has complete rounds."""
    all_members = make_members(config)
    rows = []
    start = time.perf_counter()
    alone = [_runner([all_members[len(all_members) // 2]], config)]
    at_once = [_runner(all_members, config)]
    # All runs, divided into equal parts like in `driver`.
    size = part_size(len(all_members), config.max_slots)
    starts = (min(i, len(all_members) - size) for i in range(0, len(all_members), size))
    parts = [_runner(all_members[i : i + size], config) for i in starts]
    compile_s = time.perf_counter() - start
    spread = np.linspace(0, config.num_runs - 1, config.num_python).round().astype(int)
    serve = _plain([all_members[i] for i in spread], config)
    for index in progress.track(range(config.rounds), "rounds", "rounds"):
        progress.show("one run, then all together")
        for runner in (*alone, *parts, *at_once):
            runner.reset()
        rates = [_rate(_advance, runners) for runners in (alone, parts, at_once)]
        progress.show("plain Python")
        rates += [_rate(serve, accounts) for accounts in (True, False)]
        named = dict(zip(SPEED_NAMES, rates, strict=True))
        rows.append(
            {"round": index}
            | {f"steps_per_s{name}": per_s for name, (per_s, _) in named.items()}
            | {f"steps_per_cpu_s{name}": per_s for name, (_, per_s) in named.items()}
            | {"first_calls_s": compile_s}
        )
    return rows


def make_members(config: Config) -> list[SimulationMember]:
    """Returns one machine per rate, with requests for all of its steps."""
    capacity = Capacity.of(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_length=MAX_LENGTH,
        token_budget=TOKEN_BUDGET,
    )
    # A step takes less than 0.1 s, so no machine runs out of requests.
    num = int(config.max_rate * config.num_steps * 0.1) + 64
    rates = np.linspace(config.min_rate, config.max_rate, config.num_runs)
    policy = scheduling.fcfs()
    cost = figure_12_cost().cost
    loads = [make_load(rate, num, config.seed + i) for i, rate in enumerate(rates)]
    return [SimulationMember(x, capacity, policy, cost) for x in loads]


def make_load(rate: float, num: int, seed: int) -> Workload:
    """Returns Poisson arrivals with lengths like those of ShareGPT."""
    rng = np.random.default_rng(seed)
    lengths = draw_lengths(SHAREGPT, num, MAX_LENGTH, rng)
    mixed = rng.permutation(num)
    arrival_s = np.cumsum(rng.exponential(1 / rate, num))
    return make_workload(arrival_s, lengths.prompt[mixed], lengths.output[mixed])


def _runner(group: list[SimulationMember], config: Config) -> Runner:
    """Returns compiled machines that advance together."""
    bounds = ProgramSizes(config.max_slots, 1, config.head, config.num_steps, False)
    runner = Runner(simulation.stack(group), bounds, 0.0, None)
    runner.start()
    return runner


def _rate(work: Callable[..., float], *args: object) -> tuple[float, float]:
    """Returns steps per second of wall-clock time, and per second of processor time."""
    start = time.perf_counter()
    cpu = time.process_time()
    num = work(*args)
    seconds = time.perf_counter() - start
    cpu_s = time.process_time() - cpu
    return num / seconds, num / cpu_s


def _advance(runners: list[Runner]) -> float:
    """Advances all machines on as many threads as processors; returns their steps."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(Runner.advance, runners))
    return sum(float(runner.num_steps().sum()) for runner in runners)


def _plain(
    all_members: list[SimulationMember], config: Config
) -> Callable[[bool], int]:
    """Returns a function that runs the Python scheduler, and returns its steps."""
    cases = [(to_requests(x.workload), to_price(x.cost)) for x in all_members]
    bounds = plain_scheduler.SchedulerLimits(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        token_budget=TOKEN_BUDGET,
        max_slots=config.max_slots,
        head=config.head,
    )

    def serve(accounts: bool) -> int:
        num = 0
        for workload, cost in cases:
            note = [].append if accounts else None
            served = plain_scheduler.run_scheduler(
                workload, bounds, cost, note, config.num_steps
            )
            num += served.num_steps
        return num

    return serve


def to_requests(workload: Workload) -> list[SimpleRequest]:
    """Converts a workload to requests of the Python scheduler."""
    arrival = np.asarray(workload.arrival, np.int64)
    times = arrival[:, 0] * clock.MICROS_PER_SECOND + arrival[:, 1]
    columns = (times, np.asarray(workload.prompt), np.asarray(workload.output))
    return [
        SimpleRequest(*row) for row in zip(*(x.tolist() for x in columns), strict=True)
    ]


def to_price(cost: Cost) -> plain_scheduler.Price:
    """Converts a cost model to a function for the Python scheduler."""
    assert isinstance(cost, LinearCost)
    prefill, small, large = (
        [float(x) for x in values]
        for values in (cost.prefill, cost.decode, cost.decode_large)
    )
    threshold = float(cost.large)

    def seconds(decodes: int, rows: int, decode_context: int, context: int) -> float:
        if not decodes:
            return prefill[0] + prefill[1] * rows
        base, key, per_decode = small if decodes < threshold else large
        attended = decode_context + context
        return base + key * attended + per_decode * decodes + prefill[1] * rows

    return seconds


def metrics(result: list[dict[str, float]]) -> dict[str, Any]:
    """Returns medians over the rounds, and their ratios."""
    if not result:
        return dict.fromkeys(SPEED_KEYS)
    names = [name for name in result[0] if name != "round"]
    medians = {name: statistics.median(row[name] for row in result) for name in names}
    ratios = [row[SPEED_KEYS[1]] / row[SPEED_KEYS[2]] for row in result]
    return medians | {"ratio": statistics.median(ratios), "rounds": len(result)}


def summary(result: list[dict[str, float]]) -> list[lab.ReportPart]:
    """Tabulates the rates."""
    if not result:
        return []
    numbers = metrics(result)
    lines = []
    for name, label in SPEED_NAMES.items():
        cells = [label]
        for key in ("steps_per_s", "steps_per_cpu_s"):
            rate = numbers[f"{key}{name}"]
            cells += [f"{rate:,.0f}", f"{rate / numbers[f'{key}_python']:.2f}x"]
        lines.append(cells)
    note = (
        f"Medians of {numbers['rounds']} rounds, without compilation and first calls "
        f"({lab.format_seconds(numbers['first_calls_s'])})."
    )
    heads = ["", "steps/s", "over Python", "steps/s of processor", "over Python"]
    return [lab.Sheet("steps of a scheduler in a second", heads, lines, note)]


def plot(ax: "Axes", result: list[dict[str, float]]) -> None:
    """Draws the rates of one run, of mapped runs, and of plain Python."""
    numbers = metrics(result)
    values = [(numbers[name] or 0.0) / 1000 for name in SPEED_KEYS]
    names = ("one run", "all mapped", "plain Python")
    draw_bars(ax, names, values, [f"{x:,.0f}" for x in values])
    title = "Steps of the simulator"
    if values[2]:
        title = f"Mapped runs simulate {values[1] / values[2]:.1f} times as many steps "
        title += "a second as plain Python"
    lab.set_labels(ax, title, "simulated [thousand steps/s]", "")


STUDY = lab.Study(
    CONFIGS,
    list,
    run,
    plot,
    summary=summary,
    metrics=metrics,
    panels=lab.Panels(1, 1, 2.8),
)
