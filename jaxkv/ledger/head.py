"""The head of the queue, and the `Counts` for a policy from ledger and pages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import validation
from jaxkv.ledger.state import (
    EVENTS,
    NO_SEQUENCE,
    PROGRESS,
    Fork,
    Ledger,
    Slots,
    is_running,
    num_to_feed,
)
from jaxkv.memory import Size, pages_to_resume, pages_to_start
from jaxkv.scheduling import Counts, RequestAttributes, relative_to_clock


class Head(NamedTuple):
    """The requests at the head of the queue, and the slots that they would get."""

    request: Int32[Array, " head"]
    """Waiting requests, or `NO_SEQUENCE`."""
    slots: Slots
    """Slots of shape [head, width]; empty where a request has no sequence to run."""
    is_first: Bool[Array, "head width"]
    """True for the sequence of each request that feeds first."""
    num_slots: Int32[Array, " head"]
    """Sequences of each request."""
    num_common: Int32[Array, " head"]
    """Tokens with which all of them begin; 0 for a request with one sequence."""
    swapped_tokens: Int32[Array, "head width"]
    """Tokens of each sequence that are swapped out."""
    swapped_pages: Int32[Array, " head"]
    """Pages of each request that are swapped out."""

    @property
    def exists(self) -> Bool[Array, "head width"]:
        """True where there is a sequence."""
        return self.slots.sequence >= 0

    @property
    def num_to_feed(self) -> Int32[Array, " head"]:
        """Tokens that the first sequence of each request has to feed."""
        num_tokens = jnp.max(jnp.where(self.exists, self.slots.num_tokens, 0), axis=1)
        return jnp.where(self.num_common > 0, self.num_common, num_tokens)


def look_up_head(
    ledger: Ledger,
    request: Int32[Array, " head"],
    sequence: Int32[Array, "head width"],
    *,
    swaps: bool = True,
) -> Head:
    """Looks up the first requests of the queue.

    Args:
      ledger: the ledger.
      request: its first requests.
      sequence: sequences of each request, or `NO_SEQUENCE`.
      swaps: False if no request is ever swapped out, which leaves it out of the
        program.
    """
    row = jnp.maximum(sequence, 0)
    was = PROGRESS.unpack(ledger.progress[row])
    if not swaps:
        none = jnp.zeros_like(sequence)
        was = was._replace(swapped_tokens=none, swapped_pages=none)
    exists = sequence >= 0
    is_first = exists
    fork = None
    is_swapped = was.swapped_tokens > 0
    if ledger.slots.fork is not None:
        exists &= EVENTS.read(ledger.events, "finish_s", row) == 0
        index = jnp.arange(sequence.shape[1], dtype=jnp.int32)[None, :]
        first = jnp.min(jnp.where(exists, index, index.size), axis=1, keepdims=True)
        is_first = exists & (index == first)
        # Sequences with pages were forked before; the rest wait for the first one.
        waits = exists & ~is_first & ~is_swapped
        reads = is_first & jnp.any(waits, axis=1, keepdims=True)
        several = jnp.sum(exists, axis=1, keepdims=True, dtype=jnp.int32) > 1
        fork = Fork(
            reads=reads,
            waits=waits,
            num_common=jnp.where(several | is_swapped, was.num_common, 0),
            num_given=was.swapped_tokens,
        )
    num_slots = jnp.sum(exists, axis=1, dtype=jnp.int32)
    num_common = jnp.zeros_like(request)
    if fork is not None:
        num_common = jnp.max(jnp.where(exists, was.num_common, 0), axis=1)
        num_common = jnp.where(num_slots > 1, num_common, 0)
    holds = ledger.slots.held is not None
    pages = jnp.where(exists, was.swapped_pages, 0)
    return Head(
        request=request,
        slots=Slots(
            sequence=jnp.where(exists, sequence, NO_SEQUENCE),
            num_tokens=was.num_tokens,
            # K and V that were swapped out are not lost.
            num_fed=jnp.where(is_swapped, 0, was.num_fed),
            num_preempted=was.num_preempted,
            held=jnp.zeros_like(exists) if holds else None,
            fork=fork,
        ),
        is_first=is_first,
        num_slots=num_slots,
        num_common=num_common,
        swapped_tokens=was.swapped_tokens,
        swapped_pages=jnp.sum(pages, axis=1, dtype=jnp.int32),
    )


class PageFacts(NamedTuple):
    """Pages of running sequences: fields of `Counts` with the same names.

    The engine reads them from its page tables, the simulator counts them.
    """

    length: Int32[Array, " slots"]
    num_pages: Int32[Array, " slots"]
    owned_pages: Int32[Array, " slots"]
    owned_tokens: Int32[Array, " slots"]
    swap_pages: Int32[Array, " slots"]
    copies: Int32[Array, " slots"]
    group: Int32[Array, " slots"] | None
    free_pages: Int32[Array, ""]
    free_swap_pages: Int32[Array, ""]


class RequestColumns(NamedTuple):
    """Columns of the requests that a ledger knows, by their indices in it."""

    arrival: Int32[Array, "requests 2"]
    """Seconds and microseconds."""
    limit: Int32[Array, " requests"]
    """Largest length of a sequence of the request, in tokens."""
    attributes: RequestAttributes

    def relative(
        self, request: Int32[Array, " n"], clock: Int32[Array, " 2"]
    ) -> RequestAttributes:
        """Returns attributes of some requests, times relative to the clock."""
        row = jnp.maximum(request, 0)
        attributes = jax.tree.map(
            lambda x: x[row] if jnp.ndim(x) else x, self.attributes
        )
        return relative_to_clock(attributes, self.arrival[row], self.limit[row], clock)


@validation.checks_numbers(token_budget=0)
def observe(
    ledger: Ledger,
    head: Head,
    request: Int32[Array, " slots"],
    requests: RequestColumns,
    facts: PageFacts,
    *,
    num_pages: Size,
    page_size: Size,
    max_length: Size,
    token_budget: Size,
) -> Counts:
    """Returns the `Counts` for a policy.

    Every request in the head is marked as waiting, and none as cached. The owner of the
    ledger replaces these fields where some cannot be admitted yet or have cached pages.

    Args:
      ledger: the ledger.
      head: the head of its queue.
      request: request of each slot.
      requests: columns of the requests.
      facts: pages of the running sequences.
      num_pages: pages in the pool.
      page_size: tokens per page.
      max_length: largest length of a sequence, in tokens.
      token_budget: largest number of tokens fed in a step.
    """
    slots = ledger.slots
    runs = is_running(ledger.slots)
    num_tokens = head.slots.num_tokens
    exists = head.exists
    is_out = head.swapped_pages > 0
    fresh = pages_to_start(num_tokens, head.num_common, exists, page_size=page_size)
    back = pages_to_resume(
        num_tokens,
        head.num_common[:, None],
        head.swapped_tokens,
        head.swapped_pages,
        exists,
        page_size=page_size,
        num_pages=num_pages,
    )
    none = jnp.zeros_like(runs)
    return Counts(
        **facts._asdict(),
        running=runs,
        held=none if slots.held is None else slots.held,
        target_length=num_to_feed(slots),
        preempted=runs & (slots.num_preempted > 0),
        scored_prompt=none,
        waiting=head.request >= 0,
        waiting_tokens=head.num_to_feed,
        waiting_cached=jnp.zeros_like(head.request),
        waiting_slots=head.num_slots,
        waiting_pages=jnp.where(is_out, back, fresh),
        waiting_preempted=jnp.any(exists & (head.slots.num_preempted > 0), axis=1),
        waiting_swapped=is_out,
        waiting_scored_prompt=jnp.zeros_like(is_out),
        page_size=page_size,
        max_length=max_length,
        token_budget=token_budget,
        spare_logit_rows=0,
        attributes=requests.relative(request, ledger.clock),
        waiting_attributes=requests.relative(head.request, ledger.clock),
    )
