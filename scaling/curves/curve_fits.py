"""Fits of laws of whole training curves, with bands measured on hidden curves.

All curves are fitted together. Models of different sizes share the coefficients of the
response to a change of the rate; L0, A, alpha and B are those of each size. The
objective is that of Luo et al. 2025, arXiv:2503.12811: the sum of Huber's loss of log
residuals, delta 1e-3, here on at most 53 rows of each curve.

Residuals along a curve are correlated, and those of fitted curves do not show the error
for another schedule. A band therefore comes from curves that a refit did not see, and
each of them counts as one error (`CurveFit.errors`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxkv import validation
from scaling.fits import (
    Objective,
    Solution,
    SolverSettings,
    compiled_minimize,
    student_t,
)
from scaling.laws import (
    Coordinate,
    CurveLaw,
    Law,
    RateChanges,
    RateSchedule,
    annealing_term,
    combine_terms,
    curve_losses,
    merge_changes,
    rate_changes,
)
from scaling.logs import MIN_LOSSES, TrainingCurve

ROWS_PER_CURVE = 48
"""Rows of a curve that are fitted, evenly spaced, besides its last five."""
_NUM_PROBLEMS = 8
"""Problems of one compiled call, padded; compiling takes longer than all fits."""
_NUM_LANES = 4
_CURVE_TOLERANCE = 1e-11
_EXACT_OBJECTIVE = 1e-8
"""Objective below which curves are fitted exactly."""
_SIZE_NAMES = ("L0", "A", "alpha", "B")
_FEW_CURVES = 3
"""Curves of a size from which its own hidden curves measure its errors."""
_COORDINATES = {
    "C": Coordinate("C", -7.0, 18.0, (1.0, 4.6, 8.0), log=True),
    "beta": Coordinate("beta", -6.0, 3.0, (-1.2,), log=True),
    "gamma": Coordinate("gamma", 0.0, 6.0, (0.6, 2.5)),
    # The logarithm of -ln(lambda), times the longest curve's steps.
    "lambda": Coordinate("lambda", 0.0, 12.0, (3.0, 5.0)),
    "delta": Coordinate("delta", -2.0, 2.0, (0.1,)),
}


class CurveFit(NamedTuple):
    """A fitted law of curves.

    Attributes:
      law: the law.
      coefficients: coefficients in natural units, by model size and name.
      spread: smallest and largest coefficient in the refits without some curves, by
        size and name; empty without refits.
      objective: sum of the losses.
      num_starts: number of starts, and of those that end within 1 % of the best.
      curve_errors: log error at the end of each fitted curve, by label.
      errors: by size, root mean square log error over the last half of each curve that
        a refit did not see.
      hidden_errors: log error at the end of each of these curves, by size and label.
      warnings: problems, in sentences.
    """

    law: CurveLaw
    coefficients: dict[float, dict[str, float]]
    spread: dict[float, dict[str, tuple[float, float]]]
    objective: float
    num_starts: tuple[int, int]
    curve_errors: dict[str, float]
    errors: dict[float, list[float]]
    hidden_errors: dict[float, dict[str, float]]
    warnings: list[str]


class CurvePrediction(NamedTuple):
    """Losses of a schedule, with a band.

    Attributes:
      loss: predicted losses.
      low: lower end of the band.
      high: upper end of the band.
    """

    loss: Float[np.ndarray, " rows"]
    low: Float[np.ndarray, " rows"]
    high: Float[np.ndarray, " rows"]


def fit_curves(law: CurveLaw, curves: Sequence[TrainingCurve]) -> CurveFit:
    """Fits a law to curves, from several starts, and refits it without some of them.

    The curves hidden from a refit are those that measure the error of a size: each
    curve of the size in turn, if it has at least three; else, at each other size, all
    schedules that the size does not have.

    Args:
      law: a law of `laws.CURVE_LAWS`.
      curves: curves with losses.

    Raises:
      ValueError: no curve has a falling rate, or a size and name occur twice.
    """
    labels = [curve.label for curve in curves]
    if len({*labels}) < len(labels):
        twice = next(x for x in labels if labels.count(x) > 1)
        raise ValueError(f"two curves are {twice}: names must differ at one size")
    problem = _CurveProblem(law, curves, np.ones(len(curves), bool))
    starts = problem.starts()
    solution = problem.solve(np.ones((len(starts), len(curves))), starts)
    best = int(np.argmin(solution.objective))
    objective = float(solution.objective[best])
    if not np.isfinite(objective):
        raise ValueError(f"{law.name}: no start has a finite loss on these curves")
    x = solution.coordinates[best]
    coefficients = problem.natural(x)
    is_near = solution.objective <= objective * 1.01 + _EXACT_OBJECTIVE
    warnings = problem.warnings(x)
    if is_near.sum() == 1 and len(starts) > 1:
        warnings.append(f"1 of {len(starts)} starts reaches the best objective")
    masks = {size: _hidden_masks(curves, size) for size in coefficients}
    refits = _refit(
        law, curves, [x for each in masks.values() for x in each], problem, x
    )
    errors: dict[float, list[float]] = {}
    hidden_errors: dict[float, dict[str, float]] = {}
    later = iter(refits)
    for size, own_masks in masks.items():
        errors[size] = []
        hidden_errors[size] = {}
        for mask, refit in zip(own_masks, later, strict=False):
            for curve in (curves[int(i)] for i in np.flatnonzero(mask)):
                off = _log_errors(law, refit, curve)
                errors[size].append(_late_error(off))
                hidden_errors[size][curve.label] = _end_error(curve, off)
        if not errors[size]:
            errors[size] = [
                _late_error(_log_errors(law, coefficients, curve))
                for curve in curves
                if curve.size == size
            ]
            warnings.append(
                f"size {size:g}: no curve could be hidden, so the band is that of "
                "fitted curves, too narrow for another schedule"
            )
    spread = {
        size: {
            name: (
                min(refit[size][name] for refit in refits),
                max(refit[size][name] for refit in refits),
            )
            for name in law.coefficients
        }
        for size in coefficients
        if refits
    }
    curve_errors = {
        curve.label: _end_error(curve, _log_errors(law, coefficients, curve))
        for curve in curves
    }
    return CurveFit(
        law,
        coefficients,
        spread,
        objective,
        (len(starts), int(is_near.sum())),
        curve_errors,
        errors,
        hidden_errors,
        warnings,
    )


@validation.checks_numbers(size="(0, inf)", level="(0, 1)")
def predict_curve(
    fit: CurveFit, size: float, schedule: RateSchedule, *, level: float = 0.9
) -> CurvePrediction:
    """Predicts the losses of a schedule, with a band for a new curve.

    The band has one relative width for all rows: Student's t times the root mean square
    of the errors of hidden curves, with one degree of freedom for each of them. Curves
    hidden from one refit have related errors, so the band is rather too narrow.

    Args:
      fit: the fit.
      size: a size of the fit.
      schedule: steps and rates.
      level: probability of the band, in (0, 1).

    Raises:
      ValueError: no curve of the size was fitted.
    """
    if size not in fit.coefficients:
        shown = ", ".join(f"{x:g}" for x in fit.coefficients)
        raise ValueError(f"size={size:g} must be one of the fitted sizes {shown}")
    loss = curve_losses(fit.law, fit.coefficients[size], schedule)
    errors = np.array(fit.errors[size])
    width = student_t(level, errors.size) * np.sqrt(np.mean(errors**2))
    return CurvePrediction(loss, loss * np.exp(-width), loss * np.exp(width))


def ratio_baseline(
    curves: Sequence[TrainingCurve], target: TrainingCurve
) -> Float[np.ndarray, " rows"]:
    """Predicts a curve without a law, from the same schedule at other sizes.

    Returns:
      The constant curve of the target's size, times the ratio of the schedule to the
      constant curve. The ratio is that of the other size, or lies on the straight line
      of ln ratio against ln size through several; NaN if a curve is missing.
    """
    step = np.asarray(target.schedule.step)
    sizes = []
    ratios = []
    for curve in curves:
        if curve.name == target.name and curve.size != target.size:
            at = np.minimum(step, np.asarray(curve.schedule.step)[-1])
            measured_loss = np.interp(at, np.asarray(curve.schedule.step), curve.loss)
            ratios.append(
                np.log(measured_loss / constant_baseline(curves, curve.size, at))
            )
            sizes.append(np.log(curve.size))
    if not ratios:
        return np.full(step.size, np.nan)
    weights = _line_weights(np.array(sizes), np.array([np.log(target.size)]))[0]
    constant = constant_baseline(curves, target.size, step)
    return constant * np.exp(weights @ np.array(ratios))


@validation.checks_numbers(size="(0, inf)")
def constant_baseline(
    curves: Sequence[TrainingCurve], size: float, step: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " rows"]:
    """Returns the losses of the longest constant curve of a size; NaN beyond it."""
    constant = [x for x in curves if x.size == size and not x.is_annealed]
    if not constant:
        return np.full(np.shape(step), np.nan)
    longest = max(constant, key=lambda curve: curve.schedule.step[-1])
    # The last row of a run is up to a report earlier than its last step.
    slack = longest.schedule.step[-1] - longest.schedule.step[-2]
    reached = np.where(step <= longest.schedule.step[-1] + slack, step, np.nan)
    return np.interp(reached, np.asarray(longest.schedule.step), longest.loss)


def _log_errors(
    law: CurveLaw,
    coefficients: Mapping[float, Mapping[str, float]],
    curve: TrainingCurve,
) -> Float[np.ndarray, " rows"]:
    """Returns ln(predicted / seen) of a curve."""
    loss = curve_losses(law, coefficients[curve.size], curve.schedule)
    return np.log(loss / curve.loss)


def _late_error(off: Float[np.ndarray, " rows"]) -> float:
    """Returns the root mean square over the last half of a curve."""
    return float(np.sqrt(np.mean(off[off.size // 2 :] ** 2)))


def _end_error(curve: TrainingCurve, off: Float[np.ndarray, " rows"]) -> float:
    """Returns the log error of the mean of the last five losses."""
    end = (curve.loss * np.exp(off))[-MIN_LOSSES:].mean()
    return float(np.log(end / curve.end_loss))


def _hidden_masks(
    curves: Sequence[TrainingCurve], size: float
) -> list[Bool[np.ndarray, " curves"]]:
    """Returns masks of the curves to hide, see `fit_curves`."""
    names = {curve.name for curve in curves if curve.size == size}
    if len(names) >= _FEW_CURVES:
        masks = [
            np.array([curve is other for other in curves])
            for curve in curves
            if curve.size == size
        ]
    else:
        masks = [
            np.array([x.size == other and x.name not in names for x in curves])
            for other in dict.fromkeys(x.size for x in curves if x.size != size)
        ]
    usable = []
    for mask in masks:
        remaining = [
            curve for curve, hidden in zip(curves, mask, strict=True) if not hidden
        ]
        is_complete = {x.size for x in remaining} == {x.size for x in curves}
        if mask.any() and is_complete and any(x.is_annealed for x in remaining):
            usable.append(mask)
    return usable


def _refit(
    law: CurveLaw,
    curves: Sequence[TrainingCurve],
    masks: Sequence[Bool[np.ndarray, " curves"]],
    problem: "_CurveProblem",
    x: Float[np.ndarray, " k"],
) -> list[dict[float, dict[str, float]]]:
    """Refits a law without the curves of each mask; returns the coefficients."""
    refits: list[dict[float, dict[str, float]]] = [{} for _ in masks]
    groups: dict[tuple[bool, ...], list[int]] = {}
    for i, mask in enumerate(masks):
        groups.setdefault(tuple(problem.annealed_sizes(~mask)), []).append(i)
    for key, members in groups.items():
        fold_problem = problem
        start = x
        if key != tuple(problem.is_annealed):
            fold_problem = _CurveProblem(law, curves, ~masks[members[0]])
            start = fold_problem.adopt(problem, x)
        used = np.array([~masks[i] for i in members], float)
        solution = fold_problem.solve(used, np.tile(start, (len(members), 1)))
        for i, end in zip(members, solution.coordinates, strict=True):
            refits[i] = fold_problem.natural(end)
    return refits


class _CurveProblem:
    """Rows, coordinates and units of a joint fit.

    The coordinates are those of the response, delta, then L0, A and alpha of each size,
    then B of each size with an annealed curve. B of another size follows the straight
    line of ln B against ln size.
    """

    def __init__(
        self,
        law: CurveLaw,
        curves: Sequence[TrainingCurve],
        is_used: Bool[np.ndarray, " curves"],
    ) -> None:
        self.law = law
        self.curves = curves
        self.sizes = np.array(sorted({curve.size for curve in curves}))
        self.size_index = np.searchsorted(self.sizes, [x.size for x in curves])
        self.is_annealed = self.annealed_sizes(is_used)
        if not self.is_annealed.any():
            raise ValueError(
                "no curve has a falling learning rate: its effect cannot be fitted"
            )
        logs = np.log(self.sizes)
        self.lines = _line_weights(logs[self.is_annealed], logs)
        self.lines[self.is_annealed] = np.eye(int(self.is_annealed.sum()))
        self.shared = (*law.shape, *("delta",) * law.fades)
        self.k = len(self.shared) + 3 * self.sizes.size + int(self.is_annealed.sum())
        with jax.enable_x64(True):
            self._pack()

    def annealed_sizes(
        self, is_used: Bool[np.ndarray, " curves"]
    ) -> Bool[np.ndarray, " sizes"]:
        """Returns the mask of the sizes with a used curve whose rate falls."""
        annealed = np.array([curve.is_annealed for curve in self.curves]) & is_used
        return np.isin(np.arange(self.sizes.size), self.size_index[annealed])

    def _pack(self) -> None:
        """Arranges the rows of all curves, and their changes padded to one length."""
        packed = []
        rows = []
        for curve in self.curves:
            packed.append(merge_changes(rate_changes(curve.schedule)))
            num = curve.loss.size
            even = np.linspace(0, num - 1, min(num, ROWS_PER_CURVE)).round()
            rows.append(np.unique([*even.astype(int), *range(num - MIN_LOSSES, num)]))
        self.unit_area = float(np.median(np.concatenate([x.area for x in packed])))
        self.unit_rate = max(float(np.max(x.schedule.rate)) for x in self.curves)
        self.unit_step = max(float(x.schedule.step[-1]) for x in self.curves)
        num_cells = max(x.drop.size for x in packed)
        num_rows = max(x.size for x in rows)
        tables = []
        for changes, index in zip(packed, rows, strict=True):
            cells = num_cells - changes.drop.size
            index = np.pad(index, (0, num_rows - index.size), "edge")
            tables.append(
                RateChanges(
                    changes.area[index] / self.unit_area,
                    changes.step[index] / self.unit_step,
                    np.pad(changes.drop, (0, cells)) / self.unit_rate,
                    np.pad(changes.rate, (0, cells), mode="edge") / self.unit_rate,
                    np.pad(changes.change_area, (0, cells)) / self.unit_area,
                    np.pad(changes.change_step, (0, cells)) / self.unit_step,
                )
            )
        self.changes = RateChanges(
            *(jnp.asarray(np.stack(x)) for x in zip(*tables, strict=True))
        )
        counts = np.array([x.size for x in rows])
        is_row = (np.arange(num_rows) < counts[:, None]).reshape(-1)
        self.row = np.flatnonzero(is_row)
        self.row_curve = np.repeat(np.arange(len(rows)), counts)
        losses = [x.loss[i] for x, i in zip(self.curves, rows, strict=True)]
        self.target = jnp.log(jnp.asarray(np.concatenate(losses)))

    def starts(self) -> Float[np.ndarray, "starts k"]:
        """Returns the starts: all combinations of those of the response."""
        grids = np.meshgrid(*(_COORDINATES[x].starts for x in self.shared))
        response = np.stack([x.reshape(-1) for x in grids], 1)
        sizes = []
        for i in range(self.sizes.size):
            losses = np.exp(
                np.asarray(self.target)[self.size_index[self.row_curve] == i]
            )
            floor = 0.9 * losses.min()
            sizes.append([np.log(floor), np.log(np.median(losses) - floor), 0.5])
        lowest = [x[0] for x, on in zip(sizes, self.is_annealed, strict=True) if on]
        start = np.concatenate([np.ravel(sizes), np.array(lowest) + np.log(0.03)])
        return np.concatenate([response, np.tile(start, (len(response), 1))], 1)

    def box(self) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
        """Returns the smallest and largest coordinates."""
        level = float(np.median(self.target))
        low = [_COORDINATES[x].low for x in self.shared]
        high = [_COORDINATES[x].high for x in self.shared]
        num = self.sizes.size
        low += [level - 5, level - 10, 0.02] * num
        high += [level + 1, level + 5, 3.0] * num
        num = int(self.is_annealed.sum())
        return (
            np.array(low + [level - 12] * num),
            np.array(high + [level + 5] * num),
        )

    def solve(
        self,
        weights: Float[np.ndarray, "problems curves"],
        starts: Float[np.ndarray, "problems k"],
    ) -> Solution:
        """Minimizes the objective for weights of the curves, each from its start."""
        room = (0, -len(starts) % _NUM_PROBLEMS), (0, 0)
        starts = np.pad(starts, room, "edge")
        weights = np.pad(weights, room)
        ends = []
        with jax.enable_x64(True):
            box = tuple(jnp.asarray(x) for x in self.box())
            for i in range(0, len(starts), _NUM_PROBLEMS):
                piece = slice(i, i + _NUM_PROBLEMS)
                count = int(weights[piece].any(1).sum())
                settings = SolverSettings(
                    jnp.float64(Objective().delta),
                    jnp.int32(count),
                    jnp.float64(_CURVE_TOLERANCE),
                )
                end = self._minimize(
                    jnp.zeros((1, self.row.size)),
                    self.target,
                    jnp.asarray(weights[piece][:, self.row_curve]),
                    jnp.asarray(np.clip(starts[piece], *self.box())),
                    box,
                    settings,
                )
                ends.append([np.asarray(x)[:count] for x in end])
        return Solution(*(np.concatenate(x) for x in zip(*ends, strict=True)))

    @functools.cached_property
    def _minimize(self) -> Callable[..., Solution]:
        law = Law(
            name=self.law.name,
            formula=self.law.formula,
            inputs=("row",),
            coordinates=(),
            source=self.law.source,
            log_loss=lambda x, rows: self._value(x, self._term(x)),
            shift=lambda x, centre: x,
            linearise=self._linearise,
        )
        return compiled_minimize(law, "log", _NUM_LANES)

    def _decode(self, x: Array) -> dict[str, Array]:
        """Returns the shared coefficients, in the units of the fit."""
        values = {}
        for name, value in zip(self.shared, x, strict=False):
            is_log = _COORDINATES[name].log
            values[name] = jnp.exp(value) if is_log else value
            if name == "lambda":
                values[name] = jnp.exp(-jnp.exp(value))
        return values

    def _term(self, x: Array) -> Float[Array, " n"]:
        term = annealing_term(self.law, self._decode(x), self.changes)
        return jnp.asarray(term).reshape(-1)[self.row]

    def _value(self, x: Array, term: Float[Array, " n"]) -> Float[Array, " n"]:
        num = self.sizes.size
        start = len(self.shared)
        by_size = x[start : start + 3 * num].reshape(num, 3)
        log_b = self.lines @ x[start + 3 * num :]
        size = self.size_index[self.row_curve]
        c = self._decode(x) | {
            "L0": jnp.exp(by_size[size, 0]),
            "A": jnp.exp(by_size[size, 1]),
            "alpha": by_size[size, 2],
            "B": jnp.exp(log_b[size]),
        }
        area = self.changes.area.reshape(-1)[self.row]
        return jnp.log(combine_terms(c, area, term))

    def _linearise(self, x: Array, rows: Array) -> tuple[Array, list[Array]]:
        """Differentiates the term by the response alone, and the rest by everything."""
        num = len(self.law.shape)
        eye = jnp.eye(self.k, dtype=x.dtype)
        term, push = jax.linearize(self._term, x)
        slopes = jax.vmap(push)(eye[:num])
        slopes = jnp.pad(slopes, ((0, self.k - num), (0, 0)))
        value, push_value = jax.linearize(self._value, x, term)
        return value, list(jax.vmap(push_value)(eye, slopes))

    def natural(self, x: Float[np.ndarray, " k"]) -> dict[float, dict[str, float]]:
        """Returns the coefficients of each size in natural units."""
        with jax.enable_x64(True):
            shared = {
                name: float(value)
                for name, value in self._decode(jnp.asarray(x)).items()
            }
        delta = shared.get("delta", 0.0)
        if "C" in shared:
            shared["C"] *= self.unit_rate ** shared["gamma"] / self.unit_area
        if "lambda" in shared:
            shared["lambda"] **= 1 / self.unit_step
        num = self.sizes.size
        start = len(self.shared)
        log_b = self.lines @ x[start + 3 * num :]
        coefficients = {}
        for i, size in enumerate(self.sizes):
            floor, scale, alpha = x[start + 3 * i : start + 3 * i + 3]
            coefficients[float(size)] = {
                "L0": float(np.exp(floor)),
                "A": float(np.exp(scale) * self.unit_area**alpha),
                "alpha": float(alpha),
                "B": float(np.exp(log_b[i]) * self.unit_area**delta / self.unit_rate),
            } | shared
        return coefficients

    def adopt(
        self, other: "_CurveProblem", x: Float[np.ndarray, " k"]
    ) -> Float[np.ndarray, " fewer"]:
        """Returns the coordinates of a problem with fewer annealed sizes."""
        start = len(self.shared) + 3 * self.sizes.size
        log_b = (other.lines @ x[start:])[self.is_annealed]
        return np.concatenate([x[:start], log_b])

    def warnings(self, x: Float[np.ndarray, " k"]) -> list[str]:
        """Returns sentences about coefficients that the curves do not determine."""
        lines = []
        low, high = self.box()
        names = [*self.shared]
        names += [f"{y} at {s:g}" for s in self.sizes for y in _SIZE_NAMES[:3]]
        names += [f"B at {s:g}" for s in self.sizes[self.is_annealed]]
        for name, value, least, most in zip(names, x, low, high, strict=True):
            if value <= least or value >= most:
                lines.append(f"{name} is at the end of its range")
        lines += [
            f"size {size:g} has no curve with a falling rate: its B follows from the "
            "other sizes"
            for size in self.sizes[~self.is_annealed]
        ]
        num_annealed = sum(curve.is_annealed for curve in self.curves)
        if num_annealed < len(self.law.shape):
            lines.append(
                f"{num_annealed} curves with a falling rate for the "
                f"{len(self.law.shape)} coefficients of the response: other schedules "
                "are extrapolated"
            )
        return lines


def _line_weights(
    x: Float[np.ndarray, " known"], at: Float[np.ndarray, " sizes"]
) -> Float[np.ndarray, "sizes known"]:
    """Returns the weights of values at x in their straight line (one value: itself)."""
    powers = range(min(2, len({*x})))
    basis = np.stack([x**i for i in powers], 1)
    return np.stack([at**i for i in powers], 1) @ np.linalg.pinv(basis)
