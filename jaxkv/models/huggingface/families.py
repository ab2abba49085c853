"""Tables of the names that model families use in a Hugging Face folder.

`configs.py` and `tensors.py` read the families that are served; `scaling.shapes`
computes the size of all families. A further family with the same arithmetic is a
further entry. Defaults are those of transformers.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Key(NamedTuple):
    """Meaning of one key of a `config.json`."""

    fields: tuple[str, ...]
    """Fields that the key sets."""
    default: object = None
    """Value of a missing key; None if the key is required or derived."""


class Family(NamedTuple):
    """Configuration keys and tensor names of a family.

    Fields are those of `ModelConfig`, or of `scaling.shapes.ModelShape` if
    `ModelConfig` lacks one; a field of their experts is written `experts.size`.
    """

    architecture: str
    """Name in `architectures`."""
    keys: Mapping[str, Key]
    """Hugging Face's key -> the fields that it sets, and its default."""
    implied: Mapping[str, object]
    """Fields with a fixed value in this family."""
    derived: tuple[str, ...]
    """Fields that are derived from other fields if their key is missing or null."""
    base: str
    """Prefix of every tensor but the head's; some files omit it."""
    layer: str
    """Prefix of a layer's tensors, with a placeholder for its number."""
    modules: Mapping[str, tuple[str, ...]]
    """Module of this package -> the modules of the folder that it joins. Modules of a
    layer start with a dot.

        Several are joined in the order of `qkv` (query, key, value) or of `up` (gate,
    up).
        Modules of an expert have a placeholder for its number. Empty for a family that
    is
        not served."""
    servable: bool = True
    """True if the engine serves this family; False if only its size is computed."""
    only: Mapping[str, object] = {}
    """Keys that change shapes, with the only supported value."""
    only_served: Mapping[str, object] = {}
    """Keys with the only value that is served; other values affect sizes only. It is
    the default, or the only value for which the family's implementations agree."""
    equal: Mapping[str, str] = {}
    """Keys that must have the value of another key."""
    aliases: Mapping[str, str] = {}
    """Alias -> key, `attribute_map` in transformers."""
    harmless: tuple[str, ...] = ()
    """Keys that change no logit of this family, besides `harmless.HARMLESS_KEYS`."""
    windows: Literal["never", "always", "flagged", "off", "even", "pattern"] = "never"
    """Layers with the sliding window `sliding_window`, if `layer_types` is absent:
    `never`: none; `always`: all; `flagged`: those from `max_window_layers` on, if
    `use_sliding_window`; `off`: sized as `flagged`, but with another order of layers,
    so that only false is served; `even`: layers 0, 2, ...; `pattern`: all but every
    `sliding_window_pattern`-th. The last two are not served."""
    default_window: int | None = None
    """`sliding_window` of a file without that key."""
    default_positions: int | None = None
    """`max_positions` of a file without its key; serving requires the key."""
    mixture_stride: tuple[str, int] | None = None
    """A key with a stride, and an offset: only layers whose number plus offset is a
    multiple of the stride are mixtures."""
    is_conv1d: bool = False
    """True if a layer's matrices are stored `[in, out]` (and q, k, v as one)."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies of a file without one."""


def _key(*fields: str, default: object = None) -> Key:
    return Key(fields, default)


def _keys(
    keys: Mapping[str, Key], *without: str, **defaults: bool | int | float
) -> dict[str, Key]:
    """Returns a family's keys without some of them, and with other defaults."""
    return {
        key: value._replace(default=defaults.get(key, value.default))
        for key, value in keys.items()
        if key not in without
    }


