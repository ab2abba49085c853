"""The usual ways to fit the Chinchilla law again and again, for `bench fit`.

Each is a loop over resamples that calls SciPy's BFGS from the full fit, as published
replications do; they differ in where the gradient comes from. SciPy and autograd serve
this comparison only.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

DELTA = 1e-3


class Runs(NamedTuple):
    """Logarithms of parameters, tokens and losses."""

    params: Float[np.ndarray, " n"]
    tokens: Float[np.ndarray, " n"]
    loss: Float[np.ndarray, " n"]

    def drawn(self, rows: Int[np.ndarray, " drawn"]) -> "Runs":
        """Gathers the rows of a resample."""
        return Runs(*(column[rows] for column in self))


def objective(x: Any, runs: Runs, library: Any = np) -> Any:
    """Sums Huber's loss of the logarithms, from `ln A, ln B, ln E, alpha, beta`.

    Args:
      x: the coefficients.
      runs: to fit.
      library: NumPy, or one that stands in for it.

    Source: Hoffmann et al. 2022, arXiv:2203.15556, equation 3.
    """
    a, b, e, alpha, beta = (x[i] for i in range(5))
    terms = (a - alpha * runs.params, b - beta * runs.tokens, e + 0 * runs.params)
    top = library.maximum(library.maximum(terms[0], terms[1]), terms[2])
    total = sum(library.exp(term - top) for term in terms)
    size = library.abs(top + library.log(total) - runs.loss)
    losses = library.where(
        size <= DELTA, 0.5 * size * size, DELTA * (size - 0.5 * DELTA)
    )
    return library.sum(losses)


def value_and_gradient(x: np.ndarray, runs: Runs) -> tuple[float, np.ndarray]:
    """Computes the objective and its gradient by hand: shares times clipped errors."""
    a, b, e, alpha, beta = x
    terms = np.empty((3, len(runs.loss)))
    terms[0] = a - alpha * runs.params
    terms[1] = b - beta * runs.tokens
    terms[2] = e
    top = terms.max(0)
    sizes = np.exp(terms - top)
    total = sizes.sum(0)
    error = top + np.log(total) - runs.loss
    clipped = np.clip(error, -DELTA, DELTA)
    pull = sizes / total * clipped
    gradient = np.array(
        [
            *pull.sum(1),
            -(pull[0] @ runs.params),
            -(pull[1] @ runs.tokens),
        ]
    )
    return float(np.sum(clipped * (error - 0.5 * clipped))), gradient


def by_hand(start: np.ndarray, runs: Runs) -> np.ndarray:
    """Fits with the gradient written in NumPy."""
    return _minimize(value_and_gradient, start, runs, jac=True)


def by_differences(start: np.ndarray, runs: Runs) -> np.ndarray:
    """Fits with finite differences, SciPy's default."""
    return _minimize(objective, start, runs, jac=None)


def by_autograd(start: np.ndarray, runs: Runs) -> np.ndarray:
    """Fits with the gradient that the package autograd traces."""
    autograd: Any = importlib.import_module("autograd")
    library: Any = importlib.import_module("autograd.numpy")
    gradient = autograd.grad(lambda x, runs: objective(x, runs, library))
    return _minimize(objective, start, runs, jac=gradient)


def everyone() -> Iterator[tuple[str, Callable[[np.ndarray, Runs], np.ndarray]]]:
    """Lists the ways that can be gone on this machine, by name."""
    yield "NumPy gradient + SciPy BFGS", by_hand
    if importlib.util.find_spec("autograd") is not None:
        yield "autograd + SciPy BFGS", by_autograd
    yield "finite differences + SciPy BFGS", by_differences


def _minimize(call: Any, start: np.ndarray, runs: Runs, jac: Any) -> np.ndarray:
    from scipy import optimize

    return optimize.minimize(call, start, args=(runs,), method="BFGS", jac=jac).x
