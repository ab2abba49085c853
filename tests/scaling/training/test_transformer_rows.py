"""Training's forward pass equals that of serving."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models import Experts, ModelConfig, init_params
from jaxkv.models.config import AttentionKind, RopeScaling
from scaling.training import transformer_rows

LLAMA = ModelConfig(
    vocab_size=31,
    hidden_size=12,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_size=20,
    max_positions=16,
    norm_eps=1e-3,
)
VARIANTS = {
    "llama": LLAMA,
    "qwen3": dataclasses.replace(
        LLAMA, qk_norm=True, qkv_bias=True, tie_embeddings=False, window=5
    ),
    "scaled": dataclasses.replace(
        LLAMA, rope_scaling=RopeScaling(original_max_positions=8)
    ),
    "opt": dataclasses.replace(
        LLAMA,
        **{"norm": "layer", "positions": "learned", "position_offset": 2},
        **{"activation": "relu", "gated": False},
        **dict.fromkeys(["qkv_bias", "out_bias", "mlp_bias"], True),
    ),
    "gpt_neox": dataclasses.replace(
        LLAMA,
        **{"norm": "layer", "activation": "gelu", "gated": False},
        **{"residual": "parallel", "rotary_size": 3},
        **dict.fromkeys(["qkv_bias", "out_bias", "mlp_bias"], True),
    ),
    "olmo3": dataclasses.replace(
        LLAMA,
        **{"norm_places": "after", "qk_norm": True, "qk_norm_over": "layer"},
        **{"attention_pattern": (1, 0), "rope_scaling": RopeScaling(kind="linear")},
        other_attention=(AttentionKind(window=3),),
    ),
    "gemma2": dataclasses.replace(
        LLAMA,
        **{"norm": "rms_offset", "norm_places": "both", "activation": "gelu_tanh"},
        **{"attention_scale": 0.3, "score_cap": 2.0, "logit_cap": 3.0},
        **{"embed_scale": 12**0.5, "attention_pattern": (1, 0)},
        other_attention=(AttentionKind(window=3, positions="none"),),
    ),
    "nanochat": dataclasses.replace(
        LLAMA,
        **{"norm": "rms_plain", "embed_norm": True, "qk_norm": True},
        **{"activation": "relu_squared", "gated": False},
        **{"residual_scale": 0.5, "logit_scale": 2.0},
    ),
    "gpt_oss": dataclasses.replace(
        LLAMA,
        **{"sinks": True, "activation": "clamped_swiglu", "activation_limit": 0.3},
        **{"score_growth": 0.4, "rope_scaling": RopeScaling(original_max_positions=4)},
        experts=Experts(
            **{"num_experts": 5, "top_k": 2, "size": 14},
            **{"router_bias": True, "expert_bias": True},
        ),
    ),
    "mixtral": dataclasses.replace(
        LLAMA, experts=Experts(num_experts=5, top_k=2, size=14)
    ),
    "qwen2_moe": dataclasses.replace(
        LLAMA,
        experts=Experts(
            **{"num_experts": 4, "top_k": 3, "size": 6, "shared_size": 10},
            **{"shared_gate": True, "renormalise": False, "num_dense_layers": 1},
        ),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", VARIANTS)
def test_rows_give_what_columns_give(name: str) -> None:
    config = VARIANTS[name]
    rng = np.random.default_rng(0)
    # Zero biases and unit scales would hide misplaced ones.
    params = jax.tree.map(
        lambda x: jnp.asarray(x + 0.3 * rng.standard_normal(x.shape), jnp.float32),
        init_params(config, jax.random.key(0)),
    )
    tokens = jnp.asarray(rng.integers(0, 31, (3, 11)), jnp.int32)
    actual, balance = transformer_rows.run_transformer(params, tokens, config=config)
    served = models.outputs(params, tokens, config=config)
    assert actual.dtype == served.logits.dtype
    np.testing.assert_allclose(actual, served.logits, rtol=1e-4, atol=1e-4)
    assert float(balance) == pytest.approx(float(served.auxiliary), rel=1e-5)
    assert (float(balance) > 0) == (config.experts is not None)
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    low, _ = transformer_rows.run_transformer(halves, tokens, config=config)
    assert low.dtype == jnp.float32
    assert np.abs(low - actual).max() < 0.2 * np.abs(actual).max()
