"""How steep a fit's optimum is: the objective over the plane of two coefficients.

At every point of the plane the other coefficients are fitted anew, so a valley that
runs along the plane is a combination of the two that the data does not tell apart.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from scaling.fits import observations
from scaling.fits.result import FitResult
from scaling.laws import Law

_NUM_STEPS = 60
_LAD_DELTA = 1e-6
"""Least absolute deviations, as Huber's loss far below the residuals' size."""


def pair(result: FitResult) -> tuple[str, str] | None:
    """Chooses the plane to look at: two exponents, or an exponent and the floor.

    Returns:
      Names of coefficients whose values do not depend on the units of N, D and C; None
      if there are not two, or coefficients were given or bounded.
    """
    law = result.find_law()
    if result.fixed or result.bounds:
        return None
    outside = [
        np.log(result.coefficients[coordinate.name])
        if coordinate.log
        else result.coefficients[coordinate.name]
        for coordinate in law.coordinates
    ]
    same = np.isclose(outside, result.coordinates, rtol=1e-9, atol=1e-12)
    free = [x for x, is_same in zip(law.coordinates, same, strict=True) if is_same]
    free.sort(key=lambda coordinate: coordinate.log)  # stable: exponents first
    return (free[0].name, free[1].name) if len(free) > 1 else None


def profile(
    result: FitResult,
    data: Mapping[str, Any],
    names: tuple[str, str],
    x: Float[np.ndarray, " columns"],
    y: Float[np.ndarray, " rows"],
) -> Float[np.ndarray, "rows columns"]:
    """Computes the objective with two coefficients held and the others fitted.

    Args:
      result: a fit.
      data: what it was fitted to, all weights 1.
      names: the two coefficients, as `pair` chooses them.
      x: values of the first.
      y: values of the second.

    Returns:
      The sum of the losses; for `lad` of residuals larger than 1e-6.
    """
    law = result.find_law()
    places = [law.coefficients.index(name) for name in names]
    held_x, held_y = (
        np.log(value) if law.coordinates[place].log else value
        for value, place in zip((x, y), places, strict=True)
    )
    seen = observations.observe(law, data, None, np.arange(len(data[law.target])))
    free = np.ones(len(law.coordinates))
    free[places] = 0.0
    starts = np.tile(result.coordinates, (y.size, x.size, 1))
    starts[:, :, places[0]] = held_x[None, :]
    starts[:, :, places[1]] = held_y[:, None]
    delta = {"huber": result.delta, "lad": _LAD_DELTA, "mse": None}[result.loss]
    with jax.enable_x64(True):
        found = _descend(law, result.space, delta)(
            jnp.asarray(starts.reshape(-1, starts.shape[2])),
            jnp.asarray(free),
            jnp.asarray(seen.logs),
            jnp.asarray(seen.target),
            jnp.asarray(np.stack(law.box(seen.level))),
        )
    least = np.asarray(found).reshape(y.size, x.size)
    return least / _LAD_DELTA if result.loss == "lad" else least


@functools.cache
def _descend(law: Law, space: str, delta: float | None) -> Any:
    """Compiles Levenberg-Marquardt on reweighted squares, in the free coordinates.

    Returns:
      A function of starts, what is free (1 or 0), logarithms of the inputs and of the
      target, and the box, to the least objectives.
    """

    def residuals(c: Any, logs: Any, target: Any) -> tuple[Any, Any]:
        value, rows = law.derivatives(c, logs)
        slopes = jnp.stack([jnp.broadcast_to(row, value.shape) for row in rows])
        if space == "linear":
            fitted = jnp.exp(value)
            return fitted - jnp.exp(target), slopes * fitted[None]
        return value - target, slopes

    def objective(r: Any) -> Any:
        if delta is None:
            return jnp.sum(r**2) / 2
        size = jnp.abs(r)
        bent = delta * (size - delta / 2)
        return jnp.sum(jnp.where(size <= delta, r**2 / 2, bent))

    def descend(start: Any, free: Any, logs: Any, target: Any, box: Any) -> Any:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            c, damping, best = carry
            r, slopes = residuals(c, logs, target)
            slopes = slopes * free[:, None]
            weighted = slopes
            if delta is not None:
                weighted = slopes / jnp.maximum(jnp.abs(r) / delta, 1.0)[None]
            normal = weighted @ slopes.T
            diagonal = jnp.diag(normal) * damping + (1 - free) + 1e-30
            move = jnp.linalg.solve(normal + jnp.diag(diagonal), weighted @ r)
            trial = jnp.where(free > 0, jnp.clip(c - move, *box), c)
            now = objective(residuals(trial, logs, target)[0])
            better = now <= best
            damping = jnp.clip(damping * jnp.where(better, 0.3, 4.0), 1e-12, 1e12)
            c = jnp.where(better, trial, c)
            return (c, damping, jnp.where(better, now, best)), None

        first = objective(residuals(start, logs, target)[0])
        carry = (start, jnp.full((), 1e-2, start.dtype), first)
        return jax.lax.scan(step, carry, length=_NUM_STEPS)[0][2]

    return jax.jit(jax.vmap(descend, in_axes=(0, None, None, None, None)))
