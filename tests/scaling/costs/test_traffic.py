"""Bytes on the wire: published formulas on published sizes."""

import dataclasses
from typing import Any

import pytest

from scaling.costs.parallelism import Layout, parse
from scaling.costs.traffic import decode, training
from scaling.shapes import published

LLAMA = published.describe("llama-2-7b")
DEEPSEEK = published.describe("deepseek-v3")
BLOCK = 4096 * 4096 * 2  # b s h of two bytes


def of(scheme: str, layout: str, model: Any = LLAMA, **how: Any) -> tuple[float, float]:
    zero = how.pop("zero", 0)
    found = training(model, parse(layout, zero=zero), sequence=4096, **how)
    mine = [traffic for traffic in found if traffic.scheme == scheme]
    return sum(x.forward for x in mine), sum(x.backward for x in mine)


def test_tensor_parallelism_sends_four_all_reduces_a_layer() -> None:
    assert of("tensor", "tp=8") == (3_758_096_384, 3_758_096_384)
    # As much with sequence parallelism, but for what is gathered again.
    assert of("tensor", "tp=8,sp") == of("tensor", "tp=8")
    assert of("sequence", "tp=8,sp") == (0, 32 * 2 * 7 / 8 * BLOCK)
    assert of("tensor", "tp=1") == (0, 0)


def test_a_divided_vocabulary_adds_up_embeddings_and_the_loss() -> None:
    scalars = 3 * 2 * 7 / 8 * 4096 * 4
    assert of("vocabulary", "tp=8") == (2 * 7 / 8 * BLOCK + scalars, 2 * 7 / 8 * BLOCK)


def test_a_pipeline_sends_one_activation_a_boundary() -> None:
    assert of("pipeline", "pp=8") == (33_554_432, 33_554_432)
    sent, _ = of("pipeline", "tp=8,pp=4,sp")
    assert sent == 33_554_432 / 8
    # Without sequence parallelism the parts are put together again.
    assert of("pipeline", "tp=8,pp=4")[0] == 33_554_432 / 8
    assert of("scatter_gather", "tp=8,pp=4")[0] == 33_554_432 * 7 / 8
    assert of("scatter_gather", "tp=8,pp=4,sp") == (0, 0)


def test_ulysses_changes_sequence_for_heads() -> None:
    one = dataclasses.replace(LLAMA, num_layers=1, windows=(), mixture_layers=())
    assert of("ulysses", "ulysses=8", one) == (14_680_064, 14_680_064)
    grouped = dataclasses.replace(
        one, attention=dataclasses.replace(one.attention, num_kv_heads=8)
    )
    assert of("ulysses", "ulysses=8", grouped)[0] == 9_175_040
    # Four KV heads over eight devices are copied to eight.
    fewer = dataclasses.replace(
        one, attention=dataclasses.replace(one.attention, num_kv_heads=4)
    )
    assert of("ulysses", "ulysses=8", fewer)[0] == 9_175_040


def test_a_ring_passes_keys_and_values_on() -> None:
    one = dataclasses.replace(LLAMA, num_layers=1, windows=(), mixture_layers=())
    hop = 8_388_608
    assert of("ring", "ring=8", one) == (7 * hop, 7 * hop + 8 * hop)
    assert 7 * hop == 58_720_256


def test_experts_get_each_token_k_times() -> None:
    one = dataclasses.replace(
        DEEPSEEK, num_layers=1, windows=(), mixture_layers=(True,)
    )
    sent, back = of("expert", "ep=64,dp=64", one)
    assert sent == back == 4096 * 229_376
    sent, back = of("expert", "ep=64,dp=64", one, dispatch_bytes=1)
    assert sent == 4096 * 172_032
    assert back == 4096 * 229_376


def test_copies_exchange_gradients() -> None:
    weights = 6_738_415_616 * 2
    share = 63 / 64
    assert of("data", "dp=64") == (0, pytest.approx(2 * share * weights))
    assert of("data", "dp=64", zero=1) == of("data", "dp=64")
    forward, backward = of("data", "dp=64", zero=3)
    assert forward == pytest.approx(share * weights)
    assert backward == 2 * forward
    # Parts of a sequence are copies, too; experts have fewer.
    assert of("data", "ring=8,dp=8") == of("data", "dp=64")
    mixtral = published.describe("mixtral-8x7b")
    experts = 32 * 8 * 3 * 4096 * 14336 // 8
    shared = 46_702_792_704 - 8 * experts
    _, sent = of("data", "ep=8,dp=16", mixtral)
    assert sent == pytest.approx(4 * (15 / 16 * shared + 1 / 2 * experts))


def test_decoding_sends_a_token_where_training_sends_a_sequence() -> None:
    found = decode(LLAMA, parse("tp=8"), batch=16)
    tensor = sum(x.forward for x in found if x.scheme == "tensor")
    assert tensor == 3_758_096_384 * 16 / 4096
    assert not sum(x.backward for x in found)
    logits = [x.forward for x in found if x.name == "logits"]
    assert logits == [16 * 32_000 * 4 / 8]


def test_one_device_sends_nothing() -> None:
    assert training(DEEPSEEK, Layout(), sequence=128) == ()
