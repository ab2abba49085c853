"""The ledger: queue, slots and progress of sequences, as integers.

The engine is a ledger with pages, a model and sampling; the simulator is a ledger with
counted pages and a cost model. Both change it by the functions of this package, so that
a policy meets the same queue, slots and counts in either.

A sequence is an index into the rows of `Ledger.progress` and `Ledger.events`, a request
an index that the owner of the ledger chooses. While a sequence has a slot, its progress
is in `Slots`, and its row is out of date until it is preempted or ends.
"""

import dataclasses
from types import EllipsisType
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation

NO_SEQUENCE = -1
"""Marks an empty slot, and a place in a queue without a request."""


class Fork(NamedTuple):
    """How sequences of one request share the tokens with which all of them begin.

    One sequence feeds these tokens; the other ones wait, and are forked onto its pages
    when it has fed the last of them.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.4.
    """

    reads: Bool[Array, "*n"]
    """True if the sequence feeds the common tokens for those that wait."""
    waits: Bool[Array, "*n"]
    """True if the sequence waits to be forked."""
    num_common: Int32[Array, "*n"]
    """Common tokens of the request; 0 if the sequence shares none."""
    num_given: Int32[Array, "*n"]
    """Tokens of a running sequence that it did not feed itself since it got its slot:
    forked, cached or swapped in."""


class Slots(NamedTuple):
    """The running batch in order of admission; empty slots may lie between."""

    sequence: Int32[Array, "*n"]
    """Sequence of each slot, or `NO_SEQUENCE`."""
    num_tokens: Int32[Array, "*n"]
    """Tokens known: prompt and answer so far."""
    num_fed: Int32[Array, "*n"]
    """Tokens that were fed before the sequence got this slot, and whose K and V were
    lost."""
    num_preempted: Int32[Array, "*n"]
    """Preemptions of the sequence so far."""
    held: Bool[Array, "*n"] | None
    """True if the sequence has finished, but keeps its slot and pages until its batch
    ends; None if the policy holds no slots."""
    fork: Fork | None
    """None if every request has one sequence."""


class SequenceProgress(NamedTuple):
    """Progress of sequences that do not run: the columns of `PROGRESS`."""

    num_tokens: Int32[Array, "*n"]
    """Tokens known: prompt and answer so far; 0 in a row that is not in use."""
    num_fed: Int32[Array, "*n"]
    """Tokens whose K and V were written at some time, lost since or not."""
    num_preempted: Int32[Array, "*n"]
    """Preemptions so far."""
    num_common: Int32[Array, "*n"]
    """Tokens with which all sequences of the request begin."""
    swapped_tokens: Int32[Array, "*n"]
    """Tokens whose K and V are swapped out; 0 if none are."""
    swapped_pages: Int32[Array, "*n"]
    """Pages that hold them; a page of several sequences counts once."""


class SequenceEvents(NamedTuple):
    """Events of sequences: the columns of `EVENTS`."""

    first_s: Int32[Array, "*n"]
    """Clock at the first token: seconds + 1, or 0 before."""
    first_us: Int32[Array, "*n"]
    """Microseconds of that clock."""
    finish_s: Int32[Array, "*n"]
    """Clock at the end: seconds + 1, or 0 before."""
    finish_us: Int32[Array, "*n"]
    """Microseconds of that clock."""
    num_recomputed: Int32[Array, "*n"]
    """Tokens whose K and V were lost to preemption and computed again."""


