"""The one matplotlib style: small columns, Okabe and Ito's colours, stable bytes."""

import io
from collections.abc import Callable
from typing import Any

# What is heavy is imported where it is used: this module is read by the command line,
# which answers --help before it.

PANEL_SIZE_INCHES = (3.4, 2.4)

STYLE: dict[str, Any] = {
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 8,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same on every machine
    "font.size": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "savefig.dpi": 200,
    "svg.hashsalt": "jaxkv",  # element ids do not change from run to run
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}


def colors() -> tuple[tuple[float, float, float], ...]:
    """Returns the eight colours of Okabe and Ito, black first, as RGB in [0, 1].

    Source: Okabe & Ito 2008, "Color Universal Design", figure 16.
    """
    import matplotlib
    from matplotlib.colors import to_rgb

    return tuple(to_rgb(color) for color in matplotlib.color_sequences["okabe_ito"])


def render(
    plot: Callable[[Any], None],
    *,
    panels: tuple[int, int] = (1, 1),
    size_inches: tuple[float, float] = PANEL_SIZE_INCHES,
) -> dict[str, bytes]:
    """Draws a figure and returns its files; equal data give equal SVG bytes.

    Neither pyplot nor a user's matplotlibrc has a say, and no file is opened.

    Args:
      plot: draws on the axes it is given: one `Axes`, or an array of them with the
        shape of `panels` less the axes of length 1. Rows and columns of which it
        removes every one leave no hole.
      panels: rows and columns of axes, each at least 1.
      size_inches: width and height of one panel.

    Returns:
      The contents of `figure.svg` and `figure.png`, by name.
    """
    import matplotlib.style
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = panels
    width, height = size_inches
    files = {}
    cycle = {"axes.prop_cycle": cycler(color=colors())}
    with matplotlib.style.context(["default", STYLE | cycle]):
        figure = Figure(figsize=(columns * width, rows * height))
        FigureCanvasAgg(figure)
        plot(figure.subplots(rows, columns))
        _close_ranks(figure, size_inches)
        for kind, metadata in (("svg", {"Date": None}), ("png", {})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, metadata=metadata)
            files[f"figure.{kind}"] = buffer.getvalue()
    return files


def _close_ranks(figure: Any, size_inches: tuple[float, float]) -> None:
    """Shrinks a figure to the rows and columns in which there still are axes."""
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


def curve(
    ax: Any, x: Any, y: Any, color: int, label: str = "", mark: str = "o-", **look: Any
) -> Any:
    """Draws points and the line through them.

    Args:
      ax: where to.
      x: one coordinate.
      y: the other.
      color: place of the colour in `colors()`.
      label: in the legend; none where empty.
      mark: of the points and the line, as matplotlib has it.
      look: how else it looks.
    """
    return ax.plot(x, y, mark, color=colors()[color], label=label or None, **look)


def band(ax: Any, x: Any, low: Any, high: Any, color: Any, alpha: float) -> None:
    """Shades what lies between two lines."""
    ax.fill_between(x, low, high, color=color, alpha=alpha, linewidth=0)


def note(ax: Any, text: str, at: Any, offset: tuple[int, int], **look: Any) -> None:
    """Writes beside a point, so many printer's points away."""
    look = {"fontsize": 6} | look
    ax.annotate(text, at, offset, textcoords="offset points", **look)


def ridge(ax: Any, device: str, intensity: float, at: float) -> None:
    """Draws the operations per byte above which products take the time, not memory."""
    ax.axhline(intensity, color="0.3", linewidth=0.8, linestyle="--")
    text = f"{device}: {intensity:.0f}\nmemory binds below"
    look = {"fontsize": 7, "va": "bottom", "color": "0.3"}
    note(ax, text, (at, intensity), (3, 2), **look)


def titled(ax: Any, title: str, x: str, y: str, **more: Any) -> None:
    """Says what axes show, and what stands on either; more as for `Axes.set`."""
    ax.set(title=title, xlabel=x, ylabel=y, **more)


def shades(values: Any) -> Any:
    """Gives colours from light to dark, an array of them by an array of values."""
    import matplotlib
    import numpy as np

    spread = np.ptp(values) if len(values) else 0.0
    share = (values - values.min()) / spread if spread else np.ones(len(values))
    return matplotlib.colormaps["viridis_r"](0.15 + 0.85 * share)


def powers_of_two(ax: Any) -> None:
    """Makes the horizontal axis one of powers of two, in plain numbers."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:,.0f}")


def plain_log(axis: Any) -> None:
    """Labels a short logarithmic axis with plain numbers."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(ticker.NullFormatter())


def wide_log(axis: Any) -> None:
    """Labels a logarithmic axis at powers of ten and three times those, as 3 x 10^9."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0)))
    everywhere = (float("inf"), float("inf"))
    axis.set_major_formatter(
        ticker.LogFormatterSciNotation(minor_thresholds=everywhere)
    )
    axis.set_minor_formatter(ticker.NullFormatter())
