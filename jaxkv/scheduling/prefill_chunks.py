"""Chunked prefill and its alternatives, as one policy with two switches.

    prefill first       whole prompts, in steps without decoding: the first vLLM
    mixed               whole prompts, in steps with decoding: Orca
    chunked             chunks of prompts, in steps of their own
    chunked, mixed      chunks of prompts, in steps with decoding: Sarathi-Serve

Both switches are arrays, so that the four variants share one program. Chunks in steps
of their own differ from mixed steps only in their cost: `simulation.SerializedPhases`
prices each mixed step as a prefill step and a decode step in sequence.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import validation
from jaxkv.scheduling import first_come, interface
from jaxkv.scheduling.interface import Counts, Plan


class ChunkedPrefill(NamedTuple):
    """First come, first served, with a rule for prefill.

    With whole prompts, the token budget must be at least the longest prompt.

    Source: Agrawal et al. 2024 (Sarathi-Serve), arXiv:2403.02310, section 3 and
    algorithms 1 to 3.
    """

    inner: first_come.FCFS
    whole_prompts: Bool[Array, ""]
    """True if a request is admitted only when its whole prompt fits into the budget."""
    first: Bool[Array, ""]
    """True if sequences do not decode in steps with prefill."""
    max_running: Int32[Array, ""]
    """Largest number of running sequences."""

    overtaking_s = 0.0
    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Plans one step by `FCFS`, then applies the rules for prefill."""
        c = interface.skip_unmarked(counts)
        plan = self.inner.plan(c)
        running = jnp.sum(c.running & ~plan.preempt, dtype=jnp.int32)
        slots = jnp.cumsum(c.waiting_slots, dtype=jnp.int32)
        admit = plan.admit & (running + slots <= self.max_running)
        is_whole = plan.head_rows == c.waiting_tokens - c.waiting_cached
        admit &= is_whole | c.waiting_swapped | ~self.whole_prompts
        # No request overtakes an earlier one that is not admitted.
        admit = interface.admissible(c, admit)
        head_rows = jnp.where(admit, plan.head_rows, 0)
        reads = c.running & (c.target_length - c.length > 1) & (plan.num_rows > 0)
        is_reading = jnp.any(head_rows > 0) | jnp.any(reads)
        stalls = self.first & is_reading & ~reads
        return plan._replace(
            num_rows=jnp.where(stalls, 0, plan.num_rows),
            admit=admit,
            head_places=jnp.where(admit, plan.head_places, 0),
            head_rows=head_rows,
        )


@validation.checks_numbers()
def chunked_prefill(
    *, whole_prompts: bool = False, first: bool = False, max_running: int | None = None
) -> ChunkedPrefill:
    """Makes a `ChunkedPrefill` policy; the default is chunked prefill in mixed steps.

    Args:
      whole_prompts: True to prefill whole prompts, not chunks.
      first: True to prefill in steps without decoding.
      max_running: largest number of running sequences; None means the number of slots.

    Raises:
      ValueError: a switch is not a boolean, or `max_running` is below 1.
    """
    validation.boolean("whole_prompts", whole_prompts)
    validation.boolean("first", first)
    return ChunkedPrefill(
        inner=first_come.fcfs(),
        whole_prompts=jnp.asarray(whole_prompts),
        first=jnp.asarray(first),
        max_running=jnp.asarray(max_running or interface.NO_LIMIT, jnp.int32),
    )
