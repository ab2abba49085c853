"""The scheduler of vLLM's V1 engine: pages by chunks, preemption of the latest."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxkv import validation
from jaxkv.memory import pages_for
from jaxkv.scheduling import interface
from jaxkv.scheduling.interface import BLOCKED, NO_LIMIT, Counts, Plan


class VLLMScheduler(NamedTuple):
    """First come first served, with pages for the tokens of one step at a time.

    Sequences that decode feed one token each; prompts share the remaining token budget
    in order of arrival. Pages are taken for the tokens of the step, not for the whole
    prompt as by `FCFS`, and there is no watermark. If pages run out, the latest
    sequences are preempted and recomputed, and no request is admitted in that step.

    Before vLLM 0.19, a request is admitted if the pages of its first chunk are free.
    Since then, the pages of all its known tokens must be free: the prompt, and the
    answer so far of a preempted request. Pages are taken by chunks under both rules.

    vLLM visits running sequences in order of admission, and so a prompt before a later
    decode. Without `chunk_size` the order is the same: only the last admitted prompt is
    incomplete.

    Source: vllm-project/vllm, `v1/core/sched/scheduler.py`, `Scheduler.schedule`, with
    the policy "fcfs": state of November 2025, and `scheduler_reserve_full_isl` of pull
    request 37307 (March 2026), which is on by default.
    """

    max_running: Int32[Array, ""]
    """Largest number of running sequences: `max_num_seqs`."""
    chunk_size: Int32[Array, ""]
    """Largest number of rows of one prompt in a step:
    `long_prefill_token_threshold`."""
    reserves_prompt: Bool[Array, ""]
    """True if the whole prompt must fit at admission: `scheduler_reserve_full_isl`."""

    overtaking_s = 0.0
    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        """Plans one step."""
        c = interface.skip_unmarked(counts)
        num_rows, head_rows = interface.share_budget(
            c, c.running, c.waiting, self.chunk_size
        )
        feeds = c.running & (num_rows > 0)
        places = jnp.where(feeds, c.length + num_rows, 0)
        missing = pages_for(places, page_size=c.page_size) - c.num_pages
        growth = jnp.where(feeds, jnp.maximum(missing, 0) + c.copies, 0)
        owned = jnp.where(c.running, c.owned_pages, 0)
        total = c.free_pages + jnp.sum(owned, dtype=jnp.int32)
        needed = jnp.cumsum(owned + growth, dtype=jnp.int32)
        runs = interface.keep_first(c, c.running & (needed <= total))
        runs &= ~interface.any_of_group(c, c.running & ~runs)
        preempt = c.running & ~runs

        free = total - jnp.sum(jnp.where(runs, owned + growth, 0), dtype=jnp.int32)
        fed = c.waiting_cached + head_rows
        later = pages_for(c.waiting_tokens, page_size=c.page_size)
        later -= pages_for(fed, page_size=c.page_size)
        is_blocked = c.waiting_pages == BLOCKED
        now = jnp.where(
            is_blocked | c.waiting_swapped, c.waiting_pages, c.waiting_pages - later
        )
        now = jnp.where(c.waiting | is_blocked, jnp.maximum(now, 0), 0)
        num_running = jnp.sum(runs, dtype=jnp.int32)
        num_held = jnp.sum(c.held, dtype=jnp.int32)
        num_free = jnp.minimum(runs.shape[0] - num_held, self.max_running) - num_running
        admit = c.waiting & ~jnp.any(preempt)
        required = jnp.where(self.reserves_prompt, c.waiting_pages, now)
        admit &= jnp.cumsum(now, dtype=jnp.int32) - now + required <= free
        admit &= jnp.cumsum(c.waiting_slots, dtype=jnp.int32) <= num_free
        admit &= (head_rows > 0) | c.waiting_swapped
        admit = interface.admissible(c, admit)
        return Plan(
            preempt=preempt,
            swap=jnp.zeros_like(preempt),
            places=jnp.where(runs, places, 0),
            num_rows=jnp.where(runs, num_rows, 0),
            admit=admit,
            head_places=jnp.where(admit, fed, 0),
            head_rows=jnp.where(admit, head_rows, 0),
        )


type AdmissionRule = Literal["vllm-0.15", "vllm-0.19"]


def vllm_scheduler(
    *,
    max_num_seqs: int | None = None,
    long_prefill_token_threshold: int = 0,
    rule: AdmissionRule = "vllm-0.15",
) -> VLLMScheduler:
    """Makes a `VLLMScheduler`; the arguments have vLLM's names.

    `max_num_batched_tokens` is the token budget of the engine or the simulation.

    Args:
      max_num_seqs: largest number of running sequences, at least 1; None means the
        number of slots.
      long_prefill_token_threshold: largest chunk of a prompt in tokens; 0 means no
        bound except the token budget.
      rule: version whose rule of admission holds. "vllm-0.15" takes the first chunk of
        a prompt, as the servers of `scaling.calibration` did, and "vllm-0.19" takes
        whole prompts only.

    Raises:
      ValueError: a parameter is out of its range.
    """
    if max_num_seqs is None:
        max_num_seqs = NO_LIMIT
    running = validation.integer("max_num_seqs", max_num_seqs, low=1)
    name = "long_prefill_token_threshold"
    chunk = validation.integer(name, long_prefill_token_threshold) or NO_LIMIT
    validation.choice("rule", rule, ("vllm-0.15", "vllm-0.19"))
    return VLLMScheduler(
        max_running=jnp.asarray(running, jnp.int32),
        chunk_size=jnp.asarray(chunk, jnp.int32),
        reserves_prompt=jnp.asarray(rule == "vllm-0.19"),
    )
