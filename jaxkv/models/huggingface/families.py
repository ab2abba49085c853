"""What each model family calls things in a Hugging Face folder: tables, no code.

`configs.py` reads the first half of a table, `tensors.py` the second. Another
family with the same arithmetic is another entry here. Defaults are transformers'.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Family(NamedTuple):
    """How one family writes its configuration and names its tensors."""

    architecture: str
    """The name under `architectures`."""
    keys: Mapping[str, tuple[str, ...]]
    """Hugging Face's key -> the fields of ours that it sets."""
    implied: Mapping[str, Any]
    """Fields of ours that the family fixes."""
    defaults: Mapping[str, Any]
    """Values of keys that may be left out."""
    only: Mapping[str, Any]
    """Keys of which one value is supported: the default, or the only one that agrees
    with what the family computes whatever the key says."""
    derived: tuple[str, ...]
    """Fields of ours that follow from others where their key is left out."""
    base: str
    """Prefix of every tensor but the head's; some files leave it out."""
    layer: str
    """Prefix of a layer's tensors, with a place for its number."""
    modules: Mapping[str, tuple[str, ...]]
    """Our module -> the modules that it is made of. One of a layer starts with a dot.

    Several are joined in the order of `qkv` (query, key, value) or of `up` (gate, up).
    Modules of an expert have a place for its number.
    """
    aliases: Mapping[str, str] = {}
    """Another name of a key -> the key, `attribute_map` in transformers."""
    harmless: tuple[str, ...] = ()
    """Keys that change no logit of this family, beside `harmless.KEYS`."""
    windows: Literal["never", "always", "flagged", "off"] = "never"
    """Where a sliding window comes from: `never` from anywhere; `always` from
    `sliding_window`, of all layers; `flagged`: from there if `use_sliding_window`, of
    the layers from `max_window_layers` on or those that `layer_types` names; `off`:
    so, but in an order of layers of its own, so that only false is supported."""
    default_window: int | None = None
    """`sliding_window` of a file that does not tell."""
    is_conv1d: bool = False
    """Whether a layer's matrices are stored `[in, out]` (and q, k, v as one)."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies where a file does not tell."""
    expert_keys: Mapping[str, str] = {}
    """Hugging Face's key -> the field of `Experts` that it sets; none of a dense model.
    """
    expert_defaults: Mapping[str, Any] = {}
    """Values of such keys that may be left out, and of fields that are fixed."""


