"""The decode kernel under the emulator, races watched, against float64."""

import contextlib
import dataclasses
import inspect
import re
import types
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as emulator
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cascade_mosaic_gpu as cascade
from pallas_kernels import cutting, planning
from pallas_kernels import decode_mosaic_gpu as decode
from pallas_kernels import decode_warpgroups_mosaic_gpu as warpgroups
from pallas_kernels.cutting import Tiling
from tests.kernel_cases import Case, assert_within_rule, make_case

SMALL = Tiling(num_programs=3, stages=2)
TWO = Tiling(num_programs=4, stages=2, block_rows=128)


@contextlib.contextmanager
def emulator_of_races() -> Generator[plgpu.InterpretGPUParams]:
    """Raises on races, which some versions of jax only print and remember."""
    try:
        yield plgpu.InterpretGPUParams(detect_races=True)
        if emulator.get_races().races_found:
            raise RuntimeError("RACE DETECTED")
    finally:
        emulator.reset_gpu_interpret_mode_state()


def run(case: Case, tiling: Tiling = SMALL) -> tuple[Any, Any]:
    """Emulates the kernel; raises what the emulator finds."""
    _, kv_heads, _, _ = case.k_pages.shape

    def plan_and_attend(arrays: dict[str, Any], interpret: Any) -> tuple[Any, Any]:
        plan = planning.make_plan(
            *(arrays["positions"], arrays["slots"]),
            context=arrays["context"],
            ancestors=arrays["ancestors"],
            num_slots=case.page_ids.shape[0],
            kv_heads=kv_heads,
            group=case.q.shape[1] // kv_heads,
            tiling=tiling,
            window=case.window,
        )
        return decode.attend(
            *(arrays[name] for name in ("q", "k_pages", "v_pages", "page_ids")),
            plan,
            scale=case.scale,
            softcap=case.softcap,
            alibi=arrays["alibi"],
            sinks=arrays["sinks"],
            tiling=tiling,
            interpret=interpret,
        )

    with emulator_of_races() as interpret:
        attend = jax.jit(plan_and_attend, static_argnums=1)
        return jax.block_until_ready(attend(case.arrays(), interpret))


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


@pytest.mark.parametrize(
    "trees",
    [False, pytest.param(True, marks=pytest.mark.slow)],
)
def test_a_shared_prefix_equals_private_copies(trees: bool) -> None:
    case = make_case(
        [(70, 2), (0, 1), (66, 3), (5, 1), (64, 1)],
        page_size=16,
        kv_heads=1,
        group=8,
        trees=trees,
        sharing=(0, 2, 4),
        shared_pages=4,
        sinks=np.linspace(-1.0, 1.0, 8),
        padding=1,
    )
    prefix_ids = np.full((2, 5), -1)
    prefix_ids[1, :4] = case.page_ids[0, :4]
    page_ids = case.page_ids.copy()
    page_ids[[0, 2, 4], :3] = -1

    def plan_and_attend(arrays: dict[str, Any], interpret: Any) -> tuple[Any, Any]:
        plan = cascade.make_plan(
            *(arrays["positions"], arrays["slots"]),
            jnp.asarray([1, -1, 1, 0, 1], jnp.int32),
            jnp.asarray([0, 63], jnp.int32),
            kv_heads=1,
            group=8,
            tiling=SMALL,
            context=arrays["context"],
            ancestors=arrays["ancestors"],
        )
        return cascade.attend_shared_prefix(
            *(arrays["q"], arrays["k_pages"], arrays["v_pages"]),
            *(jnp.asarray(ids, jnp.int32) for ids in (prefix_ids, page_ids)),
            plan,
            scale=case.scale,
            sinks=arrays["sinks"],
            tiling=SMALL,
            interpret=interpret,
        )

    with emulator_of_races() as interpret:
        attend = jax.jit(plan_and_attend, static_argnums=1)
        state = jax.block_until_ready(attend(case.arrays(), interpret))
    assert_within_rule(case, *state)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"head_dim": 256, "page_size": 64, "softcap": 30.0, "alibi": True},
        {"head_dim": 256, "block_rows": 128},
        {"head_dim": 64, "page_size": 256, "group": 1},
        {"columns": 64},
        {"block_rows": 128, "group": 64},
    ],
    ids=str,
)
def test_it_lowers_for_a_gpu(sizes: dict[str, Any]) -> None:
    lower(**sizes)


