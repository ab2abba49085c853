"""Attention over pages against plain float64 loops, and against itself."""

import functools
import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.api import AttentionState, merge_states
from tests.support.attention_cases import (
    Case,
    assert_same,
    attend,
    check,
    make_case,
    oracle,
)

# Every page size, group and head_dim appears once; runs of more than one tile of 64
# rows, empty slots and a first row at position 0 among them.
RAGGED: list[tuple[list[tuple[int, int]], dict[str, Any]]] = [
    ([(0, 5), (30, 1), (0, 0), (7, 12)], dict(page_size=1, group=1, head_dim=8)),
    ([(0, 1), (3, 70), (64, 2)], dict(page_size=4, group=3, head_dim=13, kv_heads=1)),
    ([(90, 150), (0, 64), (5, 1)], dict(page_size=16, group=2, head_dim=24)),
    ([(40, 30), (23, 2)], dict(page_size=24, group=8, head_dim=1, kv_heads=1)),
    ([(63, 66), (0, 3)], dict(page_size=64, group=4, head_dim=5)),
    ([(120, 20), (128, 1), (1, 1)], dict(page_size=128, group=5, head_dim=64)),
    ([(250, 10), (0, 7)], dict(page_size=256, group=7, head_dim=40, kv_heads=3)),
]
WINDOWS = (None, 1, 3, 1000, None, 70, 3)


@pytest.mark.thorough
@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
@pytest.mark.parametrize("index", range(len(RAGGED)))
def test_ragged_rows_equal_the_oracle(index: int, numerics: str) -> None:
    runs, sizes = RAGGED[index]
    case = make_case(np.random.default_rng(index), runs, padding=9, **sizes)
    window = WINDOWS[index]
    state = attend(*case, window=window, numerics=numerics)
    check(state, oracle(case, window=window))


@pytest.mark.parametrize("index", range(len(RAGGED)))
def test_one_row_a_slot_equals_the_oracle(index: int) -> None:
    runs, sizes = RAGGED[index]
    runs = [(start + num - 1, 1) if num else (0, 0) for start, num in runs]
    runs += [(200 + index, 1), (0, 0), (0, 1)]
    case = make_case(np.random.default_rng(index), runs, decode=True, **sizes)
    window = WINDOWS[index]
    check(attend(*case, window=window), oracle(case, window=window))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_equal_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes: dict[str, Any] = dict(
        page_size=int(rng.choice([1, 2, 3, 4, 5, 16, 24, 48, 64, 96, 128, 256])),
        kv_heads=int(rng.integers(1, 4)),
        group=int(rng.integers(1, 9)),
        head_dim=int(rng.integers(1, 65)),
    )
    window = None if rng.random() < 0.4 else int(rng.integers(1, 200))
    scale = None if rng.random() < 0.5 else float(rng.uniform(0.01, 1))
    runs = [
        (int(rng.integers(0, 200)), int(rng.choice([0, 1, 2, 63, 64, 65, 130])))
        for _ in range(rng.integers(1, 7))
    ] + [(0, 1)]
    case = make_case(rng, runs, padding=int(rng.integers(0, 70)), **sizes)
    expected = oracle(case, window=window, scale=scale)
    for numerics in ("fast", "reproducible"):
        check(attend(*case, window=window, scale=scale, numerics=numerics), expected)
    ones = [(start, min(num, 1)) for start, num in runs]
    case = make_case(rng, ones, decode=True, **sizes)
    expected = oracle(case, window=window, scale=scale)
    check(attend(*case, window=window, scale=scale), expected)


RUNS = [(0, 9), (37, 20), (0, 0), (80, 1), (11, 33)]


@functools.cache
def plain() -> tuple[Case, AttentionState]:
    case = make_case(np.random.default_rng(5), RUNS, padding=5)
    return case, attend(*case)


@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
def test_where_the_pages_lie_changes_no_bit(numerics: str) -> None:
    case, _ = plain()
    rng = np.random.default_rng(0)
    moved = rng.permutation(case.k_pages.shape[0]).astype(np.int32)
    real = (case.page_ids >= 0) & (case.page_ids < len(moved))
    ids = np.where(real, moved[np.where(real, case.page_ids, 0)], 10**5)
    back = np.argsort(moved)
    permuted = case._replace(
        k_pages=case.k_pages[back],
        v_pages=case.v_pages[back],
        page_ids=ids.astype(np.int32),
    )
    before = attend(*case, numerics=numerics)
    assert_same(attend(*permuted, numerics=numerics), before)


