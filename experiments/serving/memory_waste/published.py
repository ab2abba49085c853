"""What was published on the memory of serving systems, held against ours."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from experiments.framework import Claim, judge
from experiments.serving.latency_vs_rate import published as latency_vs_rate_published
from experiments.serving.latency_vs_rate.published import STEP, batch_tolerance, by

if TYPE_CHECKING:
    from experiments.serving.memory_waste.experiment import Result

PAPER = latency_vs_rate_published.PAPER

USES = {
    "Orca (Max)": (20.4, 13.3, 57.3, 8.9),
    "Orca (Pow2)": (26.8, 17.9, 13.6, 41.6),
    "Orca (Oracle)": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, None, None, None),
}
"""Per cent of the memory for keys and values: tokens, reservation, internal and
external fragmentation: figure 2. Of the paged system only the first is printed."""
BATCHES = latency_vs_rate_published.BATCHES["12a"]
"""Requests served at once: figure 13a."""
MOST_WASTE = 4.0
"""Per cent that the paged system wastes at most: section 1."""
TIMES = {"Orca (Oracle)": 2.2, "Orca (Max)": 4.3}
"""How many times their requests the paged system serves at once: section 6.2."""

POINTS = 2.0
"""How far an entry of figure 2 may lie off."""
WEIGHTS_SHARE, KV_SHARE = 65.0, 30.0
"""Per cent of the card: section 1 and figure 1."""

_LOAD = (
    "This share needs a load that the system cannot quite bear, and so depends on the "
    "length of a step, of which the paper prints nothing; see the table."
)
_ROUNDING = "What rounding leaves of the buddy allocator's regions counts as external."


def as_text(system: str) -> str:
    """The printed shares of a system."""
    return " / ".join("-" if x is None else f"{x:g}" for x in USES[system])


def claims(result: "Result") -> list[Claim]:
    """Judges all that was simulated."""
    return [*_parts(result), *_uses(result), *_batches(result)]


def _parts(result: "Result") -> Iterator[Claim]:
    yield judge(
        "OPT-13B on an A100 of 40 GB: share of the weights",
        source=f"{PAPER}, section 1 and figure 1",
        published=WEIGHTS_SHARE,
        ours=100 * result.weight_bytes / result.memory_bytes,
        unit="%",
        tolerance=1.0,
    )
    yield judge(
        "OPT-13B on an A100 of 40 GB: share left for keys and values",
        source=f"{PAPER}, figure 1 and table 1",
        published=KV_SHARE,
        ours=100 * result.kv_bytes / result.memory_bytes,
        unit="%",
        relation="at_least",
    )


def _uses(result: "Result") -> Iterator[Claim]:
    # As `memory_waste` has them: tokens, reserved, internal, external.
    kinds = ("token states", "reservation", "internal waste", "external waste and rest")
    for i, name in enumerate(map(str, result.system)):
        found = 100 * result.waste.uses[i].mean(axis=0)
        for kind, published, ours in zip(kinds, USES[name], found, strict=True):
            if published is None:
                continue
            note = _LOAD if name == "paged" else ""
            if kind.startswith("external"):
                note = _ROUNDING
            yield judge(
                f"{by(name)}: {kind}",
                source=f"{PAPER}, figure 2",
                published=published,
                ours=float(ours),
                unit="%",
                tolerance=POINTS,
                note=note,
            )
        if name == "paged":
            # Pages are reserved for one token ahead only, and no page lies outside.
            wasted = found[1:3] / found[:3].sum() * 100
            yield judge(
                "the paged system: waste within the pages in use",
                source=f"{PAPER}, section 1 and figure 2",
                published=MOST_WASTE,
                ours=float(wasted.sum()),
                unit="%",
                relation="at_most",
            )


def _batches(result: "Result") -> Iterator[Claim]:
    batch = dict(zip(map(str, result.system), result.waste.batch.mean(1), strict=True))
    for name, published in BATCHES.items():
        share = batch_tolerance(name)
        yield judge(
            f"OPT-13B, ShareGPT, 2 requests/s: served at once by {by(name)}",
            source=f"{PAPER}, figure 13a",
            published=published,
            ours=float(batch[name]),
            unit="requests",
            tolerance=share * published,
            note=STEP if name == "paged" else "",
        )
    for name, published in TIMES.items():
        yield judge(
            f"OPT-13B, ShareGPT, 2 requests/s: times the requests of {name} at once",
            source=f"{PAPER}, section 6.2",
            published=published,
            ours=float(np.divide(batch["paged"], batch[name])),
            unit="1",
            tolerance=batch_tolerance("paged") * published,
        )
