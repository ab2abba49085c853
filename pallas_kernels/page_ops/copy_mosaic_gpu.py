"""Copies of whole pages for Hopper GPUs: in place, all layers in one launch.

Every program moves a part of a page through shared memory by bulk copies (TMA): threads
do not touch the data, and the only buffer is the part in flight.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Shaped

from pallas_kernels.devices import LINE_BYTES

MAX_LINES = 256
"""Lines of 128 bytes of one bulk copy."""
PART_BYTES = 32_768
"""Bytes that one program moves. Not measured: seven programs share a multiprocessor, so
29 MB are in flight on an H200, where 4.3 TB/s at 1 us of latency need 4.3 MB."""


def copy_pages_mosaic_gpu(
    pages: Shaped[Array, "pages ..."],
    source: Int[Array, " n"],
    target: Int[Array, " n"],
    *,
    origin: Shaped[Array, "origin_pages ..."] | None = None,
    part_bytes: int = PART_BYTES,
    interpret: plgpu.InterpretGPUParams | bool = False,
) -> Shaped[Array, "pages ..."]:
    """Copies pages onto pages, in place if the pages are donated.

    Arguments are those of `copy.copy_pages`, but programs run in any order: no page may
    be both a source and a target. A program moves at most `part_bytes`, at least
    `LINE_BYTES`. `interpret` emulates the kernel on a CPU; False compiles it.

    Raises:
      ValueError: the size of pages or parts is not supported.
    """
    page_bytes = math.prod(pages.shape[1:]) * pages.dtype.itemsize
    if page_bytes == 0 or page_bytes % LINE_BYTES:
        raise ValueError(f"{page_bytes=} must be a positive multiple of {LINE_BYTES}")
    if part_bytes < LINE_BYTES:
        raise ValueError(f"{part_bytes=} must be at least {LINE_BYTES}")
    if source.shape[0] == 0:
        return pages
    line = LINE_BYTES // pages.dtype.itemsize
    num_lines = page_bytes // LINE_BYTES
    max_lines = min(num_lines, MAX_LINES, part_bytes // LINE_BYTES)
    lines = max(x for x in range(1, max_lines + 1) if num_lines % x == 0)
    shape = (-1, num_lines // lines, lines, line)
    num_pages = pages.shape[0]
    num_readable = num_pages if origin is None else origin.shape[0]

    def copy_part(*references):
        *origins, written, source_ids, target_ids, buffer, arrived = references
        read = origins[0] if origins else written
        entry = lax.axis_index("entry")
        index = lax.axis_index("part")
        start = source_ids[entry]
        end = target_ids[entry]
        is_read = jnp.logical_and(start >= 0, start < num_readable)
        is_written = jnp.logical_and(end >= 0, end < num_pages)

        @pl.when(jnp.logical_and(is_read, is_written))
        def _():
            plgpu.copy_gmem_to_smem(read.at[start, index], buffer, arrived)
            plgpu.barrier_wait(arrived)
            plgpu.copy_smem_to_gmem(buffer, written.at[end, index])
            plgpu.wait_smem_to_gmem(0)

    # A reference to a donated array aliases it.
    written = jax.new_ref(pages.reshape(shape))
    origins = [] if origin is None else [origin.reshape(shape)]
    ids = (source.astype(jnp.int32), target.astype(jnp.int32))
    plgpu.kernel(
        copy_part,
        out_type=(),
        scratch_types=[plgpu.SMEM((lines, line), pages.dtype), plgpu.Barrier()],
        grid=(source.shape[0], shape[1]),
        grid_names=("entry", "part"),
        interpret=interpret,
    )(*origins, written, *ids)
    return jax.freeze(written).reshape(pages.shape)
