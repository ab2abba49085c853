"""Bytes sent between devices: published formulas at published sizes."""

import dataclasses
from typing import Any

import pytest

from scaling import shapes
from scaling.costs.parallelism import Layout, parse_layout
from scaling.costs.traffic import decode_traffic, prefill_traffic, training_traffic

LLAMA = shapes.describe("llama-2-7b")
DEEPSEEK = shapes.describe("deepseek-v3")
BLOCK = 4096 * 4096 * 2  # b s h of two bytes


def of(scheme: str, layout: str, model: Any = LLAMA, **how: Any) -> tuple[float, float]:
    zero = how.pop("zero", 0)
    terms = training_traffic(
        model, parse_layout(layout, zero=zero), sequence=4096, **how
    )
    scheme_terms = [traffic for traffic in terms if traffic.scheme == scheme]
    return sum(x.forward for x in scheme_terms), sum(x.backward for x in scheme_terms)


ONE_LAYER = dataclasses.replace(LLAMA, num_layers=1, windows=(), mixture_layers=())
HOP = 8_388_608
LOSS = 3 * 2 * 7 / 8 * 4096 * 4
"""Three scalars per token."""
NORMS = 2 * 7 / 8 * (2 * 32 + 1) * 4096 * 2
"""Gradients of norms on parts of the sequence."""


LATENT = 7 / 8 * 61 * 4096 * 7168 * 2
"""A reduce-scatter of each of 61 layers."""
LATENTS = 2 * 7 / 8 * 61 * 4096 * (1536 + 512 + 64) * 2
"""An all-reduce of the latents of queries, of keys and values, and of positions."""

SHARES = 2 * 7 / 8 * 58 * 4096 * 8 * 4
"""An all-reduce of the gradients of the shares of 8 experts, in 58 layers."""


def with_kv_heads(num: int) -> Any:
    attention = dataclasses.replace(ONE_LAYER.attention, num_kv_heads=num)
    return dataclasses.replace(ONE_LAYER, attention=attention)


@pytest.mark.parametrize(
    ("scheme", "layout", "model", "forward", "backward"),
    [
        # Four all-reduces per layer; as much with sequence parallelism, plus the
        # repeated gathers.
        ("tensor", "tp=8", LLAMA, 3_758_096_384, 3_758_096_384),
        ("tensor", "tp=8,sp", LLAMA, 3_758_096_384, 3_758_096_384),
        ("sequence", "tp=8,sp", LLAMA, 0, 32 * 2 * 7 / 8 * BLOCK + NORMS),
        ("tensor", "tp=1", LLAMA, 0, 0),
        # Latent attention: two all-reduces per layer, and one of latents' gradients.
        ("tensor", "tp=8", DEEPSEEK, 4 * LATENT, 2 * LATENT + LATENTS + SHARES),
        # Embeddings and the loss of a divided vocabulary are summed.
        ("vocabulary", "tp=8", LLAMA, 2 * 7 / 8 * BLOCK + LOSS, 2 * 7 / 8 * BLOCK),
        # One activation per boundary; without sequence parallelism the parts are
        # gathered again.
        ("pipeline", "pp=8", LLAMA, 33_554_432, 33_554_432),
        ("pipeline", "tp=8,pp=4,sp", LLAMA, 33_554_432 / 8, 33_554_432 / 8),
        ("pipeline", "tp=8,pp=4", LLAMA, 33_554_432 / 8, 33_554_432 / 8),
        ("scatter_gather", "tp=8,pp=4", LLAMA, *[33_554_432 * 7 / 8] * 2),
        ("scatter_gather", "tp=8,pp=4,sp", LLAMA, 0, 0),
        # One micro-batch over eight stages: 14 of 15 ticks are idle, but send.
        ("idle", "pp=8", LLAMA, 14 * 33_554_432, 14 * 33_554_432),
        ("idle", "tp=8,pp=4", LLAMA, 6 * 33_554_432, 6 * 33_554_432),
        # Every stage has both tables and the last norm.
        ("tables", "pp=8", LLAMA, 0, 2 * 7 / 8 * (2 * 32_000 + 1) * 4096 * 2),
        # Sequence for heads; four KV heads over eight devices are copied to eight.
        ("ulysses", "ulysses=8", ONE_LAYER, 14_680_064, 14_680_064),
        ("ulysses", "ulysses=8", with_kv_heads(8), 9_175_040, 9_175_040),
        ("ulysses", "ulysses=8", with_kv_heads(4), 9_175_040, 9_175_040),
        # A ring passes keys and values on.
        ("ring", "ring=8", ONE_LAYER, 7 * HOP, 7 * HOP + 8 * HOP),
    ],
)
def test_bytes_that_a_layout_sends(
    scheme: str, layout: str, model: Any, forward: float, backward: float
) -> None:
    assert of(scheme, layout, model) == (forward, backward)


