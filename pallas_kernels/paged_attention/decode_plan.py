"""The plan of a decoding step: which program attends from which rows to which keys.

The plan packs the rows (`row_packing`), has the range of positions of each row, and
splits the work into equal parts (`stream_k`). It does not depend on the layer, so it is
made once a step. All shapes are static, so new lengths do not recompile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Int32, UInt32

from pallas_kernels import row_packing
from pallas_kernels.devices import WGMMA_ROWS
from pallas_kernels.paged_attention import stream_k
from pallas_kernels.paged_attention.stream_k import StreamKSchedule, Tiling
from pallas_kernels.row_packing import Packing

FIRST_POSITION = 0
END_POSITION = 1
POSITION = 2
ANCESTOR_WORDS = 3
"""Lines of `DecodePlan.rows`; words of ancestors begin at `ANCESTOR_WORDS`."""

LATENT_WIDTH = 576
LATENT_VALUE_WIDTH = 512
"""Numbers of a latent row of DeepSeek-V2 and V3, and those of them that are values."""


def item_heads(q_heads: int, kv_heads: int) -> tuple[int, int]:
    """Returns the items of a block of rows, and the query heads of an item.

    An item is a KV head with at most 64 query heads, or one of the equal parts of a
    larger group: 128 query heads of one KV head are two items that read the same keys.
    """
    group = q_heads // kv_heads
    parts = -(-group // WGMMA_ROWS)
    return kv_heads * parts, group // parts


def decode_unsupported_reason(
    q: Array | jax.ShapeDtypeStruct,
    k_pages: Array | jax.ShapeDtypeStruct,
    value_width: int | None = None,
    *,
    has_v_pages: bool = False,
) -> str | None:
    """Returns why the Mosaic GPU kernels do not support a call, or None if they do.

    Args:
      q: queries, `[rows, q_heads, head_dim]`, or only their shape and type.
      k_pages: keys, `[pages, kv_heads, page_size, head_dim]`, or shape and type.
      value_width: width of the values; None means that of the keys.
      has_v_pages: True if the values are not the first numbers of the keys.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_pages.dtype != q.dtype:
        return (
            f"q and pages must both be bfloat16 or both float16, not {q.dtype} and"
            f" {k_pages.dtype}"
        )
    group, (_, _, page_size, head_dim) = q.shape[1] // k_pages.shape[1], k_pages.shape
    is_latent = (head_dim, value_width) == (LATENT_WIDTH, LATENT_VALUE_WIDTH)
    is_latent &= not has_v_pages
    if is_latent and k_pages.shape[1] != 1:
        return f"kv_heads={k_pages.shape[1]} over latent rows must be 1"
    if not 1 <= group <= WGMMA_ROWS and (not is_latent or group % WGMMA_ROWS):
        limit = ", or a multiple of 64" if is_latent else ""
        return f"{group=} query heads for each KV head must be in [1, 64]{limit}"
    if head_dim not in (64, 128, 256) and not is_latent:
        return (
            f"{head_dim=} must be 64, 128 or 256, or {LATENT_WIDTH} with value_width="
            f"{LATENT_VALUE_WIDTH} and no v_pages"
        )
    if value_width not in (None, head_dim) and not is_latent:
        return f"{value_width=} must be {head_dim=}"
    if page_size not in (16, 32, 64, 128, 256):
        return f"{page_size=} must be a power of two in [16, 256]"
    return None


class DecodePlan(NamedTuple):
    """Inputs of the decode kernel that do not depend on the layer."""

    packing: Packing
    rows: Int32[Array, "blocks lines wgmma_rows"]
    """Four lines for each packed row, padded to whole matrix products: first position
    attended to; position from which on only ancestors are; the row's position; and
    words whose bit j is the mask of the j-th position from there, lowest bit first."""
    low: Int32[Array, " blocks"]
    """First position that any row of the block attends to; past `high` if none."""
    high: Int32[Array, " blocks"]
    """One past the last position that any row attends to; 0 if none."""
    inner_low: Int32[Array, " blocks"]
    """First position of the range, up to `inner_high`, that all rows attend to."""
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
    """Packs the rows and splits the work among programs.

    A row attends to the positions up to its own. If its slot has a `context` of at
    least 0, it attends instead to those below the context, and to position `context +
    j` if `ancestors[row, j]`. Only rows of such slots may have ancestors.

    Args:
      positions: position of each row; -1 for a padding row.
      slots: slot of each row; rows of a slot are contiguous. None if row i is slot i.
      num_slots: number of slots, static.
      kv_heads: number of KV heads, static.
      group: query heads of a KV head, at most `tiling.block_rows`, static.
      tiling: sizes; the same for plan and kernel.
      context: positions below the tree, see above.
      ancestors: mask of tree positions, see above.
      window: a row attends to positions above its own - window; None means all.
      max_rows_per_slot: bound on the live rows of a slot, which reduces the number of
        blocks. None means no bound.
      nth: index of each row among those of its slot, see `row_packing.pack_rows`.

    Returns:
      The plan.

    Raises:
      ValueError: the group is larger than a block.
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
    limit = positions + 1
    lines = []
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

    # A row may have no key, as under a window with all ancestors before it.
    sees = live & (start < past)
    big = jnp.iinfo(jnp.int32).max
    low = jnp.min(pack(jnp.where(sees, start, big), big), axis=1)
    high = jnp.max(pack(jnp.where(sees, past, 0), 0), axis=1)
    # Padding rows are ignored, so they may attend to any position.
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
