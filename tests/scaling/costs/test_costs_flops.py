"""Operations and their time: published numbers and closed forms.

`test_cost_check` compares models with XLA's counts.
"""

import dataclasses
from typing import Any

import pytest

from scaling import shapes
from scaling.costs import count_parameters, find_device, serving
from scaling.costs.flops import (
    decode_terms,
    forward_terms,
    total_flops,
    training_step_flops,
)

LLAMA = shapes.describe("llama-2-7b")


ONE: dict[str, Any] = {"num_layers": 1, "windows": (), "mixture_layers": ()}


def test_llama_7b_and_one_layer_of_it() -> None:
    assert total_flops(forward_terms(LLAMA, sequence=4096)) == 4096 * 15_361_638_400
    terms = forward_terms(dataclasses.replace(LLAMA, **ONE), sequence=4096)
    parts = {
        part: total_flops(tuple(x for x in terms if x.part == part)) for part in _PARTS
    }
    scores = sum(x.flops for x in terms if x.growth == "s^2")
    assert parts["attention"] - scores == 549_755_813_888
    assert scores == 274_877_906_944
    assert parts["mlp"] == 1_108_101_562_368


_PARTS = ("attention", "mlp")


def test_causal_is_half_of_full_and_windows_are_less() -> None:
    def scores(model: Any, **how: Any) -> int:
        return sum(x.flops for x in forward_terms(model, **how) if x.growth == "s^2")

    full = scores(LLAMA, sequence=512)
    assert 2 * scores(LLAMA, sequence=512, attention="causal") == full
    narrow = dataclasses.replace(LLAMA, windows=(128,))
    assert scores(narrow, sequence=512) * 4 == full
    # Of the triangle 128 of 512 keys wide: 512 x 128 - 128 x 128 / 2 pairs.
    pairs = 512 * 128 - 128 * 128 // 2
    flops = scores(narrow, sequence=512, attention="causal")
    assert flops == 32 * 4 * 4096 * pairs
    # In chunks, the triangle has the same size.
    how: dict[str, Any] = {"attention": "causal"}
    for model in (LLAMA, narrow):
        chunks = [scores(model, sequence=100, past=x, **how) for x in (0, 100, 200)]
        assert sum(chunks) == scores(model, sequence=300, **how)


def test_megatron_with_everything_recomputed() -> None:
    model = shapes.describe("gpt3-175b")
    b = 4
    s = 2048
    h = 12288
    v = 50257
    n = 96
    step = training_step_flops(model, batch=b, sequence=s, checkpointing="full")
    assert (
        step.model == 72 * b * n * s * h**2 + 12 * b * n * s * s * h + 6 * b * s * h * v
    )
    every = step.model + step.recomputed
    assert every == 96 * b * n * s * h**2 + 16 * b * n * s * s * h + 6 * b * s * h * v
    selective = training_step_flops(
        model, batch=b, sequence=s, checkpointing="selective"
    )
    # The recomputed part is s / 6h of the layers' products: 2.78 % at their sizes.
    layers = 24 * b * n * s * h**2
    assert selective.recomputed / layers == pytest.approx(s / 6 / h)


def test_heads_need_not_be_as_wide_as_the_model() -> None:
    model = shapes.describe("qwen3-0.6b")  # 16 heads of 128 in 1,024
    scores = [x for x in forward_terms(model, sequence=10) if x.growth == "s^2"]
    assert total_flops(tuple(scores)) == 28 * 4 * 10 * 10 * 16 * 128


def test_latent_attention_has_two_widths() -> None:
    model = shapes.describe("deepseek-v3")
    by_name = {x.name: x.flops for x in forward_terms(model, sequence=10)}
    assert by_name["scores"] == 61 * 2 * 100 * 128 * (128 + 64)
    assert by_name["values"] == 61 * 2 * 100 * 128 * 128
    # Decoding uses the latents, at the same cost outside the scores.
    flops_by_term = {x.name: x.flops for x in decode_terms(model, context=10)}
    assert flops_by_term["scores"] == 61 * 2 * 10 * 128 * (512 + 64)
    assert flops_by_term["values"] == 61 * 2 * 10 * 128 * 512
    weights = sum(
        x for name, x in flops_by_term.items() if name not in ("scores", "values")
    )
    assert weights == 2 * count_parameters(model).matmul


