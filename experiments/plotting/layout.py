"""Arranges the panels of a figure: titles, legends and bars, then one panel alone."""

import re
from collections.abc import Iterator
from typing import Any

_NUMBER = re.compile(r"(\d) (?=%|(?:[kMGT]?i?B|m?s)\b)")
"""A number and the space between it and its unit, where no line may end."""

PAD_POINTS = 4.0
"""Space above the data, between legend and title."""


def arrange_panels(figure: Any) -> None:
    """Wraps titles to their panels, moves legends above the data, starts bars at zero.

    Raises:
      ValueError: bars have a logarithmic axis, which has no zero.
    """
    if not figure.axes:
        return
    from matplotlib.container import BarContainer

    for ax in figure.axes:
        for bars in ax.containers:
            if not isinstance(bars, BarContainer) or not len(bars):
                continue
            name = "x" if bars.orientation == "horizontal" else "y"
            if getattr(ax, f"get_{name}scale")() == "log":
                line = f"{name}scale='log' must be linear: bars start at zero"
                raise ValueError(line)
            low, high = getattr(ax, f"get_{name}lim")()
            getattr(ax, f"set_{name}lim")(min(low, 0.0), max(high, 0.0))
        _set_in_layout(ax, False)
    layout = figure.get_layout_engine()
    for _ in range(2):  # what hangs over the edges of axes needs a second turn
        layout.execute(figure)  # the widths of axes are known only then
    _set_heads(figure.axes)
    layout.execute(figure)
    figure.set_layout_engine("none")  # saving need not repeat it


def split_panels(figure: Any, size_inches: tuple[float, float]) -> Iterator[Any]:
    """Leaves one panel after the other in the figure, of its own size.

    Args:
      figure: an arranged figure; afterwards it has its last panel only.
      size_inches: width and height of a panel that spans one row and one column.

    Yields:
      The figure with that panel alone, and with the legends of the whole figure;
      none where it has a single panel.
    """
    axes = figure.axes
    if len(axes) < 2:
        return
    width, height = size_inches
    for alone in axes:
        for ax in axes:
            ax.set_visible(ax is alone)
            ax.set_in_layout(ax is alone)
        spec = alone.get_subplotspec()
        size = width * len(spec.colspan), height * len(spec.rowspan)
        figure.set_size_inches(*size)
        alone.set_subplotspec(figure.add_gridspec(1, 1)[0])
        for legend in [*figure.legends]:
            _fitted(figure, legend, 72 * size[0], loc="outside upper left")
        figure.set_layout_engine("constrained")
        _set_in_layout(alone, False)
        layout = figure.get_layout_engine()
        layout.execute(figure)
        _set_heads([alone])
        layout.execute(figure)
        figure.set_layout_engine("none")
        yield figure


def _set_in_layout(ax: Any, is_in: bool) -> None:
    """Lets title and legend take room in a layout, or not while they are unwrapped."""
    # A layout that is told to leave a title out still makes room for its middle.
    ax.set_title(ax.get_title(loc="left"), loc="left").set_visible(is_in)
    if ax.get_legend() is not None:
        ax.get_legend().set_in_layout(is_in)


def _set_heads(axes: list[Any]) -> None:
    """Stacks title, legend and data of every panel, flush with its column's left."""
    lefts: dict[int, float] = {}
    for ax in axes:
        renderer, column = ax.figure.canvas.get_renderer(), _column(ax)
        axis = ax.yaxis.get_tightbbox(renderer)
        left = min(ax.bbox.x0, axis.x0) if axis else ax.bbox.x0
        lefts[column] = min(left, lefts.get(column, left))
    for ax in axes:
        _set_head(ax, lefts[_column(ax)])


def _column(ax: Any) -> int:
    spec = ax.get_subplotspec()
    return spec.colspan.start if spec else -1


def _set_head(ax: Any, left: float) -> None:
    """Stacks title, legend and data of a panel from a left edge, in pixels, on."""
    renderer = ax.figure.canvas.get_renderer()
    points, box = 72 / ax.figure.dpi, ax.bbox
    width = points * (box.x1 - left) - 2 * PAD_POINTS  # off the next column
    _set_in_layout(ax, True)
    start, pad = (left - box.x0) / box.width, PAD_POINTS
    if ax.get_legend() is not None:
        above = start, 1 + PAD_POINTS / points / box.height
        place = {"bbox_to_anchor": above, "bbox_transform": ax.transAxes}
        legend = _fitted(ax, ax.get_legend(), width, loc="lower left", **place)
        pad += points * legend.get_window_extent(renderer).height + PAD_POINTS
    words = ax.get_title(loc="left").replace("\n", " ")
    title = ax.set_title(words, loc="left", pad=pad, x=start)
    lines = [""]
    for word in join_units(words).split(" "):
        title.set_text(f"{lines[-1]} {word}".strip())
        if lines[-1] and points * title.get_window_extent(renderer).width > width:
            lines.append(word)
        else:
            lines[-1] = title.get_text()
    title.set_text("\n".join(lines))


def join_units(words: str) -> str:
    """Joins numbers to the units that follow them."""
    return _NUMBER.sub("\\1\N{NO-BREAK SPACE}", words)


def _fitted(parent: Any, legend: Any, width: float, **place: Any) -> Any:
    """Lays a legend of an axes or a figure out anew in as few rows as fit a width.

    Args:
      parent: the axes or the figure that owns it.
      legend: the legend to replace.
      width: in points.
      place: where, as for `Axes.legend`.
    """
    renderer = legend.figure.canvas.get_renderer()
    handles, names = legend.legend_handles, [x.get_text() for x in legend.get_texts()]
    look = {"title": legend.get_title().get_text() or None, "alignment": "left"}
    look |= {"borderaxespad": 0.0, "borderpad": 0.0} | place
    for num_columns in range(len(names), 0, -1):
        legend.remove()
        legend = parent.legend(handles, names, ncols=num_columns, **look)
        if 72 / legend.figure.dpi * legend.get_window_extent(renderer).width <= width:
            break
    return legend
