"""Translations that all begin with the same examples: figure 16, simulated.

LLaMA-13B on one A100 of 40 GB, whose weights and pool are as large as OPT-13B's. With
pages, the full pages of the examples are in the pool once, and read before the load
comes. Orca (Oracle) knows how long every translation will be and reserves as much in
one piece, with a copy of the examples for each, which it reads again each time.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from experiments.framework import Claim, Part, Sheet, judge, units
from experiments.harness import cost_models
from experiments.serving.sharing import groups
from experiments.serving.sharing.counted import (
    HEAD,
    MAX_LENGTH,
    NUM_PLACES,
    PAGE_SIZE,
    capacity,
)
from experiments.serving.sharing.published import PAPER, SPEED_UPS
from jaxkv.progress import Progress
from jaxkv.scheduling import fcfs
from jaxkv.simulation import Cost, Members, Work, contiguous, driver
from jaxkv.workloads import arrivals, lengths, metrics

LAW = lengths.Pair(
    prompt=lengths.LogNormal(mean=28.0, sigma=0.5),
    output=lengths.LogNormal(mean=37.0, sigma=0.5),
    max_prompt=256,
    max_length=512,
)
"""Sentences of WMT16 English to German. Four more examples make a prompt 341 - 80 = 261
tokens longer: a pair has 65. German takes a third more of them than English."""
MAX_SLOTS = 256
"""Sequences at once: vLLM's default."""
RATES = np.round(np.geomspace(4.0, 80.0, 20), 2)
"""Requests per second."""
SECONDS = 120.0
"""Simulated load."""
AT_MOST_S = 0.5
"""Seconds a token at which rates are compared."""
SYSTEMS = ("Orca (Oracle)", "paged")

_GUESSED = (
    "Lengths of sentences are worked out from those of the examples, and step times "
    "are OPT-13B's fit; neither is printed."
)


class Translated(NamedTuple):
    """Translations with a common beginning, an entry for each length of it.

    Attributes:
      prefix_tokens: with which all begin: [prefixes].
      rate: requests per second: [prefixes, rates].
      latency_s: seconds a token, Orca's and ours: [prefixes, systems, rates].
      batch: sequences that ran on average: [prefixes, systems, rates].
      at_most: requests per second at 0.5 s a token: [prefixes, systems].
    """

    prefix_tokens: np.ndarray
    rate: np.ndarray
    latency_s: np.ndarray
    batch: np.ndarray
    at_most: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        """How many times as many requests pages serve: [prefixes]."""
        return self.at_most[:, 1] / self.at_most[:, 0]


class Behind(NamedTuple):
    """A cost of sequences that all attend to so many more tokens than are counted."""

    cost: Cost
    num_tokens: Int32[Array, ""]

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Prices a step."""
        more = work.decode_context + self.num_tokens * work.num_decodes
        return self.cost(work._replace(decode_context=more))


def translate(
    prefixes: tuple[int, ...], seconds: float, seed: int, progress: Progress
) -> Translated:
    """Serves translations at all rates by both systems.

    Args:
      prefixes: tokens with which all prompts begin.
      seconds: of load, simulated.
      seed: of lengths and arrivals.
      progress: sees bars, and may stop; then nothing is told.
    """
    found = []
    for system in SYSTEMS:
        members = [
            _member(system, prefix, rate, seconds, seed)
            for prefix in prefixes
            for rate in RATES.tolist()
        ]
        served = driver.simulate(
            driver.stack(members), max_slots=MAX_SLOTS, head=HEAD, progress=progress
        )
        if progress.stopped:
            return empty()
        num = served.arrival_s.shape[1]
        filled = [driver.fill(x.workload, num) for x in members]
        output = np.stack([np.asarray(x.output) for x in filled])
        latency_s = metrics.normalised_latency_s(
            served.arrival_s, served.finish_s, output
        )
        found.append((latency_s, served.means.batch))
    shape = (len(prefixes), len(RATES))
    latency_s, batch = (
        np.stack([np.reshape(x, shape) for x in each], axis=1)
        for each in zip(*found, strict=True)
    )
    at_most = [
        [metrics.capacity(RATES, curve, at_most_s=AT_MOST_S) for curve in curves]
        for curves in latency_s
    ]
    rate = np.broadcast_to(RATES, shape)
    return Translated(np.array(prefixes), rate, latency_s, batch, np.array(at_most))


def _member(
    system: str, prefix: int, rate: float, seconds: float, seed: int
) -> Members:
    shared = prefix // PAGE_SIZE * PAGE_SIZE if system == "paged" else 0
    num = max(1, round(rate * seconds))
    load = arrivals.open_loop(np.random.default_rng(seed), LAW, rate=rate, num=num)
    load = load._replace(prompt=load.prompt + prefix - shared)
    cost = cost_models.figure_12().cost
    reservation = None
    if system != "paged":
        reservation = contiguous.reservation(
            "oracle",
            num_leaves=NUM_PLACES // PAGE_SIZE,
            leaves_per_region=MAX_LENGTH // PAGE_SIZE,
        )
    return Members(
        workload=load,
        capacity=capacity(NUM_PLACES - shared),
        policy=fcfs.fcfs(),
        cost=Behind(cost, jnp.asarray(shared, jnp.int32)),
        reservation=reservation,
    )


def empty() -> Translated:
    """Nothing served."""
    return Translated(**groups.columns(Translated, []))


def claims(translated: Translated) -> list[Claim]:
    """Holds figure 16 against ours."""
    found = []
    for i, num in enumerate(translated.prefix_tokens.tolist()):
        if num in SPEED_UPS:
            rates = ", ".join(
                f"{name} {rate:.1f}"
                for name, rate in zip(SYSTEMS, translated.at_most[i], strict=True)
            )
            found.append(
                judge(
                    f"translations that begin with the same {num} tokens: rate at "
                    f"{AT_MOST_S} s a token, times that of Orca (Oracle), simulated",
                    source=f"{PAPER}, figure 16",
                    published=SPEED_UPS[num],
                    ours=float(translated.ratio[i]),
                    unit="1",
                    differs=_GUESSED,
                    note=f"Requests per second: {rates}.",
                )
            )
    return found


def table(translated: Translated) -> list[dict[str, Any]]:
    """Lists the rates, a row for each beginning."""
    return [
        {
            "prefix_tokens": int(num),
            "oracle_per_s": float(translated.at_most[i, 0]),
            "paged_per_s": float(translated.at_most[i, 1]),
            "ratio": float(translated.ratio[i]),
            "published_ratio": SPEED_UPS.get(int(num)),
        }
        for i, num in enumerate(translated.prefix_tokens.tolist())
    ]


def summary(translated: Translated) -> list[Part]:
    """Puts ours beside the paper's."""
    if not translated.prefix_tokens.size:
        return []
    rows = [
        (
            f"{row['prefix_tokens']:,} tokens",
            units.rate(row["oracle_per_s"]),
            units.rate(row["paged_per_s"]),
            units.cell(row["ratio"]),
            units.cell(row["published_ratio"]),
        )
        for row in table(translated)
    ]
    heads = ("beginning", "Orca (Oracle)", "paged and shared", "ratio", "paper's")
    title = f"translations/s at {AT_MOST_S} s a token, simulated"
    return [Sheet(title, heads, rows, _GUESSED)]
