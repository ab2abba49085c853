"""Submits, cancels and drains requests, by pure functions of the engine's state.

They run between calls of `run_steps`. Their cost grows with `max_sequences`, and does
not depend on the number of steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxkv import arrays, ledger
from jaxkv.engine import groups, paging
from jaxkv.engine.emitting import record_routes
from jaxkv.engine.state import (
    CANCELLED,
    EngineConfig,
    EngineState,
    Search,
    Sequences,
    no_sequences,
)
from jaxkv.ledger import (
    EVENTS,
    NO_SEQUENCE,
    PROGRESS,
    Ledger,
    SequenceEvents,
    SequenceProgress,
)
from jaxkv.memory import EVICTION_RULES, Eviction, max_pages
from jaxkv.models import NO_EXPERT
from jaxkv.sampling import Params, make_beams
from jaxkv.scheduling import RequestAttributes


class Requests(NamedTuple):
    """Rows of new requests, one for each sequence.

    The sequences of one request have adjacent rows and equal prompts. A request begins
    at each row with `params.sample` 0.
    """

    tokens: Int32[Array, "requests max_length"]
    """Prompts, with arbitrary padding."""
    prompt_length: Int32[Array, " requests"]
    """Prompt length in tokens, in [1, max_length]; 0 marks an unused row."""
    limit: Int32[Array, " requests"]
    """Largest length of the sequence, in (prompt_length, max_length]. A prompt of
    `max_length` tokens has one more, which is emitted and not stored."""
    request_id: Int32[Array, " requests"]
    """Caller's ids."""
    stop_tokens: Int32[Array, "requests max_stop_tokens"]
    """Stop token ids; -1 where unused."""
    params: Params
    """Sampling parameters."""
    salt: UInt32[Array, " requests"]
    """Prefix cache salt: pages are shared only between equal salts."""
    use_prefix_cache: Bool[Array, " requests"]
    """True if the sequence uses the prefix cache."""
    keep_logprobs: Bool[Array, " requests"]
    """True if log-probabilities are kept."""
    keep_prompt_logprobs: Bool[Array, " requests"]
    """True if log-probabilities of the prompt are kept as well."""
    beam_width: Int32[Array, " requests"]
    """Beam width, the number of rows of the request; 0 without beam search."""
    length_penalty: Float[Array, " requests"]
    """As in `beam_search.BeamParams`."""
    early_stopping: Int32[Array, " requests"]
    """As in `beam_search.BeamParams`."""
    arrival: Int32[Array, "requests 2"]
    """Earliest time of admission: seconds and microseconds."""
    attributes: RequestAttributes
    """Attributes of the requests, for the policy."""
    grammar_state: Int32[Array, " requests"] | None = None
    """Initial state of the grammar, as in `Sequences`; None if the engine has no
    grammars."""
    adapter: Int32[Array, " requests"] | None = None
    """Adapters, from 1 on, 0 for none; None in an engine without adapters. Requests
    with other adapters must have other salts."""


