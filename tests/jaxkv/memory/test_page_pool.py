"""The pool: hand-worked cases, random batches against the oracle, cost, purity."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxkv import arrays
from jaxkv.memory import page_pool
from jaxkv.memory.page_pool import NO_PAGE, Pool
from tests.support.oracle import Oracle

NUM_PAGES, ROWS, WIDTH = 24, 4, 5
allocate = jax.jit(page_pool.allocate, static_argnames="max_pages")
share, release = jax.jit(page_pool.share), jax.jit(page_pool.release)
unsound = jax.jit(page_pool.unsound)


def ints(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def assert_same(a: object, b: object) -> None:
    """Every leaf equal, bit for bit."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def free(pool: Pool) -> list[int]:
    """Free pages, the next one to be handed out last."""
    return np.asarray(pool.stack)[: int(pool.num_free)].tolist()


def test_rows_are_served_in_order_from_the_top_of_the_stack() -> None:
    pool = page_pool.make_pool(8)
    pool, ids, enough = allocate(pool, ints(2, 0, 3), max_pages=3)
    assert enough
    assert ids.tolist() == [[0, 1, NO_PAGE], [NO_PAGE] * 3, [2, 3, 4]]
    assert pool.ref.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert free(pool) == [7, 6, 5]


def test_released_pages_are_handed_out_again_last_first() -> None:
    pool, _, _ = allocate(page_pool.make_pool(6), ints(5), max_pages=5)
    pool = release(pool, ints(3, NO_PAGE, 0, 2))
    assert free(pool) == [5, 3, 0, 2]
    _, ids, _ = allocate(pool, ints(3), max_pages=3)
    assert ids.tolist() == [[2, 0, 3]]


def test_order_is_the_order_of_handing_out() -> None:
    pool = page_pool.make_pool(4, ints(2, 0, 3, 1))
    _, ids, _ = allocate(pool, ints(1, 3), max_pages=3)
    assert ids.tolist() == [[2, NO_PAGE, NO_PAGE], [0, 3, 1]]


def test_a_shared_page_is_free_after_its_last_release() -> None:
    pool, ids, _ = allocate(page_pool.make_pool(4), ints(2), max_pages=2)
    pool = share(pool, jnp.concatenate([ids, ids]))
    assert pool.ref.tolist() == [3, 3, 0, 0]
    pool = release(pool, ints(0, 1, 1))
    assert pool.ref.tolist() == [2, 1, 0, 0]
    pool = release(pool, ints(0, 1, NO_PAGE, 0))  # page 0 stands last at the end
    assert free(pool) == [3, 2, 1, 0]
    assert unsound(pool) == 0


@pytest.mark.parametrize("want", [(3, 2), (5, 0), (-1, 1), (4, 4)])
def test_a_refused_allocation_changes_nothing(want: tuple[int, int]) -> None:
    pool, _, _ = allocate(page_pool.make_pool(8), ints(4), max_pages=4)
    pool = release(pool, ints(1))._replace(num_free=ints(4)[0])  # 4 left
    after, ids, enough = allocate(pool, ints(*want), max_pages=4)
    assert not enough
    assert (ids == NO_PAGE).all()
    assert_same(after, pool)


def test_all_pages_and_none() -> None:
    pool = page_pool.make_pool(3)
    full, ids, enough = allocate(pool, ints(3), max_pages=3)
    assert enough
    assert full.num_free == 0
    assert_same(allocate(full, ints(0), max_pages=3), (full, ids * 0 + NO_PAGE, enough))
    assert release(full, ids).num_free == 3
    assert_same(release(full, jnp.full((2, 3), NO_PAGE, jnp.int32)), full)
    assert_same(release(full, jnp.zeros((0,), jnp.int32)), full)


