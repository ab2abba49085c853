"""Warpgroups of the decode kernel: one producer, one or two consumers.

Persistent programs process their parts of the sequence of tiles (`stream_k`). The
producer warpgroup copies pages by TMA. Consumers compute scores on the tensor cores,
the online softmax in base 2, and weighted values on the tensor cores. In between are
rings of stages in shared memory, each stage with a full barrier and a free barrier.

Masked positions may hold any value, NaN included: their scores are replaced, their
values cleared, and pages outside [0, pages) read as zeros, which TMA does for
out-of-range copies.

Over latent rows the values are the first numbers of the keys, so a tile is copied once
and held until both products have read it. Two consumers then have the same 64 rows and
half of the output columns each. Both compute all scores: a buffer to share the weights
would take 8 of the 11 KiB that queries and two stages leave, and one consumer's softmax
could not overlap with the other's products.

Source: producer and consumer warpgroups, Shah et al. 2024, arXiv:2407.08608, section
3.1.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.devices import WGMMA_ROWS, Ref
from pallas_kernels.paged_attention import decode_plan, stream_k
from pallas_kernels.paged_attention.hopper import kv_ring, softmax
from pallas_kernels.paged_attention.hopper.softmax import (
    MASKED,
    StaticScoreTransform,
)
from pallas_kernels.paged_attention.stream_k import Tiling

OUT_COLUMNS = 128
"""Columns of the output in flight to global memory at a time."""


class DecodeInputs(NamedTuple):
    """References to global memory that are read, see `DecodePlan`."""

    q: Ref
    k: Ref
    v: Ref | None  # None over latent rows
    page_ids: Ref
    layer: Ref
    slot: Ref
    rows: Ref
    low: Ref
    high: Ref
    inner_low: Ref
    inner_high: Ref
    ends: Ref
    after: Ref
    begin: Ref
    slopes: Ref | None = None


class DecodeOutputs(NamedTuple):
    """References to global memory that are written."""

    out: Ref
    lse: Ref
    part_out: Ref
    part_lse: Ref


class DecodeSharedMemory(NamedTuple):
    """Shared memory and barriers of a program."""

    q: Ref  # [q_stages, products, 64, head_dim]
    rows: Ref  # [q_stages, products, lines, 64]
    slopes: Ref | None  # [q_stages, products, 64]
    k: Ref  # [stages, tile, head_dim]
    v: Ref | None  # [stages, tile, head_dim]; None over latent rows
    out: Ref  # [warpgroups, 64, columns]
    lse: Ref  # [warpgroups, 64]
    q_full: Ref
    q_free: Ref
    k_full: Ref
    k_free: Ref
    v_full: Ref | None
    v_free: Ref | None
    consumers: Ref  # barrier of all consumers


class _Share(NamedTuple):
    """Part of a block that one consumer computes."""

    warpgroup: Array
    product: Array | int  # index of its 64 rows
    column: Array | int  # its first column of the output
    width: int  # number of its columns


def _own_share(shared: DecodeSharedMemory, value_width: int) -> _Share:
    """Returns the share of this warpgroup: 64 rows, or half of the columns of 64."""
    warpgroup = lax.axis_index("warpgroup")
    if shared.v is not None:
        return _Share(warpgroup, warpgroup, 0, value_width)
    width = value_width // shared.out.shape[0]
    return _Share(warpgroup, 0, pl.multiple_of(warpgroup * width, width), width)


class _Piece(NamedTuple):
    """Tiles of one item that one program processes."""

    block: Array
    head: Array
    tile: Array  # first tile, counted from position 0
    take: Array  # number of tiles
    ring: Array  # number of earlier tiles of the program
    index: Array  # number of earlier pieces of the program
    is_whole: Array
    begins: Array  # True if the piece has the item's first tile


def _walk(
    inputs: DecodeInputs, kv_heads: int, tiling: Tiling, visit
) -> tuple[Array, Array]:
    """Visits the pieces of this program; returns the numbers of tiles and pieces.

    All warpgroups visit the same pieces, so that they agree on the stages of the rings.
    """
    program = lax.axis_index("program")
    total = inputs.ends[inputs.ends.shape[0] - 1]
    begin = stream_k.stretch_begin(total, program, tiling)
    end = stream_k.stretch_begin(total, program + 1, tiling)

    def tiles(block):
        return stream_k.tile_range(inputs.low[block], inputs.high[block], tiling.tile)

    def step(state):
        at, block, head, tile, index = state
        first, count = tiles(block)
        take = jnp.minimum(count - tile, end - at)
        visit(
            _Piece(
                block=block,
                head=head,
                tile=first + tile,
                take=take,
                ring=at - begin,
                index=index,
                is_whole=take == count,
                begins=tile == 0,
            )
        )
        is_last = head + 1 == kv_heads
        head = jnp.where(is_last, 0, head + 1)
        block = jnp.where(is_last, inputs.after[block], block)
        return at + take, block, head, jnp.int32(0), index + 1

    block = inputs.begin[program]
    count = jnp.maximum(tiles(block)[1], 1)
    inside = begin - inputs.ends[block] + count * kv_heads
    head = lax.div(inside, count)
    tile = lax.rem(inside, count)
    start = begin, block, head, tile, jnp.int32(0)
    state = lax.while_loop(lambda state: state[0] < end, step, start)
    return end - begin, state[-1]


def run_decode_consumer(
    inputs: DecodeInputs,
    outputs: DecodeOutputs,
    shared: DecodeSharedMemory,
    *,
    scoring: StaticScoreTransform,
    tiling: Tiling,
    emulated: bool,
) -> None:
    """Runs a consumer warpgroup, which computes attention of 64 packed rows."""
    share = _own_share(shared, outputs.out.shape[3])
    tile = tiling.tile
    kv_heads = inputs.q.shape[1]
    shape = (WGMMA_ROWS, tile)
    is_latent = shared.v is None
    v_free = shared.k_free if shared.v_free is None else shared.v_free

    def values_at(stage):
        if shared.v is not None:
            return shared.v.at[stage]
        return shared.k.at[stage, :, pl.ds(share.column, share.width)]

    def visit(piece: _Piece) -> None:
        low = inputs.low[piece.block]
        high = inputs.high[piece.block]
        inner_low = inputs.inner_low[piece.block]
        inner_high = inputs.inner_high[piece.block]
        q_stage = lax.rem(piece.index, jnp.int32(tiling.q_stages))
        plgpu.barrier_wait(shared.q_full.at[q_stage])
        rows = shared.rows.at[q_stage, share.product]
        slopes = None
        if shared.slopes is not None:
            slopes = shared.slopes.at[q_stage, share.product]

        def one_tile(i, state):
            begin = (piece.tile + i) * tile
            stage = lax.rem(piece.ring + i, jnp.int32(tiling.stages))
            values = values_at(stage)
            plgpu.barrier_wait(shared.k_full.at[stage])
            if is_latent:  # before any consumer reads them as keys
                _clear(values, begin, low, high, share, shared)

            product_index = share.product
            if is_latent:
                # Plus 0, which the compiler cannot know: it would keep the addresses
                # of all 36 operands of the queries in registers, and spill.
                product_index += lax.shift_right_logical(stage, jnp.int32(31))

            def product(sums):
                queries = shared.q.at[q_stage, product_index]
                plgpu.wgmma(sums, queries, shared.k.at[stage].T)
                return sums[...]

            scores = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
            if not is_latent:
                plgpu.barrier_arrive(shared.k_free.at[stage])
            if not scoring.is_linear:
                scores = _shape_scores(scores, begin, rows, slopes, scoring)
            inside = (begin >= inner_low) & (begin + tile <= inner_high)
            scores = lax.cond(
                inside,
                lambda scores: scores,
                lambda scores: jnp.where(
                    _is_visible(shape, begin, rows), scores, MASKED
                ),
                scores,
            )
            weights, state = softmax.update_rows(scores, state, scoring.factor)
            if shared.v_full is not None:
                plgpu.barrier_wait(shared.v_full.at[stage])
                _clear(values, begin, low, high, share, shared)
            weights = weights.astype(shared.k.dtype)
            out = softmax.add_product(state.out, weights, values, emulated)
            plgpu.barrier_arrive(v_free.at[stage])
            return state._replace(out=out)

        start = softmax.init_rows(share.width)
        out, top, total = lax.fori_loop(0, piece.take, one_tile, start)
        if is_latent:  # the output is sent from the memory of the queries
            plgpu.barrier_arrive(shared.consumers)
            plgpu.barrier_wait(shared.consumers)
        else:
            plgpu.barrier_arrive(shared.q_free.at[q_stage])

        lse = top + jnp.log2(total)
        out = out / softmax.broadcast_rows(jnp.where(total > 0, total, 1.0), out.shape)

        @pl.when(piece.is_whole)
        def _():
            where = (piece.block, piece.head)
            _send(out, lse, shared, outputs.out.at[where], outputs.lse.at[where])

        @pl.when(jnp.logical_not(piece.is_whole))
        def _():
            where = (lax.axis_index("program"), jnp.where(piece.begins, 1, 0))
            targets = outputs.part_out.at[where], outputs.part_lse.at[where]
            _send(out, lse, shared, *targets)

        if is_latent:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(shared.q_free.at[q_stage])

    _walk(inputs, kv_heads, tiling, visit)
    plgpu.wait_smem_to_gmem(0)


def _shape_scores(
    products, begin, rows: Ref, slopes: Ref, scoring: StaticScoreTransform
):
    """Turns products of queries and keys into scores in base 2: `[64, tile]`."""
    scores = softmax.scale_and_cap(products, scoring)
    shape = products.shape
    if slopes is not None:
        position = softmax.load_row_values(rows.at[decode_plan.POSITION], shape)
        distance = (softmax.key_positions(shape, begin) - position).astype(jnp.float32)
        scores += softmax.load_row_values(slopes, shape) * distance
    return scores


def _is_visible(shape, begin, rows: Ref):
    """Returns the mask of each row's positions: `[64, tile]`."""
    place = softmax.key_positions(shape, begin)
    column = place - softmax.load_row_values(rows.at[decode_plan.END_POSITION], shape)
    mask = column < 0
    for line in range(decode_plan.ANCESTOR_WORDS, rows.shape[0]):
        word = softmax.load_row_values(rows.at[line], shape)
        bit = lax.shift_right_logical(word, column & 31) & 1
        nth = line - decode_plan.ANCESTOR_WORDS
        mask |= (bit == 1) & (lax.shift_right_arithmetic(column, 5) == nth)
    return mask & (
        place >= softmax.load_row_values(rows.at[decode_plan.FIRST_POSITION], shape)
    )


