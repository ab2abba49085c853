"""DeepSeek's folders: published configurations, prediction layers, 8-bit weights."""

import dataclasses
import json
import math
import os
import subprocess
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxkv import scheduling
from jaxkv.models import (
    Experts,
    ModelConfig,
    is_selection_bias,
    load_model,
    param_shapes,
    rotary,
    save_model,
)
from jaxkv.models.config import LatentConfig, RopeScaling
from jaxkv.models.huggingface import configs, tensors
from scaling.costs import count_parameters
from scaling.shapes import describe_config, describe_huggingface
from tests.support import engines
from tests.support.folders import GOLDEN

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "ep_size": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
LITE: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V2: dict[str, Any] = LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": FP8,
    "rope_scaling": YARN,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
"""The published `config.json`s; V3's is R1's, too."""
TINY = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_q_heads=2,
    num_kv_heads=2,
    head_dim=14,
    mlp_size=12,
    max_positions=32,
    norm_eps=1e-6,
    tie_embeddings=False,
    latent=LatentConfig(kv_rank=6, q_rank=10, nope_dim=8, rope_dim=6, value_dim=5),
    experts=Experts(
        num_experts=4,
        top_k=2,
        size=8,
        shared_size=8,
        scoring="sigmoid",
        gate_bias=True,
        num_groups=2,
        top_groups=1,
        scale=2.5,
        num_dense_layers=1,
        bias_rate=0.001,
    ),
    num_ahead_layers=2,
    family="deepseek_v3",
)


@pytest.mark.parametrize(
    ("raw", "total"),
    [
        pytest.param(LITE, 15_706_484_224, id="V2-Lite"),
        pytest.param(V2, 235_741_434_880, id="V2", marks=pytest.mark.thorough),
        pytest.param(V3, 671_026_419_200, id="V3", marks=pytest.mark.thorough),
    ],
)
def test_published_models_are_read_and_counted(raw: dict[str, Any], total: int) -> None:
    config = configs.from_hf(raw)
    shape = describe_config(config)
    assert shape == describe_huggingface(raw)
    count = count_parameters(shape)
    assert count.total == total
    held = jax.tree.leaves(param_shapes(config))
    shared = 0 if raw is not V3 else count.ahead
    assert sum(leaf.size for leaf in held) == total + shared
    assert configs.from_hf(configs.to_hf(config)) == config


def test_published_routing_and_positions() -> None:
    lite, v2, v3 = (configs.from_hf(raw) for raw in (LITE, V2, V3))
    assert lite.latent == LatentConfig(
        kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128
    )
    assert (lite.num_kv_heads, lite.head_dim) == (16, 192)
    assert lite.experts == Experts(
        num_experts=64,
        top_k=6,
        size=1408,
        shared_size=2816,
        renormalise=False,
        num_dense_layers=1,
        balance_weight=0.001,
    )
    assert lite.experts is not None
    assert v2.experts == dataclasses.replace(
        *(lite.experts,),
        **{"num_experts": 160, "size": 1536, "shared_size": 3072},
        **{"num_groups": 8, "top_groups": 3, "scale": 16.0},
    )
    assert v3.experts == Experts(
        num_experts=256,
        top_k=8,
        size=2048,
        shared_size=2048,
        scoring="sigmoid",
        gate_bias=True,
        num_groups=8,
        top_groups=4,
        scale=2.5,
        num_dense_layers=3,
        balance_weight=0.001,
    )
    assert v3.num_ahead_layers == 1
    scaling = v3.rope_scaling
    assert scaling is not None
    assert scaling.magnitude == 1
    assert scaling.score_magnitude == pytest.approx(1 + 0.1 * math.log(40), abs=1e-15)
    assert v3.score_scale == pytest.approx(192**-0.5 * 1.3688879454**2, rel=1e-9)


