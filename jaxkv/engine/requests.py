"""Requests in and results out: submit, cancel and drain, all pure.

They run between calls of `run_steps`, never inside a step, so what they cost grows with
the number of sequences known, not with the number of steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxkv import arrays
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
    no_sequences,
)
from jaxkv.memory import Eviction, demand
from jaxkv.sampling import Params, beam_search
from jaxkv.scheduling.attributes import RequestAttributes


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
    params: Params
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
    """As in `beam_search.Params`."""
    early_stopping: Int32[Array, " requests"]
    """As in `beam_search.Params`."""
    arrival: Int32[Array, "requests 2"]
    """Seconds and microseconds at which the request may be admitted."""
    attributes: RequestAttributes
    """Attributes of the requests, for the policy."""


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
    state, requests = arrays.on_device((state, requests))
    s, queue, r = state.sequences, state.queue, requests
    index = jnp.arange(r.limit.shape[0], dtype=jnp.int32)
    first = lax.cummax(jnp.where(r.params.sample == 0, index, 0))
    # Requests that an idle engine could serve.
    fits = (r.prompt_length >= 1) & (r.limit > r.prompt_length)
    fits &= r.limit <= config.max_length
    fits &= ~r.prompt_scored | (config.num_logit_rows > config.max_slots)
    fits &= r.beam_width <= config.max_beams
    size = arrays.over_groups(jnp.ones_like(first), first, "add")
    shared, own = demand.at_most(r.prompt_length, r.limit, page_size=config.page_size)
    pages = shared[first] + arrays.over_groups(own, first, "add")
    fits &= (size <= config.max_slots) & (pages <= config.num_pages)
    # A condition that fails for one row fails for all rows of the request.
    taken = ~arrays.over_groups(~fits, first, "max")
    # Requests for which queue and sequences have room. Running ones count, because any
    # of those may come back to the queue.
    begins = taken & (first == index)
    leads = s.group == jnp.arange(s.group.shape[0], dtype=jnp.int32)
    begun = _any_in_group(s, _alive(s)) & leads
    places = queue.sequence.shape[0] - jnp.sum(begun, dtype=jnp.int32)
    num_empty = jnp.sum(s.status == EMPTY, dtype=jnp.int32)
    room = jnp.cumsum(begins, dtype=jnp.int32) <= places
    room &= jnp.cumsum(taken, dtype=jnp.int32) <= num_empty
    lacks = arrays.over_groups(taken & ~room, first, "max")
    # No request overtakes another: all after one without room are refused, too.
    taken &= jnp.cumsum(lacks, dtype=jnp.int32) == 0
    begins = taken & (first == index)
    # The k-th sequence taken gets the k-th empty row.
    empty = arrays.places(s.status == EMPTY, s.status.shape[0])
    row = arrays.take(empty, arrays.ranks(taken), fill=NOBODY)
    place = jnp.where(begins, queue.length + arrays.ranks(begins), NOBODY)
    asked = {name: x for name, x in r._asdict().items() if name in Sequences._fields}
    # Scores of a prompt come from reading all of it.
    asked["reuses"] = r.reuses & ~r.prompt_scored
    new = no_sequences(row.shape[0], config)._replace(
        status=jnp.full_like(row, WAITING),
        group=row[first],
        num_tokens=r.prompt_length,
        num_common=r.prompt_length,
        **asked,
    )
    return state._replace(
        search=_begin_search(state, requests, row, config),
        sequences=jax.tree.map(lambda old, x: arrays.put(old, row, x), s, new),
        queue=Queue(
            sequence=arrays.put(queue.sequence, place, row),
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
        return arrays.put(old, row, new)

    group = beam_search.make_beams(config.max_beams)
    return search._replace(
        width=put(search.width, r.beam_width),
        length_penalty=put(search.length_penalty, r.length_penalty),
        early_stopping=put(search.early_stopping, r.early_stopping),
        groups=jax.tree.map(
            lambda old, new: put(old, jnp.broadcast_to(new, (row.size, *new.shape))),
            search.groups,
            group,
        ),
        parents=put(search.parents, jnp.zeros((), jnp.int32)),
    )


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
    state, request_ids, samples = arrays.on_device((state, request_ids, samples))
    s, queue, num_tokens = state.sequences, state.queue, state.sequences.num_tokens
    named = (s.request_id[:, None] == request_ids[None, :]) & (request_ids >= 0)[None]
    if samples is not None:
        named &= (s.params.sample[:, None] == samples[None, :]) | (samples < 0)[None]
    alive = _alive(s)
    ended = jnp.any(named, axis=1) & alive
    if state.search is not None:
        # All beams of a search end together, and have no answers before the end.
        beam = state.search.width[s.group] > 0
        ended |= alive & beam & _any_in_group(s, ended)
        num_tokens = jnp.where(ended & beam, s.prompt_length, num_tokens)
    goes_on = _any_in_group(s, alive & ~ended)
    gone = arrays.take(ended, state.slots.sequence, fill=False)
    state = swapping.cancel(state, ended)
    state = prefix_caching.drop(groups.leave(state, gone), gone, eviction)
    slots = state.slots
    stays = arrays.take(goes_on, queue.sequence, fill=False)
    left = arrays.packed(jnp.where(stays, queue.sequence, NOBODY))
    return state._replace(
        sequences=s._replace(
            num_tokens=num_tokens,
            status=jnp.where(ended, FINISHED, s.status),
            reason=jnp.where(ended, CANCELLED, s.reason),
            finish=jnp.where(ended[:, None], state.clock[None, :], s.finish),
        ),
        slots=slots._replace(sequence=jnp.where(gone, NOBODY, slots.sequence)),
        queue=Queue(left, length=jnp.sum(stays, dtype=jnp.int32)),
    )


def requeue(
    queue: Queue,
    ahead: Int32[Array, " n"],
    leaves: Bool[Array, " head"],
) -> Queue:
    """Puts requests that wait again, in order, ahead of a queue.

    NOBODY may stand between them. Those at the head that leave are taken out.
    """
    head = queue.sequence[: leaves.shape[0]]
    front = jnp.concatenate([ahead, jnp.where(leaves, NOBODY, head)])
    num_front = jnp.sum(front >= 0, dtype=jnp.int32)
    place = jnp.arange(queue.sequence.shape[0], dtype=jnp.int32)
    # Only the front has gaps to close up; the rest moves as it is.
    behind = place - num_front + leaves.shape[0]
    behind = arrays.take(queue.sequence, behind, fill=NOBODY)
    front = arrays.take(arrays.packed(front), place, fill=NOBODY)
    return Queue(
        sequence=jnp.where(place < num_front, front, behind),
        length=queue.length
        + jnp.sum(ahead >= 0, dtype=jnp.int32)
        - jnp.sum(leaves & (head >= 0), dtype=jnp.int32),
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
    state = arrays.on_device(state)
    s = state.sequences
    ended = s.status == FINISHED
    final = ended & ~_any_in_group(s, _alive(s))
    status = jnp.where(final, EMPTY, s.status)
    shown = jnp.where(ended & ~final, RUNNING, s.status)
    return state._replace(sequences=s._replace(status=status)), s._replace(status=shown)


def _alive(s: Sequences) -> Bool[Array, " sequences"]:
    """Sequences that wait or run."""
    return (s.status == WAITING) | (s.status == RUNNING)


def _any_in_group(
    s: Sequences, mask: Bool[Array, " sequences"]
) -> Bool[Array, " sequences"]:
    """Whether any sequence of each one's request is in the mask."""
    return arrays.over_groups(mask, s.group, "max")
