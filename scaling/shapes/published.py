"""Published models by name, each as its `config.json`.

Numbers are those of the published checkpoints, or of the papers without checkpoints.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from jaxkv.validation import format_unknown_name
from scaling.shapes import huggingface
from scaling.shapes.description import ModelShape, describe_fields


def _rows(
    common: Mapping[str, object], keys: str, rows: Mapping[str, tuple[object, ...]]
) -> dict[str, dict[str, object]]:
    names = keys.split()
    return {
        name: {**common} | dict(zip(names, row, strict=True))
        for name, row in rows.items()
    }


_LLAMA_KEYS = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
    "intermediate_size vocab_size max_position_embeddings"
)
_GPT_KEYS = "n_embd n_layer n_head"

CONFIGS: dict[str, dict[str, object]] = {
    # Touvron et al. 2023, arXiv:2302.13971, table 2; 2307.09288; Grattafiori et al.
    # 2024, arXiv:2407.21783, table 3.
    **_rows(
        {"model_type": "llama"},
        _LLAMA_KEYS,
        {
            "llama-7b": (4096, 32, 32, 32, 11008, 32000, 2048),
            "llama-13b": (5120, 40, 40, 40, 13824, 32000, 2048),
            "llama-2-7b": (4096, 32, 32, 32, 11008, 32000, 4096),
            "llama-2-13b": (5120, 40, 40, 40, 13824, 32000, 4096),
            "llama-2-70b": (8192, 80, 64, 8, 28672, 32000, 4096),
            "llama-3-8b": (4096, 32, 32, 8, 14336, 128256, 8192),
            "llama-3-70b": (8192, 80, 64, 8, 28672, 128256, 8192),
            "llama-3.1-8b": (4096, 32, 32, 8, 14336, 128256, 131072),
            "llama-3.1-70b": (8192, 80, 64, 8, 28672, 128256, 131072),
            "llama-3.1-405b": (16384, 126, 128, 8, 53248, 128256, 131072),
            "llama-3.3-70b": (8192, 80, 64, 8, 28672, 128256, 131072),
        },
    ),
    # Roziere et al. 2023, arXiv:2308.12950; the checkpoints' config.json.
    **_rows(
        {"model_type": "llama"},
        _LLAMA_KEYS,
        {
            "codellama-7b": (4096, 32, 32, 32, 11008, 32016, 16384),
            "codellama-13b": (5120, 40, 40, 40, 13824, 32016, 16384),
            "codellama-34b": (8192, 48, 64, 8, 22016, 32000, 16384),
            "codellama-70b": (8192, 80, 64, 8, 28672, 32016, 16384),
            # 01.AI 2024, arXiv:2403.04652, table 1.
            "yi-34b": (7168, 60, 56, 8, 20480, 64000, 4096),
            # Abdin et al. 2024, arXiv:2412.08905: one product for queries, keys and
            # values, and one for the gate, which have the sizes of Llama's.
            "phi-4": (5120, 40, 40, 10, 17920, 100352, 16384),
        },
    ),
    **_rows(
        {"model_type": "llama", "tie_word_embeddings": True},
        _LLAMA_KEYS,
        {
            "llama-3.2-1b": (2048, 16, 32, 8, 8192, 128256, 131072),
            "llama-3.2-3b": (3072, 28, 24, 8, 8192, 128256, 131072),
            "smollm2-135m": (576, 30, 9, 3, 1536, 49152, 8192),
        },
    ),
    # Jiang et al. 2023, arXiv:2310.06825, table 1; 2024, arXiv:2401.04088, table 1.
    **_rows(
        {"model_type": "mistral", "sliding_window": 4096},
        _LLAMA_KEYS,
        {"mistral-7b": (4096, 32, 32, 8, 14336, 32000, 32768)},
    ),
    # The checkpoints' config.json: later versions have no window.
    **_rows(
        {"model_type": "mistral", "sliding_window": None, "head_dim": 128},
        _LLAMA_KEYS,
        {
            "mistral-7b-v0.2": (4096, 32, 32, 8, 14336, 32000, 32768),
            "mistral-7b-v0.3": (4096, 32, 32, 8, 14336, 32768, 32768),
            "mistral-nemo": (5120, 40, 32, 8, 14336, 131072, 131072),
            "mistral-small-24b": (5120, 40, 32, 8, 32768, 131072, 32768),
        },
    ),
    **_rows(
        {
            "model_type": "mixtral",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        _LLAMA_KEYS,
        {
            "mixtral-8x7b": (4096, 32, 32, 8, 14336, 32000, 32768),
            "mixtral-8x22b": (6144, 56, 48, 8, 16384, 32000, 65536),
        },
    ),
    # Yang et al. 2024, arXiv:2407.10671, table 1; Qwen Team 2024, arXiv:2412.15115,
    # and 2025, arXiv:2505.09388; the checkpoints' config.json.
    **_rows(
        {"model_type": "qwen2"},
        f"{_LLAMA_KEYS} tie_word_embeddings",
        {
            "qwen2-0.5b": (896, 24, 14, 2, 4864, 151936, 131072, True),
            "qwen2-7b": (3584, 28, 28, 4, 18944, 152064, 131072, False),
            "qwen2-72b": (8192, 80, 64, 8, 29568, 152064, 131072, False),
            "qwen2.5-0.5b": (896, 24, 14, 2, 4864, 151936, 32768, True),
            "qwen2.5-1.5b": (1536, 28, 12, 2, 8960, 151936, 32768, True),
            "qwen2.5-3b": (2048, 36, 16, 2, 11008, 151936, 32768, True),
            "qwen2.5-7b": (3584, 28, 28, 4, 18944, 152064, 32768, False),
            "qwen2.5-14b": (5120, 48, 40, 8, 13824, 152064, 32768, False),
            "qwen2.5-32b": (5120, 64, 40, 8, 27648, 152064, 32768, False),
            "qwen2.5-72b": (8192, 80, 64, 8, 29568, 152064, 32768, False),
        },
    ),
    **_rows(
        {"model_type": "qwen3", "head_dim": 128},
        f"{_LLAMA_KEYS} tie_word_embeddings",
        {
            "qwen3-0.6b": (1024, 28, 16, 8, 3072, 151936, 40960, True),
            "qwen3-1.7b": (2048, 28, 16, 8, 6144, 151936, 40960, True),
            "qwen3-4b": (2560, 36, 32, 8, 9728, 151936, 40960, True),
            "qwen3-8b": (4096, 36, 32, 8, 12288, 151936, 40960, False),
            "qwen3-14b": (5120, 40, 40, 8, 17408, 151936, 40960, False),
            "qwen3-32b": (5120, 64, 64, 8, 25600, 151936, 40960, False),
        },
    ),
    **_rows(
        {
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        f"{_LLAMA_KEYS} moe_intermediate_size",
        {
            "qwen3-30b-a3b": (2048, 48, 32, 4, 6144, 151936, 40960, 768),
            "qwen3-coder-30b-a3b": (2048, 48, 32, 4, 6144, 151936, 262144, 768),
            "qwen3-235b-a22b": (4096, 94, 64, 4, 12288, 151936, 40960, 1536),
        },
    ),
    # Qwen Team 2025, the checkpoint's config.json.
    **_rows(
        {
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "num_experts": 160,
            "num_experts_per_tok": 8,
        },
        f"{_LLAMA_KEYS} moe_intermediate_size",
        {"qwen3-coder-480b-a35b": (6144, 62, 96, 8, 8192, 151936, 262144, 2560)},
    ),
    # MiniMax 2025, the checkpoint's config.json: the arithmetic of Qwen3's mixtures.
    **_rows(
        {
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
        },
        _LLAMA_KEYS,
        {
            name: (3072, 62, 48, 8, 1536, 200064, 196608)
            for name in ("minimax-m2", "minimax-m2.1", "minimax-m2.5")
        },
    ),
    # Gemma Team 2024, arXiv:2403.08295, table 1; arXiv:2408.00118, table 1.
    **_rows(
        {"model_type": "gemma", "head_dim": 256},
        _LLAMA_KEYS,
        {
            "gemma-2b": (2048, 18, 8, 1, 16384, 256000, 8192),
            "gemma-7b": (3072, 28, 16, 16, 24576, 256000, 8192),
        },
    ),
    **_rows(
        {"model_type": "gemma2", "head_dim": 256, "sliding_window": 4096},
        _LLAMA_KEYS,
        {
            "gemma-2-2b": (2304, 26, 8, 4, 9216, 256000, 8192),
            "gemma-2-9b": (3584, 42, 16, 8, 14336, 256000, 8192),
        },
    ),
    **_rows(
        {"model_type": "gemma2", "head_dim": 128, "sliding_window": 4096},
        _LLAMA_KEYS,
        {"gemma-2-27b": (4608, 46, 32, 16, 36864, 256000, 8192)},
    ),
    # Gemma Team 2025, arXiv:2503.19786; the checkpoints' config.json.
    **_rows(
        {"model_type": "gemma3_text", "sliding_window": 1024, "vocab_size": 262208},
        "hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
        "intermediate_size head_dim max_position_embeddings",
        {
            "gemma-3-4b": (2560, 34, 8, 4, 10240, 256, 131072),
            "gemma-3-12b": (3840, 48, 16, 8, 15360, 256, 131072),
            "gemma-3-27b": (5376, 62, 32, 16, 21504, 128, 131072),
        },
    ),
    # Radford et al. 2019, table 2; Brown et al. 2020, arXiv:2005.14165, table 2.1, in
    # which the 13B model's width is printed 5140, not its 40 heads of 128.
    **_rows(
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024},
        _GPT_KEYS,
        {"gpt2": (768, 12, 12), "gpt2-xl": (1600, 48, 25)},
    ),
    **_rows(
        {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048},
        _GPT_KEYS,
        {
            "gpt3-125m": (768, 12, 12),
            "gpt3-760m": (1536, 24, 16),
            "gpt3-2.7b": (2560, 32, 32),
            "gpt3-13b": (5120, 40, 40),
            "gpt3-175b": (12288, 96, 96),
        },
    ),
    # Zhang et al. 2022, arXiv:2205.01068, table 1.
    **_rows(
        {"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048},
        "hidden_size num_hidden_layers num_attention_heads ffn_dim",
        {
            "opt-125m": (768, 12, 12, 3072),
            "opt-13b": (5120, 40, 40, 20480),
            "opt-66b": (9216, 64, 72, 36864),
            "opt-175b": (12288, 96, 96, 49152),
        },
    ),
    # DeepSeek-AI 2024, arXiv:2405.04434, section 3.1.2; arXiv:2412.19437, section 4.2.
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 5120,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
    },
    **_rows(
        {
            "model_type": "deepseek_v3",
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "kv_lora_rank": 512,
        },
        "hidden_size num_hidden_layers num_attention_heads intermediate_size "
        "vocab_size max_position_embeddings n_routed_experts first_k_dense_replace "
        "q_lora_rank num_nextn_predict_layers",
        {
            name: (7168, 61, 128, 18432, 129280, 163840, 256, 3, 1536, 1)
            for name in ("deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "deepseek-r1")
        }
        # Kimi Team 2025, arXiv:2507.20534, table 2; the checkpoints' config.json.
        | {
            name: (7168, 61, 64, 18432, 163840, 262144, 384, 1, 1536, 0)
            for name in ("kimi-k2", "kimi-k2.5")
        },
    ),
    # Kimi Team 2025, arXiv:2510.26692, and the checkpoint's config.json.
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "intermediate_size": 9216,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [x for x in range(1, 27) if x % 4],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 1048576,
    },
    # Ai2 2026, OLMo-core's script of conversion; the defaults of transformers 5.24.
    "olmo-hybrid-7b": {
        "model_type": "olmo_hybrid",
        "vocab_size": 100352,
        "hidden_size": 3840,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "intermediate_size": 11008,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
        "max_position_embeddings": 65536,
    },
    # GLM-5 Team 2026, the checkpoint's config.json; its indexer of sparse attention is
    # not counted.
    "glm-5": {
        "model_type": "deepseek_v3",
        "vocab_size": 154880,
        "hidden_size": 6144,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 202752,
    },
}


def _gated_delta_models() -> dict[str, dict[str, object]]:
    """Returns the fields of models with the gated delta rule in 3 of 4 layers.

    Qwen Team 2025 (Qwen3-Next) and 2026 (Qwen3.5), the checkpoints' config.json; of
    models with images the text part.
    """
    rows = """
    name               v      h    L  n  m i     e   k  j    js   nv positions
    qwen3-next-80b-a3b 151936 2048 48 16 2 5120  512 10 512  512  32 262144
    qwen3.5-27b        248320 5120 64 24 4 17408 0   0  0    0    48 262144
    qwen3.5-35b-a3b    248320 2048 40 16 2 512   256 8  512  512  32 262144
    qwen3.5-122b-a10b  248320 3072 48 32 2 1024  256 8  1024 1024 64 262144
    qwen3.5-397b-a17b  248320 4096 60 32 2 1024  512 10 1024 1024 64 262144
    """
    shapes: dict[str, dict[str, object]] = {}
    for name, *sizes in map(str.split, rows.strip().split("\n")[1:]):
        v, h, layers, n, m, i, e, k, j, js, nv, positions = map(int, sizes)
        experts = {"num_experts": e, "top_k": k, "size": j, "shared_size": js}
        shapes[name] = {
            "vocab_size": v,
            "hidden_size": h,
            "num_layers": layers,
            "num_q_heads": n,
            "num_kv_heads": m,
            "head_dim": 256,
            "qk_norm": True,
            "out_gate": True,
            "recurrent": {
                "num_key_heads": 16,
                "num_value_heads": nv,
                "key_dim": 128,
                "value_dim": 128,
            },
            "recurrent_layers": (True, True, True, False) * (layers // 4),
            "mlp_size": i,
            "experts": {**experts, "shared_gate": True} if e else None,
            "max_positions": positions,
        }
    return shapes


SHAPES: dict[str, dict[str, object]] = {
    # OpenAI 2025, arXiv:2508.10925, table 1; the checkpoints' config.json.
    **{
        name: {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "num_layers": num_layers,
            "num_q_heads": 64,
            "num_kv_heads": 8,
            "head_dim": 64,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_size": 2880,
            "experts": {"num_experts": num_experts, "top_k": 4, "size": 2880},
            "windows": (128, None) * (num_layers // 2),
            "max_positions": 131072,
        }
        for name, num_layers, num_experts in (
            ("gpt-oss-20b", 24, 32),
            ("gpt-oss-120b", 36, 128),
        )
    },
    # Meta 2025, the checkpoints' config.json; three of four layers attend to chunks of
    # 8,192 tokens, counted as windows.
    **{
        name: {
            "vocab_size": 202048,
            "hidden_size": 5120,
            "num_layers": 48,
            "num_q_heads": 40,
            "num_kv_heads": 8,
            "head_dim": 128,
            "mlp_size": 16384,
            "experts": {
                "num_experts": num_experts,
                "top_k": 1,
                "size": 8192,
                "shared_size": 8192,
            },
            "mixture_layers": tuple((x + 1) % stride == 0 for x in range(48)),
            "windows": (8192, 8192, 8192, None) * 12,
            "max_positions": max_positions,
        }
        for name, num_experts, stride, max_positions in (
            ("llama-4-scout-17b-16e", 16, 1, 10485760),
            ("llama-4-maverick-17b-128e", 128, 2, 1048576),
        )
    },
    # Zhipu AI 2025, arXiv:2508.06471, table 1; the checkpoints' config.json.
    **{
        name: {
            "vocab_size": 151552,
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "num_q_heads": 96,
            "num_kv_heads": 8,
            "head_dim": 128,
            "qkv_bias": True,
            "qk_norm": hidden_size == 5120,
            "mlp_size": mlp_size,
            "experts": {
                "num_experts": num_experts,
                "top_k": 8,
                "size": width,
                "shared_size": width,
                "gate_bias": True,
            },
            "mixture_layers": tuple(x >= num_dense for x in range(num_layers)),
            "max_positions": 131072,
        }
        for name, hidden_size, num_layers, num_dense, mlp_size, num_experts, width in (
            ("glm-4.5-air", 4096, 46, 1, 10944, 128, 1408),
            ("glm-4.5", 5120, 92, 3, 12288, 160, 1536),
            ("glm-4.6", 5120, 92, 3, 12288, 160, 1536),
        )
    },
    **_gated_delta_models(),
}
"""Fields of published models of families that `huggingface` does not read."""


def describe(name: str) -> ModelShape:
    """Returns the shape of a published model.

    Args:
      name: a key of `CONFIGS` or `SHAPES`.

    Raises:
      ValueError: the name is unknown.
    """
    if name in SHAPES:
        return describe_fields({**SHAPES[name], "name": name})
    if name not in CONFIGS:
        raise ValueError(format_unknown_name("model", name, {**CONFIGS, **SHAPES}))
    return huggingface.describe_huggingface(CONFIGS[name], name=name)


_VARIANT = re.compile(r"-(hf|chat|instruct|thinking|base|it|bf16|\d{4})(?=-|$)")
"""Parts of a checkpoint's name that do not change the shape."""
_VERSION_SUFFIX = re.compile(r"-v\d+(\.\d+)?$")


def describe_checkpoint(name: str) -> ModelShape:
    """Returns the shape of a published checkpoint, such as `meta-llama/Llama-2-7b-hf`.

    Case, the owner, parts such as `-instruct` and a version at the end are ignored,
    except a version with another shape, such as that of Mistral-7B-v0.3.

    Args:
      name: name of the checkpoint, a key of `CONFIGS`, or path of a `config.json` or of
        a folder with one.

    Raises:
      ValueError: the model is unknown, or the file cannot be read.
    """
    if name.endswith(".json") or (Path(name) / "config.json").is_file():
        return huggingface.load_shape(Path(name))
    key = name.strip().lower().rpartition("/")[2].removeprefix("meta-")
    key = _VARIANT.sub("", key)
    known = key in CONFIGS or key in SHAPES
    return describe(key if known else _VERSION_SUFFIX.sub("", key))
