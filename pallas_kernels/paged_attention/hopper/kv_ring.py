"""Ring of tiles of keys and values, copied from pages to shared memory.

Shared by the producers of decode and prefill. Each stage of the ring has a full barrier
and a free barrier.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.devices import Ref
from pallas_kernels.paged_attention.stream_k import Tiling


class KeySpan(NamedTuple):
    """Keys that the rows of an item read."""

    slot: Array
    """Slot of the page table."""
    head: Array
    """KV head."""
    low: Array
    """First position that any row attends to."""
    high: Array
    """One past the last position. Pages without a position in between, and ids that are
    no page of the layer, are not read; zeros are copied instead."""


def copy_tile(
    inputs: Ref,
    shared: Ref,
    span: KeySpan,
    *,
    begin: Array,
    index: Array,
    num_layers: int,
    tiling: Tiling,
) -> None:
    """Starts the copies of a tile of keys, then of values, once their stages are free.

    Args:
      inputs: has `k` and `v` [pages, kv_heads, page_size, head_dim], `page_ids`, and
        `layer`; `v` is None if the values are part of the keys.
      shared: has the rings `k` and `v`, and their barriers `k_full`, `k_free` and so
        on; there is no ring of values if `v` is None.
      span: keys to read.
      begin: first position of the tile.
      index: number of earlier tiles of this program.
      num_layers: layers in `k` and `v`, static.
      tiling: sizes, static.
    """
    num_pages, _, page_size, _ = inputs.k.shape
    layer_pages = num_pages // num_layers
    pages_per_slot = inputs.page_ids.shape[1]
    stage = lax.rem(index, jnp.int32(tiling.stages))
    box = min(tiling.tile, page_size)  # tokens of one copy

    def page_at(place):
        """Returns the page of a position, or one past the end, which copies zeros."""
        nth = lax.div(place, jnp.int32(page_size))
        page = inputs.page_ids[span.slot, jnp.minimum(nth, pages_per_slot - 1)]
        wanted = (place + box > span.low) & (place < span.high)
        wanted &= (page >= 0) & (page < layer_pages)
        return jnp.where(wanted, inputs.layer[0] * layer_pages + page, num_pages)

    pages = [page_at(begin + j * box) for j in range(tiling.tile // box)]
    inside = pl.ds(lax.rem(begin, jnp.int32(page_size)), box)
    if box == page_size:
        inside = pl.ds(0, box)
    for source, target, full, free in (
        (inputs.k, shared.k, shared.k_full, shared.k_free),
        (inputs.v, shared.v, shared.v_full, shared.v_free),
    )[: 1 if inputs.v is None else 2]:

        @pl.when(index >= tiling.stages)
        def _(free=free):
            plgpu.barrier_wait(free.at[stage])

        for j, page in enumerate(pages):
            plgpu.copy_gmem_to_smem(
                source.at[page, span.head, inside],
                target.at[stage, pl.ds(j * box, box)],
                full.at[stage],
            )


def drain_stages(num: Array, stages: int, *free: Ref) -> None:
    """Waits until all stages are free, so that no copy is in flight at the end.

    `num` is the number of fills of each ring; `free` are the rings' free barriers.
    """

    @pl.loop(jnp.maximum(0, num - stages), num)
    def _(i):
        for barriers in free:
            plgpu.barrier_wait(barriers.at[lax.rem(i, jnp.int32(stages))])
