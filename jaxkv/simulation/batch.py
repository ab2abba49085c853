"""The running batch of a simulation: who has a slot, and the pages that they hold.

Pages are counted, never named. A sequence that was forked shares the pages of its
`common` first tokens with the others of its request; the last of these may be partial,
and is shared until one writes behind `common`.

Where every request has one sequence, `Slots.sharing` is None, and nothing of this is in
the program.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays
from jaxkv.engine import NOBODY
from jaxkv.memory import pages_for


class Sharing(NamedTuple):
    """What sequences of one request have to do with each other."""

    common: Int32[Array, " slots"]
    """Tokens whose pages a sequence shares with others; of one that `reads`, those that
    it feeds for all. 0 for one that is alone."""
    reads: Bool[Array, " slots"]
    """Feeds the common tokens for those that wait."""
    waits: Bool[Array, " slots"]
    """Waits to be forked."""
    forked: Bool[Array, " slots"]
    """Got its common tokens from another one, and did not feed them."""


class Slots(NamedTuple):
    """The slots in order of admission; empty ones may stand between."""

    sequence: Int32[Array, " slots"]
    """Request * max_samples + sample, or NOBODY."""
    length: Int32[Array, " slots"]
    """Tokens whose K and V are written."""
    places: Int32[Array, " slots"]
    """Token places held: `length`, and those reserved ahead."""
    known: Int32[Array, " slots"]
    """Tokens known: prompt and answer so far."""
    fed: Int32[Array, " slots"]
    """Tokens that were fed before it last got its slot, and whose K and V were lost."""
    returned: Bool[Array, " slots"]
    """Preempted before."""
    held: Bool[Array, " slots"] | None
    """Has finished, but keeps its slot and pages; None if the policy holds nobody."""
    sharing: Sharing | None
    block: Int32[Array, " slots"] | None
    """First leaf of its contiguous places; None where there are pages."""


class Split(NamedTuple):
    """Token places of the pages in use, by what they are good for.

    The rest of all places is external: free, or what a contiguous block has beyond the
    places that were reserved.
    """

    tokens: Int32[Array, ""]
    """Hold K and V of running sequences, those of several counted once."""
    reserved: Int32[Array, ""]
    """Will hold some before their sequence ends."""
    internal: Int32[Array, ""]
    """Never will."""


def empty(
    num_slots: int, *, has_groups: bool, holds: bool, has_blocks: bool = False
) -> Slots:
    """Makes empty slots.

    Requests may have several sequences, the policy may hold finished ones, and places
    may be contiguous.
    """

    # A fresh buffer each: the state is donated, and no buffer can be donated twice.
    def zeros() -> Array:
        return jnp.zeros((num_slots,), jnp.int32)

    def flags() -> Array:
        return jnp.zeros((num_slots,), bool)

    return Slots(
        sequence=jnp.full((num_slots,), NOBODY, jnp.int32),
        length=zeros(),
        places=zeros(),
        known=zeros(),
        fed=zeros(),
        returned=flags(),
        held=flags() if holds else None,
        sharing=Sharing(zeros(), flags(), flags(), flags()) if has_groups else None,
        block=zeros() if has_blocks else None,
    )


def is_running(slots: Slots) -> Bool[Array, " slots"]:
    """Says which slots run a sequence."""
    runs = slots.sequence >= 0
    return runs if slots.held is None else runs & ~slots.held


def goal(slots: Slots) -> Int32[Array, " slots"]:
    """Tokens that each sequence has to have fed; 0 if it waits for a fork."""
    s, goal = slots.sharing, slots.known
    if s is not None:
        goal = jnp.where(s.waits, 0, jnp.where(s.reads, s.common, goal))
    return jnp.where(is_running(slots), goal, 0)


class Groups(NamedTuple):
    """Sequences of one request, in slots side by side."""

    first: Int32[Array, " slots"]
    """Place of the first of each; an empty slot stands alone."""
    is_first: Bool[Array, " slots"]

    def any(self, mask: Bool[Array, " slots"]) -> Bool[Array, " slots"]:
        """Marks all of a group of which any is marked."""
        return arrays.over_groups(mask, self.first, "max")

    def total(self, values: Int32[Array, " slots"]) -> Int32[Array, " slots"]:
        """Sums over each group, at all of its places."""
        return arrays.over_groups(values, self.first, "add")

    def before(self, mask: Bool[Array, " slots"]) -> Int32[Array, " slots"]:
        """Counts those of the group that are marked and stand further ahead."""
        before = jnp.cumsum(mask, dtype=jnp.int32) - mask.astype(jnp.int32)
        return before - before[self.first]


def groups(slots: Slots, max_samples: int) -> Groups | None:
    """Finds the groups; None if every sequence is alone."""
    if slots.sharing is None:
        return None
    every = jnp.arange(slots.sequence.shape[0], dtype=jnp.int32)
    there, request = slots.sequence >= 0, slots.sequence // max_samples
    # Where one has ended between two others, there is a gap until ranks are closed.
    last = lax.cummax(jnp.where(there, every, NOBODY))
    last = jnp.concatenate([jnp.full_like(last, NOBODY, shape=(1,)), last[:-1]])
    goes_on = there & (request == arrays.take(request, last, fill=NOBODY))
    is_first = ~goes_on
    first = lax.cummax(jnp.where(there & is_first, every, 0))
    return Groups(jnp.where(there, first, every), is_first)


def num_owned(
    slots: Slots, group: Groups | None, places: Array, page_size: Array
) -> tuple[Int32[Array, " slots"], Int32[Array, " slots"]]:
    """Counts the pages of `places` that each sequence accounts for.

    Pages that a group shares count once: the full ones with the first of its sequences
    of the slots, a partial one with the first of those that have not parted with it.

    Returns:
      The counts, and the pages of each sequence that others account for.
    """
    pages = pages_for(places, page_size=page_size)
    s = slots.sharing
    if s is None or group is None:
        return pages, jnp.zeros_like(pages)
    full = jnp.where(_shares(s) & ~group.is_first, s.common // page_size, 0)
    joint = _is_joint(slots, page_size)
    theirs = full + (joint & (group.before(joint) > 0)).astype(jnp.int32)
    return pages - theirs, theirs


def num_copies(
    slots: Slots, group: Groups | None, wants: Array, page_size: Array
) -> Int32[Array, " slots"]:
    """Says who has to copy the last page before it writes `wants` tokens: 0 or 1.

    All do that leave it another owner, as `page_table.needs_copy` has it.
    """
    if group is None:
        return jnp.zeros_like(wants)
    joint = _is_joint(slots, page_size)
    writes = joint & (wants > 0)
    owners = group.total(joint.astype(jnp.int32))
    return (writes & (group.before(writes) < owners - 1)).astype(jnp.int32)


def split(
    slots: Slots,
    group: Groups | None,
    limit: Int32[Array, " slots"],
    page_size: Array,
    asked: Int32[Array, " slots"] | None = None,
) -> tuple[Split, Int32[Array, ""]]:
    """Says what the places of all pages in use are good for.

    `limit` are the tokens at which each sequence ends, of which the last is never
    written; `asked` the places reserved for each, if its block may have more than
    these.

    Returns:
      The places, and the pages that sharing saves.
    """
    owned, theirs = num_owned(slots, group, slots.places, page_size)
    runs, before = is_running(slots), theirs * page_size
    there = jnp.where(slots.sequence >= 0, owned * page_size, 0)
    if asked is not None:
        there = jnp.minimum(there, asked)

    def within(tokens: Array) -> Array:
        """How many of so many first tokens lie on the pages accounted for."""
        return jnp.where(runs, jnp.clip(tokens - before, 0, there), 0)

    tokens = within(slots.length)
    useful = within(jnp.maximum(limit - 1, slots.length))
    return Split(
        tokens=jnp.sum(tokens, dtype=jnp.int32),
        reserved=jnp.sum(useful - tokens, dtype=jnp.int32),
        internal=jnp.sum(there - useful, dtype=jnp.int32),
    ), jnp.sum(jnp.where(slots.sequence >= 0, theirs, 0), dtype=jnp.int32)


def _shares(sharing: Sharing) -> Bool[Array, " slots"]:
    """Which sequences share pages, or did."""
    return (sharing.common > 0) & ~sharing.reads & ~sharing.waits


def _is_joint(slots: Slots, page_size: Array) -> Bool[Array, " slots"]:
    """Which share a last page that is partial, since they have not written since."""
    s = slots.sharing
    assert s is not None
    return _shares(s) & (slots.length == s.common) & (s.common % page_size > 0)


def feed(
    slots: Slots, group: Groups | None, num_rows: Array
) -> tuple[Slots, Bool[Array, " slots"]]:
    """Writes the rows, and forks those for whom another one has read."""
    length = slots.length + num_rows
    s = slots.sharing
    if s is None or group is None:
        return slots._replace(length=length), jnp.zeros_like(slots.returned)
    complete = group.any(s.reads & (length == s.common))
    forked = s.waits & complete
    return slots._replace(
        length=jnp.where(forked, s.common, length),
        places=jnp.where(forked, s.common, slots.places),
        sharing=s._replace(
            reads=s.reads & ~complete,
            waits=s.waits & ~complete,
            forked=s.forked | forked,
        ),
    ), forked
