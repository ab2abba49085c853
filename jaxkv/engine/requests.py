"""Requests in and results out: submit, cancel and drain, all pure.

They run between calls of `run_steps`, never inside a step, so what they cost grows with
the number of sequences known, not with the number of steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxkv import arrays, ledger
from jaxkv.engine import groups, prefix_caching, swapping
from jaxkv.engine.state import (
    CANCELLED,
    EngineConfig,
    EngineState,
    Search,
    Sequences,
    no_sequences,
)
from jaxkv.ledger import NO_SEQUENCE, Ledger, SequenceEvents, SequenceProgress
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
    use_prefix_cache: Bool[Array, " requests"]
    """Whether the prefix cache serves the sequence, and keeps its pages."""
    keep_logprobs: Bool[Array, " requests"]
    """Whether log-probabilities are kept."""
    keep_prompt_logprobs: Bool[Array, " requests"]
    """Whether those of the prompt are kept, too."""
    beam_width: Int32[Array, " requests"]
    """Beams of the request, as many as it has rows; 0 if it does not search."""
    length_penalty: Float[Array, " requests"]
    """As in `beam_search.BeamParams`."""
    early_stopping: Int32[Array, " requests"]
    """As in `beam_search.BeamParams`."""
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
    state, requests = arrays.to_jax_arrays((state, requests))
    s, books, r = state.sequences, state.ledger, requests
    index = jnp.arange(r.limit.shape[0], dtype=jnp.int32)
    first = lax.cummax(jnp.where(r.params.sample == 0, index, 0))
    # Requests that an idle engine could serve.
    fits = (r.prompt_length >= 1) & (r.limit > r.prompt_length)
    fits &= r.limit <= config.max_length
    fits &= ~r.keep_prompt_logprobs | (config.num_logit_rows > config.max_slots)
    fits &= r.beam_width <= config.max_beams
    size = arrays.reduce_groups(jnp.ones_like(first), first, "add")
    shared, own = demand.max_pages(r.prompt_length, r.limit, page_size=config.page_size)
    pages = shared[first] + arrays.reduce_groups(own, first, "add")
    fits &= (size <= config.max_slots) & (pages <= config.num_pages)
    # A condition that fails for one row fails for all rows of the request.
    taken = ~arrays.reduce_groups(~fits, first, "max")
    # Requests for which queue and sequences have room. Running ones count, because any
    # of those may come back to the queue.
    begins = taken & (first == index)
    leads = s.group == jnp.arange(s.group.shape[0], dtype=jnp.int32)
    begun = _any_in_group(s, _is_alive(books)) & leads
    places = books.queue.shape[0] - jnp.sum(begun, dtype=jnp.int32)
    is_empty = ledger.columns(SequenceProgress, books.progress).num_tokens == 0
    room = jnp.cumsum(begins, dtype=jnp.int32) <= places
    room &= jnp.cumsum(taken, dtype=jnp.int32) <= jnp.sum(is_empty, dtype=jnp.int32)
    lacks = arrays.reduce_groups(taken & ~room, first, "max")
    # No request overtakes another: all after one without room are refused, too.
    taken &= jnp.cumsum(lacks, dtype=jnp.int32) == 0
    begins = taken & (first == index)
    # The k-th sequence taken gets the k-th empty row.
    empty = arrays.marked_indices(is_empty, is_empty.shape[0])
    row = arrays.take(empty, arrays.number_marked(taken), fill=NO_SEQUENCE)
    place = jnp.where(
        begins, books.num_waiting + arrays.number_marked(begins), NO_SEQUENCE
    )
    asked = {name: x for name, x in r._asdict().items() if name in Sequences._fields}
    # Scores of a prompt come from reading all of it.
    asked["use_prefix_cache"] = r.use_prefix_cache & ~r.keep_prompt_logprobs
    lead = row[first]
    new = no_sequences(row.shape[0], config)._replace(group=lead, **asked)
    sequences = jax.tree.map(lambda old, x: arrays.put(old, row, x), s, new)
    members = arrays.put(sequences.members, (lead, index - first), row)
    progress = SequenceProgress(
        *(jnp.zeros_like(row) for _ in SequenceProgress._fields)
    )._replace(num_tokens=r.prompt_length, num_common=r.prompt_length)
    return state._replace(
        search=_begin_search(state, requests, row, config),
        sequences=sequences._replace(members=members),
        ledger=books._replace(
            queue=arrays.put(books.queue, place, row),
            num_waiting=books.num_waiting + jnp.sum(begins, dtype=jnp.int32),
            progress=arrays.put(books.progress, row, jnp.stack(progress, axis=1)),
            events=arrays.put(books.events, row, 0),
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
      The new state. The sequences have ended with the tokens that they had; those of
      a beam search end together, without an answer.
    """
    state, request_ids, samples = arrays.to_jax_arrays((state, request_ids, samples))
    s, books, slots = state.sequences, state.ledger, state.slots
    named = (s.request_id[:, None] == request_ids[None, :]) & (request_ids >= 0)[None]
    if samples is not None:
        named &= (s.params.sample[:, None] == samples[None, :]) | (samples < 0)[None]
    alive = _is_alive(books)
    ended = jnp.any(named, axis=1) & alive
    progress = ledger.columns(SequenceProgress, books.progress)
    num_tokens = arrays.put(progress.num_tokens, slots.sequence, slots.num_tokens)
    if state.search is not None:
        # All beams of a search end together, and have no answers before the end.
        beam = state.search.width[s.group] > 0
        ended |= alive & beam & _any_in_group(s, ended)
        num_tokens = jnp.where(ended & beam, s.prompt_length, num_tokens)
    goes_on = _any_in_group(s, alive & ~ended)
    gone = arrays.take(ended, slots.sequence, fill=False)
    again = ledger.num_recomputed(slots, state.table.length)
    at = jnp.where(gone, slots.sequence, NO_SEQUENCE)
    events = ledger.columns(SequenceEvents, books.events)
    now = books.clock
    events = events._replace(
        finish_s=jnp.where(ended, now[0] + 1, events.finish_s),
        finish_us=jnp.where(ended, now[1], events.finish_us),
        num_recomputed=arrays.put(events.num_recomputed, at, again, "add"),
    )
    stays = arrays.take(goes_on, books.queue, fill=False)
    progress = progress._replace(
        num_tokens=jnp.where(ended, num_tokens, progress.num_tokens)
    )
    state = state._replace(
        sequences=s._replace(reason=jnp.where(ended, CANCELLED, s.reason)),
        ledger=books._replace(
            queue=arrays.compact_ids(jnp.where(stays, books.queue, NO_SEQUENCE)),
            num_waiting=jnp.sum(stays, dtype=jnp.int32),
            progress=jnp.stack(progress, axis=1),
            events=jnp.stack(events, axis=1),
        ),
    )
    state = swapping.give_up_pages(state, ended)
    state = prefix_caching.drop_slots_to_cache(
        groups.promote_fork_waiter(state, gone), gone, eviction
    )
    sequence = jnp.where(gone, NO_SEQUENCE, state.slots.sequence)
    return state.with_slots(state.slots._replace(sequence=sequence))


