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

from jaxkv import arrays
from jaxkv.engine import prefix_caching
from jaxkv.engine.state import FINISHED, NOBODY, NOT_ENDED, EngineConfig, EngineState
from jaxkv.memory import page_sharing, page_table


def num_to_feed(state: EngineState) -> Int32[Array, " slots"]:
    """Tokens that each slot has to have fed; 0 if it is empty or waits for a fork."""
    slots = state.slots
    known = arrays.take(state.sequences.num_tokens, slots.sequence, fill=0)
    if state.search is not None:
        # Beams wait with their last token until all of their group have it left.
        s, group, beam = state.sequences, group_of_slots(state), is_beam(state)
        prompt = arrays.take(s.prompt_length, slots.sequence, fill=0)
        # The common tokens of a first fork are all there is: no beam waits there.
        lags = beam & (state.table.length < known - 1) & (known > prompt)
        late = jnp.zeros(s.group.shape, bool)
        late = arrays.put(late, jnp.where(lags, group, NOBODY), True)
        waits = arrays.take(late, group, fill=False) & beam
        known -= waits.astype(jnp.int32)
    goal = jnp.where(slots.num_common > 0, slots.num_common, known)
    return jnp.where(slots.source >= 0, 0, goal)


def is_beam(state: EngineState) -> Bool[Array, " slots"]:
    """Which slots run a beam."""
    sequence = state.slots.sequence
    if state.search is None:
        return jnp.zeros(sequence.shape, bool)
    return arrays.take(state.search.width, group_of_slots(state), fill=0) > 0


def group_of_slots(state: EngineState) -> Int32[Array, " slots"]:
    """Row of the first sequence of each slot's request, or NOBODY."""
    return arrays.take(state.sequences.group, state.slots.sequence, fill=NOBODY)


def due(state: EngineState, num_rows: Int32[Array, " slots"]) -> Int32[Array, " slots"]:
    """Finds the slots that are forked at the end of the step that feeds `num_rows`.

    Returns:
      The slot that each one is forked from, or NOBODY.
    """
    slots = state.slots
    complete = (slots.num_common > 0) & (
        state.table.length + num_rows == slots.num_common
    )
    ready = arrays.take(complete, slots.source, fill=False)
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

    def fork(state: EngineState, forks: Array) -> EngineState:
        slots, size = state.slots, config.page_size
        pool, table = page_sharing.fork(state.pool, state.table, forks, page_size=size)
        every = jnp.arange(forks.shape[0], dtype=jnp.int32)
        done = jnp.any(forks[:, None] == every[None, :], axis=0)
        slots = slots._replace(
            source=jnp.where(forks >= 0, NOBODY, slots.source),
            num_common=jnp.where(done, 0, slots.num_common),
        )
        return state._replace(pool=pool, table=table, slots=slots)

    state = arrays.when(jnp.any(forks >= 0), fork, state, forks)
    slot = arrays.namers(slots.sequence, s.num_fed.shape[0])
    before, after, rows = (
        arrays.take(x, slot, fill=0) for x in (length, state.table.length, num_rows)
    )
    again = jnp.clip(s.num_fed - before, 0, rows)
    return state._replace(
        sequences=s._replace(
            num_recomputed=s.num_recomputed + again,
            num_fed=jnp.maximum(s.num_fed, after),
        ),
    )


def accept(
    state: EngineState,
    num: Int32[Array, " slots"],
    keep: Int32[Array, " slots"],
    config: EngineConfig,
) -> EngineState:
    """Counts drafts as written, `num` of each slot, and releases what was for others.

    The tokens are known by now. `keep` are token places that each slot holds in any
    case.
    """
    s, before = state.sequences, state.table.length
    state = state._replace(table=page_table.advance(state.table, num))
    state = prefix_caching.keep(state, before, config)
    pool, table = page_table.truncate(
        state.pool, state.table, keep, page_size=config.page_size
    )
    slot = arrays.namers(state.slots.sequence, s.num_fed.shape[0])
    fed = jnp.maximum(s.num_fed, arrays.take(table.length, slot, fill=0))
    return state._replace(pool=pool, table=table, sequences=s._replace(num_fed=fed))


