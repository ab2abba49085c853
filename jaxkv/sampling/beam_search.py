"""Beam search as a permutation: each step returns a parent and a token for every beam.

Only table rows move: `page_sharing.reorder` lets each slot continue its parent's pages,
and tokens and back-pointers stay where they were written. Functions take one group, the
beams of one request; map over groups with `vmap`. Parameters of a request, its width
included, are data. Scores and stopping rules are those of Hugging Face's beam search.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays, validation
from jaxkv.sampling import sampler

NO_BEAM = -1
"""Entry of an unrolled history without a token."""

ESTIMATE, WHEN_FULL, AT_LENGTH = range(3)
"""When a group with `width` answers stops. ESTIMATE (`early_stopping=False` in
transformers): when its best beam, ended now, would not beat the worst answer. FULL
(True): at once. NEVER ("never"): when no continuation can beat the worst answer."""


class BeamParams(NamedTuple):
    """Parameters of one request's beam search."""

    width: Int32[Array, ""]
    """Number of beams and of answers, in [1, max_beams]."""
    length_penalty: Float[Array, ""]
    """Exponent of the score: log-probability / length ** length_penalty, so values
    above 0 favour long answers. `limit ** length_penalty` must be a positive finite
    float32."""
    early_stopping: Int32[Array, ""]
    """ESTIMATE, FULL or NEVER."""
    stop_tokens: Int32[Array, " stops"]
    """Tokens that finish an answer, as its last token; padded with -1."""
    limit: Int32[Array, ""]
    """Length in tokens at which every answer is finished, at least 1."""


class FinishedBeams(NamedTuple):
    """Answers, best first; `score` is -inf and `length` 0 for missing ones.

    An answer's last token is stored only here: no beam continues after it.
    """

    score: Float[Array, " beams"]
    """`total` / `length` ** length_penalty."""
    total: Float[Array, " beams"]
    """Log-probability of the answer."""
    length: Int32[Array, " beams"]
    """Number of tokens, including the last one."""
    beam: Int32[Array, " beams"]
    """Beam that held the answer before its last token."""
    token: Int32[Array, " beams"]
    """Last token."""


class Beams(NamedTuple):
    """The search of one group."""

    score: Float[Array, " beams"]
    """Log-probability of each running beam, best first; -inf if it does not run."""
    length: Int32[Array, ""]
    """Number of tokens that each running beam has chosen."""
    finished: FinishedBeams
    """The best `width` answers so far."""
    done: Bool[Array, ""]
    """True if the search has ended; `finished` is then the result."""


def make_beams(max_beams: int) -> Beams:
    """Makes the search of a prompt whose K and V have just been computed.

    All beams hold the same prompt, so only the first one has a finite score.
    `max_beams` is static.

    Raises:
      ValueError: `max_beams` is below 1.
    """
    max_beams = validation.integer("max_beams", max_beams, low=1)

    # A new buffer for each field: no buffer can be donated twice.
    def never() -> Array:
        return jnp.full(max_beams, -jnp.inf, jnp.float32)

    def zeros() -> Array:
        return jnp.zeros(max_beams, jnp.int32)

    return Beams(
        score=never().at[0].set(0.0),
        length=jnp.zeros((), jnp.int32),
        finished=FinishedBeams(never(), never(), zeros(), zeros(), zeros()),
        done=jnp.zeros((), bool),
    )


@validation.checks_numbers(max_stops=0)
def choices(
    logits: Float[Array, "rows vocab"], *, max_beams: int, max_stops: int
) -> tuple[Int32[Array, "rows choices"], Float[Array, "rows choices"]]:
    """Returns the tokens of each row that a step could use: max_beams + max_stops.

    At most `max_beams` tokens continue a beam or finish an answer, and at most
    `max_stops` better tokens are skipped; both are static. Rows may belong to any
    groups.

    Returns:
      Token ids, best first, and their log-probabilities, as `sampler.top_logprobs`.
    """
    num = min(max_beams + max_stops, logits.shape[1])
    return sampler.top_logprobs(logits, num)


