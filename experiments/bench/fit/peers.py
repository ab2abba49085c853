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
from scipy import optimize

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
    terms = np.stack(
        [a - alpha * runs.params, b - beta * runs.tokens, np.full(len(runs.loss), e)]
    )
    top = terms.max(0)
    sizes = np.exp(terms - top)
    total = sizes.sum(0)
    error = top + np.log(total) - runs.loss
    clipped = np.clip(error, -DELTA, DELTA)
    pull = sizes / total * clipped
    slopes = [-(pull[0] @ runs.params), -(pull[1] @ runs.tokens)]
    gradient = np.array([*pull.sum(1), *slopes])
    return float(np.sum(clipped * (error - 0.5 * clipped))), gradient


def everyone() -> Iterator[tuple[str, Callable[[np.ndarray, Runs], np.ndarray]]]:
    """Lists the ways that can be gone on this machine, by name."""
    yield "NumPy gradient + SciPy BFGS", _fitting(value_and_gradient, jac=True)
    if importlib.util.find_spec("autograd") is not None:
        autograd: Any = importlib.import_module("autograd")
        library: Any = importlib.import_module("autograd.numpy")
        gradient = autograd.grad(lambda x, runs: objective(x, runs, library))
        yield "autograd + SciPy BFGS", _fitting(objective, jac=gradient)
    # SciPy's default.
    yield "finite differences + SciPy BFGS", _fitting(objective, jac=None)


def _fitting(call: Any, jac: Any) -> Callable[[np.ndarray, Runs], np.ndarray]:
    return lambda start, runs: (
        optimize.minimize(call, start, args=(runs,), method="BFGS", jac=jac).x
    )
