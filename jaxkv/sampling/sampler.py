"""Sampling from logits: penalties, cut-offs, Gumbel-max draws, log-probabilities.

Parameters of requests are arrays, so one program serves any mix of requests. The result
of a row depends on that row only: its noise is a function of (request or seed, sample,
position, purpose, token id); the row decides which of two exact algorithms finds its
cut-offs; and sums over the vocabulary are sums of integers, which are equal in any
order of summation. The vocabulary is never sorted, and work that no row needs is
skipped.

The order is penalties, temperature, top-k, top-p among the tokens of top-k, min-p, as
in Hugging Face's warpers. Tokens rank by logit, equal ones by lower id: top-k keeps
exactly k tokens, and top-p keeps the shortest prefix of ranks whose probability reaches
p.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays, validation
from jaxkv.sampling import fixed_point, random_keys, top_k, truncation
from jaxkv.sampling.params import Params

MAX_CANDIDATES = 64
"""Default number of top tokens among which cut-offs are searched first."""


class Draw(NamedTuple):
    """The tokens drawn for the rows."""

    token: Int32[Array, " rows"]
    """The token; 0 if the row is invalid."""
    logprob: Float[Array, " rows"]
    """Log-probability of the token under the raw logits; 0 if not requested."""
    invalid: Bool[Array, " rows"]
    """True for rows without a valid draw: a NaN among the logits, only -inf, or a NaN
    or infinity among the model's own logits."""


def penalise(
    logits: Float[Array, "rows vocab"],
    tokens: Int32[Array, "rows max_length"],
    prompt_length: Int32[Array, " rows"],
    num_tokens: Int32[Array, " rows"],
    params: Params,
) -> Float[Array, "rows vocab"]:
    """Applies repetition, frequency and presence penalties, in this order.

    The repetition penalty counts prompt and answer, the frequency and presence
    penalties count the answer only. A row without penalties is unchanged bit for bit,
    and a batch of such rows skips the work.

    Args:
      logits: next-token logits.
      tokens: prompt and answer so far.
      prompt_length: length of the prompt.
      num_tokens: length of prompt and answer; later entries are ignored, as are ids
        outside [0, vocab).
      params: `repetition`, `frequency` and `presence` are read.

    Returns:
      The penalised logits.

    Source: Keskar et al. 2019, arXiv:1909.05858, section 4.1 (repetition, with the sign
    rule of Hugging Face and vLLM); the OpenAI API (frequency, presence).
    """
    logits = top_k.wide(logits)
    rows, vocab = logits.shape

    def apply() -> Array:
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        answer = (place >= prompt_length[:, None]).astype(jnp.int32)
        counts = jnp.zeros((rows, 2, vocab), jnp.int32)
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        token = jnp.where(place < num_tokens[:, None], tokens, vocab)
        counts = counts.at[row, answer, token].add(
            1, mode="drop", wrap_negative_indices=False
        )
        uses = counts[:, 1].astype(logits.dtype)
        repetition, presence, frequency = (
            penalty.astype(logits.dtype)[:, None]
            for penalty in (params.repetition, params.presence, params.frequency)
        )
        divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
        result = jnp.where(jnp.any(counts > 0, axis=1), divided, logits)
        return result - frequency * uses - presence * (uses > 0).astype(logits.dtype)

    with jax.named_scope("penalties"):
        return lax.cond(jnp.any(_is_penalised(params)), apply, lambda: logits)


def _is_penalised(params: Params) -> Bool[Array, " rows"]:
    return (params.repetition != 1) | (params.presence != 0) | (params.frequency != 0)


def is_plain(
    params: Params, keep_logprobs: Bool[Array, " rows"]
) -> Bool[Array, " rows"]:
    """Returns True for rows for which `greedy` equals `penalise` and `sample`."""
    return ~(keep_logprobs | _is_penalised(params) | (params.temperature > 0))


def greedy(
    logits: Float[Array, "rows vocab"], *, raw: Float[Array, "rows vocab"]
) -> Draw:
    """Draws the most likely token, as `sample` does for rows that are plain."""
    _, token, invalid = top_k.argmax_checked(top_k.wide(logits), raw)
    logprob = jnp.zeros(token.shape, top_k.wide(raw[:, 0]).dtype)
    return Draw(jnp.where(invalid, 0, token), logprob, invalid)


