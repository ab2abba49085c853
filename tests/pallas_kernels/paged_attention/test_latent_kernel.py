"""The decode kernel over latent rows: results, programs, choice, and seeded bugs."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import devices
from pallas_kernels.bench import compile_function, unavailable_reason
from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import api, decode_plan, dispatch, stream_k
from pallas_kernels.paged_attention.hopper import decode, decode_body
from pallas_kernels.paged_attention.stream_k import Tiling
from tests.support import emulating
from tests.support.attention_cases import attend_arrays
from tests.support.kernel_cases import assert_within_rule, make_case
from tests.support.mutation import replace

WIDTH = decode_plan.LATENT_WIDTH
VALUE_WIDTH = decode_plan.LATENT_VALUE_WIDTH
ROWS: Any = dict(kv_heads=1, head_dim=WIDTH, value_width=VALUE_WIDTH)
SMALL = Tiling(num_programs=3, stages=2, q_stages=1)
ONE = dataclasses.replace(SMALL, num_programs=1)
ENDS = [0, 1, 64, 65]
TO_DECODE = [(end - 1, 1) if end else (0, 0) for end in ENDS]


def check(slots: list[tuple[int, int]], tiling: Tiling = SMALL, **fields: Any) -> None:
    case = make_case(slots, **ROWS | fields)
    assert_within_rule(case, *emulating.run(case, tiling))


@pytest.mark.slow
def test_one_row() -> None:
    check([(66, 1)], ONE, page_size=64, group=3, decode=True)


@pytest.mark.thorough
def test_rows_around_tiles() -> None:
    check(TO_DECODE, page_size=16, group=16, decode=True, dtype="float16")


@pytest.mark.thorough
def test_two_items_of_the_same_keys() -> None:
    """128 query heads are two items; the second must not read another KV head."""
    check([(70, 1), (0, 0)], page_size=32, group=128, decode=True)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 16, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_size(page_size: int, group: int, dtype: str) -> None:
    ends = [page_size, 0, page_size + 1, 64, 2 * page_size + 65]
    rows = [(end - 1, 1) if end else (0, 0) for end in ends]
    sizes: Any = dict(page_size=page_size, group=group, dtype=dtype)
    check(rows, decode=True, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3, 70])
def test_trees_and_windows(window: int | None) -> None:
    slots = [(61, 9), (0, 4), (62, 40), (0, 0), (64, 1)]
    check(slots, page_size=16, group=4, trees=True, window=window)
    check([(66, 7), (0, 0), (3, 1)], page_size=16, group=16, padding=2, window=window)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiling",
    [
        ONE,
        dataclasses.replace(SMALL, num_programs=30),
        dataclasses.replace(SMALL, num_programs=9, min_tiles=4),
        dataclasses.replace(SMALL, stages=1),
    ],
    ids=str,
)
def test_tilings_change_nothing(tiling: Tiling) -> None:
    slots = [(200, 5), (0, 0), (63, 1), (300, 1)]
    check(slots, tiling, page_size=16, group=16)


@pytest.mark.slow
def test_every_feature_at_once() -> None:
    features: Any = dict(softcap=2.0, alibi=0.5 ** np.arange(1.0, 5.0), window=100)
    features |= dict(sinks=np.linspace(-1.0, 2.0, 4), scale=0.05)
    check([(140, 2), (0, 1)], page_size=64, group=4, **features)


K_FULL = "plgpu.barrier_wait(shared.k_full.at[stage])"
FREE = "plgpu.barrier_arrive(v_free.at[stage])"
OF_ROWS = "out = softmax.add_product(state.out, weights, values, emulated)"
BETWEEN = "\n            "
MEET = "plgpu.barrier_arrive(shared.consumers)\n{0}plgpu.barrier_wait(shared.consumers)"
BUGS = {
    "wait for keys": (K_FULL, "pass"),
    "early release": (OF_ROWS + BETWEEN + FREE, FREE + BETWEEN + OF_ROWS),
    "results over queries in use": (
        "# the output is sent from the memory of the queries\n"
        + " " * 12
        + MEET.format(" " * 12),
        "\n" + " " * 12 + "pass",
    ),
    "queries over results in flight": (
        "plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n"
        "            plgpu.barrier_arrive(shared.q_free",
        "plgpu.barrier_arrive(shared.q_free",
    ),
    "read while another clears": (
        "if shared.out.shape[0] > 1:\n" + " " * 12 + MEET.format(" " * 12),
        "",
    ),
    "both write": ("@pl.when(share.column == 0)", "@pl.when(True)"),
}
TWO_ITEMS = [(130, 1), (70, 1)]
QUICK_BUG = "results over queries in use"


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(
            bug,
            marks=pytest.mark.thorough if bug == QUICK_BUG else pytest.mark.slow,
        )
        for bug in BUGS
    ],
)
def test_a_seeded_bug_is_detected(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulating.seed_bug(monkeypatch, decode_body, *BUGS[bug])
    monkeypatch.setattr(plgpu, "wgmma", emulating.watched_product)
    case = make_case(TWO_ITEMS, page_size=64, group=1, decode=True, **ROWS)

    def is_noticed() -> bool:
        try:
            emulating.run(case, ONE)
        except RuntimeError as error:
            if not re.search(emulating.NOTICED, str(error)):
                raise
            return True
        return False

    assert any(is_noticed() for _ in range(25))


@pytest.mark.slow
def test_without_a_bug_no_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plgpu, "wgmma", emulating.watched_product)
    check(TWO_ITEMS, ONE, page_size=64, group=1, decode=True)


@pytest.mark.slow
def test_masked_values_must_be_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_body, "_clear", lambda *_: None)
    case = make_case([(66, 1)], page_size=64, group=1, decode=True, **ROWS)
    assert np.isnan(emulating.run(case, ONE)[0]).any()


def attend(
    *, page_size: int, group: int, columns: int = 0, dtype: str = "bfloat16", **how: Any
) -> tuple[Any, list[Any]]:
    """Returns a function that attends with the kernel, and shapes of its arguments."""
    tiling = stream_k.default_decode_tiling(head_dim=WIDTH)
    items, heads = decode_plan.item_heads(group, 1)

    def run(q, k_pages, page_ids, rows, context, ancestors, slopes):
        plan = decode_plan.plan_decode(
            *rows,
            num_slots=4,
            kv_heads=items,
            group=heads,
            tiling=tiling,
            context=context if columns else None,
            ancestors=ancestors if columns else None,
        )
        alibi = slopes if how.get("alibi") else None
        return decode.attend_decode(
            q,
            k_pages,
            None,
            page_ids,
            plan,
            scoring=ScoreTransform(1.0, how.get("softcap"), alibi),
            value_width=VALUE_WIDTH,
            tiling=tiling,
        )

    spec = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    return run, [
        spec(dtype, 12, group, WIDTH),
        spec(dtype, 64, 1, page_size, WIDTH),
        spec(jnp.int32, 4, 8),
        (spec(jnp.int32, 12), spec(jnp.int32, 12)),
        spec(jnp.int32, 4),
        spec(bool, 12, max(columns, 1)),
        spec(jnp.float32, group),
    ]


def test_it_lowers_for_a_gpu() -> None:
    run, shapes = attend(page_size=64, group=128)
    jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",))


@pytest.mark.slow
@pytest.mark.skipif(unavailable_reason() is not None, reason="no compiler for GPUs")
@pytest.mark.parametrize(
    "sizes",
    [
        dict(page_size=64, group=128),
        *(dict(page_size=size, group=16) for size in (16, 32, 128, 256)),
        dict(page_size=16, group=64, dtype="float16"),
        dict(page_size=64, group=16, columns=64, softcap=30.0, alibi=True),
    ],
    ids=str,
)
def test_it_compiles_without_spills(sizes: dict[str, Any]) -> None:
    run, shapes = attend(**sizes)
    for kernel in compile_function(run, *shapes).kernels:
        assert kernel.spill_stores == kernel.spill_loads == 0
        assert kernel.smem_bytes <= devices.SMEM_BYTES
        if kernel.name.startswith("decode_attention"):
            # 576 / 16 products for the scores, 64 / 16 for the values.
            assert kernel.instructions["wgmma"] == 36 + 4
            # Queries, rows, slopes, and one copy for each page of a tile of 64.
            copies = 2 + bool(sizes.get("alibi")) + max(1, 64 // sizes["page_size"])
            assert kernel.instructions["tma_load"] == copies


def chosen(num_rows: int = 4, **change: Any) -> str:
    """Returns the implementation of a call of four slots on an H200."""
    sizes: Any = dict(group=128, width=WIDTH, page_size=64, kv_heads=1) | change
    heads = sizes["kv_heads"] * sizes["group"]
    pages = (9, sizes["kv_heads"], sizes["page_size"], sizes["width"])
    _, group = decode_plan.item_heads(heads, sizes["kv_heads"])
    return api.choose_attention(
        jax.ShapeDtypeStruct((num_rows, heads, sizes["width"]), jnp.bfloat16),
        jax.ShapeDtypeStruct(pages, jnp.bfloat16),
        value_width=sizes.get("value_width", VALUE_WIDTH),
        has_v_pages=sizes.get("has_v_pages", False),
        prefills=dispatch.has_prefill_rows(
            num_rows,
            num_slots=4,
            group=group,
            has_slots=sizes.get("has_slots", False),
        ),
        implementation=sizes.get("implementation"),
    )


def test_calls_that_the_kernel_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    target = devices.Target("gpu", "NVIDIA H200", 132, "9.0")
    monkeypatch.setattr(devices, "current_target", lambda: target)
    for change in (
        {},
        {"num_rows": 32, "group": 16},
        {"num_rows": 2, "has_slots": True},
        *({"page_size": size, "group": 64} for size in (16, 32, 128, 256)),
    ):
        assert chosen(**change) == "mosaic_gpu"
    for change, reason in (
        ({"num_rows": 3, "has_slots": True}, "3 rows of chunks over latent rows have"),
        ({"group": 96}, "group=96 query heads for each KV head must be in [1, 64], or"),
        ({"kv_heads": 2}, "kv_heads=2 over latent rows must be 1"),
        ({"page_size": 8}, "page_size=8 must be a power of two"),
        ({"has_v_pages": True, "group": 64}, "head_dim=576 must be 64, 128 or 256"),
        ({"value_width": 448, "group": 64}, "head_dim=576 must be 64, 128 or 256"),
    ):
        assert chosen(**change) == "reference"
        with pytest.raises(ValueError, match=re.escape(reason)):
            chosen(**change, implementation="mosaic_gpu")


@pytest.mark.slow
def test_the_public_function_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    target = devices.Target("gpu", "NVIDIA H200", 132, "9.0")
    replace(monkeypatch, devices, "current_target", lambda: target)
    case = make_case([(66, 1), (0, 0)], page_size=64, group=128, decode=True, **ROWS)
    tiling = dispatch.KernelTilings(decode=SMALL, prefill=emulating.TILES)
    with emulating.emulator_of_races() as interpret:
        emulated = functools.partial(decode.attend_decode, interpret=interpret)
        replace(
            monkeypatch,
            decode,
            "attend_decode",
            lambda *x, interpret, **y: emulated(*x, **y),
        )
        arrays = case.arrays()
        state = jax.jit(
            lambda q, k, ids, positions: attend_arrays(
                q,
                k,
                None,
                ids,
                positions,
                value_width=VALUE_WIDTH,
                scale=case.scale,
                implementation="mosaic_gpu",
                tiling=tiling,
            )
        )(*(arrays[name] for name in ("q", "k_pages", "page_ids", "positions")))
        jax.block_until_ready(state)
    assert state.out.shape == (2, 128, VALUE_WIDTH)
    assert_within_rule(case, state.out.astype(jnp.float32), state.lse)
