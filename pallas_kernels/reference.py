"""What each kernel means, in plain jnp. Also what runs on a CPU.

Both ways of attending walk over blocks of `BLOCK` absolute positions with the online
softmax, stop at the last block that any row sees and start at the first. A block that
a row does not see changes none of its bits. Unmapped and unwritten places may hold
anything, NaN included.

Source of the online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

BLOCK = 64
"""Positions that are gathered and summed together."""
MAX_BLOCK = 256
"""The same for few rows, where starting an operation costs more than its work."""
TILE = 64
"""Rows of one slot that share a gather in `attend_per_tile`."""


class View(NamedTuple):
    """Which keys each row sees: the door's arguments, unpacked."""

    page_ids: Int[Array, "slots pages_per_slot"]
    positions: Int[Array, " rows"]
    slots: Int[Array, " rows"] | None
    context: Int[Array, " slots"] | None
    ancestors: Bool[Array, "rows columns"] | None


class Scoring(NamedTuple):
    """What becomes of a scaled product before the softmax."""

    window: int | None = None
    """Latest keys seen."""
    softcap: float | None = None
    """Bound of the scores."""
    alibi: Float[Array, "kv_heads group"] | None = None
    """Slope of each query head."""


class _Softmax(NamedTuple):
    """Running state of the online softmax of some queries."""

    top: Array
    total: Array
    out: Array