def submit(
    state: EngineState, requests: Requests, *, config: EngineConfig
) -> tuple[EngineState, Bool[Array, " requests"]]:
    """Appends requests to the queue.

    A row is refused if it is unused; if its prompt is empty or leaves no room for an
    answer; if its worst case needs more pages than the pool has; if it asks for
    log-probabilities of a prompt and there are no spare logit rows; or if the queue or
    the table of sequences is full. If a request finds no room, all requests after it
    are refused as well, which keeps the order of arrival.

    Args:
      state: the engine.
      requests: requests in order of arrival, as JAX or NumPy arrays.
      config: the engine's configuration, static.

    Returns:
      The new state, and a mask of the accepted rows.
    """
    state, requests = arrays.to_jax_arrays((state, requests))
    s = state.sequences
    books = state.ledger
    r = requests
    index = jnp.arange(r.limit.shape[0], dtype=jnp.int32)
    first = lax.cummax(jnp.where(r.params.sample == 0, index, 0))
    # Requests that fit into an idle engine.
    fits = (r.prompt_length >= 1) & (r.limit > r.prompt_length)
    fits &= r.limit <= jnp.maximum(config.max_length, r.prompt_length + 1)
    fits &= r.prompt_length <= config.max_length
    fits &= ~r.keep_prompt_logprobs | (config.num_logit_rows > config.max_slots)
    fits &= r.beam_width <= config.max_beams
    size = arrays.reduce_groups(jnp.ones_like(first), first, "add")
    shared, slot_pages = max_pages(r.prompt_length, r.limit, page_size=config.page_size)
    pages = shared[first] + arrays.reduce_groups(slot_pages, first, "add")
    most = 1 if config.evict in EVICTION_RULES else config.max_slots
    fits &= (size <= most) & (pages <= config.num_pages)
    # A request is refused as a whole.
    taken = ~arrays.reduce_groups(~fits, first, "max")
    # Running requests count against the queue: preemption may return them to it.
    begins = taken & (first == index)
    leads = s.group == jnp.arange(s.group.shape[0], dtype=jnp.int32)
    begun = _any_in_group(s, _is_alive(books)) & leads
    places = books.queue.shape[0] - jnp.sum(begun, dtype=jnp.int32)
    is_empty = PROGRESS.read(books.progress, "num_tokens") == 0
    room = jnp.cumsum(begins, dtype=jnp.int32) <= places
    room &= jnp.cumsum(taken, dtype=jnp.int32) <= jnp.sum(is_empty, dtype=jnp.int32)
    lacks = arrays.reduce_groups(taken & ~room, first, "max")
    # All requests after one without room are refused.
    taken &= jnp.cumsum(lacks, dtype=jnp.int32) == 0
    begins = taken & (first == index)
    # The k-th sequence taken gets the k-th empty row.
    empty = arrays.marked_indices(is_empty, is_empty.shape[0])
    row = arrays.take(empty, arrays.number_marked(taken), fill=NO_SEQUENCE)
    place = jnp.where(
        begins, books.num_waiting + arrays.number_marked(begins), NO_SEQUENCE
    )
    request_fields = {
        name: x for name, x in r._asdict().items() if name in Sequences._fields
    }
    # Log-probabilities of a prompt need a prefill of all of it.
    request_fields["use_prefix_cache"] = r.use_prefix_cache & ~r.keep_prompt_logprobs
    lead = row[first]
    new = no_sequences(row.shape[0], config)._replace(group=lead, **request_fields)
    sequences = jax.tree.map(lambda old, x: arrays.put(old, row, x), s, new)
    members = arrays.put(sequences.members, (lead, index - first), row)
    routes = state.routes
    if routes is not None:
        routes = arrays.put(routes, row, NO_EXPERT)
    blank = SequenceProgress(*(jnp.zeros_like(row) for _ in SequenceProgress._fields))
    progress = blank._replace(num_tokens=r.prompt_length, num_common=r.prompt_length)
    return state._replace(
        routes=routes,
        search=_begin_search(state, requests, row, config),
        sequences=sequences._replace(members=members),
        ledger=books._replace(
            queue=arrays.put(books.queue, place, row),
            num_waiting=books.num_waiting + jnp.sum(begins, dtype=jnp.int32),
            progress=PROGRESS.write(books.progress, row, **progress._asdict()),
            events=arrays.put(books.events, row, 0),
        ),
    ), taken


