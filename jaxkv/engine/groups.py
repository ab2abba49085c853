"""Groups: sequences of one request, which share the prefill of their common tokens.

All sequences of a request are admitted together, but only one of them feeds the tokens
with which all begin, see `ledger.Fork`. In the step that writes the last of these
tokens the remaining sequences are forked onto its pages, and sequences without further
tokens to feed sample from the same logits. After a preemption by recomputation, all
tokens that the sequences have in common at that time are fed in the same way.

Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, ledger, memory
from jaxkv.engine import paging
from jaxkv.engine.paging import StatePlan
from jaxkv.engine.state import EngineConfig, EngineState, RequestKinds
from jaxkv.ledger import NO_SEQUENCE, Fork, Groups
from jaxkv.memory import advance_lengths


def fork_of(state: EngineState) -> Fork:
    """Returns `Slots.fork` of the running batch, which an engine always has."""
    fork = state.slots.fork
    assert fork is not None  # `state.init` makes one
    return fork


def tokens_to_feed(state: EngineState) -> Int32[Array, " slots"]:
    """Returns the tokens that each slot must have fed in all.

    0 in a slot that is empty or waits for a fork.
    """
    num = ledger.num_to_feed(state.slots)
    if state.search is None:
        return num
    # All beams of a group feed their last token in the same step: beams that are ahead
    # wait.
    slots = state.slots
    s = state.sequences
    fork = fork_of(state)
    group = group_of_slots(state)
    beam = is_beam(state)
    num_tokens = slots.num_tokens
    prompt = arrays.take(s.prompt_length, slots.sequence, fill=0)
    # Before the first fork a group has no beam that is ahead.
    lags = beam & (state.table.length < num_tokens - 1) & (num_tokens > prompt)
    late = jnp.zeros(s.group.shape, bool)
    late = arrays.put(late, jnp.where(lags, group, NO_SEQUENCE), True)
    waits = arrays.take(late, group, fill=False) & beam & ~fork.reads & ~fork.waits
    return num - waits.astype(jnp.int32)


def is_beam(state: EngineState) -> Bool[Array, " slots"]:
    """Returns a mask of the slots that run a beam."""
    sequence = state.slots.sequence
    if state.search is None:
        return jnp.zeros(sequence.shape, bool)
    return arrays.take(state.search.width, group_of_slots(state), fill=0) > 0


def group_of_slots(state: EngineState) -> Int32[Array, " slots"]:
    """Returns the row of the first sequence of each slot's request, or -1."""
    return arrays.take(state.sequences.group, state.slots.sequence, fill=NO_SEQUENCE)


def find_forks(
    state: EngineState, num_rows: Int32[Array, " slots"], kinds: RequestKinds
) -> Int32[Array, " slots"]:
    """Returns the slot that each slot is forked from in this step, or `NO_SEQUENCE`.

    Forks happen at the end of the step that feeds `num_rows` tokens of each slot.
    """
    if not kinds.grouped:
        return jnp.full_like(num_rows, NO_SEQUENCE)
    fork = fork_of(state)
    group = group_of_slots(state)
    complete = fork.reads & (state.table.position + num_rows == fork.num_common)
    slot = jnp.arange(group.shape[0], dtype=jnp.int32)
    # [source, forked slot]
    pairs = (group[:, None] == group[None, :]) & complete[:, None] & fork.waits[None, :]
    return jnp.max(jnp.where(pairs, slot[:, None], NO_SEQUENCE), axis=0)


def advance_and_fork(
    state: EngineState,
    num_rows: Int32[Array, " slots"],
    forks: Int32[Array, " slots"],
    config: EngineConfig,
    kinds: RequestKinds,
    state_plan: StatePlan | None = None,
) -> EngineState:
    """Counts the fed rows as written, and forks the slots of `find_forks`."""
    length = state.table.length
    state = state._replace(table=advance_lengths(state.table, num_rows))
    state = paging.insert_filled_pages(state, length, config)
    state = paging.advance_states(state, state_plan, length, config)
    if not kinds.grouped:
        return state

    def fork(state: EngineState, forks: Array) -> EngineState:
        size = config.page_size
        pool, table = memory.fork(state.pool, state.table, forks, page_size=size)
        slots = ledger.record_forks(state.slots, forks >= 0, table.length)
        state = paging.fork_states(state, forks)
        state = paging.continue_windows(state, forks)
        return state._replace(pool=pool, table=table).with_slots(slots)

    return arrays.update_if(jnp.any(forks >= 0), fork, state, forks)


