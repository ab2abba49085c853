"""Every key of a config.json is read, known to be harmless, or refused by name."""

import json
from typing import Any

import pytest

from jaxkv.models.huggingface import configs, positions
from jaxkv.models.huggingface import harmless as huggingface_harmless
from jaxkv.models.huggingface.families import FAMILIES
from scaling.costs import parameters
from scaling.shapes import from_model
from tests.support.folders import GOLDEN

KEYS = json.loads((GOLDEN / "hf_config_keys.json").read_text())["defaults"]
PUBLISHED = json.loads((GOLDEN / "published_configs.json").read_text())
HARMLESS = {key for keys in huggingface_harmless.KEYS.values() for key in keys}
# What transformers 4 wrote of every model, beside the keys of transformers 5.
OLD_KEYS = """
_name_or_path add_cross_attention bad_words_ids begin_suppress_tokens
decoder_start_token_id diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
forced_bos_token_id forced_eos_token_id is_decoder length_penalty max_length min_length
no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix
remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id
suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
tokenizer_class top_k top_p torch_dtype torchscript typical_p use_bfloat16
""".split()


def config_of(name: str) -> dict[str, Any]:
    """A golden config.json, with a window where the family has one if it is asked."""
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    if FAMILIES[name].windows == "flagged":
        raw |= {"use_sliding_window": True, "sliding_window": 8}
        raw |= {"max_window_layers": 0, "layer_types": None}
    return raw


def another(key: str, value: Any) -> Any:
    """A value of the same kind that asks for something else."""
    if key == "layer_types":
        return ["full_attention", "sliding_attention"]
    if key.endswith("_layers") or value is None:
        return 1 if value is None else 7
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value + 1
    return {"strange": 1} if isinstance(value, dict | list) else "strange"


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as info:
        configs.from_hf(raw)
    return str(info.value)


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in KEYS for key in KEYS[name]]
)
def test_every_key_of_transformers_counts_or_is_harmless(name: str, key: str) -> None:
    raw, family = config_of(name), FAMILIES[name]
    harmless = HARMLESS | {*family.harmless}
    if family.windows == "off":
        harmless |= positions.WINDOW_KEYS
    changed = raw | {key: another(key, raw.get(key, KEYS[name][key]))}
    if key in harmless - {*family.expert_keys}:
        assert configs.from_hf(changed) == configs.from_hf(raw)
        return
    try:
        is_read = configs.from_hf(changed) != configs.from_hf(raw)
    except ValueError as error:
        is_read = "is not read here" not in str(error)
    assert is_read


