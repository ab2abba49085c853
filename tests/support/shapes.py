"""Shapes of small models, to be modified by `dataclasses.replace`."""

from typing import Any

from jaxkv.models import ModelConfig

SMALL = ModelConfig(
    vocab_size=257,
    hidden_size=16,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_size=24,
    max_positions=64,
)
"""A byte-level model."""

GROUPED = ModelConfig(
    vocab_size=97,
    hidden_size=24,
    num_layers=3,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=40,
    max_positions=130,
)
"""Three query heads per KV head; the width differs from heads times head size."""

BIASED: dict[str, Any] = {
    "norm": "layer",
    "positions": "learned",
    "gated": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}
"""Common settings of GPT-2 and OPT."""
