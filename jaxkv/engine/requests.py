"""Requests in and results out: submit, cancel and drain, all pure.

They run between calls of `run_steps`, never inside a step, so what they cost grows with
the number of sequences known, not with the number of steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxkv.engine import groups, prefix_caching, swapping
from jaxkv.engine.state import (
    CANCELLED,
    EMPTY,
    FINISHED,
    NOBODY,
    RUNNING,
    WAITING,
    EngineConfig,
    EngineState,
    Queue,
    Search,
    Sequences,
)
from jaxkv.memory import Eviction, page_pool, page_table
from jaxkv.sampling import beam_search, sampler


class Requests(NamedTuple):
    """Requests on their way in, a row for each sequence.

    The sequences of one request stand side by side, with equal prompts; one whose
    `params.sample` is 0 begins a request.
    """

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
    params: sampler.Params
    """How tokens are drawn."""
    salt: UInt32[Array, " requests"]
    """Cached pages are shared only where salts are equal."""
    reuses: Bool[Array, " requests"]
    """Whether the prefix cache serves the sequence, and keeps its pages."""
    scored: Bool[Array, " requests"]
    """Whether log-probabilities are kept."""
    prompt_scored: Bool[Array, " requests"]
    """Whether those of the prompt are kept, too."""
    beam_width: Int32[Array, " requests"]
    """Beams of the request, as many as it has rows; 0 if it does not search."""
    length_penalty: Float[Array, " requests"]
    """As in `beams.Params`."""
    early_stopping: Int32[Array, " requests"]
    """As in `beams.Params`."""
    arrival: Int32[Array, "requests 2"]
    """Seconds and microseconds at which the request may be admitted."""


def submit(
    state: EngineState, requests: Requests, *, config: EngineConfig
) -> tuple[EngineState, Bool[Array, " requests"]]:
    """Puts requests at the end of the queue, in the order given.

    Args:
      state: the engine.
      requests: in order of arrival; NumPy's arrays will do, outside of `jit`, too.
      config: the engine's bounds, static.

    Returns:
      The new state, and which requests were taken. Refused are unused rows, prompts
      without tokens or without room for an answer, sequences whose worst case exceeds
      the pool, prompts to be scored where no logit rows are spare, and everything that
      finds queue or sequences full. Those behind a request that found no room are
      refused with it, so that nobody is overtaken.
    """
    state, requests = page_pool.on_device((state, requests))
    s, queue, r = state.sequences, state.queue, requests
    num, num_rows = s.status.shape[0], r.params.sample.shape[0]
    # What holds for a request holds for all of its rows, from the first one on.
    index = jnp.arange(num_rows, dtype=jnp.int32)
    first = lax.cummax(jnp.where(r.params.sample == 0, index, 0))
    size = jnp.zeros_like(index).at[first].add(1)[first]
    taken = _fits(requests, config) & (size <= config.max_slots)
    taken &= r.beam_width <= config.max_beams
    taken &= _worst_case(requests, first, config)[first] <= config.num_pages
    taken = jnp.ones_like(taken).at[first].min(taken)[first]
    begins = taken & (first == index)
    # Counted with the running ones, because any of those may come back to the queue.
    alive = (s.status == WAITING) | (s.status == RUNNING)
    begun = _any_in_group(s, alive) & (s.group == jnp.arange(num, dtype=jnp.int32))
    places = queue.sequence.shape[0] - jnp.sum(begun, dtype=jnp.int32)
    empty = s.status == EMPTY
    room = jnp.cumsum(begins, dtype=jnp.int32) <= places
    room &= jnp.cumsum(taken, dtype=jnp.int32) <= jnp.sum(empty, dtype=jnp.int32)
    room = jnp.ones_like(room).at[first].min(room | ~taken)[first]
    # Nobody is overtaken: those behind a request without room are refused, too.
    taken &= jnp.cumsum(~room, dtype=jnp.int32) == 0
    begins &= taken
    # The k-th sequence taken gets the k-th empty row: equal ranks meet in one scatter.
    rank = jnp.cumsum(taken, dtype=jnp.int32) - 1
    empty_rank = jnp.where(empty, jnp.cumsum(empty, dtype=jnp.int32) - 1, num)
    order = jnp.full((num,), NOBODY, jnp.int32)
    order = page_pool.put(order, empty_rank, jnp.arange(num, dtype=jnp.int32), "set")
    row = jnp.where(taken, page_pool.take(order, rank, fill=NOBODY), NOBODY)
    place = queue.length + jnp.cumsum(begins, dtype=jnp.int32) - 1

    def put(old: Array, new: Array) -> Array:
        return page_pool.put(old, row, new, "set")

    def clear(old: Array) -> Array:
        return put(old, jnp.zeros((), old.dtype))

    return state._replace(
        search=_begin_search(state, requests, row, config),
        sequences=s._replace(
            tokens=put(s.tokens, requests.tokens),
            status=put(s.status, jnp.asarray(WAITING, jnp.int32)),
            reason=clear(s.reason),
            request_id=put(s.request_id, requests.request_id),
            group=put(s.group, row[first]),
            prompt_length=put(s.prompt_length, requests.prompt_length),
            num_tokens=put(s.num_tokens, requests.prompt_length),
            num_common=put(s.num_common, requests.prompt_length),
            num_fed=clear(s.num_fed),
            limit=put(s.limit, requests.limit),
            stop_tokens=put(s.stop_tokens, requests.stop_tokens),
            params=jax.tree.map(put, s.params, requests.params),
            salt=put(s.salt, requests.salt),
            # Scores of a prompt come from reading all of it.
            reuses=put(s.reuses, requests.reuses & ~requests.prompt_scored),
            scored=put(s.scored, requests.scored),
            prompt_scored=put(s.prompt_scored, requests.prompt_scored),
            logprobs=clear(s.logprobs),
            top_ids=clear(s.top_ids),
            top_logprobs=clear(s.top_logprobs),
            score=clear(s.score),
            arrival=put(s.arrival, requests.arrival),
            first_token=clear(s.first_token),
            finish=clear(s.finish),
            num_cached=clear(s.num_cached),
            num_recomputed=clear(s.num_recomputed),
            num_preempted=clear(s.num_preempted),
            num_swapped=clear(s.num_swapped),
        ),
        queue=Queue(
            sequence=page_pool.put(
                queue.sequence,
                jnp.where(begins, place, NOBODY),
                row,
                "set",
            ),
            length=queue.length + jnp.sum(begins, dtype=jnp.int32),
        ),
    ), taken


def _begin_search(
    state: EngineState,
    requests: Requests,
    row: Int32[Array, " requests"],
    config: EngineConfig,
) -> Search | None:
    """Makes the searches of new requests; whoever does not search has width 0."""
    search, r = state.search, requests
    if search is None:
        return None

    def put(old: Array, new: Array) -> Array:
        return page_pool.put(old, row, new, "set")

    group = beam_search.make_beams(config.max_beams)
    return search._replace(
        width=put(search.width, r.beam_width),
        length_penalty=put(search.length_penalty, r.length_penalty),
        early_stopping=put(search.early_stopping, r.early_stopping),
        groups=jax.tree.map(
            lambda old, new: put(old, jnp.broadcast_to(new, (row.size, *new.shape))),
            *(search.groups, group),
        ),
        parents=put(search.parents, jnp.zeros((), jnp.int32)),
    )


def _fits(requests: Requests, config: EngineConfig) -> Bool[Array, " requests"]:
    """Rows that a slot can hold."""
    r = requests
    fits = (r.prompt_length >= 1) & (r.limit > r.prompt_length)
    fits &= r.limit <= config.max_length
    return fits & (~r.prompt_scored | (config.num_logit_rows > config.max_slots))


def _worst_case(
    requests: Requests, first: Int32[Array, " requests"], config: EngineConfig
) -> Int32[Array, " requests"]:
    """Most pages that a request can need, at its first row: full prompt pages once."""
    shared = requests.prompt_length // config.page_size
    # The last token drawn is never fed.
    all_pages = page_table.pages_for(requests.limit - 1, page_size=config.page_size)
    return shared.at[first].add(all_pages - shared)


def cancel(
    state: EngineState,
    request_ids: Int32[Array, " n"],
    samples: Int32[Array, " n"] | None = None,
    *,
    eviction: Eviction | None = None,
) -> EngineState:
    """Ends requests wherever they are; their pages are free at once.

    Args:
      state: the engine.
      request_ids: the callers' names; -1, and names of nobody, are ignored.
      samples: which of a request's sequences to end; -1, like None, means all.
      eviction: as in `engine.step`.

    Returns:
      The new state. The sequences are FINISHED with what they had; those of a beam
      search, which end together, without an answer.
    """
    state, request_ids, samples = page_pool.on_device((state, request_ids, samples))
    s, queue = state.sequences, state.queue
    named = (s.request_id[:, None] == request_ids[None, :]) & (request_ids >= 0)[None]
    if samples is not None:
        named &= (s.params.sample[:, None] == samples[None, :]) | (samples < 0)[None]
    alive = (s.status == WAITING) | (s.status == RUNNING)
    ended = jnp.any(named, axis=1) & alive
    num_tokens = s.num_tokens
    if state.search is not None:
        # Beams mean nothing without each other, and have no answers before the end.
        beam = state.search.width[s.group] > 0
        ended |= alive & beam & _any_in_group(s, ended)
        num_tokens = jnp.where(ended & beam, s.prompt_length, num_tokens)
    gone = page_pool.take(ended, state.slots.sequence, fill=False)
    state = swapping.cancel(state, ended)
    state = prefix_caching.drop(groups.leave(state, gone), gone, eviction)
    slots = state.slots
    stays = page_pool.take(_any_in_group(s, alive & ~ended), queue.sequence, fill=False)
    return state._replace(
        sequences=s._replace(
            num_tokens=num_tokens,
            status=jnp.where(ended, FINISHED, s.status),
            reason=jnp.where(ended, CANCELLED, s.reason),
            finish=jnp.where(ended[:, None], state.clock[None, :], s.finish),
        ),
        slots=slots._replace(sequence=jnp.where(gone, NOBODY, slots.sequence)),
        queue=pack_queue(
            jnp.where(stays, queue.sequence, NOBODY), queue.sequence.shape[0]
        ),
    )


def pack_queue(sequence: Int32[Array, " n"], num_places: int) -> Queue:
    """Makes a queue of those named, order kept, from a list with gaps."""
    named = sequence >= 0
    place = jnp.where(named, jnp.cumsum(named, dtype=jnp.int32) - 1, NOBODY)
    packed = jnp.full((num_places,), NOBODY, jnp.int32)
    return Queue(
        sequence=page_pool.put(packed, place, sequence, "set"),
        length=jnp.sum(named, dtype=jnp.int32),
    )


def drain(state: EngineState) -> tuple[EngineState, Sequences]:
    """Hands out the finished requests and makes room for new ones.

    Args:
      state: the engine.

    Returns:
      The new state, and all sequences: those with status FINISHED are final, and gone
      from the new state. The sequences of a request that others still run for are
      handed out with the last of them, and stand as RUNNING here.
    """
    state = page_pool.on_device(state)
    s = state.sequences
    alive = (s.status == WAITING) | (s.status == RUNNING)
    ended = s.status == FINISHED
    final = ended & ~_any_in_group(s, alive)
    status = jnp.where(final, EMPTY, s.status)
    shown = jnp.where(ended & ~final, RUNNING, s.status)
    return state._replace(sequences=s._replace(status=status)), s._replace(status=shown)


def _any_in_group(
    s: Sequences, mask: Bool[Array, " sequences"]
) -> Bool[Array, " sequences"]:
    """Whether any sequence of each one's request is in the mask."""
    return jnp.zeros_like(mask).at[s.group].max(mask)[s.group]
