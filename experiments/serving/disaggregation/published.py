"""What DistServe published on splitting the phases, held against ours."""

import math
from collections.abc import Iterator
from typing import Any

from experiments.framework import Ours, beside, ours
from experiments.serving.disaggregation import settings
from experiments.serving.disaggregation.queues import MACHINES, SERVICE_S, Queues
from experiments.serving.disaggregation.runs import Loads, each, goodput, phases
from experiments.serving.disaggregation.settings import APPLICATIONS, EXAMPLE


@beside(__file__).judges
def claims(result: Any) -> Iterator[Ours]:
    """Finds everything; parts that were not simulated are left out."""
    one, both = phases(EXAMPLE, result.alone), goodputs(result)
    here = both[0]
    together, split = here["together_per_card_per_s"], here["split_per_card_per_s"]
    yield ours("example", together, what="both phases on one card")
    yield ours("example", one["prefill"][1], what="prompts alone")
    yield ours("example", one["decode"][1], what="decoding alone")
    coupled = "two cards that read and one that decodes, for each card"
    yield ours("example", split, what=coupled)
    yield ours("more", split / together if together > 0 else math.nan)
    for row in both[1:]:
        yield from _application(row)
    yield from _transfers(result.split)
    yield from _queues(result.queues)


def _application(row: dict[str, Any]) -> Iterator[Ours]:
    together, apart = row["together_per_card_per_s"], row["split_per_card_per_s"]
    x = APPLICATIONS[row["name"]]
    low, high = x.ratio
    if not math.isnan(apart):
        yield ours(
            "application" if low == high else "span",
            apart / together if together > 0 else math.nan,
            published=low,
            name=row["name"],
            where=x.where,
            ratio=f"{low:g}" if low == high else f"{low:g} to {high:g}",
            rates=f"{apart:.3g} against {together:.3g} requests/s for each card, "
            f"{row['placement']}",
        )


def _transfers(split: Loads) -> Iterator[Ours]:
    size = 512 * settings.kv_bytes("opt-66b") / 2**30
    yield ours("kv", size)
    yield ours("need", 10 * size)
    here = split.where(name="chat, 66B")
    if len(here):
        quick, slowest_s = float(here.quick_share.min()), float(here.transfer_s.max())
        link = settings.LINK / 1e9
        yield ours("transfers", quick, link=link, most=1000 * slowest_s)


def _queues(queues: Queues) -> Iterator[Ours]:
    off, known = abs(queues.off), queues.error_s / queues.waiting_s
    for i, machine in enumerate(MACHINES):
        yield ours(
            "queue",
            100 * float(off[i].max()),
            machine=machine,
            low=queues.rate.min(),
            high=queues.rate.max(),
            service=SERVICE_S,
            error=100 * known[i].max(),
        )


def goodputs(result: Any) -> list[dict[str, Any]]:
    """What each application's machines sustain, a row for each."""
    rows = []
    for name in result.alone.distinct("name"):
        split = result.split.where(name=name)
        of = each if name == EXAMPLE else goodput
        apart, placement = math.nan, "-"
        if len(split):
            x = split.rows()[0]
            apart, placement = (
                of(split),
                (
                    "{num_prefill} x {prefill_ways} cards that read and "
                    "{num_decode} x {decode_ways} that decode"
                ).format_map(x),
            )
        rows.append(
            {
                "name": name,
                "together_per_card_per_s": of(
                    result.alone.where(name=name, role="both")
                ),
                "split_per_card_per_s": apart,
                "placement": placement,
            }
        )
    return rows
