"""Predicted latencies of load stages, next to the measured ones."""

from collections.abc import Iterator

import numpy as np

from jaxkv.report import (
    Floats,
    Ints,
    ResultRecord,
    ResultTable,
    Texts,
    column,
    computed_column,
    format_percent,
)
from scaling.calibration import (
    PRIOR,
    MeasuredStage,
    ServerPosterior,
    StageLatencies,
    draw_coefficients,
)

LATENCY_STATISTICS = {
    "end-to-end mean": ("end_to_end_s", "mean"),
    "end-to-end P99": ("end_to_end_s", "p99"),
    "first token mean": ("first_token_s", "mean"),
    "first token median": ("first_token_s", "median"),
    "first token P99": ("first_token_s", "p99"),
    "inter-token mean": ("inter_token_s", "mean"),
    "inter-token P99": ("inter_token_s", "p99"),
}
"""Latency and statistic of each predicted number."""
END_TO_END = "end-to-end mean"
FIRST_TOKEN = "first token median"
"""The numbers that are fitted, and that have bars."""
QUANTILE_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of a prediction."""


class Fits(ResultTable):
    """Fits of the coefficients."""

    left_out: Texts = column("none, load or model: what the fit left out, by kind")
    name: Texts = column("name of the stage or model that was left out", heading="name")
    stages: Texts = column("names of the fitted stages", heading="fitted stages")
    num_effective: Floats = column("effective proposals", form="{:,.0f}")


class Predictions(ResultTable):
    """Predicted numbers, each with the fit that it follows from."""

    left_out: Texts = column("what the fit left out; roofline: there was no fit")
    fit: Ints = column("row of `Fits`, -1 for the roofline")
    stage: Texts = column("name of the predicted stage")
    model: Texts = column("checkpoint")
    rate_per_s: Floats = column("requests per second", heading="requests/s")
    latency: Texts = column("a key of `LATENCY_STATISTICS`")
    measured_s: Floats = column("as the clients measured it", heading="measured")
    low_s: Floats = column("5 % quantile", heading="5 %")
    quarter_s: Floats = column("25 % quantile", heading="25 %")
    predicted_s: Floats = column("median", heading="predicted")
    three_quarters_s: Floats = column("75 % quantile", heading="75 %")
    high_s: Floats = column("95 % quantile", heading="95 %")

    @property
    @computed_column(heading="error", form=format_percent)
    def error(self) -> np.ndarray:
        """Relative error of the median."""
        return self.predicted_s / self.measured_s - 1

    @property
    @computed_column(heading="in 90 %")
    def is_in_90(self) -> np.ndarray:
        """True if the 90 % interval contains the measured value."""
        return (self.low_s <= self.measured_s) & (self.measured_s <= self.high_s)

    @property
    @computed_column(heading="in 50 %", is_reported=False)
    def is_in_50(self) -> np.ndarray:
        """True if the 50 % interval contains the measured value."""
        low = self.quarter_s
        high = self.three_quarters_s
        return (low <= self.measured_s) & (self.measured_s <= high)

    @property
    @computed_column(heading="width", form=format_percent)
    def width(self) -> np.ndarray:
        """Full width of the 90 % interval, relative to the median."""
        return (self.high_s - self.low_s) / self.predicted_s


class Overloaded(ResultTable):
    """Stages that are neither fitted nor predicted: clients gave up."""

    stage: Texts = column("name")
    rate_per_s: Floats = column("requests per second", heading="requests/s")
    successes: Ints = column("answered requests")
    failures: Ints = column("requests that failed or were given up")


class Coefficients(ResultTable):
    """Coefficients before and after the fit to all stages."""

    name: Texts = column("field of `ServerCoefficients`", heading="coefficient")
    prior_low: Floats = column("5 %", heading="prior 5 %", form="{:.3g}")
    prior: Floats = column("median", heading="median", form="{:.3g}")
    prior_high: Floats = column("95 %", heading="95 %", form="{:.3g}")
    low: Floats = column("5 %", heading="posterior 5 %", form="{:.3g}")
    median: Floats = column("median", heading="median", form="{:.3g}")
    high: Floats = column("95 %", heading="95 %", form="{:.3g}")


class Errors(ResultTable):
    """Errors of the predictions of a kind, by latency."""

    latency: Texts = column("a key of `LATENCY_STATISTICS`")
    median: Floats = column("median error", heading="median error", form=format_percent)
    worst: Floats = column("largest error", heading="worst", form=format_percent)
    worst_stage: Texts = column("its stage", heading="its stage")
    in_50: Ints = column("stages in the 50 % interval", heading="in 50 %")
    in_90: Ints = column("stages in the 90 % interval", heading="in 90 %")
    stages: Ints = column("predicted stages", heading="of")
    width: Floats = column("mean width", heading="90 % width", form=format_percent)


class CalibrationResult(ResultRecord):
    """Predictions, fits and coefficients."""

    predictions: Predictions = column("predicted numbers")
    fits: Fits = column("fits")
    overloaded: Overloaded = column("stages that are left out of everything")
    coefficients: Coefficients = column("coefficients of the fit to all stages")
    server: str = column(
        "posterior of the fit to all stages, as a file; empty without it",
        is_reported=False,
    )

    def kinds(self) -> list[str]:
        """Returns the kinds of predictions, in their order."""
        return self.predictions.distinct("left_out")

    def errors(self, left_out: str) -> Errors:
        """Returns the errors of the predictions of a kind, by latency."""
        rows = []
        for name in LATENCY_STATISTICS:
            table = self.predictions.where(left_out=left_out, latency=name)
            error = np.abs(table.error)
            worst = int(np.argmax(error))
            covered = table.is_in_50.sum(), table.is_in_90.sum(), len(table)
            largest = error[worst], table.stage[worst]
            rows.append(
                (name, np.median(error), *largest, *covered, table.width.mean())
            )
        return Errors.of(rows)


def prediction_rows(
    stage: MeasuredStage, latencies: StageLatencies, left_out: str, fit: int
) -> Iterator[tuple[object, ...]]:
    """Yields the rows of `Predictions` for a stage."""
    for name, (latency, statistic) in LATENCY_STATISTICS.items():
        quantiles = np.quantile(
            getattr(getattr(latencies, latency), statistic), QUANTILE_LEVELS
        )
        measured_s = getattr(getattr(stage, latency), statistic)
        place = (left_out, fit, stage.name, stage.model, stage.rate_per_s, name)
        yield *place, measured_s, *quantiles


def coefficient_table(posterior: ServerPosterior) -> Coefficients:
    """Returns the intervals of the coefficients before and after a fit."""
    levels = (0.05, 0.5, 0.95)
    half = 1.6449  # the 95 % quantile of a standard normal
    ends = np.array([[-half], [0.0], [half]]) * np.ones(len(PRIOR))
    priors, draws = map(draw_coefficients, (ends, posterior.deviations))
    return Coefficients.of(
        (name, *np.asarray(before), *np.quantile(np.asarray(after), levels))
        for name, before, after in zip(PRIOR, priors, draws, strict=True)
    )
