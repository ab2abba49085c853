"""Token trees: ancestors, the accepted path, and moves of K and V."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import drafting
from jaxkv.engine.drafting import Drafts
from jaxkv.engine.emitting import TokenHistory, verification
from jaxkv.memory import NO_PAGE, Rows, make_pages, move_tokens
from jaxkv.models import PagedForward, make_model_pages
from tests.support import engines

pytestmark = pytest.mark.usefixtures("full_optimization")

SLOTS = 6
NUM = 9
SEEDS = range(4)


def random_drafts(seed: int) -> Drafts:
    """Random trees of up to `NUM` drafts; later entries are arbitrary."""
    rng = np.random.default_rng(seed)
    parents = [
        [rng.integers(0, place) for place in range(1, NUM + 1)] for _ in "slots!"
    ]
    num = rng.integers(0, NUM + 1, SLOTS)
    num[:2] = 0, NUM
    tokens = rng.integers(0, 50, (SLOTS, NUM))
    num, tokens, parents = (jnp.asarray(x, "int32") for x in (num, tokens, parents))
    return Drafts(num, tokens, parents=parents)


def way_to(parents: np.ndarray, place: int) -> list[int]:
    """Returns the places on the path to a draft, the root excluded."""
    path = []
    while place:
        path.append(place)
        place = int(parents[place - 1])
    return path[::-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_descent_equals_a_walk_to_the_root(seed: int) -> None:
    parents = random_drafts(seed).parents
    assert parents is not None
    depth, ancestors = map(np.asarray, jax.jit(drafting.tree)(parents))
    for slot, place in np.ndindex(SLOTS, NUM):
        path = way_to(np.asarray(parents)[slot], place + 1)
        assert depth[slot, place] == len(path)
        assert (np.flatnonzero(ancestors[slot, place]) + 1).tolist() == sorted(path)


@pytest.mark.parametrize("width", [1, 3])
def test_children_are_in_order(width: int) -> None:
    drafts = random_drafts(0)
    children = np.asarray(drafting.find_children(drafts, width))
    num = np.asarray(drafts.num)
    parents = np.asarray(drafts.parents)
    for slot, place in np.ndindex(SLOTS, NUM + 1):
        expected_children = np.flatnonzero(parents[slot, : num[slot]] == place) + 1
        expected_children = expected_children[:width].tolist()
        assert children[slot, place].tolist() == expected_children + [-1] * (
            width - len(expected_children)
        )


def test_a_chain_is_a_tree_of_one_branch() -> None:
    drafts = random_drafts(1)
    chain = jnp.broadcast_to(jnp.arange(NUM, dtype=jnp.int32)[None, :], (SLOTS, NUM))
    as_tree = drafts._replace(parents=chain)
    one = drafting.find_children(drafts._replace(parents=None), 1)
    np.testing.assert_array_equal(one, drafting.find_children(as_tree, 1))
    accepts = jnp.asarray(np.random.default_rng(1).random((SLOTS, NUM + 1, 1)) < 0.8)
    plain = drafts._replace(parents=None)
    num, path = verification.accept_path(one, accepts, plain)
    as_tree = as_tree._replace(tree=drafting.tree(chain))
    other_num, other = verification.accept_path(one, accepts, as_tree)
    np.testing.assert_array_equal(num, other_num)
    for slot, length in enumerate(num.tolist()):
        np.testing.assert_array_equal(path[slot, :length], other[slot, :length])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_path_follows_the_first_accepted_child(seed: int) -> None:
    drafts = random_drafts(seed)
    rng = np.random.default_rng(seed)
    assert drafts.parents is not None
    child = drafting.find_children(drafts, 3)
    accepts = rng.random((SLOTS, NUM + 1, 3)) < 0.6
    drafts = drafts._replace(tree=drafting.tree(drafts.parents))
    num, path = verification.accept_path(child, jnp.asarray(accepts), drafts)
    lengths = []
    for slot in range(SLOTS):
        place = 0
        expected_path = []
        while True:
            decisions = zip(
                np.asarray(child)[slot, place], accepts[slot, place], strict=True
            )
            taken = [node for node, accept in decisions if node >= 0 and accept]
            if not taken:
                break
            place = int(taken[0])
            expected_path.append(place)
        assert np.asarray(path)[slot, : len(expected_path)].tolist() == expected_path
        lengths.append(len(expected_path))
    assert num.tolist() == lengths
    assert max(lengths) > 1


def test_every_place_has_the_tokens_on_its_path() -> None:
    drafts = random_drafts(2)
    length = 30
    assert drafts.parents is not None
    rng = np.random.default_rng(2)
    width = NUM + 1
    num_known = rng.integers(1, 10, SLOTS)
    tokens = rng.integers(50, 99, (SLOTS, length))
    # In a chain they would have consecutive positions.
    rows = TokenHistory(
        tokens=jnp.asarray(tokens.repeat(width, axis=0), "int32"),
        num_tokens=jnp.asarray(
            (num_known[:, None] + np.arange(width)).reshape(-1), "int32"
        ),
        prompt_length=jnp.zeros(SLOTS * width, "int32"),
        request_id=jnp.zeros(SLOTS * width, "int32"),
    )
    drafts = drafts._replace(tree=drafting.tree(drafts.parents))
    histories = verification.known_tokens_by_branch(rows, drafts)
    for slot, place in np.ndindex(SLOTS, width):
        path = way_to(np.asarray(drafts.parents)[slot], place)
        wanted = [*tokens[slot, : num_known[slot]]]
        wanted += [int(drafts.tokens[slot, node - 1]) for node in path]
        row = slot * width + place
        assert histories.num_tokens[row] == len(wanted)
        assert histories.tokens[row, : len(wanted)].tolist() == wanted


def test_a_window_must_be_wider_than_a_tree() -> None:
    model = dataclasses.replace(engines.MODEL, window=8)
    pages = jax.eval_shape(lambda: make_model_pages(model, engines.SERVED))
    index: Any = jax.ShapeDtypeStruct((9,), jnp.int32)
    table: Any = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    for num_drafts in (8, 9):
        tree: Any = jax.ShapeDtypeStruct((9, num_drafts), bool)
        rows = Rows(index, index, index, table, index, index, ancestors=tree)
        with pytest.raises(ValueError, match=f"window=8 must be above {num_drafts=}"):
            jax.eval_shape(PagedForward(model), engines.params(), pages, rows)


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_moved_tokens_equal_a_loop(kv_dtype: Any) -> None:
    """K, V and scales of the model and of a draft model; shared places do not move."""
    rng = np.random.default_rng(3)
    shape: Any = {"num_pages": 7, "page_size": 4, "num_kv_heads": 2, "head_dim": 8}
    both = [
        make_pages(num_layers=n, dtype="float32", kv_dtype=kv_dtype, **shape)
        for n in (3, 1)
    ]
    pages = jax.tree.map(
        lambda x: jnp.asarray(rng.integers(-99, 99, x.shape), x.dtype),
        both[0]._replace(draft_pages=both[1]),
    )
    page_ids = np.array([[5, 0, 2], [3, 6, NO_PAGE]])
    source = np.array([[4, 6, 7, 11], [2, 3, 7, 9]])
    target = np.array([[4, 5, 6, -1], [1, 2, 3, -1]])
    moved = jax.jit(move_tokens)(
        pages, *(jnp.asarray(x, "int32") for x in (page_ids, source, target))
    )
    for before, after in zip(*map(jax.tree.leaves, (pages, moved)), strict=True):
        before, wanted = np.asarray(before), np.array(before)
        for slot, entry in np.ndindex(source.shape):
            source_place = source[slot, entry]
            target_place = target[slot, entry]
            if target_place >= 0:
                read = page_ids[slot, source_place // 4]
                at = source_place % 4
                written = page_ids[slot, target_place // 4]
                to = target_place % 4
                wanted[:, written, :, to] = before[:, read, :, at]
        np.testing.assert_array_equal(after, wanted)
