"""Comparison of simulated requests with a log of the same requests.

The simulated time of a request is the median of the draws. Intervals of means and
percentiles include the discrepancy of the model, as in `summary`.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from jaxkv import plotting
from jaxkv.plotting import BLUE, GREEN, PURPLE, render_figure, set_labels, shade_band
from jaxkv.report import Sheet, format_percent
from scaling.calibration import (
    DETERMINED_SPREAD,
    PRIOR,
    ServerPosterior,
    kolmogorov_distance,
)
from scaling.cli.simulate.case import REQUESTS_FOR, ServerCase
from scaling.cli.simulate.summary import LEVEL, RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATENCIES = {"e2e": ("end to end", BLUE), "ttft": ("first token", GREEN)}
"""Compared latencies with their names and colours."""
_NUM_FARTHEST = 5


def _measured(case: ServerCase) -> dict[str, Float[np.ndarray, " requests"]]:
    """Returns the latencies of the compared requests in s."""
    assert case.log is not None
    latencies = case.log.latencies_s[:, case.loads[0].is_measured]
    return dict(zip(LATENCIES, latencies, strict=True))


def compare_requests(case: ServerCase, summary: RunSummary) -> dict[str, Any]:
    """Returns the errors of all statistics, and the requests that are farthest off."""
    assert case.log is not None
    document: dict[str, Any] = {}
    tail = 50 * (1 - LEVEL)
    for latency, measured in _measured(case).items():
        simulated = summary.latencies[latency]
        statistics = {}
        for name in REQUESTS_FOR:
            if (samples := summary.samples(latency, name)) is None:
                continue
            value = float(
                measured.mean()
                if name == "mean"
                else np.percentile(measured, float(name[1:]))
            )
            low, middle, high = np.percentile(samples, [tail, 50, 100 - tail]).tolist()
            statistics[name] = {
                "measured_s": value,
                "predicted_s": middle,
                "interval_s": [low, high],
                "error": middle / value - 1,
                "is_covered": low <= value <= high,
            }
        middle = np.median(simulated, axis=0)
        ratio = np.log(middle / measured)
        farthest = np.argsort(-np.abs(ratio))[:_NUM_FARTHEST]
        rows = case.log.row[case.loads[0].is_measured]
        document[latency] = {
            "statistics": statistics,
            "kolmogorov_distance": kolmogorov_distance(middle, measured),
            "median_absolute_error": float(np.median(np.abs(np.expm1(ratio)))),
            "farthest": [
                {
                    "row": int(rows[at]),
                    "measured_s": float(measured[at]),
                    "predicted_s": float(middle[at]),
                }
                for at in farthest
            ],
        }
    return document


def comparison_sheets(document: dict[str, Any]) -> list[Sheet]:
    """Returns the tables of a comparison."""
    cells = []
    far = []
    for latency, values in document.items():
        name, _ = LATENCIES[latency]
        for statistic, x in values["statistics"].items():
            low, high = x["interval_s"]
            cells.append(
                (
                    f"{name}, {statistic}",
                    f"{x['measured_s']:.4g}",
                    f"{x['predicted_s']:.4g} ({low:.4g} to {high:.4g})",
                    f"{100 * x['error']:+.1f} %",
                    "yes" if x["is_covered"] else "no",
                )
            )
        far += [
            (name, f"{x['row']:,}", f"{x['measured_s']:.4g}", f"{x['predicted_s']:.4g}")
            for x in values["farthest"]
        ]
    distances = ", ".join(
        f"{LATENCIES[latency][0]} {x['kolmogorov_distance']:.3f}"
        for latency, x in document.items()
    )
    errors = ", ".join(
        f"{LATENCIES[latency][0]} {format_percent(x['median_absolute_error'])}"
        for latency, x in document.items()
    )
    heads = ("", "measured [s]", "predicted [s]", "error", "in the interval")
    note = f"Kolmogorov-Smirnov distance: {distances}. Median error of a request: "
    return [
        Sheet("Compared requests", heads, cells, f"{note}{errors}."),
        Sheet(
            "Farthest requests",
            ("", "row", "measured [s]", "predicted [s]"),
            far,
        ),
    ]


def coefficient_sheet(posterior: ServerPosterior) -> Sheet:
    """Returns the fitted coefficients, and those that the data determine."""
    spreads = posterior.deviations.std(axis=0)
    cells = []
    for index, (name, (median, spread)) in enumerate(PRIOR.items()):
        value = median * np.exp(spread * posterior.mode[index])
        origin = "data" if spreads[index] < DETERMINED_SPREAD else "prior"
        cells.append((name, f"{value:.3g}", f"{spreads[index]:.2f}", origin))
    heads = ("coefficient", "value", "spread over the prior's", "determined by")
    note = (
        f"The data determine a coefficient whose spread is below {DETERMINED_SPREAD:g}."
    )
    return Sheet("Coefficients", heads, cells, note)


def render_comparison(case: ServerCase, summary: RunSummary) -> dict[str, bytes]:
    """Draws queue and latencies, simulated and measured; returns the files by name."""
    measured = _measured(case)

    def draw(axes: np.ndarray) -> None:
        _draw_queue(axes[0], case, summary)
        for ax, latency in zip(axes[1:], LATENCIES, strict=True):
            _draw_shares(ax, latency, measured[latency], summary.latencies[latency])

    return render_figure(draw, panels=(3, 1), size_inches=(6.8, 2.8))


def _draw_queue(ax: "Axes", case: ServerCase, summary: RunSummary) -> None:
    """Draws the requests without a first token over time."""
    assert case.log is not None
    run = summary.run
    log = case.log
    times = np.linspace(0, float(log.last_token_s.max()), 300)

    def queue(arrival_s: np.ndarray, first_s: np.ndarray) -> np.ndarray:
        arrived = np.searchsorted(np.sort(arrival_s), times, side="right")
        return arrived - np.searchsorted(np.sort(first_s), times, side="right")

    pairs = zip(run.arrival_s, run.first_s, strict=True)
    simulated = np.stack([queue(*pair) for pair in pairs])
    tail = 50 * (1 - LEVEL)
    low, middle, high = np.percentile(simulated, [tail, 50, 100 - tail], axis=0)
    color = plotting.colors()[PURPLE]
    shade_band(ax, times, low, high, color, 0.25)
    ax.plot(times, middle, color=color, label="simulated")
    measured = queue(log.arrival_s, log.first_token_s)
    ax.plot(times, measured, color="black", linewidth=1, label="measured")
    title = f"{measured.max():,} requests wait at most; simulated {middle.max():,.0f}"
    set_labels(ax, title, "time [s]", "requests without a token [1]")
    ax.legend()


def _draw_shares(
    ax: "Axes",
    latency: str,
    measured: Float[np.ndarray, " requests"],
    simulated: Float[np.ndarray, "draws requests"],
) -> None:
    """Draws the share of requests below a latency."""
    name, color = LATENCIES[latency]
    shares = np.arange(0.5, 100)
    tail = 50 * (1 - LEVEL)
    low, middle, high = np.percentile(
        np.percentile(simulated, shares, axis=1), [tail, 50, 100 - tail], axis=1
    )
    look = plotting.colors()[color]
    ax.fill_betweenx(shares, low, high, color=look, alpha=0.25, linewidth=0)
    ax.plot(middle, shares, color=look, label="simulated")
    ax.plot(
        np.percentile(measured, shares),
        shares,
        color="black",
        linewidth=1,
        label="measured",
    )
    distance = kolmogorov_distance(np.median(simulated, axis=0), measured)
    title = f"{name.capitalize()}: Kolmogorov-Smirnov distance {distance:.3f}"
    set_labels(ax, title, f"{name} [s]", "requests [%]", ylim=(0, 100))
    ax.legend()
