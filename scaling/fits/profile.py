"""Profile of a fit: its objective over the plane of two coefficients.

At every point of the plane the remaining coefficients are fitted again, so a valley in
the plane is a combination of the two coefficients that the data does not identify.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from scaling.fits import levenberg_marquardt, observations
from scaling.fits.levenberg_marquardt import LAST_DELTA, FitProblem, Objective
from scaling.fits.result import FitResult


def choose_pair(result: FitResult) -> tuple[str, str] | None:
    """Chooses the plane of a profile: two exponents, or an exponent and the floor.

    Returns:
      Names of two coefficients whose values do not depend on the units of N, D and C;
      None if there are not two, or if coefficients were fixed or bounded.
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


def profile_objective(
    result: FitResult,
    data: Mapping[str, Any],
    names: tuple[str, str],
    x: Float[np.ndarray, " columns"],
    y: Float[np.ndarray, " rows"],
) -> Float[np.ndarray, "rows columns"]:
    """Returns the objective with two coefficients fixed and the remaining ones fitted.

    Args:
      result: a fit.
      data: columns of the fit, with weights of 1.
      names: the two coefficients, as from `choose_pair`.
      x: values of the first.
      y: values of the second.

    Returns:
      Sums of the losses.
    """
    law = result.find_law()
    runs = observations.make_observations(
        law, data, None, np.arange(np.size(data[law.target]))
    )
    starts = np.tile(result.coordinates, (y.size * x.size, 1))
    low, high = (np.tile(wall, (len(starts), 1)) for wall in law.box(runs.level))
    for name, values in zip(names, np.meshgrid(x, y), strict=True):
        place = law.coefficients.index(name)
        held = np.log(values) if law.coordinates[place].log else values
        for coordinates in (starts, low, high):
            coordinates[:, place] = held.ravel()
    solution = levenberg_marquardt.solve_weightings(
        FitProblem(law, runs, Objective(result.loss, result.delta, result.space)),
        lambda count: np.tile(runs.weights, (count, 1)),
        starts,
        box=(low, high),
        tolerance=1e-30,
    )
    profile = solution.objective.reshape(y.size, x.size)
    return profile / LAST_DELTA if result.loss == "lad" else profile
