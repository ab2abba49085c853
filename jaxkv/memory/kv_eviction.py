"""KV eviction: which tokens each KV head keeps, and their move to the first pages.

Every KV head of every layer keeps the same number of tokens, the budget, but tokens of
its own. K and V of these tokens move to the first places of the request's pages, in
order, so one page table serves all heads, and the emptied pages return to the pool.
Keys are stored with encoded positions, so a token's position does not change with its
place: `Table.position` counts true tokens, `Table.length` the places.

Evictions happen at lengths that depend on the request alone: at the end of a prompt
above the budget, and, by rules that continue, whenever the cache has `budget +
page_size` tokens. Steps end their rows there, so a request keeps the same tokens for
any chunks, batch and preemption by recomputation.

Quest evicts no token: the pages have a `PageSelection` as their layout, which lets a
token of an answer attend to the pages with the largest bounds of its products only.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays, validation
from jaxkv.memory.demand import Size
from jaxkv.memory.kv_layout import KVLayout
from jaxkv.memory.kv_pages import (
    Pages,
    Rows,
    flatten_layers,
    locate,
    slots_of,
    unflatten_layers,
)
from jaxkv.memory.page_pool import NO_PAGE
from pallas_kernels.layered import Layer, flat_ids
from pallas_kernels.paged_attention import (
    PagedKV,
    RowView,
    ScoreTransform,
    paged_attention,
)

EvictionRule = Literal["streaming-llm", "h2o", "snapkv", "keydiff", "quest"]

NUM_SINKS = 4
"""First tokens that StreamingLLM keeps (its section 3.2)."""
POOL_WIDTH = 7
"""Neighbouring tokens whose largest attention SnapKV takes (its section 5)."""


class CachedTokens(NamedTuple):
    """The tokens of a request in the cache of one layer, input of a rule."""

    keys: Float[Array, "tokens kv_heads head_dim"]
    """Keys by place, arbitrary from `length` on."""
    length: Int32[Array, ""]
    """Number of tokens, above the budget."""
    queries: Float[Array, "window q_heads head_dim"] | None
    """Scaled queries of the last tokens, in order; None if the rule reads none."""
    num_queries: Int32[Array, ""] | None
    """Number of these that are valid, the last ones."""
    attention: Float[Array, "kv_heads tokens"] | None
    """Attention that each token got so far; None if the rule reads none."""


def streaming_llm(tokens: CachedTokens, budget: int) -> Int32[Array, "kv_heads budget"]:
    """Keeps the first tokens, the attention sinks, and the latest ones.

    Keys keep the rotation of their true positions; in the paper, positions are those
    inside the cache.

    Source: Xiao et al. 2023, arXiv:2309.17453, section 3.2.
    """
    place = jnp.arange(tokens.keys.shape[0], dtype=jnp.int32)
    scores = jnp.where(place < NUM_SINKS, jnp.inf, place.astype(jnp.float32))
    scores = jnp.broadcast_to(scores, (tokens.keys.shape[1], place.size))
    return select_tokens(scores, tokens.length, budget)


def h2o(tokens: CachedTokens, budget: int) -> Int32[Array, "kv_heads budget"]:
    """Keeps the tokens with the largest accumulated attention, and the latest ones.

    Half of the budget is for each kind. The attention is that of the queries of the
    answer and of the last `window` tokens before the first eviction, summed over the
    query heads of a KV head; in the paper, that of all queries of one head.

    Source: Zhang et al. 2023, arXiv:2306.14048, section 4.
    """
    assert tokens.attention is not None
    place = jnp.arange(tokens.keys.shape[0], dtype=jnp.int32)
    is_recent = place >= tokens.length - (budget - budget // 2)
    scores = jnp.where(is_recent, jnp.inf, tokens.attention)
    return select_tokens(scores, tokens.length, budget)


def snapkv(tokens: CachedTokens, budget: int) -> Int32[Array, "kv_heads budget"]:
    """Keeps the last `window` tokens, and the tokens that these attend to most.

    The attention of a token is summed over the window, and pooled with its neighbours
    by the maximum; queries of one KV head are summed too.

    Source: Li et al. 2024, arXiv:2404.14469, section 4.
    """
    assert tokens.queries is not None
    place = jnp.arange(tokens.keys.shape[0], dtype=jnp.int32)
    in_window = place >= tokens.length - tokens.queries.shape[0]
    scores = jnp.where(in_window, 0.0, window_attention(tokens))
    scores = lax.reduce_window(
        scores, -jnp.inf, lax.max, (1, POOL_WIDTH), (1, 1), "SAME"
    )
    scores = jnp.where(in_window, jnp.inf, scores)
    return select_tokens(scores, tokens.length, budget)


def keydiff(tokens: CachedTokens, budget: int) -> Int32[Array, "kv_heads budget"]:
    """Keeps the tokens whose keys are least similar to the mean of all directions.

    Source: Park et al. 2025, arXiv:2504.15364, section 3.
    """
    place = jnp.arange(tokens.keys.shape[0], dtype=jnp.int32)[:, None, None]
    keys = jnp.where(place < tokens.length, tokens.keys.astype(jnp.float32), 0.0)
    norm = jnp.sqrt(jnp.sum(keys * keys, axis=2, keepdims=True))
    keys = keys / jnp.maximum(norm, jnp.float32(1e-12))
    # The length of the mean does not change the order.
    similarity = jnp.sum(keys * jnp.sum(keys, axis=0, keepdims=True), axis=2)
    return select_tokens(-similarity.T, tokens.length, budget)


EVICTION_RULES: dict[
    EvictionRule, Callable[[CachedTokens, int], Int32[Array, "kv_heads budget"]]
] = {
    "streaming-llm": streaming_llm,
    "h2o": h2o,
    "snapkv": snapkv,
    "keydiff": keydiff,
}
"""The rules that evict tokens."""
READS_QUERIES = ("h2o", "snapkv")
"""Rules that read the queries of the last tokens."""
CONTINUES = ("streaming-llm", "h2o", "keydiff")
"""Rules that evict again while the answer grows."""


def select_tokens(
    scores: Float[Array, "kv_heads tokens"], length: Int32[Array, ""], budget: int
) -> Int32[Array, "kv_heads budget"]:
    """Returns the places of the `budget` largest scores of each head, in order.

    Of equal scores the earlier place is selected.
    """
    place = jnp.arange(scores.shape[1], dtype=jnp.int32)
    scores = jnp.where(place[None, :] < length, scores, -jnp.inf)
    return jnp.sort(lax.top_k(scores, budget)[1].astype(jnp.int32), axis=1)


def window_attention(tokens: CachedTokens) -> Float[Array, "kv_heads tokens"]:
    """Returns the attention of each token from the last queries, summed over them."""
    queries = tokens.queries
    assert queries is not None
    assert tokens.num_queries is not None
    num, heads, width = queries.shape
    num_kv_heads = tokens.keys.shape[1]
    queries = queries.astype(jnp.float32)
    queries = queries.reshape(num, num_kv_heads, heads // num_kv_heads, width)
    keys = tokens.keys.astype(jnp.float32)
    products = jnp.einsum("qkgd,tkd->kqgt", queries, keys)
    index = jnp.arange(num, dtype=jnp.int32)[:, None]
    place = jnp.arange(keys.shape[0], dtype=jnp.int32)[None, :]
    is_seen = place <= tokens.length - num + index
    products = jnp.where(is_seen[None, :, None, :], products, -jnp.inf)
    weights = jax.nn.softmax(products, axis=-1)
    is_valid = index >= num - tokens.num_queries
    weights = jnp.where(is_valid[None, :, :, None], weights, 0.0)
    return jnp.sum(weights, axis=(1, 2))


@validation.checks_numbers()
def feeding_end(
    position: Int32[Array, "*n"], prompt: Int32[Array, "*n"], limit: Size
) -> Int32[Array, "*n"]:
    """Returns the length of the cache at which the rows of a step end.

    Args:
      position: tokens fed so far.
      prompt: tokens of the prompt.
      limit: length of the cache at which rules that continue evict.
    """
    return jnp.where(position < prompt, prompt, limit)


@validation.checks_numbers()
def eviction_due(
    length: Int32[Array, "*n"],
    position: Int32[Array, "*n"],
    prompt: Int32[Array, "*n"],
    budget: Size,
    limit: Size,
) -> tuple[Bool[Array, "*n"], Bool[Array, "*n"]]:
    """Returns where tokens are evicted: after a prompt, and in an answer.

    `length` are the tokens in the cache; other arguments as in `feeding_end`.
    """
    after_prompt = (position == prompt) & (length > budget)
    return after_prompt, (position > prompt) & (length >= limit)


@validation.checks_numbers()
def query_places(
    rows: Rows, *, window: int
) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
    """Returns the slot, and the index in its ring of queries, where each row writes.

    The slot is -1 on padding rows, and on rows that later rows would overwrite.
    """
    slot = slots_of(rows)
    position = rows.position
    num_slots = rows.page_ids.shape[0]
    at = jnp.where(position >= 0, slot, -1)
    last = arrays.put(jnp.full((num_slots,), -1, jnp.int32), at, position, "max")
    is_last = position > arrays.take(last, at, fill=0) - window
    return jnp.where(is_last, at, -1), position % window


@validation.checks_numbers(layer=0)
def write_queries(
    pages: Pages,
    layer: Layer,
    q: Float[Array, "rows q_heads head_dim"],
    places: tuple[Int32[Array, " rows"], Int32[Array, " rows"]],
    scale: float,
) -> Pages:
    """Writes the scaled queries of rows to the rings of their slots, in place."""
    assert pages.queries is not None
    slot, index = places
    # One flat axis of layers and slots, so that no layer is sliced out.
    rings = pages.queries
    flat = rings.reshape(-1, *rings.shape[2:])
    row = jnp.where(slot >= 0, layer * rings.shape[1] + slot, -1)
    scaled = (q * jnp.asarray(scale, q.dtype)).astype(rings.dtype)
    flat = arrays.put(flat, (row, index), scaled)
    return pages._replace(queries=flat.reshape(rings.shape))


@validation.checks_numbers()
def evict_kv(
    pages: Pages,
    page_ids: Int32[Array, "slots columns"],
    length: Int32[Array, " slots"],
    position: Int32[Array, " slots"],
    is_due: Bool[Array, " slots"],
    *,
    rule: EvictionRule,
    budget: int,
) -> Pages:
    """Evicts tokens of slots: moves those that each head keeps to the first places.

    Args:
      pages: the pages, donated or carried.
      page_ids: the page table, up to the last column in use.
      length: tokens in the cache of each slot.
      position: tokens fed so far.
      is_due: slots whose tokens are evicted.
      rule: name of the rule, static.
      budget: number of tokens that every head keeps, static.

    Returns:
      The new pages; those beyond the budget are not used any more.
    """
    num_layers = pages.num_layers
    due = arrays.marked_indices(is_due, is_due.shape[0])

    def one_layer(index: Array, pages: Pages) -> Pages:
        layer = index % num_layers
        slot = due[index // num_layers]
        ids = page_ids[slot]
        num = length[slot]
        keys = pages.layout.read(pages, layer, ids[None])[0][0]
        tokens = CachedTokens(keys, num, None, None, None)
        if (rings := pages.queries) is not None:
            window = rings.shape[2]
            ring = (position[slot] + jnp.arange(window, dtype=jnp.int32)) % window
            was_evicted = position[slot] > num
            num_new = jnp.where(was_evicted, num - budget, window)
            tokens = tokens._replace(
                queries=rings[layer, slot][ring],
                num_queries=jnp.minimum(num_new, jnp.minimum(num, window)),
            )
            if pages.attention is not None:
                attention = window_attention(tokens)
                before = pages.attention[layer, ids].swapaxes(0, 1)
                before = before.reshape(attention.shape)
                # Later places have sums of other tokens.
                place = jnp.arange(keys.shape[0], dtype=jnp.int32)
                has_sum = was_evicted & (place < budget)
                attention += jnp.where(has_sum[None, :], before, 0.0)
                tokens = tokens._replace(attention=attention)
        selected = EVICTION_RULES[rule](tokens, budget)
        return _compact(pages, layer, ids, selected, tokens.attention)

    num_trips = jnp.sum(is_due, dtype=jnp.int32) * num_layers
    return lax.fori_loop(0, num_trips, one_layer, pages)


def _compact(
    pages: Pages,
    layer: Array,
    page_ids: Int32[Array, " columns"],
    selected: Int32[Array, "kv_heads budget"],
    attention: Float[Array, "kv_heads tokens"] | None,
) -> Pages:
    """Moves the selected tokens of each head to the first places of its request."""
    size = pages.page_size
    head = jnp.arange(selected.shape[0], dtype=jnp.int32)[:, None]
    target = jnp.arange(selected.shape[1], dtype=jnp.int32)[None, :]

    def at(place: Array) -> tuple[Array, ...]:
        return layer, page_ids[place // size], head, place % size

    def one_leaf(leaf: Array) -> Array:
        return leaf.at[at(target)].set(leaf[at(selected)])

    k, v = jax.tree.map(one_leaf, (pages.k, pages.v))
    pages = pages._replace(k=k, v=v)
    if (sums := pages.attention) is None:
        return pages
    assert attention is not None
    values = jnp.take_along_axis(attention, selected, axis=1)
    return pages._replace(attention=sums.at[at(target)].set(values))


@validation.checks_numbers()
def quest(
    queries: Float[Array, "kv_heads group head_dim"],
    bounds: Float[Array, "columns kv_heads 2 head_dim"],
    last: Int32[Array, ""],
    num_pages: int,
) -> Int32[Array, "kv_heads num_pages"]:
    """Selects the pages that each KV head of a token reads: the last, and the best.

    A page's score is an upper bound of the products with its keys: in each channel the
    larger of the query times the smallest and times the largest number, summed over the
    channels. Query heads of one KV head share the selection, by the sum of their
    bounds; in the paper, each head selects.

    Args:
      queries: queries of the token.
      bounds: largest keys, and largest negated keys, of each page of the request.
      last: column of the token's own page, at least `num_pages` - 1.
      num_pages: number of pages to select, static.

    Returns:
      Columns of the page table, in order; the last one is `last`.

    Source: Tang et al. 2024, arXiv:2406.10774, section 3.3 and algorithm 1.
    """
    queries = queries.astype(jnp.float32)
    # A positive query has its largest product with the largest key, a negative one with
    # the smallest key.
    signed = jnp.stack([jnp.maximum(queries, 0), jnp.maximum(-queries, 0)], axis=2)
    signed = jnp.sum(signed, axis=1)
    scores = jnp.sum(signed[None] * bounds.astype(jnp.float32), axis=(2, 3)).T
    column = jnp.arange(bounds.shape[0], dtype=jnp.int32)[None, :]
    scores = jnp.where(column == last, jnp.inf, scores)
    return select_tokens(scores, last + 1, num_pages)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PageSelection(KVLayout):
    """The layout of "quest": rows of answers attend to selected pages only.

    Rows of prompts, and rows with at most `num_selected` pages, attend to all pages. A
    row's selection depends on full pages before its own, thus not on chunks and batch.
    `Pages.key_bounds` has the bounds of the keys, and `Rows.in_answer` marks the rows.
    """

    num_selected: int = 1
    """Pages that each KV head reads."""

    def write(
        self,
        pages: Pages,
        layer: Layer,
        k: Float[Array, "rows kv_heads head_dim"],
        v: Float[Array, "rows kv_heads value_width"] | None,
        rows: Rows,
    ) -> Pages:
        """Writes K and V of rows, and updates the bounds of their pages."""
        pages = super().write(pages, layer, k, v, rows)
        assert pages.key_bounds is not None
        page, offset = locate(rows, page_size=pages.page_size)
        sizes = {"num_layers": pages.num_layers, "num_pages": pages.num_pages}
        ids = flat_ids(page, layer, **sizes)
        bounds = flatten_layers(pages.key_bounds)
        new = jnp.stack([k, -k], axis=2).astype(bounds.dtype)
        # The first token of a page replaces the bounds of the page's former tokens.
        bounds = arrays.put(bounds, jnp.where(offset == 0, ids, -1), new)
        bounds = arrays.put(bounds, ids, new, "max")
        bounds = unflatten_layers(bounds, pages.key_bounds.shape)
        return pages._replace(key_bounds=bounds)

    def attend(
        self,
        pages: Pages,
        layer: Layer,
        q: Float[Array, "rows q_heads head_dim"],
        rows: Rows,
        *,
        scoring: ScoreTransform | None = None,
        numerics: Literal["fast", "reproducible"] = "fast",
        **options: object,
    ) -> Float[Array, "rows q_heads head_dim"]:
        """Computes attention as `KVLayout.attend`, of some rows over selected pages.

        Other `options` have no effect: the engine refuses windows and meshes, and the
        plan of all rows does not fit.
        """
        size = pages.page_size
        bounds = pages.key_bounds
        assert bounds is not None
        assert rows.in_answer is not None
        selects = rows.in_answer & (rows.places // size >= self.num_selected)
        dense = rows._replace(position=jnp.where(selects, -1, rows.position))
        out = super().attend(pages, layer, q, dense, scoring=scoring, numerics=numerics)
        # As many rows at a time as there are slots: one pass for a step of decoding.
        num = rows.page_ids.shape[0]
        due = arrays.marked_indices(selects, -(-q.shape[0] // num) * num)
        slot = slots_of(rows)
        heads = pages.num_kv_heads
        head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
        # Every KV head of a page becomes a page of one head.
        k, v = (x.reshape(-1, 1, *x.shape[3:]) for x in (pages.k, pages.v))
        kv = PagedKV(k, v, layer=layer, num_layers=pages.num_layers)

        def attend_rows(index: Array, out: Array) -> Array:
            row = lax.dynamic_slice_in_dim(due, index * num, num)
            place = arrays.take(rows.places, row, fill=-1)
            ids = rows.page_ids[slot[row]]
            queries = q[row].reshape(num, heads, -1, q.shape[2])
            page_bounds = arrays.take(bounds, (layer, ids), fill=0)
            last = jnp.maximum(place // size, self.num_selected - 1)
            select = functools.partial(quest, num_pages=self.num_selected)
            columns = jax.vmap(select)(queries, page_bounds, last)
            selected = jnp.take_along_axis(ids[:, None, :], columns, axis=2)
            selected = jnp.where(selected < 0, NO_PAGE, selected * heads + head)
            # Places among the selected pages, of which the row's own is the last.
            place = (self.num_selected - 1) * size + place % size
            place = jnp.where(row >= 0, place, -1)
            state = paged_attention(
                queries.reshape(num * heads, -1, q.shape[2]),
                kv,
                RowView(selected.reshape(num * heads, -1), jnp.repeat(place, heads)),
                scoring,
                numerics=numerics,
            )
            return arrays.put(out, row, state.out.reshape(num, -1, q.shape[2]))

        num_trips = (jnp.sum(selects, dtype=jnp.int32) + num - 1) // num
        return lax.fori_loop(0, num_trips, attend_rows, out)
