"""Writes `hf_parameter_counts.json`: parameter counts of models of transformers.

Read by `test_costs`. To be run by hand; needs torch and transformers:

    python tests/golden/make_counts.py

Models are on the meta device, without memory for weights. They have few layers and the
default sizes of transformers.
"""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHORT = {"num_hidden_layers": 7}
CASES = [
    *(
        (name, SHORT)
        for name in (
            "llama",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "gemma",
            "gemma2",
            "gemma3_text",
            "opt",
            "deepseek_v3",
            "qwen3_next",
            "qwen3_5_text",
            "olmo_hybrid",
            "kimi_linear",
        )
    ),
    (
        "granitemoehybrid",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_d_head": 64,
            "mamba_proj_bias": True,
        },
    ),
    (
        "nemotron_h",
        {
            "layers_block_type": [
                *("linear_attention", "moe", "full_attention"),
                *("mlp", "linear_attention"),
            ],
            "use_bias": True,
            "moe_latent_size": 1024,
        },
    ),
    *(
        (
            name,
            {
                "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "conv_bias": True,
            },
        )
        for name in ("lfm2", "lfm2_moe")
    ),
    ("gpt2", {"n_layer": 3}),
    (
        "llama",
        {
            "num_hidden_layers": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "head_dim": 96,
        },
    ),
    ("qwen3", {"num_hidden_layers": 3, "attention_bias": True}),
    (
        "qwen3_moe",
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    (
        "deepseek_v2",
        {
            "num_hidden_layers": 4,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    ("opt", {"tie_word_embeddings": False, "num_hidden_layers": 3}),
    ("gemma3_text", {"num_hidden_layers": 8, "sliding_window": 512}),
]

KEYS = """
attention_bias decoder_sparse_step do_layer_norm_before enable_bias
first_k_dense_replace ffn_dim head_dim hidden_size intermediate_size kv_lora_rank
layer_types max_position_embeddings max_window_layers mlp_bias mlp_only_layers
moe_intermediate_size moe_layer_freq n_embd n_head n_inner n_layer n_positions
n_routed_experts n_shared_experts num_attention_heads num_experts num_experts_per_tok
num_hidden_layers num_key_value_heads num_local_experts num_nextn_predict_layers
q_lora_rank qk_nope_head_dim qk_rope_head_dim shared_expert_intermediate_size
sliding_window sliding_window_pattern tie_word_embeddings topk_method
use_sliding_window v_head_dim vocab_size word_embed_proj_dim
linear_conv_kernel_dim linear_head_dim linear_key_head_dim linear_num_heads
linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_conv_bias
mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads
mamba_proj_bias mlp_layer_types num_experts_per_token num_shared_experts
shared_intermediate_size
conv_kernel layers_block_type mamba_head_dim mamba_num_heads moe_latent_size
moe_shared_expert_intermediate_size n_groups ssm_state_size use_bias use_conv_bias
block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of conv_bias
conv_L_cache num_dense_layers
""".split()


def count_parameters(name: str, change: dict) -> dict:
    """Returns the size keys of a config and the counts of parameters and buffers."""
    config = AutoConfig.for_model(name, **change)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    sizes = {id(x): x.numel() for x in model.parameters()}
    corrections = [x.numel() for at, x in model.named_buffers() if "_bias" in at]
    values = json.loads(config.to_json_string(use_diff=False))
    return {
        "config": {"model_type": name}
        | {key: values[key] for key in KEYS if key in values},
        "parameters": sum(sizes.values()),
        "buffers": sum(corrections),
    }


if __name__ == "__main__":
    lines = [json.dumps(count_parameters(*case)) for case in CASES]
    text = "[\n  " + ",\n  ".join(lines) + "\n]\n"
    Path(__file__).with_name("hf_parameter_counts.json").write_text(text)
