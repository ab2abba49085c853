"""Tables of dense model families; defaults are those of transformers.

A further family with the same arithmetic is a further entry.
"""

from collections.abc import Mapping

from jaxkv.models.huggingface.family import Family, key, keys_of

LLAMA = Family(
    architecture="LlamaForCausalLM",
    keys={
        "vocab_size": key("vocab_size"),
        "hidden_size": key("hidden_size"),
        "num_hidden_layers": key("num_layers"),
        "num_attention_heads": key("num_q_heads"),
        "num_key_value_heads": key("num_kv_heads"),
        "head_dim": key("head_dim"),
        "intermediate_size": key("mlp_size"),
        "max_position_embeddings": key("max_positions"),
        "rms_norm_eps": key("norm_eps", default=1e-6),
        "hidden_act": key("activation", default="silu"),
        "tie_word_embeddings": key("tie_embeddings", default=False),
        "attention_bias": key("qkv_bias", "out_bias", default=False),
        "mlp_bias": key("mlp_bias", default=False),
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
BIASES = ("attention_bias", "mlp_bias", "qkv_bias")
UNBIASED = keys_of(LLAMA.keys, "attention_bias", "mlp_bias")

OLMO2 = LLAMA._replace(
    architecture="Olmo2ForCausalLM",
    keys=keys_of(LLAMA.keys, "mlp_bias", rms_norm_eps=1e-5),
    implied={
        **LLAMA.implied,
        "norm_places": "after",
        "qk_norm": True,
        "qk_norm_over": "layer",
    },
    harmless=("mlp_bias",),
    modules={
        **{
            name: names
            for name, names in LLAMA.modules.items()
            if name not in (".attention_norm", ".mlp_norm")
        },
        ".attention_out_norm": (".post_attention_layernorm",),
        ".mlp_out_norm": (".post_feedforward_layernorm",),
    },
)

GEMMA = LLAMA._replace(
    architecture="GemmaForCausalLM",
    keys={
        **keys_of(
            LLAMA.keys,
            "hidden_act",
            "mlp_bias",
            num_key_value_heads=16,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        "hidden_act": key(
            "activation", default="gelu_pytorch_tanh", form="approximate"
        ),
    },
    implied={**LLAMA.implied, "norm": "rms_offset"},
    derived=(*LLAMA.derived, "embed_scale"),
    harmless=("mlp_bias",),
    only_served={
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
    },
)

GEMMA2 = GEMMA._replace(
    architecture="Gemma2ForCausalLM",
    keys={
        **keys_of(GEMMA.keys, "hidden_act", num_key_value_heads=4),
        "hidden_activation": key("activation", default="gelu_pytorch_tanh"),
        "query_pre_attn_scalar": key(
            "attention_scale", default=256, form="inverse_root"
        ),
        "final_logit_softcapping": key("logit_cap", default=30.0),
        "attn_logit_softcapping": key("score_cap", default=50.0),
    },
    implied={**LLAMA.implied, "norm": "rms_offset", "norm_places": "both"},
    derived=(*GEMMA.derived, "logit_cap", "score_cap"),
    only_served={"use_bidirectional_attention": False},
    # transformers reads `hidden_activation`.
    harmless=("mlp_bias", "hidden_act", "cache_implementation"),
    windows="even",
    default_window=4096,
    modules={
        **LLAMA.modules,
        ".attention_out_norm": (".post_attention_layernorm",),
        ".mlp_norm": (".pre_feedforward_layernorm",),
        ".mlp_out_norm": (".post_feedforward_layernorm",),
    },
)

DENSE_FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA._replace(
        architecture="MistralForCausalLM",
        keys=keys_of(UNBIASED, num_key_value_heads=8),
        harmless=BIASES,
        windows="always",
        default_window=4096,
    ),
    "qwen2": LLAMA._replace(
        architecture="Qwen2ForCausalLM",
        keys=UNBIASED,
        implied={**LLAMA.implied, "qkv_bias": True},
        harmless=BIASES,
        windows="flagged",
        default_window=4096,
    ),
    "qwen3": LLAMA._replace(
        architecture="Qwen3ForCausalLM",
        keys=keys_of(LLAMA.keys, "mlp_bias", head_dim=128),
        implied={**LLAMA.implied, "qk_norm": True},
        harmless=("mlp_bias", "qkv_bias"),
        windows="flagged",
        default_window=4096,
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        keys={
            "vocab_size": key("vocab_size"),
            "n_embd": key("hidden_size"),
            "n_layer": key("num_layers"),
            "n_head": key("num_q_heads"),
            "n_inner": key("mlp_size"),
            "n_positions": key("max_positions"),
            "layer_norm_epsilon": key("norm_eps", default=1e-5),
            "activation_function": key("activation", default="gelu_new"),
            "tie_word_embeddings": key("tie_embeddings", default=True),
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
            "vocab_size": key("vocab_size"),
            "hidden_size": key("hidden_size"),
            "num_hidden_layers": key("num_layers"),
            "num_attention_heads": key("num_q_heads"),
            "ffn_dim": key("mlp_size"),
            "max_position_embeddings": key("max_positions"),
            "activation_function": key("activation", default="relu"),
            "tie_word_embeddings": key("tie_embeddings", default=True),
            "enable_bias": key("qkv_bias", "out_bias", "mlp_bias", default=True),
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
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        keys={
            **keys_of(
                LLAMA.keys,
                "num_key_value_heads",
                "head_dim",
                "rms_norm_eps",
                "mlp_bias",
                hidden_act="gelu",
                attention_bias=True,
            ),
            "layer_norm_eps": key("norm_eps", default=1e-5),
            "use_parallel_residual": key("residual", default=True, form="parallel"),
        },
        implied={"norm": "layer", "gated": False, "mlp_bias": True},
        derived=(),
        rope_share=0.25,
        has_partial_rope=True,
        rope_aliases={
            "rotary_pct": "partial_rotary_factor",
            "rotary_emb_base": "rope_theta",
        },
        # Of the mixture of all families in transformers' own test folders.
        harmless=("num_key_value_heads", "is_decoder", "mlp_bias"),
        is_fused_by_head=True,
        base="gpt_neox.",
        layer="gpt_neox.layers.{}",
        modules={
            "embed": ("gpt_neox.embed_in",),
            "final_norm": ("gpt_neox.final_layer_norm",),
            "head": ("embed_out",),
            ".attention_norm": (".input_layernorm",),
            ".qkv": (".attention.query_key_value",),
            ".out": (".attention.dense",),
            ".mlp_norm": (".post_attention_layernorm",),
            ".up": (".mlp.dense_h_to_4h",),
            ".down": (".mlp.dense_4h_to_h",),
        },
    ),
    "olmo2": OLMO2,
    "olmo3": OLMO2._replace(
        architecture="Olmo3ForCausalLM",
        windows="pattern",
        window_period=4,
        default_window=4096,
        rope_theta=5e5,
        local_theta=5e5,
    ),
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2._replace(
        architecture="Gemma3ForCausalLM",
        # transformers ignores a cap of the scores.
        keys=keys_of(
            GEMMA2.keys, "attn_logit_softcapping", final_logit_softcapping=None
        ),
        implied={**GEMMA2.implied, "qk_norm": True},
        windows="pattern",
        rope_theta=1e6,
        local_theta=1e4,
        position_keys=("rope_local_base_freq",),
    ),
    "smollm3": LLAMA._replace(
        architecture="SmolLM3ForCausalLM",
        keys=keys_of(LLAMA.keys, num_key_value_heads=4, tie_word_embeddings=True),
        windows="nope",
        rope_theta=2e6,
        position_keys=("no_rope_layers", "no_rope_layer_interval"),
        harmless=("max_window_layers",),
    ),
    "granite": LLAMA._replace(
        architecture="GraniteForCausalLM",
        keys={
            **LLAMA.keys,
            "embedding_multiplier": key("embed_scale", default=1.0),
            "attention_multiplier": key("attention_scale", default=1.0),
            "residual_multiplier": key("residual_scale", default=1.0),
            "logits_scaling": key("logit_scale", default=1.0, form="inverse"),
        },
    ),
    "glm4": LLAMA._replace(
        architecture="Glm4ForCausalLM",
        keys={
            **keys_of(
                LLAMA.keys,
                "attention_bias",
                "mlp_bias",
                num_key_value_heads=2,
                head_dim=128,
                rms_norm_eps=1.5625e-7,
            ),
            "attention_bias": key("qkv_bias", default=True),
        },
        implied={**LLAMA.implied, "norm_places": "both"},
        harmless=("mlp_bias",),
        rope_share=0.5,
        has_partial_rope=True,
        rope_order="pairs",
        modules={
            **LLAMA.modules,
            ".attention_out_norm": (".post_self_attn_layernorm",),
            ".up": (".mlp.gate_up_proj",),
            ".mlp_out_norm": (".post_mlp_layernorm",),
        },
    ),
    "nanochat": LLAMA._replace(
        architecture="NanoChatForCausalLM",
        keys={
            **keys_of(LLAMA.keys, "mlp_bias", hidden_act="relu2"),
            "final_logit_softcapping": key("logit_cap", default=15.0),
        },
        implied={
            "norm": "rms_plain",
            "gated": False,
            "embed_norm": True,
            "qk_norm": True,
        },
        derived=(*LLAMA.derived, "logit_cap"),
        # Norms of queries and keys follow the rotation, which changes no norm unless it
        # scales, as that of "yarn".
        rope_order="swapped",
        rope_kinds=("default", "linear", "llama3"),
        modules={
            **LLAMA.modules,
            ".up": (".mlp.fc1",),
            ".down": (".mlp.fc2",),
        },
    ),
    "phi3": LLAMA._replace(
        architecture="Phi3ForCausalLM",
        keys=keys_of(UNBIASED, rms_norm_eps=1e-5),
        has_partial_rope=True,
        harmless=(*BIASES, "resid_pdrop", "embd_pdrop", "auto_map"),
        windows="always",
        rope_kinds=("default", "longrope"),
        modules={
            **LLAMA.modules,
            ".qkv": (".self_attn.qkv_proj",),
            ".up": (".mlp.gate_up_proj",),
        },
    ),
    "ministral3": LLAMA._replace(
        architecture="Ministral3ForCausalLM",
        keys=keys_of(UNBIASED, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5),
        harmless=BIASES,
        windows="always",
        rope={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
}
