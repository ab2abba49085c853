"""A loss of parameters and tokens with one exponent, fitted to a few runs."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from scaling.forecasts.least_squares import minimize_huber


class TiedPowers(NamedTuple):
    """`E + A N^-alpha + B D^-alpha`.

    Attributes:
      E: floor.
      A: size of the term of parameters.
      B: size of the term of tokens.
      alpha: exponent of both.
    """

    E: float
    A: float
    B: float
    alpha: float

    def loss(
        self, num_params: Float[np.ndarray, " n"], num_tokens: Float[np.ndarray, " n"]
    ) -> Float[np.ndarray, " n"]:
        """Returns the loss."""
        terms = self.A * num_params**-self.alpha + self.B * num_tokens**-self.alpha
        return self.E + terms


def fit_tied_powers(
    num_params: Float[np.ndarray, " n"],
    num_tokens: Float[np.ndarray, " n"],
    loss: Float[np.ndarray, " n"],
) -> tuple[TiedPowers, bool]:
    """Fits by least squares of ln(loss), from several starts; exponent in [0.001, 2].

    Returns:
      The law, and True if the fit converged.
    """
    x = np.log(num_params)
    y = np.log(num_tokens)
    centre_x = x.mean()
    centre_y = y.mean()
    x = x - centre_x
    y = y - centre_y

    def residuals(
        c: Float[np.ndarray, " k"],
    ) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, "n k"]]:
        powers = np.exp([c[1] - c[3] * x, c[2] - c[3] * y])
        terms = np.stack([np.full_like(x, np.exp(c[0])), *powers])
        total = terms.sum(0)
        exponent = -(terms[1] * x + terms[2] * y)
        return np.log(total / loss), (np.vstack([terms, exponent]) / total).T

    level = np.log(loss.mean())
    low = np.array([level - 14, level - 14, level - 14, 1e-3])
    high = np.array([np.log(loss.min()), level + 7, level + 7, 2.0])
    ends = []
    for share in (0.1, 0.5, 0.8):
        half = level + np.log((1 - share) / 2)
        start = np.array([level + np.log(share), half, half, 0.3])
        ends.append(minimize_huber(residuals, start, low=low, high=high))
    best = min(ends, key=lambda end: end.objective)
    c = best.coefficients
    scales = np.exp(c[:3] + c[3] * np.array([0.0, centre_x, centre_y]))
    return TiedPowers(*map(float, (*scales, c[3]))), best.is_converged