def test_both_spellings_of_yarn() -> None:
    new = {key: V3[key] for key in V3 if key not in ("rope_scaling", "rope_theta")}
    rope = {key: YARN[key] for key in YARN if key != "type"}
    new["rope_parameters"] = rope | {"rope_type": "yarn", "rope_theta": 10000.0}
    assert configs.from_hf(new) == configs.from_hf(V3)
    # Without weights, cosines and sines have the factor of the paper.
    for changes, magnitude in (({}, 0.1 * math.log(40) + 1), ({"truncate": False}, 0)):
        plain = {key: rope[key] for key in rope if "mscale" not in key}
        scaling = configs.from_hf(
            V3 | {"rope_scaling": plain | changes | {"type": "yarn"}}
        )
        rope_scaling = scaling.rope_scaling
        assert rope_scaling is not None
        assert rope_scaling.truncate == (not changes)
        assert rope_scaling.score_magnitude == 1
        if magnitude:
            assert rope_scaling.magnitude == pytest.approx(magnitude)
        assert configs.from_hf(configs.to_hf(scaling)) == scaling


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(kind="yarn", factor=8.0, high_frequency_factor=32.0, magnitude=1.1),
        RopeScaling(kind="yarn", factor=1.0, high_frequency_factor=9.5),
    ],
)
def test_factors_of_yarn_are_written(scaling: RopeScaling) -> None:
    config = dataclasses.replace(TINY, rope_scaling=scaling)
    assert configs.from_hf(configs.to_hf(config)).rope_scaling == scaling


