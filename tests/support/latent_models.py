"""A small model with latent attention, and an independent implementation in NumPy."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.models import LatentConfig, ModelConfig, param_shapes
from jaxkv.models.config import RopeScaling
from tests.support import engines

LATENT = dataclasses.replace(
    engines.MODEL,
    num_q_heads=4,
    num_kv_heads=4,
    head_dim=18,
    latent=LatentConfig(kv_rank=16, q_rank=14, nope_dim=12, rope_dim=6, value_dim=10),
)
"""Head sizes that differ from each other and are no powers of two."""
YARN = dataclasses.replace(
    LATENT,
    latent=LatentConfig(kv_rank=8, nope_dim=8, rope_dim=8, value_dim=12),
    head_dim=16,
    rope_theta=100.0,
    rope_scaling=RopeScaling(
        kind="yarn",
        factor=4.0,
        low_frequency_factor=1.0,
        high_frequency_factor=3.0,
        original_max_positions=32,
        magnitude=1.1,
        score_magnitude=1.2,
    ),
)
"""Queries without compression, and scaled rotary frequencies."""


@functools.cache
def params(config: ModelConfig = LATENT, seed: int = 0) -> Any:
    """Returns random weights of a scale that gives distinct logits, norms included."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> jax.Array:
        if path[-1].key == "scale":
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
        scale = 2 * leaf.shape[-1] ** -0.5
        return jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype)

    shapes = param_shapes(config)
    return jax.tree_util.tree_map_with_path(draw, shapes)


def _rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def _rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Rotates `[seq, size]`, each pair by its own complex number."""
    size = x.shape[1]
    scaling = config.rope_scaling
    pairs = x[:, : size // 2] + 1j * x[:, size // 2 :]
    for pair in range(size // 2):
        pace = config.rope_theta ** (-2 * pair / size)
        factor = 1.0
        if scaling is not None:

            def pair_of(turns: float, scaling: Any = scaling) -> float:
                positions = scaling.original_max_positions
                logs = math.log(positions / (turns * 2 * math.pi))
                return size * logs / (2 * math.log(config.rope_theta))

            first = max(math.floor(pair_of(scaling.high_frequency_factor)), 0)
            last = min(math.ceil(pair_of(scaling.low_frequency_factor)), size - 1)
            ramp = min(max((pair - first) / (last - first), 0), 1)
            pace = pace / scaling.factor * ramp + pace * (1 - ramp)
            factor = scaling.magnitude
        pairs[:, pair] *= factor * np.exp(1j * pace * np.arange(len(x)))
    return np.concatenate([pairs.real, pairs.imag], axis=1)


def _attend(x: np.ndarray, layer: Any, config: ModelConfig) -> np.ndarray:
    """Attends head by head and query by query, with keys and values of every head."""
    sizes = config.latent
    assert sizes is not None
    if sizes.q_rank is None:
        compressed = x
        q_weight = layer["q"]["weight"]
    else:
        compressed = x @ layer["q_down"]["weight"].T
        compressed = _rms(compressed, layer["q_norm"]["scale"], config.norm_eps)
        q_weight = layer["q_up"]["weight"]
    down = x @ layer["kv_down"]["weight"].T
    latent = _rms(down[:, : sizes.kv_rank], layer["kv_norm"]["scale"], config.norm_eps)
    shared = _rotate(down[:, sizes.kv_rank :], config)
    scale = (sizes.nope_dim + sizes.rope_dim) ** -0.5
    if config.rope_scaling is not None:
        scale *= config.rope_scaling.score_magnitude**2
    outputs = []
    for head in range(config.num_q_heads):
        q = compressed @ q_weight[head].T
        turned = _rotate(q[:, sizes.nope_dim :], config)
        q = np.concatenate([q[:, : sizes.nope_dim], turned], axis=1)
        both = latent @ layer["kv_up"]["weight"][head].T
        k = np.concatenate([both[:, : sizes.nope_dim], shared], axis=1)
        v = both[:, sizes.nope_dim :]
        out = np.zeros((len(x), sizes.value_dim))
        for row in range(len(x)):
            scores = scale * (k[: row + 1] @ q[row])
            weights = np.exp(scores - scores.max())
            out[row] = weights @ v[: row + 1] / weights.sum()
        outputs.append(out)
    return np.concatenate(outputs, axis=1) @ layer["out"]["weight"].T


def oracle_logits(weights: Any, tokens: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Returns the logits `[batch, seq, vocab]` of whole sequences, in float64.

    For dense models with a gated SiLU, RMS norms and a head of its own.
    """
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)
    logits = []
    for line in tokens:
        x = weights["embed"]["weight"][line]
        for index in range(config.num_layers):
            layer = weights["layers"][index]
            normed = _rms(x, layer["attention_norm"]["scale"], config.norm_eps)
            x = x + _attend(normed, layer, config)
            normed = _rms(x, layer["mlp_norm"]["scale"], config.norm_eps)
            gate, up = (normed @ w.T for w in layer["up"]["weight"])
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"]["weight"].T
        x = _rms(x, weights["final_norm"]["scale"], config.norm_eps)
        logits.append(x @ weights["head"]["weight"].T)
    return np.stack(logits)
