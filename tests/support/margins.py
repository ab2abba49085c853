"""Margins of sampled tokens in float64: how much rounding may change the choice."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import sampling
from jaxkv.sampling import SAMPLE, draw_key, request_key
from tests.support import engines
from tests.support.engines import MODEL, Ask


def margin(ask: Ask, answer: Sequence[int], *, seed: int) -> float:
    """Returns the smallest change of a score that could change the next token.

    Args:
      ask: the request.
      answer: its tokens so far.
      seed: the engine's seed.

    Returns:
      The gap between the best two scores (with Gumbel noise if sampled), or the
      distance to a truncation threshold, whichever is smaller.
    """
    sequence = [*ask.prompt, *answer]
    with jax.enable_x64(True):
        weights = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x), "float64"), engines.params()
        )
        tokens = np.zeros((1, MODEL.max_positions), np.int32)
        tokens[0, : len(sequence)] = sequence
        logits = engines.full_logits(weights, tokens, config=MODEL)
        scores = np.asarray(logits[0, len(sequence) - 1])
        noise = noise_of(ask, len(sequence), seed)
    assert scores.dtype == np.float64
    return gap_of(penalised(scores, ask, answer), noise, ask)


def noise_of(ask: Ask, position: int, seed: int) -> np.ndarray:
    """Returns the Gumbel noise of a sample in float64."""
    key = request_key(ask.sampling.seed, seed, ask.request_id)
    keys = draw_key(
        jnp.asarray(key)[None],
        jnp.zeros(1, jnp.int32),
        jnp.asarray([position], jnp.int32),
        SAMPLE,
    )
    ids = jnp.arange(MODEL.vocab_size, dtype=jnp.int32)[None, :]
    return np.asarray(sampling.gumbel(keys, ids, jnp.float64))[0]


def penalised(scores: np.ndarray, ask: Ask, answer: Sequence[int]) -> np.ndarray:
    """Applies repetition, frequency and presence penalties, token by token."""
    scores = scores.copy()
    s = ask.sampling
    for token in {*ask.prompt, *answer}:
        factor = s.repetition_penalty
        scores[token] *= 1 / factor if scores[token] > 0 else factor
    for token in set(answer):
        scores[token] -= s.frequency_penalty * list(answer).count(token)
        scores[token] -= s.presence_penalty
    return scores


def gap_of(scores: np.ndarray, noise: np.ndarray, ask: Ask) -> float:
    """Returns the margin of final scores under the request's truncation."""
    s = ask.sampling
    order = np.argsort(-scores, kind="stable")
    if s.temperature == 0:
        return float(scores[order[0]] - scores[order[1]])
    ranked = scores[order] / s.temperature
    distances = []
    cutoff = len(order)
    if 0 < s.top_k < len(order):
        distances.append(ranked[s.top_k - 1] - ranked[s.top_k])
        cutoff = s.top_k
    if s.top_p < 1:
        mass = np.exp(ranked[:cutoff] - ranked[0])
        share = np.cumsum(mass) / mass.sum()
        distances.append(np.abs(share - s.top_p).min())
        cutoff = int((share < s.top_p).sum()) + 1
    if s.min_p > 0:
        above = ranked - ranked[0] - np.log(s.min_p)
        distances.append(np.abs(above).min())
        cutoff = min(cutoff, int((above >= 0).sum()))
    perturbed = np.sort((ranked + noise[order])[:cutoff])
    if cutoff > 1:
        distances.append(perturbed[-1] - perturbed[-2])
    return float(min(distances, default=np.inf))
