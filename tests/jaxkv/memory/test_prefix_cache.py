"""The prefix cache: worked examples, walks against a model, faults, purity."""

from functools import cache as memo
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import arrays, memory
from jaxkv.memory import (
    advance_lengths,
    clear_slots,
    make_table,
    page_pool,
)
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.page_table import Table
from jaxkv.memory.prefixes import idle_pages, prefix_cache, prefix_eviction
from jaxkv.memory.prefixes.prefix_cache import PrefixCache
from tests.support.mutation import replace
from tests.support.oracle import Oracle
from tests.support.trees import assert_maps, assert_same, ints

NUM_PAGES = 12
ROWS = 3
SIZE = 2
LENGTH = 7
compiled: Any = partial(jax.jit)
real_extend = prefix_cache.extend_hash


def salts(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.uint32)


class Case(NamedTuple):
    """A cache, and a pool of which every page has one use outside of tables."""

    cache: PrefixCache
    pool: Pool


def make_case() -> Case:
    pool = page_pool.make_pool(NUM_PAGES)._replace(ref=jnp.ones(NUM_PAGES, jnp.int32))
    pool = pool._replace(num_free=jnp.zeros((), jnp.int32))
    return Case(prefix_cache.make_prefix_cache(NUM_PAGES, SIZE), pool)


class Programs:
    """The operations, compiled for the worked examples with one hash function."""

    def __init__(self) -> None:
        def alone(f: Any) -> Any:  # jit keeps its programs by function
            return compiled(lambda *arguments: f(*arguments))

        self._enter = alone(prefix_cache.insert)
        self._lookup = alone(prefix_cache.lookup)
        self.match = alone(prefix_cache.match)
        self.release = alone(page_pool.release)
        self._release = alone(page_pool.release_counted)
        self._rest = alone(prefix_eviction.mark_idle)
        self._use = alone(prefix_eviction.mark_used)
        self._evict = alone(prefix_eviction.evict)
        self.unsound = alone(prefix_cache.count_prefix_faults)

    @staticmethod
    def rows(rows: tuple, *, with_page: bool) -> tuple[jax.Array, ...]:
        """Enters rows of (page,) parent, first token, salt; the second token is 9."""
        empty = (NO_PAGE,) * with_page + (NO_PAGE, 0, 0)
        *ids, first, salt = np.asarray([*rows, *[empty] * (ROWS - len(rows))]).T
        tokens = np.stack([first, np.full_like(first, 9)], axis=1)
        ids = [jnp.asarray(column, jnp.int32) for column in ids]
        return *ids, jnp.asarray(tokens, jnp.int32), jnp.asarray(salt, jnp.uint32)

    def enter(self, case: Case, *rows: tuple) -> tuple[Case, list[int]]:
        *after, cached = self._enter(*case, *self.rows(rows, with_page=True))
        return Case(*after), cached.tolist()[: len(rows)]

    def lookup(self, case: Case, *rows: tuple) -> list[int]:
        entries = self._lookup(case.cache, *self.rows(rows, with_page=False))
        return entries.tolist()[: len(rows)]

    def evict(self, case: Case, num: int) -> tuple[Case, int]:
        *after, evicted = self._evict(*case, jnp.full((), num, jnp.int32))
        return Case(*after), int(evicted)

    def release_all(self, case: Case, *rows: tuple[int, ...]) -> Case:
        """Releases all pages of sequences."""
        blank = ((NO_PAGE,) * 4,) * (3 - len(rows))
        padded = [row + (NO_PAGE,) * (4 - len(row)) for row in (*rows, *blank)]
        ids = jnp.asarray(padded, jnp.int32)
        pool, left = self._release(case.pool, ids)
        return Case(self._rest(case.cache, ids, left), pool)

    def start_on(self, case: Case, *ids: int) -> Case:
        """Starts a sequence on pages."""
        padded = ints(*ids, *[NO_PAGE] * (4 - len(ids)))
        return Case(self._use(case.cache, padded), page_pool.share(case.pool, padded))

    def used(self, case: Case, *ids: int) -> Case:
        """Starts a sequence on pages, and releases them."""
        return self.release_all(self.start_on(case, *ids), ids)


run = Programs()


@pytest.fixture
def one_hash(monkeypatch: pytest.MonkeyPatch) -> Programs:
    """The operations, compiled with a hash that is equal for all contents."""
    replace(
        monkeypatch, prefix_cache, "extend_hash", lambda before, tokens: before * 0 + 5
    )
    return Programs()