def test_decoding_token_by_token_meets_every_earlier_key() -> None:
    for window in (None, 1, 4, 100):
        model = dataclasses.replace(LLAMA, windows=(window,))
        for context, steps in ((1, 1), (1, 9), (3, 5), (6, 2)):
            step_flops = [
                total_flops(decode_terms(model, context=context + i))
                for i in range(steps)
            ]
            assert total_flops(
                decode_terms(model, context=context, steps=steps)
            ) == sum(step_flops)


def test_published_totals() -> None:
    # Brown et al. 2020, appendix D; Grattafiori et al. 2024; DeepSeek-AI 2024, table 1.
    gpt = count_parameters(shapes.describe("gpt3-175b")).total
    assert 6 * gpt * 300e9 == pytest.approx(3.14e23, rel=2e-3)
    llama = count_parameters(shapes.describe("llama-3.1-405b")).total
    assert 6 * llama * 15.6e12 == pytest.approx(3.8e25, rel=2e-3)
    deepseek = count_parameters(shapes.describe("deepseek-v3"))
    assert deepseek.active_non_embedding == pytest.approx(37e9, rel=0.02)
    h800 = find_device("h800").bfloat16
    share = 6 * 37e9 * 14.8e12 / (2.664e6 * 3600 * h800)
    assert share == pytest.approx(0.346, abs=5e-4)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="batch=0 must be at least 1"):
        forward_terms(LLAMA, batch=0, sequence=1)
    with pytest.raises(ValueError, match="past=-1 must be at least 0"):
        forward_terms(LLAMA, sequence=1, past=-1)
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        decode_terms(LLAMA, context=1, steps=0)


def test_a_step_of_one_token_does_one_operation_a_byte() -> None:
    # A weight of two bytes, two operations: b = s = 1 is bound by memory everywhere.
    work = serving.decode_work(LLAMA, batch=1, context=1)
    assert work.intensity == pytest.approx(1.0, abs=1e-3)
    a100 = find_device("a100-40gb")
    step_roofline = serving.roofline(work, a100)
    assert step_roofline.bound == "memory"
    assert step_roofline.time_s == pytest.approx(work.weight_bytes / 1555e9, rel=1e-3)
    assert (
        serving.roofline(work, a100, num_devices=4).time_s * 4 == step_roofline.time_s
    )


def test_batches_raise_intensity_until_keys_and_values_weigh_more() -> None:
    a100 = find_device("a100-40gb")

    def decodes(batch: int, context: int) -> float:
        return serving.decode_work(LLAMA, batch=batch, context=context).intensity

    # Two operations per weight and sequence, two bytes per weight: about the batch.
    assert decodes(64, 1) == pytest.approx(64, rel=0.02)
    bound = serving.find_compute_bound_size(lambda b: decodes(b, 1) > a100.ridge())
    assert bound is not None
    assert decodes(bound, 1) > a100.ridge() > decodes(bound - 1, 1)
    # With a context of 4,096, K and V limit it to 2 x 6.6e9 / 2.1e9 = 6.2 at most, plus
    # their few operations.
    never = serving.find_compute_bound_size(lambda b: decodes(b, 4096) > a100.ridge())
    assert never is None


def test_a_step_reads_the_experts_that_its_tokens_meet() -> None:
    model = shapes.describe("mixtral-8x7b")
    expert = 32 * 3 * 4096 * 14336 * 2

    def read(tokens: int) -> float:
        return serving.weight_bytes_read(model, tokens)

    dense = read(1) - 2 * expert
    assert read(2) - dense - 8192 == pytest.approx((2 + 2 * 0.75) * expert)
    assert read(1000) - dense == pytest.approx(8 * expert, rel=1e-3)


def test_sequences_that_fit_next_to_the_weights() -> None:
    model = shapes.describe("llama-2-13b")
    a100 = find_device("a100-40gb")
    left = 40960 * 2**20 - 2 * 13_015_864_320
    fit = serving.max_batch(model, a100, context=2048)
    assert fit == int(left / (2048 * 819_200))
    assert serving.max_batch(LLAMA, find_device("t4"), context=4096) == 1
    assert serving.max_batch(model, find_device("t4"), context=1) == 0
