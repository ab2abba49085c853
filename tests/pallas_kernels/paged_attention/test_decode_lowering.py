"""The decode kernel lowers for an absent Hopper GPU, and explains its refusals."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.online_softmax import ScoreTransform
from pallas_kernels.paged_attention import decode_plan, stream_k
from pallas_kernels.paged_attention.hopper import decode


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 256, "page_size": 64, "softcap": 30.0, "alibi": True},
        *(
            pytest.param(sizes, marks=pytest.mark.thorough)
            for sizes in (
                {},
                {"head_dim": 64, "page_size": 256, "group": 1},
                {"columns": 64},
                {"block_rows": 128, "group": 64},
            )
        ),
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
    tiling = stream_k.default_decode_tiling(head_dim=head_dim, block_rows=block_rows)

    def attend(q, k_pages, v_pages, page_ids, rows, context, ancestors, slopes):
        plan = decode_plan.plan_decode(
            *rows,
            num_slots=4,
            kv_heads=2,
            group=group,
            tiling=tiling,
            context=context if columns else None,
            ancestors=ancestors if columns else None,
        )
        return decode.attend_decode(
            q,
            k_pages,
            v_pages,
            page_ids,
            plan,
            scoring=ScoreTransform(1.0, softcap, slopes if alibi else None),
            tiling=tiling,
        )

    spec = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    pages = spec(jnp.bfloat16, 64, 2, page_size, head_dim)
    row = spec(jnp.int32, 12)
    traced = jax.jit(attend).trace(
        spec(jnp.bfloat16, 12, 2 * group, head_dim),
        pages,
        pages,
        spec(jnp.int32, 4, 8),
        (row, row),
        spec(jnp.int32, 4),
        spec(bool, 12, max(columns, 1)),
        spec(jnp.float32, 2 * group),
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
