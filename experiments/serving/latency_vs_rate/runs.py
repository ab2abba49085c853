"""Simulates a load at many rates with several systems, and finds sustained loads."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments import lab
from experiments.serving.latency_vs_rate import settings
from experiments.serving.latency_vs_rate.settings import Machine, System
from jaxkv import scheduling, simulation
from jaxkv.scheduling import NO_LIMIT
from jaxkv.simulation import Capacity, Cost, Rule, SimulationMember, SimulationResult
from jaxkv.workloads import (
    LatencyCurve,
    Load,
    Pair,
    SustainedRate,
    Workload,
    choose_rates,
    sustained_rate,
)
from jaxkv.workloads import draw_load as draw_load

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PATIENCE = 0.25
PATIENCE_S = 300.0
"""Simulated time after the last arrival, as a share of the arrival time and in seconds
at least. Requests without an answer by then count with the elapsed time, a lower bound;
their latency is far above the plotted range."""
MAX_SLOTS = 256
"""Largest batch, vLLM's default."""
HEAD_SIZE = 16
"""Waiting requests that a policy sees."""
LATENCY_RANGE = (0.1, 0.9)
"""Normalised latencies in s/token between which published curves were compared."""
LATENCY_BOUND = 0.5
"""Normalised latency in s/token at which sustained loads are compared."""


class Setting(NamedTuple):
    """A model, its GPUs and its requests.

    Attributes:
      server: model and GPUs.
      law: distribution of lengths.
      samples: sequences of each request.
      pool_factor: size of the paged pool over the memory, at least 1; accounts for
        pages that sequences share beyond their prompts.
    """

    server: Machine
    law: Pair
    samples: int = 1
    pool_factor: float = 1.0

    def slots(self, system: System) -> int:
        """Returns the number of slots of a system, with a margin above the mean."""
        mean = self.law.output.mean
        shape = getattr(self.law.output, "shape", math.inf)
        # Running requests are length-biased: E[O^2] / E[O].
        running_mean = mean * (1 + 1 / shape)
        prompt = self.law.prompt.mean
        places = {
            "FasterTransformer": float(settings.MAX_LENGTH),
            "paged": (prompt + running_mean / 2) / self.pool_factor,
        }.get(system, prompt + running_mean)
        wanted = 1.0 if system == "FasterTransformer" else 1.75
        wanted *= self.server.num_places / places
        # A request needs room for all of its sequences.
        return max(min(MAX_SLOTS, 8 * math.ceil(wanted / 8)), 8, self.samples)


def serve_at_rates(
    setting: Setting,
    requests: Load,
    rates: Mapping[System, Sequence[float]],
    progress: lab.Progress = lab.QUIET,
) -> list[lab.Row]:
    """Simulates the load with every system at its rates.

    Systems with contiguous memory, and the rates of each system, are vectorised.
    """
    rows = []
    cost = settings.server_cost(setting.server)
    for kind in ("FasterTransformer",), settings.ORCAS, ("paged",):
        cases = [(system, rate) for system in kind for rate in rates.get(system, ())]
        if not cases or progress.stopped:
            continue
        groups = setting.samples if kind == ("paged",) else 1
        slots = max(setting.slots(system) for system, _ in cases)
        served = simulation.simulate(
            simulation.stack(
                [make_member(setting, requests, *x, cost, groups) for x in cases]
            ),
            max_slots=slots,
            max_samples=groups,
            # A static batch is as large as the number of slots.
            head=None if kind == ("FasterTransformer",) else min(HEAD_SIZE, slots),
            until_s=requests.seconds + max(PATIENCE * requests.seconds, PATIENCE_S),
            progress=progress,
        )
        if not progress.stopped:  # otherwise requests are unanswered
            rows += [
                {"system": system, "rate_per_s": float(rate)}
                | _row(served, i, requests.at(rate), setting.samples, groups)
                for i, (system, rate) in enumerate(cases)
            ]
    return rows


def make_member(
    setting: Setting,
    requests: Load,
    system: System,
    rate: float,
    cost: Cost,
    groups: int,
) -> SimulationMember:
    """Returns the simulated machine of a system at a rate.

    Args:
      setting: model, GPUs and sequences of a request.
      requests: the load.
      system: the system.
      rate: requests/s.
      cost: cost model of a step.
      groups: sequences per request; 1 simulates each sequence as a request.
    """
    pages = setting.server.num_places // settings.PAGE_SIZE
    plain = SimulationMember(
        workload=requests.at(rate, groups),
        capacity=pool_capacity(pages),
        policy=scheduling.fcfs(),
        cost=cost,
    )
    if system == "paged":
        return plain._replace(capacity=pool_capacity(int(pages * setting.pool_factor)))
    single = plain._replace(workload=requests.repeated(rate, setting.samples))
    if system == "FasterTransformer":
        return single._replace(policy=scheduling.static())
    reservation = simulation.reservation(
        _RULE_OF_SYSTEM[system],
        num_leaves=pages,
        leaves_per_region=settings.MAX_LENGTH // settings.PAGE_SIZE,
    )
    return single._replace(reservation=reservation)


