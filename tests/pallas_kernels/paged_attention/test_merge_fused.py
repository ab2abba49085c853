"""Decode's states merged within the prefill kernel's launch, emulated."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import devices, row_packing
from pallas_kernels.bench import compile_function, unavailable_reason
from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import dispatch, prefill_plan
from pallas_kernels.paged_attention.hopper import merge_fused, prefill
from pallas_kernels.paged_attention.hopper.softmax import LOG2E
from tests.support import emulating, kernel_cases, merge_cases
from tests.support.emulating import TILES
from tests.support.mutation import replace

# (Context, rows) of each slot: long keys that several programs share; rows without
# keys, as in an empty tree; no rows; a chunk; a short one; rows without a slot.
SLOTS = [(1700, 1), (5, 3), (0, 0), (20, 12), (2, 1), (640, 1)]
EMPTY = 1
CHUNK = 3
PADDING = 5
WHY_NOT = unavailable_reason()


class Mixed(NamedTuple):
    """A chunk for prefill, and states of other rows to merge."""

    case: kernel_cases.Case
    few: merge_cases.Case


def make(*, group: int, head_dim: int, dtype: str = "float16") -> Mixed:
    """Draws both; the kernel does not read the pages of the other rows."""
    sizes: dict[str, Any] = dict(group=group, head_dim=head_dim)
    case = kernel_cases.make_case(
        SLOTS, page_size=64, padding=PADDING, dtype=dtype, **sizes
    )
    context = jnp.where(jnp.arange(len(SLOTS)) == EMPTY, 0, -1)
    few = merge_cases.make(
        np.where(case.slots == CHUNK, -1, case.positions),
        case.slots,
        num_slots=len(SLOTS),
        context=context,
        ancestors=jnp.zeros((len(case.positions), 1), bool),
        **sizes,
    )
    return Mixed(case, few)


def emulate(mixed: Mixed) -> tuple[Any, Any]:
    case, few = mixed

    def run(arrays: dict[str, Any], states: Any, plan: Any, interpret: Any) -> Any:
        step_plan = prefill_plan.plan_prefill(
            arrays["positions"],
            arrays["slots"],
            num_slots=len(SLOTS),
            few=3,
            tiling=TILES,
        )
        return prefill.attend_prefill(
            *emulating.among_layers(arrays),
            step_plan,
            decode_output=merge_fused.DecodePartials(states, plan, few.tiling),
            layer=jnp.int32(1),
            num_layers=3,
            scoring=ScoreTransform(case.scale),
            tiling=TILES,
            interpret=interpret,
        )

    with emulating.emulator_of_races() as races, pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "wgmma", emulating.watched_product)
        call = jax.jit(run, static_argnums=3)
        return jax.block_until_ready(call(case.arrays(), few.states, few.plan, races))


def check(mixed: Mixed) -> None:
    """Compares rows of the chunk with float64, other rows with the reference."""
    case, few = mixed
    out, lse = (np.asarray(x, np.float64) for x in emulate(mixed))
    expected, expected_lse = kernel_cases.exact(case)
    chunk = np.asarray(case.slots == CHUNK)
    np.testing.assert_allclose(out[chunk], expected[chunk], atol=0.02)
    np.testing.assert_allclose(lse[chunk], expected_lse[chunk], atol=1e-5)
    (expected, expected_lse), others = few.by_twin(), np.logical_not(chunk)
    packing = few.plan.packing
    expected_lse = row_packing.unpack_rows(
        expected_lse, packing, group=few.group, fill=-np.inf
    )
    np.testing.assert_allclose(out[others], expected[others], atol=2e-3)
    np.testing.assert_allclose(lse[others], expected_lse[others] / LOG2E, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes",
    [
        dict(group=4, head_dim=64),
        # Partly filled blocks; results stored in four pieces of columns.
        pytest.param(dict(group=3, head_dim=128), marks=pytest.mark.slow),
        pytest.param(dict(group=4, head_dim=256), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_equals_its_twin(sizes: dict[str, Any]) -> None:
    mixed = make(**sizes)
    # An item of several parts, one of a single part, one without parts.
    assert {-1, 0}.issubset(np.diff(mixed.few.parts, axis=1).flat)
    assert np.max(np.diff(mixed.few.parts, axis=1)) > 1
    check(mixed)


SENT = f"outputs.held_lse[...] = lse\n{' ' * 12}plgpu.commit_smem()"
CLEAR = "plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)\n    plgpu.commit_smem()"
BUGS = {
    "taken before it is seen": (SENT, SENT.split("\n")[0]),
    "zeros taken before they are seen": (CLEAR, CLEAR.split("\n")[0]),
    "overwritten on its way": ("plgpu.wait_smem_to_gmem(0, wait_read_only=True)", ""),
    "rows of a chunk cleared": (" & (position[row] < 0)", ""),
    "done by several": ("sides, step=workers", "sides, step=1"),
    "left out": ("@pl.loop(worker, num_blocks", "@pl.loop(worker + 1, num_blocks"),
    "sides the wrong way round": ("jnp.where(index == 0, 1, 0)", "index * 0"),
    "the last part left out": ("last - first + 1", "jnp.maximum(last - first, 1)"),
    "another head's rows": ("head * group, group", "0, group"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_detected(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = emulating.mutant(merge_fused, dict([BUGS[bug]]))
    replace(monkeypatch, merge_fused, "run_fused_merge", changed.run_fused_merge)
    noticed = rf"{emulating.NOTICED}|CpuCallback|Not equal to tolerance"
    with pytest.raises((AssertionError, RuntimeError), match=noticed):
        check(make(group=4, head_dim=64))


@pytest.mark.slow
def test_bits_equal_a_separate_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [(300, 1), (5, 3), (0, 0), (30, 66), (64, 1)]
    case = kernel_cases.make_case(slots, page_size=64, padding=PADDING)

    def plan_and_attend(arrays: dict[str, Any], interpret: Any) -> tuple[Any, Any]:
        plan = dispatch.make_step_plan(
            arrays["positions"],
            arrays["slots"],
            num_slots=len(slots),
            kv_heads=2,
            group=4,
            head_dim=64,
            tiling=emulating.TILINGS,
        )
        assert plan.few is not None
        assert plan.prefill is not None
        return dispatch.dispatch_attention(
            *emulating.among_layers(arrays),
            plan,
            ScoreTransform(case.scale),
            window=None,
            layer=jnp.int32(1),
            num_layers=3,
            interpret=interpret,
        )

    def run() -> tuple[Any, Any]:
        with emulating.emulator_of_races() as races:
            call = jax.jit(plan_and_attend, static_argnums=1)
            return jax.block_until_ready(call(case.arrays(), races))

    monkeypatch.setattr(plgpu, "wgmma", emulating.watched_product)
    fused = run()
    kernel_cases.assert_within_rule(case, *fused)
    replace(monkeypatch, merge_fused, "supports_fused_merge", lambda *_, **__: False)
    for one, other in zip(fused, run(), strict=True):
        np.testing.assert_array_equal(one, other)


def attend(
    *, group: int, head_dim: int, sinks: bool = False, softcap: float | None = None
) -> tuple[Any, Any]:
    """A call of all kernels in a step with both, and its arguments' shapes."""
    num_slots = 4
    rows = 256
    kv_heads = 2

    def call(q: Any, pages: Any, page_ids: Any, positions: Any, slots: Any) -> Any:
        plan = dispatch.make_step_plan(
            positions,
            slots,
            num_slots=num_slots,
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
        )
        by_head = jnp.ones(q.shape[1]) if sinks else None
        scoring = ScoreTransform(1.0, softcap, sinks=by_head)
        return dispatch.dispatch_attention(
            q, *pages, page_ids, plan, scoring, window=None
        )

    spec = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    pages = spec(jnp.bfloat16, 64, kv_heads, 16, head_dim)
    row = spec(jnp.int32, rows)
    queries = spec(jnp.bfloat16, rows, kv_heads * group, head_dim)
    return call, (queries, (pages, pages), spec(jnp.int32, num_slots, 8), row, row)


