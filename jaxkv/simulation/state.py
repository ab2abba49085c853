"""The state of a simulation: its bounds, its slots, its queue, what is noted.

A running sequence is known by its slot; of one that left, `progress` keeps what
it needs to come back, and `events` what will be asked of it in the end.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.engine import NOBODY
from jaxkv.memory import demand
from jaxkv.scheduling import NO_LIMIT, interface
from jaxkv.simulation import batch, contiguous
from jaxkv.simulation.batch import Slots
from jaxkv.simulation.contiguous import Reservation
from jaxkv.workloads import Workload

type Bound = int | Int32[Array, "*mapped"]


class Capacity(NamedTuple):
    """The bounds of a simulation, as those of `EngineConfig`, but free to be mapped."""

    num_pages: Int32[Array, ""]
    page_size: Int32[Array, ""]
    max_length: Int32[Array, ""]
    token_budget: Int32[Array, ""]
    max_swap_pages: Int32[Array, ""]

    @classmethod
    def of(
        cls,
        *,
        num_pages: Bound,
        page_size: Bound = 16,
        max_length: Bound = 2048,
        token_budget: Bound = 2048,
        max_swap_pages: Bound = 0,
    ) -> "Capacity":
        """Makes bounds of numbers, or of arrays that are mapped.

        Args:
          num_pages: pages in the pool, at least 1.
          page_size: token places in a page, at least 1.
          max_length: longest sequence, prompt and answer, at least 2 tokens.
          token_budget: rows that a step feeds, at least 1.
          max_swap_pages: pages that can be swapped out, at least 0.

        Raises:
          ValueError: a number is out of its range; arrays are not looked at.
        """
        bounds = {
            "num_pages": (num_pages, 1),
            "page_size": (page_size, 1),
            "max_length": (max_length, 2),
            "token_budget": (token_budget, 1),
            "max_swap_pages": (max_swap_pages, 0),
        }
        for name, (value, least) in bounds.items():
            if isinstance(value, bool | float | str):
                raise ValueError(f"{name}={value} must be a whole number")
            if isinstance(value, int) and not least <= value < NO_LIMIT:
                raise ValueError(f"{name}={value} must be in [{least}, {NO_LIMIT})")
        return cls(*(jnp.asarray(value, jnp.int32) for value, _ in bounds.values()))


class Progress(NamedTuple):
    """How far a sequence had come when it was preempted; zeros before."""

    known: Int32[Array, "*n"]
    """Tokens known: prompt and answer so far."""
    fed: Int32[Array, "*n"]
    """Tokens whose K and V were written at some time."""
    returned: Int32[Array, "*n"]
    """1."""
    swapped_length: Int32[Array, "*n"]
    """Tokens whose K and V are swapped out."""
    swapped_pages: Int32[Array, "*n"]
    """Pages that hold them, those of several sequences counted with one."""
    common: Int32[Array, "*n"]
    """Tokens whose pages it shared, if it is swapped out."""


class Events(NamedTuple):
    """What became of a sequence."""

    first_s: Int32[Array, "*n"]
    """When its first token was drawn: seconds + 1, or 0 before."""
    first_us: Int32[Array, "*n"]
    """And microseconds."""
    finish_s: Int32[Array, "*n"]
    """When it ended: seconds + 1, or 0 before."""
    finish_us: Int32[Array, "*n"]
    num_preempted: Int32[Array, "*n"]
    """Times that it was preempted."""
    num_recomputed: Int32[Array, "*n"]
    """Tokens whose K and V were lost and computed again."""


class Simulation(NamedTuple):
    """All that a step changes."""

    clock: Int32[Array, " 2"]
    slots: Slots
    began: Bool[Array, " slots"]
    """Who drew its first token in the last step."""
    ended: Bool[Array, " slots"]
    """Who drew its last. Both are noted in the next step, whose clock says when."""
    left: Int32[Array, " slots"]
    """Sequences that were preempted in the last step, or NOBODY."""
    left_with: Int32[Array, "slots fields"]
    """Their progress. It is written in the next step, before anything is read: after
    that, XLA would copy all of it in every step."""
    queue: Int32[Array, " waiting"]
    """Requests that wait, the preempted ones first; NOBODY beyond."""
    num_taken: Int32[Array, ""]
    """Requests that have entered the queue."""
    num_swapped: Int32[Array, ""]
    """Pages that are swapped out."""
    num_done: Int32[Array, ""]
    """Requests of which every sequence has ended."""
    progress: Int32[Array, "sequences fields"]
    """A row of `Progress` for each."""
    events: Int32[Array, "sequences fields"]
    """A row of `Events` for each."""
    order: Int32[Array, " requests"]
    """Requests that can be served, in order of arrival; then the rejected ones."""
    num_served: Int32[Array, ""]
    """How many can."""


class Queued(NamedTuple):
    """Sequences of the requests at the head of the queue, as they would have slots.

    All but `request` and `pages_out` of shape [head, samples].
    """

    request: Int32[Array, " head"]
    slots: Slots
    """NOBODY where a sequence has ended, or is none."""
    is_reader: Bool[Array, "head samples"]
    """Who feeds first for the request."""
    pages_out: Int32[Array, " head"]
    """Pages that are swapped out."""
    swapped_length: Int32[Array, "head samples"]
    is_seen: Bool[Array, " head"]
    """Requests that the policy sees."""

    @property
    def size(self) -> Int32[Array, " head"]:
        """Sequences of each request that have not ended."""
        return jnp.sum(self.slots.sequence >= 0, axis=1, dtype=jnp.int32)


def init(
    workload: Workload,
    capacity: Capacity,
    policy: interface.Policy,
    *,
    max_slots: int,
    max_samples: int = 1,
    head: int | None = None,
    reservation: Reservation | None = None,
) -> Simulation:
    """Makes an idle engine, its clock at zero.

    Args:
      workload: the requests, in order of arrival.
      capacity: bounds. A request that they do not let in even alone is rejected, as
        `submit` does: nothing is ever recorded of it.
      policy: who will run.
      max_slots: sequences that can run at once, static.
      max_samples: sequences that a request may have, static.
      head: the largest for which `step` will be called.
      reservation: contiguous places for each request, in place of pages.

    Returns:
      The state; donate it to the programs that step it.

    Raises:
      ValueError: a size is below 1; or several sequences of a request, which share
        nothing in contiguous places: let them be requests.
    """
    w, c = arrays.on_device((workload, capacity))
    max_slots = validation.integer("max_slots", max_slots, low=1)
    max_samples = validation.integer("max_samples", max_samples, low=1)
    if head is not None:
        head = validation.integer("head", head, low=1)
    if reservation is not None and max_samples > 1:
        raise ValueError(f"{max_samples=} must be 1 where places are contiguous")
    # Requests that an idle engine could serve.
    shared, own = demand.at_most(w.prompt, w.prompt + w.output, page_size=c.page_size)
    fits = shared + w.samples * own <= c.num_pages
    fits &= (w.prompt + w.output <= c.max_length) & (w.samples <= max_slots)
    fits &= w.samples > 0
    if (r := reservation) is not None:
        asked = contiguous.asked(r.rule, w.prompt, w.output, c.max_length)
        order = contiguous.order_of(asked, c.page_size)
        fits &= order <= contiguous.largest(r.idle)
    num = w.prompt.shape[0] * max_samples

    # A fresh buffer each: the state is donated, and no buffer can be donated twice.
    def zero() -> Array:
        return jnp.zeros((), jnp.int32)

    def nobody() -> Array:
        return jnp.zeros((max_slots,), bool)

    return Simulation(
        clock=jnp.zeros((2,), jnp.int32),
        slots=batch.empty(
            max_slots,
            has_groups=max_samples > 1,
            holds=policy.holds_finished,
            has_blocks=reservation is not None,
        ),
        began=nobody(),
        ended=nobody(),
        left=jnp.full((max_slots,), NOBODY, jnp.int32),
        left_with=jnp.zeros((max_slots, len(Progress._fields)), jnp.int32),
        queue=jnp.full((max_slots + (head or max_slots),), NOBODY, jnp.int32),
        num_taken=zero(),
        num_swapped=zero(),
        num_done=zero(),
        progress=jnp.zeros((num, len(Progress._fields)), jnp.int32),
        events=jnp.zeros((num, len(Events._fields)), jnp.int32),
        order=jnp.argsort(~fits, stable=True).astype(jnp.int32),
        num_served=jnp.sum(fits, dtype=jnp.int32),
    )
