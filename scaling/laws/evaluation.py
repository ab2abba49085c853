"""Evaluation of a law on the host: many coordinates at once, in float64."""

import functools
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scaling.laws.base import Centre, Coordinates, Law, LogInputs


def values(
    law: Law,
    coordinates: Float[np.ndarray, "problems k"],
    logs: Float[np.ndarray, "inputs n"],
) -> Float[np.ndarray, "problems n"]:
    """Evaluates the logarithm of a law's target for many coordinates."""
    return _call(_compiled(law).values, coordinates, logs)


def slopes(
    law: Law, coordinates: Float[np.ndarray, " k"], logs: Float[np.ndarray, "inputs n"]
) -> Float[np.ndarray, "n k"]:
    """Evaluates the derivatives of the logarithm of a law's target."""
    return _call(_compiled(law).slopes, coordinates, logs)


def coefficients(
    law: Law,
    coordinates: Float[np.ndarray, "problems k"],
    centre: Float[np.ndarray, " inputs"],
) -> Float[np.ndarray, "problems k"]:
    """Turns centred coordinates into coefficients in natural units."""
    return _call(_compiled(law).coefficients, coordinates, centre)


def coefficient_slopes(
    law: Law, coordinates: Float[np.ndarray, " k"], centre: Float[np.ndarray, " inputs"]
) -> Float[np.ndarray, "k k"]:
    """Evaluates the derivatives of coefficients by centred coordinates."""
    return _call(_compiled(law).coefficient_slopes, coordinates, centre)


def coordinates(
    law: Law,
    coefficients: Float[np.ndarray, "problems k"],
    centre: Float[np.ndarray, " inputs"],
) -> Float[np.ndarray, "problems k"]:
    """Turns coefficients into centred coordinates."""
    return _call(_compiled(law).coordinates, coefficients, centre)


@functools.cache
def _compiled(law: Law) -> types.SimpleNamespace:
    """Returns the functions of this module, compiled for one law."""

    def slopes(x: Coordinates, logs: LogInputs) -> Float[Array, "n k"]:
        return jnp.stack(law.derivatives(x, logs)[1], axis=1)

    def natural(x: Coordinates, centre: Centre) -> Coordinates:
        return law.decode(law.shift(x, -centre))

    def inward(x: Coordinates, centre: Centre) -> Coordinates:
        return law.shift(law.encode(x), centre)

    return types.SimpleNamespace(
        values=jax.jit(jax.vmap(law.log_loss, (0, None))),
        slopes=jax.jit(slopes),
        coefficients=jax.jit(jax.vmap(natural, (0, None))),
        coefficient_slopes=jax.jit(jax.jacfwd(natural)),
        coordinates=jax.jit(jax.vmap(inward, (0, None))),
    )


def _call(
    function: Callable[[Array, Array], Array], x: np.ndarray, others: np.ndarray
) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(function(jnp.asarray(x), jnp.asarray(others)))
