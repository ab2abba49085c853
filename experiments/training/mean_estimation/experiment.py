"""Does the error of a mean fall as one over the number of samples?

The first scaling law of the lectures: the mean of n independent samples misses the
truth by sigma^2 / n, squared and on average, so that `ln error = -ln n + 2 ln sigma`.
Here it is simulated, and both the law and a free power law are fitted to what came out.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.framework import (
    MeasuredValue,
    ResultRecord,
    claims_file,
    column,
    measured,
)
from experiments.plotting import style
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from scaling.fits import fit
from scaling.laws import published

SIGMA = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How many means of how many samples."""

    num_sizes: int = 40
    """Numbers of samples, evenly spread in logarithms."""
    max_samples: int = 4096
    """The largest of them; the smallest is 4."""
    num_means: int = 2000
    """Means of each number of samples, whose squared errors are averaged."""
    num_resamples: int = 1000
    """Resamples for the intervals."""
    seed: int = 0
    """Of the samples."""

    def __post_init__(self) -> None:
        """Refuses what cannot be simulated."""
        validation.at_least(self, "num_sizes", low=3)
        validation.at_least(self, "num_means", "num_resamples", low=2)
        if self.max_samples < 8 * self.num_sizes:
            raise ValueError(
                f"max_samples={self.max_samples!r} must be at least 8 times "
                f"num_sizes={self.num_sizes!r}"
            )


CONFIGS = {
    "smoke": Config(num_sizes=12, max_samples=256, num_means=500, num_resamples=100),
    "paper": Config(),
}


class Result(ResultRecord):
    """Errors by number of samples, and what was fitted to them."""

    num_samples: np.ndarray = column("of each mean")
    error: np.ndarray = column("mean squared error of the means")
    slope: float = column("of ln error against ln n, by a power law")
    slope_low: float = column("where its 90 % interval begins")
    slope_high: float = column("where it ends")
    sigma_squared: float = column("by the law with slope -1")


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Draws exponential samples, which are far from normal; fits their errors."""
    rng = np.random.default_rng(config.seed)
    sizes = np.unique(np.geomspace(4, config.max_samples, config.num_sizes).round())
    errors = []
    for size in progress.track(sizes, "means", "sizes"):
        drawn = rng.exponential(SIGMA, (config.num_means, int(size)))
        errors.append(np.mean((drawn.mean(1) - SIGMA) ** 2))
    sizes, error = sizes[: len(errors)], np.array(errors)
    if len(errors) < 3:
        return Result(sizes, error, *[np.nan] * 4)
    data = {"num_samples": sizes, "loss": error}
    law = published.find_law("power").over("num_samples")
    power = fit.fit(law, data, loss="mse", bootstrap=config.num_resamples)
    law = fit.fit(published.find_law("mean-estimation"), data, loss="mse")
    low, high = power.intervals["b"]
    slope = -power.coefficients["b"]
    return Result(sizes, error, slope, -high, -low, law.coefficients["sigma_squared"])


def plot(ax: Any, result: Result) -> None:
    """Draws the errors and the law."""
    x, law = result.num_samples, SIGMA**2 / result.num_samples
    style.draw_curve(ax, x, law, 0, "variance / samples", marker="", linewidth=1)
    style.draw_curve(ax, x, result.error, 5, "simulated", linestyle="")
    title = f"The error falls with slope {result.slope:.3f} "
    title += f"({result.slope_low:.3f} to {result.slope_high:.3f})"
    y = "mean squared error [squared units]"
    style.set_labels(ax, title, "sample size [samples]", y, xscale="log", yscale="log")
    ax.legend()


@claims_file(__file__).judge
def claims(result: Result) -> Iterator[MeasuredValue]:
    """Holds the slope and the size of the error against the formula."""
    width = result.slope_high - result.slope_low
    yield measured("slope", result.slope, tolerance=width if width > 0 else 0.0)
    yield measured("size", result.sigma_squared)
