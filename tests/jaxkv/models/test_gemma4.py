"""Gemma 4: sizes by type of layer, shared K and V, embeddings for each layer."""

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

import jaxkv
from jaxkv import models
from jaxkv.models import (
    PagedForward,
    load_model,
    make_model_pages,
    param_shapes,
    read_config,
    rotary,
    save_model,
)
from jaxkv.models.huggingface import configs
from jaxkv.parallel import fit_config
from scaling.costs import Layout, check_layout, list_residuals, stored_tensors
from scaling.shapes import describe_config, load_shape
from scaling.training import resize_model
from tests.support import engines
from tests.support.folders import GOLDEN

FOLDER = GOLDEN / "gemma4"


def raw_of() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text())


def test_a_folder_is_saved_as_it_loads(tmp_path: Path) -> None:
    loaded = load_model(FOLDER)
    folder = save_model(
        tmp_path / "m", loaded.config, loaded.params, max_shard_bytes=20_000
    )
    again = load_model(folder)
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    names = safetensors.numpy.load_file(FOLDER / "model.safetensors").keys()
    # Layers 2 and 3 read K and V of layers 0 and 1; values of layer 1 are its keys.
    kv = {name for name in names if re.search(r"\.(k|v)_proj\.", name)}
    assert kv == {
        f"model.layers.{name}_proj.weight"
        for name in ("0.self_attn.k", "0.self_attn.v", "1.self_attn.k")
    }


def test_layers_have_sizes_of_their_own() -> None:
    config = read_config(FOLDER)
    assert config.attention_layers == (0, 1)
    assert config.kv_groups == ((0,), (1,))
    assert [config.kv_layer(x) for x in range(4)] == [0, 1, 0, 1]
    pages = jax.eval_shape(lambda: make_model_pages(config, engines.TIGHT))
    assert pages.k.shape == (1, 16, 2, 4, 10)
    assert pages.other_heads.k.shape == (1, 16, 1, 4, 14)
    layers = param_shapes(config)["layers"]
    assert layers[0]["qkv"]["weight"].shape == (2, 4, 10, 32)
    assert layers[1]["qkv"]["weight"].shape == (1, 5, 14, 32)
    assert layers[3]["q"]["weight"].shape == (1, 4, 14, 32)
    assert [layers[x]["up"]["weight"].shape[1] for x in range(4)] == [56, 56, 112, 112]
    scaling = config.rope_scaling
    assert scaling is not None
    # A quarter of the 7 pairs turns, by powers over the whole head.
    assert scaling.num_pairs == 1
    pace = rotary.frequencies(config, "float32")
    np.testing.assert_array_equal(pace, [1, 0, 0, 0, 0, 0, 0])


def test_tensors_that_no_layer_reads_are_ignored(tmp_path: Path) -> None:
    """As in published folders, which have K and V of all layers."""
    folder = tmp_path / "m"
    shutil.copytree(FOLDER, folder)
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    more = np.ones((3, 32), np.float32)
    tensors |= {f"model.layers.2.self_attn.{x}_proj.weight": more for x in "kv"}
    tensors = {
        name.replace("model.", "model.language_model.", 1): x
        for name, x in tensors.items()
    }
    tensors["model.vision_tower.weight"] = more
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    raw = raw_of()
    del raw["architectures"]
    wrapped = {"model_type": "gemma4", "text_config": raw, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(wrapped))
    expected = load_model(FOLDER)
    loaded = load_model(folder)
    assert loaded.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)


