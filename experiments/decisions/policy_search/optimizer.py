"""CMA-ES, by the library `cmaes`, and random search with the same interface."""

from typing import Protocol

import numpy as np
from jaxtyping import Float


class Optimizer(Protocol):
    """Asks for points of a generation, and is told their objectives."""

    def ask(self) -> Float[np.ndarray, "population size"]:
        """Returns the points of a generation."""
        ...

    def tell(
        self,
        points: Float[np.ndarray, "population size"],
        objectives: Float[np.ndarray, " population"],
    ) -> None:
        """Takes the objectives of these points; smaller is better."""
        ...

    def center(self) -> Float[np.ndarray, " size"] | None:
        """Returns the mean of the search distribution, or None without one."""
        ...


class CMASearch:
    """Covariance matrix adaptation. Source: Hansen 2016, arXiv:1604.00772."""

    def __init__(
        self,
        start: Float[np.ndarray, " size"],
        *,
        population: int,
        sigma: float,
        seed: int,
    ) -> None:
        """Starts at a point with a standard deviation of `sigma`."""
        # Here, since the library is an extra.
        from cmaes import CMA

        self._population = population
        self._cma = CMA(
            mean=start.astype(float), sigma=sigma, population_size=population, seed=seed
        )

    def ask(self) -> Float[np.ndarray, "population size"]:
        """Returns the points of a generation."""
        return np.array([self._cma.ask() for _ in range(self._population)])

    def tell(
        self,
        points: Float[np.ndarray, "population size"],
        objectives: Float[np.ndarray, " population"],
    ) -> None:
        """Moves the search distribution."""
        self._cma.tell([*zip(points, objectives.tolist(), strict=True)])

    def center(self) -> Float[np.ndarray, " size"] | None:
        """Returns the mean of the search distribution."""
        return self._cma.mean


class RandomSearch:
    """Independent normal points."""

    def __init__(
        self,
        start: Float[np.ndarray, " size"],
        *,
        population: int,
        sigma: float,
        seed: int,
    ) -> None:
        """Draws around a point with a standard deviation of `sigma`."""
        self._start = start
        self._population = population
        self._sigma = sigma
        self._rng = np.random.default_rng(seed)

    def ask(self) -> Float[np.ndarray, "population size"]:
        """Returns the points of a generation."""
        shape = self._population, self._start.size
        return self._start + self._rng.normal(0.0, self._sigma, shape)

    def tell(
        self,
        points: Float[np.ndarray, "population size"],
        objectives: Float[np.ndarray, " population"],
    ) -> None:
        """Does nothing."""

    def center(self) -> Float[np.ndarray, " size"] | None:
        """Returns None."""
        return None
