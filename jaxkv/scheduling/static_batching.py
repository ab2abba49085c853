"""Static batching: the baseline that continuous batching is compared with."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxkv.memory import pages_for
from jaxkv.scheduling import interface


class Static(NamedTuple):
    """Static batching: a batch runs to its end before the next one starts.

    Requests are admitted only to an idle engine. Each slot reserves pages for
    `max_length` tokens, or the whole pool if that is smaller. A finished sequence keeps
    its slot and pages until the last sequence of the batch ends. Forked sequences of a
    request allocate their pages as they grow, from pages left free at admission.

    Source: the baseline of Yu et al. 2022 (Orca), section 3, and of Kwon et al. 2023,
    arXiv:2309.06180, section 2.2 (request-level scheduling).
    """

    overtaking_s = 0.0
    holds_finished = True

    def plan(self, counts: interface.Counts) -> interface.Plan:
        """Plans a step of the batch, or admits the next batch."""
        c = interface.skip_unmarked(counts)
        busy = jnp.any(c.running | c.held)
        longest = jnp.asarray(c.max_length, jnp.int32)
        num_pages = pages_for(longest, page_size=c.page_size)
        # The engine refuses requests that need more than the pool, so this suffices.
        num_pages = jnp.clip(num_pages, 1, jnp.maximum(c.free_pages, 1))
        slots = jnp.cumsum(c.waiting_slots, dtype=jnp.int32)
        fits = (slots * num_pages <= c.free_pages) & (slots <= c.running.shape[0])
        first = jnp.cumsum(c.waiting, dtype=jnp.int32) == 1
        admit = c.waiting & ~busy & (fits | first)
        # Sequences of the first request share the pool, or forks would find no page.
        share = jnp.where(
            first, c.free_pages // jnp.maximum(c.waiting_slots, 1), num_pages
        )
        places = jnp.clip(share, 1, num_pages) * c.page_size
        # Forked sequences, and sequences admitted by another policy, have no reserved
        # pages: those that find none are preempted.
        growth = jnp.cumsum(interface.pages_to_grow(c), dtype=jnp.int32)
        runs = c.running & (growth <= c.free_pages)
        runs &= ~interface.any_of_group(c, c.running & ~runs)
        num_rows, head_rows = interface.share_budget(c, runs, admit, interface.NO_LIMIT)
        return interface.Plan(
            preempt=c.running & ~runs,
            swap=jnp.zeros_like(runs),
            places=jnp.where(runs, c.target_length, 0),
            num_rows=num_rows,
            admit=admit,
            head_places=jnp.where(admit, jnp.minimum(longest, places), 0),
            head_rows=head_rows,
        )


def static() -> Static:
    """Makes a `Static` policy."""
    return Static()