def accept_drafts(
    state: EngineState,
    num: Int32[Array, " slots"],
    keep: Int32[Array, " slots"],
    state_plan: StatePlan | None,
    config: EngineConfig,
) -> EngineState:
    """Counts accepted drafts as written, and releases pages of rejected drafts.

    Args:
      state: the engine, with the accepted tokens known.
      num: accepted drafts of each slot.
      keep: token places that each slot keeps reserved.
      state_plan: the states of recurrent layers that the step wrote.
      config: the engine's configuration.
    """
    before = state.table.length
    state = state._replace(table=advance_lengths(state.table, num))
    state = paging.insert_filled_pages(state, before, config)
    state = paging.advance_states(state, state_plan, before, config)
    pool, table = memory.truncate(
        state.pool, state.table, keep, page_size=config.page_size
    )
    return state._replace(pool=pool, table=table)


def promote_fork_waiter(
    state: EngineState, leaves: Bool[Array, " slots"]
) -> EngineState:
    """Removes slots from a shared prefill before they are emptied.

    If the sequence that feeds the common tokens is removed, the first waiting sequence
    of its group takes over its pages and continues. A sequence without a waiting one
    feeds its own tokens.

    Args:
      state: the engine.
      leaves: mask of the slots to remove.
    """
    fork = fork_of(state)
    group = group_of_slots(state)
    size = state.pages.page_size
    slot = jnp.arange(leaves.shape[0], dtype=jnp.int32)
    same = (group[:, None] == group[None, :]) & (group >= 0)[None, :]
    reader = jnp.where(same & fork.reads[:, None], slot[:, None], NO_SEQUENCE)
    reader = jnp.max(reader, axis=0)
    waits = fork.waits & ~leaves
    orphan = waits & arrays.take(leaves, reader, fill=False)
    earlier = same & orphan[:, None] & (slot[:, None] < slot[None, :])
    succeeds = orphan & ~jnp.any(earlier, axis=0)
    source = jnp.where(succeeds, reader, NO_SEQUENCE)
    pool, table = memory.fork(state.pool, state.table, source, page_size=size)
    waits &= ~succeeds
    followed = jnp.any(same & waits[:, None], axis=0)
    fork = fork._replace(
        reads=((fork.reads & ~leaves) | succeeds) & followed,
        waits=waits,
        num_given=jnp.where(succeeds, table.length, fork.num_given),
    )
    state = paging.fork_states(state, source)
    state = paging.continue_windows(state, source)
    state = state._replace(pool=pool, table=table)
    return state.with_slots(state.slots._replace(fork=fork))


def num_common(
    state: EngineState, preempted: Bool[Array, " slots"], group: Groups | None
) -> Int32[Array, " slots"]:
    """Returns the length of the common prefix of each preempted group.

    `preempted` marks whole groups. A sequence without a group shares its prompt;
    `group` None means that no sequence has one.
    """
    s = state.sequences
    slots = state.slots
    prompt = arrays.take(s.prompt_length, slots.sequence, fill=0)
    if group is None:
        return prompt
    slot = jnp.arange(preempted.shape[0], dtype=jnp.int32)
    follows = preempted & (group.first != slot)

    def tokens_of(row: Array, num_tokens: Array) -> Array:
        """Returns the tokens of sequences, for beams those of their path."""
        if (search := state.search) is None:
            return s.tokens[row]
        beam = (search.width[s.group[row]] > 0) & (num_tokens > s.prompt_length[row])
        return jnp.where(beam[:, None], search.path[row], s.tokens[row])

    def compare(_: Array, common: Array) -> Array:
        row = jnp.maximum(slots.sequence, 0)
        num = slots.num_tokens
        slot_tokens, first_tokens = (
            tokens_of(row[x], num[x]) for x in (slot, group.first)
        )
        num_tokens = jnp.minimum(num, num[group.first])
        index = jnp.arange(slot_tokens.shape[1], dtype=jnp.int32)[None, :]
        differs = (slot_tokens != first_tokens) | (index >= num_tokens[:, None])
        same = jnp.min(jnp.where(differs, index, index.size), axis=1)
        # The minimum of each group, in all of its slots.
        shortest = jnp.full_like(same, slot_tokens.shape[1])
        shortest = arrays.put(
            shortest, jnp.where(follows, group.first, -1), same, "min"
        )
        several = arrays.put(jnp.zeros_like(follows), group.first, follows, "max")
        return jnp.where(several[group.first], shortest[group.first], common)

    trips = jnp.any(follows).astype(jnp.int32)
    return lax.fori_loop(0, trips, compare, prompt)
