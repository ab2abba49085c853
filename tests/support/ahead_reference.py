"""A dense Llama and its modules for multi-token prediction, in NumPy float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.models import ModelConfig


def reference_logits(
    params: Any, tokens: Sequence[int] | np.ndarray, config: ModelConfig
) -> list[np.ndarray]:
    """Returns the logits `[seq, vocab]` of the model, then those of every module."""
    state = _model_states(params, tokens, config)
    states = [state]
    for index in range(config.num_ahead_layers):
        before = np.zeros_like(state)
        before[1:] = state[:-1]
        state = _module_states(params, index, tokens, before, config)
        states.append(state)
    return [state @ _head(params, config).T for state in states]


def reference_draft_logits(
    params: Any, context: Sequence[int], drafts: Sequence[int], config: ModelConfig
) -> np.ndarray:
    """Returns the logits `[drafts, vocab]` from which each draft is chosen.

    Draft k is chosen by module k, later ones by the last module, which then reads its
    own state of the token before.
    """
    num_known = len(context)
    num_modules = config.num_ahead_layers
    draft_logits = []
    last = num_known - 1 + num_modules
    for depth in range(1, len(drafts) + 1):
        tokens = [*context, *drafts[: depth - 1]]
        if depth <= num_modules:
            draft_logits.append(reference_logits(params, tokens, config)[depth][-1])
            continue
        before = np.zeros((len(tokens), config.hidden_size))
        state = _model_states(params, tokens, config)
        for index in range(num_modules):
            before[1:] = state[:-1]
            state = _module_states(params, index, tokens, before, config)
        for place in range(last, len(tokens)):
            before[place] = state[place - 1]
            state = _module_states(params, num_modules - 1, tokens, before, config)
        draft_logits.append(state[-1] @ _head(params, config).T)
    return np.stack(draft_logits)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def _head(params: Any, config: ModelConfig) -> np.ndarray:
    return _wide(params["embed" if config.tie_embeddings else "head"]["weight"])


def _model_states(params: Any, tokens: Any, config: ModelConfig) -> np.ndarray:
    """Returns the model's last states, after the final norm."""
    state = _wide(params["embed"]["weight"])[tokens]
    for index in range(config.num_layers):
        state = _layer(params["layers"][index], state, config)
    return _norm(state, params["final_norm"], config)


def _module_states(
    params: Any, index: int, tokens: Any, before: np.ndarray, config: ModelConfig
) -> np.ndarray:
    """Returns the states of a module, given those of the tokens before."""
    module = params["ahead"][index]
    width = config.hidden_size
    embedded = _wide(params["embed"]["weight"])[tokens]
    token = _norm(embedded, module["token_norm"], config)
    feature = _norm(before, module["feature_norm"], config)
    weight = _wide(module["merge"]["weight"])
    merged = token @ weight[:, :width].T + feature @ weight[:, width:].T
    state = _layer(module["layer"], merged, config)
    return _norm(state, module["final_norm"], config)


def _norm(x: np.ndarray, norm: Any, config: ModelConfig) -> np.ndarray:
    size = np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps)
    return x / size * _wide(norm["scale"])


def _rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Encodes positions 0, 1, 2 and so on of `[seq, head_dim]`."""
    half = config.head_dim // 2
    turns = config.rope_theta ** (-np.arange(half) / half)
    angle = np.arange(len(x))[:, None] * turns
    first = x[:, :half]
    second = x[:, half:]
    cos = np.cos(angle)
    sin = np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], 1)


def _layer(layer: Any, x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Runs a pre-norm layer over one sequence, head by head."""
    normed = _norm(x, layer["attention_norm"], config)
    weight = _wide(layer["qkv"]["weight"])
    heads = []
    mask = np.tri(len(x), dtype=bool)
    for kv_head in range(config.num_kv_heads):
        key = _rotate(normed @ weight[kv_head, -2].T, config)
        value = normed @ weight[kv_head, -1].T
        for query_weight in weight[kv_head, :-2]:
            query = _rotate(normed @ query_weight.T, config)
            scores = query @ key.T / np.sqrt(config.head_dim)
            scores = np.where(mask, scores, -np.inf)
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(share / share.sum(axis=1, keepdims=True) @ value)
    x = x + np.concatenate(heads, axis=1) @ _wide(layer["out"]["weight"]).T
    normed = _norm(x, layer["mlp_norm"], config)
    gate, up = (normed @ part.T for part in _wide(layer["up"]["weight"]))
    return x + gate / (1 + np.exp(-gate)) * up @ _wide(layer["down"]["weight"]).T
