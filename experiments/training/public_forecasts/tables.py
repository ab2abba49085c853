"""Results of `public_forecasts`: scores of splits, tasks and cells."""

import numpy as np

from experiments import lab


class SplitTable(lab.ResultTable):
    """Fitted and scored runs of each split."""

    split: lab.Texts = lab.column("scored and fitted runs in words")
    num_fitted: lab.Ints = lab.column("fitted runs", heading="runs fitted")
    num_scored: lab.Ints = lab.column("scored runs", heading="runs scored")
    digest: lab.Texts = lab.column("SHA-256 of both lists", form=lambda x: x[:12])
    is_committed: lab.Bools = lab.column("True if it is that of `splits.json`")
    skipped: lab.Texts = lab.column("reason, if the split was skipped")


class AccuracyTable(lab.ResultTable):
    """Forecasts of accuracies of tasks; NaN where none was measured."""

    split: lab.Texts = lab.column("scored runs")
    run: lab.Texts = lab.column("name of the run")
    task: lab.Texts = lab.column("name of the task")
    accuracy: lab.Floats = lab.column("two-stage law", form="{:.3f}")
    low: lab.Floats = lab.column("lower end of the 90 % interval", form="{:.3f}")
    high: lab.Floats = lab.column("upper end of the interval", form="{:.3f}")
    log_linear: lab.Floats = lab.column("line over ln(compute)", form="{:.3f}")
    measured: lab.Floats = lab.column("measured accuracy", form="{:.3f}")

    @property
    def error(self) -> np.ndarray:
        """Relative error of the law."""
        return np.abs(self.accuracy / self.measured - 1)

    @property
    def line_error(self) -> np.ndarray:
        """Relative error of the line."""
        return np.abs(self.log_linear / self.measured - 1)

    @property
    def is_covered(self) -> np.ndarray:
        """True if the interval contains the measured accuracy."""
        return (self.low <= self.measured) & (self.measured <= self.high)


_percent = "{:.3f} %"


class CellTable(lab.ResultTable):
    """Forecasts of the best pair of each scored cell of N and D."""

    split: lab.Texts = lab.column("scored cells")
    cell: lab.Texts = lab.column("parameters and tokens", heading="N:D")
    rate: lab.Floats = lab.column("forecast of the best rate", form="{:.3g}")
    rate_low: lab.Floats = lab.column("lower end of its interval", form="{:.3g}")
    rate_high: lab.Floats = lab.column("upper end of its interval", form="{:.3g}")
    best_rate: lab.Floats = lab.column("rate of the best run", form="{:.3g}")
    batch: lab.Floats = lab.column("forecast of the best batch", form="{:.0f}")
    batch_low: lab.Floats = lab.column("lower end of its interval", form="{:.0f}")
    batch_high: lab.Floats = lab.column("upper end of its interval", form="{:.0f}")
    best_batch: lab.Floats = lab.column("batch of the best run", form="{:.0f}")
    error: lab.Floats = lab.column(
        "loss lost by the forecast, %", form=_percent, heading="surface"
    )
    nearest_cell: lab.Floats = lab.column("by the nearest cell's pair", form=_percent)
    mean_pair: lab.Floats = lab.column("by one pair for all sizes", form=_percent)
    published: lab.Floats = lab.column(
        "by Step Law's constants", form=_percent, heading="Step Law"
    )

    @property
    def factors(self) -> tuple[float, float]:
        """Geometric means of the factors of error of rate and batch."""
        logs = np.log([self.rate / self.best_rate, self.batch / self.best_batch])
        rate, batch = np.exp(np.abs(logs).mean(1)).tolist()
        return rate, batch

    @property
    def num_covered(self) -> int:
        """Intervals, of two for each cell, that contain the best measured value."""
        rate = (self.rate_low <= self.best_rate) & (self.best_rate <= self.rate_high)
        batch = self.batch_low <= self.best_batch
        return int(rate.sum() + (batch & (self.best_batch <= self.batch_high)).sum())


CHOICES = {
    "error": "surface",
    "nearest_cell": "nearest cell",
    "mean_pair": "mean pair",
    "published": "Step Law",
}
"""Ways to choose a pair, by column of `CellTable`."""


class Result(lab.ResultRecord):
    """Forecasts of all splits."""

    is_public: bool = lab.column("True for published tables", is_shown=False)
    accuracies: AccuracyTable = lab.column("accuracies of tasks", is_shown=False)
    cells: CellTable = lab.column(
        "best pairs",
        heading="best pairs, worst first",
        note="90 % intervals of the best measured pair. The last four columns are the "
        "loss lost by the nearest measured pair.",
    )
    splits: SplitTable = lab.column("splits")
