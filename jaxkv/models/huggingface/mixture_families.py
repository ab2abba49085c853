"""Tables of families with a mixture of experts; defaults are those of transformers."""

from collections.abc import Mapping

from jaxkv.models.huggingface.dense_families import BIASES, LLAMA, UNBIASED
from jaxkv.models.huggingface.family import Family, key, keys_of

QWEN_MOE = LLAMA._replace(
    keys={
        **UNBIASED,
        "num_experts": key("experts.num_experts"),
        "num_experts_per_tok": key("experts.top_k"),
        "moe_intermediate_size": key("experts.size"),
        "norm_topk_prob": key("experts.renormalise", default=False),
        "mlp_only_layers": key("experts.dense_layers", default=[]),
        "router_aux_loss_coef": key("experts.balance_weight", default=0.001),
    },
    only_served={"decoder_sparse_step": 1},
    mixture_stride=("decoder_sparse_step", 1),
    windows="off",
    default_window=4096,
    modules={
        **LLAMA.modules,
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

MIXTRAL = LLAMA._replace(
    architecture="MixtralForCausalLM",
    keys={
        **keys_of(UNBIASED, num_key_value_heads=8, rms_norm_eps=1e-5),
        "intermediate_size": key("mlp_size", "experts.size"),
        "num_local_experts": key("experts.num_experts", default=8),
        "num_experts_per_tok": key("experts.top_k", default=2),
        "router_aux_loss_coef": key("experts.balance_weight", default=0.001),
    },
    implied={**LLAMA.implied, "experts.renormalise": True},
    only_served={"norm_topk_prob": True},
    aliases={"num_experts": "num_local_experts"},
    harmless=BIASES,
    windows="always",
    modules={
        **LLAMA.modules,
        ".mixture.router": (".block_sparse_moe.gate",),
        ".mixture.up": (
            ".block_sparse_moe.experts.{}.w1",
            ".block_sparse_moe.experts.{}.w3",
        ),
        ".mixture.down": (".block_sparse_moe.experts.{}.w2",),
    },
    rope_theta=1e6,
)

DEEPSEEK_V2 = LLAMA._replace(
    architecture="DeepseekV2ForCausalLM",
    keys={
        **keys_of(UNBIASED, "num_key_value_heads", "head_dim"),
        "q_lora_rank": key("q_rank", default=1536),
        "kv_lora_rank": key("kv_rank", default=512),
        "qk_nope_head_dim": key("nope_dim", default=128),
        "qk_rope_head_dim": key("rope_dim", default=64),
        "v_head_dim": key("value_dim", default=128),
        "num_nextn_predict_layers": key("num_ahead_layers", default=0),
        "n_routed_experts": key("experts.num_experts"),
        "num_experts_per_tok": key("experts.top_k"),
        "moe_intermediate_size": key("experts.size"),
        "n_shared_experts": key("experts.num_shared"),
        "first_k_dense_replace": key("experts.num_dense_layers", default=0),
        "topk_method": key("experts.gate_bias", default="greedy"),
        "n_group": key("experts.num_groups", default=1),
        "topk_group": key("experts.top_groups", default=1),
        "norm_topk_prob": key("experts.renormalise", default=False),
        "routed_scaling_factor": key("experts.scale", default=1.0),
        "aux_loss_alpha": key("experts.balance_weight", default=0.001),
    },
    implied={**LLAMA.implied, "experts.scoring": "softmax"},
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
        **{name: LLAMA.modules[name] for name in ("embed", "final_norm", "head")},
        **{name: LLAMA.modules[name] for name in (".attention_norm", ".mlp_norm")},
        ".q": (".self_attn.q_proj",),
        ".q_down": (".self_attn.q_a_proj",),
        ".q_norm": (".self_attn.q_a_layernorm",),
        ".q_up": (".self_attn.q_b_proj",),
        ".kv_down": (".self_attn.kv_a_proj_with_mqa",),
        ".kv_norm": (".self_attn.kv_a_layernorm",),
        ".kv_up": (".self_attn.kv_b_proj",),
        **{name: LLAMA.modules[name] for name in (".out", ".up", ".down")},
        ".mixture.router": (".mlp.gate",),
        ".mixture.router.bias": (".mlp.gate.e_score_correction_bias",),
        ".mixture.up": (".mlp.experts.{}.gate_proj", ".mlp.experts.{}.up_proj"),
        ".mixture.down": (".mlp.experts.{}.down_proj",),
        ".mixture.shared_up": (
            ".mlp.shared_experts.gate_proj",
            ".mlp.shared_experts.up_proj",
        ),
        ".mixture.shared_down": (".mlp.shared_experts.down_proj",),
    },
)

MIXTURE_FAMILIES: Mapping[str, Family] = {
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN_MOE._replace(
        architecture="Qwen2MoeForCausalLM",
        keys={
            **keys_of(
                QWEN_MOE.keys,
                num_key_value_heads=16,
                num_experts=60,
                num_experts_per_tok=4,
                moe_intermediate_size=1408,
            ),
            "qkv_bias": key("qkv_bias", default=True),
            "shared_expert_intermediate_size": key("experts.shared_size", default=5632),
        },
        implied={**QWEN_MOE.implied, "experts.shared_gate": True},
        windows="listed",
        harmless=("attention_bias", "mlp_bias"),
    ),
    "qwen3_moe": QWEN_MOE._replace(
        architecture="Qwen3MoeForCausalLM",
        keys={
            **keys_of(
                QWEN_MOE.keys,
                num_key_value_heads=4,
                num_experts=128,
                num_experts_per_tok=8,
                moe_intermediate_size=768,
            ),
            "attention_bias": LLAMA.keys["attention_bias"],
        },
        implied={**QWEN_MOE.implied, "qk_norm": True},
        aliases={"num_local_experts": "num_experts"},
        harmless=("mlp_bias", "qkv_bias"),
    ),
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V2._replace(
        architecture="DeepseekV3ForCausalLM",
        keys=keys_of(
            DEEPSEEK_V2.keys,
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
        | {"moe_router_bias_update_rate": key("experts.bias_rate", default=0.0)},
        implied={
            **DEEPSEEK_V2.implied,
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
            **DEEPSEEK_V2.modules,
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
    "glm4_moe": DEEPSEEK_V2._replace(
        architecture="Glm4MoeForCausalLM",
        keys={
            **keys_of(LLAMA.keys, "attention_bias", "mlp_bias", rms_norm_eps=1e-5),
            **{
                name: DEEPSEEK_V2.keys[name]
                for name in DEEPSEEK_V2.keys
                if DEEPSEEK_V2.keys[name].fields[0].startswith("experts.")
                and name not in ("topk_method", "aux_loss_alpha")
            },
            "attention_bias": key("qkv_bias", default=False),
            "use_qk_norm": key("qk_norm", default=False),
            "n_shared_experts": key("experts.num_shared", default=1),
            "first_k_dense_replace": key("experts.num_dense_layers", default=1),
            "norm_topk_prob": key("experts.renormalise", default=True),
            "router_aux_loss_coef": key("experts.balance_weight", default=0.001),
        },
        implied={
            **LLAMA.implied,
            "experts.gate_bias": True,
            "experts.scoring": "sigmoid",
        },
        derived=(*LLAMA.derived, "experts.num_shared"),
        only={"mlp_bias": False},
        only_served={},
        equal={},
        aliases={
            "num_local_experts": "n_routed_experts",
            "num_mtp_layers": "num_nextn_predict_layers",
        },
        harmless=("num_nextn_predict_layers", "scoring_func", "topk_method"),
        mixture_stride=None,
        rope_share=0.5,
        has_partial_rope=True,
        skips_ahead=True,
        modules={
            **{name: names for name, names in LLAMA.modules.items()},
            **{
                name: names
                for name, names in DEEPSEEK_V2.modules.items()
                if name.startswith(".mixture")
            },
        },
    ),
    "minimax_m2": LLAMA._replace(
        architecture="MiniMaxM2ForCausalLM",
        keys={
            **keys_of(UNBIASED, num_key_value_heads=8, head_dim=128),
            "intermediate_size": key("mlp_size", "experts.size"),
            "num_local_experts": key("experts.num_experts", default=256),
            "num_experts_per_tok": key("experts.top_k", default=8),
            "router_aux_loss_coef": key("experts.balance_weight", default=0.001),
        },
        implied={
            **LLAMA.implied,
            "qk_norm": True,
            "qk_norm_over": "layer",
            "experts.gate_bias": True,
            "experts.scoring": "sigmoid",
            "experts.renormalise": True,
        },
        only_served={
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
        },
        aliases={"num_experts": "num_local_experts"},
        harmless=(
            *BIASES,
            "attn_type_list",
            "auto_map",
            "use_mtp",
            "num_mtp_modules",
            "mtp_transformer_layers",
        ),
        rope_theta=5e6,
        position_keys=("rotary_dim",),
        has_partial_rope=True,
        skips_ahead=True,
        modules={
            **MIXTRAL.modules,
            ".mixture.router.bias": (".block_sparse_moe.e_score_correction_bias",),
        },
    ),
    "gpt_oss": LLAMA._replace(
        architecture="GptOssForCausalLM",
        keys={
            **keys_of(
                LLAMA.keys,
                "hidden_act",
                "mlp_bias",
                num_key_value_heads=8,
                head_dim=64,
                rms_norm_eps=1e-5,
                attention_bias=True,
            ),
            "intermediate_size": key("mlp_size", "experts.size"),
            "num_local_experts": key("experts.num_experts", default=128),
            "num_experts_per_tok": key("experts.top_k", default=4),
            "router_aux_loss_coef": key("experts.balance_weight", default=0.001),
            "swiglu_alpha": key("activation_slope", default=1.702),
            "swiglu_limit": key("activation_limit", default=7.0),
        },
        implied={
            **LLAMA.implied,
            "activation": "clamped_swiglu",
            "sinks": True,
            "experts.renormalise": True,
            "experts.router_bias": True,
            "experts.expert_bias": True,
        },
        only_served={"hidden_act": "silu"},
        aliases={
            "num_experts": "num_local_experts",
            "experts_per_token": "num_experts_per_tok",
        },
        harmless=("mlp_bias", "initial_context_length"),
        windows="even",
        default_window=128,
        rope_theta=150_000.0,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        interleaved=(".mixture.up",),
        modules={
            **LLAMA.modules,
            ".sinks.bias": (".self_attn.sinks",),
            ".mixture.router": (".mlp.router",),
            ".mixture.logit_bias.bias": (".mlp.router.bias",),
            ".mixture.up.weight": (".mlp.experts.gate_up_proj",),
            ".mixture.up.bias": (".mlp.experts.gate_up_proj_bias",),
            ".mixture.down.weight": (".mlp.experts.down_proj",),
            ".mixture.down.bias": (".mlp.experts.down_proj_bias",),
        },
    ),
}
