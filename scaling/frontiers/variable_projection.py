"""The surface `E + A/N^alpha + B/D^beta` by variable projection, for many resamples.

For fixed exponents the loss is linear in E, A and B, which are then solved exactly
under the constraint that none is below 0; the search is over the plane of the two
exponents, where it is well conditioned. The objective is least squares of the loss; or,
robust, Huber's loss of the residual over the loss, by iteratively reweighted least
squares.

Source: Golub & Pereyra 1973, SIAM J. Numer. Anal. 10(2), with Kaufman's 1975 Jacobian.
Used for scaling laws by the Open-Athena study of Chinchilla's approaches.
"""

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

EXPONENT_RANGE = (0.01, 3.0)
"""Bounds of both exponents."""
_EXPONENT_STARTS = tuple(itertools.product((0.1, 0.2, 0.35, 0.6, 1.0), repeat=2))
_FACES = np.array(
    [x for x in itertools.product((1.0, 0.0), repeat=3) if 0 < sum(x) < 3]
)
"""Masks of E, A and B if some of them are 0, without all and none."""
_NUM_STEPS = 60
_MAX_REWEIGHTINGS = 30
"""Largest number of rounds of reweighting; each reduces the error several times."""
_CUTOFF = 1.345
"""Spreads beyond which a residual counts linearly: 95 % of the efficiency of least
squares for normal noise. Huber 1964, Ann. Math. Statist. 35(1)."""


class SurfacePoints(NamedTuple):
    """Runs of a surface fit.

    Attributes:
      log_n: natural logarithms of the parameters.
      log_d: natural logarithms of the tokens.
      loss: nats per token.
    """

    log_n: Float[np.ndarray, " points"]
    log_d: Float[np.ndarray, " points"]
    loss: Float[np.ndarray, " points"]


class Surface(NamedTuple):
    """Fitted surfaces, one for each set of weights.

    Attributes:
      alpha: exponent of N, within `EXPONENT_RANGE`.
      beta: exponent of D, within `EXPONENT_RANGE`.
      log_a: logarithm of A; minus infinity if the term vanishes.
      log_b: logarithm of B; minus infinity if the term vanishes.
      floor: E, at least 0.
      objective: half of the weighted sum of squares; of a robust fit, of the reweighted
        sum for residuals over the loss.
      delta: residual over the loss beyond which it counts linearly; infinite for least
        squares of the loss itself.
    """

    alpha: Float[np.ndarray, " fits"]
    beta: Float[np.ndarray, " fits"]
    log_a: Float[np.ndarray, " fits"]
    log_b: Float[np.ndarray, " fits"]
    floor: Float[np.ndarray, " fits"]
    objective: Float[np.ndarray, " fits"]
    delta: float = np.inf

    def log_residuals(self, points: SurfacePoints) -> Float[np.ndarray, "fits points"]:
        """Returns ln(fitted / observed) of some runs."""
        terms = (
            np.exp(size[:, None] - exponent[:, None] * x)
            for size, exponent, x in (
                (self.log_a, self.alpha, points.log_n),
                (self.log_b, self.beta, points.log_d),
            )
        )
        return np.log((self.floor[:, None] + sum(terms)) / points.loss)


def fit_surface(
    points: SurfacePoints,
    weights: Float[np.ndarray, "fits points"],
    start: tuple[float, float] | Float[np.ndarray, "fits 2"] | None = None,
    num_steps: int = _NUM_STEPS,
) -> Surface:
    """Fits the surface by weighted least squares.

    Args:
      points: the runs.
      weights: weights of the runs, at least 0, as of a bootstrap.
      start: alpha and beta to start from, for all or for each set of weights; by
        default 25 starts.
      num_steps: largest number of steps in the plane of the exponents.

    Returns:
      The best surface for each set of weights.
    """
    n0 = float(points.log_n.mean())
    d0 = float(points.log_d.mean())
    # A and B then have the size of their terms.
    centred = SurfacePoints(points.log_n - n0, points.log_d - d0, points.loss)
    starts = _EXPONENT_STARTS if start is None else (start,)
    descents = [_descend(centred, weights, np.array(x), num_steps) for x in starts]
    best = np.argmin([descent[2] for descent in descents], 0)
    pick = np.arange(len(weights))
    theta, linear, objective = (
        np.stack([descent[part] for descent in descents])[best, pick]
        for part in range(3)
    )
    with np.errstate(divide="ignore"):
        log_a = np.log(linear[:, 1]) + theta[:, 0] * n0
        log_b = np.log(linear[:, 2]) + theta[:, 1] * d0
    return Surface(theta[:, 0], theta[:, 1], log_a, log_b, linear[:, 0], objective)


