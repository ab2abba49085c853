"""Model folders: round trips, and an error of one line for every defect."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxkv.models import (
    FAMILIES,
    init_params,
    load_model,
    load_tokenizer,
    param_forms,
    quantize_params,
    read_config,
    save_model,
)
from jaxkv.models.config import ModelConfig, RopeScaling
from jaxkv.models.huggingface import configs
from jaxkv.models.huggingface.tensors import embed_and_head
from jaxkv.text import ByteTokenizer, Tokenizer
from tests.support.folders import GOLDEN

FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))
WEIGHTS = "model.safetensors"
SMALL = ModelConfig(
    vocab_size=257,
    hidden_size=8,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_size=12,
    max_positions=32,
)


def config_of(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in safetensors.numpy.load_file(path).items()
    }


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy of a golden folder, to be damaged."""
    return shutil.copytree(GOLDEN / "llama", tmp_path / "llama")


def change_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]):
    tensors = tensors_in(folder)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / WEIGHTS)


def refusal(folder: Path | str, **kwargs: Any) -> str:
    """Returns the error with which a folder is refused, on one line."""
    with pytest.raises(ValueError, match=re.escape(str(folder))) as info:
        load_model(folder, **kwargs)
    line = str(info.value)
    assert "\n" not in line
    return line.replace(str(folder), "FOLDER")


# Round trips


@pytest.mark.parametrize("name", FOLDERS)
def test_save_restores_the_original_folder(name: str, tmp_path: Path) -> None:
    dtype = "bfloat16" if name == "bfloat16" else "float32"
    config, params, tokenizer, eos_ids = load_model(GOLDEN / name, dtype=dtype)
    folder = save_model(
        tmp_path / "a" / name, config, params, tokenizer=tokenizer, eos_ids=eos_ids
    )
    ours = tensors_in(folder)
    original = tensors_in(GOLDEN / name)
    if FAMILIES[config.family].other_names:  # saved as the published folders
        assert len(ours) == len(original)
        original = {}
    else:
        assert ours.keys() == original.keys()
    for key, tensor in original.items():
        assert ours[key].dtype == tensor.dtype
        np.testing.assert_array_equal(ours[key], tensor, strict=True)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["dtype"] == dtype
    assert raw["architectures"] == config_of(name)["architectures"]

    again = load_model(folder, dtype=dtype)
    assert again.config == config
    assert again.eos_ids == eos_ids
    jax.tree.map(np.testing.assert_array_equal, again.params, params)
    assert type(again.tokenizer) is type(tokenizer)


@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])
def test_stacked_layers_are_saved(name: str, tmp_path: Path) -> None:
    config, params, _, _ = load_model(GOLDEN / name)
    stacked = param_forms.stack_layers(config, params)
    assert param_forms.is_stacked(stacked)
    assert param_forms.stack_layers(config, stacked) is stacked
    back = param_forms.unstack_layers(config, stacked)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    folder = save_model(tmp_path / "m", config, stacked)
    again = load_model(folder)
    jax.tree.map(np.testing.assert_array_equal, again.params, params)
    deep = dataclasses.replace(config, num_layers=config.num_layers + 1)
    with pytest.raises(ValueError, match="has shape"):
        save_model(tmp_path / "deep", deep, stacked)


