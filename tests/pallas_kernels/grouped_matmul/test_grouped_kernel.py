"""The grouped product for Hopper GPUs: emulated, lowered, compiled without a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import devices
from pallas_kernels.bench import deviceless
from pallas_kernels.devices import Target
from pallas_kernels.grouped_matmul import blocks, grouped_matmul, mosaic_gpu
from pallas_kernels.grouped_matmul.blocks import GroupedTiling
from tests.support.emulating import NOTICED, emulator_of_races, mutant, watched_product
from tests.support.grouped_cases import (
    Case,
    assert_within_rule,
    exact,
    make_case,
    plain,
)
from tests.support.mutation import replace

ONE = GroupedTiling(64, 64, 2, 2)
TWO = GroupedTiling(128, 128, 3)
HOPPER = Target("gpu", "NVIDIA H200", 132, "9.0")
WHY_NOT = deviceless.unavailable_reason()
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def emulate(case: Case, tiling: GroupedTiling, **options: Any) -> Any:
    """Runs the kernel on two programs; raises the emulator's errors."""
    options = {"dtype": case.x.dtype, "num_programs": 2} | options
    with emulator_of_races() as interpret, pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "wgmma", watched_product)
        run = jax.jit(
            lambda *arrays: mosaic_gpu.multiply_mosaic_gpu(
                *arrays, tiling=tiling, interpret=interpret, **options
            )
        )
        return jax.block_until_ready(run(case.x, case.w, case.group_sizes))


# All edge cases at once: groups without rows, one row below and above a block, groups
# that share eight rows, rows without a group, rows not a multiple of eight.
EDGES = make_case([63, 0, 64, 65, 1, 2], num_rows=203, num_columns=192)


def test_edges_of_groups_and_blocks() -> None:
    # Three stretches of columns, in panels of two.
    out = emulate(EDGES, ONE)
    assert_within_rule(out, exact(EDGES), plain(EDGES))
    assert not np.asarray(out[195:]).any()


def test_two_warpgroups() -> None:
    case = make_case([0, 130, 0, 70], num_rows=208, width=128, num_columns=128)
    out = emulate(case, TWO)
    assert_within_rule(out, exact(case), plain(case))


def test_transposed_weights() -> None:
    case = make_case([9, 3], width=192, num_columns=64, dtype="float16")
    turned = Case(
        x=case.x, w=case.w.swapaxes(1, 2).copy(), group_sizes=case.group_sizes
    )
    out = emulate(turned, ONE, transposed=True, dtype=jnp.float32)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact(case), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiling", "num_rows"),
    [
        ([1], 1),
        ([0, 0, 5], 40),
        ([0, 0], 12),  # no group has rows
        ([200, 0], 200),
        ([0, 129, 0, 127], 256),
        ([7, 1, 8, 9, 15, 16, 17, 31], 104),
    ],
)
@pytest.mark.parametrize("tiles", [ONE, TWO], ids=["one", "two"])
def test_more_groups(tiling: list[int], num_rows: int, tiles: GroupedTiling) -> None:
    case = make_case(tiling, num_rows=num_rows, num_columns=128)
    assert_within_rule(emulate(case, tiles), exact(case), plain(case))


