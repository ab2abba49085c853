"""Copy-on-write: slots that share pages keep their own tokens, in random walks."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import arrays, memory
from jaxkv.memory import (
    kv_pages,
    make_pages,
    owned_pages,
    page_pool,
    page_table,
    shared_writes,
    swap_buffer,
)
from jaxkv.memory.kv_pages import Pages
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.page_table import Table
from jaxkv.memory.swap_buffer import Staging
from jaxkv.serving import host_swap
from tests.support.mutation import replace
from tests.support.oracle import Oracle
from tests.support.trees import assert_maps, assert_same, ints

SLOTS = 6
WIDTH = 6
NUM_PAGES = 24
MOST = 7
PLACES = 14
MAX_NEW = 5
"""Largest number of pages that a slot gets in one call."""
GROUPS = (0, 0, 0, 3, 3, 5)
"""Slots 0 to 2 are sequences of one request, 3 and 4 of another; 5 has no group."""


class State(NamedTuple):
    pool: Pool
    table: Table
    pages: Pages
    staging: Staging


def make_state(page_size: int = 4) -> State:
    pages = make_pages(
        num_layers=2,
        num_pages=NUM_PAGES,
        num_kv_heads=1,
        page_size=page_size,
        head_dim=1,
        dtype="float32",
    )
    staging = swap_buffer.make_staging(
        pages, num_places=PLACES, num_sequences=SLOTS, pages_per_slot=WIDTH
    )
    table = page_table.make_table(SLOTS, WIDTH)
    return State(page_pool.make_pool(NUM_PAGES), table, pages, staging)


def make_sharing_slots(free: int) -> tuple[Pool, Table]:
    """Makes slots 0 to 2 that share a full page and one with 2 of 4 tokens."""
    pool = page_pool.make_pool(2 + free)
    table = page_table.make_table(SLOTS, WIDTH)
    pool, table, *_ = page_table.reserve(
        pool, table, ints(6, 0, 0, 0, 0, 0), page_size=4, max_new_pages=WIDTH
    )
    table = page_table.advance_lengths(table, ints(6, 0, 0, 0, 0, 0))
    return memory.fork(pool, table, ints(-1, 0, 0, -1, -1, -1), page_size=4)


def reserve(pool: Pool, table: Table, *num_rows: int) -> Any:
    rows = ints(*num_rows)
    places = jnp.where(rows > 0, table.length + rows, 0)
    return page_table.reserve(
        pool, table, places, rows, page_size=4, max_new_pages=WIDTH
    )


def test_last_owner_writes_in_place() -> None:
    pool, table, copies, enough = reserve(*make_sharing_slots(3), 1, 1, 1, 0, 0, 0)
    assert enough
    assert copies.source.tolist() == [1, 1, *[NO_PAGE] * 4]
    assert copies.target.tolist() == [2, 3, *[NO_PAGE] * 4]
    assert table.page_ids[:3, :3].tolist() == [
        [0, 2, NO_PAGE],
        [0, 3, NO_PAGE],
        [0, 1, NO_PAGE],
    ]
    assert table.ahead[:3].tolist() == [1, 1, 1]
    assert pool.ref.tolist() == [3, 1, 1, 1, 0]
    # No slot copies after each has its own page.
    pool, table, copies, _ = reserve(pool, table, 1, 1, 1, 0, 0, 0)
    assert (copies.source == NO_PAGE).all()


def test_page_with_an_outside_use_is_copied() -> None:
    pool, table, copies, _ = reserve(*make_sharing_slots(4), 0, 3, 1, 0, 0, 0)
    assert copies.source.tolist() == [NO_PAGE, 1, 1, *[NO_PAGE] * 3]
    # The copy first, then the appended page.
    assert table.page_ids[1, :3].tolist() == [0, 2, 3]
    assert table.page_ids[2, :3].tolist() == [0, 4, NO_PAGE]
    assert pool.ref.tolist() == [3, 1, 1, 1, 1, 0]
    pool, table = make_sharing_slots(4)
    pinned = page_pool.share(pool, ints(1))
    assert page_table.needs_copy(
        pinned, table, ints(1, 2, 1, 1, 0, 0), page_size=4
    ).tolist() == [True, True, True, False, False, False]


def test_copies_and_new_pages_are_all_or_nothing() -> None:
    # Two copies, and one page for the slot that writes past its last page.
    for free in range(4):
        before = make_sharing_slots(free)
        pool, table, copies, enough = reserve(*before, 1, 1, 3, 0, 0, 0)
        assert enough == (free == 3)
        if not enough:
            assert_same((pool, table), before)
            assert (jnp.stack(copies) == NO_PAGE).all()


def test_writes_to_shared_or_missing_pages_are_flagged() -> None:
    check = partial(shared_writes, page_size=4)
    pool, table = make_sharing_slots(4)
    rows = ints(1, 1, 0, 0, 0, 0)
    assert check(pool, table, rows) == 2
    assert check(*reserve(pool, table, *rows)[:2], rows) == 0
    assert check(pool, table, ints(0, 0, 0, 1, 0, 0)) == 1  # no page yet
    assert check(pool, table, ints(3, 0, 0, 0, 0, 0)) == 2  # shared, then missing
    assert check(pool, table, ints(0, 0, 0, 0, 0, 4 * WIDTH + 1)) == WIDTH + 1
    # Reserved places that a wrong reorder has shared.
    pool, table, *_ = reserve(pool, table, 4, 0, 0, 0, 0, 0)
    pool, table = memory.reorder(pool, table, ints(0, 0, -1, -1, -1, -1))
    pool, table, *_ = reserve(pool, table, 4, 0, 0, 0, 0, 0)
    assert check(pool, table, ints(4, 0, 0, 0, 0, 0)) == 1


def test_shared_page_counts_once_per_group() -> None:
    pool, table, *_ = reserve(*make_sharing_slots(5), 0, 3, 1, 2, 0, 0)
    # Rows: 0 1 / 0 2 3 / 0 4 / 5
    first = ints(2, 2, 2, 3, -1, -1)
    holder = memory.holders(table, first)
    mapped = jnp.where(table.page_ids >= 0, holder, -1)[:4, :3]
    assert mapped.tolist() == [[0, 0, -1], [0, 1, 1], [0, 2, -1], [3, -1, -1]]
    assert owned_pages(table, holder).tolist() == [2, 2, 1, 1, 0, 0]
    alone = memory.holders(table, jnp.arange(SLOTS, dtype=jnp.int32))
    assert owned_pages(table, alone).tolist() == [2, 3, 2, 1, 0, 0]
    pinned = (table.page_ids == 0) | (table.page_ids == 3)
    owned = owned_pages(table, holder, pinned=pinned)
    assert owned.tolist() == [1, 1, 1, 1, 0, 0]
    freed, _ = page_table.drop_slots(pool, table, first == 2)
    assert freed.num_free - pool.num_free == 5


def write(
    state: State,
    drop: jax.Array,
    places: jax.Array,
    num_rows: jax.Array,
    tokens: jax.Array,
) -> tuple[State, Any]:
    """Runs the page operations of a step; `tokens` are the padded rows of each slot."""
    page_size = state.pages.page_size
    pool, table = page_table.drop_slots(state.pool, state.table, drop)
    pool, table, copies, enough = page_table.reserve(
        pool, table, places, num_rows, page_size=page_size, max_new_pages=MAX_NEW
    )
    num_rows = jnp.where(enough, num_rows, 0)
    shared = shared_writes(pool, table, num_rows, page_size=page_size)
    pages = kv_pages.copy(state.pages, copies.source, copies.target)
    place = jnp.arange(MOST, dtype=jnp.int32)[None, :]
    slot = jnp.broadcast_to(jnp.arange(SLOTS, dtype=jnp.int32)[:, None], tokens.shape)
    position = jnp.where(place < num_rows[:, None], table.length[:, None] + place, -1)
    rows = kv_pages.Rows(
        token=tokens.reshape(-1),
        position=position.reshape(-1),
        slot=slot.reshape(-1),
        page_ids=table.page_ids,
        logit_rows=ints(NO_PAGE),
    )
    new = tokens.reshape(-1, 1, 1).astype(jnp.float32)
    for layer in range(2):
        pages = pages.layout.write(pages, layer, new + layer, -new - layer, rows)
    state = state._replace(pool=pool, table=table, pages=pages)
    return state, (copies, enough, shared)


def on_table(f: Callable) -> Callable:
    """Returns an operation on pool and table that does not change the pages."""

    def run(state: State, argument: Any) -> tuple[State, None]:
        pool, table = f(state.pool, state.table, argument)
        return state._replace(pool=pool, table=table), None

    return run


def reorder(pool: Pool, table: Table, source: jax.Array, *, page_size: int) -> Any:
    """Reorders as beam search does: reserved places are released first."""
    none = jnp.zeros_like(source)
    pool, table = page_table.truncate(pool, table, none, page_size=page_size)
    return memory.reorder(pool, table, source)


def swap_out(state: State, row: jax.Array) -> tuple[State, jax.Array]:
    """Swaps slots out; sequence i is the content of slot i."""
    pool, table, pages, staging = state
    group = ints(*GROUPS)
    size = pages.page_size
    staging, left = swap_buffer.copy_out(
        staging,
        pages,
        table,
        memory.holders(table, group),
        row,
        group,
        page_size=size,
    )
    pool, table = page_table.drop_slots(pool, table, left)
    return State(pool, table, pages, staging), left


def swap_in(state: State, arguments: Any) -> tuple[State, None]:
    pool, table, pages, staging = state
    back, slot = arguments
    pages, pool, table, staging = swap_buffer.copy_in(
        staging, pages, pool, table, ints(*GROUPS), back, slot
    )
    return State(pool, table, pages, staging), None


def host(state: State, moves: host_swap.HostTransfer) -> tuple[State, None]:
    return state._replace(
        staging=host_swap.apply_transfer(state.staging, ints(*GROUPS), moves)
    ), None


def look(state: State, pins: jax.Array) -> tuple[dict, jax.Array, jax.Array]:
    """Returns violations, owned pages, and K and V by layer, slot and place."""
    pool, table, pages, staging = state
    live = (table.length + table.ahead) > 0
    violations = memory.violations(
        pool, table, live, page_size=pages.page_size, pins=pins
    )
    holder = memory.holders(table, ints(*GROUPS))
    pinned = arrays.take(pins, table.page_ids, fill=0) > 0
    owned = owned_pages(table, holder, pinned=pinned)
    values = [pages.layout.read(pages, layer, table.page_ids) for layer in range(2)]
    faults = swap_buffer.count_swap_faults(
        staging, ints(*GROUPS), staging.length > 0, page_size=pages.page_size
    )
    violations = violations._replace(swap=faults)
    return (
        violations._asdict(),
        owned,
        jnp.stack([jnp.stack(x)[..., 0, 0] for x in values]),
    )


def programs(page_size: int) -> dict[str, Any]:
    """Compiles the operations for each caller, so that a fault can be seeded first."""
    run = {
        "write": lambda *x: write(*x),
        "fork": on_table(partial(memory.fork, page_size=page_size)),
        "reorder": on_table(partial(reorder, page_size=page_size)),
        "drop": on_table(lambda *x: page_table.drop_slots(*x)),
        "truncate": on_table(partial(page_table.truncate, page_size=page_size)),
        "pin": on_table(lambda pool, table, ids: (page_pool.share(pool, ids), table)),
        "unpin": on_table(
            lambda pool, table, ids: (page_pool.release(pool, ids), table)
        ),
        "swap_out": lambda *x: swap_out(*x),
        "swap_in": lambda *x: swap_in(*x),
        "host": host,
        "look": look,
    }
    return {verb: jax.jit(f) for verb, f in run.items()}


sound_programs = cache(programs)


class Walk:
    """Random operations on the jitted functions and the oracle, contents compared."""

    def __init__(self, seed: int, page_size: int, run: dict[str, Any]) -> None:
        self.rng = np.random.default_rng(seed)
        self.run = run
        self.oracle = Oracle(NUM_PAGES, SLOTS, WIDTH, page_size)
        self.state = make_state(page_size)
        self.size = page_size
        self.pinned: list[int] = []
        self.num_written = self.num_copies = self.refused = self.num_swaps = 0
        self.kept: dict[int, tuple[np.ndarray, Any]] = {}
        self.calls: dict[str, list[tuple]] = {verb: [] for verb in run}

    def step(self) -> None:
        verbs = ["write"] * 8 + ["fork"] * 3
        verbs += ["reorder", "drop", "truncate", "pin", "unpin"]
        verbs += ["swap_out"] * 2 + ["swap_in"] * 2 + ["host"]
        verb = self.rng.choice(verbs)
        getattr(self, verb)()
        self.check(verb)

    def do(self, verb: str, *arguments: Any) -> Any:
        call = self.state, *arguments
        self.calls[verb] = [*self.calls[verb][-3:], call]
        self.state, answer = self.run[verb](*call)
        return answer

    def write(self) -> None:
        """Writes some tokens to some or all slots; not all of them are accepted."""
        rng = self.rng
        oracle = self.oracle
        num_rows = rng.integers(1, 2 if rng.random() < 0.6 else MOST + 1, SLOTS)
        num_rows[rng.random(SLOTS) < rng.choice([0.0, 0.5, 0.8])] = 0
        drop = rng.random(SLOTS) < 0.03
        length = np.where(drop, 0, oracle.length)
        num_rows = np.minimum(num_rows, WIDTH * self.size - length)
        ahead = rng.integers(0, 3, SLOTS) * (rng.random(SLOTS) < 0.2)
        places = np.minimum(length + num_rows + ahead, WIDTH * self.size)
        places[rng.random(SLOTS) < 0.01] = WIDTH * self.size + 1  # no row holds that
        places = np.where(num_rows > 0, places, 0)
        tokens = np.zeros((SLOTS, MOST), np.int32)
        tokens[:] = self.num_written + np.arange(tokens.size).reshape(tokens.shape)
        self.num_written += tokens.size

        copies, enough, shared = self.do(
            "write", drop, ints(*places), ints(*num_rows), tokens
        )
        assert not shared, "i3"
        oracle.drop(drop.tolist())
        reservation = oracle.reserve(places.tolist(), MAX_NEW, num_rows.tolist())
        assert bool(enough) == (reservation is not None), "served"
        if reservation is None:
            self.refused += 1
            assert (copies.source == NO_PAGE).all()
            assert (copies.target == NO_PAGE).all()
            return
        self.num_copies += len(reservation)
        written = [new[:n].tolist() for new, n in zip(tokens, num_rows, strict=True)]
        oracle.write(written)
        if rng.random() < 0.2:  # the rest stays provisional, to be overwritten
            written = [new[: rng.integers(0, len(new) + 1)] for new in written]
        oracle.accept(written)
        accepted = ints(*map(len, written))
        table = page_table.advance_lengths(self.state.table, accepted)
        self.state = self.state._replace(table=table)

    def mates(self, chance: float) -> np.ndarray:
        """Returns for some slots a slot of their group."""
        chosen = [self.rng.choice(np.flatnonzero(np.equal(GROUPS, g))) for g in GROUPS]
        return np.where(self.rng.random(SLOTS) < chance, chosen, -1).astype(np.int32)

    def fork(self) -> None:
        source = np.where(self.oracle.live(), -1, self.mates(0.7)).astype(np.int32)
        self.do("fork", source)
        self.oracle.fork(source.tolist())

    def reorder(self) -> None:
        source = self.mates(0.8)
        self.do("reorder", source)
        self.oracle.truncate([0] * SLOTS)
        self.oracle.reorder(source.tolist())

    def drop(self) -> None:
        self.empty(self.rng.random(SLOTS) < 0.3)

    def empty(self, mask: np.ndarray) -> None:
        self.do("drop", mask)
        self.oracle.drop(mask.tolist())

    def truncate(self) -> None:
        places = self.rng.integers(0, WIDTH * self.size + 1, SLOTS)
        self.do("truncate", ints(*places))
        self.oracle.truncate(places.tolist())

    def pin(self) -> None:
        """Pins pages with tokens as a cache does, also partial ones."""
        rows = zip(self.oracle.rows, self.oracle.length, strict=True)
        written = [page for row, n in rows for page in row[: self.oracle.pages_for(n)]]
        if written and len(self.pinned) < 4:
            self.pinned.append(page := int(self.rng.choice(written)))
            self.do("pin", ints(page))
            self.oracle.share([page])

    def unpin(self) -> None:
        if self.pinned:
            page = self.pinned.pop(self.rng.integers(len(self.pinned)))
            self.do("unpin", ints(page))
            self.oracle.release([page])

    def swap_out(self) -> None:
        group = int(self.rng.choice(GROUPS))
        slots = np.flatnonzero(np.equal(GROUPS, group) & self.oracle.live()).tolist()
        if not slots or group in self.oracle.out:
            return
        row = np.full(SLOTS, -1, np.int32)
        row[slots] = slots
        left = self.do("swap_out", row)
        assert bool(left.any()) == self.oracle.swap_out(group, slots, PLACES)
        self.num_swaps += bool(left.any())

    def swap_in(self) -> None:
        """Swaps a group in, to empty slots of the group."""
        oracle = self.oracle
        rng = self.rng
        near = [group for group in oracle.out if group not in oracle.host]
        if not near:
            return
        group = int(rng.choice(near))
        sequences = list(oracle.out[group])
        empty = np.equal(GROUPS, group) & ~np.array(oracle.live())
        free = rng.permutation(np.flatnonzero(empty)).tolist()
        needed = sum(owner == group for owner, _ in oracle.buffer.values())
        if len(free) < len(sequences):
            self.empty(np.equal(GROUPS, group))
            return
        if needed > len(oracle.free):
            return
        seats = dict(zip(sequences, free, strict=False))
        slot = np.full(SLOTS, -1, np.int32)
        slot[sequences] = [seats[sequence] for sequence in sequences]
        self.do("swap_in", (np.arange(SLOTS) == group, slot))
        oracle.swap_in(group, seats)

    def host(self) -> None:
        """Moves a group's pages to the host, or some back."""
        oracle = self.oracle
        staging = self.state.staging
        moves = host_swap.empty_transfer(staging)
        owner = np.asarray(staging.owner)
        staged = [group for group in oracle.out if group not in oracle.host]
        if staged and self.rng.random() < 0.5:
            group = int(self.rng.choice(staged))
            places = np.flatnonzero(owner == group)
            self.kept[group] = places, kv_pages.to_host(staging.pages, places)
            moves.leaves[group] = True
            oracle.take(group)
        elif self.kept:
            group = int(self.rng.choice(list(self.kept)))
            places, pages = self.kept[group]
            free = self.rng.permutation(np.flatnonzero(owner < 0))[: len(places)]
            if len(free) < len(places):
                return
            del self.kept[group]
            moves.arrives[...] = group
            moves.place[places] = free
            moves = moves._replace(pages=kv_pages.expand_pages(pages, PLACES, places))
            oracle.bring(group, dict(zip(places.tolist(), free.tolist(), strict=True)))
        self.do("host", moves)

    def check(self, verb: str) -> None:
        pins = np.bincount(self.pinned, minlength=NUM_PAGES).astype(np.int32)
        violations, owned, values = self.run["look"](self.state, pins)
        wrong = [name for name, count in violations.items() if count]
        assert not wrong, (verb, *wrong)
        table = self.state.table
        values = np.asarray(values)
        np.testing.assert_array_equal(table.length, self.oracle.length)
        for slot, tokens in enumerate(self.oracle.tokens):
            assert self.oracle.read(slot) == tokens
            k = values[:, 0, slot, : len(tokens)]
            wanted = np.stack([tokens, np.add(tokens, 1)]).astype(np.float32)
            assert np.array_equal(k, wanted), (verb, "content")
            assert np.array_equal(values[:, 1, slot, : len(tokens)], -wanted), verb
        pinned = set(self.pinned)
        assert owned.tolist() == self.oracle.owned_pages(list(GROUPS), pinned), verb
        self.oracle.check(self.state.pool, table)
        owner = np.full(PLACES, -1)
        for place, (group, _) in self.oracle.buffer.items():
            owner[place] = group
        assert np.array_equal(self.state.staging.owner, owner), (verb, "buffer")


