"""Causal attention of chunks of prompts over pages, for Hopper GPUs.

Chunks are split into tiles of 128 rows (`prefill_plan`), which persistent programs
process one after another (`prefill_body`). The rows of a step that decode attends from
are either in the output already, or merged into it by this kernel (`merge_fused`).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import layered, row_packing
from pallas_kernels.devices import WGMMA_ROWS
from pallas_kernels.layered import Layer
from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import prefill_plan
from pallas_kernels.paged_attention.hopper import (
    merge_fused,
    prefill_body,
    softmax,
    warpgroups,
)
from pallas_kernels.paged_attention.hopper.softmax import LOG2E
from pallas_kernels.paged_attention.prefill_plan import TILE_ROWS, PrefillPlan
from pallas_kernels.paged_attention.stream_k import Tiling


def attend_prefill(
    q: Float[Array, "rows q_heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "slots pages_per_slot"],
    plan: PrefillPlan,
    *,
    scoring: ScoreTransform,
    window: int | None = None,
    decode_output: tuple[
        Float[Array, "rows q_heads head_dim"], Float32[Array, "rows q_heads"]
    ]
    | merge_fused.DecodePartials
    | None = None,
    tiling: Tiling,
    layer: Layer = 0,
    num_layers: int = 1,
    interpret: plgpu.InterpretGPUParams | bool = False,
) -> tuple[Float[Array, "rows q_heads head_dim"], Float32[Array, "rows q_heads"]]:
    """Attends from the planned rows to the pages of their slots.

    Arguments are those of `decode.attend_decode`, except `plan`, which is
    `prefill_plan.plan_prefill` with the same `tiling`, of 128 rows, and `window`; and
    `decode_output`: output, in the type of q, and log-sum-exp of the rows that are not
    in the plan; or decode's partial states of them, which are merged here; None means 0
    and -inf. Positions of a slot between the first and the last that its rows attend to
    must not hold NaN: under a window, positions of its rows are consecutive.

    Returns:
      Output in the type of q, and natural log-sum-exp.

    Raises:
      ValueError: the kernel does not support the types or sizes.
    """
    warpgroups.check_shapes(q, k_pages, tiling)
    num_rows, q_heads, _ = q.shape
    if tiling.block_rows != TILE_ROWS:
        raise ValueError(f"{tiling.block_rows=} must be {TILE_ROWS}")
    # One stage would deadlock: the first warpgroup waits for values of the next tile,
    # these for the second warpgroup to release this tile, and that for the first.
    if tiling.stages < 2:
        raise ValueError(f"{tiling.stages=} must be at least 2")
    group = q_heads // k_pages.shape[1]
    if isinstance(decode_output, merge_fused.DecodePartials):
        sizes = {"group": group, "head_dim": q.shape[2]}
        if not merge_fused.supports_fused_merge(decode_output.plan, scoring, **sizes):
            raise ValueError("states with these sizes and features need `merge`")
    elif decode_output is None:
        blank = jnp.full((num_rows, q_heads), -jnp.inf, jnp.float32)
        decode_output = jnp.zeros_like(q), blank
    padding = prefill_plan.num_padded(num_rows) - num_rows
    base_2 = [
        None if x is None else x.astype(jnp.float32) * LOG2E
        for x in (scoring.slopes, scoring.sinks)
    ]
    inputs = prefill_body.PrefillInputs(
        q=jnp.pad(q, [(0, padding), (0, 0), (0, 0)]) if padding else q,
        k=k_pages,
        v=v_pages,
        page_ids=page_ids.astype(jnp.int32),
        layer=layered.layer_operand(layer),
        position=plan.position,
        tiles=plan.tiles,
        slopes=base_2[0],
        sinks=base_2[1],
    )
    out, lse, *packed = _launch(
        inputs,
        decode_output.inputs
        if isinstance(decode_output, merge_fused.DecodePartials)
        else decode_output[0],
        scoring=softmax.StaticScoreTransform(
            scoring.scale, scoring.softcap, scoring.slopes is not None
        ),
        window=window,
        num_layers=num_layers,
        tiling=tiling,
        interpret=interpret,
    )
    if isinstance(decode_output, merge_fused.DecodePartials):
        packing = decode_output.plan.packing
        left = (
            row_packing.unpack_rows(*packed, packing, group=group, fill=-jnp.inf)
            / LOG2E
        )
    else:
        left = decode_output[1]
    # Tile of each row, and index of the row in the tile.
    num_tiles = plan.tiles.shape[1]
    tile = jnp.minimum(plan.tile_of, num_tiles - 1)
    place = jnp.arange(num_rows, dtype=jnp.int32) - plan.tiles[prefill_plan.ROW, tile]
    row_lse = lse[tile, :, jnp.clip(place, 0, TILE_ROWS - 1)] / LOG2E
    return out, jnp.where((plan.tile_of < num_tiles)[:, None], row_lse, left)


def _launch(
    prefill_inputs: prefill_body.PrefillInputs,
    decode_output: Float[Array, "rows q_heads head_dim"] | merge_fused.MergeInputs,
    *,
    scoring: softmax.StaticScoreTransform,
    window: int | None,
    num_layers: int,
    tiling: Tiling,
    interpret: plgpu.InterpretGPUParams | bool,
) -> list[Array]:
    """Runs the kernel: output of all rows, and log-sum-exps of tiles, in base 2.

    Rows of decode have its output, or its merged states; with merged states the
    log-sum-exps of packed rows are returned, too.
    """
    (_, q_heads, head_dim), page_size = (
        prefill_inputs.q.shape,
        prefill_inputs.k.shape[2],
    )
    tile = tiling.tile
    stages = tiling.stages
    q_stages = tiling.q_stages
    cut = decode_output if isinstance(decode_output, merge_fused.MergeInputs) else None
    operands, structure = jax.tree.flatten((prefill_inputs, cut))

    def prefill_attention(*references):
        inputs, merged = jax.tree.unflatten(structure, references[: len(operands)])
        out, lse, *merged_lse, shared = references[len(operands) :]
        outputs = prefill_body.PrefillOutputs(lse=lse, out=out)

        def multiply() -> None:
            if merged is not None:
                warpgroup = lax.axis_index("warpgroup")
                held = shared.out.at[warpgroup], shared.lse.at[warpgroup]
                merge_fused.run_fused_merge(
                    merged,
                    merge_fused.MergeOutputs(out, *merged_lse, *held),
                    inputs.position,
                    worker=warpgroup * tiling.num_programs + lax.axis_index("program"),
                    workers=2 * tiling.num_programs,
                )
            prefill_body.run_prefill_consumer(
                inputs,
                outputs,
                shared,
                scoring=scoring,
                window=window,
                tiling=tiling,
                emulated=bool(interpret),
            )

        warpgroups.specialize_warpgroups(
            2,
            (232, 40),
            multiply,
            lambda: prefill_body.run_prefill_producer(
                inputs, shared, num_layers=num_layers, tiling=tiling
            ),
        )

    tiled = warpgroups.tensor_core_layout()
    barriers = warpgroups.make_barriers
    dtype = prefill_inputs.q.dtype
    ring = (stages, tile, head_dim)
    boxes = max(1, tile // page_size)
    halves = (2, WGMMA_ROWS)

    shared = prefill_body.PrefillSharedMemory(
        q=plgpu.SMEM((q_stages, *halves, head_dim), dtype, transforms=tiled),
        position=plgpu.SMEM((q_stages, *halves), jnp.int32),
        k=plgpu.SMEM(ring, dtype, transforms=tiled),
        v=plgpu.SMEM(ring, dtype, transforms=tiled),
        out=plgpu.SMEM((*halves, prefill_body.out_columns(head_dim)), dtype),
        lse=plgpu.SMEM(halves, jnp.float32),
        q_full=barriers(2 * q_stages, 2),
        q_free=barriers(2 * q_stages, 1),
        k_full=barriers(stages, boxes),
        k_free=barriers(stages, 2),
        v_full=barriers(stages, boxes),
        v_free=barriers(stages, 2),
        turn=barriers(1, 2),
    )
    written = [] if cut is not None else [jax.new_ref(decode_output)]
    wide = jnp.float32
    lse = (prefill_inputs.tiles.shape[1], q_heads, TILE_ROWS)
    shapes = [jax.ShapeDtypeStruct(lse, wide)]
    if cut is not None:
        rows = cut.block.shape[0], q_heads, head_dim
        lse = jax.ShapeDtypeStruct(cut.states.lse.shape, wide)
        shapes = [jax.ShapeDtypeStruct(rows, dtype), *shapes, lse]
    kernel_outputs = plgpu.kernel(
        prefill_attention,
        out_type=shapes,
        scratch_types=[shared],
        grid=(tiling.num_programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )(*operands, *written)
    return [*(jax.freeze(x) for x in written), *kernel_outputs]
