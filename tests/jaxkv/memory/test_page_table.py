"""Tables: worked examples and seeded faults; test_copy_on_write has random walks."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxkv import memory
from jaxkv.memory import page_pool, page_table
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.page_table import Table
from tests.support.mutation import replace
from tests.support.trees import assert_same, ints

SLOTS = 5
WIDTH = 8
NUM_PAGES = 26
MAX_NEW = 4


class State(NamedTuple):
    pool: Pool
    table: Table


def by_slot(copies: page_table.Copies) -> dict[int, tuple[int, int]]:
    pairs = zip(copies.source.tolist(), copies.target.tolist(), strict=True)
    return {i: pair for i, pair in enumerate(pairs) if pair != (NO_PAGE, NO_PAGE)}


def make_state() -> State:
    """Makes live slots of 6 + 3, 4 + 0, 0 + 2 and 6 + 0 places, and an empty one."""
    pool = page_pool.make_pool(NUM_PAGES)
    table = page_table.make_table(SLOTS, WIDTH)
    pool, table, _, _ = reserve(pool, table, ints(9, 4, 2, 0, 0))
    table = page_table.advance_lengths(table, ints(6, 4, 0, 0, 0))
    return State(*fork(pool, table, ints(-1, -1, -1, 0, -1)))


def reserve(pool, table, places, num_rows=None, page_size=4, max_new_pages=MAX_NEW):
    sizes = {"page_size": page_size, "max_new_pages": max_new_pages}
    return _reserve(pool, table, places, num_rows, **sizes)


_reserve = jax.jit(page_table.reserve, static_argnames=("page_size", "max_new_pages"))
fork = jax.jit(partial(memory.fork, page_size=4))
drop = jax.jit(page_table.drop_slots)
reorder = jax.jit(memory.reorder)
truncate = jax.jit(partial(page_table.truncate, page_size=4))
violations = jax.jit(partial(memory.violations, page_size=4))


def live(table: Table) -> jax.Array:
    return (table.length + table.ahead) > 0


def test_slots_are_served_in_order() -> None:
    pool, table = make_state()
    assert table.page_ids[:, :4].tolist() == [
        [0, 1, 2, NO_PAGE],
        [3, NO_PAGE, NO_PAGE, NO_PAGE],
        [4, NO_PAGE, NO_PAGE, NO_PAGE],
        [0, 1, NO_PAGE, NO_PAGE],  # the partial page too, but none without a token
        [NO_PAGE] * 4,
    ]
    assert (table.page_ids[:, 4:] == NO_PAGE).all()
    assert table.length.tolist() == [6, 4, 0, 6, 0]
    assert table.ahead.tolist() == [3, 0, 2, 0, 0]
    assert pool.ref[:6].tolist() == [2, 2, 1, 1, 1, 0]
    assert page_table.num_pages(table, page_size=4).tolist() == [3, 1, 1, 2, 0]
    assert violations(pool, table, live(table)) == (0,) * 8


def test_each_wrong_reference_count_is_a_violation() -> None:
    pool, table = make_state()
    wrong = pool._replace(ref=pool.ref.at[0].add(1).at[1].add(-1))
    assert violations(wrong, table, live(table)).i1 == 2


def test_reserve_appends_missing_pages() -> None:
    pool, table = make_state()
    pool, table, copies, enough = reserve(pool, table, ints(12, 5, 1, 0, 4))
    assert enough
    assert not by_slot(copies)
    assert table.ahead.tolist() == [6, 1, 2, 0, 4]
    assert table.page_ids[:, :3].tolist() == [
        [0, 1, 2],
        [3, 5, NO_PAGE],
        [4, NO_PAGE, NO_PAGE],
        [0, 1, NO_PAGE],
        [6, NO_PAGE, NO_PAGE],
    ]


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ((0, 0, 0, 0, 33), "a row holds 8 pages"),
        ((9, 4, 2, 9, 17), "one call appends at most 4"),
        ((25, 20, 18, 21, 16), "20 pages, of 21 free"),
        ((28, 20, 18, 24, 16), "20 pages as well"),
        ((24, 20, 18, 21, 17), "one slot exceeds its row"),
    ],
)
def test_reserve_is_all_or_nothing(places: tuple[int, ...], why: str) -> None:
    state = make_state()
    pool, table, copies, enough = reserve(*state, ints(*places))
    assert not by_slot(copies)
    assert bool(enough) == why.startswith("20")
    if not enough:
        assert_same((pool, table), state)
    else:
        pool, table, _, enough = reserve(pool, table, ints(29, 21, 0, 0, 0))
        assert not enough  # two pages, of one free
        assert violations(pool, table, live(table)) == (0,) * 8


def test_truncate_keeps_written_places() -> None:
    pool, table = make_state()
    pool, table = truncate(pool, table, ints(8, 0, 1, 100, 3))
    assert table.length.tolist() == [6, 4, 0, 6, 0]
    assert table.ahead.tolist() == [2, 0, 1, 0, 0]
    assert table.page_ids[0, :3].tolist() == [0, 1, NO_PAGE]
    assert pool.ref[:6].tolist() == [2, 2, 0, 1, 1, 0]
    pool, table = truncate(pool, table, ints(0, 0, 0, 0, 0))
    assert table.ahead.tolist() == [0] * SLOTS
    assert pool.ref[:6].tolist() == [2, 2, 0, 1, 0, 0]
    assert violations(pool, table, live(table)) == (0,) * 8


def test_fork_reads_all_sources_first() -> None:
    pool, table = make_state()
    pool, table = drop(pool, table, jnp.asarray([False, True, False, True, False]))
    pool, table = fork(pool, table, ints(-1, 0, -1, 1, 2))  # 3 copies the empty 1
    assert table.length.tolist() == [6, 6, 0, 0, 0]
    assert table.ahead.tolist() == [3, 0, 2, 0, 0]
    assert pool.ref[:6].tolist() == [2, 2, 1, 0, 1, 0]
    assert violations(pool, table, live(table)) == (0,) * 8


def test_reorder_releases_unused_pages() -> None:
    pool, table = make_state()
    pool, table = reorder(pool, table, ints(1, 2, 1, -1, 4))
    assert table.page_ids[:, :3].tolist() == [
        [3, NO_PAGE, NO_PAGE],
        [4, NO_PAGE, NO_PAGE],  # the page moved, and was never free
        [3, NO_PAGE, NO_PAGE],
        [0, 1, NO_PAGE],
        [NO_PAGE] * 3,
    ]
    assert table.length.tolist() == [4, 0, 4, 6, 0]
    assert table.ahead.tolist() == [0, 2, 0, 0, 0]
    assert pool.ref[:6].tolist() == [1, 1, 0, 2, 1, 0]
    assert violations(pool, table, live(table)) == (0,) * 8
    same = reorder(pool, table, ints(0, 1, -1, 3, 4))
    assert_same(same, (pool, table))
    pool, table = reorder(pool, table, ints(1, 1, 1, 1, 1))
    assert pool.ref[:6].tolist() == [0, 0, 0, 0, 5, 0]
    pool, table = drop(pool, table, jnp.asarray([True, False, False, False, False]))
    pool, table = reorder(pool, table, ints(0, 0, 0, 0, 0))  # continue an empty slot
    assert pool.num_free == NUM_PAGES
    assert violations(pool, table, live(table)) == (0,) * 8


FAULTS = {
    "released but still mapped": (lambda s: release(s, 3), "i1"),
    "double free": (lambda s: release(s, 3, 3), "i1 i2"),
    "free page released": (lambda s: release(s, 20), "i1 i2"),
    "lost reference": (
        lambda s: s._replace(pool=s.pool._replace(ref=s.pool.ref.at[0].add(-1))),
        "i1",
    ),
    "leak": (lambda s: s._replace(pool=page_pool.share(s.pool, ints(4))), "i1"),
    "lost page": (
        lambda s: s._replace(pool=s.pool._replace(num_free=s.pool.num_free - 1)),
        "i2",
    ),
    "entry beyond the length": (lambda s: put(s, (1, 1), 0), "i4"),
    "entry missing": (lambda s: put(s, (0, 1), NO_PAGE), "i1 i4"),
    "entry out of range": (lambda s: put(s, (0, 1), NUM_PAGES), "i1 i4"),
    "other negative number": (lambda s: put(s, (1, 1), -2), "i4"),
    "page twice in a row": (lambda s: put(s, (0, 1), 0), "i1 i4"),
    "ahead below zero": (
        lambda s: s._replace(
            table=page_table.advance_lengths(s.table, ints(0, 1, 0, 0, 0))
        ),
        "i4",
    ),
    "negative length": (
        lambda s: s._replace(
            table=page_table.advance_lengths(s.table, ints(-7, 0, 0, 0, 0))
        ),
        "i4",
    ),
    "longer than a row": (
        lambda s: s._replace(table=s.table._replace(ahead=ints(3, 0, 2, 90, 0))),
        "i4",
    ),
    "dead slot with a length": (
        lambda s: s._replace(table=s.table._replace(length=ints(6, 4, 0, 6, 1))),
        "i4 i5",
    ),
    "dead slot with a page": (lambda s: put(s, (4, 0), 0), "i4 i5"),
    "fork onto a slot in use": (
        lambda s: State(*fork(*s, ints(-1, 0, -1, -1, -1))),
        "i1",
    ),
    "reordered without counting": (
        lambda s: s._replace(table=memory.reorder(*s, ints(0, 0, 2, 3, 4))[1]),
        "i1",
    ),
}


def release(state: State, *ids: int) -> State:
    padded = ints(*ids, *[NO_PAGE] * (2 - len(ids)))
    return state._replace(pool=jax.jit(page_pool.release)(state.pool, padded))


def put(state: State, where: tuple[int, int], page: int) -> State:
    ids = state.table.page_ids.at[where].set(page)
    return state._replace(table=state.table._replace(page_ids=ids))


@pytest.mark.parametrize("name", FAULTS)
def test_each_seeded_fault_is_flagged(name: str) -> None:
    fault, flagged = FAULTS[name]
    state = make_state()
    alive = live(state.table)
    assert violations(*state, alive) == (0,) * 8
    faults = violations(*fault(state), alive)._asdict()
    assert " ".join(key for key, count in faults.items() if count) == flagged


@pytest.mark.thorough
def test_a_wrapped_sentinel_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the keyword in `put`, unmapped places use the last page."""

    def wrapping(values, index, updates, how):
        return getattr(values.at[index], how)(updates, mode="drop")

    pool, table = make_state()
    replace(monkeypatch, page_pool, "put", wrapping)
    pool, table, *_ = page_table.reserve(
        pool, table, ints(9, 8, 0, 0, 0), page_size=4, max_new_pages=2
    )
    monkeypatch.undo()
    faults = violations(pool, table, live(table))
    assert faults.i1 == 1
    assert faults.i2 > 0


def test_pins_count_as_uses() -> None:
    pool, table = make_state()
    pins = jnp.zeros(NUM_PAGES, jnp.int32).at[ints(1, 3)].set(1)
    pinned = page_pool.share(pool, ints(1, 3))
    alive = live(table)
    assert violations(pinned, table, alive, pins=pins) == (0,) * 8
    assert violations(pinned, table, alive) == (2, 0, 0, 0, 0, 0, 0, 0)
    assert violations(pool, table, alive, pins=pins) == (2, 0, 0, 0, 0, 0, 0, 0)
