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
    found = {(x["model"], x["data"], x["system"]): x for x in capacities(result.loads)}
    for x in RATIOS:
        yield from _more(x, result.loads.where(model=x.model).distinct("data"), found)
    cost = dict(zip(result.chunk.tolist(), result.chunk_cost.tolist(), strict=True))
    for id, size in {"chunks_512": 512, "chunks_2048": 2048}.items():
        yield ours(id, 100 * (cost[size] - 1), tokens=LONG_PROMPT)
    yield ours("tiles", 100 * (cost[257] / cost[256] - 1))


def _ways(rows: Loads, data: str) -> Iterator[Ours]:
    """Table 4; its order does not hang on the GPUs' speed."""
    ttft = dict(zip(rows.system.tolist(), rows.ttft_s.tolist(), strict=True))
    tbt = dict(zip(rows.system.tolist(), rows.tbt_p99_s.tolist(), strict=True))
    mixed, chunks, both = "mixed only", "chunks only", "both"
    rate = rows.where(system=both).rate[0]
    load = f"Both at one rate, {rate:.2f} requests/s, and one budget."
    order = {
        "mixed_first": ttft[mixed] / min(ttft[chunks], ttft[both]),
        "both_sooner": ttft[both] / ttft[chunks],
        "both_shortest": tbt[both] / min(tbt[mixed], tbt[chunks]),
    }
    for id, ratio in order.items():
        yield ours(id, ratio, data=data, load=load)
    for way in (mixed, chunks, both):
        yield ours("ttft", ttft[way], data=data, way=way)
        yield ours("tbt", tbt[way], data=data, way=way)


def _more(x: Ratio, known: list[str], found: dict[Any, Any]) -> Iterator[Ours]:
    """How many times the load of a rival a system sustains, on the better data."""
    rates = {
        data: [
            found.get((x.model, data, system), {}).get(f"{x.objective}_per_s", math.nan)
            for system in (x.system, x.rival)
        ]
        for data in known
        if x.data in ("", data)
    }
    ratios = {
        data: rate / other if other > 0 else math.nan
        for data, (rate, other) in rates.items()
    }
    if ratios:
        data = max(ratios, key=lambda data: np.nan_to_num(ratios[data]))
        rate, other = rates[data]
        words: dict[str, Any] = x._asdict()
        del words["published"]
        words |= {"data": data, "rate": rate, "other": other}
        id = "more" if x.data else "more_on_better"
        yield ours(id, ratios[data], published=x.published, **words)
