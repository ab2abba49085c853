"""Tables of families with recurrent layers; defaults are those of transformers.

Functions give the rows of tensors with several parts, and replace other forms of keys.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxkv.models.huggingface.dense_families import (
    DENSE_FAMILIES,
    LLAMA,
    OLMO2,
    UNBIASED,
)
from jaxkv.models.huggingface.family import Family, RawConfig, key, keys_of
from jaxkv.models.huggingface.mixture_families import DEEPSEEK_V2, MIXTRAL, QWEN_MOE
from jaxkv.models.huggingface.values import (
    MAX_LAYERS,
    parse_flag,
    parse_positive_number,
    parse_size,
    shorten,
)
from jaxkv.models.huggingface.windows import FULL, RECURRENT

if TYPE_CHECKING:
    from jaxkv.models.config import ModelConfig, RecurrenceConfig

_ROTATION_KEYS = "rope_parameters", "rope_scaling", "rope_theta"


def _blocks(groups: int, **sizes: int) -> dict[str, list[int]]:
    """Returns the rows of blocks that follow each other in every group."""
    result: dict[str, list[int]] = {name: [] for name in sizes}
    start = 0
    for _ in range(groups):
        for name, size in sizes.items():
            result[name] += range(start, start + size)
            start += size
    return result


def _recurrence_of(config: "ModelConfig") -> "RecurrenceConfig":
    assert config.recurrence is not None  # only recurrent layers have such tensors
    return config.recurrence


def _gated_query_rows(config: "ModelConfig") -> Mapping[str, Sequence[int]]:
    """Returns the rows of queries and gates: of each head one after the other."""
    return _blocks(config.num_q_heads, query=config.head_dim, gate=config.head_dim)


def _key_head_rows(config: "ModelConfig") -> Mapping[str, Sequence[int]]:
    """Returns the rows of Qwen3-Next's projection, which are grouped by key head."""
    r = _recurrence_of(config)
    width = r.num_outputs // r.num_key_heads
    rows = _blocks(r.num_key_heads, q=r.key_dim, k=r.key_dim, v=width, gate=width)
    return {"mixed": rows["q"] + rows["k"] + rows["v"], "gate": rows["gate"]}


def _strength_rows(config: "ModelConfig") -> Mapping[str, Sequence[int]]:
    """Returns the rows of strengths and decays, which are grouped by key head."""
    r = _recurrence_of(config)
    size = r.num_value_heads // r.num_key_heads
    return _blocks(r.num_key_heads, strength=size, decay=size)


def _mamba_rows(config: "ModelConfig") -> Mapping[str, Sequence[int]]:
    """Returns the rows of Mamba 2's projection; C are queries, B keys and x values."""
    r = _recurrence_of(config)
    keys = r.num_key_heads * r.key_dim
    rows = _blocks(
        1, gate=r.num_outputs, x=r.num_outputs, b=keys, c=keys, decay=r.num_decays
    )
    return {
        "gate": rows["gate"],
        "mixed": rows["c"] + rows["b"] + rows["x"],
        "decay": rows["decay"],
    }


def _mamba_channels(config: "ModelConfig") -> Mapping[str, Sequence[int]]:
    """Returns the channels of Mamba 2's convolution."""
    r = _recurrence_of(config)
    keys = r.num_key_heads * r.key_dim
    rows = _blocks(1, x=r.num_outputs, b=keys, c=keys)
    return {"mixed": rows["c"] + rows["b"] + rows["x"]}


def _mamba_modules(name: str) -> dict[str, tuple[str, ...]]:
    """Returns the modules of Mamba 2, given their first part in a folder."""
    return {
        ".mixer.mixed": (f"{name}.in_proj:mixed",),
        ".mixer.gate": (f"{name}.in_proj:gate",),
        ".mixer.decay": (f"{name}.in_proj:decay",),
        ".mixer.kernel": (f"{name}.conv1d:mixed.weight",),
        ".mixer.kernel_bias": (f"{name}.conv1d:mixed.bias",),
        ".mixer.decay_rate": (f"{name}.A_log",),
        ".mixer.decay_bias": (f"{name}.dt_bias",),
        ".mixer.skip": (f"{name}.D",),
        ".mixer.scale": (f"{name}.norm.weight",),
    }


