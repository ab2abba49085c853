"""How prompts are read beside those who decode: the four ways there are, as one policy.

    prompts first       whole prompts, and nobody decodes meanwhile: the first vLLM
    mixed               whole prompts, in one step with those who decode: Orca
    chunks              parts of prompts, in steps of their own
    chunks, mixed       parts of prompts, in one step with those who decode: Sarathi

Both switches are arrays, so that all ways share one program. That chunks have steps of
their own is a matter of price alone: in every round a step reads and one decodes, one
after the other, which `step.Apart` says.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv.scheduling import fcfs, interface
from jaxkv.scheduling.interface import Counts, Plan


class Reading(NamedTuple):
    """First come, first served, with a rule on how prompts are read.

    Where prompts are whole, the token budget must have room for the longest one.

    Source: Agrawal et al. 2024 (Sarathi-Serve), arXiv:2403.02310, section 3 and
    algorithms 1 to 3.
    """

    inner: fcfs.FCFS
    whole: Bool[Array, ""]
    """Whether nobody is let in of whose prompt the budget leaves only a part."""
    first: Bool[Array, ""]
    """Whether nobody decodes in a step that reads."""
    max_running: Int32[Array, ""]
    """Sequences that run at once at most, if there are slots for more."""

    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Decides as `FCFS` does, then keeps out whom the rules do."""
        c = interface.skip_unmarked(counts)
        plan = self.inner.plan(c)
        running = jnp.sum(c.running & ~plan.preempt, dtype=jnp.int32)
        slots = jnp.cumsum(c.waiting_slots, dtype=jnp.int32)
        admit = plan.admit & (running + slots <= self.max_running)
        is_whole = plan.head_rows == c.waiting_tokens - c.waiting_cached
        admit &= is_whole | c.waiting_swapped | ~self.whole
        # No request is admitted before an earlier one that is kept out.
        admit = interface.admissible(c, admit)
        head_rows = jnp.where(admit, plan.head_rows, 0)
        reads = c.running & (c.num_tokens - c.length > 1) & (plan.num_rows > 0)
        is_reading = jnp.any(head_rows > 0) | jnp.any(reads)
        stalls = self.first & is_reading & ~reads
        return plan._replace(
            num_rows=jnp.where(stalls, 0, plan.num_rows),
            admit=admit,
            head_places=jnp.where(admit, plan.head_places, 0),
            head_rows=head_rows,
        )


def reading(
    *, whole: bool = False, first: bool = False, max_running: int | None = None
) -> Reading:
    """Makes a `Reading`; by default the one of chunks, mixed.

    So many sequences run at once; None leaves it to the slots.

    Raises:
      ValueError: `max_running` is below 1.
    """
    if max_running is not None and max_running < 1:
        raise ValueError(f"{max_running=} must be at least 1, or None")
    return Reading(
        inner=fcfs.fcfs(),
        whole=jnp.asarray(whole),
        first=jnp.asarray(first),
        max_running=jnp.asarray(max_running or interface.NO_LIMIT, jnp.int32),
    )
