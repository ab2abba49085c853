"""The kernel that merges and unpacks, emulated with race detection; its reference."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench import compile_function, unavailable_reason
from pallas_kernels.paged_attention.hopper import merge
from tests.support import emulating
from tests.support.merge_cases import Case, make
from tests.support.mutation import replace

# Positions and slots: one row per slot, some idle; and several rows per slot.
DECODE: dict[str, Any] = dict(positions=[2000, -1, 3, 64, 300], slots=None, num_slots=5)
RAGGED: dict[str, Any] = dict(
    positions=[10, 11, 12, -1, 500, 501, 90], slots=[0, 0, 0, 0, 1, 1, 2], num_slots=3
)


def emulate(case: Case, dtype: Any = jnp.float32) -> Any:
    def run(arrays: Any, interpret: Any) -> Any:
        return merge.merge_and_unpack_mosaic_gpu(
            *arrays,
            group=case.group,
            tiling=case.tiling,
            dtype=dtype,
            interpret=interpret,
        )

    with emulating.emulator_of_races() as interpret:
        call = jax.jit(run, static_argnums=1)
        return jax.block_until_ready(call(case.arrays, interpret))


def assert_same(case: Case, outputs: Any) -> None:
    out, lse = outputs
    expected, expected_lse = case.by_twin()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    used = case.plan.packing.row.shape[1] * case.group
    np.testing.assert_allclose(lse[..., :used], expected_lse[..., :used], atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "group", "head_dim", "block_rows"),
    [
        (DECODE, 4, 64, 64),
        pytest.param(DECODE, 1, 256, 64, marks=pytest.mark.slow),
        # Heads of a token on both sides of the 64 rows that are merged at a time.
        pytest.param(RAGGED, 3, 128, 128, marks=pytest.mark.thorough),
    ],
)
def test_it_equals_its_twin(
    rows: Any, group: int, head_dim: int, block_rows: int
) -> None:
    case = make(**rows, group=group, head_dim=head_dim, block_rows=block_rows)
    # Items of one program, and some of more parts than stages.
    more = np.diff(case.parts, axis=1)
    assert 0 in more
    assert np.max(more) > 1
    assert_same(case, emulate(case))
    assert emulate(case, jnp.bfloat16)[0].dtype == jnp.bfloat16


BUGS = {
    "read before it has come": ("plgpu.barrier_wait(arrived.at[stage])", "None"),
    "taken before it is seen": ("plgpu.commit_smem()\n\n        @pl", "\n        @pl"),
    "overwritten while it is read": (
        "plgpu.commit_smem()\n            return",
        "return",
    ),
    "left before it is gone": ("plgpu.wait_smem_to_gmem(0)", "None"),
    "sides the wrong way round": ("jnp.where(index == 0, 1, 0)", "index * 0"),
    "the state not scaled": (
        "state.out * softmax.broadcast_rows(decay, out.shape)",
        "state.out",
    ),
}


def fails(case: Case) -> bool:
    """Returns True if the emulator raises an error or the result differs."""
    try:
        assert_same(case, emulate(case))
    except AssertionError:
        return True
    except (RuntimeError, ValueError) as error:
        return bool(re.search(rf"{emulating.NOTICED}|CpuCallback", str(error)))
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_detected(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(**DECODE, group=4, head_dim=64)
    changed = emulating.mutant(merge, dict([BUGS[bug]]))
    name = "merge_and_unpack_mosaic_gpu"
    replace(monkeypatch, merge, name, getattr(changed, name))
    assert fails(case)


@pytest.mark.thorough
@pytest.mark.skipif(unavailable_reason() is not None, reason="no compiler for GPUs")
@pytest.mark.parametrize(
    ("rows", "group", "head_dim"), [(DECODE, 4, 128), (DECODE, 8, 256), (RAGGED, 4, 64)]
)
def test_it_compiles_without_spills(rows: Any, group: int, head_dim: int) -> None:
    case = make(**rows, group=group, head_dim=head_dim)
    report = compile_function(
        lambda *x: merge.merge_and_unpack_mosaic_gpu(
            *x, group=group, tiling=case.tiling, dtype=jnp.bfloat16
        ),
        *case.arrays,
    )
    [kernel] = report.kernels
    assert kernel.spill_stores == kernel.spill_loads == 0
    assert "copy(" not in report.text
