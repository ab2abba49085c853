"""The prefill kernel under the emulator, races watched, against float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.stream_k import Tiling
from tests.support.emulating import TILES, run_prefill
from tests.support.kernel_cases import assert_within_rule, exact, make_case

WIDE = Tiling(num_programs=3, tile=128, stages=2, block_rows=128)


@pytest.mark.thorough
def test_ragged_chunks_behind_contexts() -> None:
    """Tiles with and without rows of others, padding within, a slot without rows."""
    case = make_case(
        [(3, 8), (10, 66), (0, 0), (0, 2)],
        page_size=16,
        kv_heads=1,
        group=1,
        padding=2,
    )
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


def test_every_feature_at_once() -> None:
    case = make_case(
        [(100, 70), (0, 3)],
        page_size=256,
        kv_heads=1,
        group=2,
        head_dim=128,
        softcap=2.0,
        alibi=2.0 ** -np.arange(1.0, 3.0),
        sinks=np.asarray([2.0, -np.inf]),
        window=50,
        scale=0.5,
        dtype="float16",
    )
    assert_within_rule(case, *run_prefill(case))


def test_results_of_others_stay() -> None:
    """Rows that are left out keep what is there, bit for bit; there is none here."""
    case = make_case([(5, 4), (60, 9)], page_size=64, kv_heads=1, group=1)
    out, lse = run_prefill(case, few=4)
    wanted, wanted_lse = exact(case)
    assert (out[:4] == 0).all()
    assert (lse[:4] == -jnp.inf).all()
    np.testing.assert_allclose(out[4:], wanted[4:], atol=0.02)
    np.testing.assert_allclose(lse[4:], wanted_lse[4:], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_size(page_size: int, head_dim: int, dtype: str) -> None:
    case = make_case(
        [(60, 68), (0, 3), (page_size - 1, 65)],
        page_size=page_size,
        kv_heads=2,
        group=1,
        head_dim=head_dim,
        dtype=dtype,
    )
    assert_within_rule(case, *run_prefill(case, WIDE if page_size == 64 else TILES))


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 4, 8])
def test_groups(group: int) -> None:
    case = make_case([(10, 40)], page_size=32, kv_heads=2, group=group)
    assert_within_rule(case, *run_prefill(case))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 127, 128])
def test_lengths_around_tiles(rows: int, context: int) -> None:
    case = make_case([(context, rows)], page_size=16, kv_heads=1, group=1)
    assert_within_rule(case, *run_prefill(case))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 129, 1000])
def test_windows(window: int) -> None:
    case = make_case(
        [(150, 40), (0, 140)], page_size=16, kv_heads=1, group=1, window=window
    )
    assert_within_rule(case, *run_prefill(case))


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [1.0, 30.0])
@pytest.mark.parametrize("rows", [1, 81])
def test_soft_caps_and_slopes(softcap: float, rows: int) -> None:
    case = make_case(
        [(300, rows)],
        page_size=16,
        kv_heads=2,
        group=2,
        softcap=softcap,
        alibi=2.0 ** -np.arange(1.0, 5.0),
        scale=1.0,
    )
    assert_within_rule(case, *run_prefill(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(num_programs=1, block_rows=128),
        Tiling(num_programs=40, stages=3, block_rows=128),
        Tiling(num_programs=3, stages=1, q_stages=1, block_rows=128),
        Tiling(num_programs=4, tile=128, stages=4, block_rows=128),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [16, 256])
def test_tilings_change_nothing(tiling: Tiling, page_size: int) -> None:
    slots = [(200, 5), (0, 0), (63, 131), (300, 64)]
    case = make_case(slots, page_size=page_size, kv_heads=1, group=2)
    assert_within_rule(case, *run_prefill(case, tiling))


@pytest.mark.slow
def test_a_middle_layer_of_a_flat_pool() -> None:
    case = make_case([(64, 70), (0, 0), (100, 1)], page_size=16, kv_heads=1, group=2)
    num_pages, used = case.k_pages.shape[0], case.page_ids < case.k_pages.shape[0]
    used &= case.page_ids >= 0
    poison = np.full_like(case.k_pages, np.nan)
    case = dataclasses.replace(
        case,
        k_pages=np.concatenate([poison, case.k_pages, poison]),
        v_pages=np.concatenate([poison, case.v_pages, poison]),
        page_ids=np.where(used, case.page_ids + num_pages, 3 * num_pages),
    )
    assert_within_rule(case, *run_prefill(case))
