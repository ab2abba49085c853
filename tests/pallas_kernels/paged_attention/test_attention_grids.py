"""Lengths and windows of other projects' tests, precision, partitions, page types."""

import functools
import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    PagedKV,
    choose_run_queries,
    paged_attention,
    reference,
)
from pallas_kernels.paged_attention.api import AttentionState, merge_states
from tests.support.attention_cases import (
    Case,
    assert_same,
    attend,
    attend_arrays,
    check,
    make_case,
    oracle,
    plain,
)
from tests.support.marks import one_quick

pytestmark = pytest.mark.usefixtures("full_optimization")

ALL: dict[str, Any] = dict(softcap=3.0, sinks=True, alibi=True, window=40, scale=0.4)


def per_head(features: dict[str, Any], q_heads: int, seed: int = 0) -> dict[str, Any]:
    """The features, with random numbers per head for those given only by name."""
    rng = np.random.default_rng(seed)
    head_features = {
        "sinks": rng.normal(size=q_heads).astype(np.float32),
        "alibi": 2.0 ** -rng.integers(1, 9, q_heads).astype(np.float32),
    }
    return {
        name: head_features[name] if x is True else x for name, x in features.items()
    }


def random_tree(rng: np.random.Generator, num: int) -> np.ndarray:
    """Ancestors of every node, including the node."""
    mask = np.eye(num, dtype=bool)
    for node in range(1, num):
        mask[node] |= mask[rng.integers(0, node)]
    return mask


@pytest.mark.parametrize("numerics", one_quick(["fast", "reproducible"]))
def test_trees_with_all_features_equal_the_oracle(numerics: Any) -> None:
    rng = np.random.default_rng(2)
    ask = per_head(ALL, 4)
    runs = [(70, 9), (0, 4), (0, 0), (12, 1)]
    case = make_case(rng, runs, padding=3)
    assert case.slots is not None
    mask = np.zeros((len(case.slots), 11), bool)
    for slot, (_, num) in enumerate(runs):
        mask[case.slots == slot, :num] = random_tree(rng, num)
    context = np.array([start for start, _ in runs], np.int32)
    tree: dict[str, Any] = dict(context=context, ancestors=mask)
    state = attend(*case, numerics=numerics, **tree, **ask)
    check(state, oracle(case, **tree, **ask))


@pytest.mark.parametrize(
    "numerics", ["fast", pytest.param("reproducible", marks=pytest.mark.slow)]
)
def test_slots_without_a_tree_next_to_one_are_causal(numerics: Any) -> None:
    rng = np.random.default_rng(2)
    ask = per_head(ALL, 4)
    case = make_case(rng, [(70, 9), (80, 70), (12, 1)], padding=3)
    assert case.slots is not None
    mask = np.zeros((len(case.slots), 11), bool)
    is_tree = case.slots == 0
    mask[is_tree, :9] = random_tree(rng, 9)
    context = np.array([70, -1, -1], np.int32)
    mixed_state = attend(
        *case, numerics=numerics, context=context, ancestors=mask, **ask
    )
    plain = attend(*case, numerics=numerics, **ask)
    context = np.array([70, 80, 12], np.int32)
    tree = attend(*case, numerics=numerics, context=context, ancestors=mask, **ask)
    for actual, alone, next_to_tree in zip(mixed_state, plain, tree, strict=True):
        rows = case.slots > 0
        np.testing.assert_array_equal(actual[rows], alone[rows])
        np.testing.assert_array_equal(actual[is_tree], next_to_tree[is_tree])


def edges(unit: int) -> list[int]:
    return [0, 1, unit - 1, unit, unit + 1]


@pytest.mark.parametrize(
    "page_size",
    [16, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 5, 256))],
)
def test_lengths_about_blocks_and_pages(page_size: int) -> None:
    lengths = sorted({*edges(64), *edges(page_size), *edges(2 * page_size), 128, 257})
    runs = [(length - 1, 1) if length > 0 else (0, 0) for length in lengths]
    sizes: dict[str, Any] = dict(page_size=page_size, decode=True)
    case = make_case(np.random.default_rng(3), runs, **sizes)
    for numerics in ("fast", "reproducible"):
        check(attend(*case, numerics=numerics), oracle(case))


# The grids of other projects' tests.
@pytest.mark.parametrize(
    "softcap",
    [30.0, *(pytest.param(cap, marks=pytest.mark.slow) for cap in (1.0, 50.0))],
)
def test_caps_at_the_lengths_that_flashinfer_tests(softcap: float) -> None:
    runs = [(length - 1, 1) for length in (1, 9, 81, 729)]
    case = make_case(np.random.default_rng(4), runs, page_size=16, decode=True)
    check(attend(*case, softcap=softcap), oracle(case, softcap=softcap))