def leave(state: EngineState, gone: Bool[Array, " slots"]) -> EngineState:
    """Lets slots out of the reading for others, before they are emptied.

    The first of those that wait for a slot that leaves goes on in its place, from its
    pages; a slot that nobody waits for any more reads for itself.
    """
    slots, size = state.slots, state.pages.page_size
    every = jnp.arange(gone.shape[0], dtype=jnp.int32)
    source = jnp.where(gone, NOBODY, slots.source)
    orphan = arrays.take(gone, source, fill=False)
    heir = jnp.full_like(every, every.shape[0])
    heir = arrays.put(heir, jnp.where(orphan, source, NOBODY), every, "min")
    heir = arrays.take(heir, source, fill=NOBODY)
    succeeds = orphan & (heir == every)
    left = jnp.where(succeeds, source, NOBODY)
    pool, table = page_sharing.fork(state.pool, state.table, left, page_size=size)
    common = jnp.where(
        succeeds, arrays.take(slots.num_common, source, fill=0), slots.num_common
    )
    source = jnp.where(succeeds, NOBODY, jnp.where(orphan, heir, source))
    followed = arrays.put(jnp.zeros_like(every), source, 1, "add") > 0
    return state._replace(
        pool=pool,
        table=table,
        slots=slots._replace(source=source, num_common=jnp.where(followed, common, 0)),
    )


def groups_in_order(state: EngineState) -> Int32[Array, " order"]:
    """The first place of the same request; its own where the slot is empty."""
    slots = state.slots
    place = jnp.arange(slots.order.shape[0], dtype=jnp.int32)
    group = arrays.take(state.sequences.group, slots.sequence[slots.order], fill=NOBODY)
    # A group of its own for every empty slot; [other place, place].
    group = jnp.where(group >= 0, group, -1 - place)
    alike = group[:, None] == group[None, :]
    return jnp.min(jnp.where(alike, place[:, None], place.size), axis=0)


def first_of_group(state: EngineState) -> Int32[Array, " slots"]:
    """The first slot in order that runs a sequence of the same request, or itself."""
    order = state.slots.order
    return order[groups_in_order(state)][arrays.inverse(order)]


def note_ends(
    state: EngineState,
    begins: Bool[Array, " slots"],
    ends: Bool[Array, " slots"],
    reason: Int32[Array, " slots"],
) -> EngineState:
    """Notes which slots' sequences have got their first token, and which have ended."""
    s, now = state.sequences, state.clock
    slot = arrays.namers(state.slots.sequence, s.status.shape[0])
    begun, ended = (arrays.take(x, slot, fill=False) for x in (begins, ends))
    why = arrays.take(reason, slot, fill=NOT_ENDED)
    return state._replace(
        sequences=s._replace(
            status=jnp.where(ended, FINISHED, s.status),
            reason=jnp.where(ended, why, s.reason),
            first_token=jnp.where(begun[:, None], now[None, :], s.first_token),
            finish=jnp.where(ended[:, None], now[None, :], s.finish),
        )
    )


def note_common(
    state: EngineState,
    preempt: Bool[Array, " order"],
    group: Int32[Array, " order"],
) -> EngineState:
    """Notes how many tokens the sequences of each preempted group have in common.

    The slots are as they were; `preempt` marks places, whole groups, and
    `group` is the first place of each one's request.
    """
    s = state.sequences
    place = jnp.arange(group.shape[0], dtype=jnp.int32)
    others = preempt & (group != place)

    def tokens_of(row: Array) -> Array:
        """Tokens of running sequences; of beams those of their path."""
        if (search := state.search) is None:
            return s.tokens[row]
        beam = (search.width[s.group[row]] > 0) & (
            s.num_tokens[row] > s.prompt_length[row]
        )
        return jnp.where(beam[:, None], search.path[row], s.tokens[row])

    def compare(_: Array, num_common: Array) -> Array:
        row = jnp.maximum(state.slots.sequence[state.slots.order], 0)
        mine, theirs = (tokens_of(x) for x in (row, row[group]))
        known = jnp.minimum(s.num_tokens[row], s.num_tokens[row[group]])
        index = jnp.arange(mine.shape[1], dtype=jnp.int32)[None, :]
        differs = (mine != theirs) | (index >= known[:, None])
        common = jnp.min(jnp.where(differs, index, index.size), axis=1)
        losers = jnp.where(others, s.group[row], NOBODY)
        num_common = arrays.put(num_common, losers, mine.shape[1])
        return arrays.put(num_common, losers, common, "min")

    trips = jnp.any(others).astype(jnp.int32)
    num_common = lax.fori_loop(0, trips, compare, s.num_common)
    return state._replace(sequences=s._replace(num_common=num_common))
