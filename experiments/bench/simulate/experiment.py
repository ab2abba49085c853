"""How many steps of a scheduler does one simulate in a second, alone and mapped?

Requests of lengths like ShareGPT's come to a simulated OPT-13B at rates up to its
saturation. One run alone, all runs mapped together, and a plain-Python scheduler of the
same policy take turns, from an idle machine each time; a row holds one round. Everyone
keeps the same accounts: Python's is timed without them, too.
"""

import concurrent.futures
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.bench.simulate import plain_scheduler
from experiments.bench.simulate.plain_scheduler import Request
from experiments.bench.tables import draw_bars
from experiments.framework import Part, Sheet, units
from experiments.harness import cost_models, length_distributions
from experiments.plotting import style
from jaxkv import clock, validation
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs
from jaxkv.simulation import Cost, ProgramSizes, SimulationMember, driver, state
from jaxkv.simulation import MemberBatch as Runner
from jaxkv.workloads import Workload, arrivals, lengths

KEYS = ("steps_per_s", "steps_per_s_vmapped", "steps_per_s_python")
EVERYONE = {
    "": "one run",
    "_vmapped": "all mapped, in parts on all threads",
    "_vmapped_at_once": "all mapped at once",
    "_python": "plain Python",
    "_python_bare": "plain Python, no accounts",
}
"""Who is timed: the ends of the names of their rates."""
PAGE_SIZE, MAX_LENGTH, TOKEN_BUDGET = 16, 2048, 2048
NUM_PAGES = 15_728 // PAGE_SIZE
"""An A100 of 40 GB beside OPT-13B.

Source: Kwon et al. 2023, arXiv:2309.06180, table 1.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What is simulated, and how often."""

    num_runs: int = 64
    """Runs that are mapped together, at rates from `min_rate` to `max_rate`."""
    num_steps: int = 4000
    """Steps of each, from an idle machine on."""
    min_rate: float = 0.5
    """Requests per second."""
    max_rate: float = 2.2
    """Requests per second; the machine serves about 2."""
    max_slots: int = 64
    """Sequences that run at once at most."""
    head: int = 16
    """Waiting requests that the policy sees."""
    num_python: int = 8
    """Runs, spread over the rates, that plain Python does."""
    rounds: int = 3
    """Turns that everyone has."""
    seed: int = 0
    """Of the requests."""

    def __post_init__(self) -> None:
        """Refuses what cannot be measured."""
        validation.at_least(self, "num_steps", "max_slots", "head", "rounds")
        if not 1 <= self.num_python <= self.num_runs:
            raise ValueError(
                f"num_python={self.num_python!r} must be in [1, "
                f"num_runs={self.num_runs!r}]"
            )
        if not 0 < self.min_rate <= self.max_rate:
            raise ValueError(
                f"min_rate={self.min_rate!r} must be in (0, max_rate={self.max_rate!r}]"
            )


PANEL_SIZE_INCHES = (6.8, 2.8)

CONFIGS = {
    "real": Config(),
    "smoke": Config(num_runs=2, num_steps=150, max_slots=8, num_python=2, rounds=1),
}


