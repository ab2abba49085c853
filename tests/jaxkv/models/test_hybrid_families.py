"""Families with recurrent layers: keys, tensors, refusals and counts."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxkv.models import load_model, param_shapes, read_config, save_model
from jaxkv.models.config import RecurrenceConfig
from jaxkv.models.huggingface import configs
from jaxkv.models.layers import recurrence
from scaling import training
from scaling.cli.cost.command import CostOptions, count_costs
from scaling.costs import (
    count_parameters,
    decode_work,
    forward_terms,
    layer_bytes,
    list_residuals,
    sequence_state_bytes,
    stored_tensors,
)
from scaling.shapes import describe_config, load_shape
from tests.support.folders import GOLDEN

NAMES = (
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear"),
    *("granitemoehybrid", "nemotron_h", "lfm2", "lfm2_moe"),
)
PEER = os.environ.get("JAXKV_PEER_PYTHON")


def raw_of(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_folders_are_saved_as_they_load(name: str, tmp_path: Path) -> None:
    loaded = load_model(GOLDEN / name)
    config = loaded.config
    is_single = name == "nemotron_h"
    assert config.recurrent_layers == ((0, 5) if is_single else (0, 2))
    assert config.attention_layers == ((2,) if is_single else (1,))
    folder = save_model(tmp_path / name, config, loaded.params, max_shard_bytes=20_000)
    again = load_model(folder)
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_the_arrays(name: str) -> None:
    config = read_config(GOLDEN / name)
    r = config.recurrence
    assert r is not None
    shape = load_shape(GOLDEN / name)
    assert shape == describe_config(config, name=name)
    sizes = [x.size for x in jax.tree.leaves(param_shapes(config))]
    assert count_parameters(shape).total == sum(sizes)
    state = jax.eval_shape(lambda: recurrence.zero_state(r, (2,), "float32"))
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert sequence_state_bytes(shape, kv_bytes=4) == num_bytes
    # The states of a sequence are read and written in each step.
    works = [decode_work(shape, batch=n, context=9, kv_bytes=4) for n in (1, 2)]
    without = works[1].kv_bytes - works[0].kv_bytes - 2 * num_bytes
    assert without == 10 * shape.attention.cached_numbers * 4
    products = {"gdn": 3, "kda": 3, "mamba2": 2, "conv": 0}[r.kind]
    products *= r.num_value_heads * r.key_dim * r.value_dim
    terms = [x for x in forward_terms(shape, sequence=5) if x.name[:5] == "state"]
    assert sum(term.flops for term in terms) == 2 * 2 * 5 * products


@pytest.mark.parametrize(
    "name", ["qwen3_next", "kimi_linear", "granitemoehybrid", "nemotron_h", "lfm2"]
)
def test_the_costs_of_a_folder_show_its_states(name: str) -> None:
    options = CostOptions(sequence=64)
    output = count_costs(str(GOLDEN / name), options)
    shape = load_shape(GOLDEN / name)
    assert shape.recurrent is not None
    num_bytes = sequence_state_bytes(shape)
    assert output.document["state_bytes_per_sequence"] == num_bytes
    # A recurrent layer keeps other tensors than one with attention.
    tensors = stored_tensors(shape, sequence=64)
    sizes = layer_bytes(tensors, shape, range(shape.num_layers))
    assert sizes[0] == sizes[-1] or name == "kimi_linear"  # its first layer is dense
    assert sizes[1] != sizes[-1]
    kept = output.document["memory_bytes"]["activations"]
    assert kept == pytest.approx(64 * sum(sizes))
    with pytest.raises(ValueError, match="tensor=2 must be 1: the recurrent layers of"):
        count_costs(str(GOLDEN / name), CostOptions(parallel="tp=2"))


def test_parts_of_one_tensor_are_taken_apart() -> None:
    """By the reshapes of transformers' modeling files."""
    model = load_model(GOLDEN / "qwen3_next")
    tensors = safetensors.numpy.load_file(GOLDEN / "qwen3_next" / "model.safetensors")
    begin = "model.layers.0.linear_attn.in_proj_"
    hidden = model.config.hidden_size
    by_key_head = tensors[f"{begin}qkvz.weight"].reshape(2, -1, hidden)
    q, k, v, z = np.split(by_key_head, [6, 12, 26], axis=1)
    b, a = np.split(tensors[f"{begin}ba.weight"].reshape(2, -1, hidden), 2, axis=1)
    mixer = model.params["layers"][0]["mixer"]
    flat = [x.reshape(-1, hidden) for x in (q, k, v)]
    for name, expected in (
        ("mixed", np.concatenate(flat)),
        ("gate", z.reshape(-1, hidden)),
        ("strength", b.reshape(-1, hidden)),
        ("decay", a.reshape(-1, hidden)),
    ):
        np.testing.assert_array_equal(mixer[name]["weight"], expected)
    by_head = tensors["model.layers.1.self_attn.q_proj.weight"].reshape(4, 2, 12, -1)
    gate = model.params["layers"][1]["gate"]["weight"]
    np.testing.assert_array_equal(gate, by_head[:, 1].reshape(48, hidden))
    bias = tensors["model.layers.1.self_attn.q_proj.bias"].reshape(4, 2, 12)
    gate = model.params["layers"][1]["gate"]["bias"]
    np.testing.assert_array_equal(gate, bias[:, 1].reshape(-1))

    model = load_model(GOLDEN / "granitemoehybrid")
    path = GOLDEN / "granitemoehybrid" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    mixer = model.params["layers"][0]["mixer"]
    projected = tensors["model.layers.0.mamba.in_proj.weight"]
    gate, x, b, c, step = np.split(projected, [32, 64, 76, 88])
    np.testing.assert_array_equal(mixer["gate"]["weight"], gate)
    np.testing.assert_array_equal(mixer["decay"]["weight"], step)
    np.testing.assert_array_equal(mixer["mixed"]["weight"], np.concatenate([c, b, x]))
    x, b, c = np.split(tensors["model.layers.0.mamba.conv1d.bias"], [32, 44])
    np.testing.assert_array_equal(mixer["kernel_bias"], np.concatenate([c, b, x]))


