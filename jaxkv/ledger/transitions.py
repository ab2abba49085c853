"""Changes of a ledger in one step: preemption, admission, forks, tokens, ends."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, PyTree

from jaxkv import arrays, validation
from jaxkv.ledger.groups import Groups
from jaxkv.ledger.head import Head
from jaxkv.ledger.state import (
    EVENTS,
    NO_SEQUENCE,
    PROGRESS,
    Ledger,
    SequenceEvents,
    SequenceProgress,
    Slots,
    is_occupied,
    is_running,
)
from jaxkv.memory import Size
from jaxkv.scheduling import Plan


class Preemption(NamedTuple):
    """Preempted sequences, which `admit` returns to the queue."""

    sequence: Int32[Array, " slots"]
    """Preempted sequence of each slot, or `NO_SEQUENCE`."""
    progress: Int32[Array, "slots fields"]
    """Rows of `Ledger.progress`."""
    request: Int32[Array, " slots"]
    """Preempted requests, each once, in order of slots, or `NO_SEQUENCE`."""


def preempt_groups(plan: Plan, slots: Slots, group: Groups | None) -> Plan:
    """Widens preemption and swapping of a plan to all running sequences of a request.

    `group` are the groups of the slots; None if every request has one sequence.
    """
    if group is None:
        return plan
    runs = is_running(slots)
    return plan._replace(
        preempt=group.any(plan.preempt) & runs, swap=group.any(plan.swap) & runs
    )


def preempt(
    ledger: Ledger,
    is_preempted: Bool[Array, " slots"],
    request: Int32[Array, " slots"],
    group: Groups | None,
    *,
    length: Int32[Array, " slots"],
    num_common: Int32[Array, " slots"],
    swapped_pages: Int32[Array, " slots"],
    is_swapped: Bool[Array, " slots"],
) -> tuple[Ledger, Preemption]:
    """Preempts whole requests: frees their slots and records their progress.

    Args:
      ledger: the ledger.
      is_preempted: slots of the preempted sequences.
      request: request of each slot.
      group: the groups of the slots; None if every request has one sequence.
      length: tokens of each sequence whose K and V are written.
      num_common: tokens with which all sequences of each one's request begin.
      swapped_pages: pages of each sequence that are swapped out, shared ones once.
      is_swapped: sequences that are swapped out; the rest are recomputed.

    Returns:
      The new ledger, and the sequences that `admit` puts back.
    """
    slots = ledger.slots
    index = jnp.where(is_preempted, slots.sequence, NO_SEQUENCE)
    progress = SequenceProgress(
        num_tokens=slots.num_tokens,
        num_fed=jnp.maximum(slots.num_fed, length),
        num_preempted=slots.num_preempted + 1,
        num_common=num_common,
        swapped_tokens=jnp.where(is_swapped, length, 0),
        swapped_pages=jnp.where(is_swapped, swapped_pages, 0),
    )
    again = num_recomputed(slots, length)
    first = is_preempted if group is None else is_preempted & group.is_first
    return ledger._replace(
        slots=slots._replace(
            sequence=jnp.where(is_preempted, NO_SEQUENCE, slots.sequence)
        ),
        events=EVENTS.add(ledger.events, index, num_recomputed=again),
    ), Preemption(
        index, PROGRESS.pack(progress), jnp.where(first, request, NO_SEQUENCE)
    )


def num_recomputed(
    slots: Slots, length: Int32[Array, " slots"]
) -> Int32[Array, " slots"]:
    """Returns the tokens that each sequence has recomputed since it got its slot."""
    num_given = 0 if slots.fork is None else slots.fork.num_given
    return jnp.maximum(jnp.minimum(length, slots.num_fed) - num_given, 0)


class SlotPlan(NamedTuple):
    """A plan by slot, see `scheduling.Plan`."""

    places: Int32[Array, "*n"]
    """Token places to reserve in all; 0 leaves the reservation unchanged."""
    num_rows: Int32[Array, "*n"]
    """Tokens to feed, drafts excluded."""
    drafts: Int32[Array, "*n"] | None
    """Drafts to feed after these tokens and places; None without speculation."""

    def within(self, token_budget: Size) -> "SlotPlan":
        """Returns the plan with rows that fit into the budget.

        If they exceed it, each sequence feeds at most one token, and no drafts.
        """
        rows = self.num_rows
        drafts = self.drafts
        total = rows if drafts is None else rows + drafts
        exceeds = jnp.sum(total, dtype=jnp.int32) > token_budget
        return self._replace(
            num_rows=jnp.where(exceeds, jnp.minimum(rows, 1), rows),
            drafts=None if drafts is None else jnp.where(exceeds, 0, drafts),
        )


class Admission(NamedTuple):
    """Slots after preemption and admission."""

    plan: SlotPlan
    carried: PyTree[Array]
    """Further columns of the slots, which moved as these do."""
    source: Int32[Array, " slots"]
    """Index into the slots before, then the flat head, that each slot was filled from;
    `NO_SEQUENCE` if it is empty."""
    admitted: Bool[Array, " head"]
    """Requests that got slots."""
    swapped_in: Bool[Array, " head"]
    """Requests among them that were swapped out."""
    pages_in: Int32[Array, ""]
    """Pages of these requests."""


@validation.checks_numbers(free_pages=0)
def admit(
    ledger: Ledger,
    head: Head,
    plan: Plan,
    preempted: Preemption,
    *,
    ready: Bool[Array, " head"],
    free_pages: Size,
    carried: tuple[PyTree[Array], PyTree[Array]] = ((), ()),
) -> tuple[Ledger, Admission]:
    """Admits requests: assigns slots to their sequences, and closes gaps.

    Running sequences move to the lowest slot indices, in order; admitted ones follow.
    Requests that are swapped out are admitted only if there are free pages for all of
    them. A request without slots for all of its sequences is not admitted. Preempted
    requests are put at the front of the queue.

    Args:
      ledger: the ledger, preempted sequences removed.
      head: the head of the queue, before any request was put back.
      plan: the plan for these slots and this head.
      preempted: the preempted sequences, see `preempt`.
      ready: requests that can be admitted.
      free_pages: pages of the pool that are free after the preemption.
      carried: a tree of columns of the slots, and one of [head, width] for the head.

    Returns:
      The new ledger, and the new slots.
    """
    slots = ledger.slots
    num = ledger.slots.sequence.shape[0]
    admitted = plan.admit & ready
    is_out = head.swapped_pages > 0
    pages_in = jnp.sum(jnp.where(admitted, head.swapped_pages, 0), dtype=jnp.int32)
    fits = pages_in <= free_pages
    pages_in = jnp.where(fits, pages_in, 0)
    admitted &= fits | ~is_out
    stays = is_occupied(slots)
    num_free = num - jnp.sum(stays, dtype=jnp.int32)
    wanted = jnp.cumsum(jnp.where(admitted, head.num_slots, 0), dtype=jnp.int32)
    admitted &= wanted <= num_free
    comes = admitted[:, None] & head.exists
    source = arrays.marked_indices(jnp.concatenate([stays, comes.ravel()]), num)
    # Only the first sequence of a request feeds; none of one that is swapped in.
    leads = head.is_first & ~is_out[:, None]
    head_plan = SlotPlan(
        places=jnp.where(leads, plan.head_places[:, None], 0),
        num_rows=jnp.where(leads, plan.head_rows[:, None], 0),
        drafts=None if plan.drafts is None else jnp.zeros_like(leads, jnp.int32),
    )
    # Rows of a table: one gather, in place of one for each column.
    slot_plan = SlotPlan(plan.places, plan.num_rows, plan.drafts)
    old, kind = jax.tree.flatten((slots, slot_plan, carried[0]))
    new = jax.tree.leaves((head.slots, head_plan, carried[1]))
    columns = [
        jnp.concatenate([x, y.ravel()]).astype(jnp.int32)
        for x, y in zip(old, new, strict=True)
    ]
    rows = jnp.where((source >= 0)[:, None], jnp.stack(columns, axis=1)[source], 0)
    taken = [rows[:, k].astype(x.dtype) for k, x in enumerate(old)]
    slots, slot_plan, moved = jax.tree.unflatten(kind, taken)
    sequence = jnp.where(source >= 0, slots.sequence, NO_SEQUENCE)
    # A barrier before all readers of the rows: else XLA copies the table for the write.
    progress, sequence = lax.optimization_barrier((ledger.progress, sequence))
    progress = arrays.put(progress, preempted.sequence, preempted.progress)
    left = jnp.where(admitted, NO_SEQUENCE, head.request)
    back = preempted.request
    queue = jnp.concatenate([back, left, ledger.queue[admitted.shape[0] :]])
    num_back = jnp.sum(back >= 0, dtype=jnp.int32)
    num_left = jnp.sum(admitted, dtype=jnp.int32)
    ledger = ledger._replace(
        slots=slots._replace(sequence=sequence),
        progress=progress,
        queue=arrays.compact_ids(queue, ledger.queue.shape[0]),
        num_waiting=ledger.num_waiting + num_back - num_left,
    )
    swapped_in = admitted & is_out
    return ledger, Admission(slot_plan, moved, source, admitted, swapped_in, pages_in)


def record_forks(
    slots: Slots, forked: Bool[Array, " slots"], length: Int32[Array, " slots"]
) -> Slots:
    """Records which sequences were forked onto the pages of their group's first one.

    `length` are the written tokens, those of this step included.
    """
    if (f := slots.fork) is None:
        return slots
    return slots._replace(
        fork=f._replace(
            reads=f.reads & (length != f.num_common),
            waits=f.waits & ~forked,
            num_given=jnp.where(forked, f.num_common, f.num_given),
        )
    )


def note_events(
    ledger: Ledger,
    begins: Bool[Array, " slots"],
    ended: Bool[Array, " slots"],
    length: Int32[Array, " slots"],
) -> Ledger:
    """Records first tokens and ends at the time of the ledger's clock.

    Args:
      ledger: the ledger.
      begins: sequences that emitted their first token.
      ended: sequences that emitted their last token.
      length: tokens of each sequence whose K and V are written.
    """
    slots = ledger.slots
    now = ledger.clock
    events = SequenceEvents(
        first_s=jnp.where(begins, now[0] + 1, 0),
        first_us=jnp.where(begins, now[1], 0),
        finish_s=jnp.where(ended, now[0] + 1, 0),
        finish_us=jnp.where(ended, now[1], 0),
        num_recomputed=jnp.where(ended, num_recomputed(slots, length), 0),
    )
    index = jnp.where(begins | ended, slots.sequence, NO_SEQUENCE)
    return ledger._replace(events=EVENTS.add(ledger.events, index, **events._asdict()))


def retire(
    slots: Slots, ended: Bool[Array, " slots"]
) -> tuple[Slots, Bool[Array, " slots"]]:
    """Empties the slots of ended sequences, at once or when the whole batch has ended.

    Returns:
      The new slots, and which of them were emptied.
    """
    if (held := slots.held) is None:
        is_retired = ended
    else:
        finished = held | ended
        is_done = ~jnp.any(is_running(slots) & ~ended)
        is_retired = finished & is_done
        held = finished & ~is_done
    sequence = jnp.where(is_retired, NO_SEQUENCE, slots.sequence)
    return slots._replace(sequence=sequence, held=held), is_retired
