"""Attention of chunks of queries over pages, causal, for Hopper GPUs.

The chunks are cut into tiles of 128 rows (`prefill_plan`), and persistent programs
attend from one after the other (`prefill_body`), in place of the rows
of an output that others may have written the rest of.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import layered
from pallas_kernels.devices import WGMMA_ROWS
from pallas_kernels.layered import Layer
from pallas_kernels.paged_attention import prefill_plan
from pallas_kernels.paged_attention.hopper import prefill_body, warpgroups
from pallas_kernels.paged_attention.hopper.softmax import LOG2E, Scoring
from pallas_kernels.paged_attention.prefill_plan import TILE_ROWS, Plan
from pallas_kernels.paged_attention.stream_k import Tiling


def attend(
    q: Float[Array, "rows q_heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "slots pages_per_slot"],
    plan: Plan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi: Float[Array, " q_heads"] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    others: tuple[Float[Array, "rows q_heads head_dim"], Float32[Array, "rows q_heads"]]
    | None = None,
    tiling: Tiling,
    layer: Layer = 0,
    num_layers: int = 1,
    interpret: plgpu.InterpretGPUParams | bool = False,
) -> tuple[Float[Array, "rows q_heads head_dim"], Float32[Array, "rows q_heads"]]:
    """Attends from the planned rows to the pages of their slots.

    Arguments are those of `decode.attend`, but for `plan`, which is
    `prefill_plan.make_plan` with the same `tiling`, of 128 rows, and `window`; and
    `others`: output, in the type of q, and log-sum-exp of the rows that are left out,
    None for 0 and -inf. Of a slot's places, those between the first and the last that
    its rows see must hold numbers: under a window, positions of its rows follow on one
    another.

    Returns:
      Output in the type of q, and natural log-sum-exp.

    Raises:
      ValueError: types or sizes that the kernel does not take.
    """
    warpgroups.check(q, k_pages, tiling)
    num_rows, q_heads, _ = q.shape
    if tiling.block_rows != TILE_ROWS:
        raise ValueError(f"{tiling.block_rows=} must be {TILE_ROWS}")
    # With one stage the first warpgroup waits for values of the next tile, which wait
    # for the second to be done with this one, which waits for the first.
    if tiling.stages < 2:
        raise ValueError(f"{tiling.stages=} must be at least 2")
    if others is None:
        blank = jnp.full((num_rows, q_heads), -jnp.inf, jnp.float32)
        others = jnp.zeros_like(q), blank
    padding = prefill_plan.num_padded(num_rows) - num_rows
    base_2 = [
        None if x is None else x.astype(jnp.float32) * LOG2E for x in (alibi, sinks)
    ]
    given = prefill_body.Inputs(
        q=jnp.pad(q, [(0, padding), (0, 0), (0, 0)]) if padding else q,
        k=k_pages,
        v=v_pages,
        page_ids=page_ids.astype(jnp.int32),
        layer=layered.operand(layer),
        position=plan.position,
        tiles=plan.tiles,
        slopes=base_2[0],
        sinks=base_2[1],
    )
    out, lse = _launch(
        *(given, others[0]),
        scoring=Scoring(scale, softcap, alibi is not None),
        window=window,
        num_layers=num_layers,
        tiling=tiling,
        interpret=interpret,
    )
    # Of a row: its tile, and its place there.
    num_tiles = plan.tiles.shape[1]
    tile = jnp.minimum(plan.tile_of, num_tiles - 1)
    place = jnp.arange(num_rows, dtype=jnp.int32) - plan.tiles[prefill_plan.ROW, tile]
    mine = lse[tile, :, jnp.clip(place, 0, TILE_ROWS - 1)] / LOG2E
    return out, jnp.where((plan.tile_of < num_tiles)[:, None], mine, others[1])


def _launch(
    given: prefill_body.Inputs,
    out: Float[Array, "rows q_heads head_dim"],
    *,
    scoring: Scoring,
    window: int | None,
    num_layers: int,
    tiling: Tiling,
    interpret: plgpu.InterpretGPUParams | bool,
) -> tuple[
    Float[Array, "rows q_heads head_dim"], Float32[Array, "tiles q_heads tile_rows"]
]:
    """Runs the kernel: the output with the tiles' rows replaced, and their lse."""
    (_, q_heads, head_dim), page_size = given.q.shape, given.k.shape[2]
    tile, stages, q_stages = tiling.tile, tiling.stages, tiling.q_stages
    names = [name for name, x in given._asdict().items() if x is not None]

    def prefill_attention(*references):
        *reads, written, lse, shared = references
        inputs = prefill_body.Inputs(**dict(zip(names, reads, strict=True)))
        outputs = prefill_body.Outputs(lse=lse, out=written)
        warpgroups.divide(
            *(2, (232, 40)),
            lambda: prefill_body.consume(
                *(inputs, outputs, shared),
                scoring=scoring,
                window=window,
                tiling=tiling,
                emulated=bool(interpret),
            ),
            lambda: prefill_body.produce(
                inputs, shared, num_layers=num_layers, tiling=tiling
            ),
        )

    tiled, barriers = warpgroups.tiled(), warpgroups.barriers
    dtype, ring = given.q.dtype, (stages, tile, head_dim)
    boxes, halves = max(1, tile // page_size), (2, WGMMA_ROWS)

    shared = prefill_body.Shared(
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
    written = jax.new_ref(out)
    operands = [x for x in given if x is not None]
    tiles = given.tiles.shape[1]
    lse = plgpu.kernel(
        prefill_attention,
        out_type=jax.ShapeDtypeStruct((tiles, q_heads, TILE_ROWS), jnp.float32),
        scratch_types=[shared],
        grid=(tiling.num_programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )(*operands, written)
    return jax.freeze(written), lse
