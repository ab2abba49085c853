"""Online softmax of a warpgroup, shared by the attention kernels.

A warpgroup holds the scores of 64 rows and a tile of keys in registers, and for every
row the highest score, the sum of the weights, and the weighted values so far. All are
in base 2, the base of the hardware's exponential.

Source: Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.devices import WGMMA_ROWS, Ref

LOG2E = math.log2(math.e)
MASKED = -1e30
"""Score of a masked position: finite, and far below `LOWEST_SCORE`."""
LOWEST_SCORE = -1e20
"""Initial value of the running maximum. A row without a key keeps it, with weights
2 ** (MASKED - LOWEST) = 0 under any rounding of the compiler."""

_SQUARE = 64
"""Rows and columns of values that are cleared at a time."""


class StaticScoreTransform(NamedTuple):
    """Transform from a product of query and key to a score; static."""

    scale: float
    softcap: float | None
    alibi: bool

    @property
    def is_linear(self) -> bool:
        """True if the scores are the products times a positive number.

        The number can then be applied within the exponent, at no cost.
        """
        return self.softcap is None and not self.alibi and self.scale > 1e-6

    @property
    def factor(self) -> float:
        """The number of `is_linear` in base 2; 1 if scores are already scaled."""
        return self.scale * LOG2E if self.is_linear else 1.0


class RowState(NamedTuple):
    """Running state of 64 rows."""

    out: Array
    """Sum of weights times values: `[64, head_dim]`."""
    top: Array
    """Highest score so far: `[64]`."""
    total: Array
    """Sum of the weights: `[64]`."""


def init_rows(head_dim: int) -> RowState:
    """Returns the initial state of 64 rows."""
    per_row = plgpu.Layout.WGMMA.reduce(1)
    wide = jnp.float32
    return RowState(
        out=plgpu.layout_cast(
            jnp.zeros((WGMMA_ROWS, head_dim), wide), plgpu.Layout.WGMMA
        ),
        top=plgpu.layout_cast(jnp.full((WGMMA_ROWS,), LOWEST_SCORE, wide), per_row),
        total=plgpu.layout_cast(jnp.zeros((WGMMA_ROWS,), wide), per_row),
    )


def update_rows(
    scores: Array, state: RowState, factor: float
) -> tuple[Array, RowState]:
    """Returns the weights of a tile and the state rescaled to the new maximum.

    Scores, `[64, tile]`, are `MASKED` where masked, and are multiplied here by
    `factor`, above 0.
    """
    top = jnp.maximum(state.top, scores.max(axis=1) * factor)
    decay = jnp.exp2(state.top - top)
    weights = jnp.exp2(scores * factor - broadcast_rows(top, scores.shape))
    total = state.total * decay + weights.sum(axis=1)
    return weights, RowState(
        state.out * broadcast_rows(decay, state.out.shape), top, total
    )


def scale_and_cap(products: Array, scoring: StaticScoreTransform) -> Array:
    """Turns products of queries and keys into scores in base 2."""
    scores = products * scoring.scale
    if scoring.softcap is not None:
        # tanh from an exponential: the hardware's tanh has 11 correct bits.
        growth = jnp.exp2(scores * (2 * LOG2E / scoring.softcap))
        scores = scoring.softcap - 2 * scoring.softcap / (growth + 1.0)
    return scores * LOG2E


def key_positions(shape: tuple[int, int], begin: Array) -> Array:
    """Returns the position of each column of scores, the first of which is `begin`."""
    layout = plgpu.Layout.WGMMA
    return begin + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)


def broadcast_rows(values: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts one number a row over the columns."""
    return lax.broadcast_in_dim(values, shape, [0])


def load_row_values(numbers: Ref, shape: tuple[int, int]) -> Array:
    """Loads one number a row, broadcast over columns, at its use, to save registers."""
    return broadcast_rows(
        plgpu.load(numbers, layout=plgpu.Layout.WGMMA.reduce(1)), shape
    )


def clear_unseen(values: Ref, begin: Array, low: Array, high: Array) -> None:
    """Clears values that no row attends to: a weight of 0 times NaN is NaN.

    `values` is a tile in shared memory, `[tile, head_dim]`, whose first position is
    `begin`; positions in [low, high) are kept.
    """
    tile, head_dim = values.shape
    # In squares, so that few registers hold values and positions at a time.
    for row, column in itertools.product(
        range(0, tile, _SQUARE), range(0, head_dim, _SQUARE)
    ):
        square = pl.ds(row, _SQUARE), pl.ds(column, _SQUARE)
        place = (
            begin
            + row
            + plgpu.broadcasted_iota(
                jnp.int32, (_SQUARE, _SQUARE), 0, layout=plgpu.Layout.WGMMA
            )
        )
        block = values[*square]
        mask = (place >= low) & (place < high)
        values[*square] = jnp.where(mask, block, jnp.zeros_like(block))
    plgpu.commit_smem()


def add_product(
    out: Array,
    weights: Array,
    values: Ref,
    emulated: bool,
    meanwhile: Callable[[], None] = lambda: None,
) -> Array:
    """Adds weights times values, in shared memory, to the output: `[64, head_dim]`.

    `emulated` is True in the emulator; `meanwhile` runs while the tensor cores
    multiply.
    """
    if emulated:
        # The emulator has no product with a left operand in registers. A plain read
        # needs a fence before the next TMA copy into the buffer, which the product does
        # not.
        out += jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        meanwhile()
        return out

    def product(sums: Ref) -> None:
        plgpu.wgmma(sums, weights, values)
        meanwhile()

    return pl.run_state(product)(plgpu.ACC.init(out))
