"""What must be so of prefix caches, what was published, and ours beside it."""

from typing import Any

import numpy as np

from experiments.framework import Claim, Part, Sheet, judge, units
from experiments.serving.prefix_caching.results import Loads, Runs, curve

SGLANG = "Zheng et al. 2024 (SGLang), arXiv:2312.07104"
MOONCAKE = "Mooncake's recording FAST25-release/traces/synthetic_trace.jsonl, counted"
RECORDED = (3993, 121_877)
"""Requests and chunks of that recording."""
KNOWN_SHARE = 0.640
"""Of its chunks, those with which an earlier prompt began, too."""
HALF_A_DIGIT = 0.05
"""To which that share was written down, in points."""

_OTHER_PROMPTS = (
    "Their benchmarks' prompts, and pools as a GPU has them; ours are recorded and "
    "made-up ones, pools of all sizes, one request at a time."
)


def claims(loads: Loads, runs: Runs) -> list[Claim]:
    """Judges what was served; what was not is left out."""
    if not runs.pool.size:
        return []
    found = [
        claim
        for judged in (_whole, _recorded, _below, _theorem)
        for i in range(len(loads.name))
        for claim in judged(loads, runs, i)
    ]
    return found + _sglang(loads, runs)


def _whole(loads: Loads, runs: Runs, i: int) -> list[Claim]:
    rate = whole(loads, runs, i)
    if rate is None:
        return []
    return [
        judge(
            f"{loads.name[i]}: a cache of all pages misses each of them once",
            source="share of pages that stand in an earlier prompt, counted",
            published=100 * float(loads.best[i]),
            ours=100 * rate,
            unit="%",
            tolerance=1e-9,
        )
    ]


def _recorded(loads: Loads, runs: Runs, i: int) -> list[Claim]:
    rate = whole(loads, runs, i)
    if rate is None or (loads.num_requests[i], loads.num_pages[i]) != RECORDED:
        return []
    return [
        judge(
            f"{loads.name[i]}: chunks found by a cache of all pages",
            source=MOONCAKE,
            published=100 * KNOWN_SHARE,
            ours=100 * rate,
            unit="%",
            tolerance=HALF_A_DIGIT,
        )
    ]


def _below(loads: Loads, runs: Runs, i: int) -> list[Claim]:
    rates = [curve(loads, runs, i, order).rate for order in ORDERS]
    rates = np.concatenate(rates)
    if not rates.size:
        return []
    return [
        judge(
            f"{loads.name[i]}: no smaller cache finds more, whatever the order; best",
            source="every distinct page is computed at least once",
            published=100 * float(loads.best[i]),
            ours=100 * float(rates.max()),
            unit="%",
            tolerance=1e-9,
            relation="at_most",
        )
    ]


def _theorem(loads: Loads, runs: Runs, i: int) -> list[Claim]:
    walk = curve(loads, runs, i, "depth_first")
    if not walk.rate.size:
        return []
    return [
        judge(
            f"{loads.name[i]}: depth first finds all there is to find with a pool that "
            f"holds the longest prompt, {walk.pool[0]:,} pages",
            source=f"{SGLANG}, theorem 3.1",
            published=100 * float(loads.best[i]),
            ours=100 * float(walk.rate[0]),
            unit="%",
            tolerance=1e-9,
        )
    ]


def _sglang(loads: Loads, runs: Runs) -> list[Claim]:
    """What was measured there cannot be measured here; ours stands beside it."""
    shares, highest, lowest = [], 0.0, 1.0
    for i in range(len(loads.name)):
        rate = curve(loads, runs, i, "cached_first").rate
        if rate.size:
            shares.append(float((rate / loads.best[i]).mean()))
            highest, lowest = max(highest, rate.max()), min(lowest, rate.min())
    if not shares:
        return []
    common: dict[str, Any] = {"unit": "%", "differs": _OTHER_PROMPTS}
    return [
        judge(
            "who finds most goes first: share of the best hit rate, on average",
            source=f"{SGLANG}, section 6",
            published=96.0,
            ours=100 * float(np.mean(shares)),
            note="Theirs sees all that wait, ours a window of the queue.",
            **common,
        ),
        judge(
            "who finds most goes first: lowest hit rate",
            source=f"{SGLANG}, section 6",
            published=50.0,
            ours=100 * float(lowest),
            relation="at_least",
            **common,
        ),
        judge(
            "who finds most goes first: highest hit rate",
            source=f"{SGLANG}, section 6",
            published=99.0,
            ours=100 * float(highest),
            relation="at_most",
            **common,
        ),
    ]