def test_shards_and_card(tmp_path: Path) -> None:
    config, params, _, _ = load_model(GOLDEN / "gpt2")
    folder = save_model(
        tmp_path / "gpt2",
        config,
        params,
        model_card="# A model\n",
        max_shard_bytes=30_000,
    )
    assert (folder / "README.md").read_text() == "# A model\n"
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert len(names) >= 3
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    num_bytes = sum(tensor.nbytes for tensor in tensors_in(folder).values())
    assert index["metadata"]["total_size"] == num_bytes
    again = load_model(folder)
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_cast(dtype: str, tmp_path: Path) -> None:
    params = init_params(SMALL, jax.random.key(0))
    folder = save_model(tmp_path / "m", SMALL, params, dtype=dtype)
    stored = tensors_in(folder)["model.embed_tokens.weight"]
    assert stored.dtype == jnp.dtype(dtype)
    loaded = load_model(folder, dtype=dtype).params
    wide = load_model(folder).params
    for leaf, narrow, other in zip(
        *(jax.tree.leaves(tree) for tree in (params, loaded, wide)), strict=True
    ):
        np.testing.assert_array_equal(narrow, leaf.astype(dtype), strict=True)
        np.testing.assert_array_equal(other, narrow.astype("float32"), strict=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_infinite_weights_are_refused(value: float, dtype: str, llama: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][3] = value

    change_tensors(llama, spoil)
    line = f"FOLDER/{WEIGHTS}: model.norm.weight holds NaN or infinite values"
    assert refusal(llama, dtype=dtype).startswith(line)


@pytest.mark.parametrize(
    ("dtype", "value", "holds_it"),
    [
        ("bfloat16", np.finfo(np.float32).max, "float32"),
        ("float16", np.finfo(np.float32).max, "float32"),
        ("float16", 7e4, "bfloat16"),
    ],
)
def test_overflowing_weights_are_refused(
    dtype: str, value: float, holds_it: str, llama: Path
) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][3] = value

    change_tensors(llama, spoil)
    loaded = load_model(llama, dtype=holds_it)
    assert loaded.params["final_norm"]["scale"].max() > 6e4
    line = f"model.norm.weight has values too large for {dtype}"
    assert line in refusal(llama, dtype=dtype)


# Names that differ, or that are not weights


@pytest.mark.parametrize("name", ["llama3", "gpt2", "opt"])
def test_names_of_a_bare_transformer(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / name, tmp_path / name)

    def strip(tensors: dict[str, np.ndarray]) -> None:
        for key in list(tensors):
            tensors[key.split(".", 1)[1]] = tensors.pop(key)

    change_tensors(folder, strip)
    a, b = (load_model(path).params for path in (folder, GOLDEN / name))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_buffers_and_tied_head_are_ignored(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "gpt2", tmp_path / "gpt2")

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["transformer.h.0.attn.bias"] = np.ones((1, 1, 96, 96), np.uint8)
        tensors["transformer.h.1.attn.masked_bias"] = np.array(-1e4, np.float32)
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]

    change_tensors(folder, add)
    assert load_model(folder).config.family == "gpt2"
    folder = shutil.copytree(GOLDEN / "llama", tmp_path / "llama")
    change_tensors(
        folder,
        lambda tensors: tensors.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
        ),
    )
    assert load_model(folder).config.family == "llama"


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama3", "qwen2_moe"])
def test_different_tied_head_is_refused(name: str, tmp_path: Path) -> None:
    # transformers 4 omits such a head, transformers 5 keeps it.
    folder = shutil.copytree(GOLDEN / name, tmp_path / name)
    embed, head = embed_and_head(read_config(folder))
    change_config(folder, tie_word_embeddings=True)
    change_tensors(folder, lambda tensors: tensors.update({head: tensors[embed]}))
    assert load_model(folder).config.tie_embeddings

    def disturb(tensors: dict[str, np.ndarray]) -> None:
        tensors[head] = tensors[embed].copy()
        tensors[head][-1, -1] += 1e-3

    change_tensors(folder, disturb)
    assert refusal(folder) == (
        f"FOLDER: {head} differs from {embed}, but config.json has "
        "tie_word_embeddings=true; with false the first is used"
    )
    change_config(folder, tie_word_embeddings=False)
    assert not load_model(folder).config.tie_embeddings
    change_config(folder, tie_word_embeddings=True)
    change_tensors(folder, lambda tensors: tensors.update({head: tensors[embed][1:]}))
    assert f"{head} has shape" in refusal(folder)


def test_tied_embeddings_under_the_name_of_the_head(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "gpt2", tmp_path / "gpt2")
    embed = "transformer.wte.weight"
    head = "lm_head.weight"
    change_tensors(folder, lambda tensors: tensors.update({head: tensors.pop(embed)}))
    a, b = (load_model(path).params for path in (folder, GOLDEN / "gpt2"))
    jax.tree.map(np.testing.assert_array_equal, a, b)


# config.json


