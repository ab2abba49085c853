"""Caps, slopes and sinks; and what must not matter: pages, splits, prefixes, heads."""

from typing import Any

import numpy as np
import pytest

from tests.support.attention_cases import attend, check, make_case, oracle

RUNS = [(0, 5), (61, 70), (0, 0), (17, 3)]
HEADS: Any = dict(kv_heads=2, group=3, head_dim=12)


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
    case = make_case(rng, RUNS, page_size=16, padding=4, **HEADS)
    every = features(rng, 40)
    chosen = {name: every[name] for name in names} if names else every
    check(attend(*case, numerics=numerics, **chosen), oracle(case, **chosen))


@pytest.mark.thorough
@pytest.mark.parametrize("length", [1, 9, 81, 729])
def test_one_row_a_slot_with_every_feature(length: int) -> None:
    rng = np.random.default_rng(length)
    runs = [(length - 1, 1), (0, 1), (0, 0), (length // 2, 1)]
    case = make_case(rng, runs, page_size=16, decode=True, **HEADS)
    for window in (None, 3, 64, 2000):
        every = features(rng, window)
        check(attend(*case, **every), oracle(case, **every))


@pytest.mark.thorough
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


@pytest.mark.thorough
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
