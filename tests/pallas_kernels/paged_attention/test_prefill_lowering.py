"""The prefill kernel lowered for an absent Hopper GPU, and its refusals."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import devices
from pallas_kernels.bench import compile_function, unavailable_reason
from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import prefill_plan
from pallas_kernels.paged_attention.hopper import prefill
from pallas_kernels.paged_attention.stream_k import Tiling
from tests.support.marks import one_quick

WHY_NOT = unavailable_reason()
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
GEMMA_2: dict[str, Any] = {"head_dim": 256, "softcap": 50.0, "window": 4096}
ONE_STAGE = Tiling(block_rows=128, stages=1)
GPT_OSS: dict[str, Any] = {"head_dim": 64, "group": 8, "sinks": True, "window": 128}


def case(
    *,
    head_dim: int = 128,
    page_size: int = 16,
    group: int = 4,
    dtype: str = "bfloat16",
    window: int | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: bool = False,
    rows: int = 512,
    tiling: Tiling | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A call of the kernel, and the shapes of its arguments."""
    tiling = tiling or prefill_plan.default_prefill_tiling(head_dim=head_dim)

    def attend(q, k_pages, v_pages, page_ids, positions, slots, by_head):
        plan = prefill_plan.plan_prefill(
            positions, slots, num_slots=4, few=32, tiling=tiling, window=window
        )
        features = (by_head if is_on else None for is_on in (alibi, sinks))
        return prefill.attend_prefill(
            q,
            k_pages,
            v_pages,
            page_ids,
            plan,
            scoring=ScoreTransform(1.0, softcap, *features),
            window=window,
            tiling=tiling,
        )

    spec = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    pages = spec(dtype, 64, 2, page_size, head_dim)
    row = spec(jnp.int32, rows)
    return attend, (
        spec(dtype, rows, 2 * group, head_dim),
        pages,
        pages,
        spec(jnp.int32, 4, 8),
        row,
        row,
        spec(jnp.float32, 2 * group),
    )


def lower(**options: Any) -> str:
    attend, arguments = case(**options)
    lowered = jax.jit(attend).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


@pytest.mark.parametrize(
    "sizes",
    one_quick(
        [
            {**GPT_OSS, "page_size": 256, "alibi": True, "rows": 61},
            {},
            {**GEMMA_2, "page_size": 64},
        ]
    ),
    ids=str,
)
def test_it_lowers_for_a_gpu(sizes: dict[str, Any]) -> None:
    assert lower(**sizes).count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 96}, "head_dim=96 must be 64, 128 or 256"),
        ({"page_size": 8}, "page_size=8 must be a power of two in"),
        ({"dtype": "float32"}, "q and pages must both be bfloat16 or both float16"),
        ({"tiling": Tiling()}, "tiling.block_rows=64 must be 128"),
        ({"tiling": ONE_STAGE}, "tiling.stages=1 must be at least 2"),
        (
            {"tiling": Tiling(tile=192, block_rows=128), "page_size": 128},
            "tiling.tile=192 and page_size=128 must",
        ),
    ],
    ids=str,
)
def test_sizes_out_of_range_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        lower(**sizes)


def check_compiled(*, spills: int = 0, **options: Any) -> None:
    attend, arguments = case(**options)
    (kernel,) = compile_function(attend, *arguments).kernels
    assert kernel.name.startswith("prefill_attention")
    assert kernel.spill_stores <= spills
    assert kernel.spill_loads <= spills
    assert kernel.smem_bytes <= devices.SMEM_BYTES
    # All registers at launch, for three warpgroups of 128 threads.
    assert kernel.registers <= 65_536 // 384
    # Both loops of both warpgroups' code: head_dim / 16 products for the scores of a
    # tile, and one for each 16 keys of the values.
    tiling = prefill_plan.default_prefill_tiling(head_dim=options.get("head_dim", 128))
    per_tile = options.get("head_dim", 128) // 16 + tiling.tile // 16
    assert kernel.instructions["wgmma"] == 2 * per_tile
    assert kernel.instructions["tma_load"] >= 4
    assert kernel.instructions["tma_store"] >= 3


@pytest.mark.thorough
@needs_compiler
def test_the_usual_sizes_fit_an_h200() -> None:
    check_compiled()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_every_size_fits_an_h200(head_dim: int, page_size: int) -> None:
    check_compiled(head_dim=head_dim, page_size=page_size)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        # The output takes 128 of the registers: a dozen numbers spill.
        {**GEMMA_2, "spills": 48},
        GPT_OSS,
        # More than any model needs.
        {"alibi": True, "sinks": True, "softcap": 30.0, "window": 99, "spills": 64},
        {"dtype": "float16", "group": 1},
        {"group": 8, "page_size": 128},
    ],
    ids=str,
)
def test_features_of_models_fit_an_h200(options: dict[str, Any]) -> None:
    check_compiled(**options)
