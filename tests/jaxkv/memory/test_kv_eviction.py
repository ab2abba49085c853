"""Rules of KV eviction equal those of NumPy, and tokens move with all their leaves."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import memory
from jaxkv.memory import EVICTION_RULES, CachedTokens, Rows, make_pages
from tests.support import evictions

SIZE = 4
COLUMNS = 6
HEADS = 2
WIDTH = 8
WINDOW = 5
BUDGET = 10


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("length", [BUDGET + 1, 23])
@pytest.mark.parametrize("rule", EVICTION_RULES)
def test_rules_keep_the_tokens_of_the_papers(rule: Any, length: int) -> None:
    # The section of each paper is in the docstring of its rule.
    keys = draw(length, COLUMNS * SIZE, HEADS, WIDTH)
    queries = draw(7, WINDOW, 2 * HEADS, WIDTH)
    sums = draw(8, HEADS, COLUMNS * SIZE) ** 2
    tokens = CachedTokens(
        jnp.asarray(keys),
        jnp.int32(length),
        jnp.asarray(queries),
        jnp.int32(WINDOW),
        jnp.asarray(sums),
    )
    selected = EVICTION_RULES[rule](tokens, BUDGET)
    for head in range(HEADS):
        expected = evictions.select(
            rule,
            keys[:length, head].astype(np.float64),
            queries.reshape(WINDOW, HEADS, 2, WIDTH)[:, head].astype(np.float64),
            sums[head, :length],
            BUDGET,
        )
        assert selected[head].tolist() == expected


def test_window_attention_counts_valid_queries_only() -> None:
    keys = draw(1, 12, HEADS, WIDTH)
    queries = draw(2, WINDOW, 2 * HEADS, WIDTH)
    grouped = queries.reshape(WINDOW, HEADS, 2, WIDTH).astype(np.float64)
    for num in (0, 3, WINDOW):
        tokens = CachedTokens(
            jnp.asarray(keys), jnp.int32(9), jnp.asarray(queries), jnp.int32(num), None
        )
        sums = memory.kv_eviction.window_attention(tokens)
        for head in range(HEADS):
            expected = np.zeros(12)
            expected[:9] = evictions.attention_sums(
                keys[:9, head].astype(np.float64), grouped[WINDOW - num :, head]
            )
            np.testing.assert_allclose(sums[head], expected, atol=1e-6)


def test_the_last_queries_stay_in_the_ring() -> None:
    """Chunks of any length leave the last queries of each slot, by position."""
    pages = make_pages(
        num_layers=2,
        num_pages=4,
        num_kv_heads=HEADS,
        page_size=SIZE,
        head_dim=WIDTH,
        dtype="float32",
    )._replace(queries=jnp.zeros((2, 3, WINDOW, HEADS, WIDTH)))
    slot = np.array([0] * 7 + [2] * 3 + [-1] * 2, np.int32)
    position = np.array([*range(4, 11), 0, 1, 2, -1, -1], np.int32)
    q = draw(3, 12, HEADS, WIDTH)
    rows = Rows(
        token=jnp.zeros(12, jnp.int32),
        position=jnp.asarray(position),
        slot=jnp.asarray(slot),
        page_ids=jnp.zeros((3, 2), jnp.int32),
        logit_rows=jnp.zeros(1, jnp.int32),
    )
    places = memory.query_places(rows, window=WINDOW)
    rings = memory.write_queries(pages, 1, jnp.asarray(q), places, 0.5).queries
    assert rings is not None
    expected = np.zeros(rings.shape)
    for row in range(10):
        expected[1, slot[row], position[row] % WINDOW] = q[row] / 2
    np.testing.assert_array_equal(rings, expected)


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_tokens_move_by_head_in_all_leaves(kv_dtype: Any) -> None:
    make = functools.partial(make_pages, num_layers=2, num_pages=9, page_size=SIZE)
    pages = make(num_kv_heads=HEADS, head_dim=WIDTH, dtype="float32", kv_dtype=kv_dtype)
    pages = jax.tree.map(
        lambda x: jnp.asarray(
            np.random.default_rng(x.ndim).integers(1, 99, x.shape), x.dtype
        ),
        pages,
    )
    table = jnp.array([[0, 1, 2, 3, 4], [8, 5, 7, -1, -1]], jnp.int32)
    before = [pages.layout.read(pages, layer, table) for layer in range(2)]
    length = jnp.array([17, 11], jnp.int32)
    moved = memory.evict_kv(
        pages,
        table,
        length,
        length,
        jnp.array([False, True]),
        rule="keydiff",
        budget=6,
    )
    for layer in range(2):
        after = moved.layout.read(moved, layer, table)
        for old, new in zip(before[layer], after, strict=True):
            np.testing.assert_array_equal(old[0], new[0])
            for head in range(HEADS):
                keys = np.asarray(before[layer][0][1, :11, head], np.float64)
                kept = evictions.select("keydiff", keys, keys, keys, 6)
                np.testing.assert_array_equal(old[1, kept, head], new[1, :6, head])
                np.testing.assert_array_equal(old[1, 6:, head], new[1, 6:, head])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quest_selects_the_pages_of_the_paper(dtype: Any) -> None:
    """Tokens come in chunks, and one page has had another sequence before."""
    num_selected, length = 3, 22
    pages = make_pages(
        num_layers=2,
        num_pages=9,
        num_kv_heads=HEADS,
        page_size=SIZE,
        head_dim=WIDTH,
        dtype=dtype,
    )._replace(
        layout=memory.PageSelection(num_selected=num_selected),
        key_bounds=jnp.full((2, 9, HEADS, 2, WIDTH), 99.0, dtype),
    )
    table = jnp.array([[3, 1, 8, 0, 5, 2], [6, 7, 4, -1, -1, -1]], jnp.int32)
    keys, values = (
        jnp.asarray(draw(seed, length, HEADS, WIDTH), dtype) for seed in (1, 2)
    )
    for start, end in ((0, 7), (7, 8), (8, 21), (21, 22)):
        position = jnp.arange(start, end, dtype=jnp.int32)
        rows = Rows(
            token=position,
            position=position,
            slot=jnp.zeros_like(position),
            page_ids=table,
            logit_rows=position[:1],
        )
        part = slice(start, end)
        pages = pages.layout.write(pages, 1, keys[part], values[part], rows)
    queries = draw(4, 2, 2 * HEADS, WIDTH)
    rows = Rows(
        token=jnp.zeros(2, jnp.int32),
        position=jnp.array([length - 1, -1], jnp.int32),
        slot=None,
        page_ids=table,
        logit_rows=jnp.zeros(1, jnp.int32),
        in_answer=jnp.array([True, False]),
    )
    out = pages.layout.attend(pages, 1, jnp.asarray(queries, dtype), rows)
    k, v, q = (np.asarray(x, np.float64) for x in (keys, values, queries))
    assert pages.key_bounds is not None
    for head in range(HEADS):
        grouped = np.asarray(jnp.asarray(q[0], dtype), np.float64)
        grouped = grouped.reshape(HEADS, 2, WIDTH)[head]
        expected = evictions.select_pages(k[:, head], grouped, num_selected, SIZE)
        selected = memory.quest(
            jnp.asarray(queries[0], dtype).reshape(HEADS, 2, WIDTH),
            pages.key_bounds[1, table[0]],
            jnp.int32((length - 1) // SIZE),
            num_selected,
        )
        assert selected[head].tolist() == expected
        assert expected[-1] == 5
        token = np.flatnonzero(np.isin(np.arange(length) // SIZE, expected))
        scores = grouped @ k[token, head].T / np.sqrt(WIDTH)
        weights = np.exp(scores)
        weights /= weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(
            np.asarray(out[0].reshape(HEADS, 2, WIDTH)[head], np.float64),
            weights @ v[token, head],
            atol=1e-5 if dtype == "float32" else 2e-2,
        )
    np.testing.assert_array_equal(out[1], 0)
