"""Log-probabilities of sampled answers by engines and by trainers."""

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

import jaxkv
from experiments.decoding.rollout_mismatch.schedules import (
    ReportedLogprobs,
    reported_logprobs,
)
from jaxkv.models import LoadedModel
from jaxkv.sampling import Sampling
from scaling.policy import k1, k3, ordinary_logprobs

LENGTH = 192
"""Largest number of tokens of a prompt and its answer."""


type Trainer = Literal["score", "logits"]


class Sampler(NamedTuple):
    """An engine that samples, and the trainer that scores its answers.

    Attributes:
      numerics: `numerics` of the engine.
      dtype: type of the engine's weights.
      kv_dtype: type of the engine's K and V.
      trainer: "score", or "logits" for the ordinary forward pass.
      trainer_dtype: type of the trainer's weights.
    """

    numerics: Literal["fast", "reproducible"]
    dtype: str
    kv_dtype: Literal["model", "int8"]
    trainer: Trainer
    trainer_dtype: str


SAMPLERS = {
    "reproducible": Sampler("reproducible", "float32", "model", "score", "float32"),
    "reproducible, bfloat16": Sampler(
        "reproducible", "bfloat16", "model", "score", "bfloat16"
    ),
    "fast": Sampler("fast", "float32", "model", "logits", "float32"),
    "fast, bfloat16": Sampler("fast", "bfloat16", "model", "logits", "bfloat16"),
    "bfloat16, trained in float32": Sampler(
        "fast", "bfloat16", "model", "logits", "float32"
    ),
    "8-bit K and V": Sampler("fast", "float32", "int8", "logits", "float32"),
}
"""Samplers by name; the first is the one that agrees."""


class Mismatch(NamedTuple):
    """Differences between the log-probabilities of a sampler and of a trainer."""

    num_tokens: int
    num_different: int
    k1: float
    """Mean of log p(sampler) - log p(trainer)."""
    k3: float
    """Mean of r - 1 - log r with r = p(trainer) / p(sampler), at least 0."""
    largest_logprob: float
    """Largest difference of log-probabilities."""
    largest_probability: float
    """Largest difference of probabilities."""


def measure_mismatch(
    sampler: Float32[np.ndarray, "sequences length"],
    trainer: Float32[np.ndarray, "sequences length"],
) -> Mismatch:
    """Compares log-probabilities; those that are not a number in `sampler` are none."""
    is_token = ~np.isnan(sampler)
    first, second = (jnp.asarray(x[is_token][None]) for x in (sampler, trainer))
    mask = jnp.ones(first.shape, bool)
    difference = jnp.abs(first - second)
    return Mismatch(
        int(is_token.sum()),
        int((first != second).sum()),
        float(k1(first, second, mask).mean()),
        float(k3(first, second, mask).mean()),
        float(difference.max()),
        float(jnp.abs(jnp.exp(first) - jnp.exp(second)).max()),
    )


def sample_answers(
    engine: jaxkv.Engine, prompts: Sequence[list[int]], num_tokens: int, seed: int
) -> tuple[ReportedLogprobs, float]:
    """Samples an answer to every prompt at temperature 1.

    Returns:
      The sequences with the log-probabilities of the answers, and the seconds.
    """
    asks = [
        Sampling(max_tokens=num_tokens, seed=seed + row, logprobs=0, ignore_eos=True)
        for row in range(len(prompts))
    ]
    start_s = time.perf_counter()
    completions = engine.generate(prompts, asks)
    return (
        reported_logprobs(prompts, completions, LENGTH),
        time.perf_counter() - start_s,
    )


def make_sampler(folder: str, sampler: Sampler, max_slots: int) -> jaxkv.Engine:
    """Loads an engine whose pool holds all sequences."""
    num_pages = max_slots * -(-LENGTH // 16)
    return jaxkv.Engine.load(
        folder,
        dtype=sampler.dtype,
        numerics=sampler.numerics,
        kv_dtype=sampler.kv_dtype,
        max_slots=max_slots,
        max_length=LENGTH,
        num_pages=num_pages,
        prefix_cache=True,
    )


def score_reported(
    model: LoadedModel, reported: ReportedLogprobs, trainer: Trainer = "score"
) -> Float32[np.ndarray, "sequences length"]:
    """Scores sequences by `jaxkv.score` or by the ordinary forward pass."""
    if trainer == "score":
        scores = jaxkv.score(
            model.params, reported.tokens, reported.lengths, config=model.config
        )
    else:
        tokens = jnp.asarray(reported.tokens)
        run = jax.jit(ordinary_logprobs, static_argnames="model")
        scores = run(model.params, tokens, model=model.config)
    return np.asarray(scores, np.float32)
