"""Serves one load at many rates by several systems, and finds what they sustain."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.plotting import style
from experiments.serving.latency_vs_rate import settings
from experiments.serving.latency_vs_rate.settings import Machine, System
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs, interface, static_batching
from jaxkv.simulation import (
    Capacity,
    Cost,
    SimulationMember,
    SimulationResult,
    contiguous,
    driver,
)
from jaxkv.workloads import Curve, Load, arrivals, lengths, load_curves
from jaxkv.workloads.load_curves import load as load

PATIENCE = 0.25
PATIENCE_S = 300.0
"""Time after the last request, as a share of that in which they come, and at least in
seconds. Who is not answered by then counts with the time waited so far: a lower bound,
but of those who wait so long the latency is far beyond what is drawn."""
MAX_SLOTS = 256
"""Sequences at once at most: vLLM's default."""
HEAD = 16
"""Requests at the head of the queue that a policy sees."""
BOUNDS = (0.1, 0.9)
"""Normalised latencies between which published curves were compared, s a token."""
BOUND = 0.5
"""Where one number has to do."""

type Row = dict[str, Any]


class Setting(NamedTuple):
    """What is served by whom.

    Attributes:
      server: model and GPUs.
      law: their distribution of lengths.
      samples: sequences of each request.
      spared: how much longer the paged pool is than the memory allows, for what its
        sequences share beyond their prompts.
    """

    server: Machine
    law: lengths.Pair
    samples: int = 1
    spared: float = 1.0

    def slots(self, system: System) -> int:
        """Sequences that run at once at most, with ample room above the mean."""
        mean = self.law.output.mean
        shape = getattr(self.law.output, "shape", math.inf)
        # A request is met in proportion to how long it runs: E[O^2] / E[O].
        seen = mean * (1 + 1 / shape)
        prompt = self.law.prompt.mean
        each = {
            "FasterTransformer": float(settings.MAX_LENGTH),
            "paged": (prompt + seen / 2) / self.spared,
        }.get(system, prompt + seen)
        wanted = 1.0 if system == "FasterTransformer" else 1.75
        wanted *= self.server.num_places / each
        # A request needs room for all of its sequences.
        return max(min(MAX_SLOTS, 8 * math.ceil(wanted / 8)), 8, self.samples)


def serve(
    setting: Setting,
    requests: Load,
    rates: Mapping[System, Sequence[float]],
    progress: Progress = QUIET,
) -> list[Row]:
    """Serves the load by every system at its rates.

    Systems with contiguous memory are mapped together, as are the rates of each.
    """
    rows = []
    cost = settings.cost(setting.server)
    for kind in ("FasterTransformer",), settings.ORCAS, ("paged",):
        asked = [(system, rate) for system in kind for rate in rates.get(system, ())]
        if not asked or progress.stopped:
            continue
        groups = setting.samples if kind == ("paged",) else 1
        slots = max(setting.slots(system) for system, _ in asked)
        served = driver.simulate(
            driver.stack([member(setting, requests, *x, cost, groups) for x in asked]),
            max_slots=slots,
            max_samples=groups,
            # Static batches take as many at once as there are slots.
            head=None if kind == ("FasterTransformer",) else min(HEAD, slots),
            until_s=requests.seconds + max(PATIENCE * requests.seconds, PATIENCE_S),
            progress=progress,
        )
        if not progress.stopped:  # or else they were not served to the end
            rows += [
                {"system": system, "rate_per_s": float(rate)}
                | _row(served, i, requests.at(rate), setting.samples, groups)
                for i, (system, rate) in enumerate(asked)
            ]
    return rows


def member(
    setting: Setting,
    requests: Load,
    system: System,
    rate: float,
    cost: Cost,
    groups: int,
) -> SimulationMember:
    """What a system serves, in what memory, by which policy.

    Args:
      setting: model, GPUs and sequences of a request.
      requests: the load.
      system: who serves it.
      rate: requests a second.
      cost: of a step.
      groups: sequences that a request may have; with 1 each is one of its own.
    """
    pages = setting.server.num_places // settings.PAGE_SIZE
    plain = SimulationMember(
        workload=requests.at(rate, groups),
        capacity=capacity(pages),
        policy=fcfs.fcfs(),
        cost=cost,
    )
    if system == "paged":
        return plain._replace(capacity=capacity(int(pages * setting.spared)))
    alone = plain._replace(workload=requests.repeated(rate, setting.samples))
    if system == "FasterTransformer":
        return alone._replace(policy=static_batching.static())
    reservation = contiguous.reservation(
        _RULES[system],
        num_leaves=pages,
        leaves_per_region=settings.MAX_LENGTH // settings.PAGE_SIZE,
    )
    return alone._replace(reservation=reservation)


