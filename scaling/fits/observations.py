"""Validation of runs, and their transform to the coordinates of fitting."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxkv import validation
from scaling.laws import Law

MIN_SPREAD = 1e-3
"""Relative variation below which an input counts as constant."""


class Observations(NamedTuple):
    """Runs in the coordinates of fitting.

    Attributes:
      logs: log inputs, minus `centre`.
      centre: logarithms of the units of the inputs.
      target: log targets.
      weights: weights of the runs, at least 0.
      cluster: index of the run of each row, from 0; rows of a run are resampled
        together.
      level: logarithm of the target's median.
    """

    logs: Float[np.ndarray, "inputs n"]
    centre: Float[np.ndarray, " inputs"]
    target: Float[np.ndarray, " n"]
    weights: Float[np.ndarray, " n"]
    cluster: Int[np.ndarray, " n"]
    level: float

    @property
    def num_points(self) -> int:
        """Number of runs."""
        return len(self.target)

    def thinned(self, max_rows: int) -> "Observations":
        """Returns at most `max_rows` rows, drawn at random with a fixed seed."""
        n = self.num_points
        if n <= max_rows:
            return self
        rows = np.sort(np.random.default_rng(0).choice(n, max_rows, replace=False))
        return self._replace(
            logs=self.logs[:, rows],
            target=self.target[rows],
            weights=self.weights[rows],
            cluster=self.cluster[rows],
        )


@validation.checks_numbers(num_given=0)
def make_observations(
    law: Law,
    data: Mapping[str, Any],
    weights: Any = None,
    cluster: Any = None,
    *,
    num_given: int = 0,
) -> Observations:
    """Validates columns and takes their logarithms.

    Args:
      law: law whose columns are read.
      data: columns of equal length, one row for each observation.
      weights: weights of the rows; 1 by default.
      cluster: labels; rows with equal labels are of one run. By default every row is
        a run.
      num_given: number of fixed coefficients.

    Raises:
      ValueError: a column is missing, has another length, or has a value that is not a
        positive number; there are fewer rows than coefficients; a column is constant;
        two rows are equal; or the weights are negative or all zero.
    """
    columns = [_column(law, data, name) for name in (*law.inputs, law.target)]
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(
            f"{name} {len(column)}"
            for name, column in zip((*law.inputs, law.target), columns, strict=True)
        )
        raise ValueError(f"columns of different lengths: {lengths}")
    n = len(columns[0])
    k = len(law.coordinates) - num_given
    if n < k:
        raise ValueError(
            f"{n} points are too few for the {k} coefficients of {law.name}"
        )
    for name, column in zip(law.inputs, columns, strict=False):
        if np.ptp(column) < MIN_SPREAD * column.min():
            near = f", to within {MIN_SPREAD:.1%}" if np.ptp(column) else ""
            raise ValueError(
                f"{name} is the same in all {n} rows{near}: nothing to fit"
            )
    if cluster is None:
        labels = np.arange(n)
        rows = np.stack(columns, 1)
        _, first, place = np.unique(
            rows, axis=0, return_index=True, return_inverse=True
        )
        if len(first) < n:
            again = first[place.reshape(-1)]
            row = int(np.argmax(again != labels))
            raise ValueError(
                f"rows {again[row]} and {row} are the same run; label the rows of one "
                "run as a cluster if that is meant"
            )
    else:
        labels = np.unique(np.asarray(cluster), return_inverse=True)[1].reshape(-1)
        if len(labels) != n:
            raise ValueError(f"{len(labels)} cluster labels for {n} rows")
    weights = np.ones(n) if weights is None else np.asarray(weights, np.float64)
    if weights.shape != (n,):
        raise ValueError(f"weights of shape {weights.shape} for {n} rows")
    if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
        raise ValueError("weights must be finite, at least 0, and not all 0")
    logs = np.log(columns[:-1])
    target = np.log(columns[-1])
    centre = law.centre(logs)
    return Observations(
        logs - centre[:, None],
        centre,
        target,
        weights,
        labels,
        float(np.median(target)),
    )


def _column(law: Law, data: Mapping[str, Any], name: str) -> np.ndarray:
    law.check_columns(data, [name])
    try:
        column = np.asarray(data[name], np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not numeric: {error}") from None
    if column.ndim != 1:
        raise ValueError(f"{name} must be one column, not of shape {column.shape}")
    wrong = ~(np.isfinite(column) & (column > 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"row {row}: {name}={column[row]} must be positive and finite")
    return column