@dataclasses.dataclass(frozen=True)
class TableLayout[T: (SequenceProgress, SequenceEvents)]:
    """Columns of an integer table that has a row for each sequence.

    A table is one array, since a row of one array is one gather or one write.
    """

    columns: type[T]
    """NamedTuple of the columns, in order."""

    def unpack(self, table: Int32[Array | np.ndarray, "*n fields"]) -> T:
        """Returns all columns."""
        return self.columns(*(self.read(table, x) for x in self.columns._fields))

    def pack(self, columns: T) -> Int32[Array, "*n fields"]:
        """Returns the table of columns."""
        return jnp.stack(columns, axis=-1)

    def read(
        self,
        table: Int32[Array | np.ndarray, "*n fields"],
        column: str,
        row: Int32[Array, "*m"] | EllipsisType = ...,
    ) -> Any:
        """Returns a column, or its entries in some rows."""
        entries: Any = table  # of JAX, or of NumPy on the host
        return entries[row, self.columns._fields.index(column)]

    def write(
        self,
        table: Int32[Array, "sequences fields"],
        row: Int32[Array, " n"],
        **columns: Int32[Array, " n"],
    ) -> Int32[Array, "sequences fields"]:
        """Writes columns of some rows; drops rows out of range, -1 included."""
        return self._put(table, row, columns, "set")

    def add(
        self,
        table: Int32[Array, "sequences fields"],
        row: Int32[Array, " n"],
        **columns: Int32[Array, " n"],
    ) -> Int32[Array, "sequences fields"]:
        """Adds to columns of some rows; drops rows out of range, -1 included."""
        return self._put(table, row, columns, "add")

    def _put(
        self,
        table: Array,
        row: Array,
        columns: dict[str, Array],
        how: Literal["set", "add"],
    ) -> Array:
        names = self.columns._fields
        if len(columns) == len(names):
            return arrays.put(table, row, self.pack(self.columns(**columns)), how)
        for name, values in columns.items():
            table = arrays.put(table, (row, names.index(name)), values, how)
        return table


PROGRESS = TableLayout(SequenceProgress)
EVENTS = TableLayout(SequenceEvents)


class Ledger(NamedTuple):
    """Bookkeeping of one engine or of one simulation."""

    clock: Int32[Array, " 2"]
    """Seconds and microseconds."""
    slots: Slots
    queue: Int32[Array, " places"]
    """Waiting requests, the preempted ones first; `NO_SEQUENCE` beyond them."""
    num_waiting: Int32[Array, ""]
    """Requests in the queue."""
    progress: Int32[Array, "sequences fields"]
    """Table with the layout `PROGRESS`."""
    events: Int32[Array, "sequences fields"]
    """Table with the layout `EVENTS`."""


@validation.checks_numbers(num_places=0, num_sequences=0)
def make_ledger(
    *,
    num_slots: int,
    num_places: int,
    num_sequences: int,
    has_groups: bool,
    holds: bool,
) -> Ledger:
    """Makes an idle ledger; all arguments are static.

    Args:
      num_slots: sequences that can run at once.
      num_places: places in the queue. `num_slots` of them are for preempted requests.
      num_sequences: rows of sequences.
      has_groups: True if a request may have several sequences.
      holds: True if a policy may hold finished sequences.
    """

    # One buffer per field: the state is donated, and no buffer can be donated twice.
    def zeros(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.int32)

    def flags() -> Array:
        return jnp.zeros((num_slots,), bool)

    fork = Fork(flags(), flags(), zeros(num_slots), zeros(num_slots))
    return Ledger(
        clock=zeros(2),
        slots=Slots(
            sequence=jnp.full((num_slots,), NO_SEQUENCE, jnp.int32),
            num_tokens=zeros(num_slots),
            num_fed=zeros(num_slots),
            num_preempted=zeros(num_slots),
            held=flags() if holds else None,
            fork=fork if has_groups else None,
        ),
        queue=jnp.full((num_places,), NO_SEQUENCE, jnp.int32),
        num_waiting=zeros(),
        progress=zeros(num_sequences, len(SequenceProgress._fields)),
        events=zeros(num_sequences, len(SequenceEvents._fields)),
    )


def is_running(slots: Slots) -> Bool[Array, "*n"]:
    """Returns the slots that run a sequence."""
    runs = slots.sequence >= 0
    return runs if slots.held is None else runs & ~slots.held


def is_occupied(slots: Slots) -> Bool[Array, "*n"]:
    """Returns the slots that a sequence runs in or holds."""
    runs = slots.sequence >= 0
    return runs if slots.held is None else runs | slots.held


def num_to_feed(slots: Slots) -> Int32[Array, "*n"]:
    """Tokens that each sequence must have fed before it draws; 0 while it waits."""
    num = slots.num_tokens
    fork = slots.fork
    if fork is not None:
        num = jnp.where(fork.waits, 0, jnp.where(fork.reads, fork.num_common, num))
    return jnp.where(is_running(slots), num, 0)