def test_micro_batches_share_the_idle_ticks_and_the_gradients() -> None:
    for schedule, ticks in (("1f1b", 16 + 2 * 7), ("gpipe", 2 * (16 + 7))):
        options = {"micro_batches": 16, "schedule": schedule}
        for scheme in ("pipeline", "tensor", "scatter_gather"):
            once = of(scheme, "pp=8,tp=2")
            assert of(scheme, "pp=8,tp=2", **options) == tuple(16 * x for x in once)
        assert of("idle", "pp=8", **options) == ((ticks - 16) * 33_554_432,) * 2
        for scheme in ("tables", "data"):
            layout = "pp=8,dp=2"
            assert of(scheme, layout, **options) == of(scheme, layout) > (0, 0)
    # A stage recomputes its layers for the gradient.
    sent, back = of("tensor", "pp=2,tp=8")
    assert back == 2 * sent == 3_758_096_384
    with pytest.raises(ValueError, match="micro_batches=0 must be at least 1"):
        of("data", "dp=2", micro_batches=0)


def test_recomputation_repeats_traffic() -> None:
    for layout, again in (
        ("tp=8", 1),
        ("ulysses=8", 1),
        ("ring=8", 1),
        ("tp=8,sp", 0.5),
    ):
        scheme = layout.split("=")[0].replace("tp", "tensor")
        once, back = of(scheme, layout)
        assert of(scheme, layout, remat=True) == (once, back + again * once)
        # With sequence parallelism only the sums, half of the traffic.
    with pytest.raises(ValueError, match="remat=True must be False with pipeline=2"):
        of("tensor", "pp=2,tp=8", remat=True)


def test_experts_get_each_token_k_times() -> None:
    one = dataclasses.replace(
        DEEPSEEK, num_layers=1, windows=(), mixture_layers=(True,)
    )
    sent, back = of("expert", "ep=64,dp=64", one)
    # 229,376 bytes per token, of which one in 64 stays on the device.
    assert sent == back == 4096 * 229_376 * 63 / 64
    sent, back = of("expert", "ep=64,dp=64", one, dispatch_bytes=1)
    assert sent == 4096 * 172_032 * 63 / 64
    assert back == 4096 * 229_376 * 63 / 64
    # 256 experts with 160 places each, for 4096 x 8 choices and a quarter more.
    sent, back = of("expert", "ep=64,dp=64,capacity=1.25", one)
    assert sent == back == 256 * 160 * 2 * 7168 * 2 * 63 / 64
    # All tokens 63 times; with 8 expert ids and weights each, in 32 bits.
    sent, back = of("expert", "ep=64,dp=64,gather", one)
    assert sent == 63 * 4096 * (2 * 7168 * 2 + 8 * 8)
    assert back == 63 * 4096 * (2 * 7168 * 2 + 8 * 4)


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
    mixtral = shapes.describe("mixtral-8x7b")
    experts = 32 * 8 * 3 * 4096 * 14336 // 8
    shared = 46_702_792_704 - 8 * experts
    _, sent = of("data", "ep=8,dp=16", mixtral)
    assert sent == pytest.approx(4 * (15 / 16 * shared + 1 / 2 * experts))


def test_decoding_sends_a_token_where_training_sends_a_sequence() -> None:
    terms = decode_traffic(LLAMA, parse_layout("tp=8"), batch=16)
    tensor = sum(x.forward for x in terms if x.scheme == "tensor")
    assert tensor == 3_758_096_384 * 16 / 4096
    assert not sum(x.backward for x in terms)
    logits = [x.forward for x in terms if x.name == "logits, all-gather"]
    assert logits == [7 / 8 * 16 * 32_000 * 4]


def test_a_mixed_pass_sends_less_than_decoding_as_many_rows() -> None:
    """Of Llama-3.1-8B in 16 bits: 128 ((32 + 16) 2 + 32 x 2) + 32 x 4 bytes a row."""
    model = shapes.describe("llama-3.1-8b")
    layout = parse_layout("cp=4")
    sizes: Any = {"rows": 4096, "logit_rows": 1}
    gathered, home, last = (x.forward for x in prefill_traffic(model, layout, **sizes))
    assert gathered + home == 3 / 4 * 4096 * 20_608 * 32
    assert last == 2 * 3 / 4 * 4096 * 4
    (sent_bytes,) = (x.forward for x in decode_traffic(model, layout, batch=4096))
    assert sent_bytes == 3 / 4 * 4096 * 33_280 * 32
    # One more row, and every device has all of them.
    odd = sizes | {"rows": 4097}
    assert prefill_traffic(model, layout, **odd) == decode_traffic(
        model, layout, batch=4097
    )
    # Each of the devices that divide matrices has a part of the heads and rows.
    both = prefill_traffic(model, parse_layout("cp=4,tp=2"), **sizes)
    pages = [x.forward for x in both if x.scheme == "pages"]
    assert pages == [gathered / 2, home / 2, last]
    tensor = [x for x in both if x.scheme == "tensor"]
    alone = prefill_traffic(model, parse_layout("tp=2"), **sizes)
    (expected,) = (x for x in alone if x.scheme == "tensor")
    assert [x.forward for x in tensor] == [expected.forward / 4]
    assert "b s/4 h" in tensor[0].formula


def test_one_device_sends_nothing() -> None:
    assert training_traffic(DEEPSEEK, Layout(), sequence=128) == ()
