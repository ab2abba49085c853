"""The emulated kernels, with race detection, against float64."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.stream_k import Tiling
from tests.support.emulating import SMALL, TILES, TWO, run, run_prefill
from tests.support.kernel_cases import assert_within_rule, exact, make_case

WIDE = Tiling(num_programs=3, tile=128, stages=2, block_rows=128)
KERNELS = {"decode": run, "prefill": run_prefill}
of_both = pytest.mark.parametrize("kernel", KERNELS)


def check(kernel: str, slots: list[tuple[int, int]], *tiling: Any, **fields: Any):
    """Emulates a kernel on a case and compares the results."""
    case = make_case(slots, **fields)
    assert_within_rule(case, *KERNELS[kernel](case, *tiling))


@pytest.mark.thorough
def test_rows_to_decode_around_tiles_and_pages() -> None:
    ends = [0, 1, 15, 16, 17, 63, 64, 65, 127, 129]
    rows = [(n - 1, 1) if n else (0, 0) for n in ends]
    check("decode", rows, page_size=16, decode=True)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 127, 128])
def test_chunks_around_tiles(rows: int, context: int) -> None:
    check("prefill", [(context, rows)], page_size=16, kv_heads=1, group=1)


@pytest.mark.slow
def test_ragged_chunks_after_contexts() -> None:
    """Tiles with and without rows of other slots, padding, and a slot without rows."""
    slots = [(3, 8), (10, 66), (0, 0), (0, 2)]
    case = make_case(slots, page_size=16, kv_heads=1, group=1, padding=2)
    assert case.slots is not None
    rows = np.insert(np.arange(len(case.q)), 4, [-1] * 8)
    nobody = rows < 0
    between = dataclasses.replace(
        case,
        q=np.where(nobody[:, None, None], np.nan, case.q[rows]),
        positions=np.where(nobody, -1, case.positions[rows]),
        slots=np.where(nobody, -1, case.slots[rows]),
    )
    assert_within_rule(between, *run_prefill(between))


def test_results_of_other_rows_are_kept() -> None:
    """Results of rows that the kernel excludes stay bit for bit."""
    case = make_case([(5, 4), (60, 9)], page_size=64, kv_heads=1, group=1)
    out, lse = run_prefill(case, few=4)
    expected, expected_lse = exact(case)
    assert (out[:4] == 0).all()
    assert (lse[:4] == -jnp.inf).all()
    np.testing.assert_allclose(out[4:], expected[4:], atol=0.02)
    np.testing.assert_allclose(lse[4:], expected_lse[4:], atol=1e-5)


def rows_to_decode(page_size: int) -> list[tuple[int, int]]:
    ends = [page_size, 0, page_size + 1, 2 * page_size - 1, 64, 2 * page_size + 65]
    return [(n - 1, 1) if n else (0, 0) for n in ends]


@pytest.mark.thorough
def test_long_pages_wide_heads_and_float16() -> None:
    sizes: dict[str, Any] = dict(page_size=128, head_dim=256, kv_heads=1, group=5)
    check("decode", rows_to_decode(128), decode=True, dtype="float16", **sizes)


@pytest.mark.slow
def test_queries_that_are_packed_already() -> None:
    """Unused rows have any values; slots with one row and with several."""
    sizes: Any = dict(page_size=16, kv_heads=1, group=5, padding=2)
    case = make_case([(63, 3), (0, 0), (5, 14)], **sizes)
    outputs = run(case, is_packed=True)
    assert_within_rule(case, *outputs)
    for one, other in zip(outputs, run(case), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@of_both
def test_every_size(kernel: str, page_size: int, head_dim: int, dtype: str) -> None:
    sizes: Any = dict(page_size=page_size, head_dim=head_dim, dtype=dtype, kv_heads=2)
    if kernel == "decode":
        check(kernel, rows_to_decode(page_size), decode=True, group=5, **sizes)
    else:
        slots = [(60, 68), (0, 3), (page_size - 1, 65)]
        check(kernel, slots, WIDE if page_size == 64 else TILES, group=1, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16, 33, 64])
@pytest.mark.parametrize("decode", [False, True])
def test_groups_of_rows_to_decode(group: int, decode: bool) -> None:
    sizes: Any = dict(page_size=32, kv_heads=1, group=group, decode=decode)
    check("decode", [(80, 1), (20, 1)], **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 4, 8])
def test_groups_of_chunks(group: int) -> None:
    check("prefill", [(10, 40)], page_size=32, kv_heads=2, group=group)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "tiling"),
    [
        ("decode", Tiling(num_programs=1)),
        ("decode", Tiling(num_programs=30, stages=2)),
        ("decode", Tiling(num_programs=9, min_tiles=4)),
        ("decode", Tiling(num_programs=3, stages=1, q_stages=1)),
        ("decode", Tiling(num_programs=4, tile=128, stages=2)),
        ("prefill", Tiling(num_programs=1, block_rows=128)),
        ("prefill", Tiling(num_programs=40, stages=3, block_rows=128)),
        ("prefill", Tiling(num_programs=3, stages=2, q_stages=1, block_rows=128)),
        ("prefill", Tiling(num_programs=4, tile=128, stages=4, block_rows=128)),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [16, 256])
def test_tilings_change_nothing(kernel: str, tiling: Tiling, page_size: int) -> None:
    slots = {
        "decode": [(200, 5), (0, 0), (63, 1), (300, 1)],
        "prefill": [(200, 5), (0, 0), (63, 131), (300, 64)],
    }
    kv_heads, group = (2, 4) if kernel == "decode" else (1, 2)
    sizes: Any = dict(page_size=page_size, kv_heads=kv_heads, group=group)
    check(kernel, slots[kernel], tiling, **sizes)


@pytest.mark.thorough
def test_rows_of_slots_in_blocks_of_two_warpgroups() -> None:
    sizes: Any = dict(page_size=16, kv_heads=1, group=20, padding=2, window=70)
    check("decode", [(66, 7), (0, 0), (3, 1)], TWO, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize(
    ("kernel", "tiling"), [("decode", SMALL), ("decode", TWO), ("prefill", TILES)]
)
def test_windows(kernel: str, tiling: Tiling, window: int) -> None:
    slots = [(150, 40), (0, 140)]
    group = 1
    if kernel == "decode":
        slots = [(150, 9), (0, 70), (3, 1), (127, 2)]
        group = 4
    check(kernel, slots, tiling, page_size=16, kv_heads=1, group=group, window=window)


SLOPES = 2.0 ** -np.arange(1.0, 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [1.0, 30.0, 50.0])
@pytest.mark.parametrize(
    ("kernel", "before", "rows"),
    [
        *(("decode", length - 1, 1) for length in (1, 9, 81, 729)),
        *(("prefill", 300, rows) for rows in (1, 81)),
    ],
)
def test_soft_caps_and_slopes(
    kernel: str, before: int, rows: int, softcap: float
) -> None:
    features: Any = dict(softcap=softcap, alibi=SLOPES, scale=1.0)
    check(kernel, [(before, rows)], page_size=16, kv_heads=2, group=2, **features)


@pytest.mark.slow
@of_both
def test_a_middle_layer_of_a_flat_pool(kernel: str) -> None:
    if kernel == "decode":
        case = make_case([(64, 1), (0, 0), (100, 1)], page_size=16, decode=True)
    else:
        slots = [(64, 70), (0, 0), (100, 1)]
        case = make_case(slots, page_size=16, kv_heads=1, group=2)
    num_pages = case.k_pages.shape[0]
    used = case.page_ids < case.k_pages.shape[0]
    used &= case.page_ids >= 0
    poison = np.full_like(case.k_pages, np.nan)
    case = dataclasses.replace(
        case,
        k_pages=np.concatenate([poison, case.k_pages, poison]),
        v_pages=np.concatenate([poison, case.v_pages, poison]),
        page_ids=np.where(used, case.page_ids + num_pages, 3 * num_pages),
    )
    assert_within_rule(case, *KERNELS[kernel](case))


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
    slots = [(61, 9), (0, 4), (62, 70), (0, 0), (64, 1)]
    sizes: Any = dict(page_size=16, kv_heads=1, group=2, trees=True, window=window)
    check("decode", slots, tiling, **sizes)


@pytest.mark.thorough
def test_every_feature_of_rows_to_decode_at_once() -> None:
    sinks = np.linspace(-1.0, 2.0, 4)
    features: Any = dict(softcap=2.0, alibi=SLOPES, sinks=sinks, window=100, scale=0.5)
    check("decode", [(140, 2), (0, 1)], page_size=64, kv_heads=2, group=2, **features)


@pytest.mark.thorough
def test_every_feature_of_chunks_at_once() -> None:
    sinks = np.asarray([2.0, -np.inf])
    features: Any = dict(softcap=2.0, alibi=SLOPES[:2], sinks=sinks, window=50)
    sizes: Any = dict(page_size=256, kv_heads=1, group=2, head_dim=128, scale=0.5)
    check("prefill", [(100, 70), (0, 3)], dtype="float16", **sizes, **features)


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
