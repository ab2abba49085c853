"""How each family of a `config.json` becomes the fields of a `Description`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from scaling.shapes.description import Experts, HeadAttention, LatentAttention
from scaling.shapes.huggingface_keys import Raw


class _Sliding(NamedTuple):
    """How a family's windows work: the default width, and which layers have one."""

    default: int | None
    slides: Callable[[int], bool] = lambda layer: True


def _common(raw: Raw, tied: bool = False) -> dict[str, Any]:
    """What most families call the same."""
    return {
        "vocab_size": raw.size("vocab_size"),
        "hidden_size": raw.size("hidden_size"),
        "num_layers": raw.size("num_hidden_layers"),
        "mlp_size": raw.size("intermediate_size"),
        "tie_embeddings": raw.flag("tie_word_embeddings", tied),
        "max_positions": raw.optional("max_position_embeddings"),
    }


def _llama(
    raw: Raw,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    bias_keys: tuple[str, ...] = (),
    qkv_bias: bool = False,
    qk_norm: bool = False,
    norms_per_layer: int = 2,
    tied: bool = False,
    sliding: Callable[[Raw], _Sliding | None] = lambda raw: None,
) -> dict[str, Any]:
    """The common shape: RMS norms, rotary positions, a gated FFN.

    The arguments are what a family takes a key that is left out to mean, and what it
    fixes.
    """
    heads, _ = raw.size("num_attention_heads"), raw.size("hidden_size")
    # A null is not the default: it asks for what follows from the other sizes.
    kv_heads = raw.optional("num_key_value_heads", num_kv_heads)
    head_dim = raw.optional("head_dim", head_dim)
    if head_dim is None:
        head_dim = raw.quotient("hidden_size", "num_attention_heads")
    bias = "attention_bias" in bias_keys and raw.flag("attention_bias")
    return _common(raw, tied) | {
        "attention": HeadAttention(
            num_q_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            qkv_bias=bias or qkv_bias,
            out_bias=bias,
            qk_norm=qk_norm,
        ),
        "mlp_bias": "mlp_bias" in bias_keys and raw.flag("mlp_bias"),
        "norms_per_layer": norms_per_layer,
        "windows": _windows(raw, sliding(raw)),
    }


def _windows(raw: Raw, sliding: _Sliding | None) -> tuple[int | None, ...]:
    """Reads the width of every layer's window; without a rule there are none."""
    layers, window = _layers(raw), None
    if sliding is not None:
        window = raw.optional("sliding_window", sliding.default)
    if sliding is None or window is None:
        return (None,) * len(layers)
    kinds = raw.get("layer_types")
    if not isinstance(kinds, list):
        return tuple(window if sliding.slides(layer) else None for layer in layers)
    if len(kinds) != len(layers):
        raise ValueError(f"layer_types has {len(kinds)} entries, not {len(layers)}")
    return tuple(window if x == "sliding_attention" else None for x in kinds)


def _layers(raw: Raw) -> range:
    return range(raw.size("num_hidden_layers"))


def _qwen_window(raw: Raw) -> _Sliding | None:
    if not raw.flag("use_sliding_window"):
        return None
    first = raw.count("max_window_layers", 28)
    return _Sliding(4096, lambda layer: layer >= first)


def _gemma2_window(raw: Raw) -> _Sliding:
    return _Sliding(4096, lambda layer: layer % 2 == 0)  # odd ones see all


def _gemma3_window(raw: Raw) -> _Sliding:
    pattern = raw.size("sliding_window_pattern", 6)
    return _Sliding(4096, lambda layer: (layer + 1) % pattern != 0)


def _mixtral(raw: Raw) -> dict[str, Any]:
    experts = Experts(
        num_experts=raw.size("num_local_experts", 8),
        top_k=raw.size("num_experts_per_tok", 2),
        size=raw.size("intermediate_size"),
    )
    shape = _llama(raw, num_kv_heads=8, sliding=lambda raw: _Sliding(None))
    return shape | {"experts": experts}


def _qwen2_moe(raw: Raw) -> dict[str, Any]:
    shape = _llama(raw, qkv_bias=True, sliding=_qwen_window)
    shared = raw.size("shared_expert_intermediate_size", 5632)
    more = {"shared_size": shared, "shared_gate": True}
    return shape | _qwen_experts(raw, (60, 4, 1408), **more)


def _qwen3_moe(raw: Raw) -> dict[str, Any]:
    how: Any = _ATTENTION_BIAS | {"qk_norm": True, "sliding": _qwen_window}
    return _llama(raw, num_kv_heads=4, **how) | _qwen_experts(raw, (128, 8, 768))


