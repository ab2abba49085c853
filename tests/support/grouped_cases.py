"""Cases of grouped products, and the reference: a loop over groups in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of a grouped product; rows of no group hold NaN."""

    x: jax.Array
    w: jax.Array
    group_sizes: jax.Array

    def runs(self) -> list[slice]:
        """Number of rows of each group."""
        ends = np.cumsum(self.group_sizes)
        return [
            slice(int(end - size), int(end))
            for end, size in zip(ends, self.group_sizes, strict=True)
        ]


def make_case(
    sizes: list[int],
    *,
    num_rows: int | None = None,
    width: int = 64,
    num_columns: int = 64,
    dtype: Any = "bfloat16",
) -> Case:
    """Draws rows and weights; rows beyond the sizes belong to no group."""
    rng = np.random.default_rng(0)
    num_grouped = sum(sizes)
    x = rng.normal(size=(num_rows or num_grouped, width))
    x[num_grouped:] = np.nan
    w = rng.normal(size=(len(sizes), width, num_columns)) / np.sqrt(width)
    return Case(
        x=jnp.asarray(x, dtype),
        w=jnp.asarray(w, dtype),
        group_sizes=jnp.asarray(sizes, jnp.int32),
    )


def wide(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def exact(case: Case) -> np.ndarray:
    """Returns the product in float64, of the rounded inputs."""
    x = wide(case.x)
    w = wide(case.w)
    out = np.zeros((len(x), w.shape[2]))
    for run, weights in zip(case.runs(), w, strict=True):
        out[run] = x[run] @ weights
    return out


def plain(case: Case) -> np.ndarray:
    """Returns the product by a plain implementation: sums in float32, rounded."""
    out = np.zeros((len(case.x), case.w.shape[2]), np.float32)
    for run, weights in zip(case.runs(), case.w, strict=True):
        out[run] = wide(case.x)[run].astype("f4") @ wide(weights).astype("f4")
    return wide(jnp.asarray(out, case.x.dtype))


def assert_within_rule(out: Any, wanted: np.ndarray, plain: np.ndarray) -> None:
    """Asserts at most twice the error of the plain implementation, plus 1e-5."""
    allowed = 2 * np.abs(plain - wanted).max(initial=0) + 1e-5
    assert np.abs(wide(out) - wanted).max(initial=0) <= allowed
