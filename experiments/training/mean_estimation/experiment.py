"""Measures the error of a mean by number of samples.

The lectures' first scaling law: the mean of n independent samples has the mean squared
error sigma^2 / n, so that `ln error = -ln n + 2 ln sigma`. The error is simulated, and
both the law and a free power law are fitted to it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import numpy as np

from experiments import lab
from scaling import fits
from scaling.laws import find_law

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIGMA = 2.0


class Config(lab.ConfigRecord):
    """Numbers of samples and of means."""

    num_sizes: Annotated[int, lab.Range(3)] = 40
    """Numbers of samples, evenly spaced in logarithm."""
    max_samples: int = 4096
    """Largest number of samples; the smallest is 4."""
    num_means: Annotated[int, lab.Range(2)] = 2000
    """Means of each number of samples, over which squared errors are averaged."""
    num_resamples: Annotated[int, lab.Range(2)] = 1000
    """Resamples for intervals."""
    seed: int = 0
    """Seed of the samples."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.max_samples < 8 * self.num_sizes:
            raise ValueError(
                f"max_samples={self.max_samples!r} must be at least 8 times "
                f"num_sizes={self.num_sizes!r}"
            )


CONFIGS = {
    "smoke": Config(num_sizes=12, max_samples=256, num_means=500, num_resamples=100),
    "paper": Config(),
}


class Result(lab.ResultRecord):
    """Errors by number of samples, and fitted laws."""

    num_samples: np.ndarray = lab.column("samples of each mean")
    error: np.ndarray = lab.column("mean squared error of the means")
    slope: float = lab.column("slope of ln error against ln n, by a power law")
    slope_low: float = lab.column("lower end of its 90 % interval")
    slope_high: float = lab.column("upper end of its 90 % interval")
    sigma_squared: float = lab.column("by the law with slope -1")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Draws exponential samples, which are far from normal, and fits the errors."""
    rng = np.random.default_rng(config.seed)
    sizes = np.unique(np.geomspace(4, config.max_samples, config.num_sizes).round())
    errors = []
    for size in progress.track(sizes, "means", "sizes"):
        samples = rng.exponential(SIGMA, (config.num_means, int(size)))
        errors.append(np.mean((samples.mean(1) - SIGMA) ** 2))
    sizes = sizes[: len(errors)]
    error = np.array(errors)
    if len(errors) < 3:
        return Result(sizes, error, *[np.nan] * 4)
    data = {"num_samples": sizes, "loss": error}
    law = find_law("power").over("num_samples")
    squares = fits.Objective("mse")
    power = fits.fit(law, data, objective=squares)
    power = fits.bootstrap(power, data, num_resamples=config.num_resamples)
    law = fits.fit(find_law("mean-estimation"), data, objective=squares)
    low, high = power.intervals["b"]
    slope = -power.coefficients["b"]
    return Result(sizes, error, slope, -high, -low, law.coefficients["sigma_squared"])


def plot(ax: "Axes", result: Result) -> None:
    """Draws the errors and the law."""
    x = result.num_samples
    law = SIGMA**2 / result.num_samples
    lab.draw_curve(ax, x, law, 0, "variance / samples", marker="", linewidth=1)
    lab.draw_curve(ax, x, result.error, 5, "simulated", linestyle="")
    title = f"The error falls with slope {result.slope:.3f} "
    title += f"({result.slope_low:.3f} to {result.slope_high:.3f})"
    y = "squared error [squared units]"
    lab.set_labels(ax, title, "sample size [samples]", y, xscale="log", yscale="log")
    ax.legend()


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares slope and size of the error with the formula."""
    width = result.slope_high - result.slope_low
    yield lab.measured("slope", result.slope, tolerance=width if width > 0 else 0.0)
    yield lab.measured("size", result.sigma_squared)


STUDY = lab.Study(CONFIGS, Result, run, plot, claims)