def test_both_forms_of_rotary_keys() -> None:
    new = config_of("llama3")
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    rope = dict(new["rope_parameters"])
    old["rope_theta"] = rope.pop("rope_theta")
    for key in ("rope_type", "type"):
        kind = rope.pop("rope_type", "llama3")
        old["rope_scaling"] = rope | {key: kind}
        assert configs.from_hf(old) == configs.from_hf(new)
    assert configs.from_hf(new).rope_scaling == RopeScaling(
        factor=8.0,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_max_positions=24,
    )
    linear = old | {"rope_scaling": {"type": "linear", "factor": 4}}
    assert configs.from_hf(linear).rope_scaling == RopeScaling(
        kind="linear", factor=4.0
    )
    assert configs.to_hf(configs.from_hf(linear))["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    plain = old | {"rope_scaling": None, "rope_theta": 5e5}
    assert configs.from_hf(plain).rope_theta == 5e5
    assert configs.from_hf(plain).rope_scaling is None


def test_optional_config_keys() -> None:
    raw = config_of("llama")
    for key in ("head_dim", "num_key_value_heads", "rope_parameters", "architectures"):
        raw.pop(key)
    config = configs.from_hf(raw)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert config.rope_theta == 10_000.0
    gpt2 = config_of("gpt2")
    assert configs.from_hf(gpt2 | {"n_inner": None}).mlp_size == 128
    assert configs.from_hf(gpt2 | {"n_inner": 40}).mlp_size == 40


FLAGGED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, None),
        ({"use_sliding_window": False, "sliding_window": 8}, None),
        (FLAGGED | {"max_window_layers": 0, "layer_types": None}, 8),
        (FLAGGED | {"max_window_layers": 2, "layer_types": None}, None),
        (FLAGGED | {"layer_types": ["sliding_attention"] * 2}, 8),
    ],
)
def test_windows_of_qwen(changes: dict[str, Any], window: int | None) -> None:
    assert configs.from_hf(config_of("qwen2") | changes).window == window


def test_windows_of_mistral() -> None:
    raw = config_of("mistral")
    assert configs.from_hf(raw | {"sliding_window": None}).window is None
    raw.pop("sliding_window")
    assert configs.from_hf(raw).window == 4096