@pytest.mark.parametrize("name", KEYS)
def test_what_transformers_4_wrote_of_every_model(name: str) -> None:
    raw = config_of(name)
    old = dict.fromkeys(OLD_KEYS, "anything") | {"add_cross_attention": False}
    assert configs.from_hf(raw | old) == configs.from_hf(raw)
    assert {*OLD_KEYS} - HARMLESS == {"add_cross_attention"}


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model["name"])
def test_published_models_are_read(model: dict[str, Any]) -> None:
    config = configs.from_hf(model["config"])
    count = parameters.parameters(from_model.describe(config)).total
    assert count == model["parameters"]
    window = model["config"].get("sliding_window")
    assert config.window == (window if config.family == "mistral" else None)


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("llama", {"logit_scale": 0.5}, "logit_scale=0.5 may change what LlamaFor"),
        ("llama", {"new_feature": False}, "new_feature=False may change"),
        ("llama", {"n_layer": 1, "n_embd": 2}, "n_layer=1, n_embd=2 may change"),
        ("llama", {"auto_map": {"AutoModel": "a.B"}}, "auto_map is not supported: "),
        ("llama", {"per_layer_config": {"0": {}}}, "per_layer_config={'0': {}} may"),
        ("llama", {"layer_norm_eps": 0.1}, "layer_norm_eps=0.1 may change"),
        ("gpt2", {"rope_theta": 1e4}, "rope_theta=10000.0 may change what GPT2LM"),
        ("gpt2", {"hidden_act": "relu"}, "hidden_act='relu' may change"),
        ("mixtral", {"moe_intermediate_size": 8}, "moe_intermediate_size=8 may"),
        ("opt", {"head_dim": 4}, "head_dim=4 may change what OPTForCausalLM computes"),
        ("llama", {"a\nb": "c" * 999}, r"a\\nb='ccc"),
    ],
)
def test_unknown_keys_are_refused_by_name(
    name: str, changes: dict[str, Any], line: str
) -> None:
    raw = config_of(name)
    assert refusal(raw | changes).startswith(line.replace(r"\\", "\\"))
    empty = dict.fromkeys(changes) | dict(zip(changes, ([], {}), strict=False))
    assert configs.from_hf(raw | empty) == configs.from_hf(raw)


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("llama", {"model_type": "mistral"}, "model_type='mistral' contradicts arch"),
        ("llama", {"model_type": 7}, "model_type=7 contradicts architecture 'Llama"),
        (
            "llama",
            {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]},
            "architecture ['LlamaForCausalLM', 'MistralForCausalLM'] is not supported",
        ),
        ("gpt2", {"num_hidden_layers": 1}, "num_hidden_layers=1 contradicts n_layer=2"),
        ("gpt2", {"hidden_size": 64}, "hidden_size=64 contradicts n_embd=32"),
        ("gpt2", {"num_attention_heads": 2}, "num_attention_heads=2 contradicts n_hea"),
        (
            "gpt2",
            {"max_position_embeddings": 9},
            "max_position_embeddings=9 contradicts",
        ),
        ("mixtral", {"num_experts": 5}, "num_experts=5 contradicts num_local_experts"),
        (
            "qwen3_moe",
            {"num_experts": 5, "num_local_experts": 6},
            "num_local_experts=6 contradicts num_experts=5",
        ),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        # Windows
        ("llama", {"use_sliding_window": True}, "use_sliding_window=True is not supp"),
        (
            "llama",
            {"sliding_window": 8},
            "sliding_window=8 is not supported, only null",
        ),
        (
            "llama",
            {"layer_types": ["full_attention"]},
            "layer_types names 1 layers of 2",
        ),
        (
            "llama",
            {"layer_types": ["sliding_attention"] * 2},
            "layer_types names 2 lay",
        ),
        (
            "llama",
            {"layer_types": ["mamba"] * 2},
            "layer_types=['mamba', 'mamba'] must",
        ),
        (
            "mistral",
            {"use_sliding_window": False},
            "use_sliding_window=False contradict",
        ),
        (
            "mixtral",
            {"layer_types": ["full_attention"] * 2},
            "layer_types names 0 layers of sliding_attention, but MixtralForCausalLM",
        ),
        (
            "qwen2_moe",
            {"layer_types": ["sliding_attention"] * 2},
            "layer_types names 2 layers of sliding_attention, but there is no sliding",
        ),
        (
            "qwen2",
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2},
            "layer_types names 2 layers of sliding_attention, but there is no sliding",
        ),
        # Rotary positions
        (
            "llama3",
            {"original_max_position_embeddings": 16},
            "original_max_position_embeddings of the rotary object=24 contradicts",
        ),
        (
            "llama",
            {"original_max_position_embeddings": 16},
            "original_max_position_embeddings=16 means nothing with rope_type='defau",
        ),
        (
            "llama3",
            {"rope_theta": 7.0},
            "rope_theta of the rotary object=10000.0 contr",
        ),
        (
            "llama",
            {"rope_scaling": {"factor": 2.0}},
            "rope_scaling={'factor': 2.0} con",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "factor": 2.0}},
            "factor=2.0 means nothing with rope_type='default'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "type": "linear"}},
            "rope_type='default' contradicts type='linear'",
        ),
        # Numbers
        (
            "llama",
            {"rope_parameters": {"rope_theta": 10**400}},
            "rope_theta=10^400 mus",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e39}},
            "rope_theta=1e+39 must be",
        ),
        ("llama", {"rope_parameters": {"rope_theta": True}}, "rope_theta=True must be"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": "1"}},
            "rope_theta='1' must be a ",
        ),
        (
            "llama",
            {"hidden_size": 10**400},
            "hidden_size=10^400 must be at most 214748",
        ),
        (
            "llama",
            {"vocab_size": 2**31},
            "vocab_size=2147483648 must be at most 214748",
        ),
        (
            "mixtral",
            {"router_aux_loss_coef": 10**400},
            "router_aux_loss_coef=10^400 mu",
        ),
        ("gpt2", {"add_cross_attention": 0}, "add_cross_attention=0 is not supported"),
    ],
)
def test_contradictions_and_numbers_are_refused(
    name: str, changes: dict[str, Any], line: str
) -> None:
    raw = json.loads((GOLDEN / name / "config.json").read_text()) | changes
    assert refusal(raw).startswith(line)