def fit_surface_robustly(
    points: SurfacePoints, weights: Float[np.ndarray, "fits points"], pilot: Surface
) -> Surface:
    """Fits the surface by Huber's loss of residuals over the loss.

    Args:
      points: the runs.
      weights: weights of the runs, at least 0.
      pilot: surface of all points, the start. If it is not robust, `delta` is set from
        the spread of its residuals, and once more at the robust optimum; else its
        `delta` is kept.

    Returns:
      The surface for each set of weights, with the `delta`.
    """
    if not np.isfinite(pilot.delta):
        for _ in range(2):
            size = np.abs(pilot.log_residuals(points)[0])
            spread = 1.4826 * float(np.median(size))
            ones = np.ones((1, points.loss.size))
            delta = max(_CUTOFF * spread, 1e-9)
            pilot = fit_surface_robustly(points, ones, pilot._replace(delta=delta))
        return (
            pilot if len(weights) == 1 else fit_surface_robustly(points, weights, pilot)
        )
    # Least squares may be far off because of outliers; resamples start at the robust
    # fit.
    near = (float(pilot.alpha[0]), float(pilot.beta[0]))
    starts = (near, (0.35, 0.35)) if len(weights) == 1 else (near,)
    candidates = [_reweight(points, weights, start, pilot.delta) for start in starts]
    best = np.argmin([cost for _, cost in candidates], 0)
    pick = np.arange(len(weights))
    fields = zip(*(surface[:6] for surface, _ in candidates), strict=True)
    return Surface(*(np.stack(x)[best, pick] for x in fields), delta=pilot.delta)


def _reweight(
    points: SurfacePoints,
    weights: Float[np.ndarray, "fits points"],
    start: tuple[float, float],
    delta: float,
) -> tuple[Surface, Float[np.ndarray, " fits"]]:
    """Iterates reweighted least squares; returns the surface and its costs."""
    shrink = np.ones_like(weights)
    theta = np.tile(np.array(start, float), (len(weights), 1))
    for _ in range(_MAX_REWEIGHTINGS):  # two steps suffice, since weights change again
        surface = fit_surface(points, weights * shrink / points.loss**2, theta, 2)
        size = np.abs(np.expm1(surface.log_residuals(points)))
        shrink = np.minimum(1.0, delta / np.maximum(size, 1e-300))
        before = theta
        theta = np.stack([surface.alpha, surface.beta], 1)
        if np.all(np.abs(theta - before) < 1e-4 * theta):
            break
    costs = np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))
    return surface, (weights * costs).sum(1)


def _descend(
    points: SurfacePoints,
    weights: Float[np.ndarray, "fits points"],
    start: Float[np.ndarray, "*fits 2"],
    num_steps: int,
) -> tuple[
    Float[np.ndarray, "fits 2"],
    Float[np.ndarray, "fits 3"],
    Float[np.ndarray, " fits"],
]:
    """Levenberg-Marquardt on the projected problem."""
    (x, y, _), root = points, np.sqrt(weights)
    theta = np.broadcast_to(start, (len(weights), 2))
    damping = np.full(len(weights), 1e-3)
    state = _project(theta, points, root)
    for _ in range(num_steps):
        basis, residual, linear, objective = state
        # d(X c)/d(alpha), d(X c)/d(beta), minus their projection onto X.
        slopes = np.stack(
            [
                -x * np.exp(-theta[:, :1] * x) * linear[:, 1:2],
                -y * np.exp(-theta[:, 1:] * y) * linear[:, 2:],
            ],
            2,
        )
        slopes *= root[:, :, None]
        slopes -= basis @ (basis.transpose(0, 2, 1) @ slopes)
        gradient = -(slopes * residual[:, :, None]).sum(1)
        normal = slopes.transpose(0, 2, 1) @ slopes
        # Damped normal equations; no step if both slopes vanish.
        a, d = (normal[:, i, i] * (1 + damping) + 1e-300 for i in (0, 1))
        b, (g, h) = normal[:, 0, 1], gradient.T
        determinant = a * d - b**2
        usable = determinant > 1e-14 * a * d
        determinant = np.where(usable, determinant, 1.0)
        step = np.stack([d * g - b * h, a * h - b * g], 1) / determinant[:, None]
        fallback = np.stack([g / a, h / d], 1) / 2
        fallback = np.where(fallback == fallback, fallback, 0)
        step = np.where(usable[:, None], step, fallback)
        trial = np.clip(theta - step, *EXPONENT_RANGE)
        tried = _project(trial, points, root)
        better = tried[3] <= objective
        theta = np.where(better[:, None], trial, theta)
        damping = np.clip(damping * np.where(better, 0.1, 8.0), 1e-12, 1e12)
        state = tuple(
            np.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(tried, state, strict=True)
        )
        if np.all(np.abs(step) < 1e-10 * theta):
            break
    return theta, state[2], state[3]