def lower(
    *,
    head_dim: int = 128,
    page_size: int = 16,
    group: int = 4,
    columns: int = 0,
    softcap: float | None = None,
    alibi: bool = False,
    block_rows: int = 64,
) -> None:
    tiling = cutting.default_tiling(head_dim=head_dim, block_rows=block_rows)

    def attend(q, k_pages, v_pages, page_ids, rows, context, ancestors, slopes):
        plan = planning.make_plan(
            *rows,
            num_slots=4,
            kv_heads=2,
            group=group,
            tiling=tiling,
            context=context if columns else None,
            ancestors=ancestors if columns else None,
        )
        return decode.attend(
            *(q, k_pages, v_pages, page_ids, plan),
            scale=1.0,
            softcap=softcap,
            alibi=slopes if alibi else None,
            tiling=tiling,
        )

    spec = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    pages = spec(jnp.bfloat16, 64, 2, page_size, head_dim)
    row = spec(jnp.int32, 12)
    traced = jax.jit(attend).trace(
        spec(jnp.bfloat16, 12, 2 * group, head_dim),
        *(pages, pages, spec(jnp.int32, 4, 8), (row, row), spec(jnp.int32, 4)),
        *(spec(bool, 12, max(columns, 1)), spec(jnp.float32, 2 * group)),
    )
    traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 96}, "head_dim=96 must be 64, 128 or 256"),
        ({"page_size": 8}, "page_size=8 must be a power of two in"),
        ({"group": 65, "block_rows": 128}, "group=65 query heads for each KV head"),
    ],
)
def test_sizes_out_of_range_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        lower(**sizes)


def mutant(removed: str, added: str = "pass") -> types.ModuleType:
    """The module of the warpgroups with one place of its source changed."""
    source = inspect.getsource(warpgroups)
    assert source.count(removed) == 1
    module = types.ModuleType("mutant")
    exec(compile(source.replace(removed, added), "mutant", "exec"), module.__dict__)
    return module


K_FULL = "plgpu.barrier_wait(shared.k_full.at[stage])"
V_FREE = "plgpu.barrier_arrive(shared.v_free.at[stage])"
PRODUCT = "out = _add_product(out, weights, shared.v.at[stage], emulated)"
BETWEEN = "\n            "
BUGS = {
    "back-pressure": ("plgpu.barrier_wait(free.at[stage])", "pass", 2),
    "wait for keys": (K_FULL, "pass", 2),
    "early release": (PRODUCT + BETWEEN + V_FREE, V_FREE + BETWEEN + PRODUCT, 2),
    "commit": ("= lse\n        plgpu.commit_smem()", "= lse", 2),
}
MORE_BUGS = {
    "wait for values": (K_FULL.replace("k_full", "v_full"), "pass", 2),
    "back-pressure of queries": (
        "plgpu.barrier_wait(shared.q_free.at[stage])",
        "pass",
        6,  # else keys that are not free yet hold the queries back, too
    ),
    "wait for results": ("plgpu.wait_smem_to_gmem(0)", "pass", 2),
    "wait for the last results": (
        "plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
        "pass",
        2,
    ),
}
# Which of them comes first is up to the version of jax and to the threads.
NOTICED = (
    r"RACE DETECTED|Not all copy_smem_to_gmem|"
    r"[Bb]arrier( \d+)? (completed phase|was deallocated|is already at phase)"
)


@pytest.mark.parametrize(
    ("removed", "added", "stages"),
    [
        *(pytest.param(*bug, id=name) for name, bug in BUGS.items()),
        *(
            pytest.param(*bug, id=name, marks=pytest.mark.slow)
            for name, bug in MORE_BUGS.items()
        ),
    ],
)
def test_seeded_bugs_are_caught(
    monkeypatch: pytest.MonkeyPatch, removed: str, added: str, stages: int
) -> None:
    module = mutant(removed, added)
    for name in ("consume", "produce"):
        monkeypatch.setattr(warpgroups, name, getattr(module, name))
    with pytest.raises(RuntimeError, match=NOTICED):
        run(TINY, Tiling(num_programs=1, stages=stages))


def test_values_that_nobody_sees_must_be_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warpgroups, "_clear", lambda *_: None)
    out, _ = run(TINY, Tiling(num_programs=1, stages=2))
    assert np.isnan(out).any()


def test_without_a_bug_nothing_is_caught() -> None:
    assert_within_rule(TINY, *run(TINY, Tiling(num_programs=1, stages=2)))


TINY = make_case([(64, 1)], page_size=64, kv_heads=3, group=1)
"""Two tiles of three heads: both rings turn once."""