def test_unsupported_config_error_names_the_file(llama: Path) -> None:
    change_config(llama, head_dim=7)
    assert refusal(llama).startswith("FOLDER/config.json: head_dim=7 must be even")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"qkv_bias": True}, "out_bias"),
        ({"window": 8}, "window=8"),
        ({"gated": False}, "gated=False"),
        ({"norm": "layer"}, "norm='layer'"),
        ({"family": "gpt2"}, "family='gpt2'"),
        ({"family": "opt", "norm_eps": 1e-6}, "has no place"),
    ],
)
def test_config_that_its_family_cannot_express_is_refused(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    config = dataclasses.replace(SMALL, **changes)
    params = init_params(config, jax.random.key(0))
    with pytest.raises(ValueError, match=line):
        save_model(tmp_path / "m", config, params)
    assert not any(tmp_path.iterdir())


# Broken folders


def test_missing_files(llama: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere")
    assert "unknown model" in refusal("stdlib-byte")
    assert load_model("stdlib-bytes").config.num_layers == 4
    (llama / WEIGHTS).rename(llama / "other.safetensors")
    assert "neither model.safetensors nor" in refusal(llama)
    (llama / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pickled weights are never opened" in refusal(llama)
    (llama / "config.json").unlink()
    assert refusal(llama) == "FOLDER/config.json: no such file"


@pytest.mark.parametrize("text", ["", "{", "[]", "\ufffe", "[" * 100_000])
def test_config_must_be_a_json_object(text: str, llama: Path) -> None:
    (llama / "config.json").write_bytes(text.encode("utf-16-le"))
    assert refusal(llama).startswith("FOLDER/config.json: ")
    (llama / "config.json").write_text(text)
    assert refusal(llama).startswith("FOLDER/config.json: ")


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 100, 5_000, 50_000, 103_095])
def test_truncated_weights(num_bytes: int, llama: Path) -> None:
    data = (llama / WEIGHTS).read_bytes()
    (llama / WEIGHTS).write_bytes(data[:num_bytes])
    assert refusal(llama).startswith(f"FOLDER/{WEIGHTS}: ")


def test_invalid_weight_files(llama: Path) -> None:
    (llama / WEIGHTS).write_text("<html>not found</html>")
    assert refusal(llama).startswith(f"FOLDER/{WEIGHTS}: ")
    (llama / WEIGHTS).unlink()
    (llama / WEIGHTS).mkdir()
    assert refusal(llama).startswith(f"FOLDER/{WEIGHTS}: ")


def test_wrong_tensors(llama: Path) -> None:
    key = "model.layers.1.self_attn.k_proj.weight"
    weight_bytes = (llama / WEIGHTS).read_bytes()

    def break_with(change: Callable[[dict[str, np.ndarray]], Any]) -> str:
        (llama / WEIGHTS).write_bytes(weight_bytes)
        change_tensors(llama, change)
        return refusal(llama)

    line = break_with(lambda tensors: tensors.pop(key))
    assert line == f"FOLDER: 1 tensors missing: {key}"
    line = break_with(lambda tensors: tensors.update(score=tensors[key]))
    assert line == "FOLDER: 1 tensors unexpected: score"
    line = break_with(lambda tensors: tensors.update({key: tensors[key].T}))
    assert line == (
        f"FOLDER/{WEIGHTS}: {key} has shape (32, 16), config.json asks for (16, 32)"
    )
    line = break_with(lambda tensors: tensors.update({key: tensors[key].astype("i1")}))
    assert f"{key} is of type I8, supported are F32" in line


def test_a_config_of_another_model(llama: Path) -> None:
    change_config(llama, num_hidden_layers=3)
    assert "9 tensors missing: model.layers.2.input_layernorm.weight, " in refusal(
        llama
    )
    change_config(llama, num_hidden_layers=10**5)
    line = "100000 layers in config.json, but only 21 tensors"
    assert line in refusal(llama)
    change_config(llama, num_hidden_layers=10**9)
    assert "num_hidden_layers=1000000000 must be at most 100000" in refusal(llama)
    change_config(llama, num_hidden_layers=2, vocab_size=130)
    assert "has shape (128, 32), config.json asks for (130, 32)" in refusal(llama)


@pytest.mark.parametrize("dtype", ["int32", "float64"])
def test_invalid_dtypes(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"dtype=.* must be float32"):
        load_model(GOLDEN / "llama", dtype=dtype)


@pytest.mark.parametrize(
    "name",
    [
        "../llama/model.safetensors",
        "/etc/passwd.safetensors",
        "sub/model.safetensors",
        "model.bin",
        "..",
        "",
        7,
        None,
    ],
)
def test_index_refers_to_its_folder_only(name: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "sharded", tmp_path / "sharded")
    shutil.copytree(GOLDEN / "llama", tmp_path / "llama")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = name
    path.write_text(json.dumps(index))
    assert "is not the name of a safetensors file" in refusal(folder)


def test_broken_indices(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "sharded", tmp_path / "sharded")
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    second.rename(tmp_path / "kept")
    assert f"FOLDER/{second.name}: missing" in refusal(folder)
    shutil.copy(first, second)
    assert f"is in {first.name} too" in refusal(folder)
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {}}', "null"):
        (folder / "model.safetensors.index.json").write_text(text)
        assert refusal(folder).startswith("FOLDER/model.safetensors.index.json: ")


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.integers(0, 2_500), st.integers(0, 255)), min_size=1))
def test_corrupt_headers_raise_value_errors(
    tmp_path: Path, edits: list[tuple[int, int]]
) -> None:
    folder = tmp_path / "fuzzed"
    shutil.copytree(GOLDEN / "llama", folder, dirs_exist_ok=True)
    data = bytearray((folder / WEIGHTS).read_bytes())
    for place, byte in edits:
        data[place] = byte
    (folder / WEIGHTS).write_bytes(data)
    line = str(folder)
    try:
        load_model(folder)
    except ValueError as error:
        line = str(error)
    assert str(folder) in line
    assert "\n" not in line


# Saving over existing folders