@pytest.mark.parametrize(
    ("raw", "changes", "line"),
    [
        (V2, {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported"),
        (V3, {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        (V3, {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        (V3, {"rope_interleave": False}, "rope_interleave=False is not supported"),
        (V3, {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 is not supported"),
        (V3, {"num_key_value_heads": 8}, "num_key_value_heads=8 is not supported"),
        (V3, {"head_dim": 192}, "head_dim=192 is not supported, only 64"),
        (V3, {"attention_bias": True}, "attention_bias=True is not supported"),
        (V3, {"topk_group": 9}, "top_groups=9 must be at most"),
        (V3, {"n_group": 3}, "num_experts=256 must be a multiple of num_groups=3"),
        (V3, {"index_topk": 2048}, "index_topk=2048 may change the logits of Deep"),
        (V3, {"first_k_dense_replace": 61}, "experts.num_dense_layers=61 must be"),
        (V3, {"quantization_config": FP8 | {"fmt": "e5m2"}}, "quantization_config is"),
        (
            V3,
            {"quantization_config": FP8 | {"weight_block_size": [64, 64]}},
            "quantization_config is not supported: only f32, bf16 and f16 weights, ",
        ),
        (
            V3,
            {"rope_scaling": {key: YARN[key] for key in YARN if key != "mscale"}},
            "mscale_all_dim=1.0 is not supported without the other one of mscale",
        ),
        (V3, {"rope_scaling": YARN | {"mscale_all_dim": 0}}, "mscale=1.0 is not supp"),
        (
            V3,
            {"rope_scaling": YARN | {"attention_factor": 1.5}},
            "attention_factor=1.5 contradicts mscale=1.0",
        ),
        (V3, {"rope_scaling": YARN | {"beta_slow": 40}}, "beta_slow=40.0 must be bel"),
    ],
)
def test_other_arithmetic_is_refused(
    raw: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as info:
        configs.from_hf(raw | changes)
    assert str(info.value).startswith(line)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"family": "llama"}, "latent=.* has no place"),
        ({"latent": None, "head_dim": 16}, "latent=None has no place"),
        ({"experts": None}, "experts=None has no place"),
        ({"norm_eps": 1e-5}, "norm_eps=1e-05 has no place"),
        ({"family": "deepseek_v2"}, "experts=.* has no place"),
    ],
)
def test_config_that_its_family_cannot_express_is_refused(
    changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        configs.to_hf(dataclasses.replace(TINY, **changes))


def random_params(config: ModelConfig, dtype: str = "float32") -> Any:
    """Returns parameters that all differ, biases included."""
    rng = np.random.default_rng(3)
    shapes = param_shapes(config, dtype=dtype)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape).astype("f4"), x.dtype), shapes
    )


def save_unlisted(folder: Path, config: ModelConfig) -> Path:
    """Writes a folder without digests, whose files may be changed."""
    save_model(folder, config, random_params(config))
    (folder / "SHA256SUMS").unlink()
    return folder


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Returns all tensors of a folder."""
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in safetensors.numpy.load_file(path).items()
    }


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3"])
def test_rotary_rows_are_put_in_order(name: str) -> None:
    """Compares with a loop over heads and pairs."""
    config, params, *_ = load_model(GOLDEN / name)
    latent = config.latent
    stored_tensors = stored(GOLDEN / name)
    assert latent is not None
    nope = latent.nope_dim
    half = latent.rope_dim // 2
    prefix = "model.layers.1.self_attn."
    q = "q_proj" if latent.q_rank is None else "q_b_proj"
    q = stored_tensors[f"{prefix}{q}.weight"].reshape(
        config.num_q_heads, config.head_dim, -1
    )
    key = stored_tensors[f"{prefix}kv_a_proj_with_mqa.weight"]
    layer = params["layers"][1]
    found_q = layer["q" if latent.q_rank is None else "q_up"]["weight"]
    found_key = layer["kv_down"]["weight"]
    np.testing.assert_array_equal(found_q[:, :nope], q[:, :nope])
    np.testing.assert_array_equal(found_key[: latent.kv_rank], key[: latent.kv_rank])
    for pair in range(half):
        for side in range(2):
            place = side * half + pair
            first = 2 * pair + side
            for head in range(config.num_q_heads):
                np.testing.assert_array_equal(
                    found_q[head, nope + place], q[head, nope + first]
                )
            np.testing.assert_array_equal(
                found_key[latent.kv_rank + place], key[latent.kv_rank + first]
            )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prediction_layers_are_saved_and_loaded(dtype: str, tmp_path: Path) -> None:
    params = random_params(TINY, dtype)
    folder = save_model(tmp_path / "m", TINY, params, max_shard_bytes=2_000)
    again = load_model(folder, dtype=dtype)
    assert again.config == TINY
    for loaded_leaf, leaf in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(params), strict=True
    ):
        assert loaded_leaf.dtype == leaf.dtype
        np.testing.assert_array_equal(loaded_leaf, leaf)
    stored_tensors = stored(folder)
    for index in range(2):
        prefix = f"model.layers.{2 + index}."
        module = params["ahead"][index]
        for name, part in (
            ("enorm", module["token_norm"]["scale"]),
            ("hnorm", module["feature_norm"]["scale"]),
            ("eh_proj", module["merge"]["weight"]),
            ("shared_head.norm", module["final_norm"]["scale"]),
            ("embed_tokens", params["embed"]["weight"]),
            ("shared_head.head", params["head"]["weight"]),
            ("self_attn.o_proj", module["layer"]["out"]["weight"]),
        ):
            np.testing.assert_array_equal(
                stored_tensors[f"{prefix}{name}.weight"], part
            )
        bias = stored_tensors[f"{prefix}mlp.gate.e_score_correction_bias"]
        assert bias.dtype == np.float32


def test_copies_of_tables_are_checked(tmp_path: Path) -> None:
    folder = save_unlisted(tmp_path / "m", TINY)
    path = folder / "model.safetensors"
    every = stored(folder)
    name = "model.layers.3.shared_head.head.weight"
    # Folders may omit the copies.
    stored_tensors = {key: every[key] for key in every if "embed_tokens" not in key[8:]}
    stored_tensors["model.embed_tokens.weight"] = every["model.embed_tokens.weight"]
    del stored_tensors[name]
    safetensors.numpy.save_file(stored_tensors, path)
    jax.tree.map(
        np.testing.assert_array_equal,
        load_model(folder).params,
        random_params(TINY),
    )
    safetensors.numpy.save_file(every | {name: every[name] + 1}, path)
    with pytest.raises(ValueError, match=f"{name} differs from lm_head.weight, which"):
        load_model(folder)


def test_prediction_layers_without_tensors_are_refused(tmp_path: Path) -> None:
    """As transformers writes: the key, 1 by default, without the tensors."""
    config = dataclasses.replace(TINY, num_ahead_layers=0)
    folder = save_unlisted(tmp_path / "m", config)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    del raw["num_nextn_predict_layers"]
    path.write_text(json.dumps(raw))
    line = r"num_nextn_predict_layers=1 in config.json .* no tensor of model.layers.2;"
    with pytest.raises(ValueError, match=line):
        load_model(folder)
    # Tensors without the key are refused, too.
    source_folder = save_unlisted(tmp_path / "whole", TINY)
    (source_folder / "config.json").write_text(
        json.dumps(raw | {"num_nextn_predict_layers": 0})
    )
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.2"):
        load_model(source_folder)


def decoded(byte: int) -> float:
    """Returns the value of a number in the format E4M3 without infinities."""
    sign = byte >> 7
    exponent = byte >> 3 & 15
    mantissa = byte & 7
    value = mantissa / 8 * 2**-6
    if exponent:
        value = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


EIGHT = ModelConfig(
    vocab_size=8,
    hidden_size=136,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=2,
    head_dim=4,
    mlp_size=260,
    max_positions=16,
    tie_embeddings=False,
)


def test_blocks_of_eight_bit_weights_are_scaled(tmp_path: Path) -> None:
    """Compares all numbers with a loop in float64, at the ends of blocks too."""
    rng = np.random.default_rng(4)
    folder = save_unlisted(tmp_path / "m", EIGHT)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": FP8}))
    every = stored(folder)
    wanted = {}
    for name in [key for key in every if "_proj" in key]:
        shape = every[name].shape
        codes = rng.integers(0, 127, shape) + 128 * rng.integers(0, 2, shape)
        scales = rng.uniform(0.001, 0.1, [-(-size // 128) for size in shape])
        scales = scales.astype(np.float32)
        every[name] = codes.astype(np.uint8).view(jnp.float8_e4m3fn)
        every[f"{name}_scale_inv"] = scales
        value = np.array([decoded(code) for code in range(256)])[codes]
        for row in range(shape[0]):
            for column in range(shape[1]):
                value[row, column] *= scales[row // 128, column // 128]
        wanted[name] = value
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(every, path)
    layer = load_model(folder).params["layers"][0]
    prefix = "model.layers.0.mlp."
    weights = layer["down"]["weight"], *layer["up"]["weight"]
    for weight, name in zip(weights, ("down", "gate", "up"), strict=True):
        value = wanted[f"{prefix}{name}_proj.weight"]
        np.testing.assert_allclose(weight, value, rtol=1e-6)
    halves = load_model(folder, dtype="bfloat16").params["layers"][0]
    value = halves["down"]["weight"]
    np.testing.assert_array_equal(value, layer["down"]["weight"].astype("bfloat16"))

    name = f"{prefix}down_proj.weight"
    wide = dict(every) | {name: np.ones((136, 260), np.float32)}
    without = {key: every[key] for key in every if key != f"{name}_scale_inv"}
    short = every | {f"{name}_scale_inv": np.ones((2, 2), np.float32)}
    nan = np.full((136, 260), 127, np.uint8).view(jnp.float8_e4m3fn)
    for changed, line in (
        (wide, "is of type F32, supported are F8_E4M3"),
        (without, "is of type F8_E4M3, supported are F32"),
        (short, r"has shape \(2, 2\), config.json asks for \(2, 3\)"),
        (every | {name: nan}, "holds NaN or infinite values"),
    ):
        safetensors.numpy.save_file(changed, path)
        with pytest.raises(ValueError, match=line):
            load_model(folder)


def test_biases_are_found_in_both_places() -> None:
    leaves = tensors.list_leaves(TINY)
    wide = {leaf.path for leaf in leaves if leaf.dtype_in(np.dtype("f2")) != "f2"}
    paths = jax.tree_util.tree_leaves_with_path(param_shapes(TINY))
    assert wide == {
        tuple(key.key for key in path) for path, _ in paths if is_selection_bias(path)
    }
    assert len(wide) == 3


PEER = os.environ.get("JAXKV_PEER_PYTHON")
PEER_SCRIPT = """
import sys, numpy, torch, transformers
model, loading = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float32, output_loading_info=True
)
assert not loading["missing_keys"] and not loading["mismatched_keys"], loading
ids = torch.tensor(numpy.load(sys.argv[2])["ids"])
with torch.no_grad():
    numpy.save(sys.argv[3], model(ids.long()).logits.numpy())
"""


@pytest.mark.slow
@pytest.mark.skipif(PEER is None, reason="JAXKV_PEER_PYTHON names no Python")
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v2", "deepseek_v3"])
def test_transformers_reads_a_saved_folder(name: str, tmp_path: Path) -> None:
    config, params, *_ = load_model(GOLDEN / name)
    folder = save_model(tmp_path / "m", config, params, max_shard_bytes=50_000)
    expected_file = GOLDEN / name / "expected.npz"
    logits_file = tmp_path / "logits.npy"
    subprocess.run(
        [
            str(PEER),
            "-c",
            PEER_SCRIPT,
            str(folder),
            str(expected_file),
            str(logits_file),
        ],
        check=True,
    )
    np.testing.assert_allclose(
        np.load(logits_file), np.load(expected_file)["logits"], rtol=0, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [2, 16])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "deepseek_v2_lite"])
def test_engine_continues_as_transformers(name: str, page_size: int) -> None:
    """48 greedy tokens, with shared prefixes and too few pages."""
    config, params, *_ = load_model(GOLDEN / name)
    expected = np.load(GOLDEN / name / "expected.npz")
    prompt, greedy = (expected[key].tolist() for key in ("prompt", "greedy"))
    # Later requests begin with a part of the answer to the first one, so they share its
    # pages; unrelated ones compete for pages.
    starts = (0, 0, 9, 20)
    asks = [
        engines.greedy(number, prompt + greedy[:start], 48 - start)
        for number, start in enumerate(starts)
    ]
    rng = np.random.default_rng(0)
    asks += [
        engines.greedy(10 + number, rng.integers(0, 128, 20).tolist(), 30)
        for number in range(3)
    ]
    bounds = dataclasses.replace(
        engines.CACHED, page_size=page_size, num_pages=96 // page_size
    )
    policy = scheduling.fcfs(chunk_size=8, hold_new=False)
    run = engines.serve(asks, bounds, policy, model=config, weights=params)
    for number, start in enumerate(starts):
        assert run.tokens[number] == greedy[start:48]
    assert run.info.num_preempted.sum() > 0
    num_cached = sum(outcome.num_cached for outcome in run.outcomes.values())
    assert num_cached > 0 or page_size > len(prompt)


def test_bounds_of_yarn_are_those_of_the_published_model() -> None:
    # 64 dimensions, base 10,000, 4,096 positions: pairs 10 and 23.
    config: Any = types.SimpleNamespace(rope_theta=10_000.0)
    scaling = RopeScaling(
        kind="yarn", high_frequency_factor=32.0, original_max_positions=4096
    )
    ramp = rotary._yarn_ramp(config.rope_theta, scaling, 64)
    np.testing.assert_allclose(ramp, np.clip((23 - np.arange(32)) / 13, 0, 1))