def _project(
    theta: Float[np.ndarray, "fits 2"],
    points: SurfacePoints,
    root: Float[np.ndarray, "fits points"],
) -> tuple[
    Float[np.ndarray, "fits points 3"],
    Float[np.ndarray, "fits points"],
    Float[np.ndarray, "fits 3"],
    Float[np.ndarray, " fits"],
]:
    """Solves E, A and B, none below 0, for fixed exponents.

    Returns:
      An orthonormal basis of the terms, the weighted residuals, the coefficients, and
      half of the sum of squares.
    """
    design = np.stack(
        [
            np.ones((len(theta), points.loss.size)),
            np.exp(-theta[:, :1] * points.log_n),
            np.exp(-theta[:, 1:] * points.log_d),
        ],
        2,
    )
    design *= root[:, :, None]
    target = root * points.loss
    basis, linear = _least_squares(design, target)
    # If one is negative, the solution is on a face: with three terms all faces are
    # tried.
    rows = np.flatnonzero((linear < 0).any(1))
    least = np.full(rows.size, np.inf)
    for mask in _FACES if rows.size else ():
        face_basis, face_linear = _least_squares(design[rows] * mask, target[rows])
        face_linear *= mask
        short = target[rows] - (design[rows] @ face_linear[:, :, None])[:, :, 0]
        is_inside = (face_linear >= 0).all(1)
        square = np.where(is_inside, (short**2).sum(1), np.inf)
        is_better = square < least
        basis[rows[is_better]] = face_basis[is_better]
        linear[rows[is_better]] = face_linear[is_better]
        least = np.minimum(least, square)
    residual = target - (design @ linear[:, :, None])[:, :, 0]
    return basis, residual, linear, (residual**2).sum(1) / 2


def _least_squares(
    design: Float[np.ndarray, "fits points 3"], target: Float[np.ndarray, "fits points"]
) -> tuple[Float[np.ndarray, "fits points 3"], Float[np.ndarray, "fits 3"]]:
    """Orthogonalizes the terms one after another, twice; absent terms become 0."""
    basis = np.zeros_like(design)
    upper = np.zeros((len(design), 3, 3))
    for k in range(3):
        v = design[:, :, k].copy()
        for _ in range(2):
            part = (basis[:, :, :k] * v[:, :, None]).sum(1)
            upper[:, :k, k] += part
            v -= (basis[:, :, :k] * part[:, None, :]).sum(2)
        norm = np.sqrt((v**2).sum(1))
        # A term in the span of earlier ones is dropped.
        alive = norm > 1e-13 * np.sqrt((design[:, :, k] ** 2).sum(1))
        basis[:, :, k] = np.where(
            alive[:, None], v / np.where(alive, norm, 1.0)[:, None], 0.0
        )
        upper[:, k, k] = np.where(alive, norm, 1.0)
    c = (basis * target[:, :, None]).sum(1)
    for k in (2, 1, 0):
        c[:, k] /= upper[:, k, k]
        c[:, :k] -= upper[:, :k, k] * c[:, k : k + 1]
    return basis, c