@pytest.mark.parametrize(
    ("features", "launches"),
    [
        (dict(group=4, head_dim=64), 2),
        # Sinks are added to merged states; blocks of 56 rows are not loaded as 64.
        pytest.param(dict(group=4, head_dim=64, sinks=True), 3, marks=pytest.mark.slow),
        pytest.param(dict(group=11, head_dim=64), 3, marks=pytest.mark.slow),
        # No register is free.
        pytest.param(
            dict(group=2, head_dim=256, softcap=50.0), 3, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_the_number_of_launches(features: dict[str, Any], launches: int) -> None:
    call, arguments = attend(**features)
    lowered = jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == launches


@pytest.mark.slow
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
@pytest.mark.parametrize(
    "features",
    [
        dict(group=4, head_dim=128),
        dict(group=1, head_dim=64),
        dict(group=8, head_dim=256),
        dict(group=2, head_dim=256),
        dict(group=2, head_dim=128, softcap=50.0),
    ],
    ids=str,
)
def test_it_compiles_without_spills(features: dict[str, Any]) -> None:
    call, arguments = attend(**features)
    _, kernel = compile_function(call, *arguments).kernels
    assert kernel.name.startswith("prefill_attention")
    assert kernel.spill_stores == kernel.spill_loads == 0
    assert kernel.smem_bytes <= devices.SMEM_BYTES
