"""The family Gemma 4: sizes that differ by the type of a layer.

Layers without a window have heads of another width, and in some models another number
of KV heads, whose keys are also their values. The last layers may read K and V of
earlier ones.

Source: transformers' `Gemma4TextConfig` and `Gemma4TextModel`.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxkv.models.huggingface.dense_families import GEMMA2
from jaxkv.models.huggingface.family import RawConfig, key, keys_of
from jaxkv.models.huggingface.values import parse_flag, parse_size, shorten
from jaxkv.models.huggingface.windows import FULL, SLIDING

if TYPE_CHECKING:
    from jaxkv.models.config import AttentionKind, ModelConfig

_SIZE_KEYS = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}
"""Key of a layer in `per_layer_config` -> key of all layers without a window."""


def _rewrite_gemma4(raw: RawConfig) -> RawConfig:
    """Replaces sizes by layer by those of layers without a window."""
    if raw.get("use_bidirectional_attention") == "vision":  # causal for text
        del raw["use_bidirectional_attention"]
    num_layers = parse_size("num_hidden_layers", raw.get("num_hidden_layers", 30))
    raw["num_hidden_layers"] = num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (x + 1) % 6 else FULL for x in range(num_layers)]
    if isinstance(kinds, list) and kinds:
        kinds = [*kinds[:-1], FULL]  # as in transformers
    raw["layer_types"] = kinds
    if not raw.pop("enable_moe_block", False):
        raw |= {"num_experts": 0, "top_k_experts": 1, "moe_intermediate_size": 1}
    if raw.get("rope_parameters") is None:
        raw["rope_parameters"] = {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25},
            SLIDING: {"rope_type": "default"},
        }
    local = raw["rope_parameters"]
    local = local.get(SLIDING) if isinstance(local, Mapping) else None
    if isinstance(local, Mapping) and local.get("rope_type") not in (None, "default"):
        raise ValueError(
            f"rope_type={shorten(local['rope_type'])} is not supported in {SLIDING}, "
            "only default"
        )
    usual = {"head_dim": 256, "num_key_value_heads": 4}
    usual = {name: raw.get(name) or value for name, value in usual.items()}
    for name, other in _SIZE_KEYS.items():
        if raw.get(other) is None:
            raw[other] = 512 if name == "head_dim" else usual[name]
    if not raw.get("attention_k_eq_v"):
        raw["num_global_key_value_heads"] = usual["num_key_value_heads"]
    by_layer = raw.pop("per_layer_config", None)
    if by_layer is None:
        return raw
    full = {str(x) for x, kind in enumerate(kinds) if kind == FULL}
    by_layer = by_layer if isinstance(by_layer, Mapping) else {"": by_layer}
    values = [*by_layer.values()]
    sizes = values[0] if values else {}
    is_equal = all(value == sizes for value in values)
    # transformers pads the numbers of layers with zeros.
    layers = {str(x).lstrip("0") or "0" for x in by_layer}
    if (
        not isinstance(sizes, Mapping)
        or {*sizes} - {*_SIZE_KEYS}
        or (values and layers != full)
        or not is_equal
    ):
        raise ValueError(
            f"per_layer_config={shorten(by_layer)} is not supported, only equal sizes "
            f"({', '.join(_SIZE_KEYS)}) of all layers of {FULL}"
        )
    for name, other in _SIZE_KEYS.items():
        raw[other] = sizes.get(name, usual[name])
    return raw


def _adapt_layers(config: "ModelConfig", raw: Mapping[str, Any]) -> "ModelConfig":
    """Returns the model with the sizes and the sharing of each layer."""
    num_shared = raw.get("num_kv_shared_layers") or 0
    num_shared = parse_size("num_kv_shared_layers", num_shared, low=0)
    if num_shared >= config.num_layers:
        raise ValueError(
            f"num_kv_shared_layers={num_shared} must be below num_hidden_layers="
            f"{config.num_layers}"
        )
    keys_are_values = parse_flag("attention_k_eq_v", raw.get("attention_k_eq_v", False))
    is_wide = parse_flag("use_double_wide_mlp", raw.get("use_double_wide_mlp", False))
    sizes = {name: parse_size(name, raw[name]) for name in _SIZE_KEYS.values()}
    head_dim = sizes["global_head_dim"]
    num_kv_heads = sizes["num_global_key_value_heads"]
    kinds = []
    for layer in range(config.num_layers):
        kind = config.attention_kinds[config.kind_of(layer)]
        changes: dict[str, Any] = {}
        if kind.window is not None:
            if head_dim != config.head_dim:
                changes["head_dim"] = config.head_dim
            if num_kv_heads != config.num_kv_heads:
                changes["num_kv_heads"] = config.num_kv_heads
            if keys_are_values:
                changes["keys_are_values"] = False
        if layer >= config.num_layers - num_shared:
            changes["shares_kv"] = True
            if is_wide:
                changes["mlp_size"] = 2 * config.mlp_size
        kinds.append(dataclasses.replace(kind, **changes))
    first = config.attention_kinds[0]
    if first not in kinds:
        raise ValueError(
            f"num_kv_shared_layers={num_shared} must leave a layer of {FULL}"
        )
    others = [kind for kind in dict.fromkeys(kinds) if kind != first]
    numbers = {kind: number for number, kind in enumerate([first, *others])}
    return dataclasses.replace(
        config,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        keys_are_values=keys_are_values,
        other_attention=tuple(others),
        attention_pattern=tuple(numbers[kind] for kind in kinds),
    )


def _keys_of_gemma4(config: "ModelConfig") -> dict[str, object]:
    """Returns the keys that `_rewrite_gemma4` and `_adapt_layers` read."""
    kinds = [
        config.attention_kinds[config.kind_of(x)] for x in range(config.num_layers)
    ]
    local = _first([kind for kind in kinds if kind.window is not None])
    usual = config if local is None else config.of_kind(local)
    shared = [kind for kind in kinds if kind.shares_kv]
    sizes: dict[str, object] = {}
    if usual.head_dim != config.head_dim:
        sizes["head_dim"] = config.head_dim
    if usual.num_kv_heads != config.num_kv_heads:
        sizes["num_key_value_heads"] = config.num_kv_heads
    full = [str(x) for x, kind in enumerate(kinds) if kind.window is None]
    keys: dict[str, object] = {
        "head_dim": usual.head_dim,
        "num_key_value_heads": usual.num_kv_heads,
        "attention_k_eq_v": config.keys_are_values,
        "num_kv_shared_layers": len(shared),
        "use_double_wide_mlp": any(kind.mlp_size for kind in shared),
        # Other software than transformers reads the next two.
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_kv_heads,
        "per_layer_config": dict.fromkeys(full, sizes) if sizes else {},
        "enable_moe_block": config.experts is not None,
    }
    rope: dict[str, object] = {}
    if (scaling := config.rope_scaling) is not None:
        share = 2 * scaling.num_pairs / config.head_dim
        if int(share * config.head_dim // 2) != scaling.num_pairs:  # by rounding
            share = (2 * scaling.num_pairs + 0.5) / config.head_dim
        rope = {"partial_rotary_factor": share, "factor": scaling.factor}
    full_rope = {
        "rope_type": "proportional" if rope else "default",
        "rope_theta": config.rope_theta,
        **rope,
    }
    theta = config.rope_theta if local is None else local.rope_theta
    local_rope = {"rope_type": "default", "rope_theta": theta}
    return keys | {"rope_parameters": {FULL: full_rope, SLIDING: local_rope}}


def _first(kinds: "list[AttentionKind]") -> "AttentionKind | None":
    return kinds[0] if kinds else None


GEMMA4 = GEMMA2._replace(
    architecture="Gemma4ForCausalLM",
    keys={
        **keys_of(
            GEMMA2.keys,
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            final_logit_softcapping=None,
        ),
        "hidden_size_per_layer_input": key("layer_input_size", default=256),
        "num_experts": key("experts.num_experts"),
        "top_k_experts": key("experts.top_k"),
        "moe_intermediate_size": key("experts.size"),
    },
    implied={
        **GEMMA2.implied,
        "norm": "rms",
        "attention_scale": 1.0,
        "qk_norm": True,
        "value_norm": True,
        "layer_scale": True,
        "experts.beside_mlp": True,
    },
    derived=(*GEMMA2.derived, "logit_cap"),
    only_served={},
    has_optional_experts=True,
    equal={"vocab_size_per_layer_input": "vocab_size"},
    windows="pattern",
    default_window=512,
    rope_theta=1e6,
    local_theta=1e4,
    rope_kinds=("default", "proportional"),
    position_keys=(
        *_SIZE_KEYS.values(),
        "attention_k_eq_v",
        "num_kv_shared_layers",
        "use_double_wide_mlp",
    ),
    wrapper="gemma4",
    text_prefix="model.language_model.",
    ignored=(
        *("model.vision_tower.", "model.embed_vision."),
        *("model.audio_tower.", "model.embed_audio."),
    ),
    rewrite=_rewrite_gemma4,
    adapt=_adapt_layers,
    further_keys=_keys_of_gemma4,
    modules={
        **GEMMA2.modules,
        "layer_embed": ("model.embed_tokens_per_layer",),
        "layer_project": ("model.per_layer_model_projection",),
        "layer_norm": ("model.per_layer_projection_norm",),
        ".q": (".self_attn.q_proj",),
        ".input_gate": (".per_layer_input_gate",),
        ".input_up": (".per_layer_projection",),
        ".input_norm": (".post_per_layer_input_norm",),
        ".layer_scale.scale": (".layer_scalar",),
        ".dense_out_norm": (".post_feedforward_layernorm_1",),
        ".experts_norm": (".pre_feedforward_layernorm_2",),
        ".experts_out_norm": (".post_feedforward_layernorm_2",),
        ".mixture.router": (".router.proj",),
        ".mixture.router_scale.scale": (".router.scale",),
        ".mixture.expert_scale.scale": (".router.per_expert_scale",),
        ".mixture.up.weight": (".experts.gate_up_proj",),
        ".mixture.down.weight": (".experts.down_proj",),
    },
)
"""Gemma 4's language model."""