def advance_beams(
    group: Beams,
    params: BeamParams,
    tokens: Int32[Array, "beams choices"],
    logprobs: Float[Array, "beams choices"],
    active: Bool[Array, ""],
) -> tuple[Beams, Int32[Array, " beams"], Int32[Array, " beams"]]:
    """Chooses the next token of every beam, and the beam that it continues.

    The candidates are all pairs of beam and token. Of the best `width` candidates,
    those that stop become answers, of which the best `width` are kept; the best `width`
    candidates that do not stop continue. At the limit all candidates stop. Equal
    candidates rank by beam, then as in `choices`; an earlier answer ranks before an
    equal new one.

    Args:
      group: the search.
      params: parameters of its request.
      tokens: tokens of each beam from `choices`.
      logprobs: their log-probabilities. NaN counts as -inf, which is never chosen; rows
        of beams that do not run are ignored.
      active: True if the tokens are new. If False, or if the search is done, the group
        is unchanged.

    Returns:
      The search; and for each beam its parent and its token, to be written to the
      history at the place of the previous `group.length`. A beam that does not continue
      is its own parent, with token 0.

    Source: Wolf et al. 2020, arXiv:1910.03771, `GenerationMixin._beam_search`.
    """
    max_beams, num_choices = tokens.shape
    beam = jnp.arange(max_beams, dtype=jnp.int32)
    wanted = beam < params.width
    length = group.length + 1
    token = tokens.reshape(-1)
    total = group.score[:, None] + logprobs.astype(group.score.dtype)
    total = jnp.where(total > -jnp.inf, total, -jnp.inf).reshape(-1)
    stops = jnp.any(token[:, None] == params.stop_tokens[None, :], axis=1)
    stops |= length >= params.limit

    best, place = _best(total, wanted)
    ended = jnp.where(stops[place], best, -jnp.inf)
    finished = FinishedBeams(
        score=_penalised(ended, length, params),
        total=ended,
        length=jnp.full(max_beams, length, jnp.int32),
        beam=place // num_choices,
        token=token[place],
    )
    finished = _merge(group.finished, finished, wanted)
    score, place = _best(jnp.where(stops, -jnp.inf, total), wanted)
    done = _is_done(score[0], length, finished, params)

    score = jnp.where(done, -jnp.inf, score)
    after = Beams(score=score, length=length, finished=finished, done=done)
    active = active & ~group.done
    runs = active & (score > -jnp.inf)
    return (
        jax.tree.map(lambda new, old: jnp.where(active, new, old), after, group),
        jnp.where(runs, place // num_choices, beam),
        jnp.where(runs, token[place], 0),
    )


def follow_parents(
    parents: Int32[Array, "beams places"],
    beam: Int32[Array, " ends"],
    length: Int32[Array, " ends"],
) -> Int32[Array, "ends places"]:
    """Follows back-pointers from the ends of several sequences to their beginnings.

    Args:
      parents: the beam that each beam continued when it took the token of a place.
      beam: the beam that holds the last place of each sequence.
      length: number of places of each sequence, in [0, places].

    Returns:
      The beam that held each place of each sequence, an index into arrays of the form
      of `parents`; `NO_BEAM` beyond the sequence.
    """

    def back(beam: Array, column: tuple[Array, Array]) -> tuple[Array, Array]:
        place, parent = column
        holds = place < length
        return jnp.where(holds, parent[beam], beam), jnp.where(holds, beam, NO_BEAM)

    place = jnp.arange(parents.shape[1], dtype=jnp.int32)
    return lax.scan(back, beam, (place, parents.T), reverse=True)[1].T


def finalize(
    group: Beams,
    tokens: Int32[Array, "beams places"],
    parents: Int32[Array, "beams places"],
    start: Int32[Array, ""],
) -> Int32[Array, "beams places"]:
    """Returns the tokens of the finished answers, best first; see `group.finished`.

    Args:
      group: the search, done or not.
      tokens: the token that each beam took at each place.
      parents: the beam that it continued, see `follow_parents`.
      start: place of the first chosen token. Earlier places, such as the prompt, are
        read by their parents: zeros mean from beam 0.

    Returns:
      The tokens of each answer, padded with -1; -1 for missing answers.
    """
    answer = group.finished
    exists = answer.length > 0
    last = jnp.where(exists, start + answer.length - 1, 0)
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    rows = follow_parents(parents, answer.beam, last)
    written = arrays.take(tokens, (rows, jnp.broadcast_to(place, rows.shape)), fill=-1)
    ending = exists[:, None] & (place == last[:, None])
    return jnp.where(ending, answer.token[:, None], written)


def _best(total: Array, wanted: Array) -> tuple[Array, Array]:
    """Returns the best candidates, -inf where not wanted, and their places."""
    value, place = lax.top_k(total, wanted.size)
    return jnp.where(wanted, value, -jnp.inf), place


def _penalised(total: Array, length: Array, params: BeamParams) -> Array:
    score = total / length.astype(total.dtype) ** params.length_penalty
    return jnp.where(total > -jnp.inf, score, -jnp.inf)


def _merge(old: FinishedBeams, new: FinishedBeams, wanted: Array) -> FinishedBeams:
    """Returns the best of both; empty answers if there are fewer than wanted."""
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts), old, new)
    score, place = _best(both.score, wanted)
    exists = score > -jnp.inf
    blank = make_beams(wanted.size).finished
    return jax.tree.map(lambda x, none: jnp.where(exists, x[place], none), both, blank)


def _is_done(
    best: Array, length: Array, finished: FinishedBeams, params: BeamParams
) -> Array:
    """Returns True if no beam runs, or if no later answer would be among the best."""
    worst = finished.score[params.width - 1]
    # The log-probability only falls, but a positive penalty divides by more with each
    # token: the bound is the score of a beam that reaches the limit without further
    # loss.
    rises = (params.early_stopping == AT_LENGTH) & (params.length_penalty > 0)
    reach = jnp.where(rises, params.limit, length)
    hopeless = _penalised(best, reach, params) <= worst
    full = worst > -jnp.inf
    stop = full & ((params.early_stopping == WHEN_FULL) | hopeless)
    return stop | (best == -jnp.inf)
