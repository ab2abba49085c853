"""Giving way at the paper's scale: OPT-13B under chat requests, in simulated time.

Who gives way, and how many pages are kept free against it, decide how much is computed
again. What it costs to move pages instead depends on their size, since every page is a
transfer of its own for K and for V in every layer.
"""

from collections.abc import Mapping
from typing import NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from experiments.serving.latency_vs_rate import runs, settings
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs, victims
from jaxkv.simulation import Members, driver
from jaxkv.workloads import arrivals
from scaling.costs import serving

RATE = 1.9
"""Requests a second: nearly what the memory bears."""
PAGES_RATE = 1.6
"""Where pages of several sizes are compared: large ones bear less."""
NUM_SEEDS = 4
"""Draws of the load under which the latest gives way: so near to what is borne, one
draw of a thousand requests tells little."""
MAX_SLOTS = 96
WATERMARKS = (0, 8, 16, 32, 64, 128)
"""Pages kept free at admission, of 983."""
PREEMPTIONS = ("recompute", "swap", "swap, hold new")
"""What becomes of who gives way; under the last nobody new comes in until all who gave
way are done, as in the paper."""
PAGE_SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
RULES: tuple[victims.Victim, ...] = get_args(victims.Victim.__value__)
BUS = 25e9
"""Bytes a second between a card and its host that PCIe 4 x16 reaches, of 32e9."""
LAUNCH_S = 4e-6
"""What a transfer takes besides: our choice."""


class Simulated(NamedTuple):
    """What became of every way of serving, a row for each."""

    study: np.ndarray
    """victims: who gives way, and watermarks; pages: their size, and what is moved."""
    victim: np.ndarray
    watermark: np.ndarray
    preemption: np.ndarray
    page_size: np.ndarray
    rate: np.ndarray
    """Requests a second."""
    seed: np.ndarray
    """Of their lengths and arrivals."""
    num_preempted: np.ndarray
    recomputed_share: np.ndarray
    """Tokens computed again, of all computed."""
    normalised_s: np.ndarray
    """Seconds a token."""
    moved_bytes: np.ndarray
    """Over the bus, both ways."""

    def where(self, **wanted: object) -> "Simulated":
        """The rows of which all that is so."""
        here = np.ones(len(self.study), bool)
        for name, value in wanted.items():
            here &= np.asarray(getattr(self, name) == value)
        return Simulated(*(column[here] for column in self))


def empty() -> Simulated:
    """Nothing served."""
    kinds = ("U1", "U1", int, "U1", int, float, int, int, *[float] * 3)
    return Simulated(*(np.empty(0, kind) for kind in kinds))


def page_bytes(page_size: int) -> int:
    """K and V of a page in all layers: 13,107,200 bytes for 16 tokens."""
    model = settings.SERVERS["13B"].description
    return int(serving.kv_bytes_per_token(model)) * page_size


def swap_s(page_size: int) -> float:
    """Time to move a page one way: K and V of every layer, one after the other.

    A page of 16 tokens: 80 * 4 us + 13.1 MB / 25 GB/s = 0.84 ms.
    """
    layers = settings.SERVERS["13B"].description.num_layers
    return 2 * layers * LAUNCH_S + page_bytes(page_size) / BUS


def recompute_s(num_tokens: int) -> float:
    """Time to compute tokens again, in a step that others run in, too."""
    return float(settings.cost(settings.SERVERS["13B"]).prefill[1]) * num_tokens


def bring_back_s(num_tokens: int, page_size: int) -> float:
    """Time to move a sequence's pages out and in."""
    return 2 * -(-num_tokens // page_size) * swap_s(page_size)


class Way(NamedTuple):
    """How requests that run out of pages are served; fields as in `Simulated`."""

    study: str
    victim: victims.Victim
    watermark: int
    preemption: str
    page_size: int
    rate: float
    seed: int


def ways(seed: int) -> list[Way]:
    """All that are compared, on the load of a seed; some on those behind it, too."""
    found = [
        Way("victims", rule, mark, "recompute", settings.PAGE_SIZE, RATE, seed + k)
        for rule in RULES
        for k in range(NUM_SEEDS if rule == "latest" else 1)
        for mark in WATERMARKS
    ]
    return found + [
        Way("pages", "latest", 0, preemption, size, PAGES_RATE, seed)
        for preemption in PREEMPTIONS
        for size in PAGE_SIZES
    ]


def measure(num: int, seed: int, progress: Progress = QUIET) -> Simulated:
    """Serves the same requests in every way.

    Args:
      num: requests.
      seed: the first, of their lengths and arrivals.
      progress: hears of it.
    """
    law, asked = settings.DATA["ShareGPT"], ways(seed)
    loads = [
        arrivals.open_loop(np.random.default_rng(way.seed), law, rate=way.rate, num=num)
        for way in asked
    ]
    members = [_member(load, way) for load, way in zip(loads, asked, strict=True)]
    served = driver.simulate(
        driver.stack(members),
        max_slots=MAX_SLOTS,
        head=runs.HEAD,
        progress=progress,
    )
    rows = []
    for i, way in enumerate(asked):
        fed = max(1, int(served.totals.decoded[i] + served.totals.read[i]))
        took_s = served.finish_s[i] - served.arrival_s[i]
        moved = int(served.totals.swapped_pages[i]) * page_bytes(way.page_size)
        rows.append(
            (
                *way,
                served.preempted[i].sum(),
                served.recomputed[i].sum() / fed,
                np.nanmean(took_s / np.asarray(loads[i].output)),
                float(moved),
            )
        )
    return Simulated(*map(np.asarray, zip(*rows, strict=True)))


def _member(load: arrivals.Workload, way: Way) -> Members:
    server = settings.SERVERS["13B"]
    pages = server.num_places // way.page_size
    swaps = way.preemption != "recompute"
    policy = fcfs.fcfs(
        watermark=way.watermark,
        victim=way.victim,
        preemption="swap" if swaps else "recompute",
        hold_new="hold new" in way.preemption,
        stackable=True,
    )
    capacity = runs.capacity(pages)._replace(
        page_size=jnp.int32(way.page_size),
        max_swap_pages=jnp.int32(pages if swaps else 0),
    )
    cost = settings.cost(server)._replace(swap_s=jnp.float32(swap_s(way.page_size)))
    return Members(load, capacity, policy, cost)


TABLE: Mapping[int, tuple[float, float]] = {
    0: (13.1, 0.056),
    8: (8.2, 0.053),
    16: (5.9, 0.052),
    32: (2.8, 0.050),
    64: (1.3, 0.051),
    128: (0.4, 0.056),
}
"""Per cent of all tokens that were computed again, and seconds a token, by the pages
kept free, in an earlier sketch of ours: 1,024 requests at 1.9 a second, 983 pages."""
