"""Tokens drawn from a law: drafts, and what follows where drafts were turned down."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from jaxkv import arrays
from jaxkv.sampling import Params, random_keys, sampler, top_k


def draw_drafts(
    logits: Float[Array, "rows vocab"],
    params: Params,
    positions: Int32[Array, " rows"],
    *,
    num: int = 1,
    replacement: bool = False,
) -> tuple[Int32[Array, "rows {num}"], Float[Array, "rows vocab"]]:
    """Draws drafts for each row, under the law that its request asks for.

    A batch of greedy rows skips the noise, and a greedy row is certain of one token.

    Args:
      logits: of the drafter, penalties and other changes already applied.
      params: everything but the penalties is read.
      positions: where the drafts will stand in their sequences.
      num: drafts that may follow each row, in [1, vocab], static.
      replacement: whether each is drawn as if alone, so that some may be equal, static;
        otherwise a token that is drawn is out of the law for those behind it.

    Returns:
      The drafts, in the order of their drawing, -1 where the law has no further token;
      and the law itself, for `Drafts.law`.

    Raises:
      ValueError: `num` is out of range.
    """
    _check_num(num, logits.shape[1])
    law = sampler.probabilities(logits, params)

    def noisy() -> Array:
        keys = random_keys.draw_key(
            params.key, params.sample, positions, random_keys.DRAFT
        )
        return gumbel_top_k(law, keys, num=num, replacement=replacement)

    def certain() -> Array:
        top, token = top_k.argmax(law)
        token = jnp.where(top > 0, token, arrays.NONE)[:, None]
        others = token if replacement else jnp.full_like(token, arrays.NONE)
        return jnp.concatenate([token] + [others] * (num - 1), axis=1)

    return lax.cond(jnp.any(params.temperature > 0), noisy, certain), law


def shared_noise_logits(
    logits: Float[Array, "rows vocab"],
    params: Params,
    positions: Int32[Array, " rows"],
) -> Float[Array, "rows vocab"]:
    """Logits by which tokens rank as likely to be drawn, for `SharedNoiseVerifier`.

    A greedy row's are as they are; to others the noise is added by which the target
    will draw at these positions. Penalties and cut-offs are left to the target.

    Args:
      logits: of the drafter.
      params: temperature and keys are read.
      positions: where the tokens will stand in their sequences.
    """
    warm = params.temperature > 0

    def noisy() -> Array:
        keys = random_keys.draw_key(
            params.key, params.sample, positions, random_keys.SAMPLE
        )
        ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
        heat = jnp.where(warm, params.temperature, 1.0).astype(logits.dtype)
        noise = random_keys.gumbel(keys, ids, logits.dtype)
        return jnp.where(warm[:, None], logits / heat[:, None] + noise, logits)

    return lax.cond(jnp.any(warm), noisy, lambda: logits)


def gumbel_top_k(
    law: Float[Array, "rows vocab"],
    keys: UInt32[Array, "rows 2"],
    *,
    num: int = 1,
    replacement: bool = False,
) -> Int32[Array, "rows {num}"]:
    """Draws from laws by a race, which is Gumbel-max without the logarithms.

    The tokens with the largest probability over exponential noise are, in this order,
    drawn without replacement.

    Args:
      law: probabilities of each row.
      keys: the key of each row's draw.
      num: tokens to draw, in [1, vocab], static.
      replacement: as in `draw_drafts`.

    Returns:
      The tokens; -1 where no other has a probability above 0.

    Raises:
      ValueError: `num` is out of range.

    Source: Kool et al. 2019, arXiv:1903.06059, section 2 (Gumbel-top-k).
    """
    vocab = law.shape[1]
    _check_num(num, vocab)

    def race(rank: int) -> Array:
        def score(law: Array, ids: Array) -> Array:
            return law / random_keys.exponential(keys, ids + rank * vocab, law.dtype)

        top, token = top_k.argmax(law, score)
        return jnp.where(top > 0, token, arrays.NONE)

    if num == 1 or replacement:
        return jnp.stack([race(rank) for rank in range(num)], axis=1)
    ids = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    scores = law / random_keys.exponential(keys, ids, law.dtype)
    values, tokens = top_k.candidates(scores, num)
    return jnp.where(values > 0, tokens, arrays.NONE)


def _check_num(num: int, vocab: int) -> None:
    if not 1 <= num <= vocab:
        raise ValueError(f"{num=} must be in [1, {vocab}]")
