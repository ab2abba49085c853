"""First come first served (FCFS): the policy of continuous batching, with variants."""

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import validation
from jaxkv.scheduling import interface, victims
from jaxkv.scheduling.interface import (
    NO_LIMIT,
    Counts,
    OrderedQueue,
    Plan,
    Policy,
    QueueKey,
)


class FCFS(NamedTuple):
    """First come first served: continuous batching with chunked prefill.

    Sequences that decode feed one token each; prompts share the remaining token budget
    in order. A request is admitted with all of its sequences if there are pages for its
    whole prompt. If pages run out, requests are preempted until the rest can grow, and
    no request is admitted in that step. The first running request is never preempted,
    which guarantees progress.

    A rule whose parameter is None is not compiled, which makes the policy several times
    cheaper. Policies with the same rules can be stacked for `vmap`.

    Source: Yu et al. 2022 (Orca); Kwon et al. 2023, arXiv:2309.06180, section 4.5;
    Agrawal et al. 2024, arXiv:2403.02310, algorithm 3 (the budget).
    """

    chunk_size: Int32[Array, ""]
    """Largest number of rows of one prompt in a step, at least 1."""
    watermark: Int32[Array, ""]
    """Pages kept free at admission while any sequence runs, at least 0."""
    victim: Int32[Array, ""] | None
    """Preemption rule, an index into `victims.VICTIM_NAMES`; None means "latest"."""
    swap: Bool[Array, ""] | None
    """True if preempted requests are swapped out as far as the swap space allows."""
    hold: Bool[Array, ""] | None
    """True if new requests wait until all preempted requests have completed."""
    cached_first: Bool[Array, ""] | None
    """True if requests with the most tokens in the prefix cache are admitted first."""

    holds_finished = False

    @property
    def overtaking_s(self) -> float:
        """0, or infinity with `cached_first`."""
        return 0.0 if self.cached_first is None else math.inf

    def plan(self, counts: Counts) -> Plan:
        """Plans one step."""
        counts = interface.skip_unmarked(counts)
        if self.cached_first is None:
            return self._plan(counts)
        plain = self._replace(cached_first=None)
        # The most cached tokens first.
        key = jnp.where(counts.waiting, -counts.waiting_cached, 1)
        key = jnp.where(counts.waiting_preempted, -NO_LIMIT, key)
        key = jnp.where(self.cached_first, key, 0)
        order = jnp.argsort(key, stable=True).astype(jnp.int32)
        return interface.plan_in_order(plain, counts, order)

    def _plan(self, c: Counts) -> Plan:
        """Plans one step, with the waiting requests in order of admission."""
        owned = jnp.where(c.running, c.owned_pages, 0)
        wanted = owned + interface.pages_to_grow(c)
        total = c.free_pages + jnp.sum(owned, dtype=jnp.int32)
        needed = jnp.cumsum(wanted, dtype=jnp.int32)
        if self.victim is not None:
            # Pages needed by a sequence and all that are preempted after it.
            shortage = jnp.sum(wanted, dtype=jnp.int32) - total
            cost = c.owned_tokens
            if self.swap is not None:
                cost = jnp.where(self.swap, c.swap_pages, cost)
            rank = victims.rank_victims(c, self.victim, shortage, wanted, cost)
            sooner = rank[:, None] <= rank[None, :]
            needed = jnp.where(sooner, wanted[:, None], 0)
            needed = jnp.sum(needed, axis=0, dtype=jnp.int32)
        runs = interface.keep_first(c, c.running & (needed <= total))
        runs &= ~interface.any_of_group(c, c.running & ~runs)
        preempt = c.running & ~runs
        # Pages for admission. The watermark does not apply to an idle engine.
        free = total - jnp.sum(jnp.where(runs, wanted, 0), dtype=jnp.int32)
        first = jnp.cumsum(c.waiting, dtype=jnp.int32) == 1
        limit = jnp.where(~jnp.any(runs) & first, free, free - self.watermark)
        num_free_slots = runs.shape[0] - jnp.sum(runs | c.held, dtype=jnp.int32)
        admit = c.waiting & ~jnp.any(preempt)
        if self.hold is not None:
            away = jnp.any(c.running & c.preempted) | jnp.any(c.waiting_preempted)
            admit &= c.waiting_preempted | ~(self.hold & away)
        admit &= jnp.cumsum(c.waiting_pages, dtype=jnp.int32) <= limit
        admit &= jnp.cumsum(c.waiting_slots, dtype=jnp.int32) <= num_free_slots
        # The budget is shared in order, so requests that are blocked below change no
        # rows of earlier requests.
        num_rows, head_rows = interface.share_budget(c, runs, admit, self.chunk_size)
        # A request without rows waits, and so do those after it.
        admit &= (head_rows > 0) | c.waiting_swapped
        admit = interface.admissible(c, admit)
        swap = jnp.zeros_like(preempt)
        if self.swap is not None:
            # In order, while all of their pages fit into the swap space.
            keeps = preempt & self.swap
            pages = jnp.where(keeps, c.swap_pages, 0)
            fits = jnp.cumsum(pages, dtype=jnp.int32) <= c.free_swap_pages
            has_any = interface.any_of_group(c, pages > 0)
            swap = keeps & has_any & ~interface.any_of_group(c, keeps & ~fits)
        return Plan(
            preempt=preempt,
            swap=swap,
            places=jnp.where(runs, c.target_length, 0),
            num_rows=num_rows,
            admit=admit,
            head_places=jnp.where(admit, c.waiting_tokens, 0),
            head_rows=jnp.where(admit, head_rows, 0),
        )


