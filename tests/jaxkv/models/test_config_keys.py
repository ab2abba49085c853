"""Every key of a config.json is read, known to be harmless, or refused by name."""

import json
from typing import Any

import pytest

from jaxkv.models.huggingface import configs, positions, windows
from jaxkv.models.huggingface import harmless as huggingface_harmless
from jaxkv.models.huggingface.families import FAMILIES
from scaling.costs import count_parameters
from scaling.shapes import describe_config, describe_huggingface
from tests.support.folders import GOLDEN

KEYS = json.loads((GOLDEN / "hf_config_keys.json").read_text())["defaults"]
PUBLISHED = json.loads((GOLDEN / "published_configs.json").read_text())
HARMLESS = {key for keys in huggingface_harmless.HARMLESS_KEYS.values() for key in keys}
# Keys of transformers 4 for every model, in addition to those of transformers 5.
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
    """Returns a golden config.json, with a sliding window if asked and supported."""
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    if FAMILIES[name].windows == "flagged":
        raw |= {"use_sliding_window": True, "sliding_window": 8}
        raw |= {"max_window_layers": 0, "layer_types": None}
    return raw


def another(key: str, value: Any) -> Any:
    """Returns another value of the same type."""
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


def test_layers_without_positions_have_the_window() -> None:
    raw = {"model_type": "smollm3", "hidden_size": 16, "vocab_size": 9}
    raw |= {"num_attention_heads": 4, "num_hidden_layers": 8, "intermediate_size": 8}
    raw |= {"use_sliding_window": True, "sliding_window": 16}
    raw |= {"max_position_embeddings": 64}
    shape = describe_huggingface(raw)
    assert shape.windows == (None, None, None, 16) * 2
    assert shape == describe_config(configs.from_hf(raw))


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in KEYS for key in KEYS[name]]
)
def test_every_transformers_key_is_read_or_harmless(name: str, key: str) -> None:
    raw = config_of(name)
    family = FAMILIES[name]
    harmless = HARMLESS | {*family.harmless}
    if family.windows in ("off", "listed"):
        harmless |= windows.WINDOW_KEYS
    if family.windows == "listed":  # `layer_types` decides
        harmless |= {"use_sliding_window"}
    changed = raw | {key: another(key, raw.get(key, KEYS[name][key]))}
    if key in harmless - {*family.keys}:
        assert configs.from_hf(changed) == configs.from_hf(raw)
        return
    try:
        is_read = configs.from_hf(changed) != configs.from_hf(raw)
    except ValueError as error:
        is_read = "is not read here" not in str(error)
    assert is_read


@pytest.mark.parametrize("name", KEYS)
def test_served_models_have_the_counted_size(name: str) -> None:
    raw = config_of(name)
    num_served = 0
    files = [
        raw | {key: another(key, raw.get(key, KEYS[name][key]))} for key in KEYS[name]
    ]
    for key in FAMILIES[name].keys:
        files += [raw | {key: None}, {x: raw[x] for x in raw if x != key}]
    for file in files:
        try:
            served = describe_config(configs.from_hf(file))
        except ValueError:
            continue
        num_served += 1
        assert describe_huggingface(file) == served
    assert num_served > len(files) // 2


def test_families_without_serving_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = FAMILIES["llama"]._replace(architecture="ToyLM", servable=False)
    monkeypatch.setitem(FAMILIES, "toy", counted)
    for key, value in (("architectures", "ToyLM"), ("model_type", "toy")):
        line = refusal({key: value})
        assert line.startswith(f"architecture {value!r} is not supported, only those ")
        assert "toy" not in line.partition("only")[2]


# Keys of the original `config.json`, without `auto_map` and `quantization_config`.
DEEPSEEK_V3 = """
architectures attention_bias attention_dropout bos_token_id eos_token_id ep_size
first_k_dense_replace hidden_act hidden_size initializer_range intermediate_size
kv_lora_rank max_position_embeddings model_type moe_intermediate_size moe_layer_freq
n_group n_routed_experts n_shared_experts norm_topk_prob num_attention_heads
num_experts_per_tok num_hidden_layers num_key_value_heads num_nextn_predict_layers
q_lora_rank qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_scaling rope_theta
routed_scaling_factor scoring_func tie_word_embeddings topk_group topk_method
torch_dtype transformers_version use_cache v_head_dim vocab_size
""".split()


