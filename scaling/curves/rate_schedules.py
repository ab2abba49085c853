"""Schedules of the learning rate, and the best one by a law of training curves.

A schedule here has a linear warm-up, a peak, and rates that never rise again, down to a
lowest rate. The best one minimizes the law's loss at the last step.

Source: the optimization is that of Luo et al. 2025, arXiv:2503.12811, with the
decreases of the rate as a distribution, so that no step leaves the allowed schedules.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import optimize

from jaxkv import validation
from scaling.laws import (
    CurveLaw,
    RateSchedule,
    annealing_term,
    combine_terms,
    curve_losses,
    rate_changes,
)

NUM_KNOTS = 97
"""Rows of a schedule; the rate is linear between them."""
_DECAY_SHARES = (0.1, 0.2, 0.5, 1.0)
_MAX_DESCENTS = 200


class ScheduleFrame(NamedTuple):
    """What the schedules of one comparison have in common.

    Attributes:
      num_steps: steps of the run, warm-up included.
      warmup_steps: steps of the warm-up.
      peak: largest rate.
      lowest: smallest rate after the warm-up, at most the peak.
    """

    num_steps: float
    warmup_steps: float
    peak: float
    lowest: float


class BestSchedule(NamedTuple):
    """The best schedule by a law, beside common ones.

    Attributes:
      schedule: steps and rates.
      loss: predicted loss at its end.
      other_losses: predicted losses of cosine and of WSD with several decays, by name.
      decay_share: share of the steps at which the rate is below 90 % of the peak.
    """

    schedule: RateSchedule
    loss: float
    other_losses: dict[str, float]
    decay_share: float


def cosine_schedule(frame: ScheduleFrame) -> RateSchedule:
    """Returns half a cosine from the peak to the lowest rate."""
    share = np.linspace(0.0, 1.0, NUM_KNOTS)
    return _schedule(frame, (1 + np.cos(np.pi * share)) / 2)


@validation.checks_numbers(decay_share="(0, 1]")
def wsd_schedule(frame: ScheduleFrame, decay_share: float) -> RateSchedule:
    """Returns warm-up, stable rate, and a linear decay (WSD; 1 is linear decay).

    Args:
      frame: length and rates.
      decay_share: share of the steps after the warm-up in which the rate falls.
    """
    share = np.linspace(0.0, 1.0, NUM_KNOTS)
    return _schedule(frame, np.minimum(1.0, (1 - share) / decay_share))


def best_schedule(
    law: CurveLaw, coefficients: Mapping[str, float], frame: ScheduleFrame
) -> BestSchedule:
    """Minimizes the predicted loss at the last step over falling schedules.

    Args:
      law: a law of `laws.CURVE_LAWS`.
      coefficients: its coefficients, as in `laws.curve_losses`.
      frame: length and rates.

    Raises:
      ValueError: the frame is invalid.
    """
    _check_frame(frame)
    others = {"cosine": cosine_schedule(frame)}
    for share in _DECAY_SHARES:
        name = "linear" if share == 1 else f"WSD, {share:.0%} decay"
        others[name] = wsd_schedule(frame, share)

    with jax.enable_x64(True):
        step = jnp.asarray(others["cosine"].step)
        c = {name: jnp.float64(coefficients[name]) for name in law.coefficients}

        def rates(x: Float[Array, " knots"]) -> Float[Array, " knots"]:
            falls = jnp.cumsum(jax.nn.softmax(x))[:-1]
            height = jnp.concatenate([jnp.ones(1, x.dtype), 1 - falls])
            return frame.lowest + (frame.peak - frame.lowest) * height

        def end_loss(x: Float[Array, " knots"]) -> Float[Array, ""]:
            changes = rate_changes(RateSchedule(step, rates(x)))
            changes = changes._replace(area=changes.area[-1:], step=changes.step[-1:])
            return combine_terms(c, changes.area, annealing_term(law, c, changes))[0]

        slope = jax.jit(jax.value_and_grad(end_loss))

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = slope(jnp.asarray(x))
            return float(value), np.asarray(gradient)

        ends = []
        for start in others.values():
            falls = -np.diff(np.asarray(start.rate)) / (frame.peak - frame.lowest)
            # A little everywhere: a fall of exactly 0 has no gradient.
            x = np.log(np.append(np.maximum(falls, 0.0), 0.0) + 1e-3 / NUM_KNOTS)
            ends.append(
                optimize.minimize(
                    objective,
                    x,
                    jac=True,
                    method="L-BFGS-B",
                    options={
                        "maxiter": _MAX_DESCENTS,
                        "ftol": 1e-14,
                        "gtol": 1e-9,
                    },
                )
            )
        best = min(ends, key=lambda end: end.fun)
        schedule = RateSchedule(
            np.asarray(step), np.asarray(rates(jnp.asarray(best.x)))
        )
    losses = {
        name: float(curve_losses(law, coefficients, each)[-1])
        for name, each in others.items()
    }
    loss = float(curve_losses(law, coefficients, schedule)[-1])
    high = np.asarray(schedule.rate) > 0.9 * frame.peak
    last = float(np.asarray(schedule.step)[high].max())
    return BestSchedule(schedule, loss, losses, 1 - last / frame.num_steps)


def _schedule(
    frame: ScheduleFrame, height: Float[np.ndarray, " knots"]
) -> RateSchedule:
    """Returns the schedule whose rate falls from height 1, the peak, to 0."""
    _check_frame(frame)
    step = np.linspace(frame.warmup_steps, frame.num_steps, NUM_KNOTS)
    return RateSchedule(step, frame.lowest + (frame.peak - frame.lowest) * height)


def _check_frame(frame: ScheduleFrame) -> None:
    for name, value in frame._asdict().items():
        if not 0 < value < np.inf:
            raise ValueError(f"{name}={value} must be in (0, inf)")
    if frame.warmup_steps >= frame.num_steps:
        raise ValueError(
            f"warmup_steps={frame.warmup_steps:g} must be in (0, {frame.num_steps:g})"
        )
    if frame.lowest >= frame.peak:
        raise ValueError(f"lowest={frame.lowest:g} must be in (0, {frame.peak:g})")
