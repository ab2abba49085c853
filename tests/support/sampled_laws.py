"""Distributions of sampling in plain NumPy, and a test of fit."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import sampling
from jaxkv.sampling import Params, Sampling, request_key


def params_of(requests: list[Sampling], engine_seed: int = 7, **changes: Any) -> Params:
    keys = [
        request_key(request.seed, engine_seed, request_id)
        for request_id, request in enumerate(requests)
    ]
    params = sampling.make_params(requests, keys, [0] * len(requests))
    return jax.tree.map(jnp.asarray, params._replace(**changes))


def penalised_slowly(
    logits: np.ndarray,
    tokens: np.ndarray,
    prompt_length: int,
    num_tokens: int,
    request: Sampling,
) -> np.ndarray:
    result = logits.astype(np.float64)
    for token in range(len(logits)):
        num_seen = list(tokens[:num_tokens]).count(token)
        num_repeats = list(tokens[prompt_length:num_tokens]).count(token)
        if num_seen and result[token] > 0:
            result[token] /= request.repetition_penalty
        elif num_seen:
            result[token] *= request.repetition_penalty
        result[token] -= request.frequency_penalty * num_repeats
        result[token] -= request.presence_penalty * (num_repeats > 0)
    return result


def kept_slowly(logits: np.ndarray, request: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mask by a full sort in float64, and distances to the threshold."""
    vocab = len(logits)
    mask = np.zeros(len(logits), bool)
    sure = np.full(vocab, np.inf)
    if np.isnan(logits).any() or logits.max() == -np.inf:
        return mask, sure
    ranks = np.lexsort((np.arange(vocab), -logits))
    if request.temperature == 0:
        mask[ranks[0]] = True
        return mask, sure
    top = logits.max()
    with np.errstate(invalid="ignore"):
        scaled = (logits.astype(np.float64) - top) / np.float32(request.temperature)
    scaled[logits == top] = 0
    mask[ranks[: request.top_k or vocab]] = True
    if request.top_p < 1:
        weights = np.where(mask, np.exp(scaled), 0)[ranks]
        before = np.cumsum(weights) - weights
        share = np.float32(request.top_p) * weights.sum()
        mask[ranks] &= (before < share) | (np.arange(vocab) == 0)
        sure[ranks] = np.abs(before - share) / weights.sum()
    if request.min_p > 0:
        edge = math.log(np.float32(request.min_p))
        mask &= scaled >= edge
        # The difference of two infinities is NaN.
        distance = np.abs(np.where(np.isfinite(scaled), scaled, -1e9) - edge)
        sure = np.minimum(sure, distance)
    return mask & (logits > -np.inf), sure


def chi_square(observed: np.ndarray, law: np.ndarray) -> float:
    """Returns the p-value of the chi-square test."""
    assert not observed[law == 0].any()
    expected = observed.sum() * law[law > 0]
    statistic = ((observed[law > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    if freedom == 0:
        return 1.0
    return float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2))


def law_slowly(logits: np.ndarray, request: Sampling) -> np.ndarray:
    """Returns the probabilities of a request's next token in float64."""
    mask, _ = kept_slowly(logits, request)
    law = np.zeros(len(logits))
    if mask.any():
        over = logits[mask].astype(np.float64) - logits[mask].max()
        law[mask] = np.exp(over / np.float32(request.temperature or 1))
        law /= law.sum()
    return law