class DrainedSequences(NamedTuple):
    """All sequences of an engine as `drain` found them."""

    is_final: Bool[Array, " sequences"]
    """Sequences of requests that are complete; their rows are free now."""
    sequences: Sequences
    progress: SequenceProgress
    events: SequenceEvents


def drain(state: EngineState) -> tuple[EngineState, DrainedSequences]:
    """Returns the finished requests, and frees their rows.

    The sequences of a request are final when the last of them has ended.

    Args:
      state: the engine.

    Returns:
      The new state, and all sequences.
    """
    state = arrays.to_jax_arrays(state)
    s, books = state.sequences, state.ledger
    progress = ledger.columns(SequenceProgress, books.progress)
    alive = _is_alive(books)
    final = (progress.num_tokens > 0) & ~_any_in_group(s, alive)
    found = DrainedSequences(
        final, s, progress, ledger.columns(SequenceEvents, books.events)
    )
    left = jnp.where(final[:, None], 0, books.progress)
    return state._replace(ledger=books._replace(progress=left)), found


def _is_alive(books: Ledger) -> Bool[Array, " sequences"]:
    """Returns the sequences that wait or run."""
    num_tokens = ledger.columns(SequenceProgress, books.progress).num_tokens
    return (num_tokens > 0) & (
        ledger.columns(SequenceEvents, books.events).finish_s == 0
    )


def _any_in_group(
    s: Sequences, mask: Bool[Array, " sequences"]
) -> Bool[Array, " sequences"]:
    """Marks every sequence of a request of which any is marked."""
    return arrays.reduce_groups(mask, s.group, "max")