_LLAMA = Family(
    architecture="LlamaForCausalLM",
    keys={
        "vocab_size": _key("vocab_size"),
        "hidden_size": _key("hidden_size"),
        "num_hidden_layers": _key("num_layers"),
        "num_attention_heads": _key("num_q_heads"),
        "num_key_value_heads": _key("num_kv_heads"),
        "head_dim": _key("head_dim"),
        "intermediate_size": _key("mlp_size"),
        "max_position_embeddings": _key("max_positions"),
        "rms_norm_eps": _key("norm_eps", default=1e-6),
        "hidden_act": _key("activation", default="silu"),
        "tie_word_embeddings": _key("tie_embeddings", default=False),
        "attention_bias": _key("qkv_bias", "out_bias", default=False),
        "mlp_bias": _key("mlp_bias", default=False),
    },
    implied={"norm": "rms", "gated": True},
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


# Keys that these families do not read. A bias that differs from the family's is found
# when the tensors are loaded.
_BIASES = ("attention_bias", "mlp_bias", "qkv_bias")
_UNBIASED = _keys(_LLAMA.keys, "attention_bias", "mlp_bias")

_QWEN_MOE = _LLAMA._replace(
    keys={
        **_UNBIASED,
        "num_experts": _key("experts.num_experts"),
        "num_experts_per_tok": _key("experts.top_k"),
        "moe_intermediate_size": _key("experts.size"),
        "norm_topk_prob": _key("experts.renormalise", default=False),
        "mlp_only_layers": _key("experts.dense_layers", default=[]),
        "router_aux_loss_coef": _key("experts.balance_weight", default=0.001),
    },
    only_served={"decoder_sparse_step": 1},
    mixture_stride=("decoder_sparse_step", 1),
    windows="off",
    default_window=4096,
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
)

_GEMMA = _LLAMA._replace(
    architecture="GemmaForCausalLM",
    servable=False,
    keys={
        **_keys(
            _LLAMA.keys,
            "hidden_act",
            "mlp_bias",
            num_key_value_heads=16,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        "hidden_activation": _key("activation", default="gelu_pytorch_tanh"),
    },
    modules={},
)

_GEMMA2 = _GEMMA._replace(
    architecture="Gemma2ForCausalLM",
    keys=_keys(_GEMMA.keys, num_key_value_heads=4),
    implied={**_GEMMA.implied, "norms_per_layer": 4},
    windows="even",
    default_window=4096,
)

_DEEPSEEK_V2 = _LLAMA._replace(
    architecture="DeepseekV2ForCausalLM",
    keys={
        **_keys(_UNBIASED, "num_key_value_heads", "head_dim"),
        "q_lora_rank": _key("q_rank", default=1536),
        "kv_lora_rank": _key("kv_rank", default=512),
        "qk_nope_head_dim": _key("nope_dim", default=128),
        "qk_rope_head_dim": _key("rope_dim", default=64),
        "v_head_dim": _key("value_dim", default=128),
        "num_nextn_predict_layers": _key("num_ahead_layers", default=0),
        "n_routed_experts": _key("experts.num_experts"),
        "num_experts_per_tok": _key("experts.top_k"),
        "moe_intermediate_size": _key("experts.size"),
        "n_shared_experts": _key("experts.num_shared"),
        "first_k_dense_replace": _key("experts.num_dense_layers", default=0),
        "topk_method": _key("experts.gate_bias", default="greedy"),
        "n_group": _key("experts.num_groups", default=1),
        "topk_group": _key("experts.top_groups", default=1),
        "norm_topk_prob": _key("experts.renormalise", default=False),
        "routed_scaling_factor": _key("experts.scale", default=1.0),
        "aux_loss_alpha": _key("experts.balance_weight", default=0.001),
    },
    implied={**_LLAMA.implied, "experts.scoring": "softmax"},
    derived=(
        "q_rank",
        "experts.num_shared",
    ),  # null: no query compression; no shared experts
    only={"attention_bias": False, "mlp_bias": False},
    only_served={
        "moe_layer_freq": 1,
        # transformers ignores true, and DeepSeek's code then ignores the scale.
        "norm_topk_prob": False,
        # Both have 1e-6 for the norms of the latent and of the compressed query.
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "scoring_func": "softmax",
    },
    equal={
        "num_key_value_heads": "num_attention_heads",
        # transformers' name of the rotary part: another value changes its frequencies.
        "head_dim": "qk_rope_head_dim",
    },
    aliases={"num_experts": "n_routed_experts"},
    # `auto_map` names DeepSeek's own code, which has the same architecture.
    harmless=("auto_map", "ep_size", "qk_head_dim", "seq_aux"),
    mixture_stride=("moe_layer_freq", 0),
    modules={
        **{name: _LLAMA.modules[name] for name in ("embed", "final_norm", "head")},
        **{name: _LLAMA.modules[name] for name in (".attention_norm", ".mlp_norm")},
        ".q": (".self_attn.q_proj",),
        ".q_down": (".self_attn.q_a_proj",),
        ".q_norm": (".self_attn.q_a_layernorm",),
        ".q_up": (".self_attn.q_b_proj",),
        ".kv_down": (".self_attn.kv_a_proj_with_mqa",),
        ".kv_norm": (".self_attn.kv_a_layernorm",),
        ".kv_up": (".self_attn.kv_b_proj",),
        **{name: _LLAMA.modules[name] for name in (".out", ".up", ".down")},
        ".mixture.router": (".mlp.gate",),
        ".mixture.up": (".mlp.experts.{}.gate_proj", ".mlp.experts.{}.up_proj"),
        ".mixture.down": (".mlp.experts.{}.down_proj",),
        ".mixture.shared_up": (
            ".mlp.shared_experts.gate_proj",
            ".mlp.shared_experts.up_proj",
        ),
        ".mixture.shared_down": (".mlp.shared_experts.down_proj",),
    },
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA._replace(
        architecture="MistralForCausalLM",
        keys=_keys(_UNBIASED, num_key_value_heads=8),
        harmless=_BIASES,
        windows="always",
        default_window=4096,
    ),
    "qwen2": _LLAMA._replace(
        architecture="Qwen2ForCausalLM",
        keys=_UNBIASED,
        implied={**_LLAMA.implied, "qkv_bias": True},
        harmless=_BIASES,
        windows="flagged",
        default_window=4096,
    ),
    "qwen3": _LLAMA._replace(
        architecture="Qwen3ForCausalLM",
        keys=_keys(_LLAMA.keys, "mlp_bias", head_dim=128),
        implied={**_LLAMA.implied, "qk_norm": True},
        harmless=("mlp_bias", "qkv_bias"),
        windows="flagged",
        default_window=4096,
    ),
    "mixtral": _LLAMA._replace(
        architecture="MixtralForCausalLM",
        keys={
            **_keys(_UNBIASED, num_key_value_heads=8, rms_norm_eps=1e-5),
            "intermediate_size": _key("mlp_size", "experts.size"),
            "num_local_experts": _key("experts.num_experts", default=8),
            "num_experts_per_tok": _key("experts.top_k", default=2),
            "router_aux_loss_coef": _key("experts.balance_weight", default=0.001),
        },
        implied={**_LLAMA.implied, "experts.renormalise": True},
        only_served={"norm_topk_prob": True},
        aliases={"num_experts": "num_local_experts"},
        harmless=_BIASES,
        windows="always",
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
    ),
    "qwen2_moe": _QWEN_MOE._replace(
        architecture="Qwen2MoeForCausalLM",
        keys={
            **_keys(
                _QWEN_MOE.keys,
                num_key_value_heads=16,
                num_experts=60,
                num_experts_per_tok=4,
                moe_intermediate_size=1408,
            ),
            "qkv_bias": _key("qkv_bias", default=True),
            "shared_expert_intermediate_size": _key(
                "experts.shared_size", default=5632
            ),
        },
        implied={**_QWEN_MOE.implied, "experts.shared_gate": True},
        harmless=("attention_bias", "mlp_bias"),
    ),
    "qwen3_moe": _QWEN_MOE._replace(
        architecture="Qwen3MoeForCausalLM",
        keys={
            **_keys(
                _QWEN_MOE.keys,
                num_key_value_heads=4,
                num_experts=128,
                num_experts_per_tok=8,
                moe_intermediate_size=768,
            ),
            "attention_bias": _LLAMA.keys["attention_bias"],
        },
        implied={**_QWEN_MOE.implied, "qk_norm": True},
        aliases={"num_local_experts": "num_experts"},
        harmless=("mlp_bias", "qkv_bias"),
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        keys={
            "vocab_size": _key("vocab_size"),
            "n_embd": _key("hidden_size"),
            "n_layer": _key("num_layers"),
            "n_head": _key("num_q_heads"),
            "n_inner": _key("mlp_size"),
            "n_positions": _key("max_positions"),
            "layer_norm_epsilon": _key("norm_eps", default=1e-5),
            "activation_function": _key("activation", default="gelu_new"),
            "tie_word_embeddings": _key("tie_embeddings", default=True),
        },
        implied={
            "norm": "layer",
            "positions": "learned",
            "gated": False,
            **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
        },
        only_served={
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
            # Keys of the first release; only `n_positions` is read.
            "n_ctx",
            "n_special",
            "predict_special_tokens",
            "output_past",
            # Another order of the same products, for half precision.
            "reorder_and_upcast_attn",
            # Keys of a multiple-choice head.
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        ),
        default_positions=1024,
        is_conv1d=True,
    ),
    "opt": Family(
        architecture="OPTForCausalLM",
        keys={
            "vocab_size": _key("vocab_size"),
            "hidden_size": _key("hidden_size"),
            "num_hidden_layers": _key("num_layers"),
            "num_attention_heads": _key("num_q_heads"),
            "ffn_dim": _key("mlp_size"),
            "max_position_embeddings": _key("max_positions"),
            "activation_function": _key("activation", default="relu"),
            "tie_word_embeddings": _key("tie_embeddings", default=True),
            "enable_bias": _key("qkv_bias", "out_bias", "mlp_bias", default=True),
        },
        implied={
            "norm": "layer",
            "norm_eps": 1e-5,
            "positions": "learned",
            "position_offset": 2,
            "gated": False,
        },
        only={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
        equal={"word_embed_proj_dim": "hidden_size"},
        default_positions=2048,
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
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2._replace(
        architecture="Gemma3ForCausalLM",
        implied={**_GEMMA2.implied, "qk_norm": True},
        windows="pattern",
    ),
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V2._replace(
        architecture="DeepseekV3ForCausalLM",
        keys=_keys(
            _DEEPSEEK_V2.keys,
            "topk_method",
            num_nextn_predict_layers=1,
            n_shared_experts=1,
            first_k_dense_replace=3,
            n_group=8,
            topk_group=4,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
        # Megatron's name; DeepSeek's folders do not have it.
        | {"moe_router_bias_update_rate": _key("experts.bias_rate", default=0.0)},
        implied={
            **_DEEPSEEK_V2.implied,
            "experts.gate_bias": True,
            "experts.scoring": "sigmoid",
        },
        only_served={
            "moe_layer_freq": 1,
            "rms_norm_eps": 1e-6,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        modules={
            **_DEEPSEEK_V2.modules,
            # Of the layers for multi-token prediction, after the model's layers.
            ".token_norm": (".enorm",),
            ".feature_norm": (".hnorm",),
            ".merge": (".eh_proj",),
            ".final_norm": (".shared_head.norm",),
            ".embed": (".embed_tokens",),
            ".head": (".shared_head.head",),
        },
        aliases={
            "num_local_experts": "n_routed_experts",
            "num_mtp_layers": "num_nextn_predict_layers",
        },
    ),
}
