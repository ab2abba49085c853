"""What Sarathi-Serve published on reading prompts in chunks, held against ours."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.framework import Claim, Part, Sheet, judge, units
from experiments.serving.chunked_prefill import settings
from experiments.serving.chunked_prefill.runs import Loads, capacity

PAPER = "Agrawal et al. 2024, arXiv:2403.02310"
LONG_PROMPT = 8192
"""Tokens of the prompt that is read in chunks of several sizes."""
CHUNKS = (256, 257, 512, 2048)

TABLE_4 = {
    "openchat": {
        "mixed only": (0.53, 0.68),
        "chunks only": (1.04, 0.17),
        "both": (0.76, 0.14),
    },
    "arxiv": {
        "mixed only": (3.78, 1.38),
        "chunks only": (5.38, 0.20),
        "both": (3.90, 0.17),
    },
}
"""Median time to the first token and P99 time between tokens, seconds."""

_SHEET = (
    "Ours is a roofline of data sheets with lengths by law; theirs was measured on "
    "A100s"
)
_LOAD = f"{_SHEET}, with 128 requests at a rate that the table does not give."


class Ratio(NamedTuple):
    """A published ratio of loads borne.

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


def claims(result: Any) -> list[Claim]:
    """Judges everything; parts that were not simulated are left out."""
    ways = result.ways
    found = []
    for data, table in TABLE_4.items():
        if data in ways.data:
            found += _orderings(ways, data)
            found += _table(ways, data, table)
    return [*found, *_capacities(result.loads), *_chunks(result)]


def _at(ways: Loads, data: str) -> dict[str, Loads]:
    here = ways.data == data
    return {
        name: jax.tree.map(lambda x, name=name: x[here & (ways.system == name)], ways)
        for name in ways.system[here].tolist()
    }


def _orderings(ways: Loads, data: str) -> list[Claim]:
    """What the table says that does not hang on the cards' speed."""
    rows = _at(ways, data)
    ttft = {name: float(x.ttft_s[0]) for name, x in rows.items()}
    tbt = {name: float(x.tbt_p99_s[0]) for name, x in rows.items()}
    said = (
        (
            "mixed only, the first token comes soonest; over the sooner of the others",
            ttft["mixed only"] / min(ttft["chunks only"], ttft["both"]),
        ),
        (
            "both, the first token comes sooner than with chunks alone; ratio",
            ttft["both"] / ttft["chunks only"],
        ),
        (
            "both, the tail between tokens is the shortest; over the shorter other",
            tbt["both"] / min(tbt["mixed only"], tbt["chunks only"]),
        ),
    )
    return [
        judge(
            f"{data}: {claim}",
            source=f"{PAPER}, table 4",
            published=1.0,
            ours=ours,
            unit="1",
            relation="at_most",
            tolerance=0.02,
            note="Both at one rate, "
            f"{float(rows['both'].rate[0]):.2f} requests/s, and one budget.",
        )
        for claim, ours in said
    ]


def _table(
    ways: Loads, data: str, table: dict[str, tuple[float, float]]
) -> list[Claim]:
    rows = _at(ways, data)
    return [
        judge(
            f"{data}, {name}: {what}",
            source=f"{PAPER}, table 4",
            published=published,
            ours=float(getattr(rows[name], field)[0]),
            unit="s",
            differs=_LOAD,
        )
        for name, (ttft, tbt) in table.items()
        for what, field, published in (
            ("median time to the first token", "ttft_s", ttft),
            ("P99 time between tokens", "tbt_p99_s", tbt),
        )
    ]


def _capacities(loads: Loads) -> list[Claim]:
    found = []
    for model, only, objective, ours, rival, published, where in RATIOS:
        there = dict.fromkeys(loads.data[loads.model == model].tolist())
        ratios = {
            data: _ratio(loads, model, data, objective, ours, rival)
            for data in there
            if only in ("", data)
        }
        if not ratios:
            continue
        best = max(ratios, key=lambda data: np.nan_to_num(ratios[data]))
        found.append(
            judge(
                f"{model}: {ours} bears more than {rival} under the {objective} "
                "objective" + ("" if only else ", on the better data"),
                source=f"{PAPER}, {where}",
                published=published,
                ours=ratios[best],
                unit="times",
                differs=f"{_SHEET}.",
                note=f"On {best}: {_said(loads, model, best, objective, ours)} against "
                f"{_said(loads, model, best, objective, rival)} requests/s.",
            )
        )
    return found


def _limit(model: str, objective: str) -> float:
    found = settings.MODELS[model]
    return found.strict_s if objective == "strict" else found.relaxed_s


