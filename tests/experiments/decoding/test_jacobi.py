"""Jacobi blocks: counts by hand, the theorem, and tokens of plain decoding."""

from typing import Any

import numpy as np
import pytest

from experiments.decoding.jacobi import blocks, from_text
from experiments.decoding.jacobi.from_text import (
    CONFIGS,
    BlockTable,
    BlockTrace,
    Result,
)
from experiments.decoding.speculation.on_text import DecodingRuns
from jaxkv.models import LoadedModel
from jaxkv.sampling import Sampling
from tests.support import engines, smoke
from tests.support.engines import MODEL, Ask

STUDY = from_text.STUDY


def test_the_correct_prefix_is_counted() -> None:
    guesses = np.array([[0, 0, 0], [7, 0, 9], [7, 8, 1], [7, 8, 9], [7, 8, 9]])
    block = blocks._block(guesses)
    assert block.steps == 3
    assert block.tokens.tolist() == [7, 8, 9]
    assert block.fixed.tolist() == [0, 1, 2, 3, 3]
    assert blocks._block(guesses[3:]).steps == 0


def loaded() -> Any:
    return LoadedModel(MODEL, engines.params(), None, ())


def asks_of(num: int) -> list[Sampling]:
    return [
        Sampling(temperature=float(i % 2), top_k=20, seed=i, max_tokens=12)
        for i in range(num)
    ]


@pytest.mark.slow
def test_blocks_take_at_most_a_step_per_token_and_equal_plain_decoding() -> None:
    """Each step fixes another token: Santilli et al., proposition 1."""
    rng = np.random.default_rng(0)
    asks = asks_of(8)
    texts = [rng.integers(0, 61, 3 + i).tolist() for i in range(8)]
    plain = engines.serve(
        [
            Ask(i, text, ask)
            for i, (text, ask) in enumerate(zip(texts, asks, strict=True))
        ],
        engines.ROOMY,
    )
    jacobi_blocks = blocks.find_jacobi_blocks(loaded(), texts, asks, 9)
    for i, block in enumerate(jacobi_blocks):
        assert block.steps <= 9
        progress = np.diff(block.fixed[: block.steps + 1])
        assert (progress >= 1).all()
        assert block.tokens.tolist() == plain.outcomes[i].tokens[:9]
    assert max(block.steps for block in jacobi_blocks) > 3
    first = np.arange(8, dtype=np.int32)
    others = blocks.find_jacobi_blocks(loaded(), texts, asks, 9, first=first)
    for block, other, token in zip(jacobi_blocks, others, first, strict=True):
        assert (other.guesses[0] == token).all()
        assert (other.tokens == block.tokens).all()


def measured(late: int, stuck: int) -> Result:
    table = BlockTable.of([(8, 0.0, 10, 6.5, 8, late, stuck, 0)])
    picture = BlockTrace.of([([0, 0], 0), ([104, 0], 1), ([104, 105], 2)])
    times = np.array([2e-3, 2e-3]), np.array([1e-3, 1e-3])
    runs = DecodingRuns.of([("Jacobi", 4, 1, 0.0, 100, 150, 400, 50, *times, 150, 2)])
    return Result(table, picture, runs, output_tokens=200, device="cpu")


def test_claims_on_counts() -> None:
    block_result = measured(1, 3)
    claim_values = smoke.measured_values(from_text.claims(block_result))
    assert sorted(claim_values.values()) == [0.75, 1, 2, 3]
    judged = from_text.claims(block_result)
    assert [x.verdict for x in judged if x.ours >= 1] == ["fails"] * 3
    assert block_result.blocks.tokens_per_step[0] == pytest.approx(8 / 6.5)
    assert len(from_text.STUDY.report_parts(block_result)) == 2
    assert smoke.draw(STUDY, block_result)


@pytest.mark.slow
def test_a_small_run_finds_blocks() -> None:
    result = smoke.run("jacobi").result
    config = CONFIGS["smoke"]
    assert result.blocks.length.tolist() == list(config.lengths)
    # Whole blocks of both answers, which have two texts.
    assert result.blocks.num_blocks.tolist() == [40, 16]
    assert (result.blocks.num_late == 0).all()
    assert (result.blocks.num_stuck == 0).all()
    assert result.blocks.num_other.sum() == result.runs.num_other.sum() == 0
    assert result.picture.fixed[-1] == config.picture_tokens