def test_a_layer_of_nemotron_has_one_branch() -> None:
    config = read_config(GOLDEN / "nemotron_h")
    kinds = [config.attention_kinds[config.kind_of(x)] for x in range(6)]
    branches = [None, "experts", None, "mlp", "experts", None]
    assert [kind.feed_forward for kind in kinds] == branches
    assert config.num_mixtures == 2
    assert config.has_feed_forward(1)
    assert not config.has_feed_forward(2)
    layers = load_model(GOLDEN / "nemotron_h").params["layers"]
    assert [x for x in layers if "out" in layers[x]] == [0, 2, 5]
    assert [x for x in layers if "up" in layers[x]] == [3]
    for layer in layers.values():
        assert len({"attention_norm", "mlp_norm"} & layer.keys()) == 1
    shape = describe_config(config)
    assert shape.branches == (
        *("recurrent", "mixture", "attention"),
        *("dense", "mixture", "recurrent"),
    )
    assert shape.norms_per_layer == 1
    for message, change in (
        ("residual='serial' must be 'single'", {"residual": "serial"}),
        ("experts=None must be set exactly", {"experts": None}),
        ("num_ahead_layers=1 must be 0", {"num_ahead_layers": 1}),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            dataclasses.replace(config, **change)
    with pytest.raises(ValueError, match="feed_forward='mlp' must be None in recurr"):
        dataclasses.replace(kinds[0], feed_forward="mlp")


def test_old_cards_of_nemotron_are_those_of_transformers_5() -> None:
    raw = raw_of("nemotron_h")
    expected = configs.from_hf(raw)
    del raw["layers_block_type"]
    old = raw | {
        "hybrid_override_pattern": "ME*-EM",
        "num_hidden_layers": 6,
        "attention_head_dim": raw.pop("head_dim"),
        "norm_eps": raw["layer_norm_epsilon"],
        "rope_theta": 10000,
        "partial_rotary_factor": 1.0,
        "time_step_limit": [0.0, math.inf],
        "time_step_rank": None,
        "tie_word_embeddings": False,
    }
    assert configs.from_hf(old) == expected
    named = raw | {"head_dim": 10, "layers_block_type": ["mamba", "attention", "mlp"]}
    config = configs.from_hf(named)
    assert config.experts is None
    assert config.num_layers == 3
    assert configs.from_hf(configs.to_hf(config)) == config
    slow = configs.from_hf(named | {"time_step_min": 0}).recurrence
    assert slow is not None
    assert slow.min_step == 0


def rename(folder: Path, new_names: dict[str, str]) -> int:
    """Renames parts of the names of a folder's tensors; returns the number."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    for old, new in new_names.items():
        for name in [name for name in tensors if re.search(old, name)]:
            tensors[re.sub(old, new, name)] = tensors.pop(name)
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    return len(tensors)


def test_published_names_load_as_those_of_transformers_5(tmp_path: Path) -> None:
    """transformers 5 saves other names, and kernels in three equal parts."""
    for name, new_names in (
        ("kimi_linear", {r"0\.block_sparse_moe\.(\w+_proj)": r"0.mlp.\1"}),
        (
            "olmo_hybrid",
            {r"1\.feedforward_layer_norm": "1.post_attention_layernorm"},
        ),
    ):
        folder = tmp_path / name
        shutil.copytree(GOLDEN / name, folder)
        before = safetensors.numpy.load_file(folder / "model.safetensors")
        rename(folder, new_names)
        path = folder / "model.safetensors"
        tensors = safetensors.numpy.load_file(path)
        assert tensors.keys() != before.keys()
        if name == "olmo_hybrid":
            for layer in (0, 2):
                begin = f"model.layers.{layer}.linear_attn."
                parts = [f"{begin}{x}_conv1d.weight" for x in "qkv"]
                assert [tensors[x].shape[0] for x in parts] == [18, 18, 16]
                whole = np.concatenate([tensors[x] for x in parts])
                tensors |= dict(zip(parts, np.split(whole, [12, 24]), strict=True))
            safetensors.numpy.save_file(tensors, path, {"format": "pt"})
        loaded = load_model(folder).params
        expected = load_model(GOLDEN / name).params
        jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_published_keys_are_those_of_transformers_5() -> None:
    raw = raw_of("kimi_linear")
    nested = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "head_dim": raw.pop("linear_head_dim"),
        "num_heads": raw.pop("linear_num_heads"),
        "short_conv_kernel_size": raw.pop("linear_conv_kernel_dim"),
    }
    for key in ("layer_types", "mlp_layer_types"):
        raw.pop(key)
    raw |= {"linear_attn_config": nested, "first_k_dense_replace": 1}
    raw |= {"mla_use_nope": True, "rope_theta": 10000.0, "head_dim": 72}
    assert configs.from_hf(raw) == configs.from_hf(raw_of("kimi_linear"))

    raw = raw_of("granitemoehybrid")
    raw["layers_block_type"] = ["mamba", "attention", "mamba"]
    del raw["layer_types"]
    raw |= {"mamba_d_head": "auto", "time_step_limit": [0.0, math.inf]}
    assert configs.from_hf(raw) == configs.from_hf(raw_of("granitemoehybrid"))
    dense = configs.from_hf(raw | {"num_local_experts": 0})
    assert dense.experts is None
    assert dense.mlp_size == raw["shared_intermediate_size"]
    assert configs.from_hf(configs.to_hf(dense)) == dense
    assert not configs.from_hf(raw | {"position_embedding_type": "nope"}).rotary_kinds
    limited = configs.from_hf(raw | {"time_step_limit": [0.1, 0.8]}).recurrence
    assert limited is not None
    assert (limited.min_step, limited.max_step) == (0.1, 0.8)

    raw = raw_of("lfm2")
    expected = configs.from_hf(raw)
    del raw["layer_types"]
    raw["full_attn_idxs"] = [1]
    raw["block_ff_dim"] = raw.pop("intermediate_size")
    raw["tie_embedding"] = raw.pop("tie_word_embeddings")
    raw |= {"block_use_xavier_init": True, "num_heads": 4, "use_pos_enc": True}
    assert configs.from_hf(raw) == expected
    # Two thirds of 56, by the next multiple of 8; and a factor in between.
    assert expected.mlp_size == 40
    assert configs.from_hf(raw | {"block_ffn_dim_multiplier": 1.2}).mlp_size == 48
    assert configs.from_hf(raw | {"block_auto_adjust_ff_dim": False}).mlp_size == 56
    attention = configs.from_hf(raw | {"full_attn_idxs": None})
    assert attention.recurrence is None
    assert configs.from_hf(configs.to_hf(attention)) == attention

    plain = configs.from_hf(raw_of("lfm2_moe") | {"use_expert_bias": False})
    assert plain.experts is not None
    assert not plain.experts.gate_bias
    assert configs.from_hf(configs.to_hf(plain)) == plain

    raw = raw_of("qwen3_next")
    del raw["layer_types"]
    raw |= {"full_attention_interval": 2, "num_hidden_layers": 4}
    config = configs.from_hf(raw)
    assert [config.kind_of(x) for x in range(4)] == [1, 0, 1, 0]

    raw = raw_of("olmo_hybrid")
    for key in [key for key in raw if key.startswith("linear_") and "head" in key]:
        del raw[key]
    config = configs.from_hf(raw)
    assert config.recurrence is not None
    assert config.recurrence.num_key_heads == 4
    assert config.recurrence.key_dim == 6
    assert config.recurrence.value_dim == 12
    assert not config.rotary_kinds
    del raw["rope_parameters"]
    assert configs.from_hf(raw).rotary_kinds


def test_the_text_part_of_a_model_with_images_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3_5"
    shutil.copytree(GOLDEN / "qwen3_5_text", folder)
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    tensors |= {"model.visual.merger.weight": np.ones(3), "mtp.norm.weight": np.ones(3)}
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    text = raw_of("qwen3_5_text")
    del text["architectures"]
    text |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "eos_token_id": 7}
    raw = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"depth": 27},
        "image_token_id": 5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    model = load_model(folder)
    expected = load_model(GOLDEN / "qwen3_5_text")
    assert model.config == expected.config
    assert model.eos_ids == (7,)
    jax.tree.map(np.testing.assert_array_equal, model.params, expected.params)
    assert load_shape(folder) == describe_config(model.config, name="qwen3_5")
    with pytest.raises(ValueError, match="tie_word_embeddings=False contradicts"):
        configs.from_hf(raw | {"tie_word_embeddings": False})
    with pytest.raises(ValueError, match="architecture 'Qwen3_5ForConditionalGenera"):
        configs.from_hf(raw | {"text_config": None})


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("qwen3_next", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 3}, "must have a layer"),
        ("qwen3_next", {"layer_types": ["mamba"] * 3}, "must be a list of full_att"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "num_value_heads=3 must be a mu"),
        ("qwen3_5_text", {"sliding_window": 8}, "sliding_window=8 is not supported"),
        (
            "qwen3_5_text",
            {"full_attention_interval": 0, "layer_types": None},
            "full_attention_interval=0 must be a whole number",
        ),
        (
            "olmo_hybrid",
            {
                "rope_parameters": {"rope_theta": None},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            "contradicts",
        ),
        (
            "kimi_linear",
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "is not supported, only dense layers before sparse ones",
        ),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False is not"),
        (
            "kimi_linear",
            {"linear_attn_config": {"gate_lower_bound": -5.0}},
            "linear_attn_config={'gate_lower_bound': -5.0} must be an object with",
        ),
        (
            "kimi_linear",
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1]},
            },
            "must have each of num_hidden_layers=3 once",
        ),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings=True is"),
        ("nemotron_h", {"num_hidden_layers": 3}, "layer_types names 6 layers of 3"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias=True: experts have no biases"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            "hybrid_override_pattern='MX' must be of the letters M*-E",
        ),
        ("nemotron_h", {"layers_block_type": None}, "layers_block_type is missing"),
        (
            "nemotron_h",
            {"layers_block_type": ["mamba", "moe"]},
            "must have a layer of full_attention",
        ),
        ("lfm2", {"layer_types": ["conv", "attn", "conv"]}, "must be a list of full_"),
        (
            "lfm2",
            {"full_attn_idxs": 3, "layer_types": None},
            "full_attn_idxs=3 must be",
        ),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache=0 must be a whole number"),
        (
            "lfm2",
            {"block_multiple_of": 0},
            "block_multiple_of=0 must be a whole number",
        ),
        ("lfm2_moe", {"use_expert_bias": 1}, "use_expert_bias=1 must be true or fal"),
        ("granitemoehybrid", {"mamba_expand": 3}, "mamba_d_head=8 must be mamba_exp"),
        ("granitemoehybrid", {"time_step_limit": [1.0]}, "must be a list of two"),
        ("granitemoehybrid", {"time_step_limit": [2.0, 1.0]}, "must be a list of two"),
        (
            "granitemoehybrid",
            {"position_embedding_type": "alibi"},
            "position_embedding_type='alibi' is not supported",
        ),
    ],
)
def test_other_arithmetic_is_refused(
    name: str, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        configs.from_hf(raw_of(name) | changes)


def test_what_recurrent_layers_lack_is_refused() -> None:
    config = read_config(GOLDEN / "qwen3_5_text")
    with pytest.raises(ValueError, match="num_ahead_layers=1 must be 0 with recurr"):
        dataclasses.replace(config, num_ahead_layers=1)
    with pytest.raises(ValueError, match="recurrent layers are not sized by one dial"):
        training.resize_model(config, 10_000)
    with pytest.raises(ValueError, match="residuals of recurrent layers are not list"):
        list_residuals(config)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2", "conv"])
def test_chunks_equal_single_tokens(kind: Any) -> None:
    is_conv = kind == "conv"
    r = RecurrenceConfig(
        kind=kind,
        num_key_heads=1 if is_conv else 2,
        num_value_heads=1 if is_conv else 4,
        key_dim=1 if is_conv else 5,
        value_dim=3,
        kernel_size=3,
        write_scale=2.0,
        min_step=0.05,
    )
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    num = 2 * recurrence.CHUNK + 7
    has_strength = kind in ("gdn", "kda")
    projection = recurrence.RecurrentProjection(
        r,
        recurrence.RecurrentRows(
            draw(num, r.num_channels),
            None if is_conv else draw(num, r.num_decays),
            draw(num, r.num_value_heads) if has_strength else None,
        ),
        recurrence.RecurrentWeights(
            draw(r.num_channels, r.kernel_size),
            None,
            None if is_conv else draw(r.num_value_heads),
            None if is_conv else draw(r.num_decays),
            draw(r.num_value_heads) if kind == "mamba2" else None,
        ),
    )
    state = recurrence.zero_state(r, (), "float32")
    weights = projection.weights
    as_tokens, as_sequence, as_chunk = (
        jax.jit(
            lambda rows, *more, run=run: run(
                recurrence.RecurrentProjection(r, rows, weights), *more
            )
        )
        for run in (
            recurrence.run_tokens,
            recurrence.run_sequence,
            recurrence.run_chunk,
        )
    )
    states, expected = as_tokens(projection.rows, state)
    got = as_sequence(projection.rows)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * scale)
    # A chunk with rows that are not used ends with the state after the others.
    rows = jax.tree.map(lambda x: x[:20], projection.rows)
    after, _ = as_chunk(rows, state, jnp.int32(11))
    for x, every in zip(*map(jax.tree.leaves, (after, states)), strict=True):
        np.testing.assert_allclose(x, every[10], rtol=1e-5, atol=1e-5)


READ = """
import sys, numpy, torch, transformers
for folder, source in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    expected = numpy.load(source)
    ids = torch.tensor(expected["ids"], dtype=torch.int64)
    logits = model(ids, use_cache=False).logits.detach().numpy()
    numpy.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
    print(folder)
"""
"""Program of the peer: compares logits of saved folders with the recorded ones."""


@pytest.mark.slow
@pytest.mark.skipif(PEER is None, reason="JAXKV_PEER_PYTHON names no Python")
def test_transformers_reads_saved_folders(tmp_path: Path) -> None:
    arguments = []
    for name in NAMES:
        model = load_model(GOLDEN / name)
        folder = save_model(tmp_path / name, model.config, model.params)
        arguments += [str(folder), str(GOLDEN / name / "expected.npz")]
    run = subprocess.run(
        [str(PEER), "-c", READ, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert run.stdout.split() == arguments[::2]
