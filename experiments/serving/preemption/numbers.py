"""The numbers of giving way: for a program, and as tables for a person."""

from typing import Any

import numpy as np

from experiments.framework import Part, Sheet, units
from experiments.serving.preemption.moving import Moves
from experiments.serving.preemption.results import Result
from experiments.serving.preemption.serving import Servings


def metrics(result: Result) -> dict[str, Any]:
    """Lists every serving, a row each, and every page size."""
    return {
        "ways": _rows(result.ways),
        "victims": _rows(result.victims),
        "watermarks": _rows(result.watermarks),
        "pools": _rows(result.pools),
        "spaces": _rows(result.spaces),
        "hosts": _rows(result.hosts),
        "moves": [
            {
                "page_size": int(result.moves.page_size[i]),
                "num_tokens": int(result.moves.num_tokens[i]),
                "kv_bytes": int(result.moves.num_bytes[i]),
                "recompute_s": float(result.moves.recompute[i]),
                **{
                    name: float(np.median(getattr(result.moves, name)[i]))
                    for name in ("out_s", "in_s", "host_out_s", "host_in_s")
                },
                "swap_s": float(result.moves.swap[i]),
                "swap_through_host_s": float(result.moves.swap_through_host[i]),
            }
            for i in range(result.moves.page_size.size)
        ],
    }


def summary(result: Result) -> list[Part]:
    """Puts the ways beside each other; parts that were not served are left out."""
    sheets = [
        _ways_sheet(result.ways),
        _victims_sheet(result.victims),
        _watermarks_sheet(result.watermarks),
        _pools_sheet(result.pools, result.ways),
        _spaces_sheet(result.spaces, result.hosts),
        _moves_sheet(result.moves),
    ]
    return [sheet for sheet in sheets if sheet.rows]


def _rows(servings: Servings) -> list[dict[str, Any]]:
    rows = []
    for i in range(servings.name.size):
        row = {name: column[i] for name, column in servings._asdict().items()}
        for name in ("duration_s", "mean_latency_s", "p95_latency_s"):
            row[name] = float(np.median(row[name]))
        row["num_fallbacks"] = servings.num_fallbacks[i]
        row["recomputed_share"] = servings.recomputed_share[i]
        rows.append({name: np.asarray(value).item() for name, value in row.items()})
    return rows


def _ways_sheet(ways: Servings) -> Sheet:
    rows = [
        (
            row["name"],
            units.cell(row["num_preempted"]),
            units.share(row["recomputed_share"]),
            units.cell(row["pages_moved"]),
            units.cell(row["steps"]),
            "{1:.2f} ({0:.2f}-{2:.2f})".format(
                *np.quantile(ways.duration_s[i], (0, 0.5, 1))
            ),
            f"{row['mean_latency_s']:.2f} / {row['p95_latency_s']:.2f}",
            units.cell(row["num_different"]),
        )
        for i, row in enumerate(_rows(ways))
    ]
    heads = ("way", "gave way", "computed again", "pages moved", "steps")
    heads = (*heads, "seconds", "mean / p95 latency, s", "other answers")
    note = title = ""
    if rows:
        requests = f"{ways.duration_s.shape[1]} servings each, alternating"
        note = (
            f"Seconds: median (lowest-highest) of {requests}. Pages moved: out and "
            "back. Hold new: nobody new is let in until all who gave way are done."
        )
        title = f"a pool of {ways.pool_pages[-1]} pages, where {ways.pool_pages[0]} "
        title += "would do for all"
    return Sheet(title, heads, rows, note)


def _victims_sheet(victims: Servings) -> Sheet:
    found = _rows(victims)
    rows = [
        (
            str(rule),
            *(
                cell
                for preemption in ("recompute", "swap")
                for row in found
                if (row["victim"], row["preemption"]) == (rule, preemption)
                for cell in (
                    units.cell(row["num_preempted"]),
                    units.share(row["recomputed_share"])
                    if preemption == "recompute"
                    else units.cell(row["pages_moved"]),
                    units.cell(row["steps"]),
                )
            ),
        )
        for rule in dict.fromkeys(victims.victim.tolist())
    ]
    rows = [(*row, *[""] * (7 - len(row))) for row in rows]
    heads = ("victim", "recompute: gave way", "computed again", "steps")
    heads = (*heads, "swap: gave way", "pages moved", "steps")
    return Sheet("who gives way", heads, rows)


def _watermarks_sheet(watermarks: Servings) -> Sheet:
    rows = [
        (
            units.cell(row["watermark"]),
            units.share(row["watermark"] / row["pool_pages"]),
            units.cell(row["num_preempted"]),
            units.share(row["recomputed_share"]),
            units.cell(row["steps"]),
        )
        for row in _rows(watermarks)
    ]
    heads = ("pages kept free", "of the pool", "gave way", "computed again", "steps")
    return Sheet("a watermark at admission, recomputing", heads, rows)


def _pools_sheet(pools: Servings, ways: Servings) -> Sheet:
    need = ways.pool_pages[0] if ways.pool_pages.size else 0
    rows = []
    for num in dict.fromkeys(pools.pool_pages.tolist()):
        pair = [row for row in _rows(pools) if row["pool_pages"] == num]
        if len(pair) == 2:
            again, moved = pair
            rows.append(
                (
                    f"{num:,} ({units.share(num / need)})",
                    units.cell(again["num_preempted"]),
                    units.share(again["recomputed_share"]),
                    units.cell(again["steps"]),
                    units.cell(moved["num_preempted"]),
                    units.cell(moved["pages_moved"]),
                    units.cell(moved["steps"]),
                )
            )
    heads = ("pages in the pool", "recompute: gave way", "computed again", "steps")
    heads = (*heads, "swap: gave way", "pages moved", "steps")
    return Sheet("smaller pools", heads, rows)


def _spaces_sheet(spaces: Servings, hosts: Servings) -> Sheet:
    rows = [
        (
            units.cell(row["swap_pages"]),
            units.cell(row["host_pages"]),
            units.cell(row["num_preempted"]),
            units.cell(row["num_fallbacks"]),
            units.share(row["recomputed_share"]),
            units.cell(row["pages_moved"]),
            units.cell(row["steps"]),
        )
        for servings in (spaces, hosts)
        for row in _rows(servings)
    ]
    heads = ("buffer, pages", "host, pages", "gave way", "found no room")
    heads = (*heads, "computed again", "pages moved", "steps")
    note = "Whoever finds no room in the buffer has its tokens computed again."
    return Sheet("swap space that is too small", heads, rows, note)


def _moves_sheet(moves: Moves) -> Sheet:
    rows = [
        (
            units.cell(int(size)),
            units.seconds(float(moves.recompute[i])),
            units.seconds(float(moves.swap[i])),
            units.seconds(float(moves.swap_through_host[i])),
            *(
                units.seconds(float(np.median(times_s[i])))
                for times_s in (
                    *(moves.out_s, moves.in_s),
                    *(moves.host_out_s, moves.host_in_s),
                )
            ),
        )
        for i, size in enumerate(moves.page_size)
    ]
    heads = ("page size", "recompute", "swap", "swap through host")
    heads = (*heads, "out", "in", "to host", "from host")
    title = note = ""
    if rows:
        title = f"bringing back one request of {moves.num_tokens[0]:,} tokens"
        note = (
            f"Medians of {moves.recompute_s.shape[1]}. "
            f"{units.size(float(moves.num_bytes[0]))} of K and V."
        )
    return Sheet(title, heads, rows, note)