_LLAMA = Family(
    architecture="LlamaForCausalLM",
    keys={
        "vocab_size": ("vocab_size",),
        "hidden_size": ("hidden_size",),
        "num_hidden_layers": ("num_layers",),
        "num_attention_heads": ("num_q_heads",),
        "num_key_value_heads": ("num_kv_heads",),
        "head_dim": ("head_dim",),
        "intermediate_size": ("mlp_size",),
        "max_position_embeddings": ("max_positions",),
        "rms_norm_eps": ("norm_eps",),
        "hidden_act": ("activation",),
        "tie_word_embeddings": ("tie_embeddings",),
        "attention_bias": ("qkv_bias", "out_bias"),
        "mlp_bias": ("mlp_bias",),
    },
    implied={"norm": "rms", "gated": True},
    defaults={
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    only={},
    derived=("num_kv_heads", "head_dim"),
    base="model.",
    layer="model.layers.{}",
    modules={
        "embed": ("model.embed_tokens",),
        "final_norm": ("model.norm",),
        "head": ("lm_head",),
        ".attention_norm": (".input_layernorm",),
        ".qkv": (".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"),
        ".q_norm": (".self_attn.q_norm",),
        ".k_norm": (".self_attn.k_norm",),
        ".out": (".self_attn.o_proj",),
        ".mlp_norm": (".post_attention_layernorm",),
        ".up": (".mlp.gate_proj", ".mlp.up_proj"),
        ".down": (".mlp.down_proj",),
    },
)


# Families that read no such key. Their tensors tell: a bias too few or too many is
# refused when they are loaded.
_BIASES = ("attention_bias", "mlp_bias", "qkv_bias")

_MIXTRAL = _LLAMA._replace(
    architecture="MixtralForCausalLM",
    only={"norm_topk_prob": True},
    aliases={"num_experts": "num_local_experts"},
    harmless=_BIASES,
    windows="always",
    defaults={**_LLAMA.defaults, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    modules={
        **_LLAMA.modules,
        ".mixture.router": (".block_sparse_moe.gate",),
        ".mixture.up": (
            ".block_sparse_moe.experts.{}.w1",
            ".block_sparse_moe.experts.{}.w3",
        ),
        ".mixture.down": (".block_sparse_moe.experts.{}.w2",),
    },
    rope_theta=1e6,
    expert_keys={
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "top_k",
        "intermediate_size": "size",
        "router_aux_loss_coef": "balance_weight",
    },
    expert_defaults={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "renormalise": True,
    },
)

_QWEN_MOE = _LLAMA._replace(
    only={"decoder_sparse_step": 1},
    windows="off",
    modules={
        **_LLAMA.modules,
        ".mixture.router": (".mlp.gate",),
        ".mixture.up": (".mlp.experts.{}.gate_proj", ".mlp.experts.{}.up_proj"),
        ".mixture.down": (".mlp.experts.{}.down_proj",),
        ".mixture.shared_gate": (".mlp.shared_expert_gate",),
        ".mixture.shared_up": (
            ".mlp.shared_expert.gate_proj",
            ".mlp.shared_expert.up_proj",
        ),
        ".mixture.shared_down": (".mlp.shared_expert.down_proj",),
    },
    expert_keys={
        "num_experts": "num_experts",
        "num_experts_per_tok": "top_k",
        "moe_intermediate_size": "size",
        "norm_topk_prob": "renormalise",
        "mlp_only_layers": "num_dense_layers",
        "router_aux_loss_coef": "balance_weight",
    },
    expert_defaults={
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    },
)


def _without(keys: Mapping[str, tuple[str, ...]], *names: str):
    return {key: ours for key, ours in keys.items() if key not in names}


FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA._replace(
        architecture="MistralForCausalLM",
        keys=_without(_LLAMA.keys, "attention_bias", "mlp_bias"),
        defaults={**_LLAMA.defaults, "num_key_value_heads": 8},
        harmless=_BIASES,
        windows="always",
        default_window=4096,
    ),
    "qwen2": _LLAMA._replace(
        architecture="Qwen2ForCausalLM",
        keys=_without(_LLAMA.keys, "attention_bias", "mlp_bias"),
        implied={**_LLAMA.implied, "qkv_bias": True},
        harmless=_BIASES,
        windows="flagged",
        default_window=4096,
    ),
    "qwen3": _LLAMA._replace(
        architecture="Qwen3ForCausalLM",
        keys=_without(_LLAMA.keys, "mlp_bias"),
        implied={**_LLAMA.implied, "qk_norm": True},
        defaults={**_LLAMA.defaults, "head_dim": 128},
        harmless=("mlp_bias", "qkv_bias"),
        windows="flagged",
        default_window=4096,
    ),
    "mixtral": _MIXTRAL._replace(
        keys=_without(_LLAMA.keys, "attention_bias", "mlp_bias"),
    ),
    "qwen2_moe": _QWEN_MOE._replace(
        architecture="Qwen2MoeForCausalLM",
        keys=_without(_LLAMA.keys, "attention_bias", "mlp_bias")
        | {"qkv_bias": ("qkv_bias",)},
        defaults={**_LLAMA.defaults, "num_key_value_heads": 16, "qkv_bias": True},
        harmless=("attention_bias", "mlp_bias"),
        expert_keys={
            **_QWEN_MOE.expert_keys,
            "shared_expert_intermediate_size": "shared_size",
        },
        expert_defaults={
            **_QWEN_MOE.expert_defaults,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "shared_gate": True,
        },
    ),
    "qwen3_moe": _QWEN_MOE._replace(
        architecture="Qwen3MoeForCausalLM",
        keys=_without(_LLAMA.keys, "mlp_bias"),
        implied={**_LLAMA.implied, "qk_norm": True},
        defaults={**_LLAMA.defaults, "num_key_value_heads": 4},
        aliases={"num_local_experts": "num_experts"},
        harmless=("mlp_bias", "qkv_bias"),
        expert_defaults={
            **_QWEN_MOE.expert_defaults,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        keys={
            "vocab_size": ("vocab_size",),
            "n_embd": ("hidden_size",),
            "n_layer": ("num_layers",),
            "n_head": ("num_q_heads",),
            "n_inner": ("mlp_size",),
            "n_positions": ("max_positions",),
            "layer_norm_epsilon": ("norm_eps",),
            "activation_function": ("activation",),
            "tie_word_embeddings": ("tie_embeddings",),
        },
        implied={
            "norm": "layer",
            "positions": "learned",
            "gated": False,
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
        },
        defaults={
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        only={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        derived=("mlp_size",),
        base="transformer.",
        layer="transformer.h.{}",
        modules={
            "embed": ("transformer.wte",),
            "embed_positions": ("transformer.wpe",),
            "final_norm": ("transformer.ln_f",),
            "head": ("lm_head",),
            ".attention_norm": (".ln_1",),
            ".qkv": (".attn.c_attn",),
            ".out": (".attn.c_proj",),
            ".mlp_norm": (".ln_2",),
            ".up": (".mlp.c_fc",),
            ".down": (".mlp.c_proj",),
        },
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        harmless=(
            # Of the first release; only `n_positions` is read.
            "n_ctx",
            "n_special",
            "predict_special_tokens",
            "output_past",
            # An order of the same products, for half precision.
            "reorder_and_upcast_attn",
            # Of a head for multiple choice.
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        ),
        is_conv1d=True,
    ),
    "opt": Family(
        architecture="OPTForCausalLM",
        keys={
            "vocab_size": ("vocab_size",),
            "hidden_size": ("hidden_size",),
            "num_hidden_layers": ("num_layers",),
            "num_attention_heads": ("num_q_heads",),
            "ffn_dim": ("mlp_size",),
            "max_position_embeddings": ("max_positions",),
            "activation_function": ("activation",),
            "tie_word_embeddings": ("tie_embeddings",),
            "enable_bias": ("qkv_bias", "out_bias", "mlp_bias"),
        },
        implied={
            "norm": "layer",
            "norm_eps": 1e-5,
            "positions": "learned",
            "position_offset": 2,
            "gated": False,
        },
        defaults={
            "activation_function": "relu",
            "tie_word_embeddings": True,
            "enable_bias": True,
        },
        only={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
        derived=(),
        base="model.",
        layer="model.decoder.layers.{}",
        modules={
            "embed": ("model.decoder.embed_tokens",),
            "embed_positions": ("model.decoder.embed_positions",),
            "final_norm": ("model.decoder.final_layer_norm",),
            "head": ("lm_head",),
            ".attention_norm": (".self_attn_layer_norm",),
            ".qkv": (".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"),
            ".out": (".self_attn.out_proj",),
            ".mlp_norm": (".final_layer_norm",),
            ".up": (".fc1",),
            ".down": (".fc2",),
        },
    ),
}
