"""Policies to compare with: what serving did before continuous batching."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxkv import scheduling, tables


class Static(NamedTuple):
    """Static batching: a batch runs to its end before the next one starts.

    Admits only into an empty engine, reserves the longest sequence for every slot (or
    the whole pool, if it is smaller than that), and a finished sequence keeps slot and
    reservation until the last one ends. Sequences of one request that share its prompt
    take theirs as they grow, from what was left free for them.

    Source: the request-level scheduling that Yu et al. 2022 (Orca), section 3, and
    Kwon et al. 2023, arXiv:2309.06180, section 2.2, compare with.
    """

    holds_finished = True

    def plan(self, counts: scheduling.Counts) -> scheduling.Plan:
        """Runs the batch, or admits the next one."""
        c = counts
        busy = jnp.any(c.running | c.held)
        longest = jnp.asarray(c.max_length, jnp.int32)
        each = tables.pages_for(longest, page_size=c.page_size)
        # A request is never let in if it needs more than the pool, so this serves it.
        each = jnp.clip(each, 1, jnp.maximum(c.free_pages, 1))
        slots = jnp.cumsum(c.waiting_slots, dtype=jnp.int32)
        fits = (slots * each <= c.free_pages) & (slots <= c.running.shape[0])
        first = jnp.arange(slots.shape[0], dtype=jnp.int32) == 0
        admit = c.waiting & ~busy & (fits | first)
        num_rows, head_rows = scheduling.share_budget(
            c, c.running, admit, scheduling.NO_LIMIT
        )
        return scheduling.Plan(
            preempt=jnp.zeros_like(c.running),
            # All but sequences forked since have as many already.
            places=jnp.where(c.running, c.num_tokens, 0),
            num_rows=num_rows,
            admit=admit,
            head_places=jnp.where(admit, jnp.minimum(longest, each * c.page_size), 0),
            head_rows=head_rows,
        )


def static() -> Static:
    """Makes a `Static` policy."""
    return Static()
