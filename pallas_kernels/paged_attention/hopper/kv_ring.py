"""Tiles of keys and values on their way from pages to shared memory.

What the warpgroups that copy have in common, whichever rows they copy for: a ring of
stages, and of each stage a barrier that says that it is full and one that it is free.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.hopper.softmax import Ref
from pallas_kernels.paged_attention.stream_k import Tiling


class KeySpan(NamedTuple):
    """Keys that rows read."""

    slot: Any
    """Whose pages."""
    head: Any
    """KV head."""
    low: Any
    """First place that any row sees."""
    high: Any
    """Place after the last one. Pages without a place between are not read: zeros
    arrive in their stead, and for ids that no page of the layer has."""


def copy_tile(
    inputs: Any,
    shared: Any,
    span: KeySpan,
    *,
    begin: Any,
    index: Any,
    num_layers: int,
    tiling: Tiling,
) -> None:
    """Asks the copy engine for a tile of keys, then of values, as stages become free.

    Args:
      inputs: with `k` and `v` [pages, kv_heads, page_size, head_dim], `page_ids`, and
        the `layer` that they are of.
      shared: with the rings `k` and `v`, and their `k_full`, `k_free` and so on.
      span: what is read.
      begin: first place of the tile.
      index: tiles that this program has asked for before.
      num_layers: layers in `k` and `v`, static.
      tiling: static.
    """
    num_pages, _, page_size, _ = inputs.k.shape
    layer_pages = num_pages // num_layers
    pages_per_slot = inputs.page_ids.shape[1]
    stage = lax.rem(index, jnp.int32(tiling.stages))
    box = min(tiling.tile, page_size)  # tokens of one copy

    def page_at(place):
        """Page with a place, or one past the end: its copy delivers zeros."""
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
    ):

        @pl.when(index >= tiling.stages)
        def _(free=free):
            plgpu.barrier_wait(free.at[stage])

        for j, page in enumerate(pages):
            plgpu.copy_gmem_to_smem(
                source.at[page, span.head, inside],
                target.at[stage, pl.ds(j * box, box)],
                full.at[stage],
            )


def drain_stages(num: Any, stages: int, *free: Ref) -> None:
    """Waits until all stages are free: what arrives must have been waited for.

    They were filled `num` times; `free` are the barriers of the rings.
    """

    @pl.loop(jnp.maximum(0, num - stages), num)
    def _(i):
        for barriers in free:
            plgpu.barrier_wait(barriers.at[lax.rem(i, jnp.int32(stages))])
