"""Matplotlib style of all figures: printed font sizes, Okabe-Ito colours, stable bytes.

A figure is drawn at its printed width, at most `PRINT_WIDTH_INCHES`, so that font sizes
are those on paper. `render_figure` wraps titles, moves legends between title and data,
and makes bar axes include zero. `FIGURE_STYLES` has other printed sizes.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxkv import validation
from jaxkv.plotting import layout, plotted_data, saving, systems
from jaxkv.plotting.systems import colors as colors

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis, XAxis, YAxis
    from matplotlib.lines import Line2D
    from matplotlib.typing import ColorType
    from numpy.typing import ArrayLike

# matplotlib is imported lazily: the command line imports this module for --help.

PRINT_WIDTH_INCHES = 6.8
"""Text width of a page: two panels, or one wide panel."""
PANEL_SIZE_INCHES = (3.4, 3.2)
FONT_POINTS = 9
"""Font size of all text except titles; the smallest size in a figure."""

STYLE: dict[str, Any] = {
    "axes.formatter.limits": (
        -5,
        7,
    ),  # an exponent above the axis would overlap the legend
    "axes.formatter.useoffset": False,
    "axes.labelsize": FONT_POINTS,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.06,
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same on every machine
    "font.size": FONT_POINTS,
    "hatch.linewidth": 0.6,
    "legend.columnspacing": 1.2,
    "legend.fontsize": FONT_POINTS,
    "legend.frameon": False,
    "legend.handletextpad": 0.5,
    "legend.labelspacing": 0.3,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "savefig.dpi": 200,
    "svg.hashsalt": "jaxkv",  # element ids do not change from run to run
    "xtick.labelsize": FONT_POINTS,
    "xtick.major.width": 0.8,
    "ytick.labelsize": FONT_POINTS,
    "ytick.major.width": 0.8,
}


class Panels(NamedTuple):
    """Grid of the panels of a figure.

    Attributes:
      rows: number of rows.
      columns: number of columns.
      height_inches: height of a panel.
      width_inches: width of a panel; 0 divides the width of a page by the columns.
    """

    rows: int = 1
    columns: int = 1
    height_inches: float = PANEL_SIZE_INCHES[1]
    width_inches: float = 0.0

    @property
    def size_inches(self) -> tuple[float, float]:
        """Width and height of a panel."""
        width = self.width_inches or PRINT_WIDTH_INCHES / self.columns
        return width, self.height_inches


class FigureStyle(NamedTuple):
    """Printed sizes of figures.

    A figure is laid out with the font sizes of `STYLE` and scaled as a whole.

    Attributes:
      scale: printed size of text, lines and markers over that of `STYLE`.
      column_inches: printed width of a single panel of the usual width.
      page_inches: printed width of a wide panel, or of all columns.
      height_inches: printed height of a single panel; 0 scales the height it has.
    """

    scale: float
    column_inches: float
    page_inches: float
    height_inches: float = 0.0

    def panel_inches(
        self, width: float, height: float, columns: int = 1, rows: int = 1
    ) -> tuple[float, float]:
        """Returns width and height of a panel before scaling."""
        is_narrow = columns == 1 and width <= PANEL_SIZE_INCHES[0]
        base = PANEL_SIZE_INCHES[0] if is_narrow else PRINT_WIDTH_INCHES
        printed = self.column_inches if is_narrow else self.page_inches
        if self.height_inches and rows == columns == 1:
            height = self.height_inches / self.scale
        return width * printed / base / self.scale, height


FIGURE_STYLES = {
    "page": FigureStyle(1.0, PANEL_SIZE_INCHES[0], PRINT_WIDTH_INCHES),
    "paper": FigureStyle(8 / FONT_POINTS, 3.3, 6.8),  # 8 points, 1 or 2 columns
    "slide": FigureStyle(18 / FONT_POINTS, 40 / 3, 40 / 3, 7.5),  # 18 points, 16:9
}
"""Styles by name; "page" is the default."""


_FIGURE_OPTIONS = ContextVar[tuple[FigureStyle, bool]]("figure_options")


@contextlib.contextmanager
def draw_with(style: str, has_pdf: bool = False) -> Generator[None]:
    """Draws the figures of a `with` block in a style, on request also as PDF.

    Raises:
      ValueError: the style is unknown.
    """
    if style not in FIGURE_STYLES:
        raise ValueError(validation.format_unknown_name("style", style, FIGURE_STYLES))
    token = _FIGURE_OPTIONS.set((FIGURE_STYLES[style], has_pdf))
    try:
        yield
    finally:
        _FIGURE_OPTIONS.reset(token)


def render_figure(
    plot: Callable[..., None],
    *,
    panels: tuple[int, int] = (1, 1),
    size_inches: tuple[float, float] = PANEL_SIZE_INCHES,
) -> dict[str, bytes]:
    """Draws a figure and returns its files; equal data give equal SVG bytes.

    Neither pyplot nor the user's matplotlibrc is used, and no file is opened.

    Args:
      plot: draws on the given axes: one `Axes`, or an array of them with the shape of
        `panels` without axes of length 1. Rows and columns whose axes are all removed
        leave no gap.
      panels: rows and columns of axes, each at least 1.
      size_inches: width and height of one panel.

    Returns:
      Contents of `figure.svg`, `figure.png` and `figure.csv`, the plotted data, by
      name, and of `figure-1.svg`, `figure-1.png` and so on for each of several panels.

    Raises:
      ValueError: the columns of panels are wider than a page, or the value axis of bars
        is logarithmic.
    """
    import matplotlib.style
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = panels
    width, height = size_inches
    if columns > 1 and columns * width > PRINT_WIDTH_INCHES + 1e-9:
        raise ValueError(
            f"width={columns * width:g} inches must be in (0, {PRINT_WIDTH_INCHES}]"
        )
    sizes, has_pdf = _FIGURE_OPTIONS.get((FIGURE_STYLES["page"], False))
    cell_inches = sizes.panel_inches(width, height, columns, rows)
    files: dict[str, bytes] = {}
    cycle = {"axes.prop_cycle": cycler(color=colors())}
    with matplotlib.style.context(["default", STYLE | cycle]):
        figure = Figure(figsize=(columns * cell_inches[0], rows * cell_inches[1]))
        FigureCanvasAgg(figure)
        plot(figure.subplots(rows, columns))
        _close_ranks(figure, cell_inches)
        layout.arrange_panels(figure)
        files |= saving.save_figure(figure, "figure", sizes.scale, has_pdf)
        files["figure.csv"] = plotted_data.figure_csv(figure).encode()
        split = layout.split_panels(figure, size_inches, sizes.panel_inches)
        for number, panel in enumerate(split, 1):
            name = f"figure-{number}"
            files |= saving.save_figure(panel, name, sizes.scale, has_pdf)
    return files


def _close_ranks(figure: Any, size_inches: tuple[float, float]) -> None:
    """Shrinks a figure to the rows and columns that still have axes."""
    specs = [ax.get_subplotspec() for ax in figure.axes]
    rows = sorted({spec.rowspan.start for spec in specs})
    columns = sorted({spec.colspan.start for spec in specs})
    if not specs or (len(rows), len(columns)) == specs[0].get_gridspec().get_geometry():
        return
    width, height = size_inches
    figure.set_size_inches(len(columns) * width, len(rows) * height)
    grid = figure.add_gridspec(len(rows), len(columns))
    for ax, spec in zip(figure.axes, specs, strict=True):
        place = rows.index(spec.rowspan.start), columns.index(spec.colspan.start)
        ax.set_subplotspec(grid[place])


def draw_curve(
    ax: "Axes",
    x: "ArrayLike",
    y: "ArrayLike",
    system: int | str,
    label: str = "",
    **look: Any,
) -> list["Line2D"]:
    """Draws points and the line through them.

    Args:
      ax: axes.
      x: x coordinates.
      y: y coordinates.
      system: name in `systems.SYSTEM_STYLES`, or index of a colour in `colors()`.
      label: label in the legend; no label if empty.
      look: keywords of `Axes.plot` that override the style.
    """
    keywords: dict[str, Any] = {"label": label or None}
    if isinstance(system, int):
        keywords |= {"color": colors()[system], "marker": "o"}
    else:
        keywords |= systems.system_style(system).line
    return ax.plot(x, y, **keywords | look)


def shade_band(
    ax: "Axes",
    x: "ArrayLike",
    low: "ArrayLike",
    high: "ArrayLike",
    color: "ColorType",
    alpha: float,
) -> None:
    """Shades the area between two lines."""
    ax.fill_between(x, low, high, color=color, alpha=alpha, linewidth=0)


def annotate(
    ax: "Axes", text: str, at: Sequence[float], offset: tuple[int, int], **look: Any
) -> None:
    """Writes a text near a point, at an offset in points (1/72 inch)."""
    ax.annotate(text, (at[0], at[1]), offset, textcoords="offset points", **look)


def draw_reference_line(
    ax: "Axes", value: float, text: str = "", *, along: str = "x"
) -> None:
    """Draws a thin grey line at a value, with an optional label in the legend."""
    line = ax.axhline if along == "x" else ax.axvline
    line(
        value,
        label=text or None,
        color="0.45",
        linewidth=1.0,
        linestyle="--",
        zorder=0.5,
    )


def draw_ridge(ax: "Axes", device: str, intensity: float) -> None:
    """Draws the ridge of the roofline: steps are compute-bound above this intensity."""
    draw_reference_line(ax, intensity, f"{device}: memory-bound below {intensity:.0f}")


def set_labels(ax: "Axes", title: str, x: str, y: str, **more: Any) -> None:
    """Sets the title of a panel, and its axis labels with units."""
    ax.set(title=title, xlabel=x, ylabel=y, **more)


def sequential_colors(values: "np.ndarray") -> "np.ndarray":
    """Returns colours from light to dark for an array of values."""
    import matplotlib
    import numpy as np

    spread = np.ptp(values) if len(values) else 0.0
    share = (values - values.min()) / spread if spread else np.ones(len(values))
    return matplotlib.colormaps["viridis_r"](0.25 + 0.75 * share)


def use_powers_of_two(ax: "Axes") -> None:
    """Sets a logarithmic x axis with base 2 and plain numbers."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")