def test_every_key_of_deepseek_v3_is_in_its_entry() -> None:
    family = FAMILIES["deepseek_v3"]
    raw: dict[str, Any] = dict.fromkeys(DEEPSEEK_V3, 1)
    huggingface_harmless.refuse_unknown(family, raw, positions.ROPE_KEYS)
    for_training = {"aux_loss_alpha", "moe_router_bias_update_rate"}
    assert raw.keys() | for_training > family.keys.keys()


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_transformers_4(name: str) -> None:
    raw = config_of(name)
    old = dict.fromkeys(OLD_KEYS, "anything") | {"add_cross_attention": False}
    assert configs.from_hf(raw | old) == configs.from_hf(raw)
    assert {*OLD_KEYS} - HARMLESS == {"add_cross_attention"}


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model["name"])
def test_published_models_are_read(model: dict[str, Any]) -> None:
    config = configs.from_hf(model["config"])
    count = count_parameters(describe_config(config)).total
    assert count == model["parameters"]
    window = model["config"].get("sliding_window")
    assert config.window == (window if config.family == "mistral" else None)


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        (
            "llama",
            {"logit_scale": 0.5},
            "logit_scale=0.5 may change the logits of Llama",
        ),
        ("llama", {"new_feature": False}, "new_feature=False may change"),
        ("llama", {"n_layer": 1, "n_embd": 2}, "n_layer=1, n_embd=2 may change"),
        ("llama", {"auto_map": {"AutoModel": "a.B"}}, "auto_map is not supported: "),
        ("llama", {"per_layer_config": {"0": {}}}, "per_layer_config={'0': {}} may"),
        ("llama", {"layer_norm_eps": 0.1}, "layer_norm_eps=0.1 may change"),
        (
            "gpt2",
            {"rope_theta": 1e4},
            "rope_theta=10000.0 may change the logits of GPT2",
        ),
        ("gpt2", {"hidden_act": "relu"}, "hidden_act='relu' may change"),
        ("mixtral", {"moe_intermediate_size": 8}, "moe_intermediate_size=8 may"),
        ("opt", {"head_dim": 4}, "head_dim=4 may change the logits of OPTForCausalLM"),
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


SLIDING = ["sliding_attention"] * 2
FLAGGED = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llama": [
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM"),
        (
            {"architectures": [], "model_type": "t5"},
            "architecture 't5' is not supported",
        ),
        ({"architectures": [{}]}, "architecture {} is not supported"),
        ({"hidden_size": "big"}, "hidden_size='big' must be a"),
        ({"hidden_size": -1}, "hidden_size=-1 must be a whole"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True must be"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        (
            {"num_key_value_heads": 3},
            "num_q_heads=4 must be a multiple of num_kv",
        ),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        (
            {"head_dim": None, "hidden_size": 30},
            "hidden_size=30 must be a multiple of num_q_heads=4",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must "),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not"),
        ({"hidden_act": ["silu"]}, "hidden_act=['silu'] is not"),
        (
            {"rope_parameters": {"type": "dynamic", "factor": 4}},
            "rope_type='dynamic' is not suppor",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            "factor=None must be a number a",
        ),
        ({"rope_parameters": [4]}, "rope_parameters=[4] must be an object"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters={'full_attention': {'rope_type': 'default'}}: rotary key",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not"),
        ({"model_type": "mistral"}, "model_type='mistral' contradicts arch"),
        ({"model_type": 7}, "model_type=7 contradicts architecture 'Llama"),
        (
            {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]},
            "architecture ['LlamaForCausalLM', 'MistralForCausalLM'] is not supported",
        ),
        ({"use_sliding_window": True}, "use_sliding_window=True is not"),
        ({"sliding_window": 8}, "sliding_window=8 is not supported, only null"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers of 2"),
        ({"layer_types": SLIDING}, "layer_types names 2 lay"),
        ({"layer_types": ["mamba", "mamba"]}, "layer_types=['mamba', 'mamba'] must"),
        (
            {"original_max_position_embeddings": 16},
            "original_max_position_embeddings=16 has no effect with",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling={'factor': 2.0} con"),
        (
            {"rope_parameters": {"rope_type": "default", "factor": 2.0}},
            "factor=2.0 has no effect with rope_type='default'",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "type": "linear"}},
            "rope_type='default' contradicts type='linear'",
        ),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta=10^400 mus"),
        ({"rope_parameters": {"rope_theta": 1e39}}, "rope_theta=1e+39 must be"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta=True must be"),
        ({"rope_parameters": {"rope_theta": "1"}}, "rope_theta='1' must be a "),
        ({"hidden_size": 10**400}, "hidden_size=10^400 must be at most 214748"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648 must be at most 214748"),
    ],
    "opt": [
        ({"do_layer_norm_before": False}, "do_layer_norm_before=False is "),
        ({"word_embed_proj_dim": 16}, "word_embed_proj_dim=16 is not "),
    ],
    "gpt2": [
        ({"scale_attn_weights": False}, "scale_attn_weights=False is"),
        ({"num_hidden_layers": 1}, "num_hidden_layers=1 contradicts n_layer=2"),
        ({"hidden_size": 64}, "hidden_size=64 contradicts n_embd=32"),
        ({"num_attention_heads": 2}, "num_attention_heads=2 contradicts n_hea"),
        ({"max_position_embeddings": 9}, "max_position_embeddings=9 contradicts"),
        ({"add_cross_attention": 0}, "add_cross_attention=0 is not supported"),
    ],
    "qwen2": [
        (
            {"use_sliding_window": False, "layer_types": SLIDING},
            "layer_types names 2 layers of sliding_attention, but there is no sliding",
        ),
    ],
    "mistral": [
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types names 1 layers of sliding_attention, but MistralForCausalLM",
        ),
        ({"use_sliding_window": False}, "use_sliding_window=False contradict"),
    ],
    "mixtral": [
        ({"num_local_experts": 0}, "num_local_experts=0 must be a "),
        ({"num_experts_per_tok": 7}, "top_k=7 must be at most"),
        ({"router_aux_loss_coef": -1}, "router_aux_loss_coef=-1 must"),
        ({"num_experts": 5}, "num_experts=5 contradicts num_local_experts"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        (
            {"layer_types": ["full_attention", "full_attention"]},
            "layer_types names 0 layers of sliding_attention, but MixtralForCausalLM",
        ),
        ({"router_aux_loss_coef": 10**400}, "router_aux_loss_coef=10^400 mu"),
    ],
    "qwen2_moe": [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not"),
        (FLAGGED, "use_sliding_window=True is not"),
        (
            {"layer_types": SLIDING},
            "layer_types names 2 layers of sliding_attention, but there is no sliding",
        ),
    ],
    "qwen3_moe": [
        ({"mlp_only_layers": [1]}, "mlp_only_layers=[1] is not"),
        (
            {"mlp_only_layers": [0, 1]},
            "mlp_only_layers=[0, 1] is not supported, only the first layers",
        ),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or"),
        (
            {"num_experts": 5, "num_local_experts": 6},
            "num_local_experts=6 contradicts num_experts=5",
        ),
    ],
    "llama3": [
        (
            {"original_max_position_embeddings": 16},
            "original_max_position_embeddings of the rotary object=24 contradicts",
        ),
        ({"rope_theta": 7.0}, "rope_theta of the rotary object=10000.0 contr"),
    ],
}
"""Unsupported, contradictory or invalid values, by family."""


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
)
def test_unsupported_or_contradictory_values_are_refused(
    name: str, changes: dict[str, Any], line: str
) -> None:
    raw = json.loads((GOLDEN / name / "config.json").read_text()) | changes
    assert refusal(raw).startswith(line)


