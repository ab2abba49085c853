"""Beam search as a permutation: each step names a parent and a token for every beam.

Nothing is moved but table rows: `page_sharing.reorder` lets each slot continue its
parent's pages, and the history of tokens stays where it was written, back-pointers
beside it. Functions take one group, the beams of one request; map over groups with
`vmap`. What a request chooses, its width included, is data. Scores and stopping rules
are those of Hugging Face's beam search.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays, validation
from jaxkv.sampling import sampler

NO_BEAM = -1
"""Stands in an unrolled history where no beam holds a token."""

ESTIMATE, FULL, NEVER = range(3)
"""When a group that has `width` answers stops. ESTIMATE (in transformers: False): once
its best beam would not beat the worst answer if it ended as it is. FULL (True): at
once. NEVER ("never"): once no continuation at all can beat the worst answer."""


class Params(NamedTuple):
    """What one request asks of its search."""

    width: Int32[Array, ""]
    """Beams, and answers wanted, in [1, max_beams]."""
    length_penalty: Float[Array, ""]
    """An answer scores its log-probability / (its tokens ** this): above 0 favours long
    answers. `limit ** length_penalty` must be a positive finite float32."""
    early_stopping: Int32[Array, ""]
    """ESTIMATE, FULL or NEVER."""
    stop_tokens: Int32[Array, " stops"]
    """Tokens that finish an answer, as its last; -1 where unused."""
    limit: Int32[Array, ""]
    """Tokens at which every answer is finished, at least 1."""


class FinishedBeams(NamedTuple):
    """Answers, best first; `score` is -inf and `length` 0 where there is none.

    An answer's last token stands only here: no beam runs on with it.
    """

    score: Float[Array, " beams"]
    """`total` / `length` ** length_penalty."""
    total: Float[Array, " beams"]
    """Log-probability of the answer."""
    length: Int32[Array, " beams"]
    """Tokens, the last one included."""
    beam: Int32[Array, " beams"]
    """Which beam held the answer before its last token."""
    token: Int32[Array, " beams"]
    """The last token."""


class Beams(NamedTuple):
    """The search of one group."""

    score: Float[Array, " beams"]
    """Log-probability of each running beam, best first; -inf where none runs."""
    length: Int32[Array, ""]
    """Tokens that each running beam has chosen."""
    finished: FinishedBeams
    """The best `width` answers so far."""
    done: Bool[Array, ""]
    """Whether the search has ended; `finished` is then the answer."""


def make_beams(max_beams: int) -> Beams:
    """Makes the search of a prompt that has just been read.

    All beams hold the same prompt, so only the first one counts. `max_beams` is static.

    Raises:
      ValueError: `max_beams` is below 1.
    """
    max_beams = validation.integer("max_beams", max_beams, low=1)

    # A fresh buffer each: no buffer can be donated twice.
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


def choices(
    logits: Float[Array, "rows vocab"], *, max_beams: int, max_stops: int
) -> tuple[Int32[Array, "rows choices"], Float[Array, "rows choices"]]:
    """Finds all tokens of each row that a step could take: max_beams + max_stops.

    No more than `max_beams` tokens continue a beam or finish an answer, and no more
    than `max_stops` of the tokens before them are passed over; both are static. Rows
    may be of any groups.

    Returns:
      Token ids, best first, and their log-probabilities, as `sampler.top_logprobs`.
    """
    num = min(max_beams + max_stops, logits.shape[1])
    return sampler.top_logprobs(logits, num)


def step(
    group: Beams,
    params: Params,
    tokens: Int32[Array, "beams choices"],
    logprobs: Float[Array, "beams choices"],
    active: Bool[Array, ""],
) -> tuple[Beams, Int32[Array, " beams"], Int32[Array, " beams"]]:
    """Chooses the next token of every beam, and the beam that it continues.

    Every beam with every token is a candidate. Of the best `width`, those that stop
    become answers, of which the best `width` are kept; the best `width` of those that
    do not stop run on. At the limit all stop. Equals rank by beam, then as in
    `choices`; an answer found earlier goes before an equal one.

    Args:
      group: the search.
      params: what its request asks.
      tokens: what `choices` found for each beam.
      logprobs: their log-probabilities. NaN counts as -inf, which is never taken; rows
        of beams that do not run do not matter.
      active: whether these are new. If not, or if it is done, the group is left alone.

    Returns:
      The search; and for each beam its parent and its token, to be written to the
      history, at the place that `group.length` gave before. A beam that does not run
      on, or was left alone, is its own parent, with token 0.

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


def unroll(
    parents: Int32[Array, "beams places"],
    beam: Int32[Array, " ends"],
    length: Int32[Array, " ends"],
) -> Int32[Array, "ends places"]:
    """Follows back-pointers from the ends of several sequences to their beginnings.

    Args:
      parents: the beam that each beam continued when it took the token of a place.
      beam: which beam holds the last place of each sequence.
      length: places of each sequence, in [0, places].

    Returns:
      The beam that held each place of each sequence, by which to read whatever was
      written beside `parents`; `NO_BEAM` beyond the sequence.
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
    """Writes out the finished answers, best first; scores stand in `group.finished`.

    Args:
      group: the search, done or not.
      tokens: the token that each beam took at each place.
      parents: the beam that it continued, see `unroll`.
      start: place of the first token chosen. What stands before, such as the prompt, is
        read as its parents say: zeros mean from beam 0.

    Returns:
      The tokens of each answer, -1 beyond its end and where there is no answer.
    """
    answer = group.finished
    exists = answer.length > 0
    last = jnp.where(exists, start + answer.length - 1, 0)
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    rows = unroll(parents, answer.beam, last)
    written = arrays.take(tokens, (rows, jnp.broadcast_to(place, rows.shape)), fill=-1)
    ending = exists[:, None] & (place == last[:, None])
    return jnp.where(ending, answer.token[:, None], written)


def _best(total: Array, wanted: Array) -> tuple[Array, Array]:
    """The best candidates, -inf where not wanted, and their places."""
    value, place = lax.top_k(total, wanted.size)
    return jnp.where(wanted, value, -jnp.inf), place


def _penalised(total: Array, length: Array, params: Params) -> Array:
    score = total / length.astype(total.dtype) ** params.length_penalty
    return jnp.where(total > -jnp.inf, score, -jnp.inf)


def _merge(old: FinishedBeams, new: FinishedBeams, wanted: Array) -> FinishedBeams:
    """The best of both; blank where there are fewer than wanted."""
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts), old, new)
    score, place = _best(both.score, wanted)
    exists = score > -jnp.inf
    blank = make_beams(wanted.size).finished
    return jax.tree.map(lambda x, none: jnp.where(exists, x[place], none), both, blank)


def _is_done(
    best: Array, length: Array, finished: FinishedBeams, params: Params
) -> Array:
    """Whether nothing runs, or an answer to come would not be among the best."""
    worst = finished.score[params.width - 1]
    # Log-probability is only lost, but a penalty above 0 forgives more with each token:
    # the bound is then the score of a beam that reaches the limit without losing any.
    rises = (params.early_stopping == NEVER) & (params.length_penalty > 0)
    reach = jnp.where(rises, params.limit, length)
    hopeless = _penalised(best, reach, params) <= worst
    full = worst > -jnp.inf
    stop = full & ((params.early_stopping == FULL) | hopeless)
    return stop | (best == -jnp.inf)
