"""`jaxkv sweep CONFIG --check-coordinates`: table, slopes and figure of the check."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxkv.cli import RESUMABLE, CommandOutput, Terminal
from jaxkv.models import ModelConfig
from jaxkv.plotting import draw_curve, label_log_axis, render_figure, set_labels
from jaxkv.report import Sheet, dumps, write_files
from scaling.sweeps import (
    MAX_SLOPE,
    CoordinateCheck,
    SweepConfig,
    measure_coordinates,
    open_on_device,
    widen_model,
)

COORDINATE_FILES = "coordinates"
"""Name of the files of the check."""


def check_coordinates(
    config: SweepConfig, out: Path, max_seconds: float
) -> CommandOutput:
    """Measures both parametrizations at four widths of the first model.

    Args:
      config: the sweep.
      out: folder of `coordinates.json` and the figure.
      max_seconds: time limit.

    Returns:
      Tables of changes and slopes. The status is 0 if no slope of `mup` is larger than
      `MAX_SLOPE` in size, else 1; after the time limit, 75.

    Raises:
      ValueError: `mup` is not defined for the model or the optimizer, or the folder
        cannot be written.
    """
    model = config.models[0]
    if not isinstance(model, ModelConfig):
        raise ValueError("--check-coordinates needs a transformer as the first model")
    models = widen_model(model)
    with Terminal(lambda: "interrupted", max_seconds=max_seconds) as bars:
        corpus = open_on_device(config.corpus)
        checks = []
        for parametrization in ("mup", "standard"):
            checks.append(
                measure_coordinates(
                    config, corpus, parametrization, models=models, progress=bars
                )
            )
            if bars.stopped:
                return CommandOutput({}, [], [bars.reason], bars.status or RESUMABLE)
    passes = checks[0].passes
    document = {
        "passes": passes,
        "max_slope": MAX_SLOPE,
        "checks": [
            {
                "parametrization": check.parametrization,
                "widths": [*check.widths],
                "places": [*check.places],
                "change": check.change.tolist(),
                "slopes": check.slopes.tolist(),
            }
            for check in checks
        ],
    }
    figure = render_figure(
        lambda axes: plot_coordinates(axes, checks),
        panels=(1, 2),
        size_inches=(3.4, 3.0),
    )
    contents: dict[str, str | bytes] = {f"{COORDINATE_FILES}.json": dumps(document)}
    contents |= {
        name.replace("figure", COORDINATE_FILES): content
        for name, content in figure.items()
        if name.startswith("figure.")
    }
    folder = write_files(out, "sweep", contents)
    verdict = "independent of" if passes else "dependent on"
    line = (
        f"mup: changes are {verdict} the width; figure: {folder / COORDINATE_FILES}.png"
    )
    sheets = [_sheet(check) for check in checks]
    return CommandOutput(document, sheets, [line], 0 if passes else 1)


def _sheet(check: CoordinateCheck) -> Sheet:
    rows = [
        (place, *(f"{x:.3g}" for x in change), f"{slope:+.2f}")
        for place, change, slope in zip(
            check.places, check.change.T, check.slopes, strict=True
        )
    ]
    widths = (f"width {width}" for width in check.widths)
    return Sheet(
        f"{check.parametrization}: mean absolute change of activations",
        ("place", *widths, "slope"),
        rows,
        f"Slopes of ln(change) against ln(width); mup passes up to {MAX_SLOPE:g}.",
    )


def plot_coordinates(axes: np.ndarray, checks: Sequence[CoordinateCheck]) -> None:
    """Draws the change by width, a panel for each check, of at most six places."""
    low = min(float(check.change.min()) for check in checks) / 1.5
    high = max(float(check.change.max()) for check in checks) * 1.5
    for ax, check in zip(axes, checks, strict=True):
        last = len(check.places) - 1
        shown = np.unique(np.linspace(0, last, min(last + 1, 6)).round().astype(int))
        for color, i in enumerate(shown):
            draw_curve(ax, check.widths, check.change[:, i], color, check.places[i])
        ax.set(xscale="log", yscale="log", ylim=(low, high))
        label = "mean absolute change [1]"
        set_labels(ax, check.parametrization, "width [features]", label)
        label_log_axis(ax.yaxis)
        ax.set_xticks(check.widths, [f"{width}" for width in check.widths])
        ax.minorticks_off()
        ax.legend()