def _list_layers(
    raw: RawConfig, full_layers: Iterable[int], period: int = 0
) -> RawConfig:
    """Returns a file with `layer_types`; if it has none, these layers have attention.

    A period adds every n-th layer.
    """
    num_layers = raw.get("num_hidden_layers")
    is_known = type(num_layers) is int and 0 < num_layers <= MAX_LAYERS
    if raw.get("layer_types") is not None or not is_known:
        return raw
    full = {*full_layers}
    if period:
        full |= {*range(period - 1, num_layers, period)}
    kinds = [FULL if x in full else RECURRENT for x in range(num_layers)]
    return {**raw, "layer_types": kinds}


def _rewrite_qwen(raw: RawConfig) -> RawConfig:
    period = raw.pop("full_attention_interval", None)
    period = 4 if period is None else parse_size("full_attention_interval", period)
    return _list_layers(raw, (), period)


def _rewrite_olmo(raw: RawConfig) -> RawConfig:
    """Derives the sizes of heads; a base of null means no rotation."""
    num_layers = raw.get("num_hidden_layers")
    last = num_layers - 1 if type(num_layers) is int and num_layers < 4 else 3
    raw = _list_layers(raw, (last,), 4)
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if raw.get(name) is None:
            raw[name] = raw.get("num_attention_heads")
    heads = raw["linear_num_key_heads"]
    hidden = raw.get("hidden_size")
    width = raw.get("linear_key_head_dim")
    if width is None and type(hidden) is int and type(heads) is int and heads > 0:
        raw["linear_key_head_dim"] = width = int(0.75 * hidden / heads)
    if raw.get("linear_value_head_dim") is None and type(width) is int:
        raw["linear_value_head_dim"] = 2 * width
    objects = [raw[name] for name in _ROTATION_KEYS[:2] if raw.get(name)]
    # The first with a base decides; `positions` refuses two different objects.
    bases = [
        x["rope_theta"]
        for x in (*objects, raw)
        if isinstance(x, Mapping) and "rope_theta" in x
    ]
    is_agreed = len(objects) < 2 or objects[0] == objects[1]
    has_rope = not is_agreed or not bases or bases[0] is not None
    return _choose_positions(raw, has_rope=has_rope)


def _choose_positions(raw: RawConfig, *, has_rope: bool) -> RawConfig:
    """Returns a file with its rotary keys, or without them."""
    if not has_rope:
        raw = {name: value for name, value in raw.items() if name not in _ROTATION_KEYS}
    return {**raw, "position_embedding_type": "rope" if has_rope else None}


