"""Sampling from token distributions: drafts, and replacements of rejected drafts."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from jaxkv import arrays, sampling, validation
from jaxkv.sampling import DRAFT, SAMPLE, Params, draw_key


def draw_drafts(
    logits: Float[Array, "rows vocab"],
    params: Params,
    positions: Int32[Array, " rows"],
    *,
    num: int = 1,
    replacement: bool = False,
) -> tuple[Int32[Array, "rows {num}"], Float[Array, "rows vocab"]]:
    """Samples drafts for each row from its request's sampling distribution.

    A batch of greedy rows generates no noise; a greedy row has one possible token.

    Args:
      logits: of the drafter, after penalties and other changes.
      params: sampling parameters; penalties are ignored.
      positions: positions of the drafts in their sequences.
      num: drafts per row, in [1, vocab], static.
      replacement: True to sample with replacement, static. Otherwise a sampled token is
        removed from the distribution of later drafts.

    Returns:
      The drafts in sampling order, -1 where the distribution has no further token; and
      the distribution, for `Drafts.draft_probs`.

    Raises:
      ValueError: `num` is out of range.
    """
    _check_num(num, logits.shape[1])
    probs = sampling.probabilities(logits, params)

    def sample_rows() -> Array:
        keys = draw_key(params.key, params.sample, positions, DRAFT)
        return gumbel_top_k(probs, keys, num=num, replacement=replacement)

    def take_largest() -> Array:
        top, token = sampling.argmax(probs)
        token = jnp.where(top > 0, token, arrays.NONE)[:, None]
        further = token if replacement else jnp.full_like(token, arrays.NONE)
        return jnp.concatenate([token] + [further] * (num - 1), axis=1)

    is_sampled = jnp.any(params.temperature > 0)
    return lax.cond(is_sampled, sample_rows, take_largest), probs


def shared_noise_logits(
    logits: Float[Array, "rows vocab"],
    params: Params,
    positions: Int32[Array, " rows"],
) -> Float[Array, "rows vocab"]:
    """Adds the target's sampling noise to logits, for `SharedNoiseVerifier`.

    Ranks tokens by how likely the target is to sample them. Logits of greedy rows are
    unchanged; sampled rows get the noise with which the target will sample at these
    positions. Penalties and truncation (top-k, top-p) are not applied.

    Args:
      logits: of the drafter.
      params: temperature and keys are used.
      positions: positions of the tokens in their sequences.
    """
    warm = params.temperature > 0

    def add_noise() -> Array:
        keys = draw_key(params.key, params.sample, positions, SAMPLE)
        ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
        heat = jnp.where(warm, params.temperature, 1.0).astype(logits.dtype)
        noise = sampling.gumbel(keys, ids, logits.dtype)
        return jnp.where(warm[:, None], logits / heat[:, None] + noise, logits)

    return lax.cond(jnp.any(warm), add_noise, lambda: logits)


def gumbel_top_k(
    probs: Float[Array, "rows vocab"],
    keys: UInt32[Array, "rows 2"],
    *,
    num: int = 1,
    replacement: bool = False,
) -> Int32[Array, "rows {num}"]:
    """Samples tokens by the Gumbel-top-k trick, without logarithms.

    The tokens with the largest ratios of probability to exponential noise are, in this
    order, a sample without replacement.

    Args:
      probs: probabilities of each row.
      keys: random key of each row.
      num: tokens to sample, in [1, vocab], static.
      replacement: as in `draw_drafts`.

    Returns:
      The tokens; -1 where no further token has a probability above 0.

    Raises:
      ValueError: `num` is out of range.

    Source: Kool et al. 2019, arXiv:1903.06059, section 2 (Gumbel-top-k).
    """
    vocab = probs.shape[1]
    _check_num(num, vocab)

    def race(rank: int) -> Array:
        def score(probs: Array, ids: Array) -> Array:
            noise = sampling.exponential(keys, ids + rank * vocab, probs.dtype)
            return probs / noise

        top, token = sampling.argmax(probs, score)
        return jnp.where(top > 0, token, arrays.NONE)

    if num == 1 or replacement:
        return jnp.stack([race(rank) for rank in range(num)], axis=1)
    ids = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    scores = probs / sampling.exponential(keys, ids, probs.dtype)
    values, tokens = sampling.candidates(scores, num)
    return jnp.where(values > 0, tokens, arrays.NONE)


def _check_num(num: int, vocab: int) -> None:
    validation.integer("num", num, low=1, below=vocab + 1, hint=f"in [1, {vocab}]")
