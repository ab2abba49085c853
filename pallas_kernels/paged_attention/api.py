"""Attention over pages: checks shapes and chooses an implementation.

A row is one query token: its slot is the row of the page table with its keys, and its
position the number of keys before its own. Decoding (one row a slot), chunks of prompts
and drafts to verify are all rows. Kernels know pages only: a layer is an offset of page
ids, and requests do not exist here.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import devices, layered
from pallas_kernels.layered import Layer
from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import checks, decode_plan, dispatch, reference
from pallas_kernels.paged_attention.page_blocks import PagedKV

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
    k_pages: Num[Array, "pages kv_heads page_size key_width"],
    v_pages: Num[Array, "pages kv_heads page_size value_width"] | None,
    page_ids: Int[Array, "slots pages_per_slot"],
    positions: Int[Array, " rows"],
    slots: Int[Array, " rows"] | None = None,
    *,
    value_width: int | None = None,
    context: Int[Array, " slots"] | None = None,
    ancestors: Bool[Array, "rows columns"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi: Float[Array, " q_heads"] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scales: Float[Array, "pages kv_heads *k_places"] | None = None,
    v_scales: Float[Array, "pages kv_heads *v_places"] | None = None,
    k_rest: Float[Array, "pages kv_heads page_size rest"] | None = None,
    layer: Layer = 0,
    num_layers: int = 1,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: AttentionImplementation | None = None,
    packed_q: Float[Array, "blocks kv_heads block_rows head_dim"] | None = None,
    plan: dispatch.StepPlan | None = None,
    tiling: dispatch.KernelTilings | None = None,
) -> AttentionState:
    """Attends from ragged rows to the pages of their slots.

    A row attends to the keys at positions 0 to its own, or to the last `window` of
    them. With `ancestors` it attends instead to all positions below `context` of its
    slot, and to position `context + j` if `ancestors[row, j]`: the branches of a token
    tree are stored one after another there, and a chain is the lower triangle. A slot
    whose context is -1 has no tree, and its rows no ancestors.

    Args:
      q: queries. Query head h reads KV head `h // (q_heads // kv_heads)`.
      k_pages: keys of one layer, or of `num_layers` layers concatenated; of a floating
        type, or of 8 bits as `quantizing` makes them.
      v_pages: values of the same type, of any width; None if the values are the first
        `value_width` numbers of the keys, with the scales of the keys.
      page_ids: page table, with ids relative to the layer. An id that is no page of the
        layer is unmapped; no row may attend to a position of it.
      positions: position of each row; -1 for a padding row, which attends to no key.
      slots: slot of each row; rows of a slot are contiguous and in ascending order.
        None if all slots have the same number of rows, in order: one each to decode,
          several to verify drafts.
      value_width: width of the values in [1, head_dim], if `v_pages` is None.
      context: positions that every row of the slot attends to, or -1; required with
        `ancestors`.
      ancestors: mask of the slot's tree positions, see above.
      scale: factor on the scores; None means head_dim ** -0.5.
      window: number of latest keys of a row, at least 1; None means all. On a GPU,
        positions between two windows of a slot must not hold NaN.
      softcap: bound of the scores, above 0: softcap * tanh(score / softcap), after the
        scale and before `alibi`; None means none.
      alibi: slope of each query head: adds slope * (place - position) to a score.
      sinks: score of one more key with value 0 in each head. Of states that will be
        merged only one may have it.
      k_scales: only for 8-bit pages, scale of the keys of a page and head, or with one
        more axis of page_size, of each key.
      v_scales: only for 8-bit pages, scales of the values.
      k_rest: only for 8-bit pages without `v_pages`, further numbers of the keys, which
        are not quantized: head_dim is the sum of both widths.
      layer: index of the layer in the pages, in [0, num_layers).
      num_layers: number of layers in the pages, a divisor of the number of pages.
      numerics: "reproducible" makes the bits of a row independent of the batch.
      implementation: None, or the name of a required one. "reference" takes any
        sizes and types; "mosaic_gpu" needs a Hopper GPU, fast numerics, q and pages in
        bfloat16 or both in float16, head_dim 64, 128 or 256, values of the same width,
        pages of 16, 32, 64, 128 or 256 positions, and at most 64 query heads for a KV
        head. It also takes latent rows, of head_dim 576 and value_width 512 without
        v_pages, with one KV head, and at most 64 or a multiple of 64 query heads, in
        steps without `dispatch.has_prefill_rows`.
      packed_q: queries of the plan's few rows in packed form, if they are already
        written; None packs them here.
      plan: `make_plan` of the same rows, to share it among layers; None makes one if
        the implementation needs it.
      tiling: sizes that change the speed of "mosaic_gpu" and not its results; None
        means the plan's, else `dispatch.default_tilings`.

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
    value_width = checks.check_arrays(
        q, k_pages, v_pages, k_scales, v_scales, value_width, k_rest
    )
    checks.check_heads(q, sinks=sinks, alibi=alibi)
    if slots is None and (not page_ids.shape[0] or q.shape[0] % page_ids.shape[0]):
        raise ValueError(
            f"{q.shape[0]=} must be a multiple of {page_ids.shape[0]=} when slots is "
            "None"
        )
    if (context is None) != (ancestors is None):
        raise ValueError("context and ancestors must be given together")
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{softcap=} must be above 0, or None")
    if num_layers < 1 or k_pages.shape[0] % num_layers:
        raise ValueError(f"{num_layers=} must divide {k_pages.shape[0]=}")
    scale = q.shape[2] ** -0.5 if scale is None else scale
    scoring = ScoreTransform(scale, softcap, alibi, sinks)
    chosen = choose_attention(
        q,
        k_pages,
        value_width=value_width,
        has_v_pages=v_pages is not None,
        prefills=_has_prefill_rows(q, k_pages, page_ids, slots),
        numerics=numerics,
        implementation=implementation,
    )
    if chosen == "mosaic_gpu":
        if plan is not None and tiling not in (None, plan.tiling):
            raise ValueError(f"{tiling=} must be that of the plan, {plan.tiling}")
        if plan is None:
            plan = make_plan(
                q,
                k_pages,
                page_ids,
                positions,
                slots,
                value_width=value_width,
                context=context,
                ancestors=ancestors,
                window=window,
                implementation=implementation,
                tiling=tiling,
            )
        assert plan is not None
        out, lse = dispatch.dispatch_attention(
            q,
            k_pages,
            k_pages if v_pages is None and value_width == q.shape[2] else v_pages,
            page_ids,
            plan,
            scoring,
            window=window,
            value_width=value_width,
            packed_q=packed_q,
            layer=layer,
            num_layers=num_layers,
        )
        return AttentionState(out, lse)
    if num_layers > 1:
        page_ids = layered.flat_ids(
            page_ids,
            layer,
            num_layers=num_layers,
            num_pages=k_pages.shape[0] // num_layers,
        )
    (rows, q_heads, head_dim), kv_heads = q.shape, k_pages.shape[1]
    by_head = kv_heads, q_heads // kv_heads
    attend: Any = reference.attend_per_slot
    if numerics == "fast" and slots is None:
        few = max(1, 4 // max(page_ids.shape[0], 1))
        size = min(reference.MAX_BLOCK, few * reference.BLOCK)
        few_queries = rows * by_head[1] <= reference.FEW_QUERIES * page_ids.shape[0]
        attend = functools.partial(
            attend,
            block_size=size,
            one_by_one=devices.current_target().platform == "cpu"
            and q.dtype == jnp.float32
            and few_queries
            and page_ids.shape[0] <= reference.FEW_SLOTS,
        )
    elif numerics == "fast":
        attend = reference.attend_per_tile
    out, lse = reference.differentiable(
        attend,
        q.reshape(rows, *by_head, head_dim),
        PagedKV(k_pages, v_pages, k_scales, v_scales, value_width, k_rest),
        reference.View(page_ids, positions, slots, context, ancestors, window),
        scoring._replace(
            slopes=None if alibi is None else alibi.reshape(by_head),
            sinks=None if sinks is None else sinks.reshape(by_head),
        ),
    )
    out = out.reshape(rows, q_heads, value_width)
    return AttentionState(out, lse.reshape(rows, q_heads))


def make_plan(
    q: Float[Array, "rows q_heads head_dim"] | jax.ShapeDtypeStruct,
    k_pages: Num[Array, "pages kv_heads page_size key_width"] | jax.ShapeDtypeStruct,
    page_ids: Int[Array, "slots pages_per_slot"],
    positions: Int[Array, " rows"],
    slots: Int[Array, " rows"] | None = None,
    *,
    value_width: int | None = None,
    context: Int[Array, " slots"] | None = None,
    ancestors: Bool[Array, "rows columns"] | None = None,
    window: int | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: AttentionImplementation | None = None,
    tiling: dispatch.KernelTilings | None = None,
) -> dispatch.StepPlan | None:
    """Makes the plan of a step, which all layers share.

    Arguments are those of `paged_attention`; only shape and type of `q` and `k_pages`
    matter, and the shape of `page_ids`. A `value_width` of None is that of the keys.
    The plan keeps `tiling`, the sizes of the kernels.

    Returns:
      The plan; None if the reference computes the call, which needs none.

    Raises:
      ValueError: the requested implementation is unknown or does not support the call.
    """
    chosen = choose_attention(
        q,
        k_pages,
        value_width=value_width,
        prefills=_has_prefill_rows(q, k_pages, page_ids, slots),
        numerics=numerics,
        implementation=implementation,
    )
    if chosen != "mosaic_gpu":
        return None
    items, group = decode_plan.item_heads(q.shape[1], k_pages.shape[1])
    return dispatch.make_step_plan(
        positions,
        slots,
        num_slots=len(page_ids),
        kv_heads=items,
        group=group,
        head_dim=q.shape[2],
        context=context,
        ancestors=ancestors,
        window=window,
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


def _has_prefill_rows(q: Any, k_pages: Any, page_ids: Array, slots: Any) -> bool:
    return dispatch.has_prefill_rows(
        q.shape[0],
        num_slots=len(page_ids),
        group=decode_plan.item_heads(q.shape[1], k_pages.shape[1])[1],
        has_slots=slots is not None,
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
    some = jnp.where(total > 0, total, jnp.ones_like(total))

    def share(state: AttentionState, weight: Array) -> Array:
        out = state.out.astype(top.dtype) * (weight / some)[..., None]
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
    most, add_up = (functools.partial(x, axis_name=axis) for x in (lax.pmax, lax.psum))
    return _merge(state.out, state.lse, most, add_up)


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
    how: Any = {"axis": 0, "keepdims": True}
    most, add_up = (functools.partial(x, **how) for x in (jnp.max, jnp.sum))
    merged = _merge(out, lse, most, add_up)
    return AttentionState(merged.out[0], merged.lse[0])


def _merge(
    out: Float[Array, "*states rows q_heads value_width"],
    lse: Float[Array, "*states rows q_heads"],
    most: Callable[[Array], Array],
    add_up: Callable[[Array], Array],
) -> AttentionState:
    """Merges states, given the functions for the maximum and the sum over states."""
    top = most(lse)
    top = jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)
    weight = jnp.exp(lse - top)[..., None]
    empty = jnp.isneginf(lse)[..., None]
    own = jnp.where(empty, jnp.zeros((), top.dtype), out.astype(top.dtype))
    sums = add_up(jnp.concatenate([own * weight, weight], axis=-1))
    total = sums[..., -1]
    mean = sums[..., :-1] / jnp.where(total > 0, total, jnp.ones_like(total))[..., None]
    return AttentionState(mean.astype(out.dtype), top + jnp.log(total))
