"""The grid of architectures: exact counts, the nearest design, the best design."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from scaling.costs import count_parameters, training_step_flops
from scaling.laws import CHINCHILLA, CONSTANTS
from scaling.plan import budgets, designs
from scaling.plan.designs import DesignFamily
from scaling.shapes import HeadAttention

FAMILY = DesignFamily()
GRID = designs.make_grid(FAMILY)
LECTURE = budgets.law_two_powers(CHINCHILLA, CONSTANTS["lecture"])


@pytest.mark.parametrize(
    "family",
    [
        FAMILY,
        DesignFamily(
            count="non-embedding",
            vocab_size=256,
            sequence=128,
            tie_embeddings=True,
            attention="causal",
        ),
    ],
)
def test_counts_and_operations_of_the_grid_are_exact(family: DesignFamily) -> None:
    grid = designs.make_grid(family)
    rng = np.random.default_rng(0)
    for place in [0, len(grid.width) - 1, *rng.integers(0, len(grid.width), 20)]:
        design = designs.design_at(family, int(place))
        name = family.count.replace("-", "_")
        assert design.num_params == getattr(count_parameters(design.model), name)
        step = training_step_flops(
            design.model, sequence=family.sequence, attention=family.attention
        )
        assert design.flops_per_token == step.model / family.sequence


@pytest.mark.parametrize("size", [1.2e6, 1.24e8, 6.7e9, 4.7476e10, 1.75e11, 1e13])
def test_the_nearest_is_nearest_and_well_divided(size: float) -> None:
    design = designs.nearest_design(FAMILY, size)
    off = abs(design.num_params - size)
    assert off == np.abs(GRID.num_params - size).min()
    model = design.model
    heads = design.model.attention
    assert isinstance(heads, HeadAttention)
    assert heads.num_q_heads * heads.head_dim == model.hidden_size
    if size > 1e8:
        assert off < 0.005 * size
        assert model.mlp_size % 64 == 0
    if size > 5e9:
        # Eight devices divide heads and FFN, two stages the layers.
        assert heads.num_q_heads % 8 == 0
        assert model.mlp_size % 128 == 0
        assert heads.num_kv_heads % 8 == 0
        assert model.num_layers % 2 == 0
        assert 96 <= model.hidden_size / model.num_layers <= 180
        assert 8 / 3 <= model.mlp_size / model.hidden_size <= 7 / 2


def test_the_largest_vocabulary_that_a_size_allows(monkeypatch) -> None:
    monkeypatch.setattr(designs, "RANGES", designs.RANGES[:2])
    family = DesignFamily(sequence=77)
    for size in (3e3, 3e5):
        max_vocab = designs.max_vocab_size(family, size)
        assert max_vocab is not None
        fits = dataclasses.replace(family, vocab_size=max_vocab)
        assert designs.nearest_design(fits, size).num_params < 1.06 * size
        with pytest.raises(ValueError, match="too small for any design"):
            designs.nearest_design(
                dataclasses.replace(fits, vocab_size=max_vocab + 1), size
            )
    without = dataclasses.replace(family, count="non-embedding")
    assert designs.max_vocab_size(without, 3000.0) is None


def test_the_best_where_every_operation_counts() -> None:
    def loss(num_params: Any, num_tokens: Any) -> Any:
        return budgets.budget_loss(LECTURE, num_params, num_tokens)

    design, tokens, best_loss = designs.best_design(FAMILY, loss, 1e20)
    assert tokens * design.flops_per_token == pytest.approx(1e20, rel=1e-12)
    assert best_loss == pytest.approx(loss(float(design.num_params), tokens), rel=1e-12)
    # Better than the design nearest to the optimum of 6 N D; the best of the grid.
    optimum = budgets.allocate_budget(LECTURE, 1e20)
    near = designs.nearest_design(FAMILY, optimum.num_params)
    assert best_loss < loss(float(near.num_params), 1e20 / near.flops_per_token)
    every = loss(GRID.num_params.astype(float), 1e20 / GRID.flops_per_token)
    assert best_loss == every.min()
    # With serving, a token takes a third of the operations.
    served = designs.best_design(FAMILY, loss, 1e20, inference_tokens=1e11)
    spent = (served[1] + 1e11 / 3) * served[0].flops_per_token
    assert spent == pytest.approx(1e20, rel=1e-12)
    assert served[0].num_params < design.num_params
    with pytest.raises(ValueError, match="train none on a sequence of 4,096 tokens"):
        designs.best_design(FAMILY, loss, 1e9)


def test_sizes_that_cannot_be() -> None:
    for vocab_size, sequence in ((0, 1), (1, -1), (2**32, 1)):
        with pytest.raises(ValueError, match="must be in"):
            DesignFamily(vocab_size=vocab_size, sequence=sequence)


def test_a_ladder_has_the_shallowest_of_equal_sizes() -> None:
    family = DesignFamily(kv_heads=8)
    grid = designs.make_grid(family)
    ladder = designs.design_ladder(family, 2e10, num_sizes=24)
    sizes = np.array([x.num_params for x in ladder])
    assert np.all(np.diff(sizes) > 0)
    assert sizes[-1] == pytest.approx(2e10, rel=0.02)
    assert sizes[0] == pytest.approx(1e8, rel=0.02)
    for design, size in zip(ladder, np.geomspace(1e8, 2e10, 24), strict=True):
        near = np.abs(grid.num_params / size - 1) < 0.02
        assert design.model.num_layers == grid.depth[near].min()
        heads = design.model.attention
        assert isinstance(heads, HeadAttention)
        divisors = [x for x in range(1, 9) if heads.num_q_heads % x == 0]
        assert heads.num_kv_heads == max(divisors)
    with pytest.raises(ValueError, match=r"largest=1e\+20 must be in"):
        designs.design_ladder(family, 1e20)