def test_garbage_instead_of_nan_changes_no_bit() -> None:
    case, state = plain()
    clean = case._replace(
        k_pages=np.nan_to_num(case.k_pages, nan=1e30),
        v_pages=np.nan_to_num(case.v_pages, nan=-np.inf, posinf=0, neginf=0),
    )
    assert_same(attend(*clean), state)


def test_reproducible_equals_fast() -> None:
    case, state = plain()
    check(attend(*case, numerics="reproducible"), state, tolerance=1e-5)


def test_reproducible_bits_do_not_depend_on_the_other_rows() -> None:
    case, _ = plain()
    rows = len(case.positions)
    whole = attend(*case, numerics="reproducible")
    for seed in range(4):
        rng = np.random.default_rng(seed)
        kept = rng.random(rows) < 0.5
        assert case.slots is not None
        slots = np.where(kept, case.slots, -1).astype(np.int32)
        positions = np.where(kept, case.positions, -1).astype(np.int32)
        fewer = case._replace(slots=slots, positions=positions)
        state = attend(*fewer, numerics="reproducible")
        for a, b in zip(state, whole, strict=True):
            np.testing.assert_array_equal(np.asarray(a)[kept], np.asarray(b)[kept])


def test_a_shift_of_all_scores_moves_only_the_log_sum_exp() -> None:
    case, state = plain()
    # A key common to all, along a direction that every query has the same share of.
    q = case.q.copy()
    q[..., 0] = 1.0
    before = attend(*case._replace(q=q))
    keys = case.k_pages.copy()
    keys[..., 0] += 3.0
    after = attend(*case._replace(q=q, k_pages=keys))
    seen = np.isfinite(state.lse)
    np.testing.assert_allclose(after.out, before.out, rtol=0, atol=1e-5)
    moved = np.asarray(after.lse)[seen] - np.asarray(before.lse)[seen]
    np.testing.assert_allclose(moved, 3 * 8**-0.5, rtol=0, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
def test_a_chain_of_ancestors_is_causal(numerics: str) -> None:
    runs = [(0, 4), (37, 6), (0, 0), (70, 6)]
    case = make_case(np.random.default_rng(8), runs, padding=3)
    assert case.slots is not None
    context = np.array([start for start, _ in runs], np.int32)
    behind = case.positions - context[np.maximum(case.slots, 0)]
    chain = np.arange(6)[None, :] <= behind[:, None]
    for window in (None, 3):
        ask: dict[str, Any] = dict(window=window, numerics=numerics)
        state = attend(*case, context=context, ancestors=chain, **ask)
        check(state, oracle(case, window=window))
        expected = oracle(case, context=context, ancestors=chain, window=window)
        check(state, expected)


@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
def test_a_tree_is_its_branches_one_by_one(numerics: str) -> None:
    # Parents of the seven nodes that stand side by side behind 21 places.
    parents, context = [-1, 0, 0, 1, 1, 2, 5], 21
    ancestors = np.zeros((7, 8), bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] = ancestors[parent]
        ancestors[node, node] = True
    ancestors[:, 7] = False  # a column that nobody sees, and whose place is NaN
    rng = np.random.default_rng(2)
    case = make_case(rng, [(context, 7), (4, 3)], page_size=4)
    assert case.slots is not None
    of_tree = np.flatnonzero(case.slots == 0)
    mask = np.zeros((len(case.slots), 8), bool)
    mask[of_tree] = ancestors
    mask[case.slots == 1, :3] = np.tril(np.ones((3, 3), bool))
    state = attend(
        *case,
        context=np.array([context, 4], np.int32),
        ancestors=mask,
        numerics=numerics,
    )
    expected = oracle(case, context=np.array([context, 4]), ancestors=mask)
    check(state, expected)

    for node in range(7):
        path = np.flatnonzero(ancestors[node])
        places = np.concatenate([np.arange(context), context + path])
        source = case.page_ids[0, places // 4], slice(None), places % 4
        branch = make_case(rng, [(len(places) - 1, 1)])
        here = np.arange(len(places))
        target = branch.page_ids[0, here // 4], slice(None), here % 4
        branch.k_pages[target] = case.k_pages[source]
        branch.v_pages[target] = case.v_pages[source]
        branch = branch._replace(q=case.q[of_tree[node]][None])
        out, lse = oracle(branch)
        row = of_tree[node]
        np.testing.assert_allclose(state.out[row], out[0], rtol=0, atol=2e-5)
        np.testing.assert_allclose(state.lse[row], lse[0], rtol=0, atol=2e-5)


def split_states(seed: int = 3) -> tuple[list[AttentionState], AttentionState]:
    """Three parts of two sequences as states of their own, and the whole."""
    rng = np.random.default_rng(seed)
    length, cuts = 45, (7, 8)
    whole = make_case(rng, [(length - 1, 1)] * 2, decode=True)
    bounds = list(zip((0, *cuts), (*cuts, length), strict=True))
    states = []
    for start, end in bounds:
        part = make_case(rng, [(end - start - 1, 1)] * 2, decode=True)
        for slot in range(2):
            old, new = np.arange(start, end), np.arange(end - start)
            source = whole.page_ids[slot, old // 4], slice(None), old % 4
            target = part.page_ids[slot, new // 4], slice(None), new % 4
            part.k_pages[target] = whole.k_pages[source]
            part.v_pages[target] = whole.v_pages[source]
        states.append(attend(*part._replace(q=whole.q)))
    return states, attend(*whole)


@pytest.mark.thorough
def test_states_merge_in_any_order_and_grouping() -> None:
    (a, b, c), whole = split_states()
    for merged in (
        merge_states(merge_states(a, b), c),
        merge_states(a, merge_states(b, c)),
        merge_states(merge_states(c, a), b),
        merge_states(b, merge_states(c, a)),
    ):
        check(merged, whole, tolerance=1e-5)


def test_a_state_without_keys_is_neutral() -> None:
    (state, *_), _ = split_states()
    empty = AttentionState(
        jnp.zeros_like(state.out), jnp.full_like(state.lse, -jnp.inf)
    )
    assert_same(merge_states(state, empty), state)
    assert_same(merge_states(empty, state), state)
    assert_same(merge_states(empty, empty), empty)


def test_states_far_apart_merge_without_overflow() -> None:
    (state, other, _), _ = split_states()
    far = AttentionState(other.out, other.lse + 1e4)
    np.testing.assert_allclose(merge_states(state, far).out, other.out, atol=1e-6)
    np.testing.assert_array_equal(merge_states(state, far).lse, far.lse)


def test_large_scores_do_not_overflow() -> None:
    case, _ = plain()
    check(attend(*case, scale=300.0), oracle(case, scale=300.0), tolerance=2e-3)


@pytest.mark.thorough
def test_half_precision_comes_back_in_its_type() -> None:
    case, state = plain()
    half = case._replace(
        q=np.asarray(case.q, jnp.bfloat16),
        k_pages=np.asarray(case.k_pages, jnp.bfloat16),
        v_pages=np.asarray(case.v_pages, jnp.bfloat16),
    )
    for numerics in ("fast", "reproducible"):
        result = attend(*half, numerics=numerics)
        assert result.out.dtype == jnp.bfloat16
        assert result.lse.dtype == jnp.float32
        np.testing.assert_allclose(
            np.asarray(result.out, np.float32), state.out, rtol=0, atol=0.05
        )


def refused(message: str, **changes: Any) -> None:
    """Checks that one change to a sound call is turned down in one line."""
    case, _ = plain()
    arrays = dict(zip(case._fields, map(jnp.asarray, case), strict=True))
    with pytest.raises(ValueError, match=message) as caught:
        # Without the type checks that tests run under, as a user would call it.
        inspect.unwrap(api.paged_attention)(**arrays | changes)
    assert "\n" not in str(caught.value)


def test_misuse_is_told_in_one_line() -> None:
    case, _ = plain()
    with pytest.raises(ValueError, match="implementation='cuda' must be None, 'refer"):
        inspect.unwrap(api.choose)(case.q, case.k_pages, implementation="cuda")
    on_cpu = "'mosaic_gpu': the device is a cpu, not a GPU; 'reference' takes"
    refused(on_cpu, implementation="mosaic_gpu")
    refused("q_heads=3 must be a multiple of kv_heads=2", q=jnp.zeros((68, 3, 8)))
    refused("window=0 must be at least 1, or None", window=0)
    refused("softcap=0.0 must be above 0, or None", softcap=0.0)
    refused("must be page_ids.shape.* when slots is None", slots=None)
    together = "context and ancestors must be given together"
    refused(together, context=jnp.zeros(5, jnp.int32))
    refused(together, ancestors=jnp.zeros((68, 2), bool))
