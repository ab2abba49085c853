"""A dense Llama and its modules for multi-token prediction, in NumPy float64."""

from typing import Any

import numpy as np

from jaxkv.models.config import ModelConfig


def reference_logits(
    params: Any, tokens: np.ndarray, config: ModelConfig
) -> list[np.ndarray]:
    """Returns the logits `[seq, vocab]` of the model, then those of every module."""
    table = _wide(params["embed"]["weight"])
    head = table if config.tie_embeddings else _wide(params["head"]["weight"])
    embedded, state = table[tokens], table[tokens]
    for index in range(config.num_layers):
        state = _layer(params["layers"][index], state, config)
    state = _norm(state, params["final_norm"], config)
    found = [state @ head.T]
    for index in range(config.num_ahead_layers):
        module = params["ahead"][index]
        before = np.zeros_like(state)
        before[1:] = state[:-1]
        token = _norm(embedded, module["token_norm"], config)
        feature = _norm(before, module["feature_norm"], config)
        weight = _wide(module["merge"]["weight"])
        width = config.hidden_size
        merged = token @ weight[:, :width].T + feature @ weight[:, width:].T
        state = _layer(module["layer"], merged, config)
        state = _norm(state, module["final_norm"], config)
        found.append(state @ head.T)
    return found


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def _norm(x: np.ndarray, norm: Any, config: ModelConfig) -> np.ndarray:
    size = np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    return x / size * _wide(norm["scale"])


def _rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Encodes positions 0, 1, 2 and so on of `[seq, head_dim]`."""
    half = config.head_dim // 2
    turns = config.rope_theta ** (-np.arange(half) / half)
    angle = np.arange(len(x))[:, None] * turns
    first, second = x[:, :half], x[:, half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], 1)


def _layer(layer: Any, x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Runs a pre-norm layer over one sequence, head by head."""
    normed = _norm(x, layer["attention_norm"], config)
    weight, heads = _wide(layer["qkv"]["weight"]), []
    seen = np.tri(len(x), dtype=bool)
    for kv_head in range(config.num_kv_heads):
        key = _rotate(normed @ weight[kv_head, -2].T, config)
        value = normed @ weight[kv_head, -1].T
        for query_weight in weight[kv_head, :-2]:
            query = _rotate(normed @ query_weight.T, config)
            scores = query @ key.T / np.sqrt(config.head_dim)
            scores = np.where(seen, scores, -np.inf)
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(share / share.sum(axis=1, keepdims=True) @ value)
    x = x + np.concatenate(heads, axis=1) @ _wide(layer["out"]["weight"]).T
    normed = _norm(x, layer["mlp_norm"], config)
    gate, up = (normed @ part.T for part in _wide(layer["up"]["weight"]))
    return x + gate / (1 + np.exp(-gate)) * up @ _wide(layer["down"]["weight"]).T