def test_existing_folders_are_not_overwritten(tmp_path: Path) -> None:
    params = init_params(SMALL, jax.random.key(0))
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(folder, SMALL, params)  # an empty folder may be replaced
    with pytest.raises(ValueError, match="already exists"):
        save_model(folder, SMALL, params)
    (folder / "stale.txt").touch()
    save_model(folder, SMALL, params, overwrite=True)
    names = ["SHA256SUMS", "config.json", WEIGHTS]
    assert sorted(path.name for path in folder.iterdir()) == names
    target = tmp_path / "mine"
    target.mkdir()
    (target / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds no model"):
        save_model(target, SMALL, params, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "model"]


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    config, params, tokenizer, _ = load_model(GOLDEN / "tokenized")
    folder = save_model(
        tmp_path / "m",
        config,
        params,
        tokenizer=tokenizer,
        model_card="card",
        max_shard_bytes=40_000,
    )
    names = sorted({path.name for path in folder.iterdir()} - {"README.md"})
    assert len(names) >= 7
    rng = np.random.default_rng(0)
    for name in names:
        path = folder / name
        data = path.read_bytes()
        ends = [0, 8 * len(data) - 1]
        for bit in [*ends, *rng.integers(0, 8 * len(data), 8).tolist()]:
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            assert refusal(folder).startswith(f"FOLDER/{name}: is damaged")
        path.write_bytes(data[:-1])
        assert refusal(folder).startswith(f"FOLDER/{name}: is damaged")
        if name in ("config.json", "tokenizer.json", "SHA256SUMS"):
            with pytest.raises(ValueError, match=f"m/{name}: is damaged"):
                load_tokenizer(folder)
        if name != "SHA256SUMS":
            path.unlink()
            line = f"FOLDER/{name}: is missing, but SHA256SUMS lists it; delete SHA256"
            assert refusal(folder).startswith(line)
        path.write_bytes(data)
    assert load_model(folder).config == config


def test_folders_may_be_changed_on_purpose(tmp_path: Path) -> None:
    params = init_params(SMALL, jax.random.key(0))
    folder = save_model(tmp_path / "m", SMALL, params, model_card="card")
    # Further files, and the text for readers, are not listed.
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    (folder / "README.md").write_text("another card")
    assert load_model(folder).eos_ids == (3,)
    change_config(folder, eos_token_id=[4, 5])
    assert "delete SHA256SUMS if that is intended" in refusal(folder)
    with pytest.raises(ValueError, match=r"config\.json: is damaged or was changed"):
        read_config(folder)
    (folder / "SHA256SUMS").unlink()
    (folder / "generation_config.json").unlink()
    assert load_model(folder).eos_ids == (4, 5)
    # The list of another program has no digest of its own.
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {WEIGHTS}\n")
    assert refusal(folder).startswith("FOLDER/SHA256SUMS: is damaged; delete SHA256")


def test_interrupted_save_keeps_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = init_params(SMALL, jax.random.key(0))
    folder = save_model(tmp_path / "model", SMALL, params)
    before = tensors_in(folder)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    other = init_params(SMALL, jax.random.key(1))
    for owner, name in ((safetensors.numpy, "save_file"), (Path, "write_text")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                save_model(folder, SMALL, other, overwrite=True)
    # The last step: the new folder cannot be moved to its place.
    rename = Path.rename

    def refuse_new(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse_new)
        with pytest.raises(KeyboardInterrupt):
            save_model(folder, SMALL, other, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    jax.tree.map(np.testing.assert_array_equal, tensors_in(folder), before)


def test_parameters_of_another_shape_are_not_saved(tmp_path: Path) -> None:
    params = init_params(SMALL, jax.random.key(0))
    wide = dataclasses.replace(SMALL, mlp_size=16)
    with pytest.raises(ValueError, match=r"\['down'\]\['weight'\] has shape \(8, 12\)"):
        save_model(tmp_path / "m", wide, params)
    deep = dataclasses.replace(SMALL, num_layers=2)
    with pytest.raises(ValueError, match="not the tree"):
        save_model(tmp_path / "m", deep, params)
    line = "weights='int8' cannot be saved; save the parameters before quantize_params"
    with pytest.raises(ValueError, match=line):
        save_model(tmp_path / "m", SMALL, quantize_params(params, "int8"))
    assert not (tmp_path / "m").exists()
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        save_model(tmp_path / "m", SMALL, params, max_shard_bytes=0)


# Tokenizers of a folder


def test_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "tokenized", tmp_path / "t")
    loaded = load_model(folder)
    assert isinstance(loaded.tokenizer, Tokenizer)
    assert loaded.tokenizer.eos_ids == loaded.eos_ids == (1,)

    change_config(folder, eos_token_id=None)  # then the tokenizer's own
    assert load_model(folder).eos_ids == (1,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1, 999]}')
    loaded = load_model(folder)
    assert loaded.eos_ids == (2, 1)  # 999 is past the vocabulary

    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_model(folder).tokenizer
    assert tokenizer is not None
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat) == "hi!"

    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    assert "eos_token_id='</s>' must be integers" in refusal(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").unlink()
    assert refusal(folder).startswith("FOLDER/tokenizer.json: not a tokenizer")


@pytest.mark.parametrize(
    ("generation", "config", "union", "alone"),
    [
        ({"eos_token_id": 2}, 0, (2, 1), (2,)),
        ({"eos_token_id": [3, 1, 2, 3]}, None, (3, 1, 2), (3, 1, 2)),
        ({"eos_token_id": None}, [0], (0, 1), (0,)),
        ({}, 5, (5, 1), (5,)),
        (None, 5, (5, 1), (5,)),
        (None, 1, (1,), (1,)),
        (None, None, (1,), (1,)),
        ({"eos_token_id": []}, 5, (1,), ()),
        ({"eos_token_id": [2, 3, 4, 5, 6, 7]}, None, (2, 3, 4, 5, 6, 7, 1),
         (2, 3, 4, 5, 6, 7)),
    ],
)  # fmt: skip
def test_end_tokens_of_a_folder(
    tmp_path: Path, generation: Any, config: Any, union: Any, alone: Any
) -> None:
    folder = shutil.copytree(GOLDEN / "tokenized", tmp_path / "t")
    change_config(folder, eos_token_id=config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load_model(folder).eos_ids == union
    loaded = load_model(folder, end_tokens="generation_config")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.eos_ids == loaded.eos_ids == alone


@pytest.mark.usefixtures("no_type_checks")
def test_other_sources_of_end_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="end_tokens='all' must be 'union' or"):
        load_model(GOLDEN / "tokenized", end_tokens="all")  # ty: ignore


def test_added_tokens_of_other_files(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "tokenized", tmp_path / "t")
    change_config(folder, eos_token_id=None)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"eos_token": None}
    path.write_text(json.dumps(settings))
    special_map = {"eos_token": "<|role|>", "pad_token": {"content": "<pad>"}}
    (folder / "special_tokens_map.json").write_text(json.dumps(special_map))
    (folder / "added_tokens.json").write_text('{"<pad>": 320, "<think>": 321}')
    loaded = load_model(folder)
    tokenizer = loaded.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    assert loaded.eos_ids == (2,)
    assert tokenizer.encode("<think><pad>", add_special_tokens=False) == [321, 320]
    assert tokenizer.decode([321, 320]) == "<think>"

    (folder / "chat_template.jinja").write_text("d")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    tokenizer = load_model(folder).tokenizer
    assert tokenizer is not None
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat) == "d"
    assert tokenizer.apply_chat_template(chat, tools=[]) == "t"

    (folder / "added_tokens.json").write_text('{"<pad>": "x"}')
    assert "token id 'x' must be a whole number" in refusal(folder)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_model(GOLDEN / "llama").tokenizer is None
    params = init_params(SMALL, jax.random.key(0))
    folder = save_model(tmp_path / "m", SMALL, params, tokenizer=ByteTokenizer(257))
    loaded = load_model(folder)
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    assert loaded.tokenizer.eos_ids == loaded.eos_ids == (256,)
    (folder / "vocab.json").write_text("{}")  # an unsupported tokenizer
    loaded = load_model(folder)
    assert loaded.tokenizer is None
    assert loaded.eos_ids == (256,)