def make_tree() -> Case:
    """Makes idle pages 0 -> 1 -> 2 under salt 0, 3 after 1, and 4 -> 5 under salt 7."""
    case, _ = run.enter(make_case(), (0, NO_PAGE, 10, 0), (4, NO_PAGE, 10, 7))
    case, _ = run.enter(case, (1, 0, 11, 0), (5, 4, 11, 7))
    case, cached = run.enter(case, (2, 1, 12, 0), (3, 1, 13, 0))
    assert cached == [2, 3]
    case = case._replace(
        pool=page_pool.share(case.pool, ints(0, 1))
    )  # by two sequences
    return run.release_all(case, (0, 1, 2), (0, 1, 3), (4, 5))


def pinned(case: Case) -> list[int]:
    return np.flatnonzero(np.asarray(case.cache.pinned)).tolist()


@pytest.mark.thorough
def test_lookup_by_tokens_parent_and_salt() -> None:
    case = make_tree()
    assert case.cache.depth[:6].tolist() == [0, 1, 2, 2, 0, 1]
    assert case.pool.ref.tolist() == [1] * NUM_PAGES
    assert run.lookup(case, (NO_PAGE, 10, 0), (0, 11, 0), (1, 13, 0)) == [0, 1, 3]
    assert run.lookup(case, (NO_PAGE, 10, 7), (4, 11, 7)) == [4, 5]
    nothing = [NO_PAGE] * 3
    assert run.lookup(case, (NO_PAGE, 11, 0), (0, 10, 0), (1, 14, 0)) == nothing
    assert run.lookup(case, (0, 11, 7), (4, 11, 0), (NO_PAGE, 10, 1)) == nothing
    assert run.unsound(*case) == 0


@pytest.mark.parametrize(
    ("num_tokens", "pages"),
    [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)],
)
def test_match_leaves_one_token(num_tokens: int, pages: int) -> None:
    tokens = jnp.tile(ints(10, 9, 11, 9, 12, 9, 3)[None, :], (ROWS, 1))
    length = ints(num_tokens, num_tokens, 7)
    salt = salts(0, 0, 7)
    wanted = jnp.asarray([True, False, True])
    ids = run.match(make_tree().cache, tokens, length, salt, wanted)
    assert ids.tolist() == [
        [0, 1, 2][:pages] + [NO_PAGE] * (4 - pages),
        [NO_PAGE] * 4,  # it has opted out
        [4, 5, NO_PAGE, NO_PAGE],  # the tenant's own, as far as they go
    ]


def test_sequences_shorter_than_a_page_match_nothing() -> None:
    tokens = jnp.zeros((2, 16), jnp.int32)
    salt = salts(0, 0)
    for size, width in ((16, 1), (256, 1), (15, 2)):
        cache = jax.eval_shape(partial(prefix_cache.make_prefix_cache, 8, size))
        ids = jax.eval_shape(
            prefix_cache.match, cache, tokens, ints(16, 16), salt, salt == 0
        )
        assert ids.shape == (2, width)


def test_first_of_equal_pages_enters() -> None:
    row = (NO_PAGE, 10, 0)
    case, cached = run.enter(make_case(), (3, *row), (1, *row), (2, *row))
    assert cached == [3, 3, 3]
    case, cached = run.enter(case, (5, *row), (NO_PAGE, *row), (6, NO_PAGE, 10, 1))
    assert cached == [3, NO_PAGE, 6]
    assert case.pool.ref.tolist() == [1, 1, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1]
    assert pinned(case) == [3, 6]


def test_a_page_enters_after_a_cached_parent_of_its_salt_only() -> None:
    case = run.start_on(make_tree(), 0)
    after, cached = run.enter(case, (8, 7, 1, 0), (9, 0, 1, 7), (10, 0, 1, 0))
    assert cached == [NO_PAGE, NO_PAGE, 10]
    assert pinned(after) == [0, 1, 2, 3, 4, 5, 10]
    assert run.unsound(*after) == 0


