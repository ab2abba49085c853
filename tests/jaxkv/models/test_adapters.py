"""LoRA folders in the form of peft: their factors, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv import models
from jaxkv.models import Linear, Orientation
from jaxkv.models.initialization import ShapeRecorder
from tests.support import adapters
from tests.support.folders import ROOT
from tests.support.refusals import refused

GOLDEN = ROOT / "tests" / "golden"
FOLDERS = sorted((GOLDEN / "adapters").iterdir())
LLAMA = GOLDEN / "llama"
ATTENTION = ("q_proj", "v_proj", "o_proj")


def base_of(folder: Path) -> Path:
    return GOLDEN / folder.name.split("-")[0]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda x: x.name)
def test_factors_are_those_of_merged_weights(folder: Path, tmp_path: Path) -> None:
    """Of fused products, too: each module's columns get its own factors."""
    base = models.load_model(base_of(folder))
    merged = models.load_model(adapters.merge(folder, base_of(folder), tmp_path / "m"))
    tree = models.load_adapters({"other": folder, "one": folder}, base.config)
    assert {*tree["layers"]} == {0, 1}
    expected = jax.tree.map(lambda a, b: a - b, merged.params, base.params)
    for layer, parts in tree["layers"].items():
        for name, part in parts.items():
            weight = expected["layers"][layer][name].pop("weight")
            for i in range(2):
                delta = part["lora_b"][..., i, :] @ part["lora_a"][i]
                np.testing.assert_allclose(delta, weight, atol=2e-6)
            assert np.abs(weight).max() > 0.1
    for leaf in jax.tree.leaves(expected):
        assert not np.any(leaf)


@pytest.mark.thorough
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda x: x.name)
def test_logits_are_those_of_peft(folder: Path) -> None:
    base = models.load_model(base_of(folder))
    tree = models.load_adapters({"one": folder}, base.config)
    params = models.join_adapters(base.params, tree)
    golden = np.load(folder / "expected.npz")
    ids = golden["ids"].astype(np.int32)
    run = jax.jit(models.logits, static_argnames="config")
    used = np.array([1, 0], np.int32)
    logits = run(params, ids, config=base.config, adapter=used)
    np.testing.assert_allclose(logits[0], golden["logits"][0], rtol=1e-5, atol=3e-5)
    plain = run(base.params, ids, config=base.config)
    np.testing.assert_array_equal(logits[1], plain[1])
    assert np.abs(logits[0] - plain[0]).max() > 1


def test_ranks_and_layers_are_padded_with_zeros(tmp_path: Path) -> None:
    config = models.read_config(LLAMA)
    names = ["model.layers.1.mlp.down_proj"]
    small = adapters.save_adapter(tmp_path / "a", LLAMA, names, rank=1)
    large = adapters.save_adapter(tmp_path / "b", LLAMA, ["q_proj"], rank=5, seed=1)
    layers = models.load_adapters({"a": small, "b": large}, config)["layers"]
    assert [*layers] == [0, 1]
    assert all({*parts} == {"qkv", "down"} for parts in layers.values())
    assert layers[0]["qkv"]["lora_a"].shape == (2, 5, 32)
    assert layers[0]["qkv"]["lora_b"].shape == (2, 4, 8, 2, 5)
    assert not layers[0]["qkv"]["lora_b"][..., 0, :].any()
    assert not layers[0]["down"]["lora_a"].any()
    assert layers[1]["down"]["lora_a"][0].all()
    # Queries only: keys and values of each KV head have no factors.
    assert not layers[1]["qkv"]["lora_b"][:, -2:].any()
    assert layers[1]["qkv"]["lora_b"][:, :-2, :, 1].all()


