"""The kernel that merges and unpacks, emulated with its races watched; and its twin."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import row_packing
from pallas_kernels.bench import deviceless
from pallas_kernels.paged_attention import decode_plan, merging
from pallas_kernels.paged_attention.hopper import merge
from pallas_kernels.paged_attention.stream_k import Tiling
from tests.support import emulating

PROGRAMS = 7
# Positions and slots: one row a slot, some of them idle; and rows side by side.
DECODE = [2000, -1, 3, 64, 300], None, 5
RAGGED = [10, 11, 12, -1, 500, 501, 90], [0, 0, 0, 0, 1, 1, 2], 3


class Case(NamedTuple):
    states: Any
    parts: Any
    packing: row_packing.Packing
    group: int


def make(rows: Any, group: int, head_dim: int, block_rows: int = 64) -> Case:
    """A plan, and the states that programs would leave: NaN where nobody wrote."""
    positions, slots, num_slots = rows
    plan = decode_plan.make_plan(
        jnp.asarray(positions, jnp.int32),
        None if slots is None else jnp.asarray(slots, jnp.int32),
        num_slots=num_slots,
        kv_heads=2,
        group=group,
        tiling=Tiling(num_programs=PROGRAMS, stages=2, block_rows=block_rows),
    )
    num_blocks, tokens = plan.packing.row.shape
    size = row_packing.num_block_rows(tokens=tokens, group=group)
    rng = np.random.default_rng(group)
    items, programs = (num_blocks, 2, size), (PROGRAMS, 2, size)
    out, part_out = (rng.normal(size=(*x, head_dim)) for x in (items, programs))
    lse, part_lse = (4 * rng.normal(size=x) for x in (items, programs))
    parts = np.asarray(plan.schedule.parts)
    whole = (parts[:, 0] == parts[:, 1]).reshape(num_blocks, 2)
    out[~whole], lse[~whole] = np.nan, np.nan
    written = np.zeros((PROGRAMS, 2), bool)
    for first, last in parts[parts[:, 0] < parts[:, 1]]:
        written[first, 1] = written[first + 1 : last + 1, 0] = True
    part_out[~written], part_lse[~written] = np.nan, np.nan
    # A row that saw nothing in one part of its item.
    part_lse[written.nonzero()[0][0], 1, 0] = -np.inf
    states = tuple(jnp.asarray(x, jnp.float32) for x in (out, lse, part_out, part_lse))
    return Case(states, plan.schedule.parts, plan.packing, group)


def emulate(case: Case, dtype: Any = jnp.float32) -> Any:
    def run(states: Any, parts: Any, packing: Any, interpret: Any) -> Any:
        return merge.merge_and_unpack(
            *states, parts, packing, group=case.group, dtype=dtype, interpret=interpret
        )

    with emulating.emulator_of_races() as interpret:
        call = jax.jit(run, static_argnums=3)
        return jax.block_until_ready(call(*case[:3], interpret))


def by_twin(case: Case) -> tuple[Any, Any]:
    return merging.merge_and_unpack(
        *case.states,
        parts=case.parts,
        packing=case.packing,
        group=case.group,
        dtype=jnp.float32,
    )


def assert_same(case: Case, found: Any) -> None:
    out, lse = found
    wanted, wanted_lse = by_twin(case)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)
    used = case.packing.row.shape[1] * case.group
    np.testing.assert_allclose(lse[..., :used], wanted_lse[..., :used], atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "group", "head_dim", "block_rows"),
    [
        (DECODE, 4, 64, 64),
        pytest.param(DECODE, 1, 256, 64, marks=pytest.mark.thorough),
        # Heads of a token on either side of the 64 rows that are merged at a time.
        pytest.param(RAGGED, 3, 128, 128, marks=pytest.mark.thorough),
    ],
)
def test_it_equals_its_twin(
    rows: Any, group: int, head_dim: int, block_rows: int
) -> None:
    case = make(rows, group, head_dim, block_rows)
    # Items that a program holds whole, and some of more parts than stages.
    more = np.diff(case.parts, axis=1)
    assert 0 in more
    assert np.max(more) > 1
    assert_same(case, emulate(case))
    assert emulate(case, jnp.bfloat16)[0].dtype == jnp.bfloat16


BUGS = {
    "read before it has come": ("plgpu.barrier_wait(arrived.at[stage])", "None"),
    "taken before it is seen": ("plgpu.commit_smem()\n\n        @pl", "\n        @pl"),
    "overwritten while it is read": (
        "plgpu.commit_smem()\n            top",
        "top",
    ),
    "left before it is gone": ("plgpu.wait_smem_to_gmem(0)", "None"),
    "sides the wrong way round": ("jnp.where(index == 0, 1, 0)", "index * 0"),
    "the state not scaled": ("state.out * softmax.along(decay, tile)", "state.out"),
}


def goes_wrong(case: Case) -> bool:
    """Whether the emulator complains, or something else comes out."""
    try:
        assert_same(case, emulate(case))
    except AssertionError:
        return True
    except (RuntimeError, ValueError) as error:
        return bool(re.search(rf"{emulating.NOTICED}|CpuCallback", str(error)))
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(DECODE, 4, 64)
    changed = emulating.mutant(merge, dict([BUGS[bug]]))
    monkeypatch.setattr(merge, "merge_and_unpack", changed.merge_and_unpack)
    assert goes_wrong(case)


@pytest.mark.thorough
@pytest.mark.skipif(deviceless.available() is not None, reason="no compiler for GPUs")
@pytest.mark.parametrize(
    ("rows", "group", "head_dim"), [(DECODE, 4, 128), (DECODE, 8, 256), (RAGGED, 4, 64)]
)
def test_it_compiles_without_spills(rows: Any, group: int, head_dim: int) -> None:
    case = make(rows, group, head_dim)
    report = deviceless.compile(
        lambda *x: merge.merge_and_unpack(*x, group=group, dtype=jnp.bfloat16),
        *(*case.states, case.parts, case.packing),
    )
    [kernel] = report.kernels
    assert kernel.spill_stores == kernel.spill_loads == 0
    assert "copy(" not in report.text