def test_either_of_two_names_will_do() -> None:
    gpt2, mixtral = config_of("gpt2"), config_of("mixtral")
    renamed = {"num_hidden_layers": gpt2["n_layer"], "hidden_size": gpt2["n_embd"]}
    assert configs.from_hf(gpt2 | renamed) == configs.from_hf(gpt2)
    kept = {key: gpt2[key] for key in gpt2 if key not in ("n_layer", "n_embd")}
    assert configs.from_hf(kept | renamed) == configs.from_hf(gpt2)
    num = mixtral.pop("num_local_experts")
    found = configs.from_hf(mixtral | {"num_experts": num}).experts
    assert found is not None
    assert found.num_experts == num


def test_nulls_and_defaults_mean_what_transformers_takes_them_to() -> None:
    mistral, qwen2 = config_of("mistral"), config_of("qwen2")
    heads = {"num_attention_heads": 16, "head_dim": 2, "num_key_value_heads": None}
    assert configs.from_hf(mistral | heads).num_kv_heads == 16
    heads.pop("num_key_value_heads")
    mistral.pop("num_key_value_heads")
    assert configs.from_hf(mistral | heads).num_kv_heads == 8
    qwen2.pop("sliding_window")
    assert configs.from_hf(qwen2).window == 4096
    assert configs.from_hf(qwen2 | {"sliding_window": None}).window is None
    # Layers without experts may stand in any order.
    moe = config_of("qwen3_moe") | {"num_hidden_layers": 3}
    found = configs.from_hf(moe | {"mlp_only_layers": [1, 0]}).experts
    assert found is not None
    assert found.num_dense_layers == 2


def test_original_positions_beside_the_rotary_object() -> None:
    raw = json.loads((GOLDEN / "llama3" / "config.json").read_text())
    rope = dict(raw["rope_parameters"])
    original = rope.pop("original_max_position_embeddings")
    moved = raw | {"rope_parameters": rope, positions.ORIGINAL: original}
    assert configs.from_hf(moved) == configs.from_hf(raw)


STRANGE = (
    *(None, True, False, 0, 1, -1, 3, 10**400, -(10**400), 2**31, 1.5, -0.0, 1e-300),
    *(float("nan"), float("inf"), 1e308, "", "a\nb", "é" * 999, [], [1], [None]),
    *([[]], {}, {"a": 1}, {"rope_type": []}, {"rope_type": "llama3", "factor": "x"}),
    *({"rope_theta": {}}, ["sliding_attention"] * 2, [2**70, -1]),
)


@pytest.mark.parametrize("name", KEYS)
def test_whatever_a_file_holds_is_a_model_or_one_line(name: str) -> None:
    raw = config_of(name)
    keys = {*KEYS[name], *positions.KEYS, *positions.WINDOW_KEYS, "unknown"}
    num_refused = 0
    for key in keys:
        for value in STRANGE:
            try:
                configs.from_hf(raw | {key: value})
            except ValueError as error:
                num_refused += 1
                line = str(error)
                assert line.isprintable(), (key, value)
                assert len(line) < 500, (key, value)
    assert num_refused > len(keys)