def test_rows_are_multiplied_by_their_own_adapter() -> None:
    linear = Linear(6, 5, axes=(None, None), rngs=ShapeRecorder())
    linear.add_adapters()
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    x = draw(5, 40)
    weights = draw(6, 5), draw(3, 2, 5), draw(6, 3, 2)
    for name, value in zip(("weight", "lora_a", "lora_b"), weights, strict=True):
        setattr(linear, name, type(linear.lora_a)(value))
    ids = rng.integers(0, 4, 40).astype(np.int32)
    others = np.where(np.arange(40) % 3, ids, 2).astype(np.int32)
    w, a, b = map(np.asarray, weights)

    @jax.jit
    def run(x: jax.Array, ids: jax.Array) -> jax.Array:
        return linear(x, Orientation(adapter=ids))

    y = np.asarray(run(x, ids))
    for row, i in enumerate(ids):
        column = np.asarray(x)[:, row]
        delta = b[:, i - 1] @ (a[i - 1] @ column) if i else 0
        np.testing.assert_allclose(y[:, row], w @ column + delta, rtol=1e-5, atol=1e-5)
    same = ids == others
    np.testing.assert_array_equal(y[:, same], np.asarray(run(x, others))[:, same])
    base = np.asarray(jax.jit(lambda x: linear(x, Orientation()))(x))
    np.testing.assert_array_equal(y[:, ids == 0], base[:, ids == 0])


SETTINGS: dict[str, Any] = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "layers_to_transform": [0],
    "layer_replication": [[0, 1]],
    "target_parameters": ["x"],
    "trainable_token_indices": [1],
    "alora_invocation_tokens": [1],
    "lora_bias": True,
    "use_qalora": True,
    "setting_of_tomorrow": 1,
    "bias": "all",
    "init_lora_weights": "pissa",
    "peft_type": "LOHA",
    "r": 0,
    "lora_alpha": "8",
    "use_rslora": 1,
    "target_modules": None,
    "rank_pattern": {"q_proj": 0},
}


def test_unsupported_settings_are_refused_by_name(tmp_path: Path) -> None:
    config = models.read_config(LLAMA)
    folder = adapters.save_adapter(tmp_path / "a", LLAMA, ATTENTION)
    path = folder / adapters.CONFIG
    plain = json.loads(path.read_text())
    for name, value in SETTINGS.items():
        path.write_text(json.dumps(plain | {name: value}))
        with refused(name, str(path)):
            models.load_adapters({"a": folder}, config)
    harmless = {"use_dora": False, "fan_in_fan_out": True, "megatron_core": "x"}
    path.write_text(json.dumps(plain | harmless))
    assert models.load_adapters({"a": folder}, config)["layers"]
    for targets, line in (
        ("all-linear", "misses model.layers.0.mlp.down_proj"),
        (["q_proj"], "has model.layers.0.self_attn.o_proj"),
        (r".*\.[qvk]_proj", "misses model.layers.0.self_attn.k_proj"),
        ("(", "missing ), unterminated subpattern"),
    ):
        path.write_text(json.dumps(plain | {"target_modules": targets}))
        with refused(line):
            models.load_adapters({"a": folder}, config)
    path.write_text(json.dumps(plain | {"target_modules": r".*\.[qvo]_proj"}))
    assert models.load_adapters({"a": folder}, config)["layers"]
    with refused(f"{tmp_path}: has no adapter_config.json"):
        models.load_adapters({"a": tmp_path}, config)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("model.embed_tokens.lora_embedding_A", "is not a factor of a product"),
        ("model.layers.0.self_attn.q_proj.lora_B.bias", "is not a factor"),
        ("lm_head.lora_A.weight", "lm_head must have lora_A and lora_B"),
        ("lm_head", "lm_head is not a product of attention or of an MLP"),
        ("model.layers.0.mlp.experts.0.gate_proj", "experts, routers and recurrences"),
        ("model.layers.0.self_attn.q_proj", "has factors [3, 32] and [32, 3]"),
    ],
)
def test_unsupported_tensors_are_refused_by_name(
    name: str, line: str, tmp_path: Path
) -> None:
    folder = adapters.save_adapter(tmp_path / "a", LLAMA, ATTENTION)
    path = folder / adapters.WEIGHTS
    tensors = load_file(path)
    names = [f"{adapters.PREFIX}{name}"]
    if "lora_" not in name:
        names = [f"{names[0]}.lora_{half}.weight" for half in "AB"]
    shapes = [(3, 32), (32, 3)]
    tensors |= {
        x: np.ones(shape, np.float32)
        for x, shape in zip(names, shapes[: len(names)], strict=True)
    }
    save_file(tensors, path)
    with refused(line, str(path)):
        models.load_adapters({"a": folder}, models.read_config(LLAMA))
