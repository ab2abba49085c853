"""Does the error of a mean fall as one over the number of samples?

The first scaling law of the lectures: the mean of n independent samples misses the
truth by sigma^2 / n, squared and on average, so that `ln error = -ln n + 2 ln sigma`.
Here it is simulated, and both the law and a free power law are fitted to what came out.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from experiments.framework import Claim, judge
from experiments.plotting import style
from jaxkv.progress import QUIET, Progress
from scaling.fits import fit
from scaling.laws import published

SIGMA = 2.0
_SOURCE = "the lectures: ln error = -ln n + 2 ln sigma"


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
        if self.num_sizes < 3 or self.num_means < 2 or self.num_resamples < 2:
            raise ValueError(
                f"{self.num_sizes=} must be at least 3, {self.num_means=} and "
                f"{self.num_resamples=} at least 2"
            )
        if self.max_samples < 8 * self.num_sizes:
            raise ValueError(
                f"{self.max_samples=} must be at least 8 times {self.num_sizes=}"
            )


CONFIGS = {
    "smoke": Config(num_sizes=12, max_samples=256, num_means=500, num_resamples=100),
    "paper": Config(),
}


class Result(NamedTuple):
    """Errors by number of samples, and what was fitted to them."""

    num_samples: np.ndarray
    error: np.ndarray
    """Mean squared error of the means."""
    slope: float
    """Of ln error against ln n, by a power law; with its 90 % interval."""
    slope_low: float
    slope_high: float
    sigma_squared: float
    """By the law with slope -1."""


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Draws exponential samples, which are far from normal; fits their errors."""
    rng = np.random.default_rng(config.seed)
    sizes = np.unique(np.geomspace(4, config.max_samples, config.num_sizes).round())
    errors = []
    for size in progress.track(sizes, "means", "sizes"):
        drawn = rng.exponential(SIGMA, (config.num_means, int(size)))
        errors.append(np.mean((drawn.mean(1) - SIGMA) ** 2))
    data = {"num_samples": sizes[: len(errors)], "loss": np.array(errors)}
    if len(errors) < 3:
        return Result(data["num_samples"], data["loss"], *[np.nan] * 4)
    power = fit.fit(
        published.find("power").over("num_samples"),
        data,
        loss="mse",
        bootstrap=config.num_resamples,
    )
    law = fit.fit(published.find("mean-estimation"), data, loss="mse")
    low, high = power.intervals["b"]
    return Result(
        data["num_samples"],
        data["loss"],
        -power.coefficients["b"],
        -high,
        -low,
        law.coefficients["sigma_squared"],
    )


def plot(ax: Any, result: Result) -> None:
    """Draws the errors and the law."""
    colors = style.colors()
    ax.loglog(result.num_samples, SIGMA**2 / result.num_samples, color="0.7")
    ax.loglog(result.num_samples, result.error, "o", color=colors[5])
    ends = f"{result.slope_low:.3f} to {result.slope_high:.3f}"
    ax.text(0.35, 0.85, f"slope {result.slope:.3f} ({ends})", transform=ax.transAxes)
    ax.set_xlabel("samples")
    ax.set_ylabel("mean squared error")


def claims(result: Result) -> list[Claim]:
    """Holds the slope and the size of the error against the formula."""
    half = (result.slope_high - result.slope_low) / 2
    return [
        judge(
            "the error falls with slope -1, to within the 90 % interval's width",
            source=_SOURCE,
            published=-1,
            ours=result.slope,
            unit="1",
            tolerance=2 * half if half > 0 else 0.0,
        ),
        judge(
            "its size is the variance of one sample",
            source=_SOURCE,
            published=SIGMA**2,
            ours=result.sigma_squared,
            unit="1",
            tolerance=0.05 * SIGMA**2,
        ),
    ]


def metrics(result: Result) -> dict[str, Any]:
    """Gives the slope with its interval."""
    return {
        "slope": result.slope,
        "slope_low": result.slope_low,
        "slope_high": result.slope_high,
        "sigma_squared": result.sigma_squared,
    }
