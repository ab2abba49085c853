"""Decode attention over pages for Hopper GPUs: decoding, token trees, prefixes.

Queries that read the same keys are packed (`row_packing`), the work is split into equal
parts (`stream_k`), each program computes its part (`decode_body`), and partial states
of items that several programs share are merged (`merge`).
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import layered, row_packing
from pallas_kernels.devices import WGMMA_ROWS
from pallas_kernels.layered import Layer
from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import decode_plan, merging
from pallas_kernels.paged_attention.decode_plan import DecodePlan
from pallas_kernels.paged_attention.hopper import (
    decode_body,
    merge,
    softmax,
    warpgroups,
)
from pallas_kernels.paged_attention.hopper.softmax import LOG2E
from pallas_kernels.paged_attention.stream_k import Tiling


def attend_decode(
    q: Float[Array, "rows q_heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"] | None,
    page_ids: Int[Array, "slots pages_per_slot"],
    plan: DecodePlan,
    *,
    scoring: ScoreTransform,
    value_width: int | None = None,
    packed_q: Float[Array, "blocks items block_rows head_dim"] | None = None,
    tiling: Tiling,
    layer: Layer = 0,
    num_layers: int = 1,
    dtype: DTypeLike = jnp.float32,
    interpret: plgpu.InterpretGPUParams | bool = False,
) -> tuple[Float[Array, "rows q_heads value_width"], Float32[Array, "rows q_heads"]]:
    """Attends from the planned rows to the pages of their slots.

    Arguments are those of `api.paged_attention`, all in bfloat16 or float16. `plan` is
    `decode_plan.plan_decode` of these rows with the same `tiling` and the heads of
    `decode_plan.item_heads`, and `scoring` has slopes and sinks by query head. `dtype`
    is the type of the output: float32 if states of the same rows are to be merged.
    `packed_q` are the queries in the layout of `row_packing.pack_queries` with any
    padding; None packs them here. `interpret` emulates the kernel on a CPU; False
    compiles it.

    Returns:
      Output, and natural log-sum-exp in float32; 0 and -inf for rows without a key.

    Raises:
      ValueError: the kernel does not support the types or sizes.
    """
    _, group = decode_plan.item_heads(q.shape[1], k_pages.shape[1])
    states = partial_states(
        q,
        k_pages,
        v_pages,
        page_ids,
        plan,
        scoring=scoring,
        value_width=value_width,
        packed_q=packed_q,
        tiling=tiling,
        layer=layer,
        num_layers=num_layers,
        interpret=interpret,
    )
    sinks = scoring.sinks
    out, lse = merge.merge_and_unpack_mosaic_gpu(
        states,
        plan.schedule.ends,
        plan.packing,
        group=group,
        tiling=tiling,
        dtype=dtype if sinks is None else jnp.float32,
        interpret=interpret,
    )
    # On packed rows: XLA removes it if the log-sum-exp is unused.
    lse = row_packing.unpack_rows(lse, plan.packing, group=group, fill=-jnp.inf) / LOG2E
    if sinks is not None:
        out, lse = merging.add_sinks(out, lse, sinks)
    return out.astype(dtype), lse


def partial_states(
    q: Float[Array, "rows q_heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"] | None,
    page_ids: Int[Array, "slots pages_per_slot"],
    plan: DecodePlan,
    *,
    scoring: ScoreTransform,
    value_width: int | None = None,
    packed_q: Float[Array, "blocks items block_rows head_dim"] | None = None,
    tiling: Tiling,
    layer: Layer = 0,
    num_layers: int = 1,
    interpret: plgpu.InterpretGPUParams | bool = False,
) -> merging.PartialStates:
    """Runs the decode kernel of `attend_decode` without the merge."""
    has_v_pages = v_pages is not None
    warpgroups.check_shapes(q, k_pages, tiling, value_width, has_v_pages=has_v_pages)
    items, group = decode_plan.item_heads(q.shape[1], k_pages.shape[1])
    slopes = None
    schedule = plan.schedule
    if scoring.slopes is not None:
        # Row t * group + g of item i is query head i * group + g.
        slopes = (scoring.slopes.astype(jnp.float32) * LOG2E).reshape(items, group)
        slopes = jnp.tile(slopes, (1, plan.packing.row.shape[1]))
        padding = plan.rows.shape[2] - slopes.shape[1]
        slopes = jnp.pad(slopes, [(0, 0), (0, padding)])
    if packed_q is None:
        packed_q = row_packing.pack_queries(q, plan.packing, kv_heads=items)
    inputs = decode_body.DecodeInputs(
        q=packed_q,
        k=k_pages,
        v=v_pages,
        page_ids=page_ids.astype(jnp.int32),
        layer=layered.layer_operand(layer),
        slot=plan.packing.slot,
        rows=plan.rows,
        low=plan.low,
        high=plan.high,
        inner_low=plan.inner_low,
        inner_high=plan.inner_high,
        ends=schedule.ends,
        after=schedule.after,
        begin=schedule.begin,
        slopes=slopes,
    )
    static = softmax.StaticScoreTransform(
        scoring.scale, scoring.softcap, slopes is not None
    )
    return merging.PartialStates(
        *_launch(inputs, static, num_layers, tiling, interpret)
    )


def _launch(
    decode_inputs: decode_body.DecodeInputs,
    scoring: softmax.StaticScoreTransform,
    num_layers: int,
    tiling: Tiling,
    interpret: plgpu.InterpretGPUParams | bool,
) -> list[Array]:
    """Runs the kernel: results of unsplit items, and partial states, in base 2."""
    num_blocks, num_items, block_rows, head_dim = decode_inputs.q.shape
    tile, stages, (programs,) = tiling.tile, tiling.stages, decode_inputs.begin.shape
    _, num_lines, padded_rows = decode_inputs.rows.shape
    products = padded_rows // WGMMA_ROWS
    is_latent = decode_inputs.v is None
    num_warpgroups = products
    value_width = head_dim
    if is_latent:
        num_warpgroups = 2
        value_width = decode_plan.LATENT_VALUE_WIDTH
    operands = [x for x in decode_inputs if x is not None]

    def decode_attention(*references):
        refs = iter(references)
        inputs = (None if x is None else next(refs) for x in decode_inputs)
        inputs = decode_body.DecodeInputs(*inputs)
        *outputs, shared = refs
        outputs = decode_body.DecodeOutputs(*outputs)
        if is_latent:
            queries, out = shared.q
            shared = shared._replace(q=queries, out=out)
        warpgroups.specialize_warpgroups(
            num_warpgroups,
            (248, 40) if num_warpgroups == 1 else (240, 24),
            lambda: decode_body.run_decode_consumer(
                inputs,
                outputs,
                shared,
                scoring=scoring,
                tiling=tiling,
                emulated=bool(interpret),
            ),
            lambda: decode_body.run_decode_producer(
                inputs, shared, num_layers=num_layers, tiling=tiling
            ),
        )

    tiled = warpgroups.tensor_core_layout()
    boxes = max(1, tile // decode_inputs.k.shape[2])
    lanes = (num_warpgroups, WGMMA_ROWS)
    wide = jnp.float32
    q_ring = (tiling.q_stages, products, WGMMA_ROWS)
    ring = (stages, tile, head_dim)
    copies = products * (2 if decode_inputs.slopes is None else 3)
    barriers = warpgroups.make_barriers
    queries = plgpu.SMEM((*q_ring, head_dim), decode_inputs.q.dtype, transforms=tiled)
    out = plgpu.SMEM((*lanes, min(head_dim, decode_body.OUT_COLUMNS)), wide)
    shared = decode_body.DecodeSharedMemory(
        q=plgpu.RefUnion(queries, out) if is_latent else queries,
        rows=plgpu.SMEM((*q_ring[:2], num_lines, WGMMA_ROWS), jnp.int32),
        slopes=None if decode_inputs.slopes is None else plgpu.SMEM(q_ring, wide),
        k=plgpu.SMEM(ring, decode_inputs.k.dtype, transforms=tiled),
        v=None
        if is_latent
        else plgpu.SMEM(ring, decode_inputs.k.dtype, transforms=tiled),
        out=None if is_latent else out,
        lse=plgpu.SMEM(lanes, wide),
        q_full=barriers(tiling.q_stages, copies),
        q_free=barriers(tiling.q_stages, num_warpgroups),
        k_full=barriers(stages, boxes),
        k_free=barriers(stages, num_warpgroups),
        v_full=None if is_latent else barriers(stages, boxes),
        v_free=None if is_latent else barriers(stages, num_warpgroups),
        consumers=barriers(1, num_warpgroups),
    )
    items = (num_blocks, num_items, block_rows)
    parts = (programs, 2, block_rows)
    return plgpu.kernel(
        decode_attention,
        out_type=[
            jax.ShapeDtypeStruct((*items, value_width), wide),
            jax.ShapeDtypeStruct(items, wide),
            jax.ShapeDtypeStruct((*parts, value_width), wide),
            jax.ShapeDtypeStruct(parts, wide),
        ],
        scratch_types=[shared],
        grid=(programs,),
        grid_names=("program",),
        num_threads=num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands)