def test_hash_collisions_are_resolved(one_hash: Programs) -> None:
    case, cached = one_hash.enter(make_case(), (0, NO_PAGE, 1, 0))
    case, cached = one_hash.enter(case, (1, NO_PAGE, 2, 0), (2, NO_PAGE, 3, 0))
    assert cached == [1, NO_PAGE]  # two new ones of one call: the second is left out
    case, cached = one_hash.enter(case, (2, NO_PAGE, 3, 0), (3, NO_PAGE, 1, 0))
    assert cached == [2, 0]
    case, cached = one_hash.enter(case, (3, 0, 1, 0), (4, NO_PAGE, 2, 0))
    assert cached == [3, 1]
    case, cached = one_hash.enter(case, (4, 1, 1, 0))  # as page 3, after another page
    case, cached = one_hash.enter(case, (5, NO_PAGE, 1, 8))  # as page 0, other salt
    assert cached == [5]
    entries = one_hash.lookup(case, (NO_PAGE, 1, 0), (NO_PAGE, 2, 0), (NO_PAGE, 3, 0))
    assert entries == [0, 1, 2]
    assert one_hash.lookup(case, (0, 1, 0), (1, 1, 0), (NO_PAGE, 1, 8)) == [3, 4, 5]
    assert one_hash.lookup(case, (NO_PAGE, 4, 0), (2, 1, 0)) == [NO_PAGE] * 2
    assert one_hash.unsound(*case) == 0


def test_full_bucket_refuses_pages(one_hash: Programs) -> None:
    case = make_case()
    for page in range(prefix_cache.BUCKET_SIZE):
        case, cached = one_hash.enter(case, (page, NO_PAGE, page, 0))
        assert cached == [page]
    full, cached = one_hash.enter(case, (9, NO_PAGE, 9, 0), (10, NO_PAGE, 3, 0))
    assert cached == [NO_PAGE, 3]
    assert_same(full.pool, case.pool)
    case, evicted = one_hash.evict(one_hash.release_all(full, (5,)), 1)
    assert evicted == 1
    case, cached = one_hash.enter(case, (9, NO_PAGE, 9, 0))
    assert cached == [9]
    assert one_hash.unsound(*case) == 0


def order_of(case: Case) -> list[int]:
    """Evicts all pages one by one."""
    order = []
    while before := pinned(case):
        case, evicted = run.evict(case, 1)
        assert evicted == 1
        assert run.unsound(*case) == 0
        order += set(before) - set(pinned(case))
    assert case.pool.num_free == len(order)
    assert (case.cache.buckets == NO_PAGE).all()
    return order


def test_lru_order_with_leaves_first() -> None:
    case = run.used(run.used(make_tree(), 4, 5), 0, 1, 2)
    assert case.cache.idle.num == 6
    assert order_of(case) == [3, 5, 4, 2, 1, 0]
    at_once, evicted = run.evict(case, 6)
    assert evicted == 6
    assert at_once.pool.stack[:6].tolist() == [3, 5, 4, 2, 1, 0]


def test_page_in_use_keeps_its_ancestors() -> None:
    case = run.start_on(make_tree(), 0, 1, 2)
    assert case.cache.idle.num == 3
    case, evicted = run.evict(case, 4)
    assert evicted == 3
    assert pinned(case) == [0, 1, 2]
    case, evicted = run.evict(run.release_all(case, (0, 1, 2)), 2)
    assert evicted == 2
    assert pinned(case) == [0]


def test_many_entries_equal_few_entries() -> None:
    """Few entries are compared in pairs, many use scatters and are packed."""
    case = make_tree()
    ids = ints(0, 1, NO_PAGE, 0, 1, 3)
    padded_ids = jnp.pad(ids, (40, 40), constant_values=NO_PAGE)
    assert (
        len(ids) < min(arrays.MAX_PAIRWISE, idle_pages.REPLAY_CHUNK) < len(padded_ids)
    )
    few, more = (run._use(case.cache, page_ids) for page_ids in (ids, padded_ids))
    assert_same(few, more)
    assert few.idle.num == case.cache.idle.num - 3


def test_recency_outlives_a_wrap_of_the_tick() -> None:
    case = make_tree()
    tick = jnp.full((), 2**31 - 3, jnp.int32)
    case = corrupt_order(case, rank=case.cache.idle.rank + tick - case.cache.tick)
    case = case._replace(cache=case.cache._replace(tick=tick))
    for row in ((4, 5), (0,), (0, 1), (0, 1, 2), (0, 1, 3)):
        case = run.used(case, *row)
    assert case.cache.tick == 2 - 2**31
    assert run.unsound(*case) == 0
    case, _ = run.evict(case, 2)
    assert pinned(case) == [0, 1, 2, 3]
    case, _ = run.evict(case, 1)
    assert pinned(case) == [0, 1, 3]


def test_evict_none_and_all() -> None:
    case = make_tree()
    same, evicted = run.evict(case, 0)
    assert evicted == 0
    assert_same(same, case)
    held = run.start_on(case, 4)
    after, _ = run.evict(held, int(held.cache.idle.num))
    assert pinned(after) == [4]
    assert after.pool.num_free == 5
    assert run.lookup(after, (NO_PAGE, 10, 0), (NO_PAGE, 10, 7)) == [NO_PAGE, 4]


