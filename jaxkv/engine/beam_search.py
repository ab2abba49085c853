"""Beam search inside the step: beams are the sequences of a request.

All beams of a request get their logits in the same step.
`sampling.beam_search.advance_beams` then chooses a parent and a token for each beam,
and each slot takes over the pages of its parent. Tokens are not moved: each beam stores
its tokens with back-pointers, and the answers are reconstructed when the search is
done. A batch can mix beam search with other requests; steps without beams skip this
code.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays, ledger, memory, sampling
from jaxkv.engine import paging
from jaxkv.engine.groups import group_of_slots, is_beam
from jaxkv.engine.state import (
    LENGTH_REACHED,
    NOT_A_NUMBER,
    NOT_ENDED,
    STOPPED,
    EngineConfig,
    EngineState,
    Sequences,
)
from jaxkv.ledger import NO_SEQUENCE, Groups
from jaxkv.sampling import BeamParams, Beams, advance_beams, follow_parents


class BeamGroups(NamedTuple):
    """Beams of the slots by request: row g is the request whose first slot is g.

    Other rows are `NO_SEQUENCE`.
    """

    lead: Int32[Array, " slots"]
    """Row of each request's first sequence, or `NO_SEQUENCE`."""
    slot: Int32[Array, "slots beams"]
    """Slot of each beam, or `NO_SEQUENCE`."""


def find_beams(
    state: EngineState, first: Int32[Array, " slots"], max_beams: int
) -> BeamGroups:
    """Finds the beams of each request in the slots; `first` as in `Groups`."""
    s = state.sequences
    sequence = state.slots.sequence
    row = jnp.maximum(sequence, 0)
    is_in_beam = is_beam(state)
    every = jnp.arange(first.shape[0], dtype=jnp.int32)
    at = (jnp.where(is_in_beam, first, NO_SEQUENCE), s.params.sample[row])
    no_slots = jnp.full((first.shape[0], max_beams), NO_SEQUENCE, jnp.int32)
    begins = is_in_beam & (first == every)
    return BeamGroups(
        lead=jnp.where(begins, s.group[row], NO_SEQUENCE),
        slot=arrays.put(no_slots, at, every),
    )


def step_beams(
    state: EngineState,
    logits: Float[Array, "slots vocab"],
    emits: Bool[Array, " slots"],
    choose: Callable[[Array], tuple[Array, Array]],
    config: EngineConfig,
) -> tuple[EngineState, Int32[Array, " slots"]]:
    """Advances every search whose beams all have new logits.

    Args:
      state: the engine, with the rows of this step counted as written.
      logits: logits of the last token of each slot.
      emits: slots with new logits.
      choose: returns candidate tokens and log-probabilities of logits, see
        `sampling.beam_search.choices`.
      config: the engine's configuration.

    Returns:
      The new state, and the finish reason of each slot's sequence, or `NOT_ENDED`.
    """
    blank = jnp.full((config.max_slots,), NOT_ENDED, jnp.int32)
    if state.search is None:
        return state, blank
    is_beam_row = emits & is_beam(state)

    def search(_: Array, carry: tuple[EngineState, Array]) -> tuple[EngineState, Array]:
        return _search(carry[0], choose(logits), is_beam_row, config)

    trips = jnp.any(is_beam_row).astype(jnp.int32)
    return lax.fori_loop(0, trips, search, (state, blank))


def _search(
    state: EngineState,
    choices: tuple[Array, Array],
    is_beam_row: Bool[Array, " slots"],
    config: EngineConfig,
) -> tuple[EngineState, Int32[Array, " slots"]]:
    """Advances the searches, then slots and histories; returns as `step_beams`."""
    s = state.sequences
    sequence = state.slots.sequence
    first = ledger.find_groups(group_of_slots(state)).first
    beam_groups = find_beams(state, first, config.max_beams)
    sample = s.params.sample[sequence]
    after, parents, tokens, active = _step(state, beam_groups, choices, is_beam_row)
    is_searched = is_beam_row & active[first]
    done = is_searched & after.done[first]
    # By slot: the slot of its parent, and its history.
    beam = parents[first, sample]
    source = jnp.where(is_searched & ~done, beam_groups.slot[first, beam], NO_SEQUENCE)
    # Pages reserved ahead are released before slots take over their parents' pages.
    every = jnp.arange(config.max_slots, dtype=jnp.int32)
    source = jnp.where(source == every, NO_SEQUENCE, source)
    length = state.table.length
    keep = jnp.where(is_searched, length, length + config.max_length)
    pool, table = memory.truncate(
        state.pool, state.table, keep, page_size=config.page_size
    )
    pool, table = memory.reorder(pool, table, source)
    state = paging.fork_states(state, source)
    state = paging.continue_windows(state, source)
    state = state._replace(pool=pool, table=table)
    row = jnp.where(is_searched, sequence, NO_SEQUENCE)
    num_tokens = state.slots.num_tokens
    place = jnp.where(is_searched, num_tokens, NO_SEQUENCE)
    lead = jnp.where(active, beam_groups.lead, NO_SEQUENCE)
    old = state.search
    assert old is not None
    new = old._replace(
        groups=jax.tree.map(lambda x, y: arrays.put(x, lead, y), old.groups, after),
        parents=arrays.put(old.parents, (row, place), beam),
    )
    s = s._replace(tokens=arrays.put(s.tokens, (row, place), tokens[first, sample]))
    slots = state.slots._replace(num_tokens=num_tokens + is_searched.astype(jnp.int32))
    state = state._replace(search=new, sequences=s).with_slots(slots)
    return _finish(state, first, beam_groups, done, config)


