"""What a kernel benchmark tells a person: tables of times, and who has none."""

from typing import Any

from experiments.framework import Part, Sheet, units
from pallas_kernels.bench import Ceilings

CLOCKS = {
    "cupti": "Times are those of the kernels alone (CUPTI), caches cold.",
    "wall": "Times are those of calls that are waited for, by the clock on the wall.",
    "queue": "Times are those of calls waited for together: no CUPTI was found.",
}
"""What times mean, by clock."""


def sheets(result: list[dict[str, Any]]) -> list[Part]:
    """Lays out the ceilings, then the times of everyone side by side.

    Args:
      result: of the benchmark.
    """
    head, *rows = result
    ceilings = Ceilings(**head["ceilings"])
    lines = [
        ("copy, read and written", units.size(ceilings.copy_bytes_per_s) + "/s"),
        ("sum, read", units.size(ceilings.read_bytes_per_s) + "/s"),
        ("matrix product", units.flops(ceilings.flops_per_s) + "/s"),
        ("empty call", units.seconds(ceilings.empty_call_s)),
    ]
    note = CLOCKS[ceilings.clock]
    parts: list[Part] = [Sheet(f"ceilings of {head['device']}", ("", ""), lines, note)]
    timed = [row for row in rows if row["seconds"] is not None]
    columns = {
        "time": lambda row: units.seconds(row["seconds"]),
        f"plan / {head['num_layers']}": lambda row: units.seconds(
            row["plan_per_layer_s"]
        ),
        "merge": lambda row: units.seconds(row["merge_s"]),
        "target": lambda row: units.seconds(row["target_s"]),
        "of the floor": lambda row: units.share(row["fraction"]),
        "best peer / it": lambda row: _ratio(row["ratio"]),
        "error": lambda row: f"{row['error']:.1e}",
    }
    # Nobody plans or merges on a CPU: no column for that.
    columns = {
        title: write
        for title, write in columns.items()
        if any(write(row) != "-" for row in timed)
    }
    for name in dict.fromkeys(row["spec"] for row in timed):
        mine = [row for row in timed if row["spec"] == name]
        work = units.size(mine[0]["bytes"]), units.flops(mine[0]["flops"])
        cells = [
            (named(row), *(write(row) for write in columns.values())) for row in mine
        ]
        heads = ("implementation", *columns)
        parts.append(Sheet(f"{name}: {', '.join(work)}", heads, cells))
    absent = _absent(rows)
    if absent:
        parts.append(Sheet("not timed", ("implementation", "shapes", "why"), absent))
    return parts


def named(row: dict[str, Any]) -> str:
    """Writes an implementation with the way it took, where it has several."""
    way = f" ({row['how']})" if row["how"] else ""
    return row["implementation"] + way


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _absent(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Lines of those that have no time: who, on how many shapes, why."""
    reasons: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["seconds"] is None:
            who = row["implementation"], row["note"]
            reasons[who] = reasons.get(who, 0) + 1
    total = len({row["spec"] for row in rows})
    return [(who, f"{n} of {total}", why) for (who, why), n in reasons.items()]
