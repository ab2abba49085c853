"""Pages of layers with a window: a random walk beside a plain list of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jaxkv import memory
from jaxkv.memory import (
    NO_PAGE,
    Table,
    WindowPool,
    attach_window_pages,
    continue_window_slots,
    drop_window_slots,
    first_window_page,
    insert_unpinned,
    make_prefix_cache,
    make_table,
    make_window_pool,
    map_window_pages,
    max_window_pages,
    shared_writes,
    start_on_window_pages,
    trim_window_pages,
    violations,
    window_pages_of,
    window_table,
)

SIZE = 3
SLOTS = 4
LENGTH = 30
BUDGET = 9


class Walk:
    """A pool beside the tokens that each slot has, and those on each page."""

    def __init__(self, window: int, rng: np.random.Generator) -> None:
        self.window = window
        self.rng = rng
        self.table = make_table(SLOTS, LENGTH // SIZE)
        self.num_pages = max_window_pages(
            SLOTS,
            window=window,
            page_size=SIZE,
            token_budget=BUDGET,
            max_length=LENGTH,
        )
        self.windows = make_window_pool(
            self.num_pages, num_sequences=1, num_pages=40, table=self.table
        )
        self.tokens: list[list[int]] = [[] for _ in range(SLOTS)]
        self.content: dict[int, list[int]] = {}
        self.num = 0
        bounds = {"window": window, "page_size": SIZE}
        self.map = jax.jit(functools.partial(map_window_pages, page_size=SIZE))
        self.trim = jax.jit(functools.partial(trim_window_pages, **bounds))
        self.fork = jax.jit(continue_window_slots)
        self.drop = jax.jit(drop_window_slots)
        self.count = jax.jit(functools.partial(violations, page_size=SIZE))
        self.unsafe = jax.jit(functools.partial(shared_writes, page_size=SIZE))

    def feed(self) -> None:
        """Feeds rows, of which some slots accept only the first ones."""
        rows = np.zeros(SLOTS, np.int32)
        for slot in self.rng.permutation(SLOTS):
            room = min(LENGTH - len(self.tokens[slot]), BUDGET - rows.sum())
            rows[slot] = self.rng.integers(0, min(room, 6) + 1)
        windows, copies = self.map(self.windows, self.table, jnp.asarray(rows))
        table = window_table(windows, self.table)
        assert int(self.unsafe(windows.pool, table, jnp.asarray(rows))) == 0
        for source, target in zip(*map(np.asarray, copies), strict=True):
            if target != NO_PAGE:
                self.content[int(target)] = list(self.content[int(source)])
        ids = np.asarray(windows.page_ids)
        for slot in range(SLOTS):
            for row in range(rows[slot]):
                place = len(self.tokens[slot]) + row
                page = self.content.setdefault(
                    int(ids[slot, place // SIZE]), [-1] * SIZE
                )
                page[place % SIZE] = self.num + row
            kept = int(self.rng.integers(0, rows[slot] + 1))
            self.tokens[slot] += range(self.num, self.num + kept)
            self.num += 10
        length = jnp.asarray([len(x) for x in self.tokens], jnp.int32)
        self.table = self.table._replace(length=length)
        self.windows = self.trim(windows, self.table)

    def share(self) -> None:
        """Makes a slot continue another one."""
        source, target = self.rng.choice(SLOTS, 2, replace=False)
        of = np.full(SLOTS, -1, np.int32)
        of[target] = source
        self.windows = self.fork(self.windows, self.table, jnp.asarray(of))
        self.tokens[target] = list(self.tokens[source])
        length = self.table.length.at[target].set(self.table.length[source])
        self.table = self.table._replace(length=length)

    def end(self) -> None:
        """Empties a slot."""
        mask = np.arange(SLOTS) == self.rng.integers(SLOTS)
        self.windows = self.drop(self.windows, jnp.asarray(mask))
        self.tokens[int(mask.argmax())] = []
        self.table = self.table._replace(length=jnp.where(mask, 0, self.table.length))

    def check(self) -> None:
        """Checks the invariants, and that a next token finds its keys and no others."""
        first = first_window_page(self.table.length, window=self.window, page_size=SIZE)
        counts = self.count(
            self.windows.pool,
            window_table(self.windows, self.table),
            self.table.length > 0,
            first=first,
        )
        assert not any(map(int, counts))
        ids = np.asarray(self.windows.page_ids)
        for slot, tokens in enumerate(self.tokens):
            oldest = max(len(tokens) - self.window + 1, 0)
            for column in range(ids.shape[1]):
                places = range(column * SIZE, (column + 1) * SIZE)
                is_read = any(oldest <= place < len(tokens) for place in places)
                assert (ids[slot, column] != NO_PAGE) == is_read
                if is_read:
                    page = self.content[int(ids[slot, column])]
                    known = tokens[column * SIZE : (column + 1) * SIZE]
                    assert page[: len(known)] == known


@pytest.mark.parametrize(
    "window", [4, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 2, 3, 7, 40))]
)
def test_a_walk_keeps_the_keys_that_are_read_and_no_others(window: int) -> None:
    rng = np.random.default_rng(window)
    walk = Walk(window, rng)
    most = 0
    for _ in range(150):
        walk.feed()
        most = max(most, walk.num_pages - int(walk.windows.pool.num_free))
        walk.check()
        if rng.random() < 0.25:
            walk.share()
            walk.check()
        if rng.random() < 0.2 or max(map(len, walk.tokens)) > LENGTH - 6:
            walk.end()
            walk.check()
    assert most > walk.num_pages // 3


@pytest.mark.parametrize("window", [1, 2, 5, 6, 7, 13])
def test_no_schedule_needs_more_pages_than_the_largest_number(window: int) -> None:
    """All lengths and chunks of one slot, and the worst of two."""
    for budget in (1, 2, 3, 4, 7):
        needed = np.zeros(budget + 1, int)
        for rows in range(budget + 1):
            for length in range(40):
                first = max(length - window + 1, 0) // SIZE
                needed[rows] = max(needed[rows], -(-(length + rows) // SIZE) - first)
        bounds = dict(window=window, page_size=SIZE, token_budget=budget, max_length=99)
        assert needed.max() <= max_window_pages(1, **bounds)
        worst = max(needed[k] + needed[budget - k] for k in range(budget + 1))
        assert worst <= max_window_pages(2, **bounds) <= worst + 4


def ids(*values: int) -> Array:
    return jnp.asarray(values, jnp.int32)


def filled(
    windows: WindowPool, table: Table, num: int
) -> tuple[WindowPool, memory.PrefixCache]:
    """Returns the pool and a cache after slot 0 has filled pages 10, 11, ..."""
    cache = make_prefix_cache(40, SIZE)
    windows, _ = map_window_pages(
        windows, table, ids(num * SIZE, *[0] * (SLOTS - 1)), page_size=SIZE
    )
    row = np.full(table.page_ids.shape, NO_PAGE, np.int32)
    for column in range(num):
        row[0, column] = 10 + column
        cache, _, _ = insert_unpinned(
            cache,
            ids(10 + column),
            ids(9 + column if column else NO_PAGE),
            jnp.full((1, SIZE), column, jnp.int32),
            jnp.zeros(1, jnp.uint32),
        )
    return attach_window_pages(windows, cache, jnp.asarray(row)), cache


def test_a_prefix_ends_where_its_whole_window_is_left() -> None:
    table = make_table(SLOTS, LENGTH // SIZE)
    windows = make_window_pool(12, num_sequences=1, num_pages=40, table=table)
    windows, cache = filled(windows, table, 6)
    held = np.asarray(windows.page_ids[0, :6])
    table = table._replace(length=ids(18, 0, 0, 0))
    windows = trim_window_pages(windows, table, window=5, page_size=SIZE)
    # Tokens at 18 and later read those from 14 on.
    np.testing.assert_array_equal(windows.page_ids[0, :6], [-1] * 4 + [*held[4:]])
    windows = drop_window_slots(windows, jnp.arange(SLOTS) == 0)
    assert int(windows.pool.num_free) == 12
    cached = ids(*range(10, 16), *[NO_PAGE] * 4)[None]
    find = functools.partial(window_pages_of, window=5, page_size=SIZE)
    pages, own = find(windows, cache, cached)
    np.testing.assert_array_equal(pages, cached)
    np.testing.assert_array_equal(own[0], [-1] * 4 + [*held[4:]] + [-1] * 4)
    # A request starts on free pages, which are then in use.
    used = start_on_window_pages(windows, own, ids(2))
    assert int(used.pool.num_free) == 10
    np.testing.assert_array_equal(used.page_ids[2], own[0])
    counts = violations(
        used.pool,
        window_table(used, table._replace(length=ids(0, 0, 18, 0))),
        jnp.arange(SLOTS) == 2,
        page_size=SIZE,
        first=ids(0, 0, 4, 0),
    )
    assert not any(map(int, counts))
    # Pages that were free first are overwritten first, of those that became free at
    # once the last column: 6 others, then columns 3 and 2.
    wanted = ids(0, 24, 0, 0)
    after, _ = map_window_pages(
        windows, table._replace(length=ids(0, 0, 0, 0)), wanted, page_size=SIZE
    )
    np.testing.assert_array_equal(after.page_ids[1, 6:8], held[[3, 2]])
    pages, own = find(after, cache, cached)
    np.testing.assert_array_equal(pages, cached)
    # Without the page of column 5 a prefix ends before the lost columns.
    torn = after._replace(page=after.page.at[held[5]].set(NO_PAGE))
    pages, own = find(torn, cache, cached)
    np.testing.assert_array_equal(pages[0], [10, 11] + [-1] * 8)
    np.testing.assert_array_equal(own[0], [*held[:2]] + [-1] * 8)
    none = torn._replace(page=torn.page.at[held[0]].set(NO_PAGE))
    pages, own = find(none, cache, cached)
    assert (np.asarray(pages) == NO_PAGE).all()
    assert (np.asarray(own) == NO_PAGE).all()