def _said(loads: Loads, model: str, data: str, objective: str, system: str) -> str:
    return f"{capacity(loads, system, model, data, _limit(model, objective)):.3g}"


def _ratio(
    loads: Loads, model: str, data: str, objective: str, ours: str, rival: str
) -> float:
    limit = _limit(model, objective)
    here, there = (capacity(loads, x, model, data, limit) for x in (ours, rival))
    return here / there if there > 0 else math.nan


def _chunks(result: Any) -> list[Claim]:
    cost = dict(zip(result.chunk.tolist(), result.chunk_cost.tolist(), strict=True))
    extra = {size: 100 * (cost[size] - 1) for size in cost}
    no_tiles = f"{_SHEET}: it has no tiles, and kernels reach the same share always."
    note = f"A prompt of {LONG_PROMPT:,} tokens."
    return [
        judge(
            "chunks of 512 cost at most so much more than the whole prompt",
            source=f"{PAPER}, figure 14",
            published=25.0,
            ours=extra[512],
            unit="%",
            relation="at_most",
            note=note,
        ),
        judge(
            "chunks of 2,048 cost next to nothing",
            source=f"{PAPER}, figure 14",
            published=0.0,
            ours=extra[2048],
            unit="%",
            tolerance=2.0,
            note=note,
        ),
        judge(
            "chunks of 257 cost more than chunks of 256",
            source=f"{PAPER}, section 4.3",
            published=32.0,
            ours=100 * (cost[257] / cost[256] - 1),
            unit="%",
            differs=no_tiles,
        ),
    ]


def capacities(loads: Loads) -> list[dict[str, Any]]:
    """Requests a second that each system bears, a row for each."""
    cases = zip(
        *(loads.model.tolist(), loads.data.tolist(), loads.system.tolist()), strict=True
    )
    return [
        {
            "model": model,
            "data": data,
            "system": system,
            **{
                f"{name}_per_s": capacity(loads, system, model, data, limit)
                for name, limit in (
                    ("strict", settings.MODELS[model].strict_s),
                    ("relaxed", settings.MODELS[model].relaxed_s),
                )
            },
        }
        for model, data, system in dict.fromkeys(cases)
    ]


def metrics(result: Any) -> dict[str, Any]:
    """Lists every load, and the capacities."""
    return {
        "ways": _rows(result.ways),
        "budgets": _rows(result.budgets),
        "capacities": capacities(result.loads),
        "loads": _rows(result.loads),
    }


def _rows(loads: Loads) -> list[dict[str, Any]]:
    return [
        {name: np.asarray(column)[i].item() for name, column in loads._asdict().items()}
        for i in range(len(loads.rate))
    ]


def summary(result: Any) -> list[Part]:
    """Puts ways, budgets and capacities beside each other."""
    heads = ("tokens a step", "requests/s", "first token, median")
    heads = (*heads, "between tokens, median", "P99", "longest")

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        times = ("ttft_s", "tbt_p50_s", "tbt_p99_s", "longest_s")
        return (
            units.cell(row["budget"]),
            f"{row['rate']:.2f}",
            *(units.seconds(row[name]) for name in times),
        )

    ways = [(x["data"], x["system"], *cells(x)) for x in _rows(result.ways)]
    budgets = [cells(x) for x in _rows(result.budgets)]
    bears = [
        (
            *(x["model"], x["data"], x["system"]),
            *(_bound(result.loads, x, x[f"{kind}_per_s"]) for kind in _KEPT),
        )
        for x in capacities(result.loads)
    ]
    model = result.ways.model[0] if result.ways.model.size else ""
    return [
        Sheet(f"four ways to read prompts, {model}", ("data", "way", *heads), ways),
        Sheet(f"chunks, mixed, {model}", heads, budgets),
        Sheet(
            "requests a second that a system bears",
            ("model", "data", "system", *_KEPT),
            bears,
            "P99 time between tokens within the objective: 0.2 and 1 s for Yi-34B, 0.1 "
            "and 0.5 s for Mistral-7B; and a median delay of 2 s at most. Models that "
            "the paper runs in pipeline stages, Llama-2-70B and Falcon-180B, are left "
            "out.",
        ),
    ]


_KEPT = ("strict", "relaxed")


def _bound(loads: Loads, row: dict[str, Any], rate: float) -> str:
    """A capacity; "> " where no rate that was tried is too much."""
    here = (loads.model == row["model"]) & (loads.data == row["data"])
    return f"{'> ' if rate >= loads.rate[here].max() else ''}{rate:.2f}"
