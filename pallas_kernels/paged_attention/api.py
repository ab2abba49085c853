"""Attention over pages: checks shapes and chooses an implementation.

A row is one query token: its slot is the row of the page table with its keys, and its
position the number of keys before its own. Decoding (one row a slot), chunks of prompts
and drafts to verify are all rows. Kernels know pages only: a layer is an offset of page
ids, and requests do not exist here.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from pallas_kernels import devices, layered
from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import checks, decode_plan, dispatch, reference
from pallas_kernels.paged_attention.page_blocks import PagedKV, RowView

type AttentionImplementation = Literal["reference", "mosaic_gpu"]
"""Names of implementations; `None` means the best one for platform and shape."""


class AttentionState(NamedTuple):
    """Attention of rows over some keys, mergeable with attention over other keys."""

    out: Float[Array, "rows q_heads value_width"]
    """Softmax-weighted values; 0 for a row without keys."""
    lse: Float[Array, "rows q_heads"]
    """Natural log-sum-exp of the scores; -inf for a row without keys."""


def paged_attention(
    q: Float[Array, "rows q_heads head_dim"],
    kv: PagedKV,
    view: RowView,
    scoring: ScoreTransform | None = None,
    *,
    plan: dispatch.StepPlan | None = None,
    packed_q: Float[Array, "blocks kv_heads block_rows head_dim"] | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    long_runs: bool = False,
    implementation: AttentionImplementation | None = None,
) -> AttentionState:
    """Attends from ragged rows to the pages of their slots.

    Args:
      q: queries. Query head h reads KV head `h // (q_heads // kv_heads)`.
      kv: the pages.
      view: the rows, and the pages with their keys.
      scoring: transform of the scores, with one slope and sink for each query head;
        None only scales them by head_dim ** -0.5.
      plan: `make_plan` of the same rows, to share it among layers; None makes one if
        the implementation needs it.
      packed_q: queries of the plan's few rows in packed form, if they are already
        written; None packs them here.
      numerics: "reproducible" makes the bits of a row independent of the batch.
      long_runs: True multiplies more queries of a slot at once if that changes no bit,
        see `choose_run_queries`; faster for many rows of a slot, only for reproducible
        numerics.
      implementation: None, or the name of a required one. "reference" takes any
        sizes and types; "mosaic_gpu" needs a Hopper GPU, fast numerics, q and pages in
        bfloat16 or both in float16, head_dim 64, 128 or 256, values of the same width,
        pages of 16, 32, 64, 128 or 256 positions, and at most 64 query heads for a KV
        head. It also takes latent rows, of head_dim 576 and value_width 512 without
        `kv.v`, with one KV head, and at most 64 or a multiple of 64 query heads, in
        steps without `dispatch.has_prefill_rows`.

    Returns:
      Output in the type of q, and the log-sum-exp in float32 (float64 if q is).

    Raises:
      ValueError: shapes do not match, or the requested implementation is unknown or
        does not support the call.

    Sources: Kwon et al. 2023, arXiv:2309.06180, eq. 4; trees, Miao et al. 2024,
    arXiv:2305.09781, section 4; softcap, Gemma 2, arXiv:2408.00118, section 2; ALiBi,
    Press et al. 2022, arXiv:2108.12409, section 3; sinks, gpt-oss, arXiv:2508.10925,
    section 2.
    """
    value_width = checks.check_arrays(q, kv)
    scoring = ScoreTransform(q.shape[2] ** -0.5) if scoring is None else scoring
    checks.check_heads(q, sinks=scoring.sinks, slopes=scoring.slopes)
    checks.check_view(q, view)
    if scoring.softcap is not None and not scoring.softcap > 0:
        raise ValueError(f"softcap={scoring.softcap} must be above 0, or None")
    kv = kv._replace(value_width=value_width)
    chosen = choose_attention(
        q,
        kv.k,
        value_width=value_width,
        has_v_pages=kv.v is not None,
        prefills=_has_prefill_rows(q, kv.k, view),
        numerics=numerics,
        implementation=implementation,
    )
    if chosen == "mosaic_gpu":
        if plan is None:
            plan = make_plan(
                q,
                kv.k,
                view,
                value_width=value_width,
                implementation=implementation,
            )
        assert plan is not None
        out, lse = dispatch.dispatch_attention(
            q,
            kv.k,
            kv.k if kv.v is None and value_width == q.shape[2] else kv.v,
            view.page_ids,
            plan,
            scoring,
            window=view.window,
            value_width=value_width,
            packed_q=packed_q,
            layer=kv.layer,
            num_layers=kv.num_layers,
        )
        return AttentionState(out, lse)
    if kv.num_layers > 1:
        page_ids = layered.flat_ids(
            view.page_ids,
            kv.layer,
            num_layers=kv.num_layers,
            num_pages=kv.k.shape[0] // kv.num_layers,
        )
        view = view._replace(page_ids=page_ids)
        kv = kv._replace(layer=0, num_layers=1)
    rows, q_heads, head_dim = q.shape
    kv_heads = kv.k.shape[1]
    by_head = kv_heads, q_heads // kv_heads
    num_slots = view.page_ids.shape[0]
    attend = reference.attend_per_run
    if numerics == "reproducible" and long_runs:
        queries = reference.choose_run_queries(q, kv)
        attend = functools.partial(attend, run_queries=queries)
    if numerics == "fast" and view.slots is None:
        few = max(1, 4 // max(num_slots, 1))
        few_queries = rows * by_head[1] <= reference.FEW_QUERIES * num_slots
        attend = functools.partial(
            reference.attend_per_slot,
            block_size=min(reference.MAX_BLOCK_SIZE, few * reference.BLOCK_SIZE),
            one_by_one=devices.current_target().platform == "cpu"
            and q.dtype == jnp.float32
            and few_queries
            and num_slots <= reference.FEW_SLOTS,
        )
    elif numerics == "fast":
        attend = reference.attend_per_tile
    slopes = scoring.slopes
    sinks = scoring.sinks
    out, lse = reference.differentiable(
        attend,
        q.reshape(rows, *by_head, head_dim),
        kv,
        view,
        scoring._replace(
            slopes=None if slopes is None else slopes.reshape(by_head),
            sinks=None if sinks is None else sinks.reshape(by_head),
        ),
    )
    out = out.reshape(rows, q_heads, value_width)
    return AttentionState(out, lse.reshape(rows, q_heads))


def make_plan(
    q: Float[Array, "rows q_heads head_dim"] | jax.ShapeDtypeStruct,
    k_pages: Num[Array, "pages kv_heads page_size key_width"] | jax.ShapeDtypeStruct,
    view: RowView,
    *,
    value_width: int | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: AttentionImplementation | None = None,
    tiling: dispatch.KernelTilings | None = None,
) -> dispatch.StepPlan | None:
    """Makes the plan of a step, which all layers share.

    Args:
      q: queries; only their shape and type matter.
      k_pages: keys; only their shape and type matter.
      view: the rows; of the page table only the shape matters.
      value_width: width of the values; None means that of the keys.
      numerics: as for `paged_attention`.
      implementation: as for `paged_attention`.
      tiling: sizes that change the speed of "mosaic_gpu" and not its results; None
        means `dispatch.default_tilings`. The plan keeps them.

    Returns:
      The plan; None if the reference computes the call, which needs none.

    Raises:
      ValueError: the requested implementation is unknown or does not support the call.
    """
    chosen = choose_attention(
        q,
        k_pages,
        value_width=value_width,
        prefills=_has_prefill_rows(q, k_pages, view),
        numerics=numerics,
        implementation=implementation,
    )
    if chosen != "mosaic_gpu":
        return None
    items, group = decode_plan.item_heads(q.shape[1], k_pages.shape[1])
    return dispatch.make_step_plan(
        view.positions,
        view.slots,
        num_slots=len(view.page_ids),
        kv_heads=items,
        group=group,
        head_dim=q.shape[2],
        context=view.context,
        ancestors=view.ancestors,
        window=view.window,
        tiling=tiling,
    )


def choose_attention(
    q: Float[Array, "rows q_heads head_dim"] | jax.ShapeDtypeStruct,
    k_pages: Num[Array, "pages kv_heads page_size key_width"] | jax.ShapeDtypeStruct,
    *,
    value_width: int | None = None,
    has_v_pages: bool = False,
    prefills: bool = False,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: AttentionImplementation | None = None,
) -> AttentionImplementation:
    """Returns the implementation that computes a call.

    A `value_width` of None is that of the keys. `has_v_pages` is True if the values are
    not the first numbers of the keys, and `prefills` is `dispatch.has_prefill_rows`.

    Raises:
      ValueError: the requested implementation is unknown or does not support the call.
    """

    def refusal() -> str | None:
        if numerics != "fast":
            return f"{numerics=} needs sums that do not depend on the other rows"
        reason = decode_plan.decode_unsupported_reason(
            q, k_pages, value_width, has_v_pages=has_v_pages
        )
        if reason is None and prefills and value_width not in (None, q.shape[2]):
            return f"{q.shape[0]} rows of chunks over latent rows have no kernel"
        return reason

    return devices.choose_implementation(implementation, refusal)


def _has_prefill_rows(
    q: Array | jax.ShapeDtypeStruct,
    k_pages: Array | jax.ShapeDtypeStruct,
    view: RowView,
) -> bool:
    return dispatch.has_prefill_rows(
        q.shape[0],
        num_slots=len(view.page_ids),
        group=decode_plan.item_heads(q.shape[1], k_pages.shape[1])[1],
        has_slots=view.slots is not None,
    )


def merge_states(first: AttentionState, second: AttentionState) -> AttentionState:
    """Merges attention over two disjoint sets of keys.

    Associative and commutative up to rounding, so any number of states merge in any
    order. A state without keys is neutral, for any content of its output.

    Args:
      first: state of some rows.
      second: state of the same rows over other keys.

    Returns:
      The state over all keys, with the output in the type of the first state's.

    Source: Dao et al. 2022, arXiv:2205.14135, section 3.1.
    """
    top = jnp.maximum(first.lse, second.lse)
    top = jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)
    weights = [jnp.exp(state.lse - top) for state in (first, second)]
    total = weights[0] + weights[1]
    safe_total = jnp.where(total > 0, total, jnp.ones_like(total))

    def share(state: AttentionState, weight: Array) -> Array:
        out = state.out.astype(top.dtype) * (weight / safe_total)[..., None]
        empty = jnp.isneginf(state.lse)[..., None]
        return jnp.where(empty, jnp.zeros((), top.dtype), out)

    out = share(first, weights[0]) + share(second, weights[1])
    return AttentionState(out.astype(first.out.dtype), top + jnp.log(total))


def merge_devices(state: AttentionState, axis: str) -> AttentionState:
    """Merges attention over the keys of all devices of a mesh axis; all get the result.

    For use inside `jax.shard_map`. Each of p devices has a state of the same rows over
    its own disjoint keys, and sends 2 (p - 1) / p of `rows * q_heads *
    (value_width + 2)` numbers of the type of the log-sum-exp, in two all-reduces: of
    the maximum, and of the weighted sums.

    Source: Dao et al. 2022, arXiv:2205.14135, section 3.1.
    """
    maximum, add_up = (
        functools.partial(x, axis_name=axis) for x in (lax.pmax, lax.psum)
    )
    return _merge(state.out, state.lse, maximum, add_up)


def merge_own_rows(state: AttentionState, axis: str) -> AttentionState:
    """Merges attention as `merge_devices`, but each device gets its part of the rows.

    Device d of p gets `rows / p` rows, from row d `rows / p` on. It sends (p - 1) / p
    of its state, outputs and log-sum-exps in their own types, in two all-to-alls: a
    reduce-scatter would need the maximum of the log-sum-exps first.

    Source: Yang et al. 2024, arXiv:2411.01783, section 3 (pass-Q).
    """
    num = lax.axis_size(axis)

    def exchange(x: Array) -> Array:
        parts = x.reshape(num, -1, *x.shape[1:])
        return lax.all_to_all(parts, axis, split_axis=0, concat_axis=0)

    out, lse = map(exchange, state)
    maximum = functools.partial(jnp.max, axis=0, keepdims=True)
    add_up = functools.partial(jnp.sum, axis=0, keepdims=True)
    merged = _merge(out, lse, maximum, add_up)
    return AttentionState(merged.out[0], merged.lse[0])


def _merge(
    out: Float[Array, "*states rows q_heads value_width"],
    lse: Float[Array, "*states rows q_heads"],
    maximum: Callable[[Array], Array],
    add_up: Callable[[Array], Array],
) -> AttentionState:
    """Merges states, given the functions for the maximum and the sum over states."""
    top = maximum(lse)
    top = jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)
    weight = jnp.exp(lse - top)[..., None]
    empty = jnp.isneginf(lse)[..., None]
    finite_out = jnp.where(empty, jnp.zeros((), top.dtype), out.astype(top.dtype))
    sums = add_up(jnp.concatenate([finite_out * weight, weight], axis=-1))
    total = sums[..., -1]
    mean = sums[..., :-1] / jnp.where(total > 0, total, jnp.ones_like(total))[..., None]
    return AttentionState(mean.astype(out.dtype), top + jnp.log(total))