def label_log_axis(axis: "XAxis | YAxis") -> None:
    """Labels a logarithmic axis with plain numbers, fewer per decade in wide ranges."""
    from matplotlib import ticker

    low, high = axis.get_view_interval()
    if not 0 < low < high:  # an empty axes has no limits for a logarithm
        axis.axes.set(**{f"{axis.axis_name}scale": "linear"})
        return
    subs = _tick_digits(low, high)
    axis.set_major_locator(ticker.LogLocator(subs=subs))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(ticker.NullFormatter())


def label_wide_log_axis(axis: "Axis") -> None:
    """Labels a logarithmic axis with digits times powers of ten, as 3 x 10^9."""
    from matplotlib import ticker

    subs = _tick_digits(*axis.get_view_interval())
    axis.set_major_locator(ticker.LogLocator(subs=subs))
    everywhere = (float("inf"), float("inf"))
    axis.set_major_formatter(
        ticker.LogFormatterSciNotation(minor_thresholds=everywhere)
    )
    axis.set_minor_formatter(ticker.NullFormatter())


def _tick_digits(low: float, high: float) -> tuple[float, ...]:
    """Returns the digits that have a label in each decade, more in short ranges."""
    decades = math.log10(high / low)
    digits = {0.5: (1, 1.5, 2, 3, 4, 5, 7), 0.9: (1, 2, 3, 5), 2.2: (1, 3)}
    return next(
        (x for max_decades, x in digits.items() if decades <= max_decades), (1,)
    )