@validation.checks_numbers()
def keep_mask(
    logits: Float[Array, "rows vocab"],
    params: Params,
    *,
    max_candidates: int = MAX_CANDIDATES,
) -> Bool[Array, "rows vocab"]:
    """Marks the tokens that a draw may return: top-k, top-p and min-p.

    Args:
      logits: next-token logits after penalties.
      params: `temperature`, `top_k`, `top_p` and `min_p` are read.
      max_candidates: number of top tokens among which cut-offs are searched first, at
        least 1, static. It affects the cost of a row, never the result.

    Returns:
      The mask. A greedy row keeps one token, a row with a NaN none; a token at -inf is
      never kept.

    Raises:
      ValueError: `max_candidates` is below 1.
    """
    logits = top_k.wide(logits)
    vocab = logits.shape[1]
    top, greedy = top_k.argmax(logits)
    invalid = top_k.is_invalid(logits, top)
    wanted = truncation.is_cut(params, vocab) & (params.temperature > 0) & ~invalid

    def search() -> truncation.Cut:
        values, ids = top_k.candidates(logits, max_candidates)
        num_candidates, settled = truncation.cut_from_candidates(
            logits, top, values, params, wanted
        )
        last = jnp.minimum(num_candidates, values.shape[1])[:, None] - 1
        cut = truncation.Cut(
            jnp.take_along_axis(values, last, axis=1)[:, 0],
            jnp.take_along_axis(ids, last, axis=1)[:, 0],
        )
        return truncation.find_exact_cuts(logits, top, params, wanted & ~settled, cut)

    everything = truncation.keep_everything(logits)
    cut = lax.cond(jnp.any(wanted), search, lambda: everything)
    cut = jax.tree.map(lambda a, b: jnp.where(wanted, a, b), cut, everything)
    ids = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    mask = top_k.is_up_to(logits, ids, cut) & truncation.above_min_p(
        truncation.scale_logits(logits, top, params), params
    )
    mask = jnp.where((params.temperature > 0)[:, None], mask, ids == greedy[:, None])
    return mask & (logits > -jnp.inf) & ~invalid[:, None]


@validation.checks_numbers()
def probabilities(
    logits: Float[Array, "rows vocab"],
    params: Params,
    *,
    max_candidates: int = MAX_CANDIDATES,
) -> Float[Array, "rows vocab"]:
    """Returns the probabilities with which `sample` draws each token.

    Arguments as in `keep_mask`. A batch of greedy rows skips cut-offs and exponentials.

    Returns:
      Probabilities, at least float32, exactly 0 for tokens that are not kept; a greedy
      row has a single 1. A row with a NaN, or with -inf only, has zeros only.

    Raises:
      ValueError: `max_candidates` is below 1.
    """
    logits = top_k.wide(logits)
    top, greedy, invalid = top_k.argmax_checked(logits)

    def one_hot() -> Array:
        ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
        is_top = (ids == greedy[:, None]) & ~invalid[:, None]
        return is_top.astype(logits.dtype)

    def softmax() -> Array:
        mask = keep_mask(logits, params, max_candidates=max_candidates)
        weights = jnp.exp(truncation.scale_logits(logits, top, params))
        return fixed_point.normalise(jnp.where(mask, weights, 0))

    with jax.named_scope("law"):
        return lax.cond(jnp.any(params.temperature > 0), softmax, one_hot)


