"""Attention over a prefix that many sequences share: its pages are read once.

The rows of all sequences of a group are packed into common blocks and attend to the
prefix together; then each attends to what comes after it; the two states of a row are
merged. 256 sequences over 32,768 places of 8 KV heads, groups of 4: 34.4 GB of keys and
values a layer, read once for each block of 64 rows 2.1 GB.

Source: Juravsky et al. 2024, arXiv:2402.05099 (Hydragen), section 3; Ye et al. 2025,
arXiv:2501.01005 (FlashInfer), section 3.1.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels.paged_attention import decode_plan, merging
from pallas_kernels.paged_attention.api import AttentionState, merge_states
from pallas_kernels.paged_attention.decode_plan import Plan
from pallas_kernels.paged_attention.hopper import decode
from pallas_kernels.paged_attention.stream_k import Tiling


class SharedPrefixPlan(NamedTuple):
    """Plans of the two passes over the same rows."""

    prefix: Plan
    """Rows of each group against its prefix."""
    own: Plan
    """Rows of each slot against what comes after."""


def make_plan(
    positions: Int[Array, " rows"],
    slots: Int[Array, " rows"] | None,
    groups: Int[Array, " slots"],
    prefix_lengths: Int[Array, " groups"],
    *,
    kv_heads: int,
    group: int,
    tiling: Tiling,
    context: Int[Array, " slots"] | None = None,
    ancestors: Bool[Array, "rows columns"] | None = None,
    window: int | None = None,
) -> SharedPrefixPlan:
    """Plans both passes.

    Args:
      positions: position of each row; -1 for a padding row.
      slots: slot of each row, the rows of a slot side by side; None where row i is
        slot i.
      groups: group of each slot, in any order; -1 where it shares nothing.
      prefix_lengths: places that the slots of each group share, from place 0 on; at
        most the position, and the context, of any of their rows.
      kv_heads: KV heads, static.
      group: query heads that share a KV head, static.
      tiling: sizes; the same for plan and kernel.
      context: see `planning.make_plan`.
      ancestors: see there.
      window: see there.

    Returns:
      The plans.
    """
    num_slots, num_groups = groups.shape[0], prefix_lengths.shape[0]
    owner = groups if slots is None else groups[jnp.maximum(slots, 0)]
    if slots is not None:
        owner = jnp.where(slots >= 0, owner, -1)
    shared = prefix_lengths[jnp.maximum(owner, 0)]
    shared = jnp.where(owner >= 0, shared, 0)
    plan = functools.partial(
        decode_plan.make_plan,
        kv_heads=kv_heads,
        group=group,
        tiling=tiling,
        window=window,
    )
    prefix = plan(positions, owner, num_slots=num_groups, end=shared, sort=True)
    own = plan(
        *(positions, slots),
        num_slots=num_slots,
        first=shared,
        context=context,
        ancestors=ancestors,
    )
    return SharedPrefixPlan(prefix, own)


def attend_shared_prefix(
    q: Float[Array, "rows q_heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    prefix_ids: Int[Array, "groups prefix_pages"],
    page_ids: Int[Array, "slots pages_per_slot"],
    plan: SharedPrefixPlan,
    *,
    scale: float,
    softcap: float | None = None,
    alibi: Float[Array, " q_heads"] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    tiling: Tiling,
    interpret: plgpu.InterpretGPUParams | bool = False,
) -> tuple[Float32[Array, "rows q_heads head_dim"], Float32[Array, "rows q_heads"]]:
    """Attends to shared prefixes once a group, then to the rest, as `attend` would.

    Args:
      q: queries.
      k_pages: keys, see `decode_mosaic_gpu.attend`.
      v_pages: values, likewise.
      prefix_ids: page of every place / page_size of each group's prefix.
      page_ids: the same of each slot; entries below its prefix are not followed.
      plan: `make_plan` of these rows, with the same tiling.
      scale: factor on the products.
      softcap: bound of the scores; None means none.
      alibi: slope of each query head.
      sinks: one more score a head, that takes weight and brings no value.
      tiling: sizes.
      interpret: how to emulate the kernel on a CPU; False compiles it.

    Returns:
      Output and natural log-sum-exp, in float32.

    Raises:
      ValueError: types or sizes that the kernel does not take.
    """
    states = []
    for ids, part in ((prefix_ids, plan.prefix), (page_ids, plan.own)):
        state = decode.attend(
            *(q, k_pages, v_pages, ids, part),
            scale=scale,
            softcap=softcap,
            alibi=alibi,
            tiling=tiling,
            interpret=interpret,
        )
        states.append(AttentionState(*state))
    out, lse = merge_states(*states)
    return (out, lse) if sinks is None else merging.add_sinks(out, lse, sinks)
