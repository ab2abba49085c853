"""The data of a figure as one long CSV table, read from its matplotlib axes."""

import csv
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


def figure_csv(figure: "Figure") -> str:
    """Returns lines, points, bars, steps, bands and intervals, a row for each point.

    `panel` counts from 1, as in `figure-1.png`; `x_axis` and `y_axis` are the labels
    with their units. `low` and `high` bound a bar, a band or an error bar along the
    axis on which it extends. Contours, images and text have no rows.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow("panel x_axis y_axis series x y low high".split())
    for number, ax in enumerate(figure.axes, 1):
        for name, *point in _points(ax):
            series = "" if str(name).startswith("_") else name
            cells = [f"{x:.10g}" if isinstance(x, float) else x for x in point]
            writer.writerow([number, ax.get_xlabel(), ax.get_ylabel(), series, *cells])
    return buffer.getvalue()


def _points(ax: "Axes") -> Iterator[tuple[object, ...]]:
    """Yields label, x, y, low and high of all points; None without such a value."""
    import numpy as np
    from matplotlib import collections, container, patches

    names = {}  # of the parts of error bars
    caps = set()
    for group in ax.containers:
        name = group.get_label()
        if isinstance(group, container.ErrorbarContainer):
            names |= dict.fromkeys(group.get_children(), name)
            caps |= {*group.lines[1]}
        if not isinstance(group, container.BarContainer):
            continue
        for bar in group:
            x, y = bar.get_xy()
            width = bar.get_width()
            height = bar.get_height()
            if group.orientation == "horizontal":
                place = _category(ax.yaxis, y + height / 2)
                yield name, width, place, x, x + width
            else:
                place = _category(ax.xaxis, x + width / 2)
                yield name, place, height, y, y + height
    for line in (line for line in ax.lines if line not in caps):
        has_x, has_y = line.get_transform().contains_branch_seperately(ax.transData)
        points = np.asarray(line.get_xydata()).tolist()
        # A reference line has one value at both of its ends.
        for x, y in points if has_x and has_y else points[:1]:
            name = names.get(line, line.get_label())
            yield name, x if has_x else None, y if has_y else None, None, None
    for patch in ax.patches:
        if isinstance(patch, patches.StepPatch) and not patch.get_fill():
            values, edges, _ = patch.get_data()
            for x, y in zip(edges.tolist(), values.tolist(), strict=False):
                yield patch.get_label(), float(x), float(y), None, None
    for artist in ax.collections:
        name = names.get(artist, artist.get_label())
        if isinstance(artist, collections.PathCollection):
            for point in np.asarray(artist.get_offsets()).tolist():
                yield name, *point, None, None
        elif isinstance(artist, collections.LineCollection):
            for segment in artist.get_segments():
                yield name, *_interval(segment[0].tolist(), segment[-1].tolist())
        elif isinstance(artist, collections.FillBetweenPolyCollection):
            for path in artist.get_paths():  # one curve, and the other one back
                corners = np.asarray(path.vertices).tolist()[1:-1]
                num = len(corners) // 2
                for pair in zip(corners[:num], corners[:num:-1], strict=False):
                    yield name, *_interval(*pair)


def _interval(start: list[float], end: list[float]) -> tuple[float | None, ...]:
    """Returns x, y, low and high of a vertical or horizontal interval."""
    if start[0] == end[0]:
        return start[0], None, *sorted((start[1], end[1]))
    return None, start[1], *sorted((start[0], end[0]))


def _category(axis: "Axis", place: float) -> float | str:
    """Returns the fixed tick label within half a unit of a place, or the place."""
    from matplotlib.ticker import FixedLocator

    if isinstance(axis.get_major_locator(), FixedLocator):
        ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
        for tick, text in ticks:
            if abs(tick - place) < 0.5:
                return " ".join(text.get_text().split())
    return place
