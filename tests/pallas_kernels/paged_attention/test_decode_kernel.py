"""The decode kernel under the emulator, races watched, against float64."""

import dataclasses

import numpy as np
import pytest

from pallas_kernels.paged_attention.stream_k import Tiling
from tests.support.emulating import SMALL, TWO, run
from tests.support.kernel_cases import assert_within_rule, make_case


@pytest.mark.thorough
def test_lengths_around_tiles_and_pages() -> None:
    ends = [0, 1, 15, 16, 17, 63, 64, 65, 127, 129]
    case = make_case(
        [(n - 1, 1) if n else (0, 0) for n in ends], page_size=16, decode=True
    )
    assert_within_rule(case, *run(case))


def check_sizes(page_size: int, head_dim: int, dtype: str, kv_heads: int) -> None:
    ends = [page_size, 0, page_size + 1, 2 * page_size - 1, 64, 2 * page_size + 65]
    case = make_case(
        [(n - 1, 1) if n else (0, 0) for n in ends],
        page_size=page_size,
        kv_heads=kv_heads,
        group=5,
        head_dim=head_dim,
        dtype=dtype,
        decode=True,
    )
    assert_within_rule(case, *run(case))


@pytest.mark.thorough
def test_long_pages_wide_heads_and_float16() -> None:
    check_sizes(128, 256, "float16", 1)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_size(page_size: int, head_dim: int, dtype: str) -> None:
    check_sizes(page_size, head_dim, dtype, 2)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16, 33, 64])
@pytest.mark.parametrize("decode", [False, True])
def test_groups(group: int, decode: bool) -> None:
    case = make_case(
        [(80, 1), (20, 1)], page_size=32, kv_heads=1, group=group, decode=decode
    )
    assert_within_rule(case, *run(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(num_programs=1),
        Tiling(num_programs=30, stages=2),
        Tiling(num_programs=9, min_tiles=4),
        Tiling(num_programs=3, stages=1, q_stages=1),
        Tiling(num_programs=4, tile=128, stages=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [16, 256])
def test_tilings_change_nothing(tiling: Tiling, page_size: int) -> None:
    slots = [(200, 5), (0, 0), (63, 1), (300, 1)]
    case = make_case(slots, page_size=page_size, kv_heads=2, group=4)
    assert_within_rule(case, *run(case, tiling))


@pytest.mark.thorough
def test_rows_of_slots_in_blocks_of_two_warpgroups() -> None:
    case = make_case(
        [(66, 7), (0, 0), (3, 1)],
        page_size=16,
        kv_heads=1,
        group=20,
        padding=2,
        window=70,
    )
    assert_within_rule(case, *run(case, TWO))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 1000])
@pytest.mark.parametrize("tiling", [SMALL, TWO], ids=["one", "two"])
def test_windows(window: int, tiling: Tiling) -> None:
    case = make_case(
        [(150, 9), (0, 70), (3, 1), (127, 2)],
        page_size=16,
        kv_heads=1,
        group=4,
        window=window,
    )
    assert_within_rule(case, *run(case, tiling))


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [1.0, 30.0, 50.0])
@pytest.mark.parametrize("length", [1, 9, 81, 729])
def test_soft_caps_and_slopes(softcap: float, length: int) -> None:
    case = make_case(
        [(length - 1, 1)],
        page_size=16,
        kv_heads=2,
        group=2,
        softcap=softcap,
        alibi=2.0 ** -np.arange(1.0, 5.0),
        scale=1.0,
    )
    assert_within_rule(case, *run(case))


@pytest.mark.slow
def test_a_middle_layer_of_a_flat_pool() -> None:
    case = make_case([(64, 1), (0, 0), (100, 1)], page_size=16, decode=True)
    num_pages, used = case.k_pages.shape[0], case.page_ids < case.k_pages.shape[0]
    used &= case.page_ids >= 0
    poison = np.full_like(case.k_pages, np.nan)
    case = dataclasses.replace(
        case,
        k_pages=np.concatenate([poison, case.k_pages, poison]),
        v_pages=np.concatenate([poison, case.v_pages, poison]),
        page_ids=np.where(used, case.page_ids + num_pages, 3 * num_pages),
    )
    assert_within_rule(case, *run(case))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("window", "tiling"),
    [
        pytest.param(None, SMALL, id="one"),
        pytest.param(3, SMALL, id="window", marks=pytest.mark.slow),
        pytest.param(None, TWO, id="two", marks=pytest.mark.slow),
    ],
)
def test_trees(window: int | None, tiling: Tiling) -> None:
    case = make_case(
        [(61, 9), (0, 4), (62, 70), (0, 0), (64, 1)],
        page_size=16,
        kv_heads=1,
        group=2,
        trees=True,
        window=window,
    )
    assert_within_rule(case, *run(case, tiling))


@pytest.mark.thorough
def test_every_feature_at_once() -> None:
    case = make_case(
        [(140, 2), (0, 1)],
        page_size=64,
        kv_heads=2,
        group=2,
        softcap=2.0,
        alibi=2.0 ** -np.arange(1.0, 5.0),
        sinks=np.linspace(-1.0, 2.0, 4),
        window=100,
        scale=0.5,
    )
    assert_within_rule(case, *run(case))


@pytest.mark.thorough
def test_a_chain_equals_causal_rows_bit_for_bit() -> None:
    causal = make_case([(62, 4)], page_size=16, kv_heads=1, group=4)
    chain = dataclasses.replace(
        causal,
        context=np.asarray([62]),
        ancestors=np.tril(np.ones((4, 4), bool)),
    )
    tiling = Tiling(num_programs=2, stages=2)
    for one, other in zip(run(causal, tiling), run(chain, tiling), strict=True):
        np.testing.assert_array_equal(one, other)