_KIMI_LAYERS = "full_attn_layers", "kda_layers"
_KIMI_NAMES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Nested key -> key of transformers 5; and the nested lists of layers."""


def _rewrite_kimi(raw: RawConfig) -> RawConfig:
    """Replaces the nested keys of published files, and lists of types of layers."""
    raw = {name: value for name, value in raw.items() if name not in _ROTATION_KEYS}
    nested = raw.pop("linear_attn_config", None) or {}
    names = *_KIMI_NAMES, *_KIMI_LAYERS
    if not isinstance(nested, Mapping) or {*nested} - {*names}:
        raise ValueError(
            f"linear_attn_config={shorten(nested)} must be an object with keys of "
            f"{', '.join(names)}"
        )
    for name, key_name in _KIMI_NAMES.items():
        if nested.get(name) is not None:  # as in transformers, before the other key
            raw[key_name] = nested[name]
    num_layers = raw.get("num_hidden_layers")
    full_layers = range(4, MAX_LAYERS, 4)
    if raw.get("layer_types") is None and nested.keys() >= {*_KIMI_LAYERS}:
        lists = [nested[name] for name in _KIMI_LAYERS]
        numbers = lists[0] + lists[1] if all(isinstance(x, list) for x in lists) else []
        is_whole = all(type(x) is int for x in numbers) and type(num_layers) is int
        if not is_whole or sorted(numbers) != [*range(1, num_layers + 1)]:
            raise ValueError(
                f"linear_attn_config={shorten(nested)} must have each of "
                f"num_hidden_layers={shorten(num_layers)} once, from 1 on"
            )
        full_layers = [number - 1 for number in lists[0]]
    raw = _list_layers(raw, full_layers)
    kinds = raw.pop("mlp_layer_types", None)
    if kinds is not None:
        num = kinds.count("dense") if isinstance(kinds, list) else -1
        if num < 0 or kinds != ["dense"] * num + ["sparse"] * (len(kinds) - num):
            raise ValueError(
                f"mlp_layer_types={shorten(kinds)} is not supported, only dense layers "
                "before sparse ones"
            )
        if len(kinds) != raw.get("num_hidden_layers"):
            raise ValueError(f"mlp_layer_types has {len(kinds)} entries")
        raw["first_k_dense_replace"] = num
    return raw


def _rewrite_granite(raw: RawConfig) -> RawConfig:
    """Renames old types of layers, and derives the width of a head."""
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        raw["layer_types"] = _rename_layers(kinds)
    raw = _list_layers(raw, ())
    expand = raw.pop("mamba_expand", 2)
    heads = raw.get("mamba_n_heads", 128)
    hidden = raw.get("hidden_size")
    width = raw.get("mamba_d_head", "auto")
    if all(type(x) is int and x > 0 for x in (expand, heads, hidden)):
        inner = expand * hidden
        if width == "auto":
            raw["mamba_d_head"] = width = inner // heads
        if type(width) is int and width * heads != inner:
            raise ValueError(
                f"mamba_d_head={width} must be mamba_expand * hidden_size / "
                f"mamba_n_heads={heads}"
            )
    kind = raw.get("position_embedding_type")
    if kind not in (None, "rope", "nope"):
        raise ValueError(
            f"position_embedding_type={shorten(kind)} is not supported, only null, "
            "rope, nope"
        )
    return _choose_positions(raw, has_rope=kind == "rope")


def _keys_of_granite(config: "ModelConfig") -> dict[str, object]:
    """Returns keys that transformers needs in addition."""
    kind = "rope" if config.rotary_kinds else None
    if config.recurrence is None:
        return {"position_embedding_type": kind}
    expand = config.recurrence.num_outputs // config.hidden_size
    return {"position_embedding_type": kind, "mamba_expand": expand}


def _keys_of_olmo(config: "ModelConfig") -> dict[str, object]:
    if config.rotary_kinds:
        return {}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


_LFM2_NAMES = {
    "block_ff_dim": "intermediate_size",
    "tie_embedding": "tie_word_embeddings",
}
"""Key of published files -> key of transformers 5."""

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letter of Nemotron-H's old pattern -> type of layer."""


def _rewrite_nemotron(raw: RawConfig) -> RawConfig:
    """Replaces the old pattern of layers, and derives their number from the list."""
    dropped = *_ROTATION_KEYS, "partial_rotary_factor"  # without effect
    raw = {name: value for name, value in raw.items() if name not in dropped}
    pattern = raw.pop("hybrid_override_pattern", None)
    kinds = raw.get("layer_types")
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or {*pattern} - {*_PATTERN}:
            raise ValueError(
                f"hybrid_override_pattern={shorten(pattern)} must be of the letters "
                f"{''.join(_PATTERN)}"
            )
        kinds = [_PATTERN[letter] for letter in pattern]
    if kinds is None:
        raise ValueError("layers_block_type is missing")
    if isinstance(kinds, list):
        raw["layer_types"] = _rename_layers(kinds)
        if raw.get("num_hidden_layers") is None:
            raw["num_hidden_layers"] = len(kinds)
    return raw