def test_hash_depends_on_places_and_pages() -> None:
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 50_000, (20_000, 4)), jnp.int32)
    start = prefix_cache.empty_hash(salts(0))
    hashed = np.asarray(real_extend(jnp.repeat(start, 20_000, axis=0), tokens))
    assert len(np.unique(hashed[:, 0])) > 19_990  # 20,000 of 2**32: 0.05 collide
    assert len(np.unique(hashed, axis=0)) == 20_000
    a = ints(1, 2, 3, 4)[None, :]
    b = ints(4, 3, 2, 1)[None, :]
    ab, ba = (real_extend(real_extend(start, x), y) for x, y in ((a, b), (b, a)))
    assert (ab != ba).all()
    assert (real_extend(start, a) != real_extend(start, b)).all()
    assert ab.tolist() == [[1350062330, 1231501662]]  # on every machine


# ---------------------------------------------------------------- random walks

SLOTS = 5
WIDTH = 6
POOL = 40
BATCH = 6


class State(NamedTuple):
    cache: PrefixCache
    pool: Pool
    table: Table


class ShallowFirst(NamedTuple):
    """A rule that would evict every page before the pages after it."""

    def priority(self, uses: prefix_eviction.Uses) -> jax.Array:
        return uses.depth


RULES = {
    "LRU": (prefix_eviction.LRU(), lambda model, page: model.last_used[page]),
    "FIFO": (prefix_eviction.FIFO(), lambda model, page: model.entered[page]),
    "LFU": (prefix_eviction.LFU(), lambda model, page: model.num_uses[page]),
    "shallow first": (ShallowFirst(), lambda model, page: model.depth(page)),
}


class Model:
    """The cache in plain Python: contents in a dict, eviction by a full search."""

    def __init__(self, oracle: Oracle, rule: str) -> None:
        self.oracle = oracle
        self.page_of: dict[tuple, int] = {}  # (pages of tokens up to it, salt) -> page
        self.content: dict[int, tuple] = {}  # and back
        self.entered: dict[int, int] = {}
        self.last_used: dict[int, int] = {}
        self.num_uses: dict[int, int] = {}
        self.rank: dict[int, int] = {}
        self.tick = 0
        _, self.priority = RULES[rule]
        self.hash_of = memo(self._hash_of)
        self.extend = compiled(lambda *arguments: prefix_cache.extend_hash(*arguments))

    def _hash_of(self, pages: tuple, salt: int) -> tuple[int, int]:
        if not pages:
            return tuple(np.asarray(prefix_cache.empty_hash(salts(salt)))[0].tolist())
        before = np.asarray([self.hash_of(pages[:-1], salt)], np.uint32)
        hashed = self.extend(before, np.asarray([pages[-1]], np.int32))
        return tuple(np.asarray(hashed)[0].tolist())

    def match(self, tokens: list[int], salt: int) -> list[int]:
        size = self.oracle.page_size
        pages = ()
        matches = []
        for start in range(0, len(tokens) - size, size):
            pages += (tuple(tokens[start : start + size]),)
            if (pages, salt) not in self.page_of:
                break
            matches.append(self.page_of[pages, salt])
        return matches

    def use(self, ids: list[int]) -> None:
        for page in ids:
            self.num_uses[page] += 1

    def rank_idle(self, rows: list[list[int]]) -> None:
        """Ranks pages that became idle by a release, and their ancestors."""
        self.tick += 1
        rows = [[page for page in row if page in self.content] for row in rows]
        self.last_used |= {page: self.tick for row in rows for page in row}
        for row in rows:
            for k, page in enumerate(row):
                if self.oracle.ref[page] == 1:
                    new = self.priority(self, page)
                    for above in row[: k + 1]:
                        self.rank[above] = max(self.rank.get(above, new), new)

    def enter(self, rows: list[tuple[int, int, tuple, int] | None]) -> list[int]:
        cached = []
        hashes = set()
        self.tick += 1
        for row in rows:
            content = None
            if row is not None:
                page, parent, tokens, salt = row
                pages, its_salt = self.content.get(parent, ((), None))
                if parent == NO_PAGE or its_salt == salt:
                    content = ((*pages, tokens), salt)
            if content is not None and content not in self.page_of:
                hashed = self.hash_of(*content)
                if hashed not in hashes and self.has_room(hashed[0]):
                    self.page_of[content], self.content[page] = page, content
                    self.entered[page] = self.tick
                    self.num_uses[page] = 1
                    self.rank.pop(page, None)
                    self.oracle.share([page])
                hashes.add(hashed)
            cached.append(self.page_of.get(content, NO_PAGE))
        return cached

    def has_room(self, word: int) -> bool:
        buckets = 2 << (len(self.oracle.ref) - 1).bit_length()
        words = [self.hash_of(*content)[0] for content in self.content.values()]
        return sum(other % buckets == word % buckets for other in words) < 8

    def depth(self, page: int) -> int:
        return len(self.content[page][0]) - 1

    def idle(self) -> list[int]:
        """Returns the idle pages in the order of eviction."""
        idle = [page for page in self.content if self.oracle.ref[page] == 1]
        return sorted(idle, key=lambda p: (self.rank[p], -self.depth(p), p))

    def evict(self, num: int) -> int:
        victims = self.idle()[:num]
        for page in victims:
            del self.page_of[self.content.pop(page)]
        self.oracle.release(victims)
        return len(victims)

    def check(self, cache: PrefixCache) -> None:
        ids = np.flatnonzero(np.asarray(cache.pinned)).tolist()
        assert set(ids) == set(self.content)
        assert cache.num_pinned == len(ids)
        for field in ("entered", "num_uses"):
            fields = [getattr(self, field)[page] for page in ids]
            assert np.asarray(getattr(cache, field))[ids].tolist() == fields
        idle = self.idle()
        ranks = np.asarray(cache.idle.rank)[idle]
        assert ranks.tolist() == [self.rank[page] for page in idle]
        used = np.asarray(cache.last_used)[idle]
        assert used.tolist() == [self.last_used[page] for page in idle]
        ahead = np.asarray(next_to_go(cache.idle, cache.depth))
        few = min(len(idle), idle_pages.EVICTION_CHUNK)
        assert ahead[:few].tolist() == idle[:few]
        assert (ahead[few:] == NO_PAGE).all()