@pytest.mark.parametrize(
    ("seed", "page_size", "steps"),
    [
        (0, 4, 600),
        pytest.param(0, 4, 2000, marks=pytest.mark.slow),
        pytest.param(1, 1, 300, marks=pytest.mark.thorough),
        pytest.param(2, 16, 300, marks=pytest.mark.thorough),
    ],
)
def test_slots_keep_their_tokens(seed, page_size: int, steps: int) -> None:
    walk = Walk(seed, page_size, sound_programs(page_size))
    for _ in range(steps):
        walk.step()
    # Pages of one token are never partial; a small pool of large ones is large.
    assert page_size == 1 or walk.num_copies > steps // 40
    assert page_size == 16 or walk.refused > steps // 50
    assert walk.num_swaps > steps // 100


@pytest.mark.thorough
def test_vmap_equals_single_runs() -> None:
    run = sound_programs(4)
    walk = Walk(7, 4, run)
    for _ in range(200):
        walk.step()
    for verb in run.keys() - {"host", "look"}:
        assert_maps(run[verb], walk.calls[verb], run[verb])


@pytest.mark.slow
def test_every_slot_keeps_its_own_tokens_for_long() -> None:
    for seed, page_size in enumerate([1, 2, 4, 5, 16]):
        walk = Walk(seed, page_size, sound_programs(page_size))
        for _ in range(20_000):
            walk.step()