def fcfs(
    *,
    chunk_size: int | None = None,
    watermark: int = 0,
    victim: victims.Victim = "latest",
    preemption: Literal["recompute", "swap"] = "recompute",
    hold_new: bool | None = None,
    cached_first: bool = False,
    stackable: bool = False,
) -> FCFS:
    """Makes an `FCFS` policy.

    Args:
      chunk_size: largest number of rows of one prompt in a step; None means no bound
        except the token budget.
      watermark: pages kept free at admission while any sequence runs.
      victim: preemption rule when pages run out, see `victims.rank_victims`.
      preemption: "recompute" feeds the tokens of preempted requests again; "swap" swaps
        their pages out, as far as `EngineConfig.max_swap_pages` allows.
      hold_new: True if, after a preemption, new requests wait until all preempted ones
        have completed. None means True for "swap" only, as in the paper.
      cached_first: True to admit requests with the most tokens in the prefix cache
        first, among those at the head of the queue. A request with few cached tokens
        can starve while requests with more keep arriving.
      stackable: True to compile every rule, used or not, so that policies with
        different arguments can be stacked and swept by `vmap`.

    Raises:
      ValueError: a parameter is out of its range.
    """
    if chunk_size is None:
        chunk_size = NO_LIMIT
    chunk = validation.integer("chunk_size", chunk_size, low=1)
    watermark = validation.integer("watermark", watermark)
    validation.choice("victim", victim, victims.VICTIM_NAMES)
    validation.choice("preemption", preemption, ("recompute", "swap"))
    hold = preemption == "swap" if hold_new is None else hold_new
    for name, value in (
        ("hold_new", hold),
        ("cached_first", cached_first),
        ("stackable", stackable),
    ):
        validation.boolean(name, value)

    def rule(value: bool) -> Bool[Array, ""] | None:
        return jnp.asarray(value) if value or stackable else None

    place = victims.VICTIM_NAMES.index(victim)
    return FCFS(
        chunk_size=jnp.asarray(chunk, jnp.int32),
        watermark=jnp.asarray(watermark, jnp.int32),
        victim=jnp.asarray(place, jnp.int32) if place or stackable else None,
        swap=rule(preemption == "swap"),
        hold=rule(hold),
        cached_first=rule(cached_first),
    )


def order_queue(key: QueueKey, inner: Policy | None) -> OrderedQueue:
    """Makes an `OrderedQueue`; `inner` None means `fcfs()`.

    Raises:
      ValueError: `inner` is not a policy.
    """
    inner = fcfs() if inner is None else inner
    interface.check_policy(inner, "inner")
    return OrderedQueue(key, inner)
