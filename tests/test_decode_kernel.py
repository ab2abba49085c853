"""The decode kernel under the emulator, races watched, against float64."""

from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as emulator
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import decode_mosaic_gpu as decode
from pallas_kernels import planning
from pallas_kernels.cutting import Tiling
from tests.kernel_cases import Case, assert_within_rule, make_case

SMALL = Tiling(num_programs=3, stages=2)


def run(case: Case, tiling: Tiling = SMALL, kernel: Any = decode) -> tuple[Any, Any]:
    """Emulates the kernel; raises what it finds, races among it."""
    _, kv_heads, _, _ = case.k_pages.shape
    arrays = {name: case.array(name) for name in ("positions", "slots", "context")}
    plan = planning.make_plan(
        **arrays,
        ancestors=case.array("ancestors"),
        num_slots=case.page_ids.shape[0],
        kv_heads=kv_heads,
        group=case.q.shape[1] // kv_heads,
        tiling=tiling,
        window=case.window,
    )
    try:
        out, lse = kernel.attend(
            *(case.array(name) for name in ("q", "k_pages", "v_pages", "page_ids")),
            plan,
            scale=case.scale,
            softcap=case.softcap,
            alibi=case.array("alibi"),
            sinks=case.array("sinks"),
            tiling=tiling,
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )
        jax.block_until_ready((out, lse))
        if emulator.get_races().races_found:
            raise RuntimeError("RACE DETECTED")
    finally:
        emulator.reset_gpu_interpret_mode_state()
    return out, lse


def test_lengths_around_tiles_and_pages() -> None:
    ends = [0, 1, 15, 16, 17, 63, 64, 65, 127, 129]
    case = make_case(
        [(n - 1, 1) if n else (0, 0) for n in ends], page_size=16, decode=True
    )
    assert_within_rule(case, *run(case))
