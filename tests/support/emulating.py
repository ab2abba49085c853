"""The kernels under the emulator of Mosaic GPU, with race detection."""

import contextlib
import functools
import inspect
import types
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as emulator
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import row_packing
from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import KernelTilings, decode_plan, prefill_plan
from pallas_kernels.paged_attention.hopper import decode, kv_ring, prefill
from pallas_kernels.paged_attention.stream_k import Tiling
from tests.support.kernel_cases import Case

SMALL = Tiling(num_programs=3, stages=2)
TWO = Tiling(num_programs=4, stages=2, block_rows=128)
TILES = Tiling(num_programs=2, stages=2, block_rows=128)
"""Of the prefill kernel: tiles of 128 rows and, small, of 64 keys."""
TILINGS = KernelTilings(decode=SMALL, prefill=TILES)

# The first message depends on the version of jax and on the threads.
NOTICED = (
    r"RACE DETECTED|Not all copy_smem_to_gmem|"
    r"[Bb]arrier( \d+)? (completed phase|was deallocated|is already at phase)"
)
"""Messages of the emulator for a bug."""


@contextlib.contextmanager
def emulator_of_races() -> Generator[plgpu.InterpretGPUParams]:
    """Raises on races, which some versions of jax only print and record.

    They record the races of the last kernel only; here those of all kernels are kept.
    """
    name = "GPURaceDetectionState"
    emulators = list[Any]()
    make = getattr(gpu_callbacks, name, None)

    def keep(*args: Any, **options: Any) -> Any:
        assert make is not None
        emulators.append(make(*args, **options))
        return emulators[-1]

    with pytest.MonkeyPatch.context() as patch:
        if make is not None:
            patch.setattr(gpu_callbacks, name, keep)
        try:
            yield plgpu.InterpretGPUParams(detect_races=True)
            if any(races.races_found for races in emulators):
                raise RuntimeError("RACE DETECTED")
        finally:
            emulator.reset_gpu_interpret_mode_state()


def run(
    case: Case, tiling: Tiling = SMALL, *, is_packed: bool = False
) -> tuple[Any, Any]:
    """Emulates the kernel; raises the errors that the emulator finds.

    The queries are packed by the kernel, or before it with NaN in empty rows.
    """
    kv_heads, group = decode_plan.item_heads(case.q.shape[1], case.k_pages.shape[1])

    def plan_and_attend(arrays: dict[str, Any], interpret: Any) -> tuple[Any, Any]:
        plan = decode_plan.plan_decode(
            arrays["positions"],
            arrays["slots"],
            context=arrays["context"],
            ancestors=arrays["ancestors"],
            num_slots=case.page_ids.shape[0],
            kv_heads=kv_heads,
            group=group,
            tiling=tiling,
            window=case.window,
        )
        packed_q = None
        if is_packed:
            lay_out = functools.partial(
                row_packing.pack_queries, packing=plan.packing, kv_heads=kv_heads
            )
            q = arrays["q"]
            packed_q = jnp.where(lay_out(jnp.ones_like(q)) == 1, lay_out(q), jnp.nan)
            arrays = arrays | {"q": jnp.full_like(q, jnp.nan)}
        q, k_pages, v_pages, page_ids = among_layers(arrays)
        value_width = v_pages.shape[3]
        return decode.attend_decode(
            q,
            k_pages,
            None if value_width < q.shape[2] else v_pages,
            page_ids,
            plan,
            value_width=value_width,
            packed_q=packed_q,
            layer=jnp.int32(1),
            num_layers=3,
            scoring=scoring(case, arrays),
            tiling=tiling,
            interpret=interpret,
        )

    with emulator_of_races() as interpret:
        attend = jax.jit(plan_and_attend, static_argnums=1)
        return jax.block_until_ready(attend(case.arrays(), interpret))


def run_prefill(case: Case, tiling: Tiling = TILES, few: int = 0) -> tuple[Any, Any]:
    """Emulates the kernel for chunks; slots of `few` rows or less are left out."""

    def plan_and_attend(arrays: dict[str, Any], interpret: Any) -> tuple[Any, Any]:
        plan = prefill_plan.plan_prefill(
            arrays["positions"],
            arrays["slots"],
            num_slots=case.page_ids.shape[0],
            few=few,
            tiling=tiling,
            window=case.window,
        )
        return prefill.attend_prefill(
            *among_layers(arrays),
            plan,
            layer=jnp.int32(1),
            num_layers=3,
            scoring=scoring(case, arrays),
            window=case.window,
            tiling=tiling,
            interpret=interpret,
        )

    with emulator_of_races() as interpret, pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "wgmma", watched_product)
        attend = jax.jit(plan_and_attend, static_argnums=1)
        return jax.block_until_ready(attend(case.arrays(), interpret))


def scoring(case: Case, arrays: dict[str, Any]) -> ScoreTransform:
    """Returns the scoring of the case, with slopes and sinks by query head."""
    return ScoreTransform(case.scale, case.softcap, arrays["alibi"], arrays["sinks"])


def among_layers(arrays: dict[str, Any]) -> list[Any]:
    """Returns arguments of kernels: the pages are the second of three layers."""
    pages = [arrays[name] for name in ("k_pages", "v_pages")]
    others = [jnp.full_like(x, jnp.nan) for x in pages]
    pages = [jnp.concatenate([y, x, y]) for x, y in zip(pages, others, strict=True)]
    return [arrays["q"], *pages, arrays["page_ids"]]


def watched_product(
    sums: Any, left: Any, right: Any, multiply: Any = plgpu.wgmma
) -> None:
    """A product that loads its operands first, to detect races of the loads."""
    total = left[...].sum() + right[...].sum()
    pl.when(jnp.isnan(total))(plgpu.commit_smem)  # keeps the loads alive
    multiply(sums, left, right)
    plgpu.commit_smem()


def seed_bug(
    patch: pytest.MonkeyPatch, warpgroups: types.ModuleType, removed: str, added: str
) -> None:
    """Changes one place in the source of a kernel's warpgroups, or of `kv_ring`."""
    kind = warpgroups.__name__.rpartition(".")[2].removesuffix("_body")
    bodies = (f"run_{kind}_consumer", f"run_{kind}_producer")
    homes = {warpgroups: bodies, kv_ring: ("copy_tile",)}
    [home] = (x for x in homes if removed in inspect.getsource(x))
    changed = mutant(home, {removed: added})
    for name in homes[home]:
        patch.setattr(home, name, getattr(changed, name))


def mutant(module: types.ModuleType, changes: dict[str, str]) -> types.ModuleType:
    """Returns the module with some changes of its source."""
    source = inspect.getsource(module)
    for removed, added in changes.items():
        assert source.count(removed) == 1
        source = source.replace(removed, added)
    changed = types.ModuleType("mutant")
    exec(compile(source, "mutant", "exec"), changed.__dict__)
    return changed