next_to_go: Any = compiled(idle_pages.eviction_candidates)


def operations(
    size: int, rule: prefix_eviction.Eviction | None = None
) -> dict[str, Any]:
    """Returns the engine's operations on the cache, one program over all slots each."""

    def admit(state, tokens, num_tokens, salt, wanted):
        cache, pool, table = state
        ids = prefix_cache.match(cache, tokens, num_tokens, salt, wanted)
        length = jnp.sum(ids != NO_PAGE, axis=1, dtype=jnp.int32) * size
        table = table._replace(
            page_ids=jnp.where(ids == NO_PAGE, table.page_ids, ids),
            length=table.length + length,
        )
        pool, table, _, enough = memory.reserve(
            page_pool.share(pool, ids),
            table,
            num_tokens,
            page_size=size,
            max_new_pages=WIDTH,
        )
        return State(prefix_eviction.mark_used(cache, ids), pool, table), enough

    def fill(state, filled, tokens, salt, wanted):
        cache, pool, table = state
        slot = jnp.arange(SLOTS, dtype=jnp.int32)
        column = table.length // size
        place = column[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None, :]
        full_pages = arrays.take(table.page_ids, (slot, column), fill=NO_PAGE)
        full_pages = jnp.where(filled & wanted, full_pages, NO_PAGE)
        parent = arrays.take(table.page_ids, (slot, column - 1), fill=NO_PAGE)
        content = arrays.take(tokens, (slot[:, None], place), fill=0)
        cache, pool, cached = prefix_cache.insert(
            cache, pool, full_pages, parent, content, salt
        )
        other = (cached != NO_PAGE) & (cached != full_pages)
        cache = prefix_eviction.mark_used(cache, jnp.where(other, cached, NO_PAGE))
        pool = page_pool.share(pool, jnp.where(other, cached, NO_PAGE))
        pool = page_pool.release(pool, jnp.where(other, full_pages, NO_PAGE))
        places = (slot, jnp.where(other, column, NO_PAGE))
        page_ids = arrays.put(table.page_ids, places, cached, "set")
        table = advance_lengths(table, jnp.where(filled, size, 0))
        return State(cache, pool, table._replace(page_ids=page_ids)), cached

    def finish(state, finished):
        rows = jnp.where(finished[:, None], state.table.page_ids, NO_PAGE)
        pool, left = page_pool.release_counted(state.pool, rows)
        table = clear_slots(state.table, finished)
        return State(
            prefix_eviction.mark_idle(state.cache, rows, left, rule), pool, table
        ), None

    def evict(state, num):
        cache, pool, num = prefix_eviction.evict(*state[:2], num)
        return State(cache, pool, state.table), num

    def pin_elsewhere(state, taken, back):
        cache = prefix_eviction.mark_used(state.cache, taken)
        pool = page_pool.share(state.pool, taken)
        pool, left = page_pool.release_counted(pool, back)
        return State(
            prefix_eviction.mark_idle(cache, back, left, rule), pool, state.table
        ), None

    return {f.__name__: f for f in (admit, fill, finish, evict, pin_elsewhere)}