def test_aliases_are_accepted() -> None:
    gpt2 = config_of("gpt2")
    mixtral = config_of("mixtral")
    renamed = {"num_hidden_layers": gpt2["n_layer"], "hidden_size": gpt2["n_embd"]}
    assert configs.from_hf(gpt2 | renamed) == configs.from_hf(gpt2)
    other_keys = {key: gpt2[key] for key in gpt2 if key not in ("n_layer", "n_embd")}
    assert configs.from_hf(other_keys | renamed) == configs.from_hf(gpt2)
    num = mixtral.pop("num_local_experts")
    experts = configs.from_hf(mixtral | {"num_experts": num}).experts
    assert experts is not None
    assert experts.num_experts == num


def test_nulls_and_defaults_equal_transformers() -> None:
    mistral = config_of("mistral")
    qwen2 = config_of("qwen2")
    heads = {"num_attention_heads": 16, "head_dim": 2, "num_key_value_heads": None}
    assert configs.from_hf(mistral | heads).num_kv_heads == 16
    heads.pop("num_key_value_heads")
    mistral.pop("num_key_value_heads")
    assert configs.from_hf(mistral | heads).num_kv_heads == 8
    qwen2.pop("sliding_window")
    assert configs.from_hf(qwen2).window == 4096
    assert configs.from_hf(qwen2 | {"sliding_window": None}).window is None
    # Layers without experts may be listed in any order.
    moe = config_of("qwen3_moe") | {"num_hidden_layers": 3}
    experts = configs.from_hf(moe | {"mlp_only_layers": [1, 0]}).experts
    assert experts is not None
    assert experts.num_dense_layers == 2


def test_original_positions_outside_the_rotary_object() -> None:
    raw = json.loads((GOLDEN / "llama3" / "config.json").read_text())
    rope = dict(raw["rope_parameters"])
    original = rope.pop("original_max_position_embeddings")
    moved = raw | {"rope_parameters": rope, positions.ORIGINAL: original}
    assert configs.from_hf(moved) == configs.from_hf(raw)


STRANGE = (
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    10**400,
    -(10**400),
    2**31,
    1.5,
    -0.0,
    1e-300,
    float("nan"),
    float("inf"),
    1e308,
    "",
    "a\nb",
    "é" * 999,
    [],
    [1],
    [None],
    [[]],
    {},
    {"a": 1},
    {"rope_type": []},
    {"rope_type": "llama3", "factor": "x"},
    {"rope_theta": {}},
    ["sliding_attention"] * 2,
    [2**70, -1],
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x == "llama" else pytest.mark.slow) for x in KEYS],
)
def test_random_configs_load_or_fail_in_one_line(name: str) -> None:
    raw = config_of(name)
    keys = {*KEYS[name], *positions.ROPE_KEYS, *windows.WINDOW_KEYS, "unknown"}
    num_refused = 0
    # Families share the readers of most keys: a third of the values for each key.
    step = 1 if name == "llama" else 3
    for place, key in enumerate(sorted(keys)):
        for value in STRANGE[place % step :: step]:
            try:
                configs.from_hf(raw | {key: value})
            except ValueError as error:
                num_refused += 1
                line = str(error)
                assert line.isprintable(), (key, value)
                assert len(line) < 500, (key, value)
    assert num_refused > len(keys)
