"""Forecasts of downstream accuracy in two stages, with intervals from rehearsals.

    loss = E + A N^-alpha + B D^-alpha
    accuracy = floor + (1 - floor) / (1 + exp(k (loss - middle)))

The loss is that of the right answer, in bits per byte; each task has its own
coefficients. Both stages are those of Bhagia et al. 2024, arXiv:2412.04403, sections 3
and 4, with fewer coefficients: one exponent, an upper end of 1, and a floor near chance
(a normal prior of 0.03).

The interval comes from rehearsals: the law is fitted to the smaller sizes of the ladder
and predicts the larger ones. The scale of an error is the root of the squares of its
task's residuals and of a drift in proportion to ln(compute / largest fitted compute).
An interval is that scale times the factor that covers the rehearsed errors, or times
Student's t if that is larger.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxkv import validation
from scaling.fits import student_t
from scaling.forecasts.least_squares import Minimum, minimize_huber
from scaling.forecasts.tied_powers import TiedPowers, fit_tied_powers
from scaling.logs import FLOPS_PER_PARAM_AND_TOKEN, DownstreamTask, TaskRuns

MIN_LADDER_SIZES = 2
"""Fewest model sizes of a fit."""
_SIZE_RATIO = 1.05
"""Ratio up to which parameters are of one size."""
_FLOOR_SPREAD = 0.03
_ACCURACY_NOISE = 0.01
"""Scale of errors of accuracies, which weights them against the prior of the floor."""
_CLOSEST = 1e-4
"""Distance of accuracies from 0 and 1 in logits."""


class AccuracyResponse(NamedTuple):
    """`floor + (1 - floor) / (1 + exp(k (loss - middle)))`.

    Attributes:
      floor: accuracy at a large loss.
      k: steepness per bit per byte.
      middle: loss halfway between floor and 1.
    """

    floor: float
    k: float
    middle: float

    def accuracy(self, loss: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Returns the accuracy at a loss."""
        z = np.clip(self.k * (loss - self.middle), -500, 500)
        return self.floor + (1 - self.floor) / (1 + np.exp(z))