@memo
def programs(size: int, hashes: int, rule: str) -> tuple[dict[str, Any], Any]:
    """Compiles the operations and all checks once for each page size and hash.

    `hashes` distinguishes a patched hash function from the real one.
    """

    def check(state: State, lent: jax.Array) -> jax.Array:
        cache, pool, table = state
        alive = (table.length + table.ahead) > 0
        pins = cache.pinned.astype(jnp.int32) + lent
        faults = memory.violations(pool, table, alive, page_size=size, pins=pins)
        wrong = (prefix_cache.count_prefix_faults(cache, pool), *faults)
        return jnp.stack([*wrong, cache.idle.num])

    verbs = operations(size, RULES[rule][0])
    return {verb: compiled(f) for verb, f in verbs.items()}, compiled(check)


class Walk:
    """Random sequences that share prefixes, compared between JAX and the model."""

    def __init__(self, seed: int, size: int, hashes: int, rule: str = "LRU") -> None:
        self.rng = np.random.default_rng(seed)
        self.size = size
        self.oracle = Oracle(POOL, SLOTS, WIDTH, size)
        self.model = Model(self.oracle, rule)
        self.state = State(
            prefix_cache.make_prefix_cache(POOL, size),
            page_pool.make_pool(POOL),
            make_table(SLOTS, WIDTH),
        )
        self.tokens = np.zeros((SLOTS, WIDTH * size), np.int32)
        self.salt = np.zeros(SLOTS, np.uint32)
        self.wanted = np.zeros(SLOTS, bool)
        self.lent: list[list[int]] = []  # rows of sequences outside the table
        self.calls: dict[str, tuple] = {}  # the last arguments of every operation
        self.run, self.check = programs(size, hashes, rule)
        self.seen = dict.fromkeys(("hit", "equal", "refused", "evicted"), 0)

    def step(self) -> None:
        verb = self.rng.choice(list(self.run), p=[0.2, 0.45, 0.15, 0.1, 0.1])
        arguments, expected = getattr(self, verb)()
        self.calls[verb] = arguments
        self.state, answer = self.run[verb](self.state, *arguments)
        if expected is not None:
            assert np.asarray(answer).tolist() == expected, (verb, arguments)
        uses = np.asarray([page for row in self.lent for page in row], int)
        lent = np.bincount(uses, minlength=POOL).astype(np.int32)
        *wrong, num_idle = self.check(self.state, lent).tolist()
        assert not any(wrong), (verb, arguments, wrong)
        assert num_idle == len(self.model.idle())
        self.oracle.check(self.state.pool, self.state.table)
        self.model.check(self.state.cache)

    def mask(self, chance: float) -> np.ndarray:
        return self.rng.random(SLOTS) < chance

    def admit(self) -> tuple[tuple, bool]:
        rng = self.rng
        oracle = self.oracle
        new = self.mask(0.6) & ~np.asarray(oracle.live())
        pages = rng.choice(3, (SLOTS, WIDTH), p=[0.8, 0.17, 0.03])
        spread = np.repeat(pages, self.size, axis=1).astype(np.int32)
        self.tokens = np.where(new[:, None], spread, self.tokens)
        self.salt = np.where(new, rng.choice(2, SLOTS, p=[0.8, 0.2]), self.salt)
        self.salt = self.salt.astype(np.uint32)
        self.wanted = np.where(new, self.mask(0.9), self.wanted)
        num_tokens = np.where(new, rng.integers(1, WIDTH * self.size + 1, SLOTS), 0)
        for slot in np.flatnonzero(new & self.wanted):
            tokens = self.tokens[slot, : num_tokens[slot]].tolist()
            ids = self.model.match(tokens, int(self.salt[slot]))
            self.oracle.share(ids)
            self.model.use(ids)
            oracle.rows[slot] = ids
            oracle.length[slot] = len(ids) * self.size
            self.seen["hit"] += len(ids)
        lengths = num_tokens.astype(np.int32)
        enough = oracle.reserve(lengths.tolist(), WIDTH) is not None
        return (self.tokens, lengths, self.salt, self.wanted), enough

    def fill(self) -> tuple[tuple, list[int]]:
        oracle = self.oracle
        filled = self.mask(0.7) & (np.asarray(oracle.ahead) >= self.size)
        rows = []
        columns = [n // self.size for n in oracle.length]
        for slot, column in enumerate(columns):
            if not (filled[slot] and self.wanted[slot]):
                rows.append(None)
                continue
            ids = [NO_PAGE, *oracle.rows[slot]]
            tokens = self.tokens[slot, column * self.size :][: self.size].tolist()
            parent, page = ids[column : column + 2]
            rows.append((page, parent, tuple(tokens), int(self.salt[slot])))
        cached = self.model.enter(rows)
        for slot, (row, page) in enumerate(zip(rows, cached, strict=True)):
            self.seen["refused"] += row is not None and page == NO_PAGE
            if row is not None and page not in (NO_PAGE, row[0]):
                oracle.share([page])
                self.model.use([page])
                oracle.rows[slot][columns[slot]] = page
                self.seen["equal"] += 1
        for row, page in zip(rows, cached, strict=True):
            if row is not None and page not in (NO_PAGE, row[0]):
                oracle.release([row[0]])
        oracle.advance(np.where(filled, self.size, 0).tolist())
        return (filled, self.tokens, self.salt, self.wanted), cached

    def finish(self) -> tuple[tuple, None]:
        finished = self.mask(0.4)
        rows = [row for row, f in zip(self.oracle.rows, finished, strict=True) if f]
        rows = [list(row) for row in rows]
        self.oracle.drop(finished.tolist())
        self.model.rank_idle(rows)
        return (finished,), None

    def evict(self) -> tuple[tuple, int]:
        num = int(self.rng.integers(0, 2 * BATCH))
        evicted = self.model.evict(num)
        self.seen["evicted"] += evicted
        return (np.int32(num),), evicted

    def pin_elsewhere(self) -> tuple[tuple, None]:
        """Starts and releases sequences outside of the table on cached pages."""
        content = self.model.content
        page_of = self.model.page_of
        taken = []
        for page in self.pick_some(np.asarray(list(content)), 2):
            pages, salt = content[page]
            taken.append([page_of[pages[: k + 1], salt] for k in range(len(pages))])
        order = self.rng.permutation(len(self.lent))[: self.rng.integers(0, 4)]
        back = [self.lent[i] for i in order]
        self.lent = [row for i, row in enumerate(self.lent) if i not in order] + taken
        for row in taken:
            self.oracle.share(row)
            self.model.use(row)
        self.oracle.release([page for row in back for page in row])
        self.model.rank_idle(back)
        padded = [
            [row + [NO_PAGE] * (WIDTH - len(row)) for row in rows]
            + [[NO_PAGE] * WIDTH] * (3 - len(rows))
            for rows in (taken, back)
        ]
        return tuple(np.asarray(padded, np.int32)), None

    def pick_some(self, ids: np.ndarray, max_ids: int) -> list[int]:
        chosen = self.rng.permutation(ids.astype(int))[:max_ids]
        return chosen[: self.rng.integers(0, max_ids + 1)].tolist()


@pytest.fixture
def few_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses three buckets and five hashes: full buckets and collisions are common."""

    def extend(before: jax.Array, tokens: jax.Array) -> jax.Array:
        few = real_extend(before, tokens)[:, :1] % np.uint32(5)
        return jnp.concatenate([few % np.uint32(3), few], axis=1)

    replace(monkeypatch, prefix_cache, "extend_hash", extend)


def long(*arguments: Any) -> Any:
    return pytest.param(*arguments, 20_000, marks=pytest.mark.slow)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "size", "rule", "steps"),
    [
        pytest.param(0, 4, "LRU", 1500, marks=pytest.mark.slow),
        *((8, 4, rule, 500) for rule in ("FIFO", "LFU", "shallow first")),
        *(
            long(2 + i, size, rule)
            for i, (size, rule) in enumerate(zip((1, 3, 4, 16), RULES, strict=True))
        ),
    ],
)
def test_a_random_walk_equals_the_model(
    seed: int, size: int, rule: str, steps: int
) -> None:
    walk = Walk(seed, size, 2**64, rule)
    for _ in range(steps):
        walk.step()
    min_count = min(walk.seen[key] for key in ("hit", "equal", "evicted"))
    assert min_count > min(steps, 1500) / 50, walk.seen
    assert all(run._cache_size() == 1 for run in walk.run.values())


@pytest.mark.thorough
@pytest.mark.usefixtures("few_hashes")
@pytest.mark.parametrize(
    ("seed", "size", "steps"),
    [pytest.param(1, 1, 700, marks=pytest.mark.slow), long(6, 2)],
)
def test_a_random_walk_of_few_hashes_equals_the_model(
    seed: int, size: int, steps: int
) -> None:
    walk = Walk(seed, size, hashes=5)
    for _ in range(steps):
        walk.step()
    assert min(walk.seen.values()) > 20, walk.seen


# ---------------------------------------------------------------- faults, purity


CONTENT = {"hash": slice(1, 3), "parent": 3, "salt": 4, "tokens": slice(5, None)}


def change(case: Case, **fields: tuple[Any, int | bool]) -> Case:
    """Overwrites entries of the cache: field=(index, value)."""
    cache = case.cache
    for key, (i, v) in fields.items():
        new = getattr(cache, key).at[i].set(v)
        if key in CONTENT:
            at = (slice(None), CONTENT[key])
            key = "content"
            new = cache.content.at[at].set(new.astype(jnp.int32))
        changed: dict[str, Any] = {key: new}
        cache = cache._replace(**changed)
    return case._replace(cache=cache)


def entry(case: Case, page: int) -> tuple[int, int]:
    bucket, column = np.argwhere(np.asarray(case.cache.buckets) == page)[0].tolist()
    return bucket, column


def corrupt_order(case: Case, **fields: Any) -> Case:
    """Overwrites fields of the order of idle pages."""
    idle = case.cache.idle._replace(**fields)
    return case._replace(cache=case.cache._replace(idle=idle))


def corrupt_winner(case: Case) -> Case:
    first, last = case.cache.idle.rounds
    return corrupt_order(case, rounds=(first, last.at[0].set(0)))


FAULTS = {
    "lost pin": lambda c: c._replace(pool=run.release(c.pool, ints(3))),
    "used without its parent": lambda c: c._replace(
        pool=page_pool.share(c.pool, ints(2))
    ),
    "in use, and idle": lambda c: c._replace(pool=page_pool.share(c.pool, ints(0))),
    "let go in silence": lambda c: c._replace(
        pool=run.release(run.start_on(c, 4).pool, ints(4)),
        cache=run.start_on(c, 4).cache,
    ),
    "parent goes first": lambda c: corrupt_order(
        c, rank=c.cache.idle.rank.at[1].add(-9)
    ),
    "no rank": lambda c: corrupt_order(c, ranked=c.cache.idle.ranked.at[5].set(False)),
    "wrong number of idle pages": lambda c: corrupt_order(c, num=c.cache.idle.num - 1),
    "wrong winner": corrupt_winner,
    "wrong number of pages": lambda c: c._replace(
        cache=c.cache._replace(num_pinned=c.cache.num_pinned + 1)
    ),
    "wrong parent": lambda c: change(c, parent=(3, 0)),
    "parent of another tenant": lambda c: change(c, parent=(2, 5)),
    "parent evicted first": lambda c: change(
        c, depth=(1, NO_PAGE), buckets=(entry(c, 1), NO_PAGE)
    ),
    "entry of an evicted page": lambda c: change(c, depth=(3, NO_PAGE)),
    "entry lost": lambda c: change(c, buckets=(entry(c, 3), NO_PAGE)),
    "entry of a page never cached": lambda c: change(c, buckets=((0, 7), 9)),
    "entry twice": lambda c: change(c, buckets=((0, 7), 3)),
    "entry of another page": lambda c: change(c, buckets=(entry(c, 3), 2)),
    "wrong hash": lambda c: change(c, hash=((3, 1), 1)),
    "other tokens": lambda c: change(c, tokens=((2, 1), 1)),
    "other salt": lambda c: change(c, salt=(4, 1)),
    "wrong depth": lambda c: change(c, depth=(5, 2)),
    "twice cached": lambda c: change(
        c,
        buckets=((entry(c, 5)[0], 7), 8),
        hash=(8, c.cache.hash[5]),
        parent=(8, 4),
        tokens=(8, c.cache.tokens[5]),
        salt=(8, 7),
        depth=(8, 1),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_seeded_fault_is_flagged(name: str) -> None:
    case = make_tree()
    assert run.unsound(*case) == 0
    assert run.unsound(*FAULTS[name](case)) > 0


@pytest.mark.slow
def test_vmap_equals_single_runs() -> None:
    walk = Walk(7, 4, hashes=2**64)
    moments = []
    for _ in range(4):
        for _ in range(40):
            walk.step()
        moments.append((walk.state, dict(walk.calls)))

    def compiled_operations(verbs: dict[str, Any]) -> Any:
        return lambda state, calls: {
            verb: f(state, *calls[verb]) for verb, f in verbs.items()
        }

    assert_maps(
        compiled_operations(operations(4)), moments, compiled_operations(walk.run)
    )
