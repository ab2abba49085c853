"""State and capacity of a simulation."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxkv import arrays, ledger, validation
from jaxkv.ledger import Ledger
from jaxkv.memory import CONTINUES, EVICTION_RULES, EvictionRule, max_pages
from jaxkv.scheduling import NO_LIMIT, Policy, holds_finished
from jaxkv.simulation import contiguous, counted_pages, sessions
from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.counted_pages import CountedPages, PrefixChains
from jaxkv.simulation.sessions import SessionState
from jaxkv.workloads import Workload

type Bound = int | Int32[Array, "*mapped"]


class Capacity(NamedTuple):
    """Bounds of a simulation, as in `EngineConfig`, as arrays that `vmap` can sweep."""

    num_pages: Int32[Array, ""]
    page_size: Int32[Array, ""]
    max_length: Int32[Array, ""]
    token_budget: Int32[Array, ""]
    max_swap_pages: Int32[Array, ""]
    window: Int32[Array, ""] | None = None
    """Largest window of the model's layers, for their pages in
    `SimulatedStep.used_window_pages`; None does not count them."""
    evict_budget: Int32[Array, ""] | None = None
    """Tokens that stay when tokens are evicted from the cache; None evicts none."""
    evict_limit: Int32[Array, ""] | None = None
    """Tokens in the cache at which an answer's tokens are evicted."""

    @classmethod
    def of(
        cls,
        *,
        num_pages: Bound,
        page_size: Bound = 16,
        max_length: Bound = 2048,
        token_budget: Bound = 2048,
        max_swap_pages: Bound = 0,
        window: Bound | None = None,
    ) -> "Capacity":
        """Makes a `Capacity` of numbers, or of arrays that are mapped.

        Args:
          num_pages: pages in the pool, at least 1.
          page_size: tokens per page, at least 1.
          max_length: largest length of prompt plus answer, at least 2 tokens.
          token_budget: largest number of tokens fed in a step, at least 1.
          max_swap_pages: pages that can be swapped out, at least 0.
          window: largest window of layers whose pages return behind it, at least 1, as
            with `EngineConfig.release_window_pages`; None if none do.

        Raises:
          ValueError: a number is out of range. JAX arrays are not checked.
        """
        bounds = {
            "num_pages": (num_pages, 1),
            "page_size": (page_size, 1),
            "max_length": (max_length, 2),
            "token_budget": (token_budget, 1),
            "max_swap_pages": (max_swap_pages, 0),
        }
        if window is not None:
            bounds["window"] = window, 1
        for name, (value, low) in bounds.items():
            if isinstance(value, bool | float | str):
                raise ValueError(f"{name}={value} must be a whole number")
            if isinstance(value, int) and not low <= value < NO_LIMIT:
                raise ValueError(f"{name}={value} must be in [{low}, {NO_LIMIT})")
        return cls(*(jnp.asarray(value, jnp.int32) for value, _ in bounds.values()))

    def with_eviction(self, evict: EvictionRule, budget: int) -> "Capacity":
        """Returns the bounds of an engine that evicts tokens, without swapping.

        Args:
          evict: rule of KV eviction, as in `EngineConfig`, which determines when tokens
            are evicted; "quest" evicts none and changes nothing.
          budget: tokens that stay, at least 1.

        Raises:
          ValueError: there is no such rule, or the budget is below 1.
        """
        validation.choice("evict", evict, (*EVICTION_RULES, "quest"))
        tokens = jnp.int32(validation.integer("budget", budget, low=1))
        if evict == "quest":  # evicts no token
            return self
        limit = jnp.int32(NO_LIMIT)
        if evict in CONTINUES:
            limit = tokens + self.page_size
        return self._replace(
            max_swap_pages=jnp.zeros_like(self.max_swap_pages),
            evict_budget=tokens,
            evict_limit=limit,
        )


class Simulation(NamedTuple):
    """State of a simulation."""

    ledger: Ledger
    """Queue, slots and progress. The queue has indices into the workload; sequence k of
    request i has row i * max_samples + k."""
    pages: CountedPages
    num_taken: Int32[Array, ""]
    """Requests that have entered the queue so far."""
    num_swapped: Int32[Array, ""]
    """Pages that are swapped out."""
    num_done: Int32[Array, ""]
    """Requests whose sequences have all ended."""
    order: Int32[Array, " requests"]
    """Servable requests in order of arrival, then the rejected ones. Requests that are
    sent after others are between the two."""
    num_served: Int32[Array, ""]
    """Number of servable requests."""
    sessions: SessionState | None = None
    """Requests that are sent after others; None if all arrival times are given."""
    prefixes: PrefixChains | None = None
    """Prefix cache; None without chains."""


