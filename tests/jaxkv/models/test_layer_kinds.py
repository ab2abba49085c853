"""Kinds of layers: windows, positions, norms and experts' biases, in every form."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import jaxkv
from jaxkv import models
from jaxkv.models import (
    AttentionKind,
    Experts,
    ModelConfig,
    init_params,
    layers,
    load_model,
    param_forms,
    rotary,
)
from jaxkv.models.config import RopeScaling
from jaxkv.models.huggingface import configs, weights
from tests.support import engines
from tests.support.folders import GOLDEN

PATTERN = dataclasses.replace(
    engines.MODEL,
    num_layers=5,
    norm_places="both",
    attention_pattern=(1, 1, 0),
    other_attention=(AttentionKind(window=6, rope_theta=100.0),),
)


def random_params(config: ModelConfig) -> models.Params:
    rng = np.random.default_rng(0)
    return jax.tree.map(  # scales of 1 and biases of 0 would hide misplaced ones
        lambda x: jnp.asarray(x + 0.3 * rng.standard_normal(x.shape), x.dtype),
        init_params(config, jax.random.key(0)),
    )


def test_a_pattern_is_repeated_over_the_layers() -> None:
    assert PATTERN.windows == (6, 6, None, 6, 6)
    assert param_forms.layer_runs(PATTERN) == [range(2), range(2, 3), range(3, 5)]
    assert PATTERN.rotary_kinds[1].rope_theta == 100.0


@pytest.mark.thorough
def test_stacked_layers_of_a_pattern_give_the_same() -> None:
    params = random_params(PATTERN)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 60, (2, 17)), jnp.int32)
    one_by_one = models.logits(params, tokens, config=PATTERN)
    stacked = models.stack_layers(PATTERN, params)
    scanned = models.logits(stacked, tokens, config=PATTERN)
    np.testing.assert_allclose(scanned, one_by_one, rtol=1e-5, atol=1e-5)
    again = models.unstack_layers(PATTERN, stacked)
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_an_engine_serves_windows_and_sinks_in_small_pages(name: str) -> None:
    """With chunks, a prefix cache, drafts and preemption, as plain decoding."""
    expected = np.load(GOLDEN / name / "expected.npz")
    prompt = expected["prompt"].tolist()
    greedy = expected["greedy"].tolist()
    engine = jaxkv.Engine.load(
        GOLDEN / name,
        page_size=4,
        num_pages=30,
        max_slots=3,
        max_length=80,
        token_budget=16,
        prefix_cache=True,
        speculate="ngram",
    )
    asks = [prompt, prompt + greedy[:9], prompt + greedy[:17]]
    for _ in range(2):  # the second time from cached pages
        answers = engine.generate(asks, jaxkv.Sampling(temperature=0.0, max_tokens=24))
        for answer, first in zip(answers, (0, 9, 17), strict=True):
            assert list(answer.tokens) == greedy[first : first + 24]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"attention_pattern": (0, 2)}, "attention_pattern=(0, 2) must have kinds in"),
        ({"attention_pattern": ()}, "attention_pattern=() must have kinds in [0, 2)"),
        ({"rotary_size": 99}, "rotary_size=99 must be at most head_dim="),
        ({"score_growth": 0.1}, "score_growth=0.1 needs rope_scaling"),
        ({"positions": "learned"}, "positions='learned' must be that of all kinds"),
        ({"family": "toy"}, "family='toy' must be a name in models.FAMILIES"),
        (
            {
                "residual": "parallel",
                "experts": Experts(num_experts=2, top_k=1, size=4),
            },
            "residual='parallel' must be 'serial' with experts",
        ),
    ],
)
def test_impossible_kinds_are_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        dataclasses.replace(PATTERN, **changes)


def test_a_part_of_a_head_is_rotary() -> None:
    part = dataclasses.replace(engines.MODEL, rotary_size=3)
    half = part.head_dim // 2
    pace = rotary.frequencies(part, "float32")
    np.testing.assert_allclose(pace[:2], [1, 10_000 ** (-2 / 3)], rtol=1e-6)
    assert pace.shape == (half,)
    assert not pace[2:].any()
    scaled = dataclasses.replace(
        part, rope_scaling=RopeScaling(kind="yarn", factor=4.0, magnitude=1.5)
    )
    angles = rotary.angles(scaled, jnp.zeros(1, jnp.int32), "float32")
    assert angles is not None
    expected = [1.5, 1.5, *[1.0] * (half - 2)]
    np.testing.assert_array_equal(angles.cos[:, 0], np.asarray(expected, np.float32))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_rotary_part_of_a_head_is_saved(share: float) -> None:
    raw = json.loads((GOLDEN / "glm4" / "config.json").read_text())
    raw["rope_parameters"] |= {"partial_rotary_factor": share}
    config = configs.from_hf(raw)
    assert (config.rotary_size is None) == (share == 1)
    assert configs.from_hf(configs.to_hf(config)) == config


def test_queries_grow_with_their_position() -> None:
    scaling = RopeScaling(original_max_positions=4)
    config = dataclasses.replace(engines.MODEL, rope_scaling=scaling, score_growth=0.5)
    positions = jnp.asarray([0, 3, 4, 11], jnp.int32)
    angles = rotary.angles(config, positions, "float32")
    assert angles is not None
    expected = 1 + 0.5 * np.log([1, 1, 2, 3])
    np.testing.assert_allclose(np.asarray(angles.q_scale), expected, rtol=1e-6)


def test_long_factors_are_refused_past_the_short_ones() -> None:
    raw = json.loads((GOLDEN / "phi3" / "config.json").read_text())
    config = configs.from_hf(raw)
    config.check_length(96, "max_length")
    with pytest.raises(ValueError, match="max_length=97 must be at most 96, up to"):
        config.check_length(97, "max_length")
    del raw["rope_parameters"]["short_factor"]
    long = configs.from_hf(raw)
    long.check_length(128, "max_length")
    ratio = rotary.frequencies(config, "float32") / rotary.frequencies(long, "float32")
    np.testing.assert_allclose(ratio, [1, 2 / 1.5, 2, 8 / 3], rtol=1e-6)


def test_biases_of_experts_follow_their_rows() -> None:
    rng = np.random.default_rng(0)
    linear = layers.ExpertLinear(
        *(3, 4, 5), axes=("experts", None, None), rngs=nnx.Rngs(0), bias=True
    )
    bias = jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)
    assert linear.bias is not None
    linear.bias[...] = bias
    x = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
    y = linear(x, jnp.asarray([2, 0, 3], jnp.int32), "fast", share=0.5)
    for row, expert in enumerate([0, 0, 2, 2, 2]):
        expected = x[row] @ linear.weight[...][expert] + bias[expert] / 2
        np.testing.assert_allclose(y[row], expected, rtol=1e-5, atol=1e-6)


def test_experts_in_one_tensor_load_as_apart(tmp_path: Path) -> None:
    """The layout of transformers 5 in memory, which it can also save."""
    shutil.copytree(GOLDEN / "minimax_m2", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    expected = load_model(GOLDEN / "minimax_m2").params
    for layer in range(2):
        begin = f"model.layers.{layer}."
        old = f"{begin}block_sparse_moe."
        parts = {
            name: [tensors.pop(f"{old}experts.{e}.{name}.weight") for e in range(6)]
            for name in ("w1", "w3", "w2")
        }
        both = [
            np.concatenate(pair) for pair in zip(parts["w1"], parts["w3"], strict=True)
        ]
        tensors |= {
            f"{begin}mlp.experts.gate_up_proj": np.stack(both),
            f"{begin}mlp.experts.down_proj": np.stack(parts["w2"]),
            f"{begin}mlp.gate.weight": tensors.pop(f"{old}gate.weight"),
            f"{begin}mlp.e_score_correction_bias": tensors.pop(
                f"{old}e_score_correction_bias"
            ),
        }
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    loaded = load_model(tmp_path / "model").params
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_weights_in_four_bits_load_as_their_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    source = GOLDEN / "gpt_oss"
    raw = json.loads((source / "config.json").read_text())
    raw |= {"hidden_size": 32, "intermediate_size": 32}
    config = configs.from_hf(raw)
    models.save_model(tmp_path / "plain", config, random_params(config))
    path = tmp_path / "plain" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    packed = dict(tensors)
    for name in [x for x in tensors if x.endswith(("up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 130, (experts, outputs, inputs // 32), np.uint8)
        # A byte has an even number in its lower half, and the odd one after it.
        values = np.zeros((experts, inputs, outputs), np.float32)
        for e, o, g, i in np.ndindex(blocks.shape):
            byte = int(blocks[e, o, g, i])
            for half, code in enumerate((byte & 15, byte >> 4)):
                size = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7]
                scale = 2.0 ** (int(scales[e, o, g]) - 127)
                values[e, 32 * g + 2 * i + half, o] = (-1) ** (code >> 3) * size * scale
        tensors[name] = values
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    shutil.copytree(tmp_path / "plain", tmp_path / "packed")
    for end in ("plain", "packed"):
        (tmp_path / end / "SHA256SUMS").unlink()
    safetensors.numpy.save_file(packed, tmp_path / "packed" / "model.safetensors")
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    file = tmp_path / "packed" / "config.json"
    raw = json.loads(file.read_text()) | {"quantization_config": settings}
    file.write_text(json.dumps(raw))
    plain, loaded = (load_model(tmp_path / x).params for x in ("plain", "packed"))
    jax.tree.map(np.testing.assert_array_equal, loaded, plain)
    small = load_model(tmp_path / "packed", weights="mxfp4").params["layers"]
    for index, layer in plain["layers"].items():
        for name in ("up", "down"):
            weight = small[index]["mixture"][name]["weight"]
            wanted = layer["mixture"][name]["weight"]
            np.testing.assert_array_equal(weight.dequantize(), wanted)
        np.testing.assert_array_equal(
            small[index]["qkv"]["weight"], layer["qkv"]["weight"]
        )
    with pytest.raises(ValueError, match="inputs=20 of packed weights must be a mul"):
        weights.packed_shapes((2, 20, 4))
