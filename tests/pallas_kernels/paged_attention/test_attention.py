"""Paged attention against plain float64 loops, and against itself."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import api, reference
from pallas_kernels.paged_attention.api import AttentionState, merge_states
from tests.support.attention_cases import (
    Case,
    assert_same,
    attend,
    attend_arrays,
    check,
    make_case,
    oracle,
)
from tests.support.marks import one_quick

pytestmark = pytest.mark.usefixtures("full_optimization")

# Every page size, group and head_dim occurs once, with runs of more than one tile of
# 64 rows, empty slots, and a first row at position 0.
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
@pytest.mark.parametrize(
    "index",
    [
        *range(2),
        *(pytest.param(x, marks=pytest.mark.slow) for x in range(2, len(RAGGED))),
    ],
)
def test_ragged_rows_equal_the_oracle(index: int, numerics: str) -> None:
    runs, sizes = RAGGED[index]
    case = make_case(np.random.default_rng(index), runs, padding=9, **sizes)
    window = WINDOWS[index]
    state = attend(*case, window=window, numerics=numerics)
    check(state, oracle(case, window=window))


@pytest.mark.parametrize("index", one_quick(range(len(RAGGED))))
def test_one_row_a_slot_equals_the_oracle(index: int) -> None:
    runs, sizes = RAGGED[index]
    runs = [(start + num - 1, 1) if num else (0, 0) for start, num in runs]
    runs += [(200 + index, 1), (0, 0), (0, 1)]
    case = make_case(np.random.default_rng(index), runs, decode=True, **sizes)
    window = WINDOWS[index]
    check(attend(*case, window=window), oracle(case, window=window))


def test_few_queries_are_multiplied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(np.random.default_rng(3), [(70, 1), (0, 1), (0, 0)], decode=True)
    group = case.q.shape[1] // case.k_pages.shape[1]
    products = []
    for max_slots in (reference.FEW_SLOTS, 0):
        monkeypatch.setattr(reference, "FEW_SLOTS", max_slots)
        traced = jax.jit(lambda *case: attend_arrays(*case)).trace(*case)
        products.append(str(traced.jaxpr).count("dot_general["))
        check(traced.lower().compile()(*case), oracle(case))
    assert products == [2 * group, 2]


@pytest.mark.thorough
def test_the_size_of_a_tile_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(np.random.default_rng(4), [(30, 150)], padding=9)
    small = reference.POSITION_TILE
    large = reference.MAX_TILE
    assert small < large <= len(case.q)
    states = []
    for size in (large, small):
        monkeypatch.setattr(reference, "MAX_TILE", size)
        states.append(jax.jit(lambda *case: attend_arrays(*case))(*case))
    check(states[0], oracle(case))
    assert_same(*states)


HEADS: Any = dict(kv_heads=2, group=3, head_dim=12)


@pytest.mark.parametrize(
    "names", one_quick([["softcap", "alibi"], [], ["sinks", "scale"]])
)
@pytest.mark.parametrize(
    "start", [pytest.param(x, marks=pytest.mark.slow) for x in (0, 255)] + [300]
)
def test_many_rows_read_wide_blocks(start: int, names: list[str]) -> None:
    """Wide blocks end before the first place that a row of the tile does not see."""
    case = make_case(
        np.random.default_rng(start), [(start, 280)], page_size=16, padding=3, **HEADS
    )
    assert len(case.q) >= reference.MAX_TILE
    every = features(np.random.default_rng(8), None) | {"scale": 0.125}
    chosen: dict[str, Any] = {name: every[name] for name in names}
    check(attend(*case, **chosen), oracle(case, **chosen))


@pytest.mark.parametrize("context", one_quick([300, 255, 256, -1]))
def test_a_tree_after_wide_blocks(context: int) -> None:
    """Rows attend to the places before the tree and to ancestors; -1: no tree."""
    rng = np.random.default_rng(2)
    case = make_case(rng, [(173, 130)], page_size=16, **HEADS)
    ancestors = rng.random((130, 303 - max(context, 0))) < 0.5
    root = np.array([context], np.int32)
    tree: dict[str, Any] = dict(context=root, ancestors=ancestors)
    state = attend(*case, **tree)
    check(state, oracle(case, **(tree if context >= 0 else {})))


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


def features(rng: np.random.Generator, window: int | None) -> dict[str, Any]:
    return dict(
        window=window,
        softcap=float(rng.uniform(0.5, 3)),
        alibi=rng.uniform(0.01, 0.3, 6).astype(np.float32),
        sinks=rng.normal(size=6).astype(np.float32),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
@pytest.mark.parametrize("names", [("softcap",), ("alibi",), ("sinks",), ()])
def test_each_feature_and_all_of_them_equal_the_oracle(names, numerics: str) -> None:
    rng = np.random.default_rng(len(names))
    runs = [(0, 5), (61, 70), (0, 0), (17, 3)]
    case = make_case(rng, runs, page_size=16, padding=4, **HEADS)
    every = features(rng, 40)
    chosen = {name: every[name] for name in names} if names else every
    check(attend(*case, numerics=numerics, **chosen), oracle(case, **chosen))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "length", [81, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 9, 729))]
)
def test_one_row_a_slot_with_every_feature(length: int) -> None:
    rng = np.random.default_rng(length)
    runs = [(length - 1, 1), (0, 1), (0, 0), (length // 2, 1)]
    case = make_case(rng, runs, page_size=16, decode=True, **HEADS)
    for window in (None, 3, 64, 2000):
        every = features(rng, window)
        check(attend(*case, **every), oracle(case, **every))


RUNS = [(0, 9), (37, 20), (0, 0), (80, 1), (11, 33)]


@functools.cache
def plain() -> tuple[Case, AttentionState]:
    case = make_case(np.random.default_rng(5), RUNS, padding=5)
    return case, attend(*case)


@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
def test_the_order_of_pages_changes_no_bit(numerics: str) -> None:
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


def test_reproducible_bits_do_not_depend_on_the_other_rows() -> None:
    case, _ = plain()
    rows = len(case.positions)
    full_state = attend(*case, numerics="reproducible")
    for seed in range(4):
        rng = np.random.default_rng(seed)
        row_mask = rng.random(rows) < 0.5
        assert case.slots is not None
        slots = np.where(row_mask, case.slots, -1).astype(np.int32)
        positions = np.where(row_mask, case.positions, -1).astype(np.int32)
        fewer = case._replace(slots=slots, positions=positions)
        state = attend(*fewer, numerics="reproducible")
        for a, b in zip(state, full_state, strict=True):
            np.testing.assert_array_equal(
                np.asarray(a)[row_mask], np.asarray(b)[row_mask]
            )


def test_a_state_without_keys_is_neutral() -> None:
    _, state = plain()
    empty = AttentionState(
        jnp.zeros_like(state.out), jnp.full_like(state.lse, -jnp.inf)
    )
    assert_same(merge_states(state, empty), state)
    assert_same(merge_states(empty, state), state)
    assert_same(merge_states(empty, empty), empty)


def test_large_scores_do_not_overflow() -> None:
    case, _ = plain()
    check(attend(*case, scale=300.0), oracle(case, scale=300.0), tolerance=2e-3)


def refused(message: str, **changes: Any) -> None:
    """Checks that a valid call with one change raises an error of one line."""
    case, _ = plain()
    arrays: Any = dict(zip(case._fields, map(jnp.asarray, case), strict=True))
    # Without the type checks of the tests, like a user's call.
    function = inspect.unwrap(api.paged_attention)
    with pytest.raises(ValueError, match=message) as caught:
        attend_arrays(**arrays | changes, function=function)
    assert "\n" not in str(caught.value)


def test_misuse_raises_a_one_line_error() -> None:
    case, _ = plain()
    with pytest.raises(ValueError, match="implementation='cuda' must be None, 'refer"):
        inspect.unwrap(api.choose_attention)(
            case.q, case.k_pages, implementation="cuda"
        )
    on_cpu = "'mosaic_gpu': the device is a cpu, not a GPU; 'reference' takes"
    refused(on_cpu, implementation="mosaic_gpu")
    refused("q_heads=3 must be a multiple of kv_heads=2", q=jnp.zeros((68, 3, 8)))
    refused("window=0 must be at least 1, or None", window=0)
    refused("softcap=0.0 must be above 0, or None", softcap=0.0)
    refused("must be a multiple of page_ids.shape.* when slots is None", slots=None)
    together = "context and ancestors must be given together"
    refused(together, context=jnp.zeros(5, jnp.int32))
    refused(together, ancestors=jnp.zeros((68, 2), bool))
