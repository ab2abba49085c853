"""Parabolas through losses against the logarithm of the size: vertex, bias, correction.

A parabola is an approximation: along an isoFLOP curve of the Chinchilla form `L - E` is
proportional to `10^(-alpha w)/alpha + 10^(beta w)/beta`, with `w = log10(N / N*)`.
Unless alpha = beta, its vertex is not the minimum. If samples are centred in the same
way at every budget, the shift is a constant, and exponents stay exact.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxkv import validation

_MAX_VERTEX_STEPS = 100
"""Largest number of fixed-point rounds in `correct_vertex`; each reduced the error at
least tenfold on the tested surfaces."""


class Vertex(NamedTuple):
    """Lowest or highest points of parabolas.

    Attributes:
      place: position on the axis of the samples.
      height: value at that position.
      curvature: quadratic coefficient; above 0 for a parabola that opens upward.
    """

    place: Float[np.ndarray, " curves"]
    height: Float[np.ndarray, " curves"]
    curvature: Float[np.ndarray, " curves"]


def fit_parabola(
    x: Float[np.ndarray, " points"],
    y: Float[np.ndarray, "curves points"],
    weights: Float[np.ndarray, "curves points"],
) -> Vertex:
    """Fits a parabola to each curve by weighted least squares.

    Args:
      x: positions of the samples.
      y: values of the samples.
      weights: weights, at least 0; a curve needs three points with weight.

    Returns:
      The vertices; NaN for a curve with fewer than three points.
    """
    y = np.where(weights > 0, y, 0.0)  # absent values must be finite
    # Centred on the weighted mean and scaled: the normal equations stay well
    # conditioned, and a symmetric curve has its vertex at the centre to rounding.
    total = weights.sum(1, keepdims=True)
    enough = ((weights > 0).sum(1) >= 3)[:, None]
    total = np.where(enough, total, 1.0)
    centre = (weights * x).sum(1, keepdims=True) / total
    level = (weights * y).sum(1, keepdims=True) / total
    spread = np.sqrt((weights * (x - centre) ** 2).sum(1, keepdims=True) / total)
    spread = np.where(enough, spread, 1.0)
    u = (x - centre) / spread
    v = y - level
    m2, m3, m4, c1, c2 = (
        (weights * z).sum(1) / total[:, 0] for z in (u**2, u**3, u**4, u * v, u**2 * v)
    )
    # Mean of u and of v is 0: the constant is -a2 m2.
    determinant = m2 * (m4 - m2**2) - m3**2
    usable = enough[:, 0] & (determinant > 0)
    determinant = np.where(usable, determinant, 1.0)
    a2 = np.where(usable, (m2 * c2 - m3 * c1) / determinant, np.nan)
    a1 = np.where(usable, ((m4 - m2**2) * c1 - m3 * c2) / determinant, np.nan)
    top = -a1 / (2 * np.where(a2 == 0, np.nan, a2))
    return Vertex(
        centre[:, 0] + spread[:, 0] * top,
        level[:, 0] - a2 * m2 + a1 * top / 2,
        a2 / spread[:, 0] ** 2,
    )


def evaluate_parabola(
    x: Float[np.ndarray, " points"], y: Float[np.ndarray, " points"]
) -> Float[np.ndarray, " points"]:
    """Evaluates the parabola through some samples at their own positions."""
    vertex = fit_parabola(x, y[None], np.ones((1, x.size)))
    return vertex.height[0] + vertex.curvature[0] * (x - vertex.place[0]) ** 2


def select_window(
    y: Float[np.ndarray, "curves points"],
    present: Bool[np.ndarray, "curves points"],
    window: int,
) -> Bool[np.ndarray, "curves points"]:
    """Selects `window` points around the lowest point of each curve, itself included.

    Args:
      y: values, in the order of their positions.
      present: mask of the values.
      window: number of points, odd; at an end of the curve, more points of its other
        side are selected.
    """
    rank = np.cumsum(present, 1) - 1
    lowest = np.argmin(np.where(present, y, np.inf), 1)
    at = np.take_along_axis(rank, lowest[:, None], 1)
    first = np.clip(
        at - window // 2, 0, np.maximum(present.sum(1)[:, None] - window, 0)
    )
    return present & (rank >= first) & (rank < first + window)


@validation.checks_numbers(half_width="(0, 1000]", num_points=(3, 2**20))
def vertex_shift(
    alpha: float, beta: float, half_width: float, num_points: int
) -> float:
    """Returns the distance of vertex and minimum in decades of N, in closed form.

    Args:
      alpha: exponent of N, above 0.
      beta: exponent of D, above 0.
      half_width: W, decades of N on each side of the minimum, in (0, 1000].
      num_points: number of samples, evenly spaced over [-W, W], at least 3.

    Returns:
      `-a1 / 2 a2`: 0.016974194774109 for (0.34, 0.28, 1, 9), which makes N* 4.0 % too
      high; 0 if alpha = beta.

    Raises:
      ValueError: an argument is out of its range.

    Source: least squares on `10^(-alpha w)/alpha + 10^(beta w)/beta`, the Chinchilla
    form (Hoffmann et al. 2022, arXiv:2203.15556, section 3.3) at constant 6ND.
    """
    w = np.linspace(-half_width, half_width, num_points)
    with np.errstate(all="ignore"):  # checked below
        f = _along(w, alpha, beta)
        a1 = (w * f).sum() / (w**2).sum()
        a2 = (num_points * (w**2 * f).sum() - (w**2).sum() * f.sum()) / (
            num_points * (w**4).sum() - (w**2).sum() ** 2
        )
        shift = float(-a1 / (2 * a2))
    if not np.isfinite(shift):
        raise ValueError(f"{alpha=}, {beta=} and {half_width=} have no finite shift")
    return shift


def correct_vertex(
    place: float, x: Float[np.ndarray, " points"], alpha: float, beta: float
) -> float:
    """Corrects the bias of a vertex, given the exponents of the surface.

    Args:
      place: vertex of the parabola through the samples at `x`, `log10 N`.
      x: positions of the samples, `log10 N`; need not be centred or evenly spaced.
      alpha: exponent of N.
      beta: exponent of D.

    Returns:
      The minimum for which the same parabola, through samples of the Chinchilla form,
      has this vertex; NaN if there is none nearby.
    """
    minimum = place
    ones = np.ones((1, x.size))
    for _ in range(_MAX_VERTEX_STEPS):
        with np.errstate(over="ignore", invalid="ignore"):  # if it diverges
            curve = _along(x - minimum, alpha, beta)
            vertex = float(fit_parabola(x, curve[None], ones).place[0])
        step = place - vertex
        minimum += step
        if not abs(step) > 1e-14:
            break
    return minimum if abs(step) < 1e-9 else float("nan")


def _along(
    w: Float[np.ndarray, " points"], alpha: float, beta: float
) -> Float[np.ndarray, " points"]:
    """`L - E` along an isoFLOP curve, up to a factor, in decades from its minimum."""
    return 10 ** (-alpha * w) / alpha + 10 ** (beta * w) / beta
