"""Attention on Hopper GPUs: division of a step's rows between two kernels.

Slots with few rows are bound by memory: the decode kernel packs the query heads of a KV
head and splits long contexts among all multiprocessors. Chunks of prompts are bound by
the tensor cores, and go to the prefill kernel. A step may hold both, and the number of
rows of a slot is known only on the device: then both kernels run, each with the other's
rows masked in its plan, and the prefill kernel merges or receives the decode results.

Over latent rows there is only the decode kernel: `api.choose_attention` gives the
reference the steps of which `has_prefill_rows` is true.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from pallas_kernels import devices, row_packing
from pallas_kernels.layered import Layer
from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import decode_plan, prefill_plan, stream_k
from pallas_kernels.paged_attention.decode_plan import DecodePlan
from pallas_kernels.paged_attention.prefill_plan import PrefillPlan
from pallas_kernels.paged_attention.stream_k import Tiling

PACKED_ROWS = 128
"""Largest number of rows times query heads of a KV head of a slot that goes to decode:
two tensor-core products, or one tile of queries."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTilings:
    """Tilings of both kernels; a static part of a pytree."""

    decode: Tiling
    """Tiling for slots with few rows, and for trees."""
    prefill: Tiling
    """Tiling for the other slots, with `block_rows` 128."""


def default_tilings(head_dim: int) -> KernelTilings:
    """Returns the default tilings.

    Args:
      head_dim: 64, 128 or 256, or 576 for latent rows.

    Returns:
      Tilings for the target device of the trace, or for an H200 if it is no GPU.
    """
    target = devices.current_target()
    num_cores = target.num_cores if target.platform == "gpu" else devices.NUM_CORES
    return KernelTilings(
        decode=stream_k.default_decode_tiling(
            head_dim=head_dim, num_programs=num_cores
        ),
        prefill=prefill_plan.default_prefill_tiling(
            head_dim=head_dim, num_programs=num_cores
        ),
    )


class StepPlan(NamedTuple):
    """Inputs of the kernels in a step that do not depend on the layer."""

    tiling: KernelTilings
    """Tilings of the plan and of the kernels."""
    few: DecodePlan | None
    """Rows of trees, and of slots with few rows; None if there can be none."""
    prefill: PrefillPlan | None
    """Rows of slots with many rows; None if there can be none."""


def has_prefill_rows(
    num_rows: int, *, num_slots: int, group: int, has_slots: bool
) -> bool:
    """Returns True if the prefill kernel may get some of the rows of a step.

    Decode gets up to `PACKED_ROWS` rows of every slot if all slots have the same number
    (`has_slots` is False), and no more rows than are few.
    """
    return num_rows > (PACKED_ROWS // group if has_slots else PACKED_ROWS * num_slots)


def make_step_plan(
    positions: Int[Array, " rows"],
    slots: Int[Array, " rows"] | None,
    *,
    num_slots: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    context: Int[Array, " slots"] | None = None,
    ancestors: Bool[Array, "rows columns"] | None = None,
    window: int | None = None,
    tiling: KernelTilings | None = None,
) -> StepPlan:
    """Divides the rows between the kernels, and makes both plans.

    Arguments are those of `decode_plan.plan_decode`; a tiling of None means
    `default_tilings` of `head_dim`. Only decode gets the rows of a step without
    `has_prefill_rows`, and trees. Only prefill gets the rows of a single slot: they are
    a chunk, except for its last piece.
    """
    few = PACKED_ROWS // group
    tiling = tiling or default_tilings(head_dim)
    num_rows = positions.shape[0]
    prefills = has_prefill_rows(
        num_rows, num_slots=num_slots, group=group, has_slots=slots is not None
    )
    if slots is None and num_rows > num_slots:
        slots = jnp.arange(num_rows, dtype=jnp.int32) // (num_rows // num_slots)
    options: dict[str, Any] = {"num_slots": num_slots, "window": window}
    plan_decode = functools.partial(
        decode_plan.plan_decode,
        slots=slots,
        kv_heads=kv_heads,
        group=group,
        tiling=tiling.decode,
        context=context,
        ancestors=ancestors,
        **options,
    )
    if slots is None or not prefills:
        return StepPlan(tiling, plan_decode(positions), None)
    runs = row_packing.find_slot_runs(slots, (positions >= 0) & (slots >= 0))
    chunks = positions
    if context is not None:
        in_tree = context[jnp.maximum(slots, 0)] >= 0
        chunks = jnp.where(in_tree, -1, positions)
    elif num_slots == 1:
        few = 0
    many_plan = prefill_plan.plan_prefill(
        chunks, slots, few=few, tiling=tiling.prefill, runs=runs, **options
    )
    if few == 0:
        return StepPlan(tiling, None, many_plan)
    # All rows of a slot go to the same kernel, so their counts stay valid.
    left = jnp.where(runs.count > few, -1, positions)
    if context is not None:
        left = jnp.where(in_tree, positions, left)
    max_rows = few if context is None else None
    plan = plan_decode(left, max_rows_per_slot=max_rows, nth=runs.nth)
    return StepPlan(tiling, plan, many_plan)


def dispatch_attention(
    q: Float[Array, "rows q_heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"] | None,
    page_ids: Int[Array, "slots pages_per_slot"],
    plan: StepPlan,
    scoring: ScoreTransform,
    *,
    window: int | None,
    value_width: int | None = None,
    packed_q: Float[Array, "blocks items block_rows head_dim"] | None = None,
    layer: Layer = 0,
    num_layers: int = 1,
    interpret: Any = False,
) -> tuple[Float[Array, "rows q_heads value_width"], Float32[Array, "rows q_heads"]]:
    """Attends from all rows, with the kernels of the plan.

    Arguments and errors are those of `decode.attend_decode`; `plan` is `make_step_plan`
    of these rows with the same window, and `packed_q` the queries as its `few` packs
    them.

    Returns:
      Output in the type of q, and natural log-sum-exp; 0 and -inf for rows without a
      key.
    """
    # Pallas is imported only where it runs.
    from pallas_kernels.paged_attention.hopper import (
        DecodePartials,
        attend_decode,
        attend_prefill,
        partial_states,
        supports_fused_merge,
    )

    arrays = (q, k_pages, v_pages, page_ids)
    few = plan.few
    of_few = plan.tiling.decode
    how: Any = {"layer": layer, "num_layers": num_layers, "interpret": interpret}
    how |= {"scoring": scoring}
    prefill = functools.partial(
        attend_prefill,
        *arrays,
        plan.prefill,
        window=window,
        tiling=plan.tiling.prefill,
        **how,
    )
    if few is None:
        return prefill()
    how |= {"packed_q": packed_q, "tiling": of_few}
    sizes = {"group": q.shape[1] // k_pages.shape[1], "head_dim": q.shape[2]}
    if plan.prefill is not None and supports_fused_merge(few, scoring, **sizes):
        states = partial_states(*arrays, few, **how)
        return prefill(decode_output=DecodePartials(states, few, of_few))
    how |= {"value_width": value_width}
    decode_output = attend_decode(*arrays, few, dtype=q.dtype, **how)
    return (
        decode_output if plan.prefill is None else prefill(decode_output=decode_output)
    )
