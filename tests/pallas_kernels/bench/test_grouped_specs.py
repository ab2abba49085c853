"""Named shapes of grouped products: hand-computed counts, arrays, and checks."""

import dataclasses
import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench import SETS, problems, specs
from pallas_kernels.bench.specs import ExpertShape, GroupedSpec
from pallas_kernels.grouped_matmul import grouped_matmul

TINY = next(spec for spec in SETS["tiny"] if spec.kind == "grouped")


def test_names_are_complete() -> None:
    spec_names = [spec.name for spec in SETS["real"]]
    assert "grouped-t32-2of8-4096x14336" in spec_names
    assert "grouped-t64-6of64-1408x2048" in spec_names
    assert TINY.name == "grouped-t9-2of4-24x40-float32"


def test_counts_equal_hand_computed_ones() -> None:
    one = GroupedSpec(tokens=1, experts=specs.MIXTRAL_8X7B)
    assert one.bytes == 2 * (2 * 4096 * 14336 + 2 * (4096 + 14336))
    assert one.flops == 2 * 2 * 4096 * 14336
    down = dataclasses.replace(one, direction="down")
    assert (down.width, down.columns) == (14336, 4096)
    assert down.bytes == one.bytes
    # All experts are in use, and exactly these.
    large_spec = dataclasses.replace(one, tokens=1000)
    assert large_spec.bytes == 2 * (8 * 4096 * 14336 + 2000 * (4096 + 14336))


def test_tokens_go_to_different_experts() -> None:
    spec = GroupedSpec(tokens=50, experts=ExpertShape(4, 3, 8, 8))
    sizes = spec.group_sizes()
    assert sizes.sum() == 150
    assert sizes.max() <= 50
    assert (spec.group_sizes(1) != sizes).any()


@pytest.mark.parametrize("direction", ["up", "down"])
def test_the_reference_solves_the_problem(direction: Any) -> None:
    spec = dataclasses.replace(TINY, direction=direction)
    problem = problems.make_grouped(spec, num_turns=2)
    for turn in range(2):
        out = grouped_matmul(problem.x, problem.w, problem.group_sizes[turn])
        # Its samples are from the first rotation.
        assert (problem.error(out) < 1e-5) == (turn == 0)
    out = jnp.full_like(out, jnp.nan)
    assert np.isnan(problem.error(out))
    assert problem.error(jnp.zeros_like(out)) == pytest.approx(1)


def test_invalid_shapes_are_refused() -> None:
    make: Any = inspect.unwrap(GroupedSpec)
    with pytest.raises(ValueError, match=r"tokens=0"):
        make(tokens=0, experts=specs.TINY_EXPERTS)
    with pytest.raises(ValueError, match=r"experts.top=5"):
        make(tokens=1, experts=ExpertShape(4, 5, 8, 8))
