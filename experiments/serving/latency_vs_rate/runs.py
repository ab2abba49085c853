"""Serves one load at many rates by several systems, in simulated time."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.serving.latency_vs_rate import settings
from experiments.serving.latency_vs_rate.settings import Server, System
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs, interface, static_batching
from jaxkv.simulation import Capacity, Cost, Members, Served, contiguous, driver
from jaxkv.workloads import arrivals, lengths

PATIENCE = 0.25
PATIENCE_S = 300.0
"""Time after the last request, as a share of that in which they come, and at least in
seconds. Who is not answered by then counts with the time waited so far: a lower bound,
but of those who wait so long the latency is far beyond what is drawn."""
MAX_SLOTS = 256
"""Sequences at once at most: vLLM's default."""
HEAD = 16
"""Requests at the head of the queue that a policy sees."""

type Row = dict[str, Any]


class Load(NamedTuple):
    """The same requests for every rate, which says only how fast they come.

    Attributes:
      gaps_s: cumulated gaps between requests at 1 request a second.
      tokens: their lengths.
      seconds: in which they come.
    """

    gaps_s: Float[np.ndarray, " requests"]
    tokens: lengths.Lengths
    seconds: float

    def at(self, rate: float, samples: int = 1) -> arrivals.Workload:
        """Those that come within the time, of some sequences each."""
        arrival_s = self.gaps_s / rate
        num = max(1, int(np.searchsorted(arrival_s, self.seconds)))
        return arrivals.make(
            *(arrival_s[:num], self.tokens.prompt[:num], self.tokens.output[:num]),
            samples=samples,
        )

    def repeated(self, rate: float, samples: int) -> arrivals.Workload:
        """The same with every sequence a request of its own, which shares nothing."""
        w = self.at(rate)
        columns = (w.arrival, w.prompt, w.output, w.samples)
        return arrivals.Workload(
            *(jnp.repeat(x, samples, axis=0) for x in columns), clients=w.clients
        )


def load(law: lengths.Pair, most_per_s: float, seconds: float, seed: int) -> Load:
    """Draws requests for all rates up to `most_per_s`."""
    rng = np.random.default_rng(seed)
    # So many that they last, but for a chance of six standard deviations.
    num = most_per_s * seconds
    num = math.ceil(num + 6 * math.sqrt(num) + 1)
    return Load(np.cumsum(rng.exponential(1.0, num)), law.draw(rng, num), seconds)


class Setting(NamedTuple):
    """What is served by whom.

    Attributes:
      server: model and cards.
      law: of lengths.
      samples: sequences of each request.
      spared: how much longer the paged pool is than the memory allows, for what its
        sequences share beyond their prompts.
    """

    server: Server
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
    kinds = ("FasterTransformer",), settings.ORCAS, ("paged",)
    cost = settings.cost(setting.server)
    for kind in kinds:
        here = [(system, rate) for system in kind for rate in rates.get(system, ())]
        if not here or progress.stopped:
            continue
        found = _serve(setting, requests, here, cost, progress)
        if not progress.stopped:  # or else they were not served to the end
            rows += found
    return rows


def _serve(
    setting: Setting,
    requests: Load,
    members: list[tuple[System, float]],
    cost: Cost,
    progress: Progress,
) -> list[Row]:
    """Serves members of one kind."""
    groups = setting.samples if members[0][0] == "paged" else 1
    slots = max(setting.slots(system) for system, _ in members)
    served = driver.simulate(
        driver.stack(
            [member(setting, requests, *each, cost, groups) for each in members]
        ),
        max_slots=slots,
        max_samples=groups,
        # Static batches take as many at once as there are slots.
        head=None if members[0][0] == "FasterTransformer" else min(HEAD, slots),
        until_s=requests.seconds + max(PATIENCE * requests.seconds, PATIENCE_S),
        progress=progress,
    )
    every = range(len(members))
    return [_row(served, i, *members[i], requests, setting, groups) for i in every]


def member(
    setting: Setting,
    requests: Load,
    system: System,
    rate: float,
    cost: Cost,
    groups: int,
) -> Members:
    """What a system serves, in what memory, by which policy.

    Args:
      setting: model, cards and sequences of a request.
      requests: the load.
      system: who serves it.
      rate: requests a second.
      cost: of a step.
      groups: sequences that a request may have; with 1 each is one of its own.
    """
    pages = setting.server.num_places // settings.PAGE_SIZE
    plain = Members(
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


def capacity(num_pages: int) -> Capacity:
    """A machine that reads prompts whole and swaps nothing."""
    return Capacity(
        num_pages=jnp.int32(num_pages),
        page_size=jnp.int32(settings.PAGE_SIZE),
        max_length=jnp.int32(settings.MAX_LENGTH),
        token_budget=jnp.int32(interface.NO_LIMIT),
        max_swap_pages=jnp.int32(0),
    )


def _row(
    served: Served,
    index: int,
    system: System,
    rate: float,
    requests: Load,
    setting: Setting,
    groups: int,
) -> Row:
    """What became of one member."""
    w = requests.at(rate)
    num, each = w.prompt.shape[0], setting.samples // groups
    arrival_s, finish_s, first_s = (
        x[index][: num * each].reshape(num, each)
        for x in (served.arrival_s, served.finish_s, served.first_s)
    )
    # A request is answered when the last of its sequences is.
    end_s = np.where(np.isnan(finish_s), served.end_s[index], finish_s).max(axis=1)
    latency_s = end_s - arrival_s[:, 0]
    means, totals = served.means, served.totals
    steps = max(1, int(totals.steps[index]))
    fed = int(totals.decoded[index] + totals.read[index])
    return {
        "system": system,
        "rate_per_s": float(rate),
        "normalised_s": float(np.mean(latency_s / np.asarray(w.output))),
        "first_s": float(np.nanmean(first_s - arrival_s)),
        "num_requests": num,
        "answered_share": float(np.mean(~np.isnan(finish_s))),
        "batch": float(means.batch[index]) / setting.samples,
        "step_s": float(totals.busy_s[index]) / steps,
        "busy_s": float(totals.busy_s[index]),
        "tokens_share": float(means.tokens[index]),
        "reserved_share": float(means.reserved[index]),
        "internal_share": float(means.internal[index]),
        "external_share": float(means.external[index]),
        "num_preempted": int(totals.preempted[index]),
        "recomputed_share": float(served.recomputed[index].sum()) / max(1, fed),
        "saved_pages_share": float(means.saved_pages[index])
        / max(1e-9, float(means.saved_pages[index] + means.used_pages[index])),
    }