def _qwen_experts(raw: Raw, sizes: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    experts = Experts(
        num_experts=raw.size("num_experts", sizes[0]),
        top_k=raw.size("num_experts_per_tok", sizes[1]),
        size=raw.size("moe_intermediate_size", sizes[2]),
        **more,
    )
    plain = raw.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise ValueError(f"mlp_only_layers={plain!r} must be a list")
    every = raw.size("decoder_sparse_step", 1)
    mixed = tuple(x not in plain and (x + 1) % every == 0 for x in _layers(raw))
    return {"experts": experts, "mixture_layers": mixed}


def _gpt2(raw: Raw) -> dict[str, Any]:
    shape = _biased(raw, ("n_embd", "n_head", "n_layer"))
    mlp_size = raw.optional("n_inner") or 4 * shape["hidden_size"]
    positions = raw.size("n_positions", 1024)
    sizes = {"position_rows": positions, "max_positions": positions}
    return shape | sizes | {"mlp_size": mlp_size}


def _opt(raw: Raw) -> dict[str, Any]:
    keys = ("hidden_size", "num_attention_heads", "num_hidden_layers")
    shape = _biased(raw, keys) | {"mlp_size": raw.size("ffn_dim")}
    for key, needed in (
        ("word_embed_proj_dim", shape["hidden_size"]),
        ("do_layer_norm_before", True),
        ("enable_bias", True),
    ):
        if (given := raw.get(key)) not in (None, needed):
            raise ValueError(f"{key}={given!r} is not counted, only {needed!r}")
    positions = raw.size("max_position_embeddings", 2048)
    # Two rows come before position 0.
    return shape | {"position_rows": positions + 2, "max_positions": positions}


def _biased(raw: Raw, keys: tuple[str, str, str]) -> dict[str, Any]:
    """GPT's shape, by its family's keys of width, heads and layers."""
    width, heads, layers = keys
    hidden, num_heads = raw.size(width), raw.size(heads)
    return {
        "vocab_size": raw.size("vocab_size"),
        "hidden_size": hidden,
        "num_layers": raw.size(layers),
        "attention": HeadAttention(
            num_q_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=raw.quotient(width, heads),
            qkv_bias=True,
            out_bias=True,
        ),
        "gated": False,
        "mlp_bias": True,
        "norm": "layer",
        "tie_embeddings": raw.flag("tie_word_embeddings", True),
    }


def _deepseek(
    raw: Raw,
    *,
    first_mixed: int,
    shared: int | None,
    ahead: int,
    gate_bias: bool,
) -> dict[str, Any]:
    if raw.flag("attention_bias"):
        raise ValueError("attention_bias=True is not counted, only False")
    first = raw.count("first_k_dense_replace", first_mixed)
    every = raw.size("moe_layer_freq", 1)
    width = raw.size("moe_intermediate_size")
    num_shared = raw.optional("n_shared_experts", shared) or 0
    return _common(raw) | {
        "attention": LatentAttention(
            num_q_heads=raw.size("num_attention_heads"),
            # A null says that queries are not compressed.
            q_rank=raw.optional("q_lora_rank", 1536),
            kv_rank=raw.size("kv_lora_rank", 512),
            nope_dim=raw.size("qk_nope_head_dim", 128),
            rope_dim=raw.size("qk_rope_head_dim", 64),
            value_dim=raw.size("v_head_dim", 128),
        ),
        "experts": Experts(
            num_experts=raw.size("n_routed_experts"),
            top_k=raw.size("num_experts_per_tok"),
            size=width,
            shared_size=num_shared * width,
            gate_bias=gate_bias,
        ),
        "mixture_layers": tuple(x >= first and x % every == 0 for x in _layers(raw)),
        "num_ahead_layers": raw.count("num_nextn_predict_layers", ahead),
    }


def _deepseek_v2(raw: Raw) -> dict[str, Any]:
    corrected = raw.get("topk_method") == "noaux_tc"
    return _deepseek(raw, first_mixed=0, shared=None, ahead=0, gate_bias=corrected)


def _deepseek_v3(raw: Raw) -> dict[str, Any]:
    return _deepseek(raw, first_mixed=3, shared=1, ahead=1, gate_bias=True)


class Family(NamedTuple):
    """A family that is counted.

    Attributes:
      architecture: its class in transformers.
      read: a `config.json` -> fields of a `Description`.
      aliases: another name of a key -> the key, as transformers has them.
    """

    architecture: str
    read: Callable[[Raw], dict[str, Any]]
    aliases: Mapping[str, str] = {}


_ATTENTION_BIAS: dict[str, Any] = {"bias_keys": ("attention_bias",)}
_GEMMA = _ATTENTION_BIAS | {"head_dim": 256, "tied": True}
_LATER_GEMMA = _GEMMA | {"num_kv_heads": 4, "norms_per_layer": 4}
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def _like_llama(**how: Any) -> Callable[[Raw], dict[str, Any]]:
    return functools.partial(_llama, **how)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", _like_llama(bias_keys=("attention_bias", "mlp_bias"))
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _like_llama(num_kv_heads=8, sliding=lambda raw: _Sliding(4096)),
    ),
    "mixtral": Family(
        "MixtralForCausalLM", _mixtral, {"num_experts": "num_local_experts"}
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", _like_llama(qkv_bias=True, sliding=_qwen_window)
    ),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        # 128 is transformers' default, whatever the hidden size.
        _like_llama(
            qk_norm=True, head_dim=128, sliding=_qwen_window, **_ATTENTION_BIAS
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", _qwen3_moe, {"num_local_experts": "num_experts"}
    ),
    "gemma": Family("GemmaForCausalLM", _like_llama(num_kv_heads=16, **_GEMMA)),
    "gemma2": Family(
        "Gemma2ForCausalLM", _like_llama(sliding=_gemma2_window, **_LATER_GEMMA)
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _like_llama(qk_norm=True, sliding=_gemma3_window, **_LATER_GEMMA),
    ),
    "gpt2": Family("GPT2LMHeadModel", _gpt2, _GPT2_ALIASES),
    "opt": Family("OPTForCausalLM", _opt),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _deepseek_v2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _deepseek_v3),
}
