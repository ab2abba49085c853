"""The KV cache: FLOP counts against sums, times against a known power law."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from experiments.serving.kv_cache import counting, experiment
from experiments.serving.kv_cache.experiment import CONFIGS, Config, TokenTimes
from scaling.costs import decode_terms, forward_terms, total_flops
from scaling.shapes import HeadAttention, ModelShape
from tests.support import smoke

MODEL = ModelShape(
    name="toy",
    vocab_size=50,
    hidden_size=12,
    num_layers=3,
    attention=HeadAttention(num_q_heads=4, num_kv_heads=2, head_dim=5),
    mlp_size=20,
)


def test_counts_are_sums_over_all_tokens() -> None:
    flop_counts = counting.count_flops(MODEL, (1, 7, 40))
    for row, flops in enumerate((prompt_flops, last)):
        flops_by_length = [flops(t) for t in range(1, 41)]
        assert flop_counts.token_flops[row].tolist() == [
            flops_by_length[0],
            flops_by_length[6],
            flops_by_length[39],
        ]
        sums = [flops_by_length[0], sum(flops_by_length[:7]), sum(flops_by_length)]
        assert flop_counts.total_flops[row].tolist() == sums


def prompt_flops(length: int) -> int:
    return total_flops(
        forward_terms(MODEL, sequence=length, attention="causal", logits="last")
    )


def last(length: int) -> int:
    return total_flops(decode_terms(MODEL, context=length))


def test_attention_is_counted_by_hand() -> None:
    """Two products of 2 n d operations per pair; t^2 / 2 or t pairs in 3 layers."""
    _, without = counting.without_cache(MODEL)
    _, cached = counting.with_cache(MODEL)
    assert without == (0, 0, 3 * 2 * 4 * 5)
    assert cached == (0, 3 * 4 * 4 * 5, 0)
    assert cached.total(100) == 3 * 4 * 4 * 5 * 5050


def test_times_without_a_cache_are_interpolated_as_powers() -> None:
    length = np.array([1, 4, 32])
    timed = TokenTimes(
        length=length,
        without_s=2e-3 * length**2.0,
        with_s=np.full(3, 5e-3),
        is_same=np.ones(3, bool),
        every_with_s=np.full(32, 5e-3),
    )
    squares = [1, 30, 32 * 33 * 65 / 6]
    np.testing.assert_allclose(timed.totals_s()[0], 2e-3 * np.array(squares))
    np.testing.assert_allclose(timed.totals_s()[1], 5e-3 * length)


@pytest.mark.slow
def test_smoke_generates_the_same_tokens_both_ways() -> None:
    config = CONFIGS["smoke"]
    timed = smoke.run("kv_cache").result.timed
    assert timed.length.tolist() == [*config.lengths]
    assert timed.is_same.all()
    assert timed.every_with_s.shape == (config.lengths[-1],)
    for seconds in (timed.without_s, timed.with_s):
        assert (seconds > 0).all()
    assert len(smoke.run("kv_cache").parts) == 3 + 1  # and the verdicts


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model": "no-model"}, "unknown model 'no-model'"),
        ({"counted": "no-model"}, "no-model"),
        ({"lengths": (4, 5000)}, "5000 tokens are more than"),
    ],
)
def test_invalid_configs_are_refused(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        experiment.run(dataclasses.replace(Config(), **change))


def test_models_with_sliding_windows_are_refused() -> None:
    windowed = dataclasses.replace(MODEL, windows=(8,))
    with pytest.raises(ValueError, match="must not have sliding windows"):
        counting.count_flops(windowed, (1, 2))
