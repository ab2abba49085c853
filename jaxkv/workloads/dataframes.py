"""Data frames of traces, results and logs, where pandas or polars is installed."""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

FRAME_LIBRARIES = ("pandas", "polars")
"""Libraries that make data frames; the first that is installed is used."""


def make_dataframe(columns: Mapping[str, object]) -> Any:
    """Returns a data frame of equally long columns.

    Args:
      columns: arrays or sequences by name; an array of several axes becomes a column
        of lists.

    Raises:
      ImportError: neither pandas nor polars is installed.
    """
    for name in FRAME_LIBRARIES:
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        plain = {
            key: x.tolist() if isinstance(x, np.ndarray) and x.ndim > 1 else x
            for key, x in columns.items()
        }
        return library.DataFrame(plain)
    raise ImportError(
        "to_dataframe() needs pandas or polars; `pip install pandas` installs one"
    )


def per_row(
    values: Mapping[str, object], axes: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Flattens the leading axes of arrays: one row per entry.

    Arrays with further axes are summed over these if they are counts (`num_...`), and
    left out otherwise.

    Args:
      values: arrays by name; None is left out.
      axes: names of the leading axes, which become columns of indices.
    """
    arrays = {key: np.asarray(x) for key, x in values.items() if x is not None}
    arrays = {key: x for key, x in arrays.items() if x.ndim >= len(axes)}
    shape = next(iter(arrays.values())).shape[: len(axes)]
    grid = np.indices(shape).reshape(len(axes), -1)
    columns: dict[str, np.ndarray] = dict(zip(axes, grid, strict=True))
    for key, x in arrays.items():
        axes_left = tuple(range(len(axes), x.ndim))
        if not axes_left or key.startswith("num_"):
            columns[key] = (
                x.sum(axis=axes_left).reshape(-1) if axes_left else x.reshape(-1)
            )
    return columns
