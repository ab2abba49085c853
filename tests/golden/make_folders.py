"""Writes random Hugging Face folders and the results of transformers with each.

`test_foreign_folders.py` runs this script and compares the project's results with those
of transformers. Needs torch and transformers:

    python tests/golden/make_folders.py OUT --seed 1 --num 300

Every folder has the random weights of a small model of one family and a `config.json`
in the style of transformers 4 or 5, of manual edits, or with keys that other software
adds, that contradict each other, or that are invalid. `expected.npz` has `ids`, their
`logits`, and `greedy`, the tokens of greedy decoding. If transformers does not load the
folder or all of its weights, the folder has `refused.txt` instead.
"""

import argparse
import contextlib
import json
import pathlib
import shutil
import warnings
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

LENGTH = 20
NUM_PROMPT = 8

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
}
KINDS = [*FAMILIES][[*FAMILIES].index("gpt_neox") :]
"""Families with further kinds of layers."""
HYBRIDS = [*FAMILIES][[*FAMILIES].index("qwen3_next") :]
"""Families with recurrent layers."""
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


class Draw:
    """Random choices from one seed."""

    def __init__(self, seed: list[int]):
        self.rng = np.random.default_rng(seed)

    def one(self, *values: Any) -> Any:
        """Returns one of the values."""
        return values[self.rng.integers(len(values))]

    def chance(self, probability: float) -> bool:
        """Returns True with a probability."""
        return bool(self.rng.random() < probability)


def draw_config(draw: Draw, family: str) -> dict[str, Any]:
    """Draws a valid configuration."""
    heads = draw.one(2, 4)
    raw: dict[str, Any] = {
        "model_type": family,
        "architectures": [FAMILIES[family]],
        "vocab_size": draw.one(64, 100),
        "tie_word_embeddings": draw.chance(0.4),
    }
    if family == "gpt2":
        raw |= {
            "n_embd": draw.one(16, 32),
            "n_layer": draw.one(1, 2, 3),
            "n_head": heads,
            "n_positions": draw.one(24, 64),
            "activation_function": draw.one("gelu_new", "relu", "gelu", "silu"),
            "layer_norm_epsilon": draw.one(1e-5, 1e-3),
        }
        raw |= {"n_inner": draw.one(None, 40)} if draw.chance(0.5) else {}
        return raw
    raw |= {
        "hidden_size": draw.one(16, 32),
        "num_hidden_layers": draw.one(1, 2, 3),
        "num_attention_heads": heads,
        "max_position_embeddings": draw.one(24, 64),
    }
    if family == "opt":
        raw |= {
            "ffn_dim": draw.one(24, 40),
            "word_embed_proj_dim": raw["hidden_size"],
            "activation_function": draw.one("relu", "gelu"),
            "enable_bias": draw.chance(0.8),
        }
        raw["word_embed_proj_dim"] //= 1 + draw.chance(0.1)
        raw |= {"do_layer_norm_before": draw.one(True, True, True, False)}
        return raw
    raw |= {
        "intermediate_size": draw.one(24, 40),
        "num_key_value_heads": draw.one(1, 2, heads),
        "hidden_act": draw.one("silu", "silu", "gelu", "gelu_pytorch_tanh"),
        "rms_norm_eps": draw.one(1e-6, 1e-5, 1e-3),
        "rope_parameters": draw_rope(draw),
    }
    if family.startswith("deepseek"):
        return raw | draw_latent(draw, family, raw)
    if family in KINDS:
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        if family.startswith("lfm2"):
            raw["norm_eps"] = raw.pop("rms_norm_eps")
            del raw["hidden_act"]  # always SiLU
        is_hybrid = family in HYBRIDS
        draw_fields = draw_hybrid if is_hybrid else draw_kinds
        return raw | ids | draw_fields(draw, family, raw)
    stretched = raw["rope_parameters"]["rope_type"] in ("yarn", "dynamic")
    # Without `head_dim` transformers cannot build these models.
    if family.startswith("qwen3") or stretched or draw.chance(0.4):
        raw["head_dim"] = draw.one(4, 8, 16)
    if family in ("llama", "qwen3", "qwen3_moe") and draw.chance(0.5):
        raw["attention_bias"] = draw.chance(0.5)
    if family == "llama" and draw.chance(0.5):
        raw["mlp_bias"] = draw.chance(0.5)
    return raw | draw_windows(draw, family, raw) | draw_experts(draw, family, raw)