@pytest.mark.parametrize(
    "window", [53, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 128, 533))]
)
def test_windows_at_the_lengths_that_flashinfer_tests(window: int) -> None:
    runs = [(length - 1, 1) for length in (1, 9, 81, 729, 1999)]
    sizes: dict[str, Any] = dict(page_size=16, decode=True, window=window)
    case = make_case(np.random.default_rng(5), runs, **sizes)
    check(attend(*case, window=window), oracle(case, window=window))


MIXES = ([(1327, 1), (13, 5), (334, 129)], [(522, 1), (36, 1), (2010, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("window", [None, 64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("runs", MIXES, ids=["mixed", "decode"])
def test_the_mixes_that_vllm_tests(
    runs: Any, heads: tuple[int, int], window: int | None, softcap: float | None
) -> None:
    q_heads, kv_heads = heads
    sizes: dict[str, Any] = dict(kv_heads=kv_heads, group=q_heads // kv_heads)
    rng = np.random.default_rng(6)
    case = make_case(rng, runs, page_size=16, head_dim=128, window=window, **sizes)
    ask: dict[str, Any] = dict(window=window, softcap=softcap)
    check(attend(*case, **ask), oracle(case, **ask))


def errors(state: Any, expected: Any) -> list[tuple[float, float]]:
    """Largest and mean error of output and log-sum-exp."""
    off = [
        np.abs(np.asarray(x, float) - y) for x, y in zip(state, expected, strict=True)
    ]
    return [(float(x.max()), float(x.mean())) for x in off]


def assert_as_exact(state: Any, plain: Any, expected: Any) -> None:
    """FlashAttention's rule: at most twice the error of a plain implementation."""
    pairs = zip(errors(state, expected), errors(plain, expected), strict=True)
    for (top, mean), (plain_top, plain_mean) in pairs:
        assert top <= 2 * plain_top + 1e-5
        assert mean <= 1.5 * plain_mean + 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("softcap", [pytest.param(None, marks=pytest.mark.slow), 5.0])
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow), "float32"]
)
def test_errors_are_at_most_twice_those_of_a_plain_implementation(
    dtype: Any, softcap: float | None
) -> None:
    runs = [(length - 1, 1) for length in (1, 17, 64, 65, 300)]
    sizes: dict[str, Any] = dict(page_size=16, head_dim=128, group=4, decode=True)
    case = make_case(np.random.default_rng(7), runs, **sizes)
    q, k, v = (x.astype(jnp.dtype(dtype)) for x in case[:3])
    case = case._replace(q=q, k_pages=k, v_pages=v)
    expected = oracle(case, softcap=softcap)
    naive = plain(case, dtype, softcap=softcap)
    one_each = attend(*case, softcap=softcap)
    assert one_each.out.dtype == dtype
    assert_as_exact(one_each, naive, expected)
    packed = case._replace(slots=np.arange(len(runs), dtype=np.int32))
    for numerics in ("fast", "reproducible"):
        state = attend(*packed, numerics=numerics, softcap=softcap)
        assert state.out.dtype == dtype
        assert state.lse.dtype == np.float32
        assert_as_exact(state, naive, expected)


@pytest.mark.thorough
def test_float64_stays_float64() -> None:
    ask = per_head(ALL, 4)
    with jax.enable_x64(True):
        case = make_case(np.random.default_rng(8), [(30, 40), (99, 1)], window=40)
        case = case._replace(
            **{name: getattr(case, name).astype(float) for name in case._fields[:3]}
        )
        for numerics in ("fast", "reproducible"):
            state = attend(*case, numerics=numerics, **ask)
            assert state.out.dtype == state.lse.dtype == np.float64
            check(state, oracle(case, **ask), tolerance=1e-13)


def test_pages_of_another_floating_type_are_read_as_they_are() -> None:
    case = make_case(np.random.default_rng(9), [(30, 40), (99, 1)])
    k, v = (x.astype(jnp.bfloat16) for x in (case.k_pages, case.v_pages))
    case = case._replace(k_pages=k, v_pages=v)
    check(attend(*case), oracle(case))


# Changes without effect.
PLACES = 150


@functools.cache
def partition_case() -> tuple[Case, AttentionState, dict[str, Any]]:
    """Decode rows; masks can select any part of their keys."""
    case = make_case(np.random.default_rng(10), [(PLACES - 1, 1)] * 3, decode=True)
    ask = per_head(dict(softcap=4.0, alibi=True), 4)
    return case, attend(*case, **ask), ask


def part(mask: np.ndarray, **changes: Any) -> AttentionState:
    """The state over the places selected in `[rows, PLACES]`."""
    case, _, ask = partition_case()
    nothing = np.zeros(3, np.int32)
    return attend(*case, context=nothing, ancestors=mask, **(ask | changes))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_any_partition_merges_in_any_order_and_grouping(seed: int) -> None:
    _, full_state, _ = partition_case()
    rng = np.random.default_rng(seed)
    # Some parts are empty for some rows.
    owner = rng.choice(
        3, (3, PLACES), p=[(1, 0, 0), (0.5, 0.5, 0), (0.9, 0.05, 0.05)][seed % 3]
    )
    states = [part(owner == index) for index in range(3)]
    for a, b, c in itertools.permutations(states):
        check(merge_states(merge_states(a, b), c), full_state, 1e-5)
        check(merge_states(a, merge_states(b, c)), full_state, 1e-5)


def test_merging_equals_float64_for_any_log_sum_exps() -> None:
    rng = np.random.default_rng(11)
    out = rng.normal(size=(3, 200, 2, 4)).astype(np.float32)
    lse = rng.normal(0, 30, (3, 200, 2)).astype(np.float32)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    lse[0, :5] = 1e30
    lse[1, :5] = -1e30
    out[np.isneginf(lse)] = np.nan  # the output of an empty state does not matter
    top = np.where(np.isneginf(lse).all(0), 0, lse.max(0)).astype(float)
    weight = np.exp(lse - top)
    total = weight.sum(0)
    divisor = np.where(total > 0, total, 1)
    mixed = (np.nan_to_num(out) * weight[..., None]).sum(0) / divisor[..., None]
    with np.errstate(divide="ignore"):
        expected = mixed, np.where(total > 0, np.log(total) + top, -np.inf)
    states = [
        AttentionState(*map(jnp.asarray, pair)) for pair in zip(out, lse, strict=True)
    ]
    for a, b, c in itertools.permutations(states):
        for merged in (
            merge_states(merge_states(a, b), c),
            merge_states(a, merge_states(b, c)),
        ):
            assert np.isfinite(merged.out).all()
            np.testing.assert_allclose(merged.out, expected[0], rtol=0, atol=2e-6)
            np.testing.assert_allclose(merged.lse, expected[1], rtol=1e-6, atol=1e-5)


def test_a_sink_is_a_state_without_a_value() -> None:
    case, full_state, ask = partition_case()
    sinks = np.array([-1.0, 0.0, 2.0, -np.inf], np.float32)
    lse = jnp.broadcast_to(jnp.asarray(sinks)[None, :], full_state.lse.shape)
    merged = merge_states(
        full_state, AttentionState(jnp.zeros_like(full_state.out), lse)
    )
    check(attend(*case, sinks=sinks, **ask), merged, 1e-5)
    # Exactly one part has the sink.
    place = np.broadcast_to(np.arange(PLACES), (3, PLACES))
    parts = part(place < 70, sinks=sinks), part(place >= 70)
    check(merge_states(*parts), merged, 1e-5)
    # Without a key there is no sink.
    nothing = part(np.zeros((3, PLACES), bool), sinks=sinks)
    assert not nothing.out.any()
    assert np.isneginf(nothing.lse).all()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "numerics", ["fast", pytest.param("reproducible", marks=pytest.mark.slow)]
)
def test_features_without_effect_change_no_bit(numerics: Any) -> None:
    case = make_case(np.random.default_rng(12), [(0, 9), (80, 20), (3, 1)])
    ask: dict[str, Any] = dict(numerics=numerics)
    before = attend(*case, **ask)
    none = np.full(4, -np.inf, np.float32)
    zero = np.zeros(4, np.float32)
    assert_same(attend(*case, window=100, **ask), before)
    assert_same(attend(*case, window=10**6, **ask), before)
    assert_same(attend(*case, sinks=none, **ask), before)
    assert_same(attend(*case, alibi=zero, **ask), before)
    check(attend(*case, softcap=1e4, **ask), before, 1e-5)


@pytest.mark.parametrize(
    ("features", "group", "subsets"),
    [
        ({}, 2, [[12]]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({}, 1, [[0, 1, 2], range(5, 27), [29]]),
                (ALL, 3, [[28], range(3, 16)]),
                ({}, 7, [[row] for row in range(30)]),
                ({"window": 9}, 16, [[0, 29], range(20)]),
            )
        ),
    ],
)
def test_no_bit_depends_on_other_rows(
    features: dict[str, Any], group: int, subsets: list[Any]
) -> None:
    """Rows of 3 slots, and some of them: long runs, and others alone or in batches."""
    case = make_case(
        np.random.default_rng(13), [(0, 9), (100, 20), (3, 1)], group=group
    )
    ask = per_head(features, 2 * group)
    state = attend(*case, numerics="reproducible", **ask)
    check(state, oracle(case, **ask), 1e-5)
    assert_same(attend(*case, numerics="reproducible", long_runs=True, **ask), state)
    assert case.slots is not None
    for subset in subsets:
        rows = np.array(list(subset))
        some = case._replace(
            q=case.q[rows], positions=case.positions[rows], slots=case.slots[rows]
        )
        assert_same(
            attend(*some, numerics="reproducible", **ask),
            AttentionState(state.out[rows], state.lse[rows]),
        )


@pytest.mark.parametrize(
    ("bad_dims", "bad_runs"), [("shqd,shtd->shqt", 8), ("shqt,shtd->shqd", 1)]
)
def test_runs_are_short_where_a_product_has_other_bits(
    monkeypatch: pytest.MonkeyPatch, bad_dims: str, bad_runs: int
) -> None:
    """A processor with one other bit in products of 32 queries."""

    def multiply(dims: str, left: jax.Array, right: jax.Array, dtype: Any) -> Any:
        product = np.einsum(dims, left, right, dtype=np.float64).astype(dtype)
        if dims == bad_dims and product.shape[0] == bad_runs and product.shape[2] == 32:
            product[0, 1, 31, 7] += 1e-3
        return product

    q = jnp.zeros((5, 4, 16))
    pages = jnp.zeros((3, 2, 8, 16))
    kv = PagedKV(pages, pages)
    monkeypatch.setattr(reference, "_compiled_at_once", multiply)
    assert choose_run_queries(q, kv) == reference.RUN_QUERIES
    bad_runs = 0
    assert choose_run_queries(q, kv) == reference.LONG_RUN_QUERIES
    # 12 queries of a KV head: neither number of rows is a multiple of the other.
    assert choose_run_queries(jnp.zeros((5, 24, 16)), kv) == reference.RUN_QUERIES


def test_a_tree_of_one_node_is_a_decode_row() -> None:
    lengths = [1, 5, 64, 100]
    case = make_case(
        np.random.default_rng(14), [(n - 1, 1) for n in lengths], decode=True
    )
    node: dict[str, Any] = dict(
        context=np.array(lengths, np.int32) - 1, ancestors=np.ones((4, 1), bool)
    )
    assert_same(attend(*case, **node), attend(*case))


@pytest.mark.slow
def test_the_page_size_changes_no_bit() -> None:
    rng = np.random.default_rng(17)
    places = 256
    states = []
    k, v = rng.normal(size=(2, places, 2, 8)).astype(np.float32)
    q = rng.normal(size=(3, 4, 8)).astype(np.float32)
    positions = np.array([4, 100, 200], np.int32)
    for page_size in (1, 4, 64, 256):
        pages = [x.reshape(-1, page_size, 2, 8).swapaxes(1, 2).copy() for x in (k, v)]
        ids = np.arange(places // page_size, dtype=np.int32)[None]
        slots = np.zeros(3, np.int32)
        states.append(attend(q, *pages, ids, positions, slots, numerics="reproducible"))
    for state in states[1:]:
        assert_same(state, states[0])


@pytest.mark.thorough
def test_other_layers_of_a_flat_pool_do_not_matter() -> None:
    case = make_case(np.random.default_rng(18), [(0, 9), (40, 5)])
    num_pages = case.k_pages.shape[0]
    k, v = (
        np.concatenate([np.full_like(x, np.nan), x, np.full_like(x, np.nan)])
        for x in (case.k_pages, case.v_pages)
    )
    mapped = (case.page_ids >= 0) & (case.page_ids < num_pages)
    ids = np.where(mapped, case.page_ids + num_pages, 3 * num_pages)
    moved = case._replace(k_pages=k, v_pages=v, page_ids=ids.astype(np.int32))
    assert_same(attend(*moved), attend(*case))


def test_numbers_for_heads_must_be_one_for_each() -> None:
    case = make_case(np.random.default_rng(19), [(3, 1)], decode=True)
    with pytest.raises(ValueError, match=r"slopes.shape=\(3,\) must be \(4,\)"):
        attend_arrays(
            *map(jnp.asarray, case[:5]),
            alibi=jnp.zeros(3, jnp.float32),
            function=inspect.unwrap(paged_attention),
        )
