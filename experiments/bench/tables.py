"""Rows and bars that several benchmarks share."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from experiments import lab

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def split_details(
    rows: Sequence[Mapping[str, object]],
    names: Collection[str],
    details: Collection[str],
) -> dict[str, object]:
    """Splits rows for JSON into compared numbers and details.

    Args:
      rows: rows of a result.
      names: keys that identify a row; part of both.
      details: keys of details.
    """
    return {
        "rows": [{k: v for k, v in row.items() if k not in details} for row in rows],
        "details": [{k: row[k] for k in (*names, *details)} for row in rows],
    }


def draw_bars(
    ax: "Axes", names: Sequence[str], values: Sequence[float], labels: Sequence[str]
) -> None:
    """Draws a bar for each name from top to bottom, in the colour of its system.

    The system of a name such as `jaxkv, 32 draws` is `jaxkv`.
    """
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        system = name if name in lab.SYSTEM_STYLES else name.partition(",")[0]
        look = lab.system_style(
            system if system in lab.SYSTEM_STYLES else "plain Python"
        )
        bar = ax.barh(place, value, 0.7, **look.bar)
        ax.bar_label(bar, [labels[place]], padding=3)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.18)
    ax.invert_yaxis()