def attend_per_row(
    q: Float[Array, "rows kv_heads group head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    view: View,
    *,
    scoring: Scoring,
    block_size: int = BLOCK,
) -> tuple[
    Float[Array, "rows kv_heads group head_dim"], Float[Array, "rows kv_heads group"]
]:
    """Gathers every row's own pages: one row a slot, or results free of company.

    The queries are already scaled. Returns the output and the log-sum-exp.
    """
    rows, kv_heads, group, head_dim = q.shape
    page_ids, context, window = view.page_ids, view.context, scoring.window
    if view.slots is not None:
        slots = jnp.maximum(view.slots, 0)
        page_ids = page_ids[slots]
        context = None if context is None else context[slots]
    last = _last_seen(view.positions, context, view.ancestors)
    first = _first_seen(view.positions, window)

    def block(index: Array, state: _Softmax) -> _Softmax:
        places = index * block_size + jnp.arange(block_size, dtype=jnp.int32)
        seen = _visible(places, view.positions, context, view.ancestors, window)
        k = _gather(k_pages, page_ids, index, block_size)
        v = _gather(v_pages, page_ids, index, block_size, last)
        scores = jnp.einsum(
            "rhgd,rhtd->rhgt", q, k, preferred_element_type=state.top.dtype
        )
        away = (places[None, :] - view.positions[:, None])[:, None, None, :]
        scores = _bend(scores, away, scoring, (1, kv_heads, group, 1))
        weights, state = _reweigh(state, scores, seen[:, None, None, :])
        out = jnp.einsum(
            "rhgt,rhtd->rhgd",
            weights.astype(v.dtype),
            v,
            preferred_element_type=state.out.dtype,
        )
        return state._replace(out=state.out + out)

    state = lax.fori_loop(
        jnp.min(jnp.where(last >= 0, first, jnp.iinfo(jnp.int32).max)) // block_size,
        jnp.max(last) // block_size + 1,
        block,
        _start((rows, kv_heads, group), head_dim, q.dtype),
    )
    return _finish(state, q.dtype)


def attend_per_tile(
    q: Float[Array, "rows kv_heads group head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    view: View,
    *,
    scoring: Scoring,
) -> tuple[
    Float[Array, "rows kv_heads group head_dim"], Float[Array, "rows kv_heads group"]
]:
    """Gathers a slot's pages once for each `TILE` of its rows: chunks of prompts.

    The queries are already scaled. Returns the output and the log-sum-exp.
    """
    assert view.slots is not None
    rows, kv_heads, group, head_dim = q.shape
    window = scoring.window
    starts, num_tiles = _tiles(view.positions, view.slots)
    # Padding lets the last tile read TILE rows; padded rows have slot -1, seen by none.
    pad = lambda x, fill: jnp.pad(  # noqa: E731
        x,
        [(0, TILE)] + [(0, 0)] * (x.ndim - 1),
        constant_values=jnp.asarray(fill, x.dtype),
    )
    q, slots, positions = pad(q, 0), pad(view.slots, -1), pad(view.positions, -1)
    ancestors = None if view.ancestors is None else pad(view.ancestors, False)

    def tile(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        cut = lambda x: lax.dynamic_slice_in_dim(x, starts[index], TILE)  # noqa: E731
        slot = slots[starts[index]]
        mine = cut(slots) == slot
        tile_positions = jnp.where(mine, cut(positions), -1)
        tile_ancestors = None if ancestors is None else cut(ancestors) & mine[:, None]
        page_ids = lax.dynamic_slice_in_dim(view.page_ids, slot, 1)
        context = None if view.context is None else view.context[slot][None]
        last = jnp.max(_last_seen(tile_positions, context, tile_ancestors))
        first = jnp.min(
            jnp.where(mine, _first_seen(tile_positions, window), positions.max())
        )
        queries = cut(q).transpose(1, 2, 0, 3).reshape(kv_heads, group * TILE, head_dim)

        def block(index: Array, state: _Softmax) -> _Softmax:
            places = index * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
            seen = _visible(places, tile_positions, context, tile_ancestors, window)
            k = _gather(k_pages, page_ids, index, BLOCK)[0]
            v = _gather(v_pages, page_ids, index, BLOCK, last[None])[0]
            scores = jnp.einsum(
                "hqd,htd->hqt", queries, k, preferred_element_type=state.top.dtype
            ).reshape(kv_heads, group, TILE, BLOCK)
            away = (places[None, :] - tile_positions[:, None])[None, None]
            scores = _bend(scores, away, scoring, (kv_heads, group, 1, 1))
            weights, state = _reweigh(state, scores, seen[None, None])
            out = jnp.einsum(
                "hqt,htd->hqd",
                weights.astype(v.dtype).reshape(kv_heads, group * TILE, BLOCK),
                v,
                preferred_element_type=state.out.dtype,
            )
            return state._replace(out=state.out + out.reshape(state.out.shape))

        state = lax.fori_loop(
            first // BLOCK,
            last // BLOCK + 1,
            block,
            _start((kv_heads, group, TILE), head_dim, q.dtype),
        )
        out, lse = _finish(state, q.dtype)
        results = out.transpose(2, 0, 1, 3), lse.transpose(2, 0, 1)

        def put(whole: Array, part: Array) -> Array:
            mask = mine.reshape(TILE, *(1,) * (whole.ndim - 1))
            part = jnp.where(mask, part, cut(whole))
            return lax.dynamic_update_slice_in_dim(whole, part, starts[index], axis=0)

        return put(carry[0], results[0]), put(carry[1], results[1])

    wide = np.promote_types(q.dtype, np.float32)
    empty = (
        jnp.zeros_like(q),
        jnp.full((rows + TILE, kv_heads, group), -jnp.inf, wide),
    )
    out, lse = lax.fori_loop(0, num_tiles, tile, empty)
    return out[:rows], lse[:rows]


def _tiles(
    positions: Int[Array, " rows"], slots: Int[Array, " rows"]
) -> tuple[Int[Array, " rows"], Int[Array, ""]]:
    """First rows of the tiles, in order, and how many tiles there are."""
    rows = slots.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)
    previous = jnp.concatenate([jnp.full((1,), -1, slots.dtype), slots[:-1]])
    begin = lax.cummax(jnp.where(slots != previous, row, 0))
    starts = (positions >= 0) & ((row - begin) % TILE == 0)
    place = jnp.where(starts, jnp.cumsum(starts, dtype=jnp.int32) - 1, rows)
    order = jnp.zeros((rows,), jnp.int32).at[place].set(row, mode="drop")
    return order, jnp.sum(starts, dtype=jnp.int32)


def _last_seen(positions, context, ancestors):
    """Last place a row may see; -1 for padding rows."""
    if ancestors is None:
        return positions
    columns = jnp.arange(1, ancestors.shape[1] + 1, dtype=jnp.int32)
    reach = context - 1 + jnp.max(jnp.where(ancestors, columns, 0), axis=1)
    return jnp.where(positions >= 0, reach, -1)


def _first_seen(positions, window):
    first = 0 if window is None else jnp.maximum(positions - window + 1, 0)
    return jnp.broadcast_to(jnp.asarray(first, jnp.int32), positions.shape)


def _visible(places, positions, context, ancestors, window):
    """Whether each row sees each place: `[rows, places]`."""
    place, position = places[None, :], positions[:, None]
    if ancestors is None:
        seen = place <= position
    else:
        column = place - context[:, None]
        inside = (column >= 0) & (column < ancestors.shape[1])
        column = jnp.broadcast_to(column, (positions.shape[0], places.shape[0]))
        kin = jnp.take_along_axis(ancestors, jnp.where(inside, column, 0), axis=1)
        seen = ((column < 0) | (kin & inside)) & (position >= 0)
    if window is not None:
        seen &= place > position - window
    return seen


def _gather(pages, page_ids, index, block_size, last=None):
    """One block of keys or values: `[rows, kv_heads, block_size, head_dim]`.

    Places beyond `last` read as 0. Indexed by (page, head, part of a page), so that the
    result needs no transposition, and kept two-dimensional until it is whole: long rows
    are what a CPU copies fastest.
    """
    num_pages, kv_heads, page_size, head_dim = pages.shape
    part = math.gcd(page_size, block_size)
    parts_per_page, parts = page_size // part, block_size // part
    which = index * parts + jnp.arange(parts, dtype=jnp.int32)
    column = which // parts_per_page
    rows, width = page_ids.shape
    ids = page_ids[:, jnp.minimum(column, width - 1)]
    mapped = (column < width)[None, :] & (ids >= 0) & (ids < num_pages)
    ids = jnp.where(mapped, ids, 0)
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    address = (ids[:, None, :] * kv_heads + head) * parts_per_page
    address = (address + (which % parts_per_page)[None, None, :]).reshape(-1)
    flat = pages.reshape(num_pages * kv_heads * parts_per_page, part * head_dim)
    found = flat.at[address].get(mode="promise_in_bounds")
    if last is not None:
        known = (last[:, None] + 1 - which[None, :] * part) * head_dim
        known = jnp.broadcast_to(known[:, None, :], (rows, kv_heads, parts))
        element = jnp.arange(part * head_dim, dtype=jnp.int32)
        held = element[None, :] < known.reshape(-1)[:, None]
        found = jnp.where(held, found, _zero(found))
    return lax.optimization_barrier(found).reshape(rows, kv_heads, block_size, head_dim)


def _bend(scores, away, scoring: Scoring, heads: tuple[int, ...]) -> Array:
    """Caps the scores, then lowers those of distant places."""
    if scoring.softcap is not None:
        cap = jnp.asarray(scoring.softcap, scores.dtype)
        scores = cap * jnp.tanh(scores / cap)
    if scoring.alibi is not None:
        slopes = scoring.alibi.astype(scores.dtype).reshape(heads)
        scores = scores + slopes * away.astype(scores.dtype)
    return scores


def _start(shape, head_dim, dtype) -> _Softmax:
    wide = np.promote_types(dtype, np.float32)
    # Not -inf: the difference of two of them would be NaN.
    top = jnp.full(shape, jnp.finfo(wide).min, wide)
    return _Softmax(top, jnp.zeros(shape, wide), jnp.zeros((*shape, head_dim), wide))


def _reweigh(state: _Softmax, scores, seen) -> tuple[Array, _Softmax]:
    """Weights of a block under the new maximum, and the old state scaled to it."""
    lowest = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
    scores = jnp.where(seen, scores, lowest)
    top = jnp.maximum(state.top, scores.max(-1))
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), _zero(scores))
    decay = jnp.exp(state.top - top)
    total = state.total * decay + weights.sum(-1)
    return weights, _Softmax(top, total, state.out * decay[..., None])


def _finish(state: _Softmax, dtype) -> tuple[Array, Array]:
    some = state.total > 0
    total = jnp.where(some, state.total, jnp.ones_like(state.total))
    out = (state.out / total[..., None]).astype(dtype)
    lse = jnp.where(some, state.top + jnp.log(total), -jnp.inf)
    return out, lse.astype(total.dtype)


def _zero(x: Array) -> Array:
    return jnp.zeros((), x.dtype)