def _begin_search(
    state: EngineState,
    requests: Requests,
    row: Int32[Array, " requests"],
    config: EngineConfig,
) -> Search | None:
    """Initializes beam searches of new requests; width 0 means no beam search."""
    search = state.search
    r = requests
    if search is None:
        return None

    def put(old: Array, new: Array) -> Array:
        return arrays.put(old, row, new)

    group = make_beams(config.max_beams)
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
    """Ends waiting or running requests and frees their pages.

    A cancelled sequence keeps the tokens that it has. Cancelling one beam of a beam
    search cancels all of them, and leaves no answer.

    Args:
      state: the engine.
      request_ids: ids of the requests; -1 and unknown ids are ignored.
      samples: index of the sequence to end in each request; -1 or None means all.
      eviction: as in `engine.step`.

    Returns:
      The new state.
    """
    state, request_ids, samples = arrays.to_jax_arrays((state, request_ids, samples))
    s = state.sequences
    books = state.ledger
    slots = state.slots
    named = (s.request_id[:, None] == request_ids[None, :]) & (request_ids >= 0)[None]
    if samples is not None:
        named &= (s.params.sample[:, None] == samples[None, :]) | (samples < 0)[None]
    alive = _is_alive(books)
    ended = jnp.any(named, axis=1) & alive
    progress = PROGRESS.unpack(books.progress)
    num_tokens = arrays.put(progress.num_tokens, slots.sequence, slots.num_tokens)
    if state.search is not None:
        # Beams of a search end together; there is no answer before the search is done.
        beam = state.search.width[s.group] > 0
        ended |= alive & beam & _any_in_group(s, ended)
        num_tokens = jnp.where(ended & beam, s.prompt_length, num_tokens)
    goes_on = _any_in_group(s, alive & ~ended)
    is_cancelled = arrays.take(ended, slots.sequence, fill=False)
    again = ledger.num_recomputed(slots, state.table.position)
    at = jnp.where(is_cancelled, slots.sequence, NO_SEQUENCE)
    events = EVENTS.unpack(books.events)
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
            progress=PROGRESS.pack(progress),
            events=EVENTS.pack(events),
        ),
    )
    state = paging.discard_ended(state, ended)
    state = record_routes(state, is_cancelled)
    state = paging.release_slots(
        groups.promote_fork_waiter(state, is_cancelled), is_cancelled, eviction
    )
    sequence = jnp.where(is_cancelled, NO_SEQUENCE, state.slots.sequence)
    return state.with_slots(state.slots._replace(sequence=sequence))


class DrainedSequences(NamedTuple):
    """Sequences of an engine at a call of `drain`."""

    is_final: Bool[Array, " sequences"]
    """True for sequences of completed requests, whose rows are now free."""
    sequences: Sequences
    progress: SequenceProgress
    events: SequenceEvents
    routes: Int32[Array, "sequences max_length mixtures top_k"] | None = None
    """Experts of each token, if they are recorded."""


def drain(state: EngineState) -> tuple[EngineState, DrainedSequences]:
    """Returns finished requests and frees their rows.

    A request is finished when all of its sequences have ended.

    Args:
      state: the engine.

    Returns:
      The new state, and all sequences with a mask of the finished ones.
    """
    state = arrays.to_jax_arrays(state)
    s = state.sequences
    books = state.ledger
    progress = PROGRESS.unpack(books.progress)
    alive = _is_alive(books)
    final = (progress.num_tokens > 0) & ~_any_in_group(s, alive)
    drained_sequences = DrainedSequences(
        final, s, progress, EVENTS.unpack(books.events), state.routes
    )
    left = jnp.where(final[:, None], 0, books.progress)
    return state._replace(ledger=books._replace(progress=left)), drained_sequences


def _is_alive(books: Ledger) -> Bool[Array, " sequences"]:
    """Returns a mask of the waiting and running sequences."""
    is_used = PROGRESS.read(books.progress, "num_tokens") > 0
    return is_used & (EVENTS.read(books.events, "finish_s") == 0)


def _any_in_group(
    s: Sequences, mask: Bool[Array, " sequences"]
) -> Bool[Array, " sequences"]:
    """Marks all sequences of each request with a marked sequence."""
    return arrays.reduce_groups(mask, s.group, "max")