_RULE_OF_SYSTEM: Mapping[System, Rule] = {
    "Orca (Max)": "max",
    "Orca (Pow2)": "pow2",
    "Orca (Oracle)": "oracle",
}


def pool_capacity(num_pages: int, page_size: int = settings.PAGE_SIZE) -> Capacity:
    """Returns a capacity without limits on prefill rows, and without swap space."""
    return Capacity.of(
        num_pages=num_pages,
        page_size=page_size,
        max_length=settings.MAX_LENGTH,
        token_budget=jnp.int32(NO_LIMIT),
    )


def _row(
    served: SimulationResult,
    index: int,
    workload: Workload,
    samples: int,
    groups: int,
) -> lab.Row:
    """Returns metrics of one member, whose requests have `samples` sequences each."""
    num = workload.prompt.shape[0]
    group_size = samples // groups
    arrival_s, finish_s, first_s = (
        x[index][: num * group_size].reshape(num, group_size)
        for x in (served.arrival_s, served.finish_s, served.first_s)
    )
    # A request is answered when its last sequence is.
    end_s = np.where(np.isnan(finish_s), served.end_s[index], finish_s).max(axis=1)
    normalised_s = (end_s - arrival_s[:, 0]) / np.asarray(workload.output)
    # A lower bound for requests without a first token.
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


def explore_rates(
    setting: Setting,
    requests: Load,
    systems: Iterable[System],
    even: Float[np.ndarray, " rates"],
    *,
    num_near: int,
    max_rate: float,
    progress: lab.Progress = lab.QUIET,
) -> list[lab.Row]:
    """Simulates a load at even rates, then where latency crosses the bounds.

    Args:
      setting: model, GPUs and requests.
      requests: the load.
      systems: the systems.
      even: first rates in requests/s; ascending.
      num_near: rates of each further turn.
      max_rate: highest rate for a system that sustains all even rates.
      progress: receives progress.

    Returns:
      A row per system and rate, with the turn and its simulation time.
    """
    all_rows: list[lab.Row] = []
    rates: dict[System, list[float]] = dict.fromkeys(systems, even.tolist())
    near: set[System] = set()
    for turn in range(3 if num_near else 1):
        began_s = time.perf_counter(), time.process_time()
        rows = serve_at_rates(setting, requests, rates, progress)
        took = {
            "turn": turn,
            "took_s": time.perf_counter() - began_s[0],
            "processor_s": time.process_time() - began_s[1],
        }
        all_rows += [took | row for row in rows]
        rates = {}
        for system, curve in latency_curves(all_rows).items():
            if system in near:
                continue
            if (curve.latency > LATENCY_RANGE[1]).any():
                near.add(system)
                rates[system] = choose_rates(curve, LATENCY_RANGE, num_near).tolist()
            elif curve.rates[-1] < max_rate:
                more = np.linspace(curve.rates[-1], max_rate, num_near + 1)[1:]
                rates[system] = more.tolist()
    return all_rows


def group_rows(rows: Iterable[lab.Row], name: str) -> dict[Any, list[lab.Row]]:
    """Groups rows by a value, in order of first occurrence."""
    groups: dict[Any, list[lab.Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def latency_curves(rows: list[lab.Row]) -> dict[System, LatencyCurve]:
    """Returns latency against rate for each system."""
    curves = {}
    for system, selected in group_rows(rows, "system").items():
        pairs = sorted((x["rate_per_s"], x["normalised_s"]) for x in selected)
        curves[system] = LatencyCurve(*np.array(pairs, float).T)
    return curves


def sustained_loads(rows: list[lab.Row]) -> dict[System, SustainedRate]:
    """Returns the load that each system sustains at `LATENCY_BOUND`."""
    return {
        name: sustained_rate(x, LATENCY_BOUND)
        for name, x in latency_curves(rows).items()
    }


def sustained_rows(rows: list[lab.Row]) -> list[lab.Row]:
    """Returns the load that each system sustains, for JSON."""
    return [
        {"system": system, "relation": load.relation, "rate_per_s": load.rate}
        for system, load in sustained_loads(rows).items()
    ]


def draw_curves(ax: "Axes", rows: list[lab.Row], title: str) -> None:
    """Draws latency against rate."""
    for system, curve in latency_curves(rows).items():
        lab.draw_curve(ax, *curve, system, system, markersize=3.5)
    lab.set_labels(ax, title, "load [requests/s]", "latency [s/token]", ylim=(0, 1))