def _step(
    state: EngineState,
    beam_groups: BeamGroups,
    choices: tuple[Array, Array],
    is_beam_row: Array,
) -> tuple[Beams, Array, Array, Array]:
    """Advances the beams of all requests; also returns which were active."""
    s = state.sequences
    search = state.search
    assert search is not None
    lead = jnp.maximum(beam_groups.lead, 0)
    params = BeamParams(
        width=search.width[lead],
        length_penalty=search.length_penalty[lead],
        early_stopping=search.early_stopping[lead],
        stop_tokens=s.stop_tokens[lead],
        limit=s.limit[lead] - s.prompt_length[lead],
    )
    ready = jnp.sum(
        arrays.take(is_beam_row, beam_groups.slot, fill=False), axis=1, dtype=jnp.int32
    )
    active = (beam_groups.lead >= 0) & (ready == params.width)
    group = jax.tree.map(lambda x: x[lead], search.groups)
    slot = jnp.maximum(beam_groups.slot, 0)
    tokens, logprobs = (x[slot] for x in choices)
    logprobs = jnp.where((beam_groups.slot >= 0)[..., None], logprobs, -jnp.inf)
    return *jax.vmap(advance_beams)(group, params, tokens, logprobs, active), active


def _finish(
    state: EngineState,
    first: Int32[Array, " slots"],
    beam_groups: BeamGroups,
    done: Bool[Array, " slots"],
    config: EngineConfig,
) -> tuple[EngineState, Int32[Array, " slots"]]:
    """Writes the answers of finished searches into `Sequences.tokens`."""
    search = state.search
    sequence = state.slots.sequence
    assert search is not None
    row = jnp.maximum(sequence, 0)
    sample = state.sequences.params.sample[row]
    lead = jnp.maximum(beam_groups.lead, 0)
    rows = sequence[jnp.maximum(beam_groups.slot, 0)]
    group = jax.tree.map(lambda x: x[lead], search.groups)
    start = state.sequences.prompt_length[lead]

    length = group.finished.length[first, sample]

    def write(_: Array, s: Sequences) -> Sequences:
        answers = jax.vmap(sampling.finalize)(
            group, s.tokens[rows], search.parents[rows], start
        )[first, sample]
        place = jnp.arange(config.max_length, dtype=jnp.int32)[None, :]
        place = place - start[first][:, None]
        chosen = (place >= 0) & (place < length[:, None])
        answers = jnp.where(chosen, answers, s.tokens[sequence])
        row = jnp.where(done, sequence, NO_SEQUENCE)
        score = group.finished.score[first, sample]
        return s._replace(
            tokens=arrays.put(s.tokens, row, answers),
            score=arrays.put(s.score, row, score),
        )

    s = lax.fori_loop(0, jnp.any(done).astype(jnp.int32), write, state.sequences)
    full = length == (s.limit - s.prompt_length)[row]
    reason = jnp.where(full, LENGTH_REACHED, STOPPED)
    reason = jnp.where(length == 0, NOT_A_NUMBER, reason)
    reason = jnp.where(done, reason, NOT_ENDED)
    num_tokens = jnp.where(done, start[first] + length, state.slots.num_tokens)
    slots = state.slots._replace(num_tokens=num_tokens)
    return state._replace(sequences=s).with_slots(slots), reason


def store_paths(
    state: EngineState,
    preempted: Bool[Array, " slots"],
    group: Groups | None,
    config: EngineConfig,
) -> EngineState:
    """Stores the tokens of preempted beams in `Search.path`, to be fed again.

    The history is kept, since answers may point into it. Without groups there are none.
    """
    if state.search is None or group is None:
        return state
    lost = preempted & is_beam(state)

    def unroll(_: Array, path: Array) -> Array:
        assert state.search is not None
        s = state.sequences
        sequence = state.slots.sequence
        beam_groups = find_beams(state, group.first, config.max_beams)
        sample = s.params.sample[jnp.maximum(sequence, 0)]
        slot = jnp.maximum(beam_groups.slot, 0)
        rows = sequence[slot]
        num_tokens = state.slots.num_tokens[slot]
        beam = jnp.arange(config.max_beams, dtype=jnp.int32)
        ends = jnp.broadcast_to(beam, rows.shape)
        held = jax.vmap(follow_parents)(state.search.parents[rows], ends, num_tokens)[
            group.first, sample
        ]
        place = jnp.arange(config.max_length, dtype=jnp.int32)[None, :]
        holder = jnp.take_along_axis(rows[group.first], jnp.maximum(held, 0), axis=1)
        tokens = s.tokens[holder, jnp.broadcast_to(place, holder.shape)]
        return arrays.put(path, jnp.where(lost, sequence, NO_SEQUENCE), tokens)

    trips = jnp.any(lost).astype(jnp.int32)
    path = lax.fori_loop(0, trips, unroll, state.search.path)
    return state._replace(search=state.search._replace(path=path))
