"""Approach 2 of Chinchilla: the best size at each of some budgets, by three methods.

Runs of one budget form a group. Its minimum is that of a parabola in log N, of Akima's
curve in log-log, or of the surface fitted to all groups together by variable
projection. The parabola is biased on asymmetric surfaces (`parabola`), and its window
matters; Akima's curve follows the noise of single runs; the surface uses all of the
runs and assumes the Chinchilla form.

Source: Hoffmann et al. 2022, arXiv:2203.15556, section 3.2 and figure 3.
"""

from collections.abc import Callable

import numpy as np

from jaxkv import validation
from scaling.fits import CHANCE, f_test_p_value, is_far, measure_goodness
from scaling.frontiers import akima, frontier, parabola, variable_projection
from scaling.frontiers.frontier import Find, Minima
from scaling.frontiers.groups import (
    MIN_SIZES,
    IsoflopGroup,
    IsoflopGroups,
    average_by_size,
)

WINDOWS = (3, 5, 7)
"""Numbers of points around the lowest one for which parabolas are compared."""


@validation.checks_numbers(window=3)
def by_parabola(
    groups: IsoflopGroups,
    window: int | None = None,
    exponents: tuple[float, float] | None = None,
) -> Find:
    """Returns a finder of minima of parabolas through the loss against log N.

    Args:
      groups: the groups.
      window: number of sizes around the lowest one that are fitted, odd, at least 3;
        None for all.
      exponents: alpha and beta of the surface, with which the bias of the vertex is
        corrected without resampling (`parabola.correct_vertex`); None for no
        correction.

    Returns:
      The finder. It rejects a group whose lowest loss is at an edge, whose parabola
      opens downward, or whose vertex is outside the sizes of its window or well below
      all runs.

    Raises:
      ValueError: `window` is even or below 3.
    """
    if window is not None and (window < 3 or window % 2 == 0):
        raise ValueError(f"{window=} must be odd and at least 3")

    def minimum(
        group: IsoflopGroup, loss: np.ndarray, weight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x = np.log10(group.sizes)
        present = weight > 0
        used = present
        if window is not None:
            used = parabola.select_window(loss, present, window)
        vertex = parabola.fit_parabola(x, loss, weight * used)
        place = vertex.place
        if exponents is not None:
            place = np.array(
                [
                    parabola.correct_vertex(float(p), x[mask], *exponents)
                    if np.isfinite(p)
                    else p
                    for p, mask in zip(place, used, strict=True)
                ]
            )
        reason = np.where(vertex.curvature > 0, frontier.FINE, frontier.DOWNWARD)
        low = np.where(used, x, np.inf).min(1, initial=np.inf)
        high = np.where(used, x, -np.inf).max(1, initial=-np.inf)
        beyond = ~((place >= low) & (place <= high))
        reason = np.where((reason == frontier.FINE) & beyond, frontier.OUTSIDE, reason)
        return place, vertex.height, reason

    return _find_by_group(groups, minimum)


def by_akima(groups: IsoflopGroups) -> Find:
    """Returns a finder of minima of Akima's curves through log L against log N."""

    def minimum(
        group: IsoflopGroup, loss: np.ndarray, weight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        present = weight > 0
        log_loss = np.log(np.where(present, loss, 1.0))
        place, low = akima.find_lowest(np.log10(group.sizes), log_loss, present)
        return place, np.exp(low), np.full(len(loss), frontier.FINE)

    return _find_by_group(groups, minimum)


def fit_group_surface(
    groups: IsoflopGroups, *, robust: bool = False
) -> variable_projection.Surface:
    """Fits `E + A/N^alpha + B/D^beta` to all groups together; needs at least one group.

    Its exponents are those for the correction in `by_parabola`.

    Args:
      groups: the groups.
      robust: True for Huber's loss of relative residuals, False for least squares of
        the loss.
    """
    points = _points(groups)
    ones = np.ones((1, groups.rows.size))
    surface = variable_projection.fit_surface(points, ones)
    return (
        variable_projection.fit_surface_robustly(points, ones, surface)
        if robust
        else surface
    )


FEW_DECIDE = 0.1
"""Difference of exponents of N between least squares and robust fit for a warning."""


def surface_warnings(
    groups: IsoflopGroups,
    surface: variable_projection.Surface,
    robust: variable_projection.Surface,
) -> list[str]:
    """Returns warnings about runs that the surface does not follow.

    Of 240 sound sets of 54 and 28 runs, with normal or heavy-tailed noise, none had a
    warning.

    Args:
      groups: the groups.
      surface: the surface by least squares, of `fit_group_surface`.
      robust: the robust surface.

    Returns:
      Sentences; empty if residuals are small, the robust surface agrees, and parabolas,
      one for each group, do not fit significantly better.
    """
    points = _points(groups)
    residuals = surface.log_residuals(points)[0]
    messages = []
    a, a_robust = (
        float(x.beta[0] / (x.alpha[0] + x.beta[0])) for x in (surface, robust)
    )
    if abs(a - a_robust) > FEW_DECIDE:
        messages.append(
            f"a few runs decide the surface: by squares N* grows as C^{a:.2f}, "
            f"robustly as C^{a_robust:.2f}"
        )
    if is_far(residuals, np.log(points.loss)):
        _, p90, worst = measure_goodness(residuals)
        messages.append(
            f"the surface misses one run in ten by more than {p90:.1%}, the worst by "
            f"{worst:.0%}"
        )
    apart = [
        np.log(
            parabola.evaluate_parabola(np.log10(group.num_params), group.loss)
            / group.loss
        )
        for group in groups.groups
    ]
    left = sum(float(error @ error) for error in apart)
    num = len(groups.groups)
    freedom = 3 * num - 5
    below = residuals.size - 3 * num
    if freedom < 1 or below < 1:
        return messages
    ratio = (float(residuals @ residuals) - left) / freedom / max(left / below, 1e-18)
    if f_test_p_value(ratio, freedom, below) < CHANCE:
        messages.append(
            f"the surface leaves {residuals.std() / np.std(np.concatenate(apart)):.1f} "
            "times the residuals of a parabola for each budget: these runs do not have "
            "its form"
        )
    return messages


def by_projection(groups: IsoflopGroups, surface: variable_projection.Surface) -> Find:
    """Returns a finder of minima of the surface that is fitted to all groups.

    Along a group `C = k N D`, with the k of its runs (6 if C = 6ND).

    Args:
      groups: the groups.
      surface: surface of `fit_group_surface`, the start of resampled fits.

    Returns:
      The finder. It rejects a budget whose minimum is outside the trained sizes or well
      below all runs, and every budget if a term of the surface vanishes.
    """
    points = _points(groups)
    start = float(surface.alpha[0]), float(surface.beta[0])

    def find(weights: np.ndarray) -> Minima:
        is_whole = len(weights) == 1 and (weights == 1).all()
        if is_whole:
            fits = surface
        elif np.isfinite(surface.delta):
            fits = variable_projection.fit_surface_robustly(points, weights, surface)
        else:
            fits = variable_projection.fit_surface(points, weights, start)
        minima = Minima.nowhere(len(weights), len(groups.groups), frontier.OUTSIDE)
        both = np.isfinite(fits.log_a) & np.isfinite(fits.log_b)
        log_a, log_b = (np.where(both, x, 0.0) for x in (fits.log_a, fits.log_b))
        # At constant N D, `alpha A N^-alpha = beta B D^-beta` at the minimum.
        ratio = np.log(fits.alpha / fits.beta) + log_a - log_b
        for i, group in enumerate(groups.groups):
            product = float(np.log(group.num_params * group.num_tokens).mean())
            n = (ratio + fits.beta * product) / (fits.alpha + fits.beta)
            sizes = np.log(group.sizes[[0, -1]])
            inside = both & (n >= sizes[0]) & (n <= sizes[1])
            n = np.clip(n, *sizes)
            d = product - n
            value = fits.floor + np.exp(log_a - fits.alpha * n)
            value += np.exp(log_b - fits.beta * d)
            deep = inside & (value < _depth(group))
            minima.reason[deep, i] = frontier.DEEP
            _put(minima, inside & ~deep, i, n, d, value)
        return minima

    return find


def _points(groups: IsoflopGroups) -> variable_projection.SurfacePoints:
    """Returns log N, log D and the loss of all grouped runs."""
    return variable_projection.SurfacePoints(
        np.log(np.concatenate([group.num_params for group in groups.groups])),
        np.log(np.concatenate([group.num_tokens for group in groups.groups])),
        np.concatenate([group.loss for group in groups.groups]),
    )


_Minimum = Callable[
    [IsoflopGroup, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]
]
"""From a group and its losses and weights by size to log10 N*, L* and a reason."""


def _find_by_group(groups: IsoflopGroups, minimum: _Minimum) -> Find:
    """Returns a finder that treats every group separately."""

    def find(weights: np.ndarray) -> Minima:
        minima = Minima.nowhere(
            len(weights), len(groups.groups), frontier.TOO_FEW_SIZES
        )
        for i, group in enumerate(groups.groups):
            loss, weight = average_by_size(group, weights[:, group.places])
            rank = np.cumsum(weight > 0, 1)
            best = np.argmin(np.where(weight > 0, loss, np.inf), 1)
            at = np.take_along_axis(rank, best[:, None], 1)[:, 0]
            enough = rank[:, -1] >= MIN_SIZES
            inner = (at > 1) & (at < rank[:, -1])
            minima.reason[enough & ~inner, i] = frontier.EDGE
            rows = np.flatnonzero(enough & inner)
            if not rows.size:
                continue
            place, low, reason = minimum(group, loss[rows], weight[rows])
            deep = (reason == frontier.FINE) & (low < _depth(group))
            minima.reason[rows, i] = np.where(deep, frontier.DEEP, reason)
            good = minima.reason[:, i] == frontier.FINE
            n, value = np.full((2, len(weights)), np.nan)
            n[rows] = place * np.log(10)
            value[rows] = low
            # Along the group log D is nearly a line in log N.
            d = np.interp(n, np.log(group.sizes), np.log(group.tokens))
            _put(minima, good, i, n, d, value)
        return minima

    return find


def _depth(group: IsoflopGroup) -> float:
    """Returns the loss below which a minimum is not supported by a group's runs.

    Between evenly spaced sizes a minimum may be an eighth of the runs' spread below the
    lowest run. Half of the spread, or a tenth of the loss, is an artifact of the curve;
    half a percent of the loss may be noise.
    """
    loss = average_by_size(group, np.ones((1, group.loss.size)))[0]
    min_loss = float(loss.min())
    spread = float(np.ptp(loss))
    return min_loss - max(0.005 * min_loss, min(0.5 * spread, 0.1 * min_loss))


def _put(
    minima: Minima,
    good: np.ndarray,
    column: int,
    log_n: np.ndarray,
    log_d: np.ndarray,
    loss: np.ndarray,
) -> None:
    """Stores the minima of one budget in the resamples that have one."""
    minima.num_params[good, column] = np.exp(log_n[good])
    minima.num_tokens[good, column] = np.exp(log_d[good])
    minima.loss[good, column] = loss[good]
    minima.reason[good, column] = frontier.FINE