@validation.checks_numbers()
def init_simulation(
    workload: Workload,
    capacity: Capacity,
    policy: Policy,
    *,
    max_slots: int,
    max_samples: int = 1,
    head: int | None = None,
    reservation: Reservation | None = None,
) -> Simulation:
    """Makes the state of an idle engine at time 0.

    Args:
      workload: the requests, in order of arrival.
      capacity: bounds. A request that does not fit into an idle engine is rejected, as
        by `engine.submit`, and so are the requests after it.
      policy: the scheduling policy.
      max_slots: largest number of running sequences, static.
      max_samples: largest number of sequences of a request, static.
      head: largest `head` of later calls of `simulate_step`; None means `max_slots`.
      reservation: contiguous reservations in place of pages; None means pages.

    Returns:
      The state. Callers should donate it to `step`.

    Raises:
      ValueError: `policy` is no policy, a size is below 1, or `max_samples` is above 1
        with a reservation. Sequences cannot share contiguous places; use a request for
        each instead.
    """
    validation.instance("policy", policy, Policy)
    w, c = arrays.to_jax_arrays((workload, capacity))
    max_slots = validation.integer("max_slots", max_slots, low=1)
    max_samples = validation.integer("max_samples", max_samples, low=1)
    if head is not None:
        head = validation.integer("head", head, low=1)
    if reservation is not None and max_samples > 1:
        raise ValueError(f"{max_samples=} must be 1 with a contiguous reservation")
    if w.chains is not None and (max_samples > 1 or reservation is not None):
        raise ValueError(
            f"{max_samples=} must be 1 with chains, and pages not contiguous"
        )
    evicts = c.evict_budget is not None
    if evicts and (max_samples > 1 or w.chains is not None or reservation is not None):
        raise ValueError(
            f"{max_samples=} must be 1 with evict, without chains and reservation"
        )
    # Requests that fit into an idle engine.
    shared, sample_pages = max_pages(
        w.prompt, w.prompt + w.output, page_size=c.page_size
    )
    fits = shared + w.samples * sample_pages <= c.num_pages
    length = w.prompt + w.output + (0 if w.context is None else w.context)
    fits &= (length <= c.max_length) & (w.samples <= max_slots)
    fits &= w.samples > 0
    if (r := reservation) is not None:
        num_reserved = contiguous.reserved_places(
            r.rule, w.prompt, w.output, c.max_length
        )
        order = contiguous.block_order(num_reserved, c.page_size)
        fits &= order <= contiguous.largest_order(r.idle)

    rank = None
    if (d := w.dependencies) is not None:
        fits = sessions.reachable_requests(fits, d.after)
        rank = jnp.where(fits, jnp.minimum(d.lane, 0) + 1, 2)

    # One buffer per field: the state is donated, and no buffer can be donated twice.
    def zeros(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.int32)

    books = ledger.make_ledger(
        num_slots=max_slots,
        num_places=max_slots + (head or max_slots),
        num_sequences=w.prompt.shape[0] * max_samples,
        has_groups=max_samples > 1,
        holds=holds_finished(policy),
    )
    prompt = jnp.repeat(w.prompt, max_samples)
    progress = ledger.PROGRESS.unpack(books.progress)
    progress = progress._replace(num_tokens=prompt, num_common=prompt)
    return Simulation(
        ledger=books._replace(progress=ledger.PROGRESS.pack(progress)),
        pages=CountedPages(
            length=zeros(max_slots),
            places=zeros(max_slots),
            block=None if reservation is None else zeros(max_slots),
            evicted=zeros(max_slots) if evicts else None,
        ),
        num_taken=zeros(),
        num_swapped=zeros(),
        num_done=zeros(),
        order=jnp.argsort(~fits if rank is None else rank, stable=True).astype(
            jnp.int32
        ),
        num_served=jnp.sum(fits, dtype=jnp.int32),
        sessions=sessions.init_sessions(w, fits),
        prefixes=counted_pages.init_chains(w),
    )
