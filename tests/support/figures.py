"""Mechanical checks of the rubric for figures.

Type of at least 9 points at print width, a title on every panel, a unit in every label,
bars from zero, legends off the data, no text over another, and one colour for a system
in all figures.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxkv.plotting import SYSTEM_STYLES

LEAST_POINTS = 9.0
WIDTH_INCHES = 6.8
"""Width of a printed figure: the text width of a page."""
UNIT = re.compile(r"\[[^\[\]]+\]$")
"""A label ends with its unit; `[1]` declares that there is none."""
_PLAIN = re.compile(r"\\\\[a-z]+")
"""Commands in the labels of logarithmic axes."""
SLACK = 0.01
"""Allowed overlap of boxes in inches."""


class Saved(Exception):
    """Ends a drawing at its first saved file."""


def draw_sheet(draw: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the sheet that a call saves first, laid out, and saves no file."""
    from matplotlib.figure import Figure

    sheets = []

    def keep(figure: Any, *args: Any, **kwargs: Any) -> None:
        figure.draw_without_rendering()
        sheets.append(figure)
        raise Saved

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        with pytest.raises(Saved):
            draw()
    return sheets[0]


def faults(figure: Any) -> list[str]:
    """Returns the violations of the rubric by a figure, a line each."""
    renderer = figure.canvas.get_renderer()
    fault_lines = [*_small_type(figure), *_overlaps(figure, renderer)]
    for ax in figure.axes:
        fault_lines += _panel(ax, renderer)
    return fault_lines


def looks(figure: Any) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Returns the names of systems in legends, with their colours."""
    from matplotlib.colors import to_rgb

    for ax in figure.axes:
        legend = ax.get_legend()
        handles = legend.legend_handles if legend else []
        texts = legend.get_texts() if legend else []
        for handle, text in zip(handles, texts, strict=True):
            if text.get_text() in SYSTEM_STYLES:
                is_line = hasattr(handle, "get_color")
                color = handle.get_color() if is_line else handle.get_facecolor()
                yield text.get_text(), to_rgb(color)


def _texts(figure: Any) -> Iterator[Any]:
    from matplotlib.text import Text

    hidden = set()
    for ax in figure.axes:
        if not ax.axison:
            hidden |= {*ax.xaxis.findobj(Text), *ax.yaxis.findobj(Text)}
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            margin = 1e-9 * (high - low)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low - margin <= tick.get_loc() <= high + margin:
                    hidden |= {tick.label1, tick.label2}
                hidden |= set() if tick.label1.get_visible() else {tick.label1}
    for text in figure.findobj(Text):
        if text.get_text().strip() and text.get_visible() and text not in hidden:
            yield text


def _small_type(figure: Any) -> Iterator[str]:
    scale = min(1.0, WIDTH_INCHES / figure.get_figwidth())
    for text in _texts(figure):
        points = scale * text.get_fontsize()
        if points < LEAST_POINTS - 1e-6:
            yield f"{text.get_text()!r} has {points:.1f} points at print width"


def _overlaps(figure: Any, renderer: Any) -> Iterator[str]:
    """Returns texts that overlap, and texts outside the figure."""
    slack = SLACK * figure.dpi
    boxes = []
    for text in _texts(figure):
        box = text.get_window_extent(renderer)
        if box.width and box.height:
            boxes.append((text, box))
    width = figure.bbox.width
    height = figure.bbox.height
    for text, box in boxes:
        # The type's box is higher than its letters.
        out = max(-box.x0, -box.y0, box.x1 - width, box.y1 - height)
        if out > 2 * slack:
            yield f"{text.get_text()!r} leaves the figure by {out:.0f} pixels"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        along = min(a.y1, b.y1) - max(a.y0, b.y0)
        if across > slack and along > 0.25 * min(a.height, b.height):
            yield f"{one.get_text()!r} overlaps {other.get_text()!r}"


def _panel(ax: Any, renderer: Any) -> Iterator[str]:
    from matplotlib.container import BarContainer

    title = ax.get_title(loc="left") or ax.get_title()
    yield from () if title else ("a panel has no title",)
    for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)) if ax.axison else ():
        label = axis.get_label().get_text()
        marks = [_PLAIN.sub("", x.get_text()) for x in axis.get_ticklabels()]
        is_named = not any(marks) or any(re.search("[A-Za-z]", x) for x in marks)
        if not UNIT.search(label) and not is_named:
            yield f"{title!r}: {name} label {label!r} has no unit"
    for bars in ax.containers:
        if isinstance(bars, BarContainer) and len(bars):
            name = "x" if bars.orientation == "horizontal" else "y"
            low, high = sorted(getattr(ax, f"get_{name}lim")())
            scale = getattr(ax, f"get_{name}scale")()
            if scale != "linear" or not low <= 0 <= high:
                yield f"{title!r}: bars do not start at zero"
    legend = ax.get_legend()
    if legend is not None:
        box = legend.get_window_extent(renderer)
        for other in ax.figure.axes:
            if box.shrunk(0.98, 0.9).overlaps(other.bbox):
                yield f"{title!r}: the legend is on data"