def never(pool: Pool, table: Table, num_rows: jax.Array, *, page_size: int) -> Any:
    return num_rows != num_rows


def always(pool: Pool, table: Table, num_rows: jax.Array, *, page_size: int) -> Any:
    index = (jnp.arange(SLOTS, dtype=jnp.int32), table.length // page_size)
    return (num_rows > 0) & (arrays.take(table.page_ids, index, fill=NO_PAGE) >= 0)


def uncopied(pages: Pages, source: Any, target: Any, *, origin: Any = None) -> Pages:
    return pages


def uncounted(pool: Pool, ids: jax.Array) -> Pool:
    return pool


def released_twice(pool: Pool, ids: jax.Array) -> Pool:
    return release(release(pool, ids), ids)


def never_written(table: Table, *, page_size: int) -> Any:
    """Omits the last page, if it is partial."""
    column = jnp.arange(table.page_ids.shape[1], dtype=jnp.int32)[None, :]
    return column < (table.length // page_size)[:, None]


def unforgotten(staging: Staging, group: jax.Array, is_forgotten: jax.Array) -> Staging:
    return staging


release = page_pool.release

FAULTS: dict[str, tuple[Any, str, Callable, str]] = {
    "a write to a shared page": (page_table, "needs_copy", never, "i3"),
    "the last owner copies too": (page_table, "needs_copy", always, "i2"),
    "a copy that is not made": (kv_pages, "copy", uncopied, "content"),
    "a lost reference": (page_pool, "share", uncounted, "i1|i3"),
    "a double free": (page_pool, "release", released_twice, "i1|i3"),
    "a page that is not swapped out": (
        swap_buffer,
        "is_written",
        never_written,
        "swap|content",
    ),
    "places not given up": (swap_buffer, "forget", unforgotten, "swap|buffer"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_walk_detects_seeded_faults(name, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, fault, flagged = FAULTS[name]
    replace(monkeypatch, module, attribute, fault)
    walk = Walk(0, 4, programs(4))

    def stroll() -> None:
        for _ in range(400):
            walk.step()

    with pytest.raises(AssertionError, match=flagged):
        stroll()