@validation.checks_numbers()
def sample(
    logits: Float[Array, "rows vocab"],
    params: Params,
    positions: Int32[Array, " rows"],
    *,
    raw: Float[Array, "rows vocab"] | None = None,
    keep_logprobs: Bool[Array, " rows"] | None = None,
    max_candidates: int = MAX_CANDIDATES,
) -> Draw:
    """Draws one token for each row, by Gumbel-max over the tokens that are kept.

    Rows at temperature 0 take the largest logit, the lowest id among equals. A batch of
    such rows skips noise and cut-offs: it searches for the largest logit and for NaN.
    Give unused rows temperature 0 and `keep_logprobs` False, which costs no more.

    Args:
      logits: next-token logits after penalties and other changes.
      params: all fields but the penalties are read.
      positions: positions of the drawn tokens in their sequences.
      raw: the model's own logits, before penalties, temperature and cut-offs, from
        which log-probabilities are computed; an infinity or NaN among them, a failure
        of the model, makes the row invalid. None means `logits`, which may contain
        -inf.
      keep_logprobs: True for rows that need a log-probability; None means all.
      max_candidates: as in `keep_mask`.

    Returns:
      Tokens, log-probabilities, and a mask of invalid rows.

    Source: Maddison et al. 2014, arXiv:1411.0030 (Gumbel-max); Fan et al. 2018,
    arXiv:1805.04833 (top-k); Holtzman et al. 2020, arXiv:1904.09751 (top-p); Nguyen et
    al. 2025, arXiv:2407.01082 (min-p).
    """
    checked_logits = raw
    raw = logits if raw is None else raw
    logits = top_k.wide(logits)
    top, greedy, invalid = top_k.argmax_checked(logits, checked_logits)
    warm = params.temperature > 0
    draws = warm & ~invalid

    has_logprob = jnp.zeros_like(warm) if keep_logprobs is None else keep_logprobs
    # Depends on the requests, not on their logits, so one launch computes all three
    # flags.
    cut = warm & truncation.is_cut(params, logits.shape[1])
    any_warm, any_cut, any_scored = arrays.any_of(warm, cut, has_logprob)

    def draw() -> Array:
        keys = random_keys.draw_key(
            params.key, params.sample, positions, random_keys.SAMPLE
        )
        shortened = draws & cut

        def settle() -> tuple[Array, Array]:
            """Draws from the best tokens, for rows whose cut-offs these determine."""
            values, ids = top_k.candidates(logits, max_candidates)
            num_allowed, settled = truncation.cut_from_candidates(
                logits, top, values, params, shortened
            )
            scores = _score(top, params, keys)(values, ids)
            place = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :]
            scores = jnp.where(place < num_allowed[:, None], scores, -jnp.inf)
            best = scores == jnp.max(scores, axis=1, keepdims=True)
            return top_k.lowest_id(best, ids), shortened & settled

        with jax.named_scope("cut"):
            undrawn = greedy, jnp.zeros_like(cut)
            token, settled = lax.cond(any_cut, settle, lambda: undrawn)
        is_unsettled = draws & ~settled

        def search() -> Array:
            """Draws from all tokens, after the exact search of cut-offs."""
            last = None
            # If all tokens are candidates, these determine every cut-off.
            if logits.shape[1] > max_candidates:
                every = truncation.keep_everything(logits)
                wanted = is_unsettled & shortened
                last = truncation.find_exact_cuts(logits, top, params, wanted, every)
            token_ids = top_k.argmax(logits, _score(top, params, keys, last))[1]
            return jnp.where(is_unsettled, token_ids, token)

        with jax.named_scope("rest"):
            token = lax.cond(jnp.any(is_unsettled), search, lambda: token)
        return jnp.where(invalid, 0, jnp.where(draws, token, greedy))

    with jax.named_scope("sampled"):
        token = lax.cond(any_warm, draw, lambda: jnp.where(invalid, 0, greedy))
    if keep_logprobs is None:
        return Draw(token, token_logprobs(raw, token), invalid)
    zeros = jnp.zeros_like(top, top_k.wide(raw[:, 0]).dtype)
    with jax.named_scope("scored"):
        logprob = lax.cond(
            any_scored,
            lambda: jnp.where(keep_logprobs, token_logprobs(raw, token), 0),
            lambda: zeros,
        )
    return Draw(token, logprob, invalid)


