"""The door to attention over pages: checks shapes, then picks an implementation.

A row is one query token: its slot names the table row with its keys, its position how
many of them it sees. Decode (one row a slot), chunks of prompts and drafts to verify
are all just rows. Kernels know pages and nothing above them: a layer is an offset that
the caller has added to the page ids, a request does not exist.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import cutting, planning, reference, targets

type AttentionImplementation = Literal["reference", "mosaic_gpu"]
"""Implementations by name; `None` takes the best one for platform and shape."""

CAPABILITY = "9.0"
"""GPUs that the Mosaic kernels are for, by CUDA compute capability: H100 and H200."""


class AttentionState(NamedTuple):
    """Attention of rows over some keys, ready to be merged with that over others."""

    out: Float[Array, "rows q_heads head_dim"]
    """Softmax-weighted values; 0 where a row saw no key."""
    lse: Float[Array, "rows q_heads"]
    """Natural log of the sum of exponentials of the scores; -inf where no key."""


def paged_attention(
    q: Float[Array, "rows q_heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "slots pages_per_slot"],
    positions: Int[Array, " rows"],
    slots: Int[Array, " rows"] | None = None,
    *,
    context: Int[Array, " slots"] | None = None,
    ancestors: Bool[Array, "rows columns"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi: Float[Array, " q_heads"] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: AttentionImplementation | None = None,
    plan: planning.Plan | None = None,
) -> AttentionState:
    """Attends from ragged rows to the pages of their slots.

    A row sees the keys at places 0 to its position, the last `window` of them if one is
    given. With `ancestors` it sees instead all places below `context` of its slot, and
    place `context + j` where `ancestors[row, j]`: a token tree's branches stand side
    by side there, and a chain is the lower triangle.

    Args:
      q: queries. Query head h reads KV head `h // (q_heads // kv_heads)`.
      k_pages: keys of one layer, or of all layers with ids offset by the layer.
      v_pages: values, likewise.
      page_ids: page of every place / page_size; an id outside [0, pages) is unmapped
        and must lie beyond what any row sees.
      positions: position of each row; -1 for a padding row, which sees nothing.
      slots: slot of each row, the rows of a slot side by side and in ascending order;
        None where row i is slot i.
      context: places that every row of the slot sees; needed with `ancestors`.
      ancestors: see above.
      scale: factor on the scores; None means head_dim ** -0.5.
      window: latest keys seen, at least 1; None means all.
      softcap: bound of the scores, above 0: softcap * tanh(score / softcap), after the
        scale and before `alibi`; None means none.
      alibi: slope of each query head: a score gains slope * (place - position).
      sinks: one more score a head, that takes weight and brings no value.
      numerics: "reproducible" gives a row the same bits in any company.
      implementation: None, or a name that must serve this call.
      plan: `make_plan` of the same rows, so that the layers of a model share it; None
        makes one where one is needed.

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
    q_heads, kv_heads = q.shape[1], k_pages.shape[1]
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads=} must be a multiple of {kv_heads=}")
    if slots is None and q.shape[0] != page_ids.shape[0]:
        raise ValueError(
            f"{q.shape[0]=} must be {page_ids.shape[0]=} when slots is None"
        )
    if (context is None) != (ancestors is None):
        raise ValueError("context and ancestors must be given together")
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be at least 1, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{softcap=} must be above 0, or None")
    scale = q.shape[2] ** -0.5 if scale is None else scale
    chosen = choose(q, k_pages, numerics=numerics, implementation=implementation)
    if chosen == "mosaic_gpu":
        from pallas_kernels import decode_mosaic_gpu  # Pallas loads only where it runs

        if plan is None:
            plan = make_plan(
                *(q, k_pages, page_ids, positions, slots),
                context=context,
                ancestors=ancestors,
                window=window,
                implementation=implementation,
            )
        assert plan is not None
        out, lse = decode_mosaic_gpu.attend(
            *(q, k_pages, v_pages, page_ids, plan),
            scale=scale,
            softcap=softcap,
            alibi=alibi,
            sinks=sinks,
            tiling=_tiling(q.shape[2]),
        )
        return AttentionState(out.astype(q.dtype), lse)
    view = reference.View(
        page_ids=page_ids,
        positions=positions,
        slots=slots,
        context=context,
        ancestors=ancestors,
    )
    group = q_heads // kv_heads
    q = (q * jnp.asarray(scale, q.dtype)).reshape(
        q.shape[0], kv_heads, group, q.shape[2]
    )
    scoring = reference.Scoring(
        window=window,
        softcap=softcap,
        alibi=None if alibi is None else alibi.reshape(kv_heads, group),
    )
    rows, head_dim = q.shape[0], q.shape[3]
    attend = reference.attend_per_row
    if numerics == "fast" and slots is None:
        few = max(1, 4 // max(rows, 1))
        size = min(reference.MAX_BLOCK, few * reference.BLOCK)
        attend = functools.partial(attend, block_size=size)
    elif numerics == "fast":
        attend = reference.attend_per_tile
    out, lse = attend(q, k_pages, v_pages, view, scoring=scoring)
    state = AttentionState(
        out.reshape(rows, q_heads, head_dim), lse.reshape(rows, q_heads)
    )
    return state if sinks is None else add_sinks(state, sinks)


def make_plan(
    q: Float[Array, "rows q_heads head_dim"] | jax.ShapeDtypeStruct,
    k_pages: Float[Array, "pages kv_heads page_size head_dim"] | jax.ShapeDtypeStruct,
    page_ids: Int[Array, "slots pages_per_slot"],
    positions: Int[Array, " rows"],
    slots: Int[Array, " rows"] | None = None,
    *,
    context: Int[Array, " slots"] | None = None,
    ancestors: Bool[Array, "rows columns"] | None = None,
    window: int | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: AttentionImplementation | None = None,
) -> planning.Plan | None:
    """Prepares what a kernel needs once a step, whatever the layer.

    Args:
      q: the queries, or only their shape and type.
      k_pages: the keys, likewise.
      page_ids: as for `paged_attention`, like all that follow; of these only the shape
        matters.
      positions: position of each row.
      slots: slot of each row.
      context: places that every row of the slot sees.
      ancestors: who sees whom beyond.
      window: latest keys seen.
      numerics: as will be asked for.
      implementation: likewise.

    Returns:
      The plan; None where the reference will serve the call, which needs none.

    Raises:
      ValueError: an implementation that is unknown or cannot serve the call.
    """
    chosen = choose(q, k_pages, numerics=numerics, implementation=implementation)
    if chosen != "mosaic_gpu":
        return None
    kv_heads = k_pages.shape[1]
    return planning.make_plan(
        *(positions, slots),
        num_slots=page_ids.shape[0],
        kv_heads=kv_heads,
        group=q.shape[1] // kv_heads,
        tiling=_tiling(q.shape[2]),
        context=context,
        ancestors=ancestors,
        window=window,
    )


def choose(
    q: Float[Array, "rows q_heads head_dim"] | jax.ShapeDtypeStruct,
    k_pages: Float[Array, "pages kv_heads page_size head_dim"] | jax.ShapeDtypeStruct,
    *,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: AttentionImplementation | None = None,
) -> AttentionImplementation:
    """Names the implementation that serves a call.

    Raises:
      ValueError: one is asked for that is unknown, or that cannot serve the call.
    """
    if implementation not in (None, "reference", "mosaic_gpu"):
        raise ValueError(f"{implementation=} must be None, 'reference' or 'mosaic_gpu'")
    if implementation == "reference":
        return "reference"
    kind, capability = device()
    if kind != "gpu":
        reason = f"the default backend is {kind}, not a GPU"
    elif capability != CAPABILITY:
        reason = f"the GPU has compute capability {capability}, not {CAPABILITY}"
    elif numerics != "fast":
        reason = f"{numerics=} needs sums that do not depend on the other rows"
    else:
        reason = planning.why_not(
            q_dtype=str(q.dtype),
            page_dtype=str(k_pages.dtype),
            group=q.shape[1] // k_pages.shape[1],
            head_dim=q.shape[2],
            page_size=k_pages.shape[2],
        )
    if reason is None:
        return "mosaic_gpu"
    if implementation == "mosaic_gpu":
        raise ValueError(f"implementation='mosaic_gpu': {reason}; 'reference' takes it")
    return "reference"


def device() -> tuple[str, str]:
    """Platform and compute capability of the device that programs are made for."""
    target = targets.current()
    return target.platform, target.capability


def _tiling(head_dim: int) -> cutting.Tiling:
    """The same for plan and kernel, which must agree."""
    target = targets.current()
    cores = target.num_cores if target.platform == "gpu" else 132
    return cutting.default_tiling(head_dim=head_dim, num_programs=cores)


def add_sinks(state: AttentionState, sinks: Float[Array, " q_heads"]) -> AttentionState:
    """Adds one score a head that takes weight and brings no value.

    Args:
      state: attention over all keys.
      sinks: the score of each query head.

    Returns:
      The state over the keys and the sink; unchanged where there was no key.
    """
    lse = jnp.logaddexp(state.lse, sinks.astype(state.lse.dtype)[None, :])
    share = jnp.exp(state.lse - lse)[..., None]
    some = ~jnp.isneginf(state.lse)
    out = (state.out.astype(lse.dtype) * share).astype(state.out.dtype)
    return AttentionState(
        jnp.where(some[..., None], out, state.out), jnp.where(some, lse, state.lse)
    )


def merge_states(first: AttentionState, second: AttentionState) -> AttentionState:
    """Attention over the keys of both states, which must be disjoint.

    Associative and commutative up to rounding; a state without keys is neutral.

    Args:
      first: state of some rows.
      second: state of the same rows over other keys.

    Returns:
      The state over all of these keys.

    Source: Dao et al. 2022, arXiv:2205.14135, section 3.1.
    """
    lse = jnp.logaddexp(first.lse, second.lse)
    total = jnp.where(jnp.isneginf(lse), jnp.zeros_like(lse), lse)
    wide = lse.dtype
    left, right = (
        state.out.astype(wide) * jnp.exp(state.lse - total)[..., None]
        for state in (first, second)
    )
    return AttentionState((left + right).astype(first.out.dtype), lse)
