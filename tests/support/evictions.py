"""The rules of KV eviction in NumPy, one head at a time, and a model with masks.

The model never moves a token: it keeps all keys and values by position, and a mask of
those that each head of each layer sees.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.engine import EngineConfig
from jaxkv.models import ModelConfig, Params, rotary, transformer

SINKS = 4
POOL = 7


def attention_sums(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Sums the attention of the last queries [n, group, width] over them."""
    total = np.zeros(len(keys))
    for back, group in enumerate(queries[::-1]):
        end = len(keys) - back
        for query in group:
            weights = np.exp(keys[:end] @ query - np.max(keys[:end] @ query))
            total[:end] += weights / weights.sum()
    return total


def largest(scores: np.ndarray, num: int) -> list[int]:
    """Indices of the largest scores, the earlier one of equal scores, in order."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:num])


def select(
    rule: str, keys: np.ndarray, queries: np.ndarray, sums: np.ndarray, budget: int
) -> list[int]:
    """Indices of the tokens that a head keeps; `sums` are those of H2O."""
    num = len(keys)
    if rule == "streaming-llm":
        return [*range(SINKS), *range(num - budget + SINKS, num)]
    if rule == "keydiff":
        directions = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        mean = directions.mean(axis=0)
        return largest(-directions @ mean / np.linalg.norm(mean), budget)
    if rule == "h2o":
        recent = budget - budget // 2
        heavy = largest(sums[: num - recent], budget // 2)
        return [*heavy, *range(num - recent, num)]
    assert rule == "snapkv"
    window = len(queries)
    before = attention_sums(keys, queries)[: num - window]
    pooled = [
        max([0.0, *before[max(0, i - POOL // 2) : i + POOL // 2 + 1]])
        for i in range(len(before))
    ]
    return [*largest(np.array(pooled), budget - window), *range(num - window, num)]


class MaskedCache(NamedTuple):
    """Keys, values, queries by position, and the tokens that each head sees."""

    k: Any
    v: Any
    q: Any
    is_seen: Any
    """[layers, kv_heads, positions]"""


@functools.cache
def _feeder(config: ModelConfig, num_pages: int = 0, page_size: int = 0) -> Any:
    """Returns a compiled function that feeds one token to all layers.

    With `num_pages`, a head sees only the tokens of the pages that Quest selects.
    """

    def seen_pages(keys: Any, queries: Any, position: Any) -> np.ndarray:
        keys, queries = (np.asarray(x, np.float64) for x in (keys, queries))
        is_seen = np.zeros((keys.shape[1], keys.shape[0] // page_size), bool)
        for head in range(keys.shape[1]):
            known = keys[: position + 1, head]
            selected = select_pages(known, queries[head], num_pages, page_size)
            is_seen[head, selected] = True
        return np.repeat(is_seen, page_size, axis=1)

    def attend(layer: Any, qkv: Any, angles: Any, carry: Any) -> Any:
        cache, position = carry
        q, k, v = (
            x.reshape(-1, x.shape[-2]) for x in rotary.split_and_rotate(qkv, angles)
        )
        q = q * layer.scoring.scale
        at = layer.index, position
        cache = cache._replace(
            k=cache.k.at[at].set(k), v=cache.v.at[at].set(v), q=cache.q.at[at].set(q)
        )
        grouped = q.reshape(k.shape[0], -1, k.shape[1])
        scores = jnp.einsum("hgd,thd->hgt", grouped, cache.k[layer.index])
        is_seen = cache.is_seen[layer.index]
        if num_pages:
            shape = jax.ShapeDtypeStruct(is_seen.shape, bool)
            call = cache.k[layer.index], grouped, position
            is_seen &= jax.pure_callback(seen_pages, shape, *call)
        is_seen = is_seen[:, None, :]
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
        y = jnp.einsum("hgt,thd->hgd", weights, cache.v[layer.index])
        return y[..., None], (cache, position)

    def feed(params: Params, token: Any, position: Any, cache: MaskedCache) -> Any:
        model = transformer.merge(config, params)
        states = model.hidden(token[None], position[None], attend, (cache, position))
        return jax.nn.log_softmax(model.logits(states.last)[0]), states.carry[0]

    return jax.jit(feed)


def generate(
    params: Params,
    config: ModelConfig,
    prompt: list[int],
    num_tokens: int,
    engine: EngineConfig,
) -> tuple[list[int], list[float]]:
    """Returns a greedy answer under eviction, and its log-probabilities."""
    rule, budget, window = engine.evict, engine.evict_budget, engine.evict_window
    assert rule is not None
    total = len(prompt) + num_tokens
    layers, heads, width = config.num_layers, config.num_kv_heads, config.head_dim
    kv = jnp.zeros((layers, engine.max_length, heads, width))
    queries = jnp.zeros((layers, engine.max_length, config.num_q_heads, width))
    is_seen = np.zeros((layers, heads, engine.max_length), bool)
    sums = np.zeros(is_seen.shape)
    cache = MaskedCache(kv, kv, queries, None)
    tokens = list(prompt)
    logprobs: list[float] = []
    fed_at_eviction = 0
    for position in range(total - 1):
        is_seen[:, :, position] = True
        # A copy, since the computation may read it later.
        cache = cache._replace(is_seen=is_seen.copy())
        places = jnp.int32(tokens[position]), jnp.int32(position)
        feed = _feeder(config)
        if rule == "quest" and position >= len(prompt):
            size = engine.page_size
            feed = _feeder(config, budget // size, size)
        scores, cache = feed(params, *places, cache)
        num_fed = position + 1
        if num_fed >= len(prompt):
            tokens.append(int(jnp.argmax(scores)))
            logprobs.append(float(scores[tokens[-1]]))
        length = int(is_seen[0, 0].sum())
        if rule == "quest":
            continue
        again = rule != "snapkv" and num_fed > len(prompt)
        due = num_fed == len(prompt) and length > budget
        if not (due or (again and length >= budget + engine.page_size)):
            continue
        first = max(num_fed - window, fed_at_eviction)
        for layer, head in itertools.product(range(layers), range(heads)):
            place = np.flatnonzero(is_seen[layer, head])
            k = np.asarray(cache.k[layer, place, head], np.float64)
            q = np.asarray(cache.q[layer], np.float64)
            q = q.reshape(len(q), heads, -1, width)[:, head]
            if rule == "h2o":
                sums[layer, head, place] += attention_sums(k, q[first:num_fed])
            last = q[max(0, num_fed - window) : num_fed]
            kept = select(rule, k, last, sums[layer, head, place], budget)
            is_seen[layer, head] = False
            is_seen[layer, head, place[kept]] = True
        fed_at_eviction = num_fed
    return tokens[len(prompt) :], logprobs


def select_pages(
    keys: np.ndarray, queries: np.ndarray, num_pages: int, page_size: int
) -> list[int]:
    """Pages that a head reads under Quest; `queries` are those of one token."""
    last = (len(keys) - 1) // page_size
    bounds = np.full(last + 1, np.inf)
    for page in range(last):
        content = keys[page * page_size : (page + 1) * page_size]
        low, high = queries * content.min(axis=0), queries * content.max(axis=0)
        bounds[page] = np.maximum(low, high).sum()
    return largest(bounds, num_pages)