def run(config: Config, progress: Progress = QUIET) -> list[dict[str, Any]]:
    """Times everyone, round after round; ended early, it has whole rounds."""
    everyone, rows = members(config), []
    start = time.perf_counter()
    alone = [_runner([everyone[len(everyone) // 2]], config)]
    at_once = [_runner(everyone, config)]
    # All runs as `driver` divides them, in parts of one size.
    size = driver.part_size(len(everyone), config.max_slots)
    starts = (min(i, len(everyone) - size) for i in range(0, len(everyone), size))
    parts = [_runner(everyone[i : i + size], config) for i in starts]
    compile_s = time.perf_counter() - start
    spread = np.linspace(0, config.num_runs - 1, config.num_python).round().astype(int)
    serve = _plain([everyone[i] for i in spread], config)
    for index in progress.track(range(config.rounds), "rounds", "rounds"):
        progress.show("one run, then all together")
        for runner in (*alone, *parts, *at_once):
            runner.reset()
        rates = [_rate(_advance, runners) for runners in (alone, parts, at_once)]
        progress.show("plain Python")
        rates += [_rate(serve, accounts) for accounts in (True, False)]
        named = dict(zip(EVERYONE, rates, strict=True))
        rows.append(
            {"round": index}
            | {f"steps_per_s{name}": per_s for name, (per_s, _) in named.items()}
            | {f"steps_per_cpu_s{name}": per_s for name, (_, per_s) in named.items()}
            | {"first_calls_s": compile_s}
        )
    return rows


def members(config: Config) -> list[SimulationMember]:
    """One machine for each rate, with requests for all of its steps."""
    capacity = state.Capacity.of(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_length=MAX_LENGTH,
        token_budget=TOKEN_BUDGET,
    )
    # A step takes less than 0.1 s; who has no requests left would do nothing.
    num = int(config.max_rate * config.num_steps * 0.1) + 64
    rates = np.linspace(config.min_rate, config.max_rate, config.num_runs)
    policy, cost = fcfs.fcfs(), cost_models.figure_12().cost
    loads = [load(rate, num, config.seed + i) for i, rate in enumerate(rates)]
    return [SimulationMember(x, capacity, policy, cost) for x in loads]


def load(rate: float, num: int, seed: int) -> Workload:
    """Poisson arrivals, lengths like ShareGPT's."""
    rng = np.random.default_rng(seed)
    drawn = length_distributions.draw(lengths.SHAREGPT, num, MAX_LENGTH, rng)
    mixed = rng.permutation(num)
    arrival_s = np.cumsum(rng.exponential(1 / rate, num))
    return arrivals.make(arrival_s, drawn.prompt[mixed], drawn.output[mixed])


def _runner(group: list[SimulationMember], config: Config) -> Runner:
    """Machines that advance together, compiled."""
    bounds = ProgramSizes(config.max_slots, 1, config.head, config.num_steps, False)
    runner = Runner(driver.stack(group), bounds, 0.0, None)
    runner.start()
    return runner


def _rate(work: Callable[..., float], *args: Any) -> tuple[float, float]:
    """Steps in a second, and in one of the processor's time: all threads, no waits."""
    start, cpu = time.perf_counter(), time.process_time()
    num = work(*args)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    return num / seconds, num / cpu_s


def _advance(runners: list[Runner]) -> float:
    """Advances all, on as many threads as there are processors; gives their steps."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(Runner.advance, runners))
    return sum(float(runner.num_steps().sum()) for runner in runners)


def _plain(everyone: list[SimulationMember], config: Config) -> Callable[[bool], int]:
    """Makes runs of plain Python ready, one after the other; they give their steps."""
    asked = [(requests(x.workload), price(x.cost)) for x in everyone]
    bounds = plain_scheduler.Bounds(
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        token_budget=TOKEN_BUDGET,
        max_slots=config.max_slots,
        head=config.head,
    )

    def serve(accounts: bool) -> int:
        num = 0
        for workload, cost in asked:
            note = [].append if accounts else None
            served = plain_scheduler.serve(
                workload, bounds, cost, note, config.num_steps
            )
            num += served.num_steps
        return num

    return serve


def requests(workload: Workload) -> list[Request]:
    """The same for plain Python."""
    arrival = np.asarray(workload.arrival, np.int64)
    times = arrival[:, 0] * clock.SECOND + arrival[:, 1]
    columns = (times, np.asarray(workload.prompt), np.asarray(workload.output))
    return [Request(*row) for row in zip(*(x.tolist() for x in columns), strict=True)]


def price(cost: Cost) -> plain_scheduler.Price:
    """The same cost for plain Python."""
    assert isinstance(cost, cost_models.Linear)
    prefill, small, large = (
        [float(x) for x in values]
        for values in (cost.prefill, cost.decode, cost.decode_large)
    )
    least = float(cost.large)

    def seconds(decodes: int, rows: int, decode_context: int, context: int) -> float:
        if not decodes:
            return prefill[0] + prefill[1] * rows
        base, key, each = small if decodes < least else large
        attended = decode_context + context
        return base + key * attended + each * decodes + prefill[1] * rows

    return seconds


def metrics(result: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and how they compare."""
    if not result:
        return dict.fromkeys(KEYS)
    names = [name for name in result[0] if name != "round"]
    medians = {name: statistics.median(row[name] for row in result) for name in names}
    ratios = [row[KEYS[1]] / row[KEYS[2]] for row in result]
    return medians | {"ratio": statistics.median(ratios), "rounds": len(result)}


def summary(result: list[dict[str, Any]]) -> list[Part]:
    """Tells the rates, side by side."""
    if not result:
        return []
    found = metrics(result)
    lines = []
    for name, label in EVERYONE.items():
        cells = [label]
        for key in ("steps_per_s", "steps_per_cpu_s"):
            rate = found[f"{key}{name}"]
            cells += [f"{rate:,.0f}", f"{rate / found[f'{key}_python']:.2f}x"]
        lines.append(cells)
    note = (
        f"medians of {found['rounds']} rounds; compiling and first calls, "
        f"{units.seconds(found['first_calls_s'])}, stand apart."
    )
    heads = ["", "steps/s", "over Python", "steps/s of processor", "over Python"]
    return [Sheet("steps of a scheduler in a second", heads, lines, note)]


def plot(ax: Any, result: list[dict[str, Any]]) -> None:
    """Draws the rates of one run, of mapped runs, and of plain Python."""
    found = metrics(result)
    values = [(found[name] or 0.0) / 1000 for name in KEYS]
    names = ("one run", "all mapped", "plain Python")
    draw_bars(ax, names, values, [f"{x:,.0f}" for x in values])
    title = "Steps of the simulator"
    if values[2]:
        title = f"Mapped runs simulate {values[1] / values[2]:.1f} times as many steps "
        title += "a second as plain Python"
    style.titled(ax, title, "simulated [thousand steps/s]", "")