def _rewrite_lfm2(raw: RawConfig) -> RawConfig:
    """Replaces older keys, names of layers, and the rule of the MLP's width."""
    for alias, name in _LFM2_NAMES.items():
        if (value := raw.pop(alias, None)) is not None:  # as in transformers
            raw[name] = value
    adjusts = raw.pop("block_auto_adjust_ff_dim", None)
    multiple = raw.pop("block_multiple_of", None)
    factor = raw.pop("block_ffn_dim_multiplier", 1.0)
    if adjusts is None or parse_flag("block_auto_adjust_ff_dim", adjusts):
        size = parse_size("intermediate_size", raw.get("intermediate_size", 12288))
        size = int(2 * size / 3)
        if factor is not None:
            size = int(parse_positive_number("block_ffn_dim_multiplier", factor) * size)
        multiple = 256 if multiple is None else multiple
        multiple = parse_size("block_multiple_of", multiple)
        raw["intermediate_size"] = -(-size // multiple) * multiple
    full_layers = raw.pop("full_attn_idxs", None)
    if full_layers is None:
        full_layers = [*range(MAX_LAYERS)]
    is_list = isinstance(full_layers, list)
    if not is_list or any(type(index) is not int for index in full_layers):
        value = shorten(full_layers)
        raise ValueError(f"full_attn_idxs={value} must be a list of numbers of layers")
    return _list_layers(_rename_conv(raw), full_layers)


def _rename_conv(raw: RawConfig) -> RawConfig:
    kinds = raw.get("layer_types")
    if not isinstance(kinds, list):
        return raw
    return {**raw, "layer_types": _rename_layers(kinds)}


def _keys_of_lfm2(config: "ModelConfig") -> dict[str, object]:
    recurrent = config.recurrent_layers
    layers = range(config.num_layers)
    keys: dict[str, object] = {
        "layer_types": ["conv" if x in recurrent else FULL for x in layers]
    }
    if config.experts is None:
        keys["block_auto_adjust_ff_dim"] = False
    return keys


def _conv_rows(config: "ModelConfig") -> Mapping[str, Sequence[int]]:
    """Returns the rows of the projections of a short convolution."""
    size = _recurrence_of(config).num_outputs
    return _blocks(1, input_gate=size, gate=size, mixed=size)


def _rename_layers(kinds: Sequence[object]) -> list[object]:
    """Returns types of layers with the names of transformers 5."""
    names = {"mamba": RECURRENT, "conv": RECURRENT, "attention": FULL}
    return [names.get(x, x) if isinstance(x, str) else x for x in kinds]


_RECURRENT_KEYS = {
    "hidden_act": key("activation", "recurrence.activation", default="silu"),
    "rms_norm_eps": key("norm_eps", "recurrence.norm_eps", default=1e-6),
}
_DELTA_KEYS = {
    **_RECURRENT_KEYS,
    "linear_conv_kernel_dim": key("recurrence.kernel_size", default=4),
    "linear_key_head_dim": key("recurrence.key_dim", default=128),
    "linear_value_head_dim": key("recurrence.value_dim", default=128),
    "linear_num_key_heads": key("recurrence.num_key_heads", default=16),
    "linear_num_value_heads": key("recurrence.num_value_heads", default=32),
}
_DELTA_MODULES = {
    ".mixer.kernel": (".linear_attn.conv1d.weight",),
    ".mixer.decay_rate": (".linear_attn.A_log",),
    ".mixer.decay_bias": (".linear_attn.dt_bias",),
    ".mixer.scale": (".linear_attn.norm.weight",),
}
_GATED_QUERIES = {
    ".qkv": (
        ".self_attn.q_proj:query",
        ".self_attn.k_proj",
        ".self_attn.v_proj",
    ),
    ".gate": (".self_attn.q_proj:gate",),
}
_QWEN = {
    "norm": "rms_offset",
    "qk_norm": True,
    "out_gate": True,
    "recurrence.kind": "gdn",
}

LFM2 = LLAMA._replace(
    architecture="Lfm2ForCausalLM",
    keys={
        **keys_of(
            UNBIASED,
            "hidden_size",
            "rms_norm_eps",
            "hidden_act",
            num_key_value_heads=8,
            intermediate_size=12288,
            max_position_embeddings=128000,
            tie_word_embeddings=True,
        ),
        "hidden_size": key("hidden_size", "recurrence.value_dim"),
        "norm_eps": key("norm_eps", default=1e-5),
        "conv_L_cache": key("recurrence.kernel_size", default=3),
        "conv_bias": key(
            "recurrence.conv_bias", "recurrence.projection_bias", default=False
        ),
    },
    implied={
        **LLAMA.implied,
        "activation": "silu",
        "qk_norm": True,
        "recurrence.kind": "conv",
        **dict.fromkeys(
            (
                "recurrence.num_key_heads",
                "recurrence.num_value_heads",
                "recurrence.key_dim",
            ),
            1,
        ),
    },
    # Of published files; transformers reads none of them.
    harmless=(
        "block_dim",
        "block_mlp_init_scale",
        "block_norm_eps",
        "block_out_init_scale",
        "block_use_swiglu",
        "block_use_xavier_init",
        "conv_dim",
        "conv_dim_out",
        "conv_use_xavier_init",
        "num_heads",
        "theta",
        "use_pos_enc",
    ),
    rope_theta=1e6,
    rewrite=_rewrite_lfm2,
    further_keys=_keys_of_lfm2,
    packed={".conv.in_proj": _conv_rows},
    modules={
        **{name: LLAMA.modules[name] for name in ("embed", "head")},
        "final_norm": ("model.embedding_norm",),
        ".attention_norm": (".operator_norm",),
        ".qkv": LLAMA.modules[".qkv"],
        ".q_norm": (".self_attn.q_layernorm",),
        ".k_norm": (".self_attn.k_layernorm",),
        ".out": (".self_attn.out_proj",),
        ".mlp_norm": (".ffn_norm",),
        ".up": (".feed_forward.w1", ".feed_forward.w3"),
        ".down": (".feed_forward.w2",),
        ".mixer.mixed": (".conv.in_proj:mixed",),
        ".mixer.input_gate": (".conv.in_proj:input_gate",),
        ".mixer.gate": (".conv.in_proj:gate",),
        ".mixer.kernel": (".conv.conv.weight",),
        ".mixer.kernel_bias": (".conv.conv.bias",),
    },
    recurrent_modules={".out": (".conv.out_proj",)},
)

HYBRID_FAMILIES: Mapping[str, Family] = {
    "lfm2": LFM2,
    "lfm2_moe": LFM2._replace(
        architecture="Lfm2MoeForCausalLM",
        keys={
            **keys_of(LFM2.keys, intermediate_size=7168),
            "moe_intermediate_size": key("experts.size", default=1792),
            "num_experts": key("experts.num_experts", default=32),
            "num_experts_per_tok": key("experts.top_k", default=4),
            "num_dense_layers": key("experts.num_dense_layers", default=2),
            "use_expert_bias": key("experts.gate_bias", default=True),
            "norm_topk_prob": key("experts.renormalise", default=True),
            "routed_scaling_factor": key("experts.scale", default=1.0),
        },
        implied={
            **LFM2.implied,
            "experts.scoring": "sigmoid",
            "experts.sum_eps": 1e-6,
        },
        rewrite=_rename_conv,
        aliases={"tie_embedding": "tie_word_embeddings"},
        modules={
            **LFM2.modules,
            ".mixture.router": (".feed_forward.gate",),
            ".mixture.router.bias": (".feed_forward.expert_bias",),
            ".mixture.up": (
                ".feed_forward.experts.{}.w1",
                ".feed_forward.experts.{}.w3",
            ),
            ".mixture.down": (".feed_forward.experts.{}.w2",),
        },
    ),
    "qwen3_next": QWEN_MOE._replace(
        architecture="Qwen3NextForCausalLM",
        keys={
            **keys_of(
                QWEN_MOE.keys,
                num_key_value_heads=2,
                head_dim=256,
                num_experts=512,
                num_experts_per_tok=10,
                moe_intermediate_size=512,
                norm_topk_prob=True,
            ),
            "attention_bias": LLAMA.keys["attention_bias"],
            "shared_expert_intermediate_size": key("experts.shared_size", default=512),
            **_DELTA_KEYS,
        },
        implied={**QWEN_MOE.implied, **_QWEN, "experts.shared_gate": True},
        harmless=("mlp_bias", "intermediate_size"),
        windows="never",
        default_window=None,
        rope_share=0.25,
        has_partial_rope=True,
        rewrite=_rewrite_qwen,
        ignored=("mtp.",),
        packed={
            ".self_attn.q_proj": _gated_query_rows,
            ".linear_attn.in_proj_qkvz": _key_head_rows,
            ".linear_attn.in_proj_ba": _strength_rows,
        },
        modules={
            **QWEN_MOE.modules,
            **_GATED_QUERIES,
            **_DELTA_MODULES,
            ".mixer.mixed": (".linear_attn.in_proj_qkvz:mixed",),
            ".mixer.gate": (".linear_attn.in_proj_qkvz:gate",),
            ".mixer.strength": (".linear_attn.in_proj_ba:strength",),
            ".mixer.decay": (".linear_attn.in_proj_ba:decay",),
        },
        recurrent_modules={".out": (".linear_attn.out_proj",)},
    ),
    "qwen3_5_text": LLAMA._replace(
        architecture="Qwen3_5ForCausalLM",
        keys={
            **keys_of(LLAMA.keys, "mlp_bias", num_key_value_heads=4, head_dim=256),
            **_DELTA_KEYS,
        },
        implied={**LLAMA.implied, **_QWEN},
        only_served={"attn_output_gate": True, "output_gate_type": "swish"},
        harmless=(
            "mlp_bias",
            "mamba_ssm_dtype",
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
        ),
        wrapper="qwen3_5",
        text_prefix="model.language_model.",
        rope_share=0.25,
        has_partial_rope=True,
        # The three positions of text are equal.
        ignored_rope=("mrope_section", "mrope_interleaved"),
        rewrite=_rewrite_qwen,
        ignored=("mtp.", "model.visual."),
        packed={".self_attn.q_proj": _gated_query_rows},
        modules={
            **LLAMA.modules,
            **_GATED_QUERIES,
            **_DELTA_MODULES,
            ".mixer.mixed": (".linear_attn.in_proj_qkv",),
            ".mixer.gate": (".linear_attn.in_proj_z",),
            ".mixer.strength": (".linear_attn.in_proj_b",),
            ".mixer.decay": (".linear_attn.in_proj_a",),
        },
        recurrent_modules={".out": (".linear_attn.out_proj",)},
    ),
    "olmo_hybrid": OLMO2._replace(
        architecture="OlmoHybridForCausalLM",
        keys={
            **keys_of(OLMO2.keys, rms_norm_eps=1e-6),
            **{name: x for name, x in _DELTA_KEYS.items() if name != "rms_norm_eps"},
            "linear_allow_neg_eigval": key(
                "recurrence.write_scale", default=True, form="doubled"
            ),
        },
        implied={
            **OLMO2.implied,
            "recurrence.kind": "gdn",
            "recurrence.norm_eps": 1e-5,
        },
        harmless=(
            "mlp_bias",
            "position_embedding_type",
            "linear_a_log_min",
            "linear_a_log_max",
            "linear_dt_min",
            "linear_dt_max",
            "linear_dt_init_floor",
        ),
        position_keys=("position_embedding_type",),
        rewrite=_rewrite_olmo,
        further_keys=_keys_of_olmo,
        recurrent_norm_places="before",
        # As transformers 5 saves it.
        other_names={".post_attention_layernorm": ".feedforward_layer_norm"},
        modules={
            **OLMO2.modules,
            ".attention_norm": (".attention_layer_norm",),
            ".mlp_norm": (".feedforward_layer_norm",),
            **_DELTA_MODULES,
            ".mixer.mixed": (
                ".linear_attn.q_proj",
                ".linear_attn.k_proj",
                ".linear_attn.v_proj",
            ),
            ".mixer.gate": (".linear_attn.g_proj",),
            ".mixer.strength": (".linear_attn.b_proj",),
            ".mixer.decay": (".linear_attn.a_proj",),
            ".mixer.kernel": (
                ".linear_attn.q_conv1d.weight",
                ".linear_attn.k_conv1d.weight",
                ".linear_attn.v_conv1d.weight",
            ),
            ".mixer.scale": (".linear_attn.o_norm.weight",),
        },
        recurrent_modules={".out": (".linear_attn.o_proj",)},
    ),
    "kimi_linear": DEEPSEEK_V2._replace(
        architecture="KimiLinearForCausalLM",
        keys={
            **keys_of(
                DEEPSEEK_V2.keys,
                "max_position_embeddings",
                "num_nextn_predict_layers",
                "n_routed_experts",
                "num_experts_per_tok",
                "n_shared_experts",
                "topk_method",
                "n_group",
                "norm_topk_prob",
                "aux_loss_alpha",
                q_lora_rank=None,
                moe_intermediate_size=1024,
                first_k_dense_replace=1,
                topk_group=1,
                routed_scaling_factor=2.446,
            ),
            **_RECURRENT_KEYS,
            "rms_norm_eps": key("norm_eps", "recurrence.norm_eps", default=1e-5),
            "model_max_length": key("max_positions", default=1048576),
            "num_experts": key("experts.num_experts", default=256),
            "num_experts_per_token": key("experts.top_k", default=8),
            "num_shared_experts": key("experts.num_shared", default=1),
            "num_expert_group": key("experts.num_groups", default=1),
            "moe_renormalize": key("experts.renormalise", default=True),
            "router_aux_loss_coef": key("experts.balance_weight", default=0.001),
            "linear_head_dim": key(
                "recurrence.key_dim", "recurrence.value_dim", default=128
            ),
            "linear_num_heads": key(
                "recurrence.num_key_heads", "recurrence.num_value_heads", default=32
            ),
            "linear_conv_kernel_dim": key("recurrence.kernel_size", default=4),
        },
        implied={
            **LLAMA.implied,
            "positions": "none",
            "latent_eps": 1e-6,
            "experts.gate_bias": True,
            "experts.scoring": "sigmoid",
            "recurrence.kind": "kda",
        },
        only={"attention_bias": False, "mlp_bias": False},
        only_served={
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "mla_use_nope": True,
            "use_grouped_topk": True,
            "num_nextn_predict_layers": 0,
        },
        equal={"num_key_value_heads": "num_attention_heads"},
        aliases={
            "max_position_embeddings": "model_max_length",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
        },
        harmless=("auto_map", "head_dim", "qk_head_dim"),
        rewrite=_rewrite_kimi,
        # As transformers 5 saves it.
        other_names={
            f".mlp.{name}": f".block_sparse_moe.{name}"
            for name in ("gate_proj", "up_proj", "down_proj")
        },
        modules={
            **DEEPSEEK_V2.modules,
            **{
                name: names
                for name, names in MIXTRAL.modules.items()
                if name.startswith(".mixture")
            },
            ".mixture.router.bias": (".block_sparse_moe.gate.e_score_correction_bias",),
            ".mixture.shared_up": (
                ".block_sparse_moe.shared_experts.gate_proj",
                ".block_sparse_moe.shared_experts.up_proj",
            ),
            ".mixture.shared_down": (".block_sparse_moe.shared_experts.down_proj",),
            ".mixer.mixed": LLAMA.modules[".qkv"],
            ".mixer.gate_down": (".self_attn.g_a_proj",),
            ".mixer.gate": (".self_attn.g_b_proj",),
            ".mixer.decay_down": (".self_attn.f_a_proj",),
            ".mixer.decay": (".self_attn.f_b_proj",),
            ".mixer.strength": (".self_attn.b_proj",),
            ".mixer.kernel": (
                ".self_attn.q_conv1d.weight",
                ".self_attn.k_conv1d.weight",
                ".self_attn.v_conv1d.weight",
            ),
            ".mixer.decay_rate": (".self_attn.A_log",),
            ".mixer.decay_bias": (".self_attn.dt_bias",),
            ".mixer.scale": (".self_attn.o_norm.weight",),
        },
    ),
    "granitemoehybrid": LLAMA._replace(
        architecture="GraniteMoeHybridForCausalLM",
        keys={
            **keys_of(DENSE_FAMILIES["granite"].keys, "mlp_bias", "intermediate_size"),
            **_RECURRENT_KEYS,
            "shared_intermediate_size": key(
                "mlp_size", "experts.shared_size", default=1024
            ),
            "intermediate_size": key("experts.size", default=11008),
            "num_local_experts": key("experts.num_experts", default=8),
            "num_experts_per_tok": key("experts.top_k", default=2),
            "router_aux_loss_coef": key("experts.balance_weight", default=0.001),
            "mamba_n_heads": key("recurrence.num_value_heads", default=128),
            "mamba_n_groups": key("recurrence.num_key_heads", default=1),
            "mamba_d_state": key("recurrence.key_dim", default=256),
            "mamba_d_head": key("recurrence.value_dim"),
            "mamba_d_conv": key("recurrence.kernel_size", default=4),
            "mamba_conv_bias": key("recurrence.conv_bias", default=True),
            "mamba_proj_bias": key("recurrence.projection_bias", default=False),
            "time_step_limit": key(
                "recurrence.min_step",
                "recurrence.max_step",
                default=[0.0, float("inf")],
                form="range",
            ),
        },
        implied={
            **LLAMA.implied,
            "recurrence.kind": "mamba2",
            "experts.renormalise": True,
        },
        aliases={"layers_block_type": "layer_types"},
        harmless=("mlp_bias", "mamba_chunk_size"),
        position_keys=("position_embedding_type",),
        has_optional_experts=True,
        rewrite=_rewrite_granite,
        further_keys=_keys_of_granite,
        packed={
            ".mamba.in_proj": _mamba_rows,
            ".mamba.conv1d": _mamba_channels,
        },
        modules={
            **LLAMA.modules,
            ".up": (".shared_mlp.input_linear",),
            ".down": (".shared_mlp.output_linear",),
            ".mixture.router": (".block_sparse_moe.router.layer",),
            ".mixture.up": (".block_sparse_moe.input_linear",),
            ".mixture.down": (".block_sparse_moe.output_linear",),
            ".mixture.shared_up": (".shared_mlp.input_linear",),
            ".mixture.shared_down": (".shared_mlp.output_linear",),
            **_mamba_modules(".mamba"),
        },
        recurrent_modules={".out": (".mamba.out_proj",)},
    ),
    "nemotron_h": LLAMA._replace(
        architecture="NemotronHForCausalLM",
        keys={
            **keys_of(
                UNBIASED,
                "rms_norm_eps",
                "hidden_act",
                "tie_word_embeddings",
                num_key_value_heads=8,
                head_dim=128,
                max_position_embeddings=4096,
            ),
            "layer_norm_epsilon": key("norm_eps", "recurrence.norm_eps", default=1e-5),
            "mlp_hidden_act": key("activation", default="relu2"),
            "mlp_bias": key("mlp_bias", default=False),
            "ssm_state_size": key("recurrence.key_dim", default=128),
            "n_groups": key("recurrence.num_key_heads", default=8),
            "mamba_num_heads": key("recurrence.num_value_heads", default=128),
            "mamba_head_dim": key("recurrence.value_dim", default=64),
            "mamba_hidden_act": key("recurrence.activation", default="silu"),
            "conv_kernel": key("recurrence.kernel_size", default=4),
            "use_conv_bias": key("recurrence.conv_bias", default=True),
            "use_bias": key("recurrence.projection_bias", default=False),
            "time_step_min": key("recurrence.min_step", default=0.001),
            "n_routed_experts": key("experts.num_experts", default=8),
            "num_experts_per_tok": key("experts.top_k", default=2),
            "moe_intermediate_size": key("experts.size", default=7688),
            "moe_shared_expert_intermediate_size": key(
                "experts.shared_size", default=7688
            ),
            "moe_latent_size": key("experts.latent_size"),
            "n_group": key("experts.num_groups", default=1),
            "topk_group": key("experts.top_groups", default=1),
            "norm_topk_prob": key("experts.renormalise", default=True),
            "routed_scaling_factor": key("experts.scale", default=1.0),
        },
        implied={
            **LLAMA.implied,
            "gated": False,
            "residual": "single",
            "positions": "none",
            "tie_embeddings": False,
            "recurrence.kind": "mamba2",
            "experts.gate_bias": True,
            "experts.scoring": "sigmoid",
        },
        derived=(*LLAMA.derived, "experts.latent_size"),
        only_served={"tie_word_embeddings": False},
        aliases={
            "layers_block_type": "layer_types",
            "num_local_experts": "n_routed_experts",
            "attention_head_dim": "head_dim",
            "norm_eps": "layer_norm_epsilon",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_dt_min": "time_step_min",
        },
        harmless=(
            "attention_bias",
            "auto_map",
            "chunk_size",
            "expand",
            "mamba_chunk_size",
            "mamba_dt_init_floor",
            "mamba_dt_limit",
            "mamba_dt_max",
            "mamba_expand",
            "mamba_proj_bias",
            "mamba_ssm_cache_dtype",
            "moe_shared_expert_overlap",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "n_shared_experts",
            "num_logits_to_keep",
            "num_nextn_predict_layers",
            "rescale_prenorm_residual",
            "residual_in_fp32",
            "time_step_floor",
            "time_step_limit",
            "time_step_max",
            "use_mamba_kernels",
        ),
        rewrite=_rewrite_nemotron,
        layer_types_key="layers_block_type",
        ignored=("mtp.",),
        base="backbone.",
        layer="backbone.layers.{}",
        packed={
            ".mixer.in_proj": _mamba_rows,
            ".mixer.conv1d": _mamba_channels,
        },
        modules={
            "embed": ("backbone.embeddings",),
            "final_norm": ("backbone.norm_f",),
            "head": ("lm_head",),
            ".attention_norm": (".norm",),
            ".mlp_norm": (".norm",),
            ".qkv": (".mixer.q_proj", ".mixer.k_proj", ".mixer.v_proj"),
            ".out": (".mixer.o_proj",),
            ".up": (".mixer.up_proj",),
            ".down": (".mixer.down_proj",),
            ".mixture.router": (".mixer.gate",),
            ".mixture.router.bias": (".mixer.gate.e_score_correction_bias",),
            ".mixture.up": (".mixer.experts.{}.up_proj",),
            ".mixture.down": (".mixer.experts.{}.down_proj",),
            ".mixture.latent_down": (".mixer.fc1_latent_proj",),
            ".mixture.latent_up": (".mixer.fc2_latent_proj",),
            ".mixture.shared_up": (".mixer.shared_experts.up_proj",),
            ".mixture.shared_down": (".mixer.shared_experts.down_proj",),
            **_mamba_modules(".mixer"),
        },
        recurrent_modules={".out": (".mixer.out_proj",)},
    ),
}
"""Model type -> family."""
