"""A policy of continuous batching with chunked prefill and preemption."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxkv import Counts, Plan


class ContinuousBatching(NamedTuple):
    """First come, first served, with a token budget for each step."""

    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Plans one step."""
        # SOLUTION
        c = counts

        def running_sum(x):
            return jnp.cumsum(x, dtype=jnp.int32)

        # Pages: the sequences admitted first keep theirs and grow.
        pages = -(-c.target_length // c.page_size)
        new_pages = jnp.where(c.running, jnp.maximum(pages - c.num_pages, 0), 0)
        wanted = jnp.where(c.running, c.num_pages, 0) + new_pages
        total = c.free_pages + jnp.sum(
            jnp.where(c.running, c.num_pages, 0), dtype=jnp.int32
        )
        runs = c.running & (running_sum(wanted) <= total)
        preempt = c.running & ~runs
        # Rows: each decoding sequence feeds a token, and prompts share the rest.
        need = jnp.where(runs, c.target_length - c.length, 0)
        is_decoding = need == 1
        left = c.token_budget - jnp.sum(is_decoding, dtype=jnp.int32)
        prompts = jnp.concatenate(
            [
                jnp.where(is_decoding, 0, need),
                jnp.where(c.waiting, c.waiting_tokens, 0),
            ]
        )
        rows = jnp.clip(left - (running_sum(prompts) - prompts), 0, prompts)
        num_slots = c.running.shape[0]
        head_rows = rows[num_slots:]
        # Admission: in order, up to the first request that does not fit.
        free = total - jnp.sum(jnp.where(runs, wanted, 0), dtype=jnp.int32)
        num_free_slots = num_slots - jnp.sum(runs, dtype=jnp.int32)
        fits = c.waiting & (head_rows > 0) & ~jnp.any(preempt)
        fits &= running_sum(c.waiting_pages) <= free
        fits &= running_sum(c.waiting_slots) <= num_free_slots
        admit = jnp.cumprod(fits, dtype=jnp.int32) == 1
        return Plan(
            preempt=preempt,
            swap=jnp.zeros_like(preempt),
            places=jnp.where(runs, c.target_length, 0),
            num_rows=rows[:num_slots] + is_decoding.astype(jnp.int32),
            admit=admit,
            head_places=jnp.where(admit, c.waiting_tokens, 0),
            head_rows=jnp.where(admit, head_rows, 0),
        )
        # END
