"""What Sarathi-Serve published on reading prompts in chunks, held against ours."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from experiments.framework import Ours, beside, ours
from experiments.serving.chunked_prefill.runs import Loads, capacities

LONG_PROMPT = 8192
"""Tokens of the prompt that is read in chunks of several sizes."""
CHUNKS = (256, 257, 512, 2048)
WAYS = ("mixed only", "chunks only", "both")
"""Of table 4."""


class Ratio(NamedTuple):
    """A published ratio of loads sustained.

    Attributes:
      model: which one.
      data: on which; empty for the better.
      objective: strict or relaxed.
      system: whose load.
      rival: over whose.
      published: the ratio.
      where: in the paper.
    """

    model: str
    data: str
    objective: str
    system: str
    rival: str
    published: float
    where: str


_SMALL, _LARGE = "Sarathi (512)", "Sarathi (2,048)"
RATIOS = (
    Ratio("Yi-34B", "openchat", "strict", _SMALL, "vLLM", 3.7, "figure 10"),
    Ratio("Yi-34B", "openchat", "strict", _SMALL, "Orca", 4.0, "figure 10"),
    Ratio("Yi-34B", "openchat", "relaxed", _LARGE, "vLLM", 1.65, "section 5.2"),
    Ratio("Mistral-7B", "openchat", "strict", _SMALL, "vLLM", 3.5, "section 5.2"),
    Ratio("Mistral-7B", "", "strict", _SMALL, "vLLM", 2.6, "abstract"),
)
BOOK = beside(__file__)


@BOOK.judges
def claims(result: Any) -> Iterator[Ours]:
    """Finds everything; parts that were not simulated are left out."""
    for data in BOOK.published("ttft"):
        rows = result.ways.where(data=data)
        if len(rows):
            yield from _ways(rows, data)
    found = capacities(result.loads)
    for x in RATIOS:
        yield from _more(x, found)
    cost = dict(zip(result.chunk.tolist(), result.chunk_cost.tolist(), strict=True))
    for id, size in {"chunks_512": 512, "chunks_2048": 2048}.items():
        yield ours(id, 100 * (cost[size] - 1), tokens=LONG_PROMPT)
    yield ours("tiles", 100 * (cost[257] / cost[256] - 1))


def _ways(rows: Loads, data: str) -> Iterator[Ours]:
    """Table 4; its order does not hang on the GPUs' speed."""
    mixed, chunks, both = (rows.where(system=way) for way in WAYS)
    load = f"Both at one rate, {both.rate[0]:.2f} requests/s, and one budget."
    first, tail = (
        [getattr(way, name)[0] for way in (mixed, chunks, both)]
        for name in ("ttft_s", "tbt_p99_s")
    )
    order = {
        "mixed_first": first[0] / min(first[1:]),
        "both_sooner": first[2] / first[1],
        "both_shortest": tail[2] / min(tail[:2]),
    }
    for id, ratio in order.items():
        yield ours(id, ratio, data=data, load=load)
    for way, ttft_s, tbt_s in zip(WAYS, first, tail, strict=True):
        yield ours("ttft", ttft_s, data=data, way=way)
        yield ours("tbt", tbt_s, data=data, way=way)


def _more(x: Ratio, found: list[dict[str, Any]]) -> Iterator[Ours]:
    """How many times the load of a rival a system sustains, on the better data."""
    rates: dict[str, dict[str, float]] = {}
    for row in found:
        if row["model"] == x.model and x.data in ("", row["data"]):
            here = rates.setdefault(
                row["data"], {x.system: math.nan, x.rival: math.nan}
            )
            here[row["system"]] = row[f"{x.objective}_per_s"]
    ratios = {
        data: here[x.system] / here[x.rival] if here[x.rival] > 0 else math.nan
        for data, here in rates.items()
    }
    if ratios:
        data = max(ratios, key=lambda data: np.nan_to_num(ratios[data]))
        words: dict[str, Any] = x._asdict() | {"data": data}
        words |= {"rate": rates[data][x.system], "other": rates[data][x.rival]}
        yield ours("more" if x.data else "more_on_better", ratios[data], **words)