ORDERS = {
    "depth_first": "depth first",
    "cached_first": "most cached first",
    "fcfs": "in order of arrival",
}
"""Orders, and how they are told."""


def whole(loads: Loads, runs: Runs, i: int) -> float | None:
    """The hit rate of the pool that holds everything; None if it was not served."""
    here = (runs.workload == loads.name[i]) & (runs.pool > loads.num_distinct[i])
    if not here.any():
        return None
    return float(runs.num_cached[here][0] / loads.num_pages[i])


def metrics(loads: Loads, runs: Runs) -> dict[str, Any]:
    """Lists workloads and runs, a row each."""
    total = dict(zip(loads.name.tolist(), loads.num_pages.tolist(), strict=True))
    named = [
        dict(zip(runs._fields, row, strict=True)) for row in zip(*runs, strict=True)
    ]
    return {
        "workloads": [
            {
                "name": str(loads.name[i]),
                "requests": int(loads.num_requests[i]),
                "pages": int(loads.num_pages[i]),
                "distinct_pages": int(loads.num_distinct[i]),
                "longest": int(loads.longest[i]),
                "page_size": int(loads.page_size[i]),
                "best_share": float(loads.best[i]),
            }
            for i in range(len(loads.name))
        ],
        "runs": [
            {
                "workload": str(row["workload"]),
                "order": str(row["order"]),
                "eviction": str(row["eviction"]),
                "pool_pages": int(row["pool"]),
                "hit_share": float(row["num_cached"] / total[str(row["workload"])]),
                "most_delayed": int(row["most_delayed"]),
            }
            for row in named
        ],
    }


def summary(loads: Loads, runs: Runs) -> list[Part]:
    """Makes a table of hit rates for each workload."""
    return [
        _sheet(loads, runs, i)
        for i in range(len(loads.name))
        if (runs.workload == loads.name[i]).any()
    ]


def _sheet(loads: Loads, runs: Runs, i: int) -> Sheet:
    here = runs.workload == loads.name[i]
    evictions = list(dict.fromkeys(runs.eviction[here].tolist()))
    usual = evictions[0]
    kinds = [("depth_first", usual), ("cached_first", usual)]
    kinds += [("fcfs", eviction) for eviction in evictions]
    rows = []
    for pool in np.unique(runs.pool[here]).tolist():
        cells = [f"{pool:,}", units.share(pool / int(loads.num_distinct[i]))]
        for order, eviction in kinds:
            at = here & (runs.pool == pool) & (runs.order == order)
            at &= runs.eviction == eviction
            rate = runs.num_cached[at] / loads.num_pages[i]
            cells.append(units.share(float(rate[0]) if rate.size else None))
        rows.append(cells)
    heads = ["pool, pages", "of distinct", *(ORDERS[k] for k in list(ORDERS)[:2])]
    heads += [f"{ORDERS['fcfs']}, {eviction}" for eviction in evictions]
    late = curve(loads, runs, i, "cached_first").most_delayed
    note = (
        f"{loads.num_requests[i]:,} prompts of {loads.num_pages[i]:,} pages, "
        f"{loads.num_distinct[i]:,} of them distinct, {loads.page_size[i]} tokens each."
    )
    if late.size:
        note += (
            f" Where those that find most go first, someone is served {late.max():,} "
            "places after his turn."
        )
    return Sheet(f"pages found: {loads.name[i]}", heads, rows, note)
