"""The door to attention over pages: checks shapes, then picks an implementation.

A row is one query token: its slot names the table row with its keys, its position how
many of them it sees. Decode (one row a slot), chunks of prompts and drafts to verify
are all just rows. Kernels know pages and nothing above them: a layer is an offset that
the caller has added to the page ids, a request does not exist.
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
"""Implementations by name; `None` takes the best one for platform and shape."""


class AttentionState(NamedTuple):
    """Attention of rows over some keys, ready to be merged with that over others."""

    out: Float[Array, "rows q_heads value_width"]
    """Softmax-weighted values; 0 where a row saw no key."""
    lse: Float[Array, "rows q_heads"]
    """Natural log of the sum of exponentials of the scores; -inf where no key."""


def paged_attention(
    q: Float[Array, "rows q_heads head_dim"],
    k_pages: Num[Array, "pages kv_heads page_size head_dim"],
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
    layer: Layer = 0,
    num_layers: int = 1,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: AttentionImplementation | None = None,
    packed_q: Float[Array, "blocks kv_heads block_rows head_dim"] | None = None,
    plan: dispatch.StepPlan | None = None,
    tiling: dispatch.KernelTilings | None = None,
) -> AttentionState:
    """Attends from ragged rows to the pages of their slots.

    A row sees the keys at places 0 to its position, the last `window` of them if one is
    given. With `ancestors` it sees instead all places below `context` of its slot, and
    place `context + j` where `ancestors[row, j]`: a token tree's branches stand side
    by side there, and a chain is the lower triangle. A slot whose context is -1 has no
    tree, and its rows no ancestors.

    Args:
      q: queries. Query head h reads KV head `h // (q_heads // kv_heads)`.
      k_pages: keys of one layer, or of `num_layers` one after another; of a floating
        type, or of 8 bits as `quantizing` makes them.
      v_pages: values of the same type, of any width; None where the values are the
        first `value_width` numbers of the keys, with the scales of the keys.
      page_ids: page of every place / page_size, counted from the layer's first; an id
        that none of its pages has is unmapped and must hold no place that any row sees.
      positions: position of each row; -1 for a padding row, which sees nothing.
      slots: slot of each row, the rows of a slot side by side and in ascending order;
        None where all slots have as many rows, in order: one each to decode, several
        to verify drafts.
      value_width: width of the values in [1, head_dim] where `v_pages` is None.
      context: places that every row of the slot sees, or -1; needed with `ancestors`.
      ancestors: see above.
      scale: factor on the scores; None means head_dim ** -0.5.
      window: latest keys seen, at least 1; None means all. On a GPU places between two
        windows of a slot, that no row sees, must hold numbers.
      softcap: bound of the scores, above 0: softcap * tanh(score / softcap), after the
        scale and before `alibi`; None means none.
      alibi: slope of each query head: a score gains slope * (place - position).
      sinks: one more score a head, that takes weight and brings no value. Of states to
        be merged only one may have it.
      k_scales: of 8-bit pages alone, the factor on the keys of a page and head, or with
        an axis of page_size more on each of them.
      v_scales: likewise on the values.
      layer: which of the layers in the pages, in [0, num_layers).
      num_layers: how many these are, a divisor of their number.
      numerics: "reproducible" gives a row the same bits in any batch.
      implementation: None, or a name that must serve this call. "reference" takes any
        sizes and types; "mosaic_gpu" needs a Hopper GPU, fast numerics, q and pages in
        bfloat16 or both in float16, head_dim 64, 128 or 256, values of the same width,
        pages of 16, 32, 64, 128 or 256 places, and at most 64 query heads for a KV
        head.
      packed_q: the queries as the plan's few rows are packed, by whoever wrote them;
        None packs them where it is needed.
      plan: `make_plan` of the same rows, so that the layers of a model share it; None
        makes one where one is needed.
      tiling: sizes that change the speed of "mosaic_gpu" and nothing of the meaning;
        None takes the plan's, else `dispatch.default_tilings`.

    Returns:
      Output in the type of q, and the log-sum-exp in float32 (float64 if q is).

    Raises:
      ValueError: shapes that do not fit each other, or an implementation that is
        unknown or cannot serve the call.

    Sources: Kwon et al. 2023, arXiv:2309.06180, eq. 4; trees, Miao et al. 2024,
    arXiv:2305.09781, section 4; softcap, Gemma 2, arXiv:2408.00118, section 2; ALiBi,
    Press et al. 2022, arXiv:2108.12409, section 3; sinks, gpt-oss, arXiv:2508.10925,
    section 2.
    """
    value_width = checks.check_arrays(
        q, k_pages, v_pages, k_scales, v_scales, value_width
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
            k_pages if v_pages is None else v_pages,
            page_ids,
            plan,
            scoring,
            window=window,
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
        PagedKV(k_pages, v_pages, k_scales, v_scales, value_width),
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
    k_pages: Num[Array, "pages kv_heads page_size head_dim"] | jax.ShapeDtypeStruct,
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
    """Prepares what a kernel needs once a step, whatever the layer.

    Arguments are those of `paged_attention`; of `q` and `k_pages` only shape and type
    matter, of `page_ids` the shape; a `value_width` of None is that of the keys. The
    plan keeps `tiling`, the sizes of the kernels.

    Returns:
      The plan; None where the reference will serve the call, which needs none.

    Raises:
      ValueError: an implementation that is unknown or cannot serve the call.
    """
    chosen = choose_attention(
        q,
        k_pages,
        value_width=value_width,
        numerics=numerics,
        implementation=implementation,
    )
    if chosen != "mosaic_gpu":
        return None
    kv_heads = k_pages.shape[1]
    return dispatch.make_step_plan(
        positions,
        slots,
        num_slots=len(page_ids),
        kv_heads=kv_heads,
        group=q.shape[1] // kv_heads,
        head_dim=q.shape[2],
        context=context,
        ancestors=ancestors,
        window=window,
        tiling=tiling,
    )


def choose_attention(
    q: Float[Array, "rows q_heads head_dim"] | jax.ShapeDtypeStruct,
    k_pages: Num[Array, "pages kv_heads page_size head_dim"] | jax.ShapeDtypeStruct,
    *,
    value_width: int | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: AttentionImplementation | None = None,
) -> AttentionImplementation:
    """Names the implementation that serves a call.

    A `value_width` of None is that of the keys.

    Raises:
      ValueError: one is asked for that is unknown, or that cannot serve the call.
    """

    def refusal() -> str | None:
        if numerics != "fast":
            return f"{numerics=} needs sums that do not depend on the other rows"
        return decode_plan.decode_unsupported_reason(q, k_pages, value_width)

    return devices.choose_implementation(implementation, refusal)


def merge_states(first: AttentionState, second: AttentionState) -> AttentionState:
    """Attention over the keys of both states, which must be disjoint.

    Associative and commutative up to rounding, so any number of states merge in any
    order. A state without keys is neutral, whatever its output holds.

    Args:
      first: state of some rows.
      second: state of the same rows over other keys.

    Returns:
      The state over all of these keys, its output in the type of the first one's.

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
    """Attention over the keys of all devices of a mesh's axis, on each of them.

    For functions inside `jax.shard_map`. Each of p devices has a state of the same rows
    over keys of its own, none of them there twice, and sends 2 (p - 1) / p of
    `rows * q_heads * (value_width + 2)` numbers of the type of the log-sum-exp: in two
    all-reduces, of the greatest one and of the weighted sums.

    Source: Dao et al. 2022, arXiv:2205.14135, section 3.1.
    """
    most, add_up = (functools.partial(x, axis_name=axis) for x in (lax.pmax, lax.psum))
    return _merge(state.out, state.lse, most, add_up)


def merge_own_rows(state: AttentionState, axis: str) -> AttentionState:
    """As `merge_devices`, but each device gets its part of the rows alone.

    Device d of p gets the `rows / p` from d `rows / p` on. It sends (p - 1) / p of its
    state, outputs and log-sum-exps in their types: in two all-to-alls, as a
    reduce-scatter would need the greatest log-sum-exp of all before.

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
    """Merges states by what finds the greatest of all, and what adds all up."""
    top = most(lse)
    top = jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)
    weight = jnp.exp(lse - top)[..., None]
    empty = jnp.isneginf(lse)[..., None]
    own = jnp.where(empty, jnp.zeros((), top.dtype), out.astype(top.dtype))
    sums = add_up(jnp.concatenate([own * weight, weight], axis=-1))
    total = sums[..., -1]
    mean = sums[..., :-1] / jnp.where(total > 0, total, jnp.ones_like(total))[..., None]
    return AttentionState(mean.astype(out.dtype), top + jnp.log(total))