def test_sizes_of_published_cards_are_those_of_transformers_5() -> None:
    raw = raw_of()
    expected = configs.from_hf(raw)
    del raw["per_layer_config"]
    raw |= {"global_head_dim": 14, "num_global_key_value_heads": 1}
    raw |= {"use_bidirectional_attention": "vision"}
    assert configs.from_hf(raw) == expected
    padded = {f"0{x}": sizes for x, sizes in raw_of()["per_layer_config"].items()}
    assert configs.from_hf(raw_of() | {"per_layer_config": padded}) == expected
    plain = configs.from_hf(raw_of() | {"per_layer_config": {}})
    assert (plain.head_dim, plain.num_kv_heads) == (10, 2)
    assert configs.from_hf(configs.to_hf(plain)) == plain
    assert configs.from_hf(raw | {"enable_moe_block": False}).experts is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"per_layer_config": {"1": {"head_dim": 14}}},
            "per_layer_config={'1': {'head_dim': 14}} is not supported",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers=4 must be below"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers=3 must leave a layer of"),
        ({"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input=64 is not"),
        (
            {
                "rope_parameters": {
                    "full_attention": {},
                    "sliding_attention": {"rope_type": "proportional"},
                }
            },
            "rope_type='proportional' is not supported in sliding_attention",
        ),
    ],
)
def test_other_arithmetic_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        configs.from_hf(raw_of() | changes)


def test_what_such_layers_lack_is_refused() -> None:
    config = read_config(FOLDER)
    with pytest.raises(ValueError, match="tensor=2 must be 1: layers with sizes"):
        fit_config(config, 2)
    shape = load_shape(FOLDER)
    assert describe_config(config, name=shape.name) == shape
    with pytest.raises(ValueError, match="activations of layers with sizes of their"):
        stored_tensors(shape, sequence=8)
    plain = dataclasses.replace(config, experts=None)
    with pytest.raises(ValueError, match="different sizes are not sized by one dial"):
        resize_model(plain, 10_000)
    with pytest.raises(ValueError, match="residuals of layers of different sizes"):
        list_residuals(plain)
    with pytest.raises(ValueError, match="expert=2 must be 1: the layers with sizes"):
        check_layout(shape, Layout(expert=2, data=2))
    with pytest.raises(ValueError, match=re.escape("layers=(0,) must be None")):
        PagedForward(config, layers=(0,))
    with pytest.raises(ValueError, match="needs qk_norm over heads"):
        dataclasses.replace(config, qk_norm=False)
    with pytest.raises(ValueError, match="layer 0 shares K and V of no earlier layer"):
        dataclasses.replace(config, attention_pattern=(3, 0, 2, 1))


def test_a_base_without_a_rotary_object_is_refused() -> None:
    """transformers 4 scales no frequencies then, and 5 those of gpt-oss."""
    raw = json.loads((GOLDEN / "gpt_oss" / "config.json").read_text())
    del raw["rope_parameters"]
    with pytest.raises(ValueError, match=re.escape("rope_theta=5.0 is not supported")):
        configs.from_hf(raw | {"rope_theta": 5.0, "rope_scaling": None})
    rope = {"rope_type": "default", "rope_theta": 5.0}
    config = configs.from_hf(raw | {"rope_parameters": rope})
    saved = configs.to_hf(config)
    assert saved["rope_parameters"] == rope
    assert configs.from_hf(saved) == config


@pytest.mark.slow
def test_an_engine_serves_layers_that_share_keys_in_small_pages() -> None:
    """With chunks, a prefix cache, drafts and preemption, as plain decoding."""
    expected = np.load(FOLDER / "expected.npz")
    prompt = expected["prompt"].tolist()
    greedy = expected["greedy"].tolist()
    engine = jaxkv.Engine.load(
        FOLDER,
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


@pytest.mark.slow
def test_reproducible_passes_are_those_of_scores() -> None:
    loaded = load_model(FOLDER)
    tokens = jnp.asarray(np.load(FOLDER / "expected.npz")["ids"])
    scores = jaxkv.score(loaded.params, tokens, config=loaded.config)
    logits = models.logits(loaded.params, tokens, config=loaded.config)
    logprobs = jax.nn.log_softmax(logits)[:, :-1]
    wanted = jnp.take_along_axis(logprobs, tokens[:, 1:, None], 2)[..., 0]
    np.testing.assert_allclose(scores[:, 1:], wanted, rtol=0, atol=1e-3)
