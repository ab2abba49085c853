"""Attention on Hopper GPUs: which kernel takes which rows of a step.

Slots with few rows are bound by memory: decode packs the query heads of a KV head, and
cuts long keys among all multiprocessors. Chunks are bound by the tensor cores, which
the prefill kernel keeps busy. A step may hold both, and how many rows a slot has is
known on the device alone: then both kernels run, each with the other's rows left out of
its plan, and the second merges what the first left, or writes into its result.
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
"""Rows times query heads of a KV head up to which a slot has few rows: two products of
the tensor cores, or one tile of queries that would be shared by as many heads."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTilings:
    """Sizes of both kernels; in a pytree part of its structure."""

    decode: Tiling
    """Of slots with few rows, and of trees."""
    prefill: Tiling
    """Of the other slots: `block_rows` is 128."""


def default_tilings(head_dim: int) -> KernelTilings:
    """The tilings that are used where none are given.

    Args:
      head_dim: 64, 128 or 256.

    Returns:
      Those of the device that a trace is made for, or of an H200 where it is no GPU.
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
    """What the kernels need of a step, whatever the layer."""

    tiling: KernelTilings
    """Sizes that the plan was made with, and that the kernels have."""
    few: DecodePlan | None
    """Rows of slots with few of them, and of trees; None where there can be none."""
    many: PrefillPlan | None
    """Rows of the other slots, likewise."""


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
    """Divides the rows among the kernels, and plans for each.

    Arguments are those of `decode_plan.plan_decode`; a tiling of None takes
    `default_tilings` of `head_dim`. Up to `PACKED_ROWS` rows of every slot, with
    `slots` of None, and no more rows than are few go to decode alone, and so do trees.
    The rows of a single slot go to prefill alone: so many are a chunk, but for its last
    piece.
    """
    few, tiling = PACKED_ROWS // group, tiling or default_tilings(head_dim)
    num_rows = positions.shape[0]
    is_dense = slots is None and num_rows <= PACKED_ROWS * num_slots
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
    if slots is None or is_dense or num_rows <= few:
        return StepPlan(tiling, plan_decode(positions), None)
    runs = row_packing.find_slot_runs(slots, (positions >= 0) & (slots >= 0))
    chunks = positions
    if context is not None:
        in_tree = context[jnp.maximum(slots, 0)] >= 0
        chunks = jnp.where(in_tree, -1, positions)
    elif num_slots == 1:
        few = 0
    many = prefill_plan.plan_prefill(
        chunks, slots, few=few, tiling=tiling.prefill, runs=runs, **options
    )
    if few == 0:
        return StepPlan(tiling, None, many)
    # A slot is left whole: what is known of its rows stays so.
    left = jnp.where(runs.count > few, -1, positions)
    if context is not None:
        left = jnp.where(in_tree, positions, left)
    most = few if context is None else None
    plan = plan_decode(left, max_rows_per_slot=most, nth=runs.nth)
    return StepPlan(tiling, plan, many)


def dispatch_attention(
    q: Float[Array, "rows q_heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "slots pages_per_slot"],
    plan: StepPlan,
    scoring: ScoreTransform,
    *,
    window: int | None,
    packed_q: Float[Array, "blocks kv_heads block_rows head_dim"] | None = None,
    layer: Layer = 0,
    num_layers: int = 1,
    interpret: Any = False,
) -> tuple[Float[Array, "rows q_heads head_dim"], Float32[Array, "rows q_heads"]]:
    """Attends from all rows, with the kernels that the plan names.

    Arguments and errors are those of `decode.attend_decode`; `plan` is `make_step_plan`
    of these
    rows, with the same window, and `packed_q` the queries as its `few` packs them.

    Returns:
      Output in the type of q, and natural log-sum-exp; 0 and -inf without a key.
    """
    # Pallas loads only where it runs.
    from pallas_kernels.paged_attention.hopper import decode as hopper_decode
    from pallas_kernels.paged_attention.hopper import merge_fused
    from pallas_kernels.paged_attention.hopper import prefill as hopper_prefill

    arrays, few, of_few = (q, k_pages, v_pages, page_ids), plan.few, plan.tiling.decode
    how: Any = {"layer": layer, "num_layers": num_layers, "interpret": interpret}
    how |= {"scoring": scoring}
    prefill = functools.partial(
        hopper_prefill.attend_prefill,
        *arrays,
        plan.many,
        window=window,
        tiling=plan.tiling.prefill,
        **how,
    )
    if few is None:
        return prefill()
    how |= {"packed_q": packed_q, "tiling": of_few}
    sizes = {"group": q.shape[1] // k_pages.shape[1], "head_dim": q.shape[2]}
    if plan.many is not None and merge_fused.supports_fused_merge(
        few, scoring, **sizes
    ):
        states = hopper_decode.partial_states(*arrays, few, **how)
        return prefill(decode_output=merge_fused.DecodePartials(states, few, of_few))
    found = hopper_decode.attend_decode(*arrays, few, dtype=q.dtype, **how)
    return found if plan.many is None else prefill(decode_output=found)