def test_sentinels_never_reach_the_last_page() -> None:
    none = ints(NO_PAGE, 7, NO_PAGE)  # 7 is past the end of 4 pages
    pool = page_pool.make_pool(4)
    assert_same(share(pool, none), pool)
    full, _, _ = allocate(pool, ints(4), max_pages=4)
    assert_same(release(full, none), full)
    assert arrays.take(full.ref, none, fill=9).tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "num_pages=0 must be"), ((3, ints(1, 0)), "must be .3,.")],
)
def test_misuse_of_sizes_is_an_error(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        page_pool.make_pool(*arguments)


def test_unsound_sees_each_breach() -> None:
    pool, ids, _ = allocate(page_pool.make_pool(6), ints(3), max_pages=3)
    assert unsound(pool) == 0
    twice = release(release(pool, ids), ids[0, :1])
    assert twice.ref.tolist() == [-1, 0, 0, 0, 0, 0]  # not clamped
    assert unsound(twice) > 0
    assert unsound(release(pool, ints(5))) > 0  # was free already
    assert unsound(release(pool, ints(0, 0))) > 0  # twice in one call
    assert unsound(share(pool, ints(5))) > 0  # use of a free page
    assert unsound(pool._replace(num_free=pool.num_free - 1)) > 0  # a page lost
    assert unsound(pool._replace(num_free=pool.num_free + 1)) > 0
    assert unsound(pool._replace(num_free=ints(7)[0])) > 0
    assert unsound(page_pool.make_pool(3)._replace(num_free=ints(4)[0])) > 0
    assert unsound(pool._replace(stack=pool.stack.at[0].set(4))) > 0  # 4 twice
    assert unsound(pool._replace(stack=pool.stack.at[0].set(6))) > 0  # no page
    assert unsound(page_pool.make_pool(3, ints(0, 1, 1))) > 0


def padded(ids: list[int], size: int) -> jax.Array:
    return ints(*ids, *[NO_PAGE] * (size - len(ids)))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_sequence_of_batches_equals_the_oracle(data: st.DataObject) -> None:
    oracle = Oracle(NUM_PAGES, 1, 1, 1)
    pool, uses = page_pool.make_pool(NUM_PAGES), []  # every use, a page may stand often
    for _ in range(data.draw(st.integers(1, 12))):
        verb = data.draw(st.sampled_from(["allocate", "share", "release"]))
        if verb == "allocate":
            size = st.lists(st.integers(0, WIDTH), min_size=ROWS, max_size=ROWS)
            want = data.draw(size)
            taken = oracle.allocate(want, WIDTH)
            before = pool
            pool, ids, enough = allocate(pool, ints(*want), max_pages=WIDTH)
            assert bool(enough) == (taken is not None)
            if taken is None:
                assert_same(pool, before)
            rows = [
                row + [NO_PAGE] * (WIDTH - len(row)) for row in taken or [[]] * ROWS
            ]
            assert ids.tolist() == rows
            uses += [page for row in taken or [] for page in row]
        else:
            chosen = data.draw(st.permutations(uses))[: ROWS * WIDTH]
            chosen = chosen[: data.draw(st.integers(0, len(chosen)))]
            getattr(oracle, verb)(chosen)
            batch = padded(chosen, ROWS * WIDTH).reshape(ROWS, WIDTH)
            pool = {"share": share, "release": release}[verb](pool, batch)
            for page in chosen:
                uses.append(page) if verb == "share" else uses.remove(page)
        np.testing.assert_array_equal(pool.ref, oracle.ref)
        assert free(pool) == oracle.free
        assert unsound(pool) == 0


def random_pools(count: int) -> tuple[Pool, jax.Array]:
    """Stacked pools in different states, and ids in use of each, some repeated."""
    pools, used = [], []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        pool = page_pool.make_pool(NUM_PAGES, ints(*rng.permutation(NUM_PAGES)))
        pool, ids, _ = allocate(pool, ints(*rng.integers(0, 6, ROWS)), max_pages=WIDTH)
        pools.append(share(pool, ids[:2]))
        used.append(jnp.where(rng.random(ids.shape) < 0.8, ids, NO_PAGE))
    stack = partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    return stack(*pools), jnp.stack(used)


@pytest.mark.parametrize("verb", ["allocate", "share", "release", "unsound"])
def test_vmap_equals_single_runs(verb: str) -> None:
    pools, ids = random_pools(6)
    want = jnp.asarray(np.random.default_rng(0).integers(0, 4, (6, ROWS)), jnp.int32)
    run, extra = {
        "allocate": (partial(page_pool.allocate, max_pages=WIDTH), (want,)),
        "share": (page_pool.share, (ids,)),
        "release": (page_pool.release, (ids,)),
        "unsound": (page_pool.unsound, ()),
    }[verb]
    together = jax.jit(jax.vmap(run))(pools, *extra)
    for i in range(6):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], (pools, *extra))
        assert_same(
            jax.tree.map(lambda leaf, i=i: leaf[i], together), jax.jit(run)(*one)
        )


def equations(jaxpr: Jaxpr):
    """All equations of a program, those of inner programs instead of the calls."""
    for equation in jaxpr.eqns:
        inner = [p for p in equation.params.values() if isinstance(p, ClosedJaxpr)]
        if "jit" in equation.primitive.name:
            for program in inner:
                yield from equations(program.jaxpr)
        else:
            yield equation


OPERATIONS = {
    "allocate": (partial(page_pool.allocate, max_pages=WIDTH), (ROWS,)),
    "share": (page_pool.share, (ROWS, WIDTH)),
    "release": (page_pool.release, (ROWS, WIDTH)),
}


@pytest.mark.parametrize("verb", OPERATIONS)
def test_cost_does_not_grow_with_the_pool(verb: str) -> None:
    """What touches an array of the pool's size is a scatter or a gather, in place."""
    run, shape = OPERATIONS[verb]
    pool = jax.eval_shape(partial(page_pool.make_pool, 65_521))
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    for equation in equations(jax.make_jaxpr(run)(pool, ids).jaxpr):
        if any(v.aval.shape == (65_521,) for v in equation.outvars):
            assert equation.primitive.name.startswith("scatter"), equation
    compiled = jax.jit(run, donate_argnums=0).lower(pool, ids).compile()
    assert not re.findall(r"s32\[65521\]\S* copy\(", str(compiled.as_text()))
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 65_521
