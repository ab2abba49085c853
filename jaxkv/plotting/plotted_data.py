"""The data of a figure as one long CSV table, read from its matplotlib axes."""

import csv
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.collections import FillBetweenPolyCollection
    from matplotlib.container import BarContainer, ErrorbarContainer
    from matplotlib.figure import Figure

HEADS = ("panel", "x_axis", "y_axis", "series", "x", "y", "low", "high")

type Point = tuple[object, ...]
"""x, y, low and high; None where an artist has no such value."""


def figure_csv(figure: "Figure") -> str:
    """Returns lines, points, bars, bands, error bars and contours, a row for a point.

    `panel` counts from 1, as in `figure-1.png`; `x_axis` and `y_axis` are the labels
    with their units. `low` and `high` bound a bar, a band, an error bar or an interval
    along the axis on which it extends. Images, text and other patches have no rows.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(HEADS)
    for number, ax in enumerate(figure.axes, 1):
        for series, points in _series(ax):
            name = "" if series.startswith("_") else series
            for point in points:
                cells = [f"{x:.10g}" if isinstance(x, float) else x for x in point]
                labels = (number, ax.get_xlabel(), ax.get_ylabel(), name)
                writer.writerow([*labels, *cells])
    return buffer.getvalue()


def _series(ax: "Axes") -> Iterator[tuple[str, Iterator[Point]]]:
    """Yields label and points of every artist that holds data."""
    from matplotlib.collections import (
        FillBetweenPolyCollection,
        LineCollection,
        PathCollection,
    )
    from matplotlib.container import BarContainer, ErrorbarContainer
    from matplotlib.contour import ContourSet

    covered = set()
    for container in ax.containers:
        label = str(container.get_label())
        if isinstance(container, BarContainer):
            yield label, _bars(ax, container)
        elif isinstance(container, ErrorbarContainer):
            covered |= {*container.get_children()}
            yield label, _error_bars(container)
    for line in ax.lines:
        if line in covered:
            continue
        is_data = line.get_transform().contains_branch_seperately(ax.transData)
        points = (
            tuple(x if held else None for x, held in zip(point, is_data, strict=True))
            for point in np.asarray(line.get_xydata()).tolist()
        )
        if not all(is_data):  # a reference line: both of its ends have one value
            points = iter([next(points)])
        yield str(line.get_label()), ((*x, None, None) for x in points)
    for artist in ax.collections:
        label = str(artist.get_label())
        if isinstance(artist, PathCollection):
            offsets = np.asarray(artist.get_offsets()).tolist()
            yield label, ((x, y, None, None) for x, y in offsets)
        elif isinstance(artist, FillBetweenPolyCollection):
            yield label, _band(artist)
        elif isinstance(artist, LineCollection) and artist not in covered:
            yield label, map(_interval, artist.get_segments())
        elif isinstance(artist, ContourSet):
            for level, path in zip(artist.levels, artist.get_paths(), strict=True):
                vertices = np.asarray(path.vertices).tolist()
                yield f"level {level:g}", ((x, y, None, None) for x, y in vertices)


def _interval(segment: np.ndarray) -> Point:
    """Returns a vertical or horizontal segment as a point with its bounds."""
    [x0, y0], *_, [x1, y1] = segment.tolist()
    if x0 == x1:
        return x0, None, min(y0, y1), max(y0, y1)
    return None, y0, min(x0, x1), max(x0, x1)


def _error_bars(container: "ErrorbarContainer") -> Iterator[Point]:
    data, _, bars = container.lines
    for artist in bars:
        for i, segment in enumerate(artist.get_segments()):
            x, y, low, high = _interval(segment)
            if data is not None:
                x, y = np.asarray(data.get_xydata())[i].tolist()
            yield x, y, low, high


def _band(artist: "FillBetweenPolyCollection") -> Iterator[Point]:
    """Reads the two curves of `fill_between` from the corners of its polygons."""
    along = "xy".index(artist.t_direction)  # ty: ignore[missing-attribute]
    for path in artist.get_paths():
        corners = np.asarray(path.vertices).tolist()
        num = (len(corners) - 3) // 2
        second = corners[2 * num + 1 : num + 1 : -1]
        for a, b in zip(corners[1 : num + 1], second, strict=True):
            low, high = sorted((a[1 - along], b[1 - along]))
            place = (a[0], None) if along == 0 else (None, a[1])
            yield *place, low, high


def _bars(ax: "Axes", container: "BarContainer") -> Iterator[Point]:
    """Reads bars, with the name of their category where the axis has names."""
    for bar in container:
        if container.orientation == "horizontal":
            low, value = bar.get_x(), bar.get_width()
            place = _category(ax.yaxis, bar.get_y() + bar.get_height() / 2)
            yield value, place, low, low + value
        else:
            low, value = bar.get_y(), bar.get_height()
            place = _category(ax.xaxis, bar.get_x() + bar.get_width() / 2)
            yield place, value, low, low + value


def _category(axis: "Axis", place: float) -> float | str:
    """Returns the fixed tick label within half a unit of a place, or the place."""
    from matplotlib.ticker import FixedLocator

    if isinstance(axis.get_major_locator(), FixedLocator):
        ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
        for tick, text in ticks:
            if abs(tick - place) < 0.5:
                return " ".join(text.get_text().split())
    return place
