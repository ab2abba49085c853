"""The grouped matrix product for Hopper GPUs: persistent programs, TMA, wgmma.

Rows are split into blocks of one group each (`blocks`). A block of rows and a range of
columns is an item, and program p of P takes items p, p + P, p + 2 P and so on. One
producer warpgroup copies tiles of rows and weights by TMA, and one or two consumer
warpgroups multiply 64 rows each, with a ring of stages in between. A block may begin
within the rows of the previous group; their products are computed and not written.

Products of few rows are not transposed (weights as the left operand, 8 to 64 rows as
the right one): 64 padded rows by 256 columns take 512 clocks of a multiprocessor's
tensor cores for a step of 64, whose 32 KB of weights take 1,760 clocks to load at 4.3
TB/s.

Source: persistent programs with a copying and multiplying warpgroups, CUTLASS 3's
"warp-specialised persistent cooperative" kernels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.devices import LINE_BYTES, ROW_ALIGNMENT, WGMMA_ROWS, Ref
from pallas_kernels.grouped_matmul.blocks import DEPTH, GroupedTiling, split_row_blocks


class _Inputs(NamedTuple):
    """References to global memory that the kernel reads, see `blocks.RowBlocks`."""

    x: Ref
    w: Ref
    group: Ref
    first: Ref
    begin: Ref
    end: Ref
    num: Ref  # [1]


class _Shared(NamedTuple):
    """Shared memory and barriers of a program."""

    x: Ref  # [stages, warpgroups, 64, depth]
    w: Ref  # [stages, depth, columns], or [stages, columns, depth] if transposed
    swizzled_tile: Ref  # [warpgroups, 64, line], swizzled
    part: Ref  # [warpgroups, 64, line], row-major
    full: Ref
    free: Ref


class _Item(NamedTuple):
    """A block of rows and a range of columns."""

    block: Array
    column: Array
    group: Array
    first: Array
    steps: Array  # 0 for rows of no group
    ring: Array  # number of earlier steps of this program


def multiply_mosaic_gpu(
    x: Float[Array, "rows width"],
    w: Float[Array, "groups before after"],
    group_sizes: Int[Array, " groups"],
    *,
    transposed: bool = False,
    dtype: DTypeLike,
    tiling: GroupedTiling,
    num_programs: int,
    interpret: plgpu.InterpretGPUParams | bool = False,
) -> Float[Array, "rows columns"]:
    """Multiplies each row by the weights of its group.

    Rows and weights are in bfloat16 or float16, the result has 16 or 32 bits. There is
    one program for each multiprocessor. `interpret` emulates the kernel on a CPU; False
    compiles it.

    Raises:
      ValueError: the tiling does not divide the weights.
    """
    depth, (num_rows, width) = DEPTH, x.shape
    num_columns = w.shape[1 if transposed else 2]
    if width % depth or num_columns % tiling.columns:
        raise ValueError(
            f"{width=} must be a multiple of {depth} and {num_columns=} of "
            f"{tiling.columns=}"
        )
    if num_rows == 0:
        return jnp.zeros((0, num_columns), dtype)
    padded = -(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT
    x = jnp.pad(x, [(0, padded - num_rows), (0, 0)])
    blocks = split_row_blocks(
        group_sizes,
        num_rows=num_rows,
        block_rows=tiling.block_rows,
        align=ROW_ALIGNMENT,
    )
    num_warpgroups = tiling.block_rows // WGMMA_ROWS
    line = LINE_BYTES // jnp.dtype(dtype).itemsize

    def grouped_product(*references):
        inputs = _Inputs(*references[: len(_Inputs._fields)])
        out, shared = references[len(_Inputs._fields) :]
        warpgroup = lax.axis_index("warpgroup")
        high, few = (248, 40) if num_warpgroups == 1 else (240, 24)
        options: Any = {
            "columns": tiling.columns,
            "panel": tiling.panel,
            "transposed": transposed,
        }

        @pl.when(warpgroup < num_warpgroups)
        def _():
            plgpu.set_max_registers(high, action="increase")
            _consume(inputs, out, shared, **options)

        @pl.when(warpgroup == num_warpgroups)
        def _():
            plgpu.set_max_registers(few, action="decrease")
            _produce(inputs, shared, num_columns // tiling.columns, **options)

    def tiled(
        dtype: DTypeLike,
    ) -> Sequence[plgpu.TilingTransform | plgpu.SwizzleTransform]:
        """Returns the transforms of the swizzled layout that the tensor cores read."""
        line = LINE_BYTES // jnp.dtype(dtype).itemsize
        return [plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(LINE_BYTES)]  # ty: ignore[abstract-class-instantiation]

    stages = tiling.stages
    lanes = (num_warpgroups, WGMMA_ROWS)
    tile = (tiling.columns, depth) if transposed else (depth, tiling.columns)
    shared = _Shared(
        x=plgpu.SMEM((stages, *lanes, depth), x.dtype, transforms=tiled(x.dtype)),
        w=plgpu.SMEM((stages, *tile), w.dtype, transforms=tiled(x.dtype)),
        swizzled_tile=plgpu.SMEM((*lanes, line), dtype, transforms=tiled(dtype)),
        part=plgpu.SMEM((*lanes, line), dtype),
        full=plgpu.Barrier(num_arrivals=num_warpgroups + 1, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=stages),
    )
    out = plgpu.kernel(
        grouped_product,
        out_type=jax.ShapeDtypeStruct((padded, num_columns), dtype),
        scratch_types=[shared],
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=num_warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
    )(x, w, *blocks[:4], blocks.num[None])
    return out[:num_rows]


def _walk(inputs: _Inputs, num_stretches: int, panel: int, visit) -> Array:
    """Visits the items of this program; returns their number of steps.

    All warpgroups visit the same items, so that they agree on the stages of the ring.
    Items are ordered by panels of a few column ranges, so that concurrent programs
    share both rows and weights in the cache.
    """
    program = lax.axis_index("program")
    programs = lax.axis_size("program")
    num_groups = inputs.w.shape[0]
    num_blocks = inputs.num[0]
    num_steps = inputs.x.shape[1] // DEPTH
    per_panel = num_blocks * panel
    num_items = num_blocks * num_stretches

    def step(state):
        item, ring = state
        nth = lax.div(item, per_panel)
        within = item - nth * per_panel
        width = jnp.minimum(num_stretches - nth * panel, panel)
        block = lax.div(within, width)
        group = inputs.group[block]
        is_rest = group == num_groups
        one = _Item(
            block=block,
            column=nth * panel + within - block * width,
            group=group,
            first=pl.multiple_of(inputs.first[block], ROW_ALIGNMENT),
            steps=jnp.where(is_rest, 0, num_steps),
            ring=ring,
        )
        visit(one)
        return item + programs, ring + one.steps

    start = jnp.asarray(program, jnp.int32), jnp.int32(0)
    return lax.while_loop(lambda state: state[0] < num_items, step, start)[1]


def _produce(
    inputs: _Inputs,
    shared: _Shared,
    num_stretches: int,
    *,
    columns: int,
    panel: int,
    transposed: bool,
) -> None:
    """Runs the producer warpgroup, which copies tiles to shared memory."""
    stages, num_warpgroups, _, depth = shared.x.shape
    moved = min(WGMMA_ROWS, inputs.x.shape[0])

    def visit(item: _Item) -> None:
        @pl.loop(0, item.steps)
        def _(i):
            index = item.ring + i
            stage = lax.rem(index, jnp.int32(stages))

            @pl.when(index >= stages)
            def _():
                plgpu.barrier_wait(shared.free.at[stage])

            full = shared.full.at[stage]
            deep = pl.ds(i * depth, depth)
            for j in range(num_warpgroups):
                source = inputs.x.at[pl.ds(item.first + j * WGMMA_ROWS, moved), deep]
                target = shared.x.at[stage, j, pl.ds(0, moved)]
                plgpu.copy_gmem_to_smem(source, target, full)
            wide = pl.ds(item.column * columns, columns)
            where = (wide, deep) if transposed else (deep, wide)
            source = inputs.w.at[item.group, *where]
            plgpu.copy_gmem_to_smem(source, shared.w.at[stage], full)

    total = _walk(inputs, num_stretches, panel, visit)

    # All copies must have been waited for when the kernel ends.
    @pl.loop(jnp.maximum(0, total - stages), total)
    def _(i):
        plgpu.barrier_wait(shared.free.at[lax.rem(i, jnp.int32(stages))])


def _consume(
    inputs: _Inputs,
    out: Ref,
    shared: _Shared,
    *,
    columns: int,
    panel: int,
    transposed: bool,
) -> None:
    """Runs a consumer warpgroup, which multiplies 64 rows."""
    warpgroup = lax.axis_index("warpgroup")
    stages = shared.x.shape[0]

    def visit(item: _Item) -> None:
        def release(index):
            plgpu.barrier_arrive(shared.free.at[lax.rem(index, jnp.int32(stages))])

        def product(sums):
            @pl.loop(0, item.steps)
            def _(i):
                index = item.ring + i
                stage = lax.rem(index, jnp.int32(stages))
                plgpu.barrier_wait(shared.full.at[stage])
                weights = shared.w.at[stage]
                weights = weights.T if transposed else weights
                plgpu.wgmma(sums, shared.x.at[stage, warpgroup], weights)
                # The product before this one is complete, so its stage can be released.
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)
                def _():
                    release(index - 1)

            plgpu.wgmma_wait(0)

            @pl.when(item.steps > 0)
            def _():
                release(item.ring + item.steps - 1)

            return sums[...]

        shape = (WGMMA_ROWS, columns)
        sums = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
        first = pl.multiple_of(item.first + warpgroup * WGMMA_ROWS, ROW_ALIGNMENT)
        low = jnp.clip(inputs.begin[item.block] - first, 0, WGMMA_ROWS)
        high = jnp.clip(inputs.end[item.block] - first, 0, WGMMA_ROWS)
        _send(sums, out, shared, first, item.column * columns, low, high)

    _walk(inputs, out.shape[1] // columns, panel, visit)
    plgpu.wait_smem_to_gmem(0)


def _send(sums, out: Ref, shared: _Shared, first, column, low, high) -> None:
    """Writes rows low to high of a warpgroup's 64, in groups of columns.

    The last copies are still in flight when this returns. The row count of a copy is
    static, so fewer than 64 rows are written in powers of two.
    """
    warpgroup = lax.axis_index("warpgroup")
    width = shared.swizzled_tile.shape[2]
    num_rows = high - low
    powers = [x for x in (32, 16, 8, 4, 2, 1) if x <= out.shape[0]]
    for begin in range(0, sums.shape[1], width):
        wide = pl.ds(column + begin, width)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def send_whole(begin=begin, wide=wide):
            shared.swizzled_tile[warpgroup] = _part(sums, begin, shared.swizzled_tile)
            plgpu.commit_smem()
            target = out.at[pl.ds(first, WGMMA_ROWS), wide]
            plgpu.copy_smem_to_gmem(shared.swizzled_tile.at[warpgroup], target)

        def send_part(begin=begin, wide=wide):
            shared.part[warpgroup] = _part(sums, begin, shared.part)
            plgpu.commit_smem()
            for moved in powers:
                # Rows of larger powers precede these.
                row = low + num_rows - lax.rem(num_rows, jnp.int32(2 * moved))

                @pl.when(num_rows & moved != 0)
                def _(row=row, moved=moved):
                    source = shared.part.at[warpgroup, pl.ds(row, moved)]
                    target = out.at[pl.ds(first + row, moved), wide]
                    plgpu.copy_smem_to_gmem(source, target)

        if out.shape[0] >= WGMMA_ROWS:
            pl.when(num_rows == WGMMA_ROWS)(send_whole)
        pl.when((num_rows > 0) & (num_rows < WGMMA_ROWS))(send_part)


def _part(sums, begin: int, target: Ref):
    """Returns some columns of the sums in the type of the result."""
    return sums[:, begin : begin + target.shape[2]].astype(target.dtype)
