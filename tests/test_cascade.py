"""Shared prefixes read once, under the emulator, against private copies in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.hopper import shared_prefix
from tests.support.emulating import SMALL, emulator_of_races
from tests.support.kernel_cases import assert_within_rule, make_case


@pytest.mark.thorough
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
        plan = shared_prefix.make_plan(
            *(arrays["positions"], arrays["slots"]),
            jnp.asarray([1, -1, 1, 0, 1], jnp.int32),
            jnp.asarray([0, 63], jnp.int32),
            kv_heads=1,
            group=8,
            tiling=SMALL,
            context=arrays["context"],
            ancestors=arrays["ancestors"],
        )
        return shared_prefix.attend_shared_prefix(
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
