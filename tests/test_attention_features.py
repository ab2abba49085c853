"""Caps, slopes and sinks; and what must not matter: pages, splits, prefixes, heads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import AttentionState, add_sinks, merge_states
from tests.test_attention import Case, attend, check, make_case, oracle

RUNS = [(0, 5), (61, 70), (0, 0), (17, 3)]
HEADS: Any = dict(kv_heads=2, group=3, head_dim=12)


def features(rng: np.random.Generator, window: int | None) -> dict[str, Any]:
    return dict(
        window=window,
        softcap=float(rng.uniform(0.5, 3)),
        alibi=rng.uniform(0.01, 0.3, 6).astype(np.float32),
        sinks=rng.normal(size=6).astype(np.float32),
    )


@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
@pytest.mark.parametrize("names", [("softcap",), ("alibi",), ("sinks",), ()])
def test_each_feature_and_all_of_them_equal_the_oracle(names, numerics: str) -> None:
    rng = np.random.default_rng(len(names))
    case = make_case(rng, RUNS, page_size=16, padding=4, **HEADS)
    every = features(rng, 40)
    chosen = {name: every[name] for name in names} if names else every
    check(attend(*case, numerics=numerics, **chosen), oracle(case, **chosen))


@pytest.mark.parametrize("length", [1, 9, 81, 729])
def test_one_row_a_slot_with_every_feature(length: int) -> None:
    rng = np.random.default_rng(length)
    runs = [(length - 1, 1), (0, 1), (0, 0), (length // 2, 1)]
    case = make_case(rng, runs, page_size=16, decode=True, **HEADS)
    for window in (None, 3, 64, 2000):
        every = features(rng, window)
        check(attend(*case, **every), oracle(case, **every))


def test_a_tree_with_every_feature() -> None:
    rng = np.random.default_rng(3)
    case = make_case(rng, [(20, 6), (3, 6)], page_size=4, **HEADS)
    ancestors = np.tril(rng.random((12, 6)) < 0.5)
    ancestors[np.arange(12), np.arange(12) % 6] = True
    seen: Any = dict(context=np.array([20, 3], np.int32), ancestors=ancestors)
    every = features(rng, 18)
    check(attend(*case, **seen, **every), oracle(case, **seen, **every))


def test_the_cap_bounds_and_no_slope_changes_nothing() -> None:
    case = make_case(np.random.default_rng(0), RUNS, **HEADS)
    plain = attend(*case)
    wide = attend(*case, softcap=1e3, alibi=np.zeros(6, np.float32))
    np.testing.assert_allclose(wide.out, plain.out, atol=1e-4)
    np.testing.assert_allclose(wide.lse, plain.lse, atol=1e-4)
    none = attend(*case, sinks=np.full(6, -1e9, np.float32))
    np.testing.assert_array_equal(none.out, plain.out)
    # A cap of nearly nothing makes all keys equal: the mean of the values.
    flat = attend(*case, softcap=1e-6)
    seen = np.log(np.maximum(case.positions + 1, 1))[:, None]
    live = case.positions >= 0
    wanted = np.broadcast_to(seen, flat.lse.shape)[live]
    np.testing.assert_allclose(np.asarray(flat.lse)[live], wanted, atol=1e-5)


def test_a_sink_is_a_key_whose_value_is_zero() -> None:
    case = make_case(np.random.default_rng(1), RUNS, **HEADS)
    sinks = np.linspace(-2, 2, 6).astype(np.float32)
    plain = attend(*case)
    empty = AttentionState(
        jnp.zeros_like(plain.out),
        jnp.broadcast_to(jnp.asarray(sinks)[None, :], plain.lse.shape),
    )
    both, sunk = merge_states(plain, empty), attend(*case, sinks=sinks)
    live = case.positions >= 0
    np.testing.assert_allclose(
        np.asarray(sunk.out)[live], np.asarray(both.out)[live], atol=1e-6
    )
    np.testing.assert_allclose(
        np.asarray(sunk.lse)[live], np.asarray(both.lse)[live], atol=1e-6
    )
    # Who sees no key is not turned to a sink.
    assert np.isneginf(np.asarray(sunk.lse)[~live]).all()
    again = add_sinks(plain, jnp.asarray(sinks))
    np.testing.assert_allclose(again.out, sunk.out, atol=1e-6)


def dense(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of every slot by place, NaN where there are none."""
    ids = np.clip(case.page_ids, 0, len(case.k_pages) - 1)
    found = []
    for pages in (case.k_pages, case.v_pages):
        x = pages[ids].swapaxes(2, 3)
        found.append(x.reshape(len(ids), -1, *x.shape[3:]))
    return found[0], found[1]