MULTIPLY = "plgpu.wgmma(sums, shared.x.at[stage, warpgroup], weights)"
COMMIT = "(sums, begin, shared.{})\n            plgpu.commit_smem()"
LAST_WAIT = "panel, visit)\n    plgpu.wait_smem_to_gmem(0)"
BUGS = {
    "back-pressure": {"plgpu.barrier_wait(shared.free.at[stage])": "pass"},
    "wait for tiles": {"plgpu.barrier_wait(shared.full.at[stage])": "pass"},
    "early release": {
        MULTIPLY: "release(index); " + MULTIPLY,
        "release(index - 1)": "pass",
        "release(item.ring + item.steps - 1)": "pass",
    },
    "commit of a part": {COMMIT.format("part"): "(sums, begin, shared.part)"},
}
MORE_BUGS = {
    "commit of a whole": {
        COMMIT.format("swizzled_tile"): "(sums, begin, shared.swizzled_tile)"
    },
    "wait for results": {"plgpu.wait_smem_to_gmem(0, wait_read_only=True)": "pass"},
    "wait for the last results": {LAST_WAIT: "panel, visit)"},
    "rows of a neighbour": {
        "low = jnp.clip(inputs.begin": "low = 0 * jnp.clip(inputs.begin"
    },
}
TINY = make_case([66, 3], num_rows=72, width=192)


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(bug, id=name) for name, bug in BUGS.items()),
        *(
            pytest.param(bug, id=name, marks=pytest.mark.slow)
            for name, bug in MORE_BUGS.items()
        ),
    ],
)
def test_seeded_bugs_are_caught(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = mutant(mosaic_gpu, changes)
    monkeypatch.setattr(mosaic_gpu, "_consume", module._consume)
    monkeypatch.setattr(mosaic_gpu, "_produce", module._produce)
    with pytest.raises(RuntimeError, match=NOTICED):
        emulate(TINY, ONE)


@pytest.mark.slow
def test_without_a_bug_no_error_is_raised() -> None:
    assert_within_rule(emulate(TINY, ONE), exact(TINY), plain(TINY))


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_columns=192 of tiling\.columns=128"):
        emulate(EDGES, TWO)


def test_the_public_function_lowers_both_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and the gradient of the rows; XLA computes that of the weights."""
    replace(monkeypatch, devices, "current_target", lambda: HOPPER)
    arrays: Any = shapes(40, 3, 128, 192)

    def both(x: Any, w: Any, tiling: Any) -> Any:
        out, back = jax.vjp(lambda x, w: grouped_matmul(x, w, tiling), x, w)
        return back(out)

    traced = jax.jit(both).trace(*arrays)
    assert str(traced.jaxpr).count("name=grouped_product") == 2
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def shapes(rows: int, groups: int, width: int, columns: int, dtype: Any = None) -> Any:
    dtype = dtype or jnp.bfloat16
    return (
        jax.ShapeDtypeStruct((rows, width), dtype),
        jax.ShapeDtypeStruct((groups, width, columns), dtype),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    )


def test_default_tilings_suit_the_shapes() -> None:
    def choose(rows: int, groups: int, columns: int) -> GroupedTiling:
        return blocks.choose_tiling(
            num_rows=rows, num_groups=groups, num_columns=columns, num_cores=132
        )

    # Mixtral: two of eight experts for one token, then for 8,192.
    assert choose(2, 8, 4096)[:2] == (64, 64)
    assert choose(2, 8, 14336)[:2] == (64, 128)
    assert choose(16384, 8, 14336)[:3] == (128, 256, 4)
    assert choose(16384, 8, 1408)[:2] == (128, 128)
    for rows in (1, 100, 10_000):
        for columns in (64, 192, 4096):
            tiling = choose(rows, 16, columns)
            assert columns % tiling.columns == 0
            assert tiling.smem_bytes() <= devices.SMEM_BYTES - 2048


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("rows", [16384, pytest.param(16, marks=pytest.mark.slow)])
def test_nothing_spills_on_an_h200(rows: int) -> None:
    arrays = shapes(rows, 8, 4096, 14336)
    report = deviceless.compile_function(
        lambda *arrays: grouped_matmul(*arrays, implementation="mosaic_gpu"),
        *arrays,
    )
    assert_fits(report)
    # The list of blocks; no copy of rows or weights.
    assert report.temp_bytes < 20_000


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("block_rows", [64, 128])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_nothing_spills_at_any_size(
    columns: int, block_rows: int, transposed: bool, dtype: str
) -> None:
    operands = jnp.float16 if dtype == "float16" else jnp.bfloat16
    tiling = blocks.choose_tiling(
        num_rows=block_rows * 1000, num_groups=1000, num_columns=columns, num_cores=1
    )
    assert tiling[:2] == (block_rows, columns)
    x, w, group_sizes = shapes(500, 8, 512, 512, operands)
    report = deviceless.compile_function(
        lambda *arrays: mosaic_gpu.multiply_mosaic_gpu(
            *arrays,
            transposed=transposed,
            dtype=jnp.dtype(dtype),
            tiling=tiling,
            num_programs=132,
        ),
        x,
        w,
        group_sizes,
    )
    assert_fits(report)


def assert_fits(report: deviceless.CompileReport) -> None:
    (kernel,) = report.kernels
    assert kernel.name.startswith("grouped_product")
    assert kernel.spill_stores == kernel.spill_loads == 0
    assert kernel.smem_bytes <= devices.SMEM_BYTES
    assert kernel.instructions["wgmma"] >= 4
    assert kernel.instructions["tma_load"] >= 2
    assert kernel.instructions["tma_store"] >= 7
