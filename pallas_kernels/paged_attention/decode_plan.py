"""The plan of a step: which program attends from which rows to which keys.

The plan packs the rows (`row_packing`), says which places each of them sees, and cuts
the work into equal stretches (`stream_k`). It knows no layer: it is made once a step.
All shapes are static, so that new lengths compile nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Int32, UInt32

from pallas_kernels import row_packing
from pallas_kernels.paged_attention import stream_k
from pallas_kernels.paged_attention.stream_k import StreamKSchedule, Tiling
from pallas_kernels.row_packing import Packing

FIRST, LIMIT, POSITION, WORDS = 0, 1, 2, 3
"""Lines of `DecodePlan.rows`; the words of ancestors fill the lines from `WORDS` on."""


def decode_unsupported_reason(
    q: Array | jax.ShapeDtypeStruct,
    k_pages: Array | jax.ShapeDtypeStruct,
    value_width: int | None = None,
) -> str | None:
    """Says in a clause why the kernels do not take a call, or None.

    Args:
      q: queries, `[rows, q_heads, head_dim]`, or only their shape and type.
      k_pages: keys, `[pages, kv_heads, page_size, head_dim]`, likewise.
      value_width: width of the values; None means that of the keys.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_pages.dtype != q.dtype:
        return (
            f"q and pages must both be bfloat16 or both float16, not {q.dtype} and"
            f" {k_pages.dtype}"
        )
    group, (_, _, page_size, head_dim) = q.shape[1] // k_pages.shape[1], k_pages.shape
    if not 1 <= group <= 64:
        return f"{group=} query heads for each KV head must be in [1, 64]"
    if head_dim not in (64, 128, 256):
        return f"{head_dim=} must be 64, 128 or 256"
    if value_width not in (None, head_dim):
        return f"{value_width=} must be {head_dim=}"
    if page_size not in (16, 32, 64, 128, 256):
        return f"{page_size=} must be a power of two in [16, 256]"
    return None


class DecodePlan(NamedTuple):
    """What the decode kernel needs besides arrays of a layer."""

    packing: Packing
    rows: Int32[Array, "blocks lines wgmma_rows"]
    """Of each packed row, padded to whole matrix products: the first place it sees; the
    place from which on it sees only ancestors; its position; and words whose bit j
    stands for the j-th place from there, the lowest first."""
    low: Int32[Array, " blocks"]
    """First place that any row of the block sees; past `high` where none sees any."""
    high: Int32[Array, " blocks"]
    """Place after the last that any sees, 0 where none does."""
    inner_low: Int32[Array, " blocks"]
    """First place that all rows see, up to `inner_high`."""
    inner_high: Int32[Array, " blocks"]
    schedule: StreamKSchedule


def plan_decode(
    positions: Int[Array, " rows"],
    slots: Int[Array, " rows"] | None,
    *,
    num_slots: int,
    kv_heads: int,
    group: int,
    tiling: Tiling,
    context: Int[Array, " slots"] | None = None,
    ancestors: Bool[Array, "rows columns"] | None = None,
    window: int | None = None,
    max_rows_per_slot: int | None = None,
    nth: Int32[Array, " rows"] | None = None,
) -> DecodePlan:
    """Packs the rows and cuts the work.

    A row sees the places up to its position; with a `context` of at least 0 instead
    those below that of its slot, and with `ancestors` also place `context + j` where
    `ancestors[row, j]`, which only rows of such slots may have.

    Args:
      positions: position of each row; -1 for a padding row.
      slots: slot of each row, the rows of a slot side by side; None where row i is
        slot i.
      num_slots: slots, static.
      kv_heads: KV heads, static.
      group: query heads that share a KV head, at most `tiling.block_rows`, static.
      tiling: sizes; the same for plan and kernel.
      context: see above.
      ancestors: see above.
      window: a row sees places above its position - window; None means all.
      max_rows_per_slot: live rows that no slot has more of, so that fewer blocks are
        enough. None means any number.
      nth: place of each row among those of its slot, see `row_packing.pack_rows`.

    Returns:
      The plan.

    Raises:
      ValueError: a group that a block does not hold.
    """
    if not 1 <= group <= tiling.block_rows:
        raise ValueError(f"{group=} must be in [1, {tiling.block_rows=}]")
    live = positions >= 0
    if slots is None:
        packed = row_packing.pack_one_row_per_slot(live)
    else:
        live &= slots >= 0
        tokens = min(tiling.block_rows // group, positions.shape[0])
        packed = row_packing.pack_rows(
            slots,
            live,
            num_slots=num_slots,
            tokens=tokens,
            max_rows=max_rows_per_slot,
            nth=nth,
        )
    start = jnp.zeros_like(positions)
    if window is not None:
        start = jnp.maximum(start, positions - window + 1)
    limit, lines = positions + 1, []
    if context is not None:
        limit = context if slots is None else context[jnp.where(live, slots, 0)]
        limit = jnp.where(limit < 0, positions + 1, limit)
    past = limit
    if ancestors is not None:
        column = jnp.arange(1, ancestors.shape[1] + 1, dtype=jnp.int32)
        past += jnp.max(jnp.where(ancestors, column, 0), axis=1, initial=0)
        words = lax.bitcast_convert_type(ancestor_words(ancestors), jnp.int32)
        lines = [words[:, i] for i in range(words.shape[1])]

    def pack(values, fill):
        return row_packing.pack_values(values.astype(jnp.int32), packed, fill=fill)

    # A row may see nothing, as under a window with all ancestors before it.
    sees, big = live & (start < past), jnp.iinfo(jnp.int32).max
    low = jnp.min(pack(jnp.where(sees, start, big), big), axis=1)
    high = jnp.max(pack(jnp.where(sees, past, 0), 0), axis=1)
    # Padding is seen by nobody: it may see anything.
    inner_low = jnp.max(pack(start, 0), axis=1)
    inner_high = jnp.min(pack(limit, big), axis=1)
    lines = [pack(x, 0) for x in (start, limit, positions, *lines)]
    rows = [row_packing.expand_to_packed_rows(x, group=group) for x in lines]
    return DecodePlan(
        packing=packed,
        rows=jnp.stack(rows, axis=1),
        low=low,
        high=high,
        inner_low=inner_low,
        inner_high=inner_high,
        schedule=stream_k.split_tiles(low, high, kv_heads=kv_heads, tiling=tiling),
    )


def ancestor_words(ancestors: Bool[Array, "rows columns"]) -> UInt32[Array, "rows _"]:
    """Packs flags into words of 32 bits, column j into bit j % 32 of word j // 32.

    There are ceil(columns / 32) words a row.
    """
    rows, columns = ancestors.shape
    num_words = -(-columns // 32)
    flags = jnp.pad(ancestors, [(0, 0), (0, 32 * num_words - columns)])
    bit = jnp.left_shift(jnp.uint32(1), jnp.arange(32, dtype=jnp.uint32))
    flags = flags.reshape(rows, num_words, 32).astype(jnp.uint32)
    return jnp.sum(flags * bit[None, None, :], axis=2, dtype=jnp.uint32)
