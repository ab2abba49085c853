"""Rows and bars that the results of several benchmarks share."""

from collections.abc import Collection, Sequence
from typing import Any

from experiments.plotting import systems


def split_details(
    rows: Sequence[dict[str, Any]], names: Collection[str], details: Collection[str]
) -> dict[str, Any]:
    """Rows for JSON: what to compare, and apart from it what to know of everyone.

    Args:
      rows: of a result.
      names: keys of both, which identify a row.
      details: names of what to know.
    """
    return {
        "rows": [{k: v for k, v in row.items() if k not in details} for row in rows],
        "details": [{k: row[k] for k in (*names, *details)} for row in rows],
    }


def draw_bars(
    ax: Any, names: Sequence[str], values: Sequence[float], labels: Sequence[str]
) -> None:
    """Draws a bar for each name from the top down, in the colour of that system."""
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        look = systems.system_style(name if name in systems.SYSTEMS else "plain Python")
        bar = ax.barh(place, value, 0.7, **look.bar)
        ax.bar_label(bar, [labels[place]], padding=3)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.18)
    ax.invert_yaxis()
