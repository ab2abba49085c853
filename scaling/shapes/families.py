"""How each family of a `config.json` becomes the fields of a `Description`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from scaling.shapes import huggingface_keys
from scaling.shapes.description import Experts, HeadAttention, LatentAttention
from scaling.shapes.huggingface_keys import Raw


class _Sliding(NamedTuple):
    """How a family's windows work: the default width, and which layers have one."""

    default: int | None
    slides: Callable[[int], bool] = lambda layer: True


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
    sliding: _Sliding | None = None,
) -> dict[str, Any]:
    """The common shape: RMS norms, rotary positions, a gated FFN.

    The arguments are what a family takes a key that is left out to mean, and what it
    fixes.
    """
    heads = huggingface_keys.size(raw, "num_attention_heads")
    hidden = huggingface_keys.size(raw, "hidden_size")
    # A null is not the default: it asks for what follows from the other sizes.
    kv_heads = huggingface_keys.optional(raw, "num_key_value_heads", num_kv_heads)
    head_dim = huggingface_keys.optional(raw, "head_dim", head_dim)
    if head_dim is None:
        head_dim = huggingface_keys.quotient(
            *("hidden_size", hidden, "num_attention_heads", heads)
        )
    bias, mlp_bias = (
        key in bias_keys and huggingface_keys.flag(raw, key, False)
        for key in ("attention_bias", "mlp_bias")
    )
    return {
        "vocab_size": huggingface_keys.size(raw, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": huggingface_keys.size(raw, "num_hidden_layers"),
        "attention": HeadAttention(
            num_q_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            qkv_bias=bias or qkv_bias,
            out_bias=bias,
            qk_norm=qk_norm,
        ),
        "mlp_size": huggingface_keys.size(raw, "intermediate_size"),
        "mlp_bias": mlp_bias,
        "norms_per_layer": norms_per_layer,
        "tie_embeddings": huggingface_keys.flag(raw, "tie_word_embeddings", tied),
        "windows": _windows(raw, sliding),
        "max_positions": huggingface_keys.optional(
            raw, "max_position_embeddings", None
        ),
    }


def _mistral(raw: Raw) -> dict[str, Any]:
    return _llama(raw, num_kv_heads=8, sliding=_Sliding(4096))


def _mixtral(raw: Raw) -> dict[str, Any]:
    experts = Experts(
        num_experts=huggingface_keys.size(raw, "num_local_experts", 8),
        top_k=huggingface_keys.size(raw, "num_experts_per_tok", 2),
        size=huggingface_keys.size(raw, "intermediate_size"),
    )
    shape = _llama(raw, num_kv_heads=8, sliding=_Sliding(None))
    return shape | {"experts": experts}


_ATTENTION_BIAS = ("attention_bias",)


def _qwen2(raw: Raw) -> dict[str, Any]:
    return _llama(raw, qkv_bias=True, sliding=_qwen_window(raw))


def _qwen3(raw: Raw) -> dict[str, Any]:
    return _llama(
        raw,
        qk_norm=True,
        head_dim=128,  # transformers' default, whatever the hidden size
        bias_keys=_ATTENTION_BIAS,
        sliding=_qwen_window(raw),
    )


def _qwen2_moe(raw: Raw) -> dict[str, Any]:
    shared = huggingface_keys.size(raw, "shared_expert_intermediate_size", 5632)
    more = {"shared_size": shared, "shared_gate": True}
    return _qwen2(raw) | _qwen_experts(raw, (60, 4, 1408), **more)


def _qwen3_moe(raw: Raw) -> dict[str, Any]:
    shape = _llama(
        raw,
        qk_norm=True,
        num_kv_heads=4,
        bias_keys=_ATTENTION_BIAS,
        sliding=_qwen_window(raw),
    )
    return shape | _qwen_experts(raw, (128, 8, 768))


def _qwen_experts(raw: Raw, sizes: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    experts = Experts(
        num_experts=huggingface_keys.size(raw, "num_experts", sizes[0]),
        top_k=huggingface_keys.size(raw, "num_experts_per_tok", sizes[1]),
        size=huggingface_keys.size(raw, "moe_intermediate_size", sizes[2]),
        **more,
    )
    plain = raw.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise ValueError(f"mlp_only_layers={plain!r} must be a list")
    every, layers = huggingface_keys.size(raw, "decoder_sparse_step", 1), _layers(raw)
    mixed = tuple(x not in plain and (x + 1) % every == 0 for x in layers)
    return {"experts": experts, "mixture_layers": mixed}


def _gemma(raw: Raw) -> dict[str, Any]:
    return _llama(
        raw, num_kv_heads=16, head_dim=256, tied=True, bias_keys=_ATTENTION_BIAS
    )


def _gemma2(raw: Raw) -> dict[str, Any]:
    # Even layers slide, odd ones see all.
    return _later_gemma(raw, _Sliding(4096, lambda layer: layer % 2 == 0))


def _gemma3(raw: Raw) -> dict[str, Any]:
    pattern = huggingface_keys.size(raw, "sliding_window_pattern", 6)
    sliding = _Sliding(4096, lambda layer: (layer + 1) % pattern != 0)
    return _later_gemma(raw, sliding, qk_norm=True)


def _later_gemma(raw: Raw, sliding: _Sliding, *, qk_norm=False) -> dict[str, Any]:
    return _llama(
        raw,
        num_kv_heads=4,
        head_dim=256,
        tied=True,
        bias_keys=_ATTENTION_BIAS,
        norms_per_layer=4,
        sliding=sliding,
        qk_norm=qk_norm,
    )


def _gpt2(raw: Raw) -> dict[str, Any]:
    hidden, heads = (
        huggingface_keys.size(raw, "n_embd"),
        huggingface_keys.size(raw, "n_head"),
    )
    positions = huggingface_keys.size(raw, "n_positions", 1024)
    return {
        "vocab_size": huggingface_keys.size(raw, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": huggingface_keys.size(raw, "n_layer"),
        "attention": _biased(hidden, heads, ("n_embd", "n_head")),
        "mlp_size": huggingface_keys.optional(raw, "n_inner", None) or 4 * hidden,
        **_GPT,
        "position_rows": positions,
        "max_positions": positions,
        "tie_embeddings": huggingface_keys.flag(raw, "tie_word_embeddings", True),
    }


def _opt(raw: Raw) -> dict[str, Any]:
    hidden, heads = (
        huggingface_keys.size(raw, "hidden_size"),
        huggingface_keys.size(raw, "num_attention_heads"),
    )
    for key, needed in (
        ("word_embed_proj_dim", hidden),
        ("do_layer_norm_before", True),
        ("enable_bias", True),
    ):
        if (given := raw.get(key)) not in (None, needed):
            raise ValueError(f"{key}={given!r} is not counted, only {needed!r}")
    positions = huggingface_keys.size(raw, "max_position_embeddings", 2048)
    return {
        "vocab_size": huggingface_keys.size(raw, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": huggingface_keys.size(raw, "num_hidden_layers"),
        "attention": _biased(hidden, heads, ("hidden_size", "num_attention_heads")),
        "mlp_size": huggingface_keys.size(raw, "ffn_dim"),
        **_GPT,
        "position_rows": positions + 2,  # two rows come before position 0
        "max_positions": positions,
        "tie_embeddings": huggingface_keys.flag(raw, "tie_word_embeddings", True),
    }


_GPT = {"gated": False, "mlp_bias": True, "norm": "layer"}


def _biased(hidden: int, heads: int, keys: tuple[str, str]) -> HeadAttention:
    return HeadAttention(
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=huggingface_keys.quotient(keys[0], hidden, keys[1], heads),
        qkv_bias=True,
        out_bias=True,
    )


def _deepseek(
    raw: Raw,
    *,
    first_mixed: int,
    shared: int | None,
    ahead: int,
    gate_bias: bool,
) -> dict[str, Any]:
    if huggingface_keys.flag(raw, "attention_bias", False):
        raise ValueError("attention_bias=True is not counted, only False")
    layers, first = (
        _layers(raw),
        huggingface_keys.count(raw, "first_k_dense_replace", first_mixed),
    )
    every = huggingface_keys.size(raw, "moe_layer_freq", 1)
    mixed = tuple(x >= first and x % every == 0 for x in layers)
    width = huggingface_keys.size(raw, "moe_intermediate_size")
    num_shared = huggingface_keys.optional(raw, "n_shared_experts", shared) or 0
    return {
        "vocab_size": huggingface_keys.size(raw, "vocab_size"),
        "hidden_size": huggingface_keys.size(raw, "hidden_size"),
        "num_layers": len(layers),
        "attention": LatentAttention(
            num_q_heads=huggingface_keys.size(raw, "num_attention_heads"),
            # A null says that queries are not compressed.
            q_rank=huggingface_keys.optional(raw, "q_lora_rank", 1536),
            kv_rank=huggingface_keys.size(raw, "kv_lora_rank", 512),
            nope_dim=huggingface_keys.size(raw, "qk_nope_head_dim", 128),
            rope_dim=huggingface_keys.size(raw, "qk_rope_head_dim", 64),
            value_dim=huggingface_keys.size(raw, "v_head_dim", 128),
        ),
        "mlp_size": huggingface_keys.size(raw, "intermediate_size"),
        "experts": Experts(
            num_experts=huggingface_keys.size(raw, "n_routed_experts"),
            top_k=huggingface_keys.size(raw, "num_experts_per_tok"),
            size=width,
            shared_size=num_shared * width,
            gate_bias=gate_bias,
        ),
        "mixture_layers": mixed,
        "tie_embeddings": huggingface_keys.flag(raw, "tie_word_embeddings", False),
        "num_ahead_layers": huggingface_keys.count(
            raw, "num_nextn_predict_layers", ahead
        ),
        "max_positions": huggingface_keys.optional(
            raw, "max_position_embeddings", None
        ),
    }


def _deepseek_v2(raw: Raw) -> dict[str, Any]:
    corrected = raw.get("topk_method") == "noaux_tc"
    return _deepseek(raw, first_mixed=0, shared=None, ahead=0, gate_bias=corrected)


def _deepseek_v3(raw: Raw) -> dict[str, Any]:
    return _deepseek(raw, first_mixed=3, shared=1, ahead=1, gate_bias=True)


READERS: dict[str, Callable[[Raw], dict[str, Any]]] = {
    "llama": lambda raw: _llama(raw, bias_keys=(*_ATTENTION_BIAS, "mlp_bias")),
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "opt": _opt,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}


def _layers(raw: Raw) -> range:
    return range(huggingface_keys.size(raw, "num_hidden_layers"))


def _qwen_window(raw: Raw) -> _Sliding | None:
    if not huggingface_keys.flag(raw, "use_sliding_window", False):
        return None
    first = huggingface_keys.count(raw, "max_window_layers", 28)
    return _Sliding(4096, lambda layer: layer >= first)


def _windows(raw: Raw, sliding: _Sliding | None) -> tuple[int | None, ...]:
    """Reads the width of every layer's window; without a rule there are none."""
    layers = _layers(raw)
    window = None
    if sliding is not None:
        window = huggingface_keys.optional(raw, "sliding_window", sliding.default)
    if sliding is None or window is None:
        return (None,) * len(layers)
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != len(layers):
            raise ValueError(f"layer_types has {len(kinds)} entries, not {len(layers)}")
        return tuple(window if x == "sliding_attention" else None for x in kinds)
    return tuple(window if sliding.slides(layer) else None for layer in layers)