def _clear(values, begin, low, high, share: _Share, shared: DecodeSharedMemory) -> None:
    """Clears values that no row attends to: a weight of 0 times NaN is NaN."""

    @pl.when((begin < low) | (begin + values.shape[0] > high))
    def _():
        @pl.when(share.product == 0)
        def _():
            softmax.clear_unseen(values, begin, low, high)

        if shared.out.shape[0] > 1:
            plgpu.barrier_arrive(shared.consumers)
            plgpu.barrier_wait(shared.consumers)


def _send(out, lse, shared: DecodeSharedMemory, out_target, lse_target) -> None:
    """Writes a warpgroup's share to global memory, in groups of columns.

    The last copies are still in flight when this returns.
    """
    (block_rows, value_width), width = out_target.shape, shared.out.shape[2]
    share = _own_share(shared, value_width)
    moved = min(block_rows, WGMMA_ROWS)
    packed = pl.ds(share.product * WGMMA_ROWS, moved)
    for begin in range(0, share.width, width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        shared.out[share.warpgroup] = out[:, begin : begin + width]
        if begin == 0:
            shared.lse[share.warpgroup] = lse
        plgpu.commit_smem()
        source = shared.out.at[share.warpgroup, pl.ds(0, moved)]
        target = out_target.at[packed, pl.ds(share.column + begin, width)]
        plgpu.copy_smem_to_gmem(source, target)
        if begin == 0:

            @pl.when(share.column == 0)
            def _():
                source = shared.lse.at[share.warpgroup, pl.ds(0, moved)]
                plgpu.copy_smem_to_gmem(source, lse_target.at[packed])


def run_decode_producer(
    inputs: DecodeInputs, shared: DecodeSharedMemory, *, num_layers: int, tiling: Tiling
) -> None:
    """Runs the producer warpgroup, which copies queries, keys and values."""
    _, kv_heads, block_rows, _ = inputs.q.shape
    q_stages = tiling.q_stages
    items_per_head = kv_heads // inputs.k.shape[1]
    moved = min(block_rows, WGMMA_ROWS)

    def ask_for_rows(piece: _Piece) -> None:
        stage = lax.rem(piece.index, jnp.int32(q_stages))

        @pl.when(piece.index >= q_stages)
        def _():
            plgpu.barrier_wait(shared.q_free.at[stage])

        for i in range(shared.q.shape[1]):
            full = shared.q_full.at[stage]
            queries = inputs.q.at[piece.block, piece.head, pl.ds(i * WGMMA_ROWS, moved)]
            target = shared.q.at[stage, i, pl.ds(0, moved)]
            plgpu.copy_gmem_to_smem(queries, target, full)
            packed = pl.ds(i * WGMMA_ROWS, WGMMA_ROWS)
            lines = inputs.rows.at[piece.block, :, packed]
            plgpu.copy_gmem_to_smem(lines, shared.rows.at[stage, i], full)
            if inputs.slopes is not None and shared.slopes is not None:
                slopes = inputs.slopes.at[piece.head, packed]
                plgpu.copy_gmem_to_smem(slopes, shared.slopes.at[stage, i], full)

    def visit(piece: _Piece) -> None:
        if inputs.v is not None:
            ask_for_rows(piece)
        head = piece.head
        if items_per_head > 1:
            head = lax.div(head, jnp.int32(items_per_head))
        span = kv_ring.KeySpan(
            slot=inputs.slot[piece.block],
            head=head,
            low=inputs.low[piece.block],
            high=inputs.high[piece.block],
        )

        @pl.loop(0, piece.take)
        def _(i):
            kv_ring.copy_tile(
                inputs,
                shared,
                span,
                begin=(piece.tile + i) * tiling.tile,
                index=piece.ring + i,
                num_layers=num_layers,
                tiling=tiling,
            )
            if inputs.v is None:
                # Queries wait until the last output is sent; the first keys do not.
                last = jnp.minimum(piece.take, tiling.stages) - 1
                pl.when(i == last)(lambda: ask_for_rows(piece))

    num_tiles, num_pieces = _walk(inputs, kv_heads, tiling, visit)

    free = (shared.k_free, shared.v_free)[: 1 if shared.v is None else 2]
    kv_ring.drain_stages(num_tiles, tiling.stages, *free)
    kv_ring.drain_stages(num_pieces, q_stages, shared.q_free)
