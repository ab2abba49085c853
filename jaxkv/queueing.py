"""Requests in and results out: submit, cancel and drain, all pure.

They run between calls of `run_steps`, never inside a step, so what they cost grows with
the number of sequences known, not with the number of steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import paging, sampling, states, tables
from jaxkv.states import NOBODY, EngineState


class Requests(NamedTuple):
    """Requests on their way in, one sequence each."""

    tokens: Int32[Array, "requests max_length"]
    """The prompts, padded with anything."""
    prompt_length: Int32[Array, " requests"]
    """Tokens of each prompt, in [1, max_length); 0 marks an unused row."""
    limit: Int32[Array, " requests"]
    """Tokens at which the sequence ends, in (prompt_length, max_length]."""
    request_id: Int32[Array, " requests"]
    """The caller's names."""
    stop_tokens: Int32[Array, "requests max_stop_tokens"]
    """Tokens that end the sequence; -1 where unused."""
    params: sampling.Params
    """How tokens are drawn."""
    scored: Bool[Array, " requests"]
    """Whether log-probabilities are kept."""
    prompt_scored: Bool[Array, " requests"]
    """Whether those of the prompt are kept, too."""
    arrival: Int32[Array, "requests 2"]
    """Seconds and microseconds at which the request may be admitted."""


def submit(
    state: EngineState, requests: Requests, *, config: states.EngineConfig
) -> tuple[EngineState, Bool[Array, " requests"]]:
    """Puts requests at the end of the queue, in the order given.

    Args:
      state: the engine.
      requests: in order of arrival.
      config: the engine's bounds, static.

    Returns:
      The new state, and which requests were taken. Refused are unused rows, prompts
      without tokens or without room for an answer, sequences whose worst case exceeds
      the pool, prompts to be scored where no logit rows are spare, and everything that
      finds queue or sequences full. Those behind a request that found no room are
      refused with it, so that nobody is overtaken.
    """
    s, queue = state.sequences, state.queue
    num = s.status.shape[0]
    places = requests.limit - 1  # the last token drawn is never fed
    fits = (requests.prompt_length >= 1) & (requests.limit > requests.prompt_length)
    fits &= requests.limit <= config.max_length
    pages = tables.pages_for(places, page_size=config.page_size)
    fits &= pages <= config.num_pages
    fits &= ~requests.prompt_scored | (config.num_logit_rows > config.max_slots)
    rank = jnp.cumsum(fits, dtype=jnp.int32) - 1
    empty = s.status == states.EMPTY
    # Counted with the running ones, because any of those may come back to the queue.
    active = (s.status == states.WAITING) | (s.status == states.RUNNING)
    room = jnp.minimum(
        queue.sequence.shape[0] - jnp.sum(active, dtype=jnp.int32),
        jnp.sum(empty, dtype=jnp.int32),
    )
    taken = fits & (rank < room)
    # The k-th request taken gets the k-th empty row: equal ranks meet in one scatter.
    empty_rank = jnp.where(empty, jnp.cumsum(empty, dtype=jnp.int32) - 1, num)
    order = jnp.full((num,), NOBODY, jnp.int32)
    order = paging.put(order, empty_rank, jnp.arange(num, dtype=jnp.int32), "set")
    row = jnp.where(taken, paging.take(order, rank, fill=NOBODY), NOBODY)

    def put(old: Array, new: Array) -> Array:
        return paging.put(old, row, new, "set")

    def clear(old: Array) -> Array:
        return put(old, jnp.zeros((), old.dtype))

    return state._replace(
        sequences=s._replace(
            tokens=put(s.tokens, requests.tokens),
            status=put(s.status, jnp.asarray(states.WAITING, jnp.int32)),
            reason=clear(s.reason),
            request_id=put(s.request_id, requests.request_id),
            prompt_length=put(s.prompt_length, requests.prompt_length),
            num_tokens=put(s.num_tokens, requests.prompt_length),
            limit=put(s.limit, requests.limit),
            stop_tokens=put(s.stop_tokens, requests.stop_tokens),
            params=jax.tree.map(put, s.params, requests.params),
            scored=put(s.scored, requests.scored),
            prompt_scored=put(s.prompt_scored, requests.prompt_scored),
            logprobs=clear(s.logprobs),
            top_ids=clear(s.top_ids),
            top_logprobs=clear(s.top_logprobs),
            arrival=put(s.arrival, requests.arrival),
            first_token=clear(s.first_token),
            finish=clear(s.finish),
            num_cached=clear(s.num_cached),
            num_recomputed=clear(s.num_recomputed),
        ),
        queue=states.Queue(
            sequence=paging.put(
                queue.sequence,
                jnp.where(taken, queue.length + rank, NOBODY),
                row,
                "set",
            ),
            length=queue.length + jnp.sum(taken, dtype=jnp.int32),
        ),
    ), taken


def cancel(state: EngineState, request_ids: Int32[Array, " n"]) -> EngineState:
    """Ends requests wherever they are; their pages are free at once.

    Args:
      state: the engine.
      request_ids: the callers' names; -1, and names of nobody, are ignored.

    Returns:
      The new state. The sequences are FINISHED with what they had.
    """
    s, slots, queue = state.sequences, state.slots, state.queue
    named = (s.request_id[:, None] == request_ids[None, :]) & (request_ids >= 0)[None]
    alive = (s.status == states.WAITING) | (s.status == states.RUNNING)
    ended = jnp.any(named, axis=1) & alive
    gone = paging.take(ended, slots.sequence, fill=False)
    pool, table = tables.drop(state.pool, state.table, gone)
    stays = (queue.sequence >= 0) & ~paging.take(ended, queue.sequence, fill=False)
    return state._replace(
        pool=pool,
        table=table,
        sequences=s._replace(
            status=jnp.where(ended, states.FINISHED, s.status),
            reason=jnp.where(ended, states.CANCELLED, s.reason),
            finish=jnp.where(ended[:, None], state.clock[None, :], s.finish),
        ),
        slots=slots._replace(sequence=jnp.where(gone, NOBODY, slots.sequence)),
        queue=pack_queue(
            jnp.where(stays, queue.sequence, NOBODY), queue.sequence.shape[0]
        ),
    )


def pack_queue(sequence: Int32[Array, " n"], num_places: int) -> states.Queue:
    """Makes a queue of those named, order kept, from a list with gaps."""
    named = sequence >= 0
    place = jnp.where(named, jnp.cumsum(named, dtype=jnp.int32) - 1, NOBODY)
    packed = jnp.full((num_places,), NOBODY, jnp.int32)
    return states.Queue(
        sequence=paging.put(packed, place, sequence, "set"),
        length=jnp.sum(named, dtype=jnp.int32),
    )


def drain(state: EngineState) -> tuple[EngineState, states.Sequences]:
    """Hands out the finished sequences and makes room for new ones.

    Args:
      state: the engine.

    Returns:
      The new state, and all sequences as they were: those with status FINISHED are
      final, and gone from the new state.
    """
    s = state.sequences
    status = jnp.where(s.status == states.FINISHED, states.EMPTY, s.status)
    return state._replace(sequences=s._replace(status=status)), s
