"""A small model and its windows, to be divided over the devices that a CPU plays."""

import jax
import numpy as np

from jaxkv.models import ModelConfig

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_q_heads=8,
    num_kv_heads=4,
    head_dim=8,
    mlp_size=48,
    max_positions=64,
)
BATCH, SEQ = 4, 32
WINDOWS = np.asarray(
    jax.random.randint(jax.random.key(1), (BATCH, SEQ + 1), 0, 61), np.int32
)
