"""Layout of figures: titles, legends and axes of panels, and single panels."""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUMBER_WITH_UNIT = re.compile(r"(\d) (?=%|(?:[kMGT]?i?B|m?s)\b)")
"""A number and the space before its unit, which must not be broken."""

PAD_POINTS = 4.0
"""Space above the data, between legend and title, in points."""


def arrange_panels(figure: Any) -> None:
    """Wraps titles, moves legends above the data, and makes bar axes include zero.

    Raises:
      ValueError: the value axis of bars is logarithmic.
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
    for _ in range(2):  # text beyond the edges of axes needs a second pass
        layout.execute(figure)  # sets the widths of axes
    _set_heads(figure.axes)
    layout.execute(figure)
    figure.set_layout_engine("none")  # saving does not repeat the layout


def split_panels(
    figure: Any,
    size_inches: tuple[float, float],
    panel_inches: Callable[[float, float], tuple[float, float]],
) -> Iterator[Any]:
    """Reduces a figure to one panel after another, at the size of the panel.

    Args:
      figure: an arranged figure; afterwards it has only its last panel.
      size_inches: width and height of a panel that spans one row and one column.
      panel_inches: returns the size of a separate panel for its width and height.

    Yields:
      The figure with a single panel and the legends of the whole figure; no figure
      if there is only one panel.
    """
    axes = figure.axes
    if len(axes) < 2:
        return
    width, height = size_inches
    for alone in axes:
        for ax in axes:
            ax.set_visible(ax is alone)
            ax.set_in_layout(ax is alone)
        for other in alone.get_shared_y_axes().get_siblings(alone):
            if other.get_ylabel():  # a shared axis is labelled once in the figure
                alone.set_ylabel(other.get_ylabel())
                alone.tick_params(labelleft=True)
        spec = alone.get_subplotspec()
        size = panel_inches(width * len(spec.colspan), height * len(spec.rowspan))
        figure.set_size_inches(*size)
        alone.set_subplotspec(figure.add_gridspec(1, 1)[0])
        for legend in [*figure.legends]:
            place = {"loc": "outside upper left", "borderaxespad": 0.4}
            _fitted(figure, legend, 72 * size[0], **place)
        figure.set_layout_engine("constrained")
        _set_in_layout(alone, False)
        layout = figure.get_layout_engine()
        layout.execute(figure)
        _set_heads([alone])
        layout.execute(figure)
        figure.set_layout_engine("none")
        yield figure


def _set_in_layout(ax: "Axes", is_in: bool) -> None:
    """Includes the title and legend of an axes in the layout, or excludes them."""
    # A title excluded by set_in_layout still takes room, so it is made invisible.
    ax.set_title(ax.get_title(loc="left"), loc="left").set_visible(is_in)
    if (legend := ax.get_legend()) is not None:
        legend.set_in_layout(is_in)


def _set_heads(axes: list[Any]) -> None:
    """Stacks title and legend above the data of every panel, aligned by column."""
    lefts: dict[int, float] = {}
    for ax in axes:
        renderer = ax.figure.canvas.get_renderer()
        column = _column(ax)
        axis = ax.yaxis.get_tightbbox(renderer)
        left = min(ax.bbox.x0, axis.x0) if axis else ax.bbox.x0
        lefts[column] = min(left, lefts.get(column, left))
    for ax in axes:
        _set_head(ax, lefts[_column(ax)])


def _column(ax: "Axes") -> int:
    spec = ax.get_subplotspec()
    return spec.colspan.start if spec else -1


def _set_head(ax: Any, left: float) -> None:
    """Stacks title and legend above the data of a panel, from a left edge in pixels."""
    renderer = ax.figure.canvas.get_renderer()
    points = 72 / ax.figure.dpi
    box = ax.bbox
    width = points * (box.x1 - left) - 2 * PAD_POINTS  # off the next column
    _set_in_layout(ax, True)
    start = (left - box.x0) / box.width
    pad = PAD_POINTS
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
    """Joins numbers to their units by no-break spaces."""
    return _NUMBER_WITH_UNIT.sub("\\1\N{NO-BREAK SPACE}", words)


def _fitted(parent: Any, legend: Any, width: float, **place: Any) -> Any:
    """Rebuilds a legend with the fewest rows that fit a width.

    Args:
      parent: axes or figure that owns the legend.
      legend: legend to replace.
      width: width in points.
      place: location, as for `Axes.legend`.
    """
    renderer = legend.figure.canvas.get_renderer()
    handles = legend.legend_handles
    names = [x.get_text() for x in legend.get_texts()]
    look = {"title": legend.get_title().get_text() or None, "alignment": "left"}
    look |= {"borderaxespad": 0.0, "borderpad": 0.0} | place
    for num_columns in range(len(names), 0, -1):
        legend.remove()
        legend = parent.legend(handles, names, ncols=num_columns, **look)
        if 72 / legend.figure.dpi * legend.get_window_extent(renderer).width <= width:
            break
    return legend