def _score(
    top: Array, params: Params, keys: Array, cut: truncation.Cut | None = None
) -> top_k.Score:
    """Returns a function of perturbed log-probabilities, -inf for tokens not kept."""

    def score(logits: Array, ids: Array) -> Array:
        scaled = truncation.scale_logits(logits, top, params)
        mask = truncation.above_min_p(scaled, params)
        if cut is not None:
            mask &= top_k.is_up_to(logits, ids, cut)
        noise = random_keys.gumbel(keys, ids, logits.dtype)
        return jnp.where(mask, scaled + noise, -jnp.inf)

    return score


def token_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int32[Array, " rows"]
) -> Float[Array, " rows"]:
    """Returns log-probabilities of given tokens, in [0, vocab).

    The derivative is that of `jax.nn.log_softmax`.

    Returns:
      Natural logarithms, NaN for rows with a NaN or with -inf only.
    """
    logits = top_k.wide(logits)
    values = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    return _logprobs(logits, values)[:, 0]


def draw_logprobs(
    logits: Float[Array, "rows vocab"],
    tokens: Int32[Array, " rows"],
    params: Params,
) -> Float[Array, " rows"]:
    """Returns the log-probabilities with which `sample` draws given tokens.

    The derivative is that of the temperature's softmax over the tokens that are kept;
    the cut-offs have none.

    Args:
      logits: next-token logits after penalties.
      tokens: the tokens, in [0, vocab).
      params: `temperature`, `top_k`, `top_p` and `min_p` are read.

    Returns:
      Natural logarithms, -inf for tokens that are not kept; a greedy row keeps one
      token. NaN for rows with a NaN or with -inf only.
    """
    logits = top_k.wide(logits)
    fixed = lax.stop_gradient(logits)
    # Not `scale_logits`, which has no derivative at the largest logit.
    warm = jnp.where(params.temperature > 0, params.temperature, 1.0)
    below = logits - jnp.max(fixed, axis=1, keepdims=True)
    scaled = below / warm.astype(logits.dtype)[:, None]
    return token_logprobs(jnp.where(keep_mask(fixed, params), scaled, -jnp.inf), tokens)


def top_logprobs(
    logits: Float[Array, "rows vocab"], max_logprobs: int
) -> tuple[Int32[Array, "rows {max_logprobs}"], Float[Array, "rows {max_logprobs}"]]:
    """Returns the most likely tokens of each row and their log-probabilities.

    The best token is first, among equals the lower id. `max_logprobs`, static, is in
    [1, vocab]. Values are as in `token_logprobs`.

    Raises:
      ValueError: `max_logprobs` is out of range.
    """
    vocab = logits.shape[1]
    hint = f"in [1, {vocab}]"
    validation.integer("max_logprobs", max_logprobs, low=1, below=vocab + 1, hint=hint)
    logits = top_k.wide(logits)
    values, ids = top_k.candidates(logits, max_logprobs)
    return ids, _logprobs(logits, values)


@jax.custom_jvp
def _logprobs(
    logits: Float[Array, "rows vocab"], values: Float[Array, "rows n"]
) -> Float[Array, "rows n"]:
    """Returns log-probabilities of tokens whose logits are `values`."""
    top = jnp.max(logits, axis=1)
    bits = fixed_point.digit_bits(logits.shape[1])

    def over(lse: Array) -> Array:
        # 0 also if both are +inf.
        return jnp.where(lse == top[:, None], 0, lse - top[:, None])

    first, *low_digits = fixed_point.sum_digits(
        fixed_point.to_digits(jnp.exp(over(logits)), bits), bits
    )
    # The sum excludes the largest weight, 1: log1p is exact if the remaining sum is
    # small.
    remainder = fixed_point.to_float(
        (first - (1 << bits), *low_digits), bits, logits.dtype
    )
    result = over(values) - jnp.log1p(remainder)[:, None]
    return jnp.where(top_k.is_invalid(logits, top)[:, None], jnp.nan, result)


@_logprobs.defjvp
def _logprob_tangents(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Differentiates as `log_softmax`; sums of integers have no derivative."""
    logits, values = primals
    logit_tangents, value_tangents = tangents
    probs = jax.nn.softmax(logits, axis=1)
    mean = jnp.sum(probs * logit_tangents, axis=1, keepdims=True)
    return _logprobs(logits, values), value_tangents - mean
