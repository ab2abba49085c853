"""Policies to compare with: what serving did before continuous batching."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxkv.memory import demand
from jaxkv.scheduling import interface


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

    def plan(self, counts: interface.Counts) -> interface.Plan:
        """Runs the batch, or admits the next one."""
        c = interface.skip_unmarked(counts)
        busy = jnp.any(c.running | c.held)
        longest = jnp.asarray(c.max_length, jnp.int32)
        each = demand.pages_for(longest, page_size=c.page_size)
        # A request is never let in if it needs more than the pool, so this serves it.
        each = jnp.clip(each, 1, jnp.maximum(c.free_pages, 1))
        slots = jnp.cumsum(c.waiting_slots, dtype=jnp.int32)
        fits = (slots * each <= c.free_pages) & (slots <= c.running.shape[0])
        first = jnp.cumsum(c.waiting, dtype=jnp.int32) == 1
        admit = c.waiting & ~busy & (fits | first)
        # Its own sequences have their pages, but not those forked since, nor those that
        # another policy let in: whoever of these finds none is preempted and waits.
        growth = jnp.cumsum(interface.missing_pages_of_running(c), dtype=jnp.int32)
        runs = c.running & (growth <= c.free_pages)
        runs &= ~interface.any_of_group(c, c.running & ~runs)
        num_rows, head_rows = interface.share_budget(c, runs, admit, interface.NO_LIMIT)
        return interface.Plan(
            preempt=c.running & ~runs,
            swap=jnp.zeros_like(runs),
            places=jnp.where(runs, c.num_tokens, 0),
            num_rows=num_rows,
            admit=admit,
            head_places=jnp.where(admit, jnp.minimum(longest, each * c.page_size), 0),
            head_rows=head_rows,
        )


def static() -> Static:
    """Makes a `Static` policy."""
    return Static()
