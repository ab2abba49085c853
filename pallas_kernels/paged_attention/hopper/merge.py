"""Merge of partial states and unpacking of rows, for Hopper GPUs.

An item that several programs share has several partial states; any other item has one
result. A program of this kernel has the packed rows of one KV head, or some of their
columns: it reads the states, weights them by their log-sum-exps, and writes the heads
of each row to the layout of the output. Rows in no block are divided among the
programs, which write zeros to them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.devices import WGMMA_ROWS, Ref
from pallas_kernels.paged_attention import stream_k
from pallas_kernels.paged_attention.hopper import softmax
from pallas_kernels.paged_attention.merging import PartialStates
from pallas_kernels.paged_attention.stream_k import Tiling
from pallas_kernels.row_packing import Packing

MAX_HEAD_COLUMNS = 128
"""Columns of a state in one program; its registers hold two states of so many."""
_STAGES = 2


def merge_and_unpack_mosaic_gpu(
    states: PartialStates,
    ends: Int32[Array, " blocks"],
    packing: Packing,
    *,
    group: int,
    tiling: Tiling,
    dtype: DTypeLike,
    interpret: plgpu.InterpretGPUParams | bool = False,
) -> tuple[
    Float[Array, "rows q_heads head_dim"],
    Float32[Array, "blocks kv_heads block_rows"],
]:
    """Merges partial states and unpacks the rows.

    Args:
      states: states of all items.
      ends: `ends` of the `stream_k.StreamKSchedule`, from which the programs of an item
        follow.
      packing: packing of the rows.
      group: query heads of a KV head, static.
      tiling: tiling of the schedule, static.
      dtype: type of the output.
      interpret: emulates the kernel on a CPU; False compiles it.

    Returns:
      The output of each row, 0 without a key, and log-sum-exps of packed rows in base
      2, -inf without a key.
    """
    num_blocks, kv_heads, block_rows, head_dim = states.out.shape
    (_, tokens), (rows,) = packing.row.shape, packing.block.shape
    moved = min(block_rows, WGMMA_ROWS)
    width = min(head_dim, MAX_HEAD_COLUMNS)
    stretches = range(-(-block_rows // WGMMA_ROWS))
    # With one row a block, every row is in a block.
    is_row_a_block = tokens == 1 and num_blocks == rows
    shape = (rows, kv_heads * group, head_dim)
    share = -(-rows // num_blocks)

    def merge_one(*references: Ref) -> None:
        out, lse, part_out, part_lse, ends, row, block_of, *others = references
        merged, merged_lse, state_out, state_lse, *others = others
        result, result_lse, blank, arrived = others
        block = lax.axis_index("block")
        head = lax.axis_index("head")
        columns = pl.ds(lax.axis_index("columns") * width, width)
        first, last = stream_k.item_programs(
            ends, block, head, kv_heads=kv_heads, tiling=tiling
        )
        num_states = last - first + 1

        def ask(index: Array, packed: pl.Slice) -> None:
            """Starts the copy of a state: the item's result, or a partial state."""
            stage = lax.rem(index, jnp.int32(_STAGES))

            def bring(outs: Ref, lses: Ref) -> None:
                held = pl.ds(0, moved)
                target = state_out.at[stage, held]
                source = outs.at[packed, columns]
                plgpu.copy_gmem_to_smem(source, target, arrived.at[stage])
                source = lses.at[packed]
                target = state_lse.at[stage, held]
                plgpu.copy_gmem_to_smem(source, target, arrived.at[stage])

            @pl.when(num_states == 1)
            def _() -> None:
                bring(out.at[block, head], lse.at[block, head])

            @pl.when(num_states > 1)
            def _() -> None:
                place = first + index, jnp.where(index == 0, 1, 0)
                bring(part_out.at[place], part_lse.at[place])

        def merge(
            index: Array, state: softmax.RowState, packed: pl.Slice
        ) -> softmax.RowState:
            @pl.when(index + 1 < num_states)
            def _() -> None:
                ask(index + 1, packed)

            stage = lax.rem(index, jnp.int32(_STAGES))
            plgpu.barrier_wait(arrived.at[stage])
            layout = plgpu.Layout.WGMMA
            part_out = plgpu.load(state_out.at[stage], layout=layout)
            weight = plgpu.load(state_lse.at[stage], layout=layout.reduce(1))
            plgpu.commit_smem()
            return add_partial_state(state, part_out, weight)

        if not is_row_a_block:
            zeros = jnp.zeros((WGMMA_ROWS, width), dtype)
            blank[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
            plgpu.commit_smem()

            @pl.loop(block * share, jnp.minimum(block * share + share, rows))
            def _(index: Array) -> None:
                @pl.when(block_of[index] >= num_blocks)
                def _() -> None:
                    target = merged.at[index, pl.ds(head * group, group), columns]
                    plgpu.copy_smem_to_gmem(blank.at[pl.ds(0, group)], target)

        for stretch in stretches:
            packed = pl.ds(stretch * WGMMA_ROWS, moved)

            @pl.when(num_states > 0)
            def _(packed: pl.Slice = packed) -> None:
                ask(jnp.int32(0), packed)

            state = lax.fori_loop(
                0,
                num_states,
                lambda index, state, packed=packed: merge(index, state, packed),
                softmax.init_rows(width),
            )
            merged_out, whole_lse = finish_merge(state)
            held = pl.ds(stretch * WGMMA_ROWS, WGMMA_ROWS)
            result[held] = merged_out.astype(dtype)
            result_lse[held] = whole_lse
        plgpu.commit_smem()

        @pl.when(lax.axis_index("columns") == 0)
        def _() -> None:
            source = result_lse.at[pl.ds(0, block_rows)]
            plgpu.copy_smem_to_gmem(source, merged_lse.at[block, head])

        for token in range(tokens):
            source = result.at[pl.ds(token * group, group)]
            target = block if is_row_a_block else row[block, token]
            heads = pl.ds(head * group, group)

            @pl.when(target < rows)
            def _(
                source: Ref = source, target: Array = target, heads: pl.Slice = heads
            ):
                plgpu.copy_smem_to_gmem(source, merged.at[target, heads, columns])

        plgpu.wait_smem_to_gmem(0)

    blank = (WGMMA_ROWS, width) if not is_row_a_block else (8, width)
    merged, lse = plgpu.kernel(
        merge_one,
        out_type=[
            jax.ShapeDtypeStruct(shape, dtype),
            jax.ShapeDtypeStruct(states.lse.shape, jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((_STAGES, WGMMA_ROWS, width), jnp.float32),
            plgpu.SMEM((_STAGES, WGMMA_ROWS), jnp.float32),
            plgpu.SMEM((len(stretches) * WGMMA_ROWS, width), dtype),
            plgpu.SMEM((len(stretches) * WGMMA_ROWS,), jnp.float32),
            plgpu.SMEM(blank, dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        ],
        grid=(num_blocks, kv_heads, head_dim // width),
        grid_names=("block", "head", "columns"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*states, ends, packing.row, packing.block)
    return merged, lse


def add_partial_state(
    state: softmax.RowState, out: Array, lse: Array
) -> softmax.RowState:
    """Adds a normalized partial state, with log-sum-exp in base 2, to a running sum."""
    top = jnp.maximum(state.top, lse)
    decay = jnp.exp2(state.top - top)
    weight = jnp.exp2(lse - top)
    added = out * softmax.broadcast_rows(weight, out.shape)
    return softmax.RowState(
        state.out * softmax.broadcast_rows(decay, out.shape) + added,
        top,
        state.total * decay + weight,
    )


def finish_merge(state: softmax.RowState) -> tuple[Array, Array]:
    """Returns output and log-sum-exp in base 2; 0 and -inf for rows without a key."""
    total = jnp.where(state.total > 0, state.total, 1.0)
    out = state.out / softmax.broadcast_rows(total, state.out.shape)
    return out, state.top + jnp.log2(state.total)