class TaskFit(NamedTuple):
    """The fitted stages of one task.

    Attributes:
      powers: loss of parameters and tokens.
      response: accuracy of the loss.
      loss_noise: root mean square of the residuals of ln(loss).
      accuracy_noise: root mean square of the residuals of the accuracy's logit, from
        parameters and tokens.
      line: accuracy at ln(compute) = 0, and its growth, of the log-linear baseline.
      is_converged: True if both stages converged.
    """

    powers: TiedPowers
    response: AccuracyResponse
    loss_noise: float
    accuracy_noise: float
    line: tuple[float, float]
    is_converged: bool

    def log_linear(self, flops: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Returns the baseline: a straight line over ln(compute), between 0 and 1."""
        return np.clip(self.line[0] + self.line[1] * np.log(flops), 0, 1)


class Rehearsal(NamedTuple):
    """Error of a forecast of one run by the smaller sizes.

    Attributes:
      task: name of the task.
      run: name of the run.
      num_sizes: number of fitted sizes.
      distance: ln(compute of the run / largest compute of the fitted runs), at least 0.
      loss_error: ln(predicted / measured) of the loss.
      logit_error: error of the accuracy's logit.
      relative_error: error of the accuracy, relative.
    """

    task: str
    run: str
    num_sizes: int
    distance: float
    loss_error: float
    logit_error: float
    relative_error: float


class TaskForecasts(NamedTuple):
    """Fitted laws of tasks.

    Attributes:
      tasks: fit of each task, by name.
      rehearsals: errors of forecasts of larger sizes by smaller ones.
      loss_drift: standard deviation of ln(loss) for each factor e of compute beyond the
        fitted runs.
      accuracy_drift: the same of the accuracy's logit.
      freedom: degrees of freedom of the intervals.
      largest_flops: largest compute of the fitted runs.
      warnings: problems, in sentences.
    """

    tasks: dict[str, TaskFit]
    rehearsals: tuple[Rehearsal, ...]
    loss_drift: float
    accuracy_drift: float
    freedom: int
    largest_flops: float
    warnings: list[str]

    def scales(
        self, task: str, distance: float | Float[np.ndarray, " runs"]
    ) -> tuple[Float[np.ndarray, "*runs"], Float[np.ndarray, "*runs"]]:
        """Returns the scales of the errors of ln(loss) and of the accuracy's logit."""
        fit = self.tasks[task]
        return (
            np.asarray(np.hypot(fit.loss_noise, self.loss_drift * distance)),
            np.asarray(np.hypot(fit.accuracy_noise, self.accuracy_drift * distance)),
        )


class TaskPrediction(NamedTuple):
    """Predictions of one task for some runs.

    Attributes:
      loss: bits per byte.
      loss_low: lower end of the interval of the loss.
      loss_high: upper end of the interval of the loss.
      accuracy: accuracy.
      low: lower end of the interval of the accuracy.
      high: upper end of the interval of the accuracy.
      log_linear: accuracy by the log-linear baseline.
    """

    loss: Float[np.ndarray, " runs"]
    loss_low: Float[np.ndarray, " runs"]
    loss_high: Float[np.ndarray, " runs"]
    accuracy: Float[np.ndarray, " runs"]
    low: Float[np.ndarray, " runs"]
    high: Float[np.ndarray, " runs"]
    log_linear: Float[np.ndarray, " runs"]


def fit_tasks(tasks: tuple[DownstreamTask, ...], runs: TaskRuns) -> TaskForecasts:
    """Fits both stages of every task, and rehearses forecasts of the larger sizes.

    Args:
      tasks: tasks of the runs.
      runs: runs with all metrics.

    Raises:
      ValueError: there are fewer than 2 sizes or 6 runs.
    """
    size_of_run = _number_sizes(runs.num_params)
    num_sizes = len({*size_of_run.tolist()})
    if num_sizes < MIN_LADDER_SIZES or len(runs.names) < 6:
        raise ValueError(
            f"{len(runs.names)} runs of {num_sizes} sizes: a fit of tasks needs at "
            f"least 6 runs and {MIN_LADDER_SIZES} sizes"
        )
    fits = {task.name: _fit_task(task, runs) for task in tasks}
    rehearsals = []
    for count in range(MIN_LADDER_SIZES, num_sizes):
        small = runs.select(size_of_run < count)
        large = runs.select(size_of_run >= count)
        if len(small.names) < 6:
            continue
        distance = _distance(large, _flops(small).max())
        for task in tasks:
            fit = _fit_task(task, small)
            loss = fit.powers.loss(large.num_params, large.num_tokens)
            accuracy = fit.response.accuracy(loss)
            measured = large.accuracy[task.name]
            errors = zip(
                large.names,
                distance,
                np.log(loss / large.loss[task.name]),
                _logit(accuracy) - _logit(measured),
                accuracy / np.maximum(measured, _CLOSEST) - 1,
                strict=True,
            )
            for run, *numbers in errors:
                rehearsals.append(
                    Rehearsal(task.name, run, count, *map(float, numbers))
                )
    warnings = [
        f"{name}: the fit did not converge"
        for name, fit in fits.items()
        if not fit.is_converged
    ]
    if not rehearsals:
        warnings.append(
            "2 sizes allow no rehearsal, so the intervals are those of fitted runs, "
            "too narrow for larger ones"
        )
    distances = np.array([x.distance for x in rehearsals])
    drifts = [
        _drift(distances, np.array(errors))
        for errors in (
            [x.loss_error for x in rehearsals],
            [x.logit_error for x in rehearsals],
        )
    ]
    return TaskForecasts(
        fits,
        tuple(rehearsals),
        *drifts,
        max(1, len(tasks) * (num_sizes - MIN_LADDER_SIZES)),
        float(_flops(runs).max()),
        warnings,
    )


@validation.checks_numbers(level="(0, 1)")
def predict_tasks(
    forecasts: TaskForecasts,
    num_params: Float[np.ndarray, " runs"],
    num_tokens: Float[np.ndarray, " runs"],
    *,
    level: float = 0.9,
) -> dict[str, TaskPrediction]:
    """Predicts loss and accuracy of every task, with intervals for a new run.

    Args:
      forecasts: the fits.
      num_params: parameters of the runs.
      num_tokens: tokens of the runs.
      level: probability of the intervals.
    """
    flops = FLOPS_PER_PARAM_AND_TOKEN * num_params * num_tokens
    distance = np.maximum(np.log(flops / forecasts.largest_flops), 0)
    least = student_t(level, forecasts.freedom)
    loss_scores = []
    accuracy_scores = []
    for x in forecasts.rehearsals:
        loss_scale, accuracy_scale = forecasts.scales(x.task, x.distance)
        loss_scores.append(abs(x.loss_error) / loss_scale)
        accuracy_scores.append(abs(x.logit_error) / accuracy_scale)
    loss_factor, accuracy_factor = (
        max(least, float(np.quantile(scores, level)) if scores else 0.0)
        for scores in (loss_scores, accuracy_scores)
    )
    predictions = {}
    for name, fit in forecasts.tasks.items():
        loss = fit.powers.loss(num_params, num_tokens)
        accuracy = fit.response.accuracy(loss)
        loss_scale, accuracy_scale = forecasts.scales(name, distance)
        wide = loss_factor * loss_scale
        half = accuracy_factor * accuracy_scale
        logit = _logit(accuracy)
        predictions[name] = TaskPrediction(
            loss,
            loss * np.exp(-wide),
            loss * np.exp(wide),
            accuracy,
            1 / (1 + np.exp(half - logit)),
            1 / (1 + np.exp(-half - logit)),
            fit.log_linear(flops),
        )
    return predictions


def _fit_task(task: DownstreamTask, runs: TaskRuns) -> TaskFit:
    """Fits both stages of a task, from several starts each."""
    loss = runs.loss[task.name]
    accuracy = runs.accuracy[task.name]
    powers, is_converged = fit_tied_powers(runs.num_params, runs.num_tokens, loss)
    response = _fit_accuracy(loss, accuracy, task.chance)
    flops = _flops(runs)
    slope, start = np.polyfit(np.log(flops), accuracy, 1)
    fit = TaskFit(
        powers,
        AccuracyResponse(*map(float, response.coefficients)),
        0.0,
        0.0,
        (float(start), float(slope)),
        is_converged and response.is_converged,
    )
    fitted_loss = powers.loss(runs.num_params, runs.num_tokens)
    off = np.log(fitted_loss / loss)
    logits = _logit(fit.response.accuracy(fitted_loss)) - _logit(accuracy)
    freedom = len(loss) - len(powers)
    return fit._replace(
        loss_noise=float(np.sqrt((off**2).sum() / freedom)),
        accuracy_noise=float(np.sqrt((logits**2).sum() / freedom)),
    )


def _fit_accuracy(loss: np.ndarray, accuracy: np.ndarray, chance: float) -> Minimum:
    """Fits floor, k and middle, with the prior of the floor."""

    def residuals(c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        floor, k, middle = c
        z = np.clip(k * (loss - middle), -500, 500)
        rise = 1 / (1 + np.exp(z))
        bend = -(1 - floor) * rise * (1 - rise)
        off = (floor + (1 - floor) * rise - accuracy) / _ACCURACY_NOISE
        slopes = np.stack([1 - rise, bend * (loss - middle), -bend * k], axis=1)
        prior = np.array([[1 / _FLOOR_SPREAD, 0, 0]])
        return (
            np.append(off, (floor - chance) / _FLOOR_SPREAD),
            np.concatenate([slopes / _ACCURACY_NOISE, prior]),
        )

    ends = []
    for k in (2.0, 8.0, 20.0):
        for middle in (loss.min() - 0.5, loss.mean()):
            start = np.array([chance, k, middle])
            low = np.array([0.0, 0.0, loss.min() - 5])
            high = np.array([0.99, 100.0, loss.max() + 5])
            ends.append(minimize_huber(residuals, start, low=low, high=high))
    return min(ends, key=lambda end: end.objective)


def _drift(distance: Float[np.ndarray, " n"], error: Float[np.ndarray, " n"]) -> float:
    """Returns the error for each unit of distance; far errors count most.

    The noise of the residuals is not subtracted, so the drift is rather too large.
    """
    weight = (distance**4).sum()
    return (
        float(np.sqrt((distance * error) @ (distance * error) / weight))
        if weight
        else 0.0
    )


def _number_sizes(num_params: np.ndarray) -> np.ndarray:
    """Returns the index of each run's size, from the smallest."""
    order = np.argsort(num_params)
    steps = np.diff(np.log(num_params[order])) > np.log(_SIZE_RATIO)
    sizes = np.empty(len(order), int)
    sizes[order] = np.concatenate([[0], np.cumsum(steps)])
    return sizes


def _flops(runs: TaskRuns) -> np.ndarray:
    return FLOPS_PER_PARAM_AND_TOKEN * runs.num_params * runs.num_tokens


def _distance(runs: TaskRuns, largest_flops: float) -> np.ndarray:
    return np.maximum(np.log(_flops(runs) / largest_flops), 0)


def _logit(accuracy: np.ndarray) -> np.ndarray:
    p = np.clip(accuracy, _CLOSEST, 1 - _CLOSEST)
    return np.log(p / (1 - p))