_RULES: Mapping[System, contiguous.Rule] = {
    "Orca (Max)": "max",
    "Orca (Pow2)": "pow2",
    "Orca (Oracle)": "oracle",
}


def capacity(num_pages: int, page_size: int = settings.PAGE_SIZE) -> Capacity:
    """A machine that reads prompts whole and swaps nothing."""
    return Capacity.of(
        num_pages=num_pages,
        page_size=page_size,
        max_length=settings.MAX_LENGTH,
        token_budget=jnp.int32(interface.NO_LIMIT),
    )


def _row(
    served: SimulationResult,
    index: int,
    workload: arrivals.Workload,
    samples: int,
    groups: int,
) -> Row:
    """What became of one member, whose requests have `samples` sequences each."""
    num, each = workload.prompt.shape[0], samples // groups
    arrival_s, finish_s, first_s = (
        x[index][: num * each].reshape(num, each)
        for x in (served.arrival_s, served.finish_s, served.first_s)
    )
    # A request is answered when the last of its sequences is.
    end_s = np.where(np.isnan(finish_s), served.end_s[index], finish_s).max(axis=1)
    normalised_s = (end_s - arrival_s[:, 0]) / np.asarray(workload.output)
    # A lower bound for those that had no token by the end.
    first_s = np.where(np.isnan(first_s), served.end_s[index], first_s)
    did = served.numbers(index)
    return {
        "normalised_s": float(np.mean(normalised_s)),
        "first_s": float(np.mean(first_s - arrival_s)),
        "num_requests": num,
        "answered_share": float(np.mean(~np.isnan(finish_s))),
        **did,
        "batch": did["batch"] / samples,
    }


def explore(
    setting: Setting,
    requests: Load,
    systems: Iterable[System],
    even: Float[np.ndarray, " rates"],
    *,
    num_near: int,
    most: float,
    progress: Progress = QUIET,
) -> list[Row]:
    """Serves a load at even rates, then where a system's latency passes the bounds.

    Args:
      setting: what is served.
      requests: the load.
      systems: who serves it.
      even: the first rates, requests a second; ascending.
      num_near: rates of each further turn.
      most: up to where rates are tried of a system that sustains all even ones.
      progress: hears of it.

    Returns:
      A row for each system and rate, with the turn, and what that took.
    """
    found: list[Row] = []
    rates: dict[System, list[float]] = dict.fromkeys(systems, even.tolist())
    near: set[System] = set()
    for turn in range(3 if num_near else 1):
        began_s = time.perf_counter(), time.process_time()
        rows = serve(setting, requests, rates, progress)
        took = {
            "turn": turn,
            "took_s": time.perf_counter() - began_s[0],
            "processor_s": time.process_time() - began_s[1],
        }
        found += [took | row for row in rows]
        rates = {}
        for system, curve in curves(found).items():
            if system in near:
                continue
            if (curve.latency > BOUNDS[1]).any():
                near.add(system)
                rates[system] = load_curves.between(curve, BOUNDS, num_near).tolist()
            elif curve.rates[-1] < most:
                more = np.linspace(curve.rates[-1], most, num_near + 1)[1:]
                rates[system] = more.tolist()
    return found


def grouped(rows: Iterable[Row], name: str) -> dict[Any, list[Row]]:
    """The rows by a value that they have, in the order in which these appear."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


def curves(rows: list[Row]) -> dict[System, Curve]:
    """Puts the rows of every system in the order of their rates."""
    found = {}
    for system, here in grouped(rows, "system").items():
        pairs = sorted((x["rate_per_s"], x["normalised_s"]) for x in here)
        found[system] = Curve(*np.array(pairs, float).T)
    return found


def sustained(rows: list[Row]) -> dict[System, load_curves.Sustained]:
    """How much load each system sustains, where one number has to do."""
    return {name: load_curves.at(x, BOUND) for name, x in curves(rows).items()}


def told(rows: list[Row]) -> list[Row]:
    """What each system sustains, for JSON."""
    return [
        {"system": system, "relation": found.relation, "rate_per_s": found.rate}
        for system, found in sustained(rows).items()
    ]


def draw(ax: Any, rows: list[Row], title: str) -> None:
    """Draws latencies against rates."""
    for system, curve in curves(rows).items():
        style.curve(ax, *curve, system, system, markersize=3.5)
    style.titled(ax, title, "load [requests/s]", "latency [s/token]", ylim=(0, 1))
