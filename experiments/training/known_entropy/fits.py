"""The Chinchilla law of runs on a language, its floor as free as everything else."""

from typing import NamedTuple

import numpy as np

from experiments.training.known_entropy.runs import Runs
from scaling.fits import fit as fits_fit
from scaling.laws import published


class Fit(NamedTuple):
    """The Chinchilla law of the losses.

    Attributes:
      floor: it found, E, in nats per token.
      floor_low: lower end of its 90 % interval.
      floor_high: upper end.
      alpha: exponent of the parameters.
      alpha_low: lower end.
      alpha_high: upper end.
      beta: exponent of the tokens.
      beta_low: lower end.
      beta_high: upper end.
      identified: whether the fit finds nothing to doubt about its floor.
      warnings: its doubts in words.
      num_points: runs fitted.
    """

    floor: float
    floor_low: float
    floor_high: float
    alpha: float
    alpha_low: float
    alpha_high: float
    beta: float
    beta_low: float
    beta_high: float
    identified: bool
    warnings: str
    num_points: int

    def covers(self, floor: float) -> bool:
        """Whether the interval is bounded and holds a floor."""
        bounded = bool(np.isfinite([self.floor_low, self.floor_high]).all())
        return bounded and self.floor_low <= floor <= self.floor_high


def fit(runs: Runs, chosen: np.ndarray, num_resamples: int) -> Fit:
    """Fits the law with its floor free; nothing where the runs are too few."""
    chosen = chosen & np.isfinite(runs.loss)
    if len({*runs.width[chosen]}) < 2 or chosen.sum() < 6:
        return Fit(*[float("nan")] * 9, False, "too few runs", int(chosen.sum()))
    found = fits_fit.fit(
        published.find("chinchilla"),
        {
            "num_params": runs.num_params[chosen],
            "num_tokens": runs.num_tokens[chosen],
            "loss": runs.loss[chosen],
        },
        bootstrap=num_resamples,
    )
    ends = {
        name: (found.coefficients[name], *found.intervals[name])
        for name in ("E", "alpha", "beta")
    }
    said = any(warning.startswith(("E=", "E ")) for warning in found.warnings)
    free = any(abs(way.get("E", 0)) > 0.1 for way in found.flat_directions)
    return Fit(
        *(*ends["E"], *ends["alpha"], *ends["beta"]),
        identified=not (said or free),
        warnings="; ".join(found.warnings),
        num_points=found.num_points,
    )
