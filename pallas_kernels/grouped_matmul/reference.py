"""The grouped matrix product in plain JAX: the reference, used on CPUs.

Without a kernel for it, as on CPUs, `lax.ragged_dot` multiplies every row by the
weights of all groups, so its work grows with the number of groups. Here each block of
rows of one group is multiplied by the weights of that group only, one block after
another.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import devices
from pallas_kernels.grouped_matmul.blocks import split_row_blocks

MAX_BLOCK = 64
"""Largest block on a CPU. Blocks smaller than a group reread its weights; larger ones
multiply rows of zeros."""

_ROWS_APART = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def multiply_reference(
    x: Float[Array, "rows width"],
    w: Float[Array, "groups before after"],
    group_sizes: Int[Array, " groups"],
    *,
    transposed: bool = False,
    dtype: DTypeLike,
    block_rows: int | None = None,
) -> Float[Array, "rows columns"]:
    """Multiplies each row by the weights of its group.

    Args:
      x: rows sorted by group.
      w: weights, `[groups, width, columns]`; `[groups, columns, width]` if transposed.
      group_sizes: rows of each group, 0 or more, with a sum of at most `rows`.
      transposed: True if the last two axes of `w` are swapped.
      dtype: type of the result; sums have at least 32 bits.
      block_rows: fixed number of rows of a block, which makes the bits of a row
        independent of the batch; None chooses the fastest.

    Returns:
      The products; 0 in rows past the last group, for any content of `x`.
    """
    num_rows = x.shape[0]
    num_groups = w.shape[0]
    if num_rows == 0 or num_groups == 0:
        return jnp.zeros((num_rows, w.shape[1 if transposed else 2]), dtype)
    wide = _wide(dtype)
    if block_rows is None and devices.current_target().platform != "cpu":
        right = w.swapaxes(1, 2) if transposed else w
        out = lax.ragged_dot(
            x, right, group_sizes.astype(jnp.int32), preferred_element_type=wide
        )
        return _zero_ungrouped_rows(out, group_sizes).astype(dtype)
    padding = max(0, (block_rows or 1) - num_rows)
    x = jnp.pad(x, [(0, padding), (0, 0)])
    size = block_rows or block_size(num_rows, num_groups)
    blocks = split_row_blocks(group_sizes, num_rows=num_rows, block_rows=size)
    over = ((1,), (1 if transposed else 0,)), ((), ())

    def one_block(i: Array, out: Array) -> Array:
        weights = lax.dynamic_index_in_dim(w, blocks.group[i], keepdims=False)
        # The last block may be shorter: it begins earlier and keeps their products.
        first = jnp.minimum(blocks.first[i], x.shape[0] - size)
        rows = lax.dynamic_slice_in_dim(x, first, size)
        product = lax.dot_general(rows, weights, over, preferred_element_type=wide)
        row = first + jnp.arange(size, dtype=jnp.int32)
        is_in_block = (row >= blocks.begin[i]) & (row < blocks.end[i])
        before = lax.dynamic_slice_in_dim(out, first, size)
        after = jnp.where(is_in_block[:, None], product.astype(dtype), before)
        return lax.dynamic_update_slice_in_dim(out, after, first, 0)

    out = jnp.zeros((x.shape[0], w.shape[1 if transposed else 2]), dtype)
    out = devices.varying_like(out, x, w, group_sizes)
    return lax.fori_loop(0, blocks.num_grouped, one_block, out)[:num_rows]


def sum_outer_products(
    x: Float[Array, "rows width"],
    y: Float[Array, "rows columns"],
    group_sizes: Int[Array, " groups"],
    *,
    dtype: DTypeLike,
) -> Float[Array, "groups width columns"]:
    """Sums x[row] y[row]^T over the rows of each group: the gradient of the weights.

    Rows are sorted by group. Sums have at least 32 bits, and are 0 for groups without
    rows. Rows past the last group are ignored.
    """
    num_rows = x.shape[0]
    num_groups = group_sizes.shape[0]
    wide = _wide(dtype)
    x, y = (_zero_ungrouped_rows(rows, group_sizes) for rows in (x, y))
    if devices.current_target().platform != "cpu":
        sums = lax.ragged_dot_general(
            x,
            y,
            group_sizes.astype(jnp.int32),
            _ROWS_APART,
            preferred_element_type=wide,
        )
        return sums.astype(dtype)
    out = jnp.zeros((num_groups, x.shape[1], y.shape[1]), wide)
    if num_rows == 0 or num_groups == 0:
        return out.astype(dtype)
    out = devices.varying_like(out, x, y, group_sizes)
    size = block_size(num_rows, num_groups)
    blocks = split_row_blocks(group_sizes, num_rows=num_rows, block_rows=size)

    def one_block(i: Array, out: Array) -> Array:
        first = jnp.minimum(blocks.first[i], num_rows - size)
        row = first + jnp.arange(size, dtype=jnp.int32)
        is_in_block = (row >= blocks.begin[i]) & (row < blocks.end[i])
        left = lax.dynamic_slice_in_dim(x, first, size)
        left = jnp.where(is_in_block[:, None], left, jnp.zeros_like(left))
        right = lax.dynamic_slice_in_dim(y, first, size)
        over = ((0,), (0,)), ((), ())
        more = lax.dot_general(left, right, over, preferred_element_type=wide)
        sums = lax.dynamic_index_in_dim(out, blocks.group[i], keepdims=False)
        return lax.dynamic_update_index_in_dim(out, sums + more, blocks.group[i], 0)

    return lax.fori_loop(0, blocks.num_grouped, one_block, out).astype(dtype)


def block_size(num_rows: int, num_groups: int) -> int:
    """Returns the rows of a block: about the average group size."""
    average = -(-num_rows // num_groups)
    return min(num_rows, MAX_BLOCK, 1 << (average - 1).bit_length())


def _wide(dtype: DTypeLike) -> DTypeLike:
    """Returns the type of sums."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _zero_ungrouped_rows(
    rows: Float[Array, "rows width"], group_sizes: Int[Array, " groups"]
) -> jax.Array:
    """Sets rows past the last group to 0."""
    num_grouped = jnp.sum(group_sizes, dtype=jnp.int32)
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)
    return jnp.where((row < num_grouped)[:, None], rows, jnp.zeros_like(rows))