@pytest.mark.parametrize("split", [1, 16, 33, 50])
def test_a_sequence_split_anywhere_and_merged(split: int) -> None:
    rng = np.random.default_rng(split)
    case = make_case(rng, [(59, 1)], page_size=16, decode=True, **HEADS)
    k, v = dense(case)
    size = case.k_pages.shape[2]

    def part(begin: int, end: int) -> AttentionState:
        num = -(-(end - begin) // size)
        pages = []
        for x in (k, v):
            cut = np.full((num * size, *x.shape[2:]), np.nan, np.float32)
            cut[: end - begin] = x[0, begin:end]
            cut = cut.reshape(num, size, *x.shape[2:])
            pages.append(np.ascontiguousarray(cut.swapaxes(1, 2)))
        ids = np.arange(num, dtype=np.int32)[None]
        return attend(case.q, *pages, ids, np.array([end - begin - 1], np.int32), None)

    whole = attend(*case)
    merged = merge_states(part(0, split), part(split, 60))
    np.testing.assert_allclose(merged.out, whole.out, atol=1e-6)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=1e-5)


def test_a_shared_prefix_is_as_good_as_private_copies() -> None:
    rng = np.random.default_rng(5)
    case = make_case(rng, [(40, 1)] * 4, page_size=8, decode=True, **HEADS)
    shared = case.page_ids.copy()
    shared[1:, :4] = shared[0, :4]
    k, v = case.k_pages.copy(), case.v_pages.copy()
    for slot in range(1, 4):
        for pages in (k, v):
            pages[case.page_ids[slot, :4]] = pages[case.page_ids[0, :4]]
    private = attend(*case._replace(k_pages=k, v_pages=v))
    common = attend(*case._replace(page_ids=shared))
    np.testing.assert_array_equal(common.out, private.out)
    np.testing.assert_array_equal(common.lse, private.lse)


@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
def test_a_group_is_as_good_as_repeated_heads(numerics: str) -> None:
    case = make_case(np.random.default_rng(6), RUNS, page_size=16, **HEADS)
    grouped = attend(*case, numerics=numerics)
    repeated = case._replace(
        k_pages=np.repeat(case.k_pages, 3, axis=1),
        v_pages=np.repeat(case.v_pages, 3, axis=1),
    )
    single = attend(*repeated, numerics=numerics)
    np.testing.assert_allclose(single.out, grouped.out, atol=1e-6)
    np.testing.assert_allclose(single.lse, grouped.lse, atol=1e-5)


def test_the_order_of_the_batch_does_not_matter() -> None:
    runs = [(n, 1) for n in (0, 30, 63, 64, 65, 7)]
    case = make_case(np.random.default_rng(7), runs, decode=True, **HEADS)
    order = np.array([3, 0, 5, 1, 4, 2])
    turned = case._replace(
        q=case.q[order],
        page_ids=case.page_ids[order],
        positions=case.positions[order],
    )
    straight, other = attend(*case), attend(*turned)
    np.testing.assert_allclose(other.out, straight.out[order], atol=1e-6)
    np.testing.assert_allclose(other.lse, straight.lse[order], atol=1e-6)


def plainly(case: Case, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Softmax over gathered keys, all in one type: what rounding alone does."""
    k, v = dense(case)
    places = np.arange(k.shape[1])[None, :] <= case.positions[:, None]
    k, v = (np.where(places[..., None, None], x, 0) for x in (k, v))
    rows, q_heads, head_dim = case.q.shape
    q = jnp.asarray(case.q, dtype).reshape(rows, k.shape[2], -1, head_dim)
    k, v = jnp.asarray(k, dtype), jnp.asarray(v, dtype)
    scores = jnp.einsum("rhgd,rthd->rhgt", q, k) * jnp.asarray(head_dim**-0.5, dtype)
    lowest = jnp.asarray(-jnp.inf, dtype)
    scores = jnp.where(jnp.asarray(places)[:, None, None, :], scores, lowest)
    lse = jax.nn.logsumexp(scores.astype(jnp.float32), axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("rhgt,rthd->rhgd", weights, v)
    return (
        np.asarray(out, np.float64).reshape(rows, q_heads, head_dim),
        np.asarray(lse, np.float64).reshape(rows, q_heads),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_error_is_at_most_twice_that_of_the_type(dtype: str) -> None:
    rng = np.random.default_rng(9)
    runs = [(n - 1, 1) for n in (1, 15, 16, 17, 64, 200, 333)]
    case = make_case(
        rng, runs, page_size=16, decode=True, kv_heads=2, group=4, head_dim=64
    )
    narrow = [jnp.asarray(x, dtype) for x in case[:3]]
    rounded = Case(*(np.asarray(x, np.float32) for x in narrow), *case[3:])
    exact = oracle(rounded)
    state = attend(*narrow, *case[3:])
    assert state.out.dtype == dtype
    for ours, twin, truth in zip(state, plainly(rounded, dtype), exact, strict=True):
        mine = np.abs(np.asarray(ours, np.float64) - truth)
        theirs = np.abs(twin - truth)
        assert mine.max() <= 2 * theirs.max() + 1e-5
        assert mine.mean() <= 1.5 * theirs.mean() + 1e-5
