"""Merge of decode states within the launch of the prefill kernel, for Hopper GPUs.

In a step with both kernels, the consumer warpgroups of prefill first do the work of
`merge`, while their first keys are in flight. Warpgroup w of W takes pieces w, w + W
and so on; a piece is the packed rows of one KV head and one group of output columns. No
shared memory is free, so states are loaded from global memory. Rows of neither kernel
become zeros.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import row_packing
from pallas_kernels.devices import WGMMA_ROWS, Ref
from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import stream_k
from pallas_kernels.paged_attention.decode_plan import DecodePlan
from pallas_kernels.paged_attention.hopper import merge, softmax
from pallas_kernels.paged_attention.merging import PartialStates
from pallas_kernels.paged_attention.stream_k import Tiling


class MergeInputs(NamedTuple):
    """References to global memory that are read, and the tiling of decode."""

    states: PartialStates
    ends: Ref
    row: Ref
    block: Ref
    tiling: Tiling


class DecodePartials(NamedTuple):
    """Output of the decode kernel before the merge, see `merging.merge_and_unpack`."""

    states: PartialStates
    plan: DecodePlan
    tiling: Tiling

    @property
    def inputs(self) -> MergeInputs:
        """Inputs of the merge kernel."""
        packing = self.plan.packing
        ends = self.plan.schedule.ends
        return MergeInputs(self.states, ends, packing.row, packing.block, self.tiling)


class MergeOutputs(NamedTuple):
    """References to memory that is written."""

    out: Ref  # [rows, q_heads, head_dim]
    lse: Ref  # [blocks, kv_heads, 64], in base 2
    held: Ref  # [64, columns], shared memory: buffer for copies to `out`
    held_lse: Ref  # [64], shared memory: buffer for copies to `lse`


def supports_fused_merge(
    plan: DecodePlan, scoring: ScoreTransform, *, group: int, head_dim: int
) -> bool:
    """Returns True if the prefill kernel supports the merge for a plan and features.

    Blocks must have 64 rows, padding included, which is the load of a warpgroup: true
    for groups of up to 10 query heads and of powers of two, and for some more. Sinks
    are added to merged states. With heads of 256 the output takes half of the
    registers, so that a merge next to capped scores or ALiBi would spill.
    """
    tokens = plan.packing.row.shape[1]
    size = row_packing.num_block_rows(tokens=tokens, group=group)
    is_plain = scoring.softcap is None and scoring.slopes is None
    fits = size == WGMMA_ROWS and (head_dim <= 128 or is_plain)
    return fits and scoring.sinks is None


def run_fused_merge(
    inputs: MergeInputs,
    outputs: MergeOutputs,
    position: Ref,
    *,
    worker: Array,
    workers: int,
) -> None:
    """Processes a warpgroup's pieces; the last copies are in flight at the return.

    Args:
      inputs: output of the decode kernel.
      outputs: references to the results.
      position: position of each row in this kernel's tiles, -1 for other rows.
      worker: index of this warpgroup.
      workers: number of warpgroups, static.
    """
    num_blocks, kv_heads, _, head_dim = inputs.states.out.shape
    (rows, q_heads, _), width = outputs.out.shape, outputs.held.shape[1]
    tokens = inputs.row.shape[1]
    group = q_heads // kv_heads
    sides = head_dim // width

    # Writes zeros to the warpgroup's share of the rows of neither kernel.
    zeros = jnp.zeros(outputs.held.shape, outputs.held.dtype)
    outputs.held[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    moved = math.gcd(q_heads, WGMMA_ROWS)

    @pl.loop(worker, rows, step=workers)
    def _(row: Array) -> None:
        @pl.when((inputs.block[row] >= num_blocks) & (position[row] < 0))
        def _() -> None:
            for head in range(0, q_heads, moved):
                for column in range(0, head_dim, width):
                    part = row, pl.ds(head, moved), pl.ds(column, width)
                    source = outputs.held.at[pl.ds(0, moved)]
                    plgpu.copy_smem_to_gmem(source, outputs.out.at[*part])

    @pl.loop(worker, num_blocks * kv_heads * sides, step=workers)
    def _(piece: Array) -> None:
        item = lax.div(piece, jnp.int32(sides))
        side = lax.rem(piece, jnp.int32(sides))
        block = lax.div(item, jnp.int32(kv_heads))
        head = lax.rem(item, jnp.int32(kv_heads))

        # Blocks without rows come last.
        @pl.when(inputs.row[block, 0] < rows)
        def _() -> None:
            columns = pl.ds(side * width, width)
            first, last = stream_k.item_programs(
                inputs.ends, block, head, kv_heads=kv_heads, tiling=inputs.tiling
            )

            def add(index: Array, state: softmax.RowState) -> softmax.RowState:
                part = first + index, jnp.where(index == 0, 1, 0)
                part_out, weight = lax.cond(
                    first == last,
                    lambda: _load(*inputs.states[:2], (block, head), columns),
                    lambda: _load(*inputs.states[2:], part, columns),
                )
                return merge.add_partial_state(state, part_out, weight)

            state = lax.fori_loop(0, last - first + 1, add, softmax.init_rows(width))
            is_first = side == 0
            out, lse = merge.finish_merge(state)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            outputs.held[...] = out.astype(outputs.held.dtype)
            outputs.held_lse[...] = lse
            plgpu.commit_smem()

            @pl.when(is_first)
            def _() -> None:
                plgpu.copy_smem_to_gmem(outputs.held_lse, outputs.lse.at[block, head])

            def row_at(token: Array) -> Array:
                return inputs.row[block, jnp.minimum(token, tokens - 1)]

            def send(token: Array) -> Array:
                heads = pl.ds(head * group, group)
                target = outputs.out.at[row_at(token), heads, columns]
                source = outputs.held.at[pl.ds(token * group, group)]
                plgpu.copy_smem_to_gmem(source, target)
                return token + 1

            # A block is filled from its first position on.
            lax.while_loop(
                lambda token: (token < tokens) & (row_at(token) < rows),
                send,
                jnp.int32(0),
            )


def _load(
    outs: Ref, lses: Ref, place: tuple[Array, Array], columns: pl.Slice
) -> tuple[Array, Array]:
    """Loads a state of 64 rows from global memory."""
    layout = plgpu.Layout.WGMMA
    source = outs.at[*place, :, columns]
    part_out = plgpu.load(source, layout=layout, optimized=False)
    source = lses.at[*place]
    layout = layout.reduce(1)
    return part_out, plgpu.load(source, layout=layout, optimized=False)