def draw_kinds(draw: Draw, family: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Draws fields of families with further kinds of layers."""
    num_layers = raw["num_hidden_layers"]
    theta = draw.one(1e3, 1e4)
    plain = {"rope_type": "default", "rope_theta": theta}
    yarn = plain | {
        "rope_type": "yarn",
        "factor": draw.one(2.0, 4.0),
        "original_max_position_embeddings": 16,
    }
    part = plain | {"partial_rotary_factor": draw.one(0.25, 0.5, 1.0)}
    types = [draw.one("full_attention", "sliding_attention") for _ in range(num_layers)]
    windows = {"layer_types": types, "sliding_window": draw.one(3, 7)}
    by_type = {"full_attention": draw.one(plain, yarn), "sliding_attention": plain}
    bias = {"attention_bias": draw.chance(0.5)}
    experts = {
        "num_local_experts": draw.one(4, 6),
        "num_experts_per_tok": draw.one(1, 2),
    }
    caps = {
        "attn_logit_softcapping": draw.one(None, 1.0, 50.0),
        "final_logit_softcapping": draw.one(None, 2.0, 30.0),
    }
    head = {"head_dim": draw.one(4, 6, 10, 12), "rope_parameters": plain}
    scalar = {"query_pre_attn_scalar": draw.one(7, 16)}
    fields: dict[str, Any] = {
        "gpt_neox": {
            "num_key_value_heads": None,
            "layer_norm_eps": draw.one(1e-5, 1e-3),
            "use_parallel_residual": draw.chance(0.5),
            "rope_parameters": part,
        }
        | bias,
        "olmo2": head | bias,
        "olmo3": head | bias | windows | {"rope_parameters": by_type},
        "gemma": head | bias | {"hidden_act": draw.one("gelu", "silu")},
        "gemma2": head | bias | windows | caps | scalar,
        "gemma3_text": head | windows | scalar | {"rope_parameters": by_type},
        "smollm3": bias
        | {
            "rope_parameters": draw.one(plain, yarn | {"attention_factor": 1.2}),
            "head_dim": raw["hidden_size"] // raw["num_attention_heads"],
            "no_rope_layers": [draw.one(0, 1) for _ in range(num_layers)],
        },
        "granite": bias
        | {
            "rope_parameters": plain,
            "embedding_multiplier": draw.one(1.0, 3.0),
            "attention_multiplier": draw.one(0.1, 0.4),
            "residual_multiplier": draw.one(0.3, 1.0),
            "logits_scaling": draw.one(0.5, 3.0),
        },
        "glm4": head | bias | {"rope_parameters": part},
        "nanochat": {"hidden_act": "relu2", "rope_parameters": plain} | bias,
        "phi3": {"rope_parameters": part, "sliding_window": draw.one(None, 5)},
        "ministral3": head
        | {
            "rope_parameters": yarn
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
        },
        "glm4_moe": head
        | bias
        | {
            "rope_parameters": part,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": draw.one(8, 12),
            "first_k_dense_replace": draw.one(0, 1),
            "n_group": 4,
            "topk_group": draw.one(2, 4),
            "use_qk_norm": draw.chance(0.5),
            "norm_topk_prob": draw.chance(0.7),
        },
        "minimax_m2": head | experts | {"rope_parameters": part},
        "gpt_oss": head
        | bias
        | windows
        | experts
        | {"hidden_act": "silu", "swiglu_limit": draw.one(1.0, 7.0)}
        | {"rope_parameters": draw.one(plain, yarn | {"truncate": False})},
    }
    if family == "gemma4_text":
        return head | bias | windows | draw_gemma4(draw, raw, types, plain)
    return fields[family]


def draw_gemma4(
    draw: Draw, raw: dict[str, Any], types: list[str], plain: dict[str, Any]
) -> dict[str, Any]:
    """Draws fields of Gemma 4, whose layers have sizes and inputs of their own."""
    types = [*types[:-1], "full_attention"]
    num_shared = draw.one(0, 1)
    if {*types[: len(types) - num_shared]} != {*types}:
        num_shared = 0  # a layer would have no earlier one of its type
    partial = plain | {"rope_type": "proportional", "partial_rotary_factor": 0.5}
    return {
        "layer_types": types,
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": draw.chance(0.4),
        "attention_k_eq_v": draw.chance(0.4),
        "global_head_dim": draw.one(8, 16),
        "num_global_key_value_heads": draw.one(1, raw["num_key_value_heads"]),
        "hidden_size_per_layer_input": draw.one(0, 5),
        "vocab_size_per_layer_input": raw["vocab_size"],
        "hidden_activation": draw.one("gelu_pytorch_tanh", "silu"),
        "final_logit_softcapping": draw.one(None, 5.0),
        "enable_moe_block": draw.chance(0.3),
        "num_experts": 4,
        "top_k_experts": draw.one(1, 2),
        "moe_intermediate_size": 8,
        "rope_parameters": {
            "full_attention": draw.one(plain, partial),
            "sliding_attention": plain,
        },
    }


def draw_hybrid(draw: Draw, family: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Draws fields of families with recurrent layers."""
    names = "full_attention", "linear_attention"
    types = [*names, *[draw.one(*names) for _ in range(draw.one(0, 1, 2))]]
    types = [str(kind) for kind in draw.rng.permutation(types)]
    if family == "nemotron_h":
        types += [draw.one("mlp", "moe") for _ in range(draw.one(0, 1, 2))]
        types = [str(kind) for kind in draw.rng.permutation(types)]
    num_layers = len(types)
    plain = {"rope_type": "default", "rope_theta": draw.one(1e3, 1e4)}
    part = plain | {"partial_rotary_factor": draw.one(0.25, 0.5, 1.0)}
    keys = draw.one(1, 2)
    delta = {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.one(1, 2, 3),
        "linear_key_head_dim": draw.one(4, 7),
        "linear_value_head_dim": draw.one(4, 6),
        "linear_conv_kernel_dim": draw.one(2, 4),
    }
    bias = {"attention_bias": draw.chance(0.3)}
    head = {"head_dim": draw.one(4, 8, 12), "rope_parameters": part} | bias
    experts = {
        "num_experts": draw.one(4, 6),
        "num_experts_per_tok": draw.one(1, 2),
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": draw.one(8, 16),
        "norm_topk_prob": draw.chance(0.5),
        "mlp_only_layers": draw.one([], [], [0], [1]),
        "decoder_sparse_step": draw.one(1, 1, 1, 2),
    }
    dense = draw.one(0, 1, 1)
    fields: dict[str, Any] = {
        "qwen3_next": delta | head | experts,
        "qwen3_5_text": delta | head,
        "olmo_hybrid": delta
        | bias
        | {
            "linear_allow_neg_eigval": draw.chance(0.5),
            "rope_parameters": plain | draw.one({}, {"rope_theta": None}),
        },
        "kimi_linear": {
            "num_key_value_heads": raw["num_attention_heads"],
            "rope_parameters": None,
            "kv_lora_rank": draw.one(6, 12),
            "q_lora_rank": draw.one(None, None, 10),
            "qk_nope_head_dim": draw.one(5, 8),
            "qk_rope_head_dim": draw.one(4, 6),
            "v_head_dim": draw.one(7, 8),
            "num_experts": 8,
            "num_experts_per_token": draw.one(1, 2),
            "moe_intermediate_size": 16,
            "num_expert_group": draw.one(1, 2),
            "moe_renormalize": draw.chance(0.5),
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (num_layers - dense),
            "linear_head_dim": draw.one(4, 7),
            "linear_num_heads": draw.one(1, 3),
            "linear_conv_kernel_dim": draw.one(2, 4),
        },
        "granitemoehybrid": bias
        | {
            "position_embedding_type": draw.one(None, "rope"),
            "rope_parameters": plain,
            "embedding_multiplier": draw.one(1.0, 3.0),
            "attention_multiplier": draw.one(0.1, 0.4),
            "residual_multiplier": draw.one(0.3, 1.0),
            "logits_scaling": draw.one(0.5, 3.0),
            "num_local_experts": draw.one(0, 4),
            "num_experts_per_tok": 2,
            "shared_intermediate_size": draw.one(8, 24),
            "mamba_expand": 1,
            "mamba_n_heads": 4,
            "mamba_d_head": raw["hidden_size"] // 4,
            "mamba_n_groups": draw.one(1, 2),
            "mamba_d_state": draw.one(4, 6),
            "mamba_d_conv": draw.one(2, 4),
            "mamba_conv_bias": draw.chance(0.5),
            "mamba_proj_bias": draw.chance(0.5),
        },
        "nemotron_h": {
            "head_dim": draw.one(4, 6),
            "layers_block_type": types,
            "tie_word_embeddings": False,
            "mlp_hidden_act": draw.one("relu2", "gelu"),
            "mamba_num_heads": 4,
            "mamba_head_dim": draw.one(4, 6),
            "n_groups": draw.one(1, 2),
            "ssm_state_size": draw.one(4, 6),
            "conv_kernel": draw.one(2, 4),
            "use_conv_bias": draw.chance(0.5),
            "use_bias": draw.chance(0.5),
            "time_step_min": draw.one(0.001, 0.3),
            "n_routed_experts": 4,
            "num_experts_per_tok": draw.one(1, 2),
            "moe_intermediate_size": 8,
            "moe_shared_expert_intermediate_size": draw.one(8, 12),
            "moe_latent_size": draw.one(None, 12),
            "n_group": draw.one(1, 2),
            "routed_scaling_factor": draw.one(1.0, 2.5),
        },
        "lfm2": {
            "rope_parameters": plain,
            "conv_L_cache": draw.one(2, 3, 4),
            "conv_bias": draw.chance(0.5),
            "block_auto_adjust_ff_dim": draw.chance(0.5),
            "block_multiple_of": draw.one(4, 8),
        },
        "lfm2_moe": {
            "rope_parameters": plain,
            "conv_L_cache": draw.one(2, 3, 4),
            "num_dense_layers": draw.one(0, 1),
            "num_experts": 4,
            "num_experts_per_tok": draw.one(1, 2),
            "moe_intermediate_size": 8,
            "norm_topk_prob": draw.chance(0.5),
            "use_expert_bias": draw.one(True, True, True, False),
            "routed_scaling_factor": draw.one(1.0, 2.5),
        },
    }
    if family.startswith("lfm2"):
        types = [kind.replace("linear_attention", "conv") for kind in types]
    if family != "nemotron_h":
        fields[family]["layer_types"] = types
    return {"num_hidden_layers": num_layers} | fields[family]


def draw_latent(draw: Draw, family: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Draws latent attention, its positions, and the routing of experts."""
    groups = draw.one(1, 2, 4)
    fields: dict[str, Any] = {
        "num_key_value_heads": draw.one(*[raw["num_attention_heads"]] * 9, 1),
        "rms_norm_eps": draw.one(*[1e-6] * 9, 1e-5),
        "kv_lora_rank": draw.one(6, 12),
        "q_lora_rank": draw.one(None, 10),
        "qk_nope_head_dim": draw.one(5, 8),
        "qk_rope_head_dim": draw.one(4, 6),
        "v_head_dim": draw.one(7, 8),
        "n_routed_experts": 8,
        "n_shared_experts": draw.one(1, 2),
        "num_experts_per_tok": draw.one(1, 2),
        "moe_intermediate_size": draw.one(8, 16),
        "first_k_dense_replace": draw.one(0, 0, 1),
        "n_group": groups,
        "topk_group": draw.one(1, groups),
        "routed_scaling_factor": draw.one(1.0, 2.5, 16.0),
    }
    if draw.chance(0.5):
        both = {"mscale": draw.one(1.0, 0.7), "mscale_all_dim": 0.7}
        weights = draw.one({}, {}, *[both] * 6, {"mscale": 1.0})
        fields["rope_parameters"] = weights | {
            "rope_type": "yarn",
            "rope_theta": draw.one(1e4, 100.0),
            "factor": draw.one(4.0, 40),
            "beta_fast": draw.one(32, 4),
            "beta_slow": 1,
            "original_max_position_embeddings": draw.one(8, 16),
        }
    if family == "deepseek_v2":
        method = draw.one("greedy", "group_limited_greedy")
        return (
            fields | {"topk_method": method} | draw.one({}, {"norm_topk_prob": False})
        )
    fields |= {"num_nextn_predict_layers": draw.one(*[0] * 9, 1)}
    return fields | draw.one({}, {"norm_topk_prob": False})


def draw_rope(draw: Draw) -> dict[str, Any]:
    """Draws parameters of rotary embeddings."""
    rope = {"rope_type": "default", "rope_theta": draw.one(1e4, 5e5, 10000, 1e6)}
    rare = draw.one("linear", "dynamic", "yarn")
    kind = draw.one(*["default"] * 6, *["llama3"] * 3, "linear", rare)
    if kind == "llama3":
        rope |= {
            "factor": draw.one(8.0, 4, 32.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": draw.one(4.0, 8.0),
            "original_max_position_embeddings": draw.one(8, 16),
        }
    elif kind != "default":
        rope |= {"factor": draw.one(2.0, 4.0, 1.0)}
    return rope | {"rope_type": kind}


def draw_windows(draw: Draw, family: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Draws sliding windows of all or some layers."""
    num = raw["num_hidden_layers"]
    if family in ("mistral", "mixtral"):
        return {"sliding_window": draw.one(None, 6, 4096)}
    if family == "llama" or draw.chance(0.5):
        return {}
    windows = {
        "use_sliding_window": draw.chance(0.6),
        "sliding_window": draw.one(6, 8, 4096),
        "max_window_layers": draw.one(0, 0, 1, num),
    }
    if draw.chance(0.3) and family != "qwen3_moe":
        kinds = ["full_attention", "sliding_attention"]
        same = draw.chance(0.7) and [draw.one(*kinds)] * num
        windows["layer_types"] = same or [draw.one(*kinds) for _ in range(num)]
    return windows


def draw_experts(draw: Draw, family: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Draws the MoE fields; empty for dense families."""
    if family not in MIXTURES:
        return {}
    num = draw.one(4, 6)
    fields = {"num_experts_per_tok": draw.one(1, 2, 3)}
    if family == "mixtral":
        return fields | {"num_local_experts": num}
    fields |= {
        draw.one("num_experts", "num_experts", "num_local_experts"): num,
        "moe_intermediate_size": draw.one(8, 16),
        "norm_topk_prob": draw.chance(0.5),
    }
    if family == "qwen2_moe":
        fields["num_experts"] = fields.pop("num_local_experts", num)
        fields["shared_expert_intermediate_size"] = draw.one(8, 16)
        fields |= {"qkv_bias": draw.chance(0.5)} if draw.chance(0.3) else {}
    if draw.chance(0.3):
        fields["mlp_only_layers"] = draw.one([], [0], [0], [1], [1, 0])
    if draw.chance(0.2):
        fields["decoder_sparse_step"] = draw.one(1, 2)
    return fields


HARMLESS: tuple[tuple[str, Any], ...] = (
    ("torch_dtype", "bfloat16"),
    ("transformers_version", "4.41.2"),
    ("use_cache", False),
    ("_name_or_path", "somewhere/model"),
    ("attention_dropout", 0.1),
    ("initializer_range", 0.01),
    ("bos_token_id", 1),
    ("eos_token_id", [2, 3]),
    ("pad_token_id", 0),
    ("pretraining_tp", 1),
    ("unsloth_version", "2024.9"),
    ("output_hidden_states", True),
    ("router_aux_loss_coef", 0.02),
    ("task_specific_params", {"text-generation": {"do_sample": True}}),
    ("prefix", "</s>"),
    ("temperature", 0.6),
    ("rope_scaling", None),
    ("head_dim", None),
    ("num_key_value_heads", None),
    ("sliding_window", None),
    ("quantization_config", None),
    ("is_decoder", True),
    ("rope_interleaved", False),
)
"""Keys of published files that do not change the results."""

HARMLESS_OF_FAMILY: dict[str, tuple[tuple[str, Any], ...]] = {
    "gpt2": (("n_ctx", 512), ("reorder_and_upcast_attn", True), ("resid_pdrop", 0.0)),
    "opt": (("layerdrop", 0.1), ("dropout", 0.0), ("init_std", 0.01)),
    "llama": (("use_sliding_window", False), ("mlp_bias", False)),
    "mistral": (("attention_bias", False), ("layer_types", None)),
    "mixtral": (("output_router_logits", False), ("router_jitter_noise", 0.1)),
    "qwen2": (("max_window_layers", 1), ("attention_bias", True)),
    "qwen2_moe": (("max_window_layers", 1), ("output_router_logits", True)),
    "qwen3": (("max_window_layers", 1), ("sliding_window", None)),
    "qwen3_moe": (("max_window_layers", 1), ("router_aux_loss_coef", 0.0)),
    "deepseek_v2": (("ep_size", 1), ("seq_aux", True), ("scoring_func", "softmax")),
    "deepseek_v3": (("aux_loss_alpha", 0.1), ("qk_head_dim", 3), ("ep_size", 1)),
}
"""Keys of one family that do not change the results."""

HARMFUL: tuple[tuple[str, Any], ...] = (
    ("use_sliding_window", True),
    ("use_sliding_window", False),
    ("sliding_window", 5),
    ("max_window_layers", 0),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("qkv_bias", False),
    ("n_layer", 1),
    ("num_hidden_layers", 1),
    ("num_hidden_layers", 2),
    ("n_embd", 16),
    ("hidden_size", 16),
    ("n_head", 2),
    ("num_attention_heads", 2),
    ("num_key_value_heads", 2),
    ("head_dim", 4),
    ("num_experts", 4),
    ("num_local_experts", 4),
    ("num_experts_per_tok", 1),
    ("norm_topk_prob", True),
    ("norm_topk_prob", False),
    ("moe_intermediate_size", 8),
    ("rope_theta", 100.0),
    ("rope_theta", 10**400),
    ("rope_theta", float("inf")),
    ("rope_theta", "10000"),
    ("rope_theta", True),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_scaling", {"rope_type": "default", "rope_theta": 50.0}),
    ("rope_scaling", {"rope_type": "default", "type": "linear", "factor": 2.0}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 50, "factor": 3.0}),
    ("original_max_position_embeddings", 12),
    ("max_position_embeddings", 32),
    ("partial_rotary_factor", 0.5),
    ("model_type", "llama"),
    ("model_type", "mistral"),
    ("model_type", "qwen2"),
    ("architectures", ["LlamaForCausalLM"]),
    ("architectures", ["MistralForCausalLM", "LlamaForCausalLM"]),
    ("hidden_act", "relu"),
    ("activation_function", "silu"),
    ("rms_norm_eps", 0.1),
    ("layer_norm_eps", 0.1),
    ("layer_norm_epsilon", 0.1),
    ("tie_word_embeddings", True),
    ("tie_word_embeddings", False),
    ("scale_attn_by_inverse_layer_idx", True),
    ("scale_attn_weights", False),
    ("do_layer_norm_before", False),
    ("_remove_final_layer_norm", True),
    ("layer_norm_elementwise_affine", False),
    ("enable_bias", False),
    ("logit_scale", 0.5),
    ("attn_logit_softcapping", 50.0),
    ("attention_multiplier", 0.1),
    ("residual_multiplier", 2.0),
    ("attention_chunk_size", 4),
    ("no_rope_layers", [0]),
    ("per_layer_config", {"0": {"sliding_window": 3}}),
    ("is_encoder_decoder", True),
    ("add_cross_attention", True),
    ("mlp_only_layers", [0]),
    ("decoder_sparse_step", 2),
    ("n_inner", 48),
    ("intermediate_size", 48),
    ("vocab_size", 200),
    ("tie_word_embeddings", None),
    ("tie_word_embeddings", 1),
    ("attention_bias", 1),
    ("hidden_act", "quick_gelu"),
    ("hidden_act", "gelu_new"),
    ("hidden_act", "swish"),
    ("activation_function", "gelu_fast"),
    ("num_experts_per_tok", 9),
    ("rms_norm_eps", 1),
    ("rms_norm_eps", "1e-5"),
    ("rms_norm_eps", None),
    ("rope_theta", None),
    ("rope_parameters", {"full_attention": {"rope_theta": 50.0}}),
    ("rope_parameters", None),
    ("text_config", {"hidden_size": 16}),
    ("use_qk_norm", False),
    ("use_bias", False),
    ("shared_expert_intermediate_size", 16),
    ("hidden_size", 32.0),
    ("head_dim", 5),
)
"""Keys that contradict each other, belong to another family, or are invalid."""


def to_transformers_4(raw: dict[str, Any]) -> dict[str, Any]:
    """Converts the rotary fields to the format of transformers 4."""
    raw = dict(raw)
    rope = dict(raw.pop("rope_parameters", {}))
    if rope:
        raw["rope_theta"] = rope.pop("rope_theta")
        plain = rope["rope_type"] == "default"
        raw["rope_scaling"] = None if plain else rope
    return raw


def perturb_config(draw: Draw, raw: dict[str, Any], family: str) -> dict[str, Any]:
    """Changes the style of a configuration and adds harmless and harmful keys."""
    if draw.chance(0.5) and family not in KINDS:
        raw = to_transformers_4(raw)
        scaling = raw.get("rope_scaling")
        if scaling and draw.chance(0.3):
            scaling["type"] = scaling.pop("rope_type")
        if scaling and "original_max_position_embeddings" in scaling:
            if draw.chance(0.3):
                raw["original_max_position_embeddings"] = draw.one(6, 16)
            if draw.chance(0.2):
                scaling.pop("original_max_position_embeddings")
    if draw.chance(0.2):
        raw.pop(draw.one("architectures", "model_type", "rope_theta"), None)
    if "n_embd" in raw:
        aliases = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers"}
        aliases |= {"n_head": "num_attention_heads"}
        if draw.chance(0.3):
            old = draw.one(*aliases)
            raw[aliases[old]] = raw[old] if draw.chance(0.3) else raw.pop(old)
    own = HARMLESS_OF_FAMILY.get(family, ())
    kinds = (*HARMLESS, *own, *own)
    for _ in range(draw.one(0, 1, 2, 4)):
        key, value = draw.one(*kinds)
        raw.setdefault(key, value)
    if draw.chance(0.4):
        for _ in range(draw.one(1, 1, 2)):
            key, value = draw.one(*HARMFUL)
            raw[key] = value
    if draw.chance(0.1):
        layers = raw.get("num_hidden_layers", raw.get("n_layer", 1))
        kind = draw.one("full_attention", "sliding_attention", "chunked_attention")
        raw["layer_types"] = [kind] * (layers + draw.chance(0.2))
    return raw


def draw_weights(model: torch.nn.Module, seed: list[int]) -> None:
    """Draws parameters and saved buffers; any error changes the logits."""
    rng = np.random.default_rng(seed)
    saved = model.state_dict().keys()
    buffers = [pair for pair in model.named_buffers() if pair[0] in saved]
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()) + sorted(buffers):
            wide = rng.standard_normal(tuple(parameter.shape))
            is_scale = parameter.ndim == 1 and not name.endswith("bias")
            parameter.copy_(torch.tensor(is_scale + 0.3 * wide, dtype=torch.float32))


def perturb_weights(draw: Draw, folder: pathlib.Path, family: str) -> None:
    """Renames, adds or removes tensors of a folder with one weights file."""
    path = folder / "model.safetensors"
    if not path.exists():
        return
    tensors = load_file(path)
    embed = {
        "gpt2": "transformer.wte",
        "opt": "model.decoder.embed_tokens",
        "gpt_neox": "gpt_neox.embed_in",
    }
    embed = embed.get(family, "model.embed_tokens") + ".weight"
    head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    kind = draw.one(*["none"] * 6, "equal", "equal", "other", "head", "bare", "extra")
    if kind == "equal":
        tensors[head] = tensors[embed].clone()
    elif kind == "other":
        tensors[head] = tensors[embed].flip(0).contiguous()
    elif kind == "head":
        tensors[head] = tensors.pop(embed)
    elif kind == "bare":
        tensors = {name.split(".", 1)[-1]: tensor for name, tensor in tensors.items()}
    elif kind == "extra":
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["transformer.h.0.attn.bias"] = torch.ones((1, 1, 64, 64))
    save_file(tensors, path, metadata={"format": "pt"})


def write_folder(draw: Draw, folder: pathlib.Path, seed: list[int]) -> str:
    """Writes a checkpoint folder without expected results; returns its family."""
    family = draw.one(*FAMILIES)
    raw = draw_config(draw, family)
    clean = {key: value for key, value in raw.items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(clean)))
    model = transformers.AutoModelForCausalLM.from_config(config)
    draw_weights(model, seed)
    dtype = draw.one("float32", "float32", "bfloat16", "float16")
    shard = draw.one("1GB", "1GB", "1GB", "8KB")
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    perturb_weights(draw, folder, family)
    if not draw.chance(0.15):  # else keeps the file of transformers 5
        text = json.dumps(perturb_config(draw, raw, family), indent=1)
        (folder / "config.json").write_text(text + "\n")
    return family


def expected(folder: pathlib.Path, seed: list[int]) -> dict[str, np.ndarray]:
    """Loads a folder with transformers and returns its results in float32."""
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    model.eval()
    for kind in ("missing_keys", "mismatched_keys"):
        if loading[kind]:
            raise ValueError(f"{kind}: {sorted(map(str, loading[kind]))[:3]}")
    ids = np.random.default_rng(seed).integers(0, 64, (1, LENGTH))
    logits = logits_of(model, ids)
    tokens = ids[:, :NUM_PROMPT]
    margins = []
    while tokens.shape[1] < LENGTH:
        last = logits_of(model, tokens)[0, -1]
        margins.append(np.diff(np.sort(last)[-2:])[0])
        tokens = np.append(tokens, [[last.argmax()]], axis=1)
    return {
        "ids": ids.astype(np.int32),
        "logits": logits,
        "greedy": tokens[0].astype(np.int32),
        "margins": np.asarray(margins, np.float32),
        "unexpected": np.asarray(sorted(loading["unexpected_keys"]), str),
    }


def logits_of(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """Returns the logits [batch, length, vocab] of a full forward pass."""
    with torch.no_grad():
        return model(torch.tensor(ids), use_cache=False).logits.float().numpy()


def make(folder: pathlib.Path, seed: list[int]) -> bool:
    """Writes one folder; returns True if transformers loads it."""
    write_folder(Draw(seed), folder, seed)
    try:
        arrays = expected(folder, seed)
        np.savez_compressed(folder / "expected.npz", allow_pickle=False, **arrays)
    except Exception as error:
        line = f"{type(error).__name__}: {' '.join(str(error).split())}"
        (folder / "refused.txt").write_text(line[:500] + "\n")
        return False
    return True


def main() -> None:
    """Writes `--num` folders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    num_computed = 0
    for index in range(args.num):
        folder = args.out / f"{args.seed}-{index:04}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with contextlib.redirect_stderr(None):
            num_computed += make(folder, [args.seed, index])
    print(f"{args.num} folders, {num_computed} of them loaded by transformers")


if __name__ == "__main__":
    main()
