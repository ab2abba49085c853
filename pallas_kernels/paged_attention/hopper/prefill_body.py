"""Warpgroups of the prefill kernel: one producer, two consumers that alternate.

Persistent programs process tiles of queries, the longest first. The producer warpgroup
copies pages by TMA. Each consumer has 64 rows of the tile. They alternate, so that one
exponentiates while the other uses the tensor cores: they meet at a barrier twice for
each tile of keys, half a step apart. Tiles of keys that need no mask come first, those
that need one after them.

Masked positions may hold any value, NaN included: their scores are replaced, their
values cleared, and pages outside [0, pages) read as zeros, which TMA does for
out-of-range copies.

Source: Shah et al. 2024, arXiv:2407.08608 (FlashAttention-3), sections 3.1 and 3.2.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.devices import WGMMA_ROWS, Ref
from pallas_kernels.paged_attention import prefill_plan
from pallas_kernels.paged_attention.hopper import kv_ring, softmax
from pallas_kernels.paged_attention.hopper.softmax import (
    MASKED,
    StaticScoreTransform,
)
from pallas_kernels.paged_attention.stream_k import Tiling


def out_columns(head_dim: int) -> int:
    """Returns the columns of the output in flight to global memory at a time.

    64 for wide heads, whose output takes half of a thread's registers.
    """
    return head_dim if head_dim <= 128 else 64


class PrefillInputs(NamedTuple):
    """References to global memory that are read, see `PrefillPlan`."""

    q: Ref  # [padded_rows, q_heads, head_dim]
    k: Ref
    v: Ref
    page_ids: Ref
    layer: Ref
    position: Ref
    tiles: Ref
    slopes: Ref | None = None  # [q_heads], in base 2
    sinks: Ref | None = None  # [q_heads], in base 2


class PrefillOutputs(NamedTuple):
    """References to global memory that are written."""

    lse: Ref  # [tiles, q_heads, 128], in base 2
    out: Ref  # [rows, q_heads, head_dim]; only rows of the tiles are written


class PrefillSharedMemory(NamedTuple):
    """Shared memory and barriers of a program."""

    q: Ref  # [q_stages, 2, 64, head_dim]
    position: Ref  # [q_stages, 2, 64]
    k: Ref  # [stages, tile, head_dim]
    v: Ref  # [stages, tile, head_dim]
    out: Ref  # [2, 64, columns]
    lse: Ref  # [2, 64]
    q_full: Ref  # [q_stages * 2], one for the half of each warpgroup
    q_free: Ref
    k_full: Ref
    k_free: Ref
    v_full: Ref
    v_free: Ref
    turn: Ref


class _Item(NamedTuple):
    """A tile of queries of one head."""

    tile: Array
    head: Array
    index: Array  # number of earlier items of this program
    ring: Array  # number of tiles of keys of earlier items
    first: Array
    inner: Array
    num_inner: Array
    num_kv: Array

    def kv_tile(self, i: Array) -> Array:
        """Returns the i-th tile of keys; tiles without a mask come first."""
        j = i - self.num_inner
        skipped = jnp.where(j >= self.inner - self.first, self.num_inner, 0)
        return jnp.where(j < 0, self.inner + i, self.first + j + skipped)


def _walk(inputs: PrefillInputs, programs: int, visit) -> tuple[Array, Array]:
    """Visits this program's items; returns the numbers of items and tiles of keys.

    The order of programs reverses every round: the program with the longest item of one
    round gets the shortest of the next. All warpgroups visit the same items, so that
    they agree on the stages of the rings.
    """
    program = lax.axis_index("program")
    q_heads = inputs.q.shape[1]
    num_tiles = inputs.tiles.shape[1]

    def number(turn):
        back = programs - 1 - program
        return turn * programs + jnp.where(lax.rem(turn, 2) == 1, back, program)

    def step(state):
        turn, ring = state
        tile = lax.div(number(turn), jnp.int32(q_heads))
        num_kv = inputs.tiles[prefill_plan.NUM_KV, tile]
        visit(
            _Item(
                tile=tile,
                head=lax.rem(number(turn), jnp.int32(q_heads)),
                index=turn,
                ring=ring,
                first=inputs.tiles[prefill_plan.FIRST_KV, tile],
                inner=inputs.tiles[prefill_plan.INNER, tile],
                num_inner=inputs.tiles[prefill_plan.NUM_INNER, tile],
                num_kv=num_kv,
            )
        )
        return turn + 1, ring + num_kv

    def is_there(state):
        # Tiles with keys come first.
        tile = lax.div(number(state[0]), jnp.int32(q_heads))
        num_kv = inputs.tiles[prefill_plan.NUM_KV, jnp.minimum(tile, num_tiles - 1)]
        return (tile < num_tiles) & (num_kv > 0)

    return lax.while_loop(is_there, step, (jnp.int32(0), jnp.int32(0)))


def run_prefill_consumer(
    inputs: PrefillInputs,
    outputs: PrefillOutputs,
    shared: PrefillSharedMemory,
    *,
    scoring: StaticScoreTransform,
    window: int | None,
    tiling: Tiling,
    emulated: bool,
) -> None:
    """Runs a consumer warpgroup, which computes attention of 64 rows."""
    warpgroup = lax.axis_index("warpgroup")
    head_dim = inputs.q.shape[2]
    tile = tiling.tile
    stages = tiling.stages
    shape = (WGMMA_ROWS, tile)

    def meet() -> None:
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.turn)

    def visit(item: _Item) -> None:
        q_stage = lax.rem(item.index, jnp.int32(tiling.q_stages))
        half = q_stage * 2 + warpgroup
        positions = shared.position.at[q_stage, warpgroup]

        def wait_for_keys(i):
            stage = lax.rem(item.ring + i, jnp.int32(stages))
            plgpu.barrier_wait(shared.k_full.at[stage])

        def clear_values(stage, begin):
            """Clears values for both warpgroups, while registers are free."""
            plgpu.barrier_wait(shared.v_full.at[stage])
            low = inputs.tiles[prefill_plan.LOW, item.tile]
            high = inputs.tiles[prefill_plan.HIGH, item.tile]

            @pl.when((warpgroup == 0) & ((begin < low) | (begin + tile > high)))
            def _():
                softmax.clear_unseen(shared.v.at[stage], begin, low, high)

        def one_tile(i, state, *, masked: bool):
            begin = item.kv_tile(i) * tile
            stage = lax.rem(item.ring + i, jnp.int32(stages))
            if masked:
                clear_values(stage, begin)

            def product(sums):
                queries = shared.q.at[q_stage, warpgroup]
                plgpu.wgmma(sums, queries, shared.k.at[stage].T)
                # The other warpgroup's product with values is next on the tensor cores.
                meet()
                return sums[...]

            scores = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
            plgpu.barrier_arrive(shared.k_free.at[stage])
            if not scoring.is_linear:
                scores = softmax.scale_and_cap(scores, scoring)
            if inputs.slopes is not None:
                away = softmax.key_positions(shape, begin) - softmax.load_row_values(
                    positions, shape
                )
                scores += inputs.slopes[item.head] * away.astype(jnp.float32)
            if masked:
                scores = jnp.where(_is_visible(shape, begin, positions), scores, MASKED)
            weights, state = softmax.update_rows(scores, state, scoring.factor)
            weights = weights.astype(shared.v.dtype)
            if not masked:
                plgpu.barrier_wait(shared.v_full.at[stage])
            meet()

            def meanwhile():
                pl.when(i + 1 < item.num_kv)(lambda: wait_for_keys(i + 1))

            values = shared.v.at[stage]
            out = softmax.add_product(state.out, weights, values, emulated, meanwhile)
            plgpu.barrier_arrive(shared.v_free.at[stage])
            return state._replace(out=out)

        plgpu.barrier_wait(shared.q_full.at[half])
        wait_for_keys(0)
        state = softmax.init_rows(head_dim)
        if inputs.sinks is not None:
            top = jnp.maximum(state.top, inputs.sinks[item.head])
            weight = jnp.exp2(inputs.sinks[item.head] - top)
            state = state._replace(top=top, total=weight)
        for masked, ends in (
            (False, (0, item.num_inner)),
            (True, (item.num_inner, item.num_kv)),
        ):
            step = functools.partial(one_tile, masked=masked)
            state = lax.fori_loop(*ends, step, state)
        plgpu.barrier_arrive(shared.q_free.at[half])
        _send(item, state, inputs, outputs, shared)

    def _is_visible(shape, begin, positions):
        place = softmax.key_positions(shape, begin)
        position = softmax.load_row_values(positions, shape)
        mask = place <= position
        return mask if window is None else mask & (place > position - window)

    # The second warpgroup is half a step late; at the end the first waits for it.
    pl.when(warpgroup == 1)(meet)
    _walk(inputs, tiling.num_programs, visit)
    pl.when(warpgroup == 0)(meet)
    plgpu.wait_smem_to_gmem(0)


def _send(
    item: _Item,
    state: softmax.RowState,
    inputs: PrefillInputs,
    outputs: PrefillOutputs,
    shared: PrefillSharedMemory,
) -> None:
    """Writes a warpgroup's rows to global memory, in groups of columns.

    The last copies are still in flight when this returns.
    """
    warpgroup = lax.axis_index("warpgroup")
    head_dim = inputs.q.shape[2]
    width = shared.out.shape[2]
    lse = state.top + jnp.log2(state.total)
    out = state.out * softmax.broadcast_rows(1.0 / state.total, state.out.shape)
    start = inputs.tiles[prefill_plan.ROW, item.tile] + warpgroup * WGMMA_ROWS
    begin = inputs.tiles[prefill_plan.BEGIN_ROW, item.tile]
    end = inputs.tiles[prefill_plan.END_ROW, item.tile]
    is_whole = inputs.tiles[prefill_plan.IS_FULL + warpgroup, item.tile] == 1

    for column in range(0, head_dim, width):
        columns = pl.ds(column, width)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        shared.out[warpgroup] = out[:, column : column + width].astype(shared.out.dtype)
        if column == 0:
            shared.lse[warpgroup] = lse
        plgpu.commit_smem()
        if column == 0:
            half = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)
            target = outputs.lse.at[item.tile, item.head, half]
            plgpu.copy_smem_to_gmem(shared.lse.at[warpgroup], target)

        @pl.when(is_whole)
        def _(columns=columns):
            rows = pl.ds(start, WGMMA_ROWS)
            target = outputs.out.at[rows, item.head, columns]
            plgpu.copy_smem_to_gmem(shared.out.at[warpgroup], target)

        @pl.when(jnp.logical_not(is_whole))
        def _(columns=columns):
            # The tile also has rows of other slots, or padding rows.
            @pl.loop(
                jnp.maximum(begin - start, 0), jnp.minimum(end - start, WGMMA_ROWS)
            )
            def _(i):
                # The positions in shared memory may belong to the next item already.
                @pl.when(inputs.position[start + i] >= 0)
                def _():
                    target = outputs.out.at[pl.ds(start + i, 1), item.head, columns]
                    source = shared.out.at[warpgroup, pl.ds(i, 1)]
                    plgpu.copy_smem_to_gmem(source, target)


def run_prefill_producer(
    inputs: PrefillInputs,
    shared: PrefillSharedMemory,
    *,
    num_layers: int,
    tiling: Tiling,
) -> None:
    """Runs the producer warpgroup, which copies queries, keys and values."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    q_stages = tiling.q_stages

    def ask_for_rows(item: _Item, half: int) -> None:
        stage = lax.rem(item.index, jnp.int32(q_stages))
        barrier = stage * 2 + half

        @pl.when(item.index >= q_stages)
        def _():
            plgpu.barrier_wait(shared.q_free.at[barrier])

        full = shared.q_full.at[barrier]
        start = pl.multiple_of(
            inputs.tiles[prefill_plan.ROW, item.tile] + half * WGMMA_ROWS, 8
        )
        rows = pl.ds(start, WGMMA_ROWS)
        queries = inputs.q.at[rows, item.head]
        target = shared.q.at[stage, half]
        plgpu.copy_gmem_to_smem(queries, target, full)
        positions = inputs.position.at[rows]
        target = shared.position.at[stage, half]
        plgpu.copy_gmem_to_smem(positions, target, full)

    def visit(item: _Item) -> None:
        ask_for_rows(item, 0)
        span = kv_ring.KeySpan(
            slot=inputs.tiles[prefill_plan.SLOT, item.tile],
            head=lax.div(item.head, jnp.int32(group)),
            low=inputs.tiles[prefill_plan.LOW, item.tile],
            high=inputs.tiles[prefill_plan.HIGH, item.tile],
        )

        @pl.loop(0, item.num_kv)
        def _(i):
            kv_ring.copy_tile(
                inputs,
                shared,
                span,
                begin=item.kv_tile(i) * tiling.tile,
                index=item.ring + i,
                num_layers=num_layers,
                tiling=tiling,
            )
            # The second warpgroup finishes its last item after the first has begun this
            # one, which needs its rows and the first keys.
            pl.when(i == 0)(lambda: ask_for_rows(item, 1))

    num_items, num_tiles = _walk(inputs, tiling.num_programs, visit)

    kv_ring.drain_stages(num_tiles, tiling.stages, shared.k_free, shared.v_free)
    kv_ring.drain_stages(2 * num_items, 2 * q_stages, shared.q_free)
