"""Sequences of one request that begin alike: fed once, then forked.

All sequences of a request are admitted together, but only one of them feeds the tokens
with which all begin; the others wait in their slots. In the step that writes the last
of these tokens they are forked onto its pages, and who has no other token to feed
draws the next one from the same logits. After a preemption by recomputation the same
happens with all that the sequences have in common by then.

Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv.engine import prefix_caching
from jaxkv.engine.state import NOBODY, EngineConfig, EngineState
from jaxkv.memory import page_pool, page_sharing, page_table


def num_to_feed(state: EngineState) -> Int32[Array, " slots"]:
    """Tokens that each slot has to have fed; 0 if it is empty or waits for a fork."""
    slots = state.slots
    known = page_pool.take(state.sequences.num_tokens, slots.sequence, fill=0)
    if state.search is not None:
        known -= _held_back(state, known).astype(jnp.int32)
    goal = jnp.where(slots.num_common > 0, slots.num_common, known)
    return jnp.where(slots.source >= 0, 0, goal)


def _held_back(
    state: EngineState, known: Int32[Array, " slots"]
) -> Bool[Array, " slots"]:
    """Beams that wait with their last token until all of their group have it left."""
    s, sequence = state.sequences, state.slots.sequence
    group = page_pool.take(s.group, sequence, fill=NOBODY)
    prompt = page_pool.take(s.prompt_length, sequence, fill=0)
    # The common tokens of a first fork are all there is: nobody waits for anybody.
    behind = (state.table.length < known - 1) & (known > prompt)
    behind &= is_beam(state)
    late = jnp.zeros(s.group.shape, bool)
    late = page_pool.put(late, jnp.where(behind, group, NOBODY), True, "set")
    return page_pool.take(late, group, fill=False) & is_beam(state)


def is_beam(state: EngineState) -> Bool[Array, " slots"]:
    """Which slots run a beam."""
    sequence = state.slots.sequence
    if state.search is None:
        return jnp.zeros(sequence.shape, bool)
    group = page_pool.take(state.sequences.group, sequence, fill=NOBODY)
    return page_pool.take(state.search.width, group, fill=0) > 0


def due(state: EngineState, num_rows: Int32[Array, " slots"]) -> Int32[Array, " slots"]:
    """Finds the slots that are forked at the end of the step that feeds `num_rows`.

    Returns:
      The slot that each one is forked from, or NOBODY.
    """
    slots = state.slots
    complete = (slots.num_common > 0) & (
        state.table.length + num_rows == slots.num_common
    )
    ready = page_pool.take(complete, slots.source, fill=False)
    return jnp.where(ready, slots.source, NOBODY)


def advance(
    state: EngineState,
    num_rows: Int32[Array, " slots"],
    forks: Int32[Array, " slots"],
    config: EngineConfig,
) -> EngineState:
    """Counts the rows fed as written, and forks whoever is due."""
    s, slots = state.sequences, state.slots
    length = state.table.length
    state = state._replace(table=page_table.advance(state.table, num_rows))
    state = prefix_caching.keep(state, length, config)
    pool, table = page_sharing.fork(
        state.pool, state.table, forks, page_size=config.page_size
    )
    fed_before = page_pool.take(s.num_fed, slots.sequence, fill=0)
    again = jnp.clip(fed_before - length, 0, num_rows)
    done = page_pool.put(jnp.zeros_like(forks), forks, 1, "add") > 0
    return state._replace(
        pool=pool,
        table=table,
        sequences=s._replace(
            num_recomputed=page_pool.put(
                s.num_recomputed, slots.sequence, again, "add"
            ),
            num_fed=page_pool.put(
                s.num_fed, slots.sequence, jnp.maximum(fed_before, table.length), "set"
            ),
        ),
        slots=slots._replace(
            source=jnp.where(forks >= 0, NOBODY, slots.source),
            num_common=jnp.where(done, 0, slots.num_common),
        ),
    )


def leave(state: EngineState, gone: Bool[Array, " slots"]) -> EngineState:
    """Lets slots out of the reading for others, before they are emptied.

    The first of those that wait for a slot that leaves goes on in its place, from its
    pages; a slot that nobody waits for any more reads for itself.
    """
    slots, size = state.slots, state.pages.page_size
    every = jnp.arange(gone.shape[0], dtype=jnp.int32)
    source = jnp.where(gone, NOBODY, slots.source)
    orphan = page_pool.take(gone, source, fill=False)
    heir = jnp.full_like(every, every.shape[0])
    heir = page_pool.put(heir, jnp.where(orphan, source, NOBODY), every, "min")
    heir = page_pool.take(heir, source, fill=NOBODY)
    succeeds = orphan & (heir == every)
    left = jnp.where(succeeds, source, NOBODY)
    pool, table = page_sharing.fork(state.pool, state.table, left, page_size=size)
    common = jnp.where(
        succeeds, page_pool.take(slots.num_common, source, fill=0), slots.num_common
    )
    source = jnp.where(succeeds, NOBODY, jnp.where(orphan, heir, source))
    followed = page_pool.put(jnp.zeros_like(every), source, 1, "add") > 0
    return state._replace(
        pool=pool,
        table=table,
        slots=slots._replace(source=source, num_common=jnp.where(followed, common, 0)),
    )


def first_of_group(state: EngineState) -> Int32[Array, " slots"]:
    """The first slot in line that runs a sequence of the same request, or itself."""
    sequence, line = state.slots.sequence, state.slots.line
    num_slots = line.shape[0]
    every = jnp.arange(num_slots, dtype=jnp.int32)
    place = jnp.zeros_like(line).at[line].set(every, unique_indices=True)
    group = page_pool.take(state.sequences.group, sequence, fill=NOBODY)
    first = jnp.full(state.sequences.group.shape, num_slots, jnp.int32)
    first = page_pool.put(first, group, place, "min")
    return line[jnp.where(group >= 0, page_pool.take(first, group, fill=0), place)]


def note_common(state: EngineState, preempted: Bool[Array, " slots"]) -> EngineState:
    """Notes how many tokens the sequences of each preempted group have in common."""
    s, sequence = state.sequences, state.slots.sequence
    first = first_of_group(state)
    alone = first == jnp.arange(first.shape[0], dtype=jnp.int32)
    group = page_pool.take(s.group, sequence, fill=NOBODY)
    others = preempted & ~alone

    def tokens_of(row: Array) -> Array:
        if state.search is None:
            return s.tokens[row]
        beam = is_beam(state) & (s.num_tokens[row] > s.prompt_length[row])
        return jnp.where(beam[:, None], state.search.path[row], s.tokens[row])

    def look(_: Array, num_common: Array) -> Array:
        row = jnp.maximum(sequence, 0)
        mine, theirs = tokens_of(row), tokens_of(row[first])
        place = jnp.arange(mine.shape[1], dtype=jnp.int32)[None, :]
        known = jnp.minimum(s.num_tokens[row], s.num_tokens[row[first]])
        differs = (mine != theirs) | (place >= known[:, None])
        common = jnp.argmax(differs, axis=1).astype(jnp.int32)
        common = jnp.where(jnp.any(differs, axis=1), common, mine.shape[1])
        losers = jnp.where(others, group, NOBODY)
        num_common = page_pool.put(num_common, losers, mine.shape[1], "set")
        return page_pool.put(num_common, losers, common, "min")

    trips = jnp.any(others).astype(jnp.int32)
    num_common = lax.fori_loop(0, trips, look, s.num_common)
    return state._replace(sequences=s._replace(num_common=num_common))
