"""Scheduling policies: the interface, and the policies of the library."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.scheduling.ageing import ageing_priority
    from jaxkv.scheduling.attributes import (
        ATTRIBUTE_RANGES,
        NO_DEADLINE,
        REQUEST_FIELDS,
        RequestAttributes,
        attribute_columns,
        check_attributes,
        from_fields,
        relative_to_clock,
    )
    from jaxkv.scheduling.deadlines import earliest_deadline
    from jaxkv.scheduling.fair_sharing import fair_share
    from jaxkv.scheduling.first_come import FCFS, fcfs
    from jaxkv.scheduling.interface import (
        BLOCKED,
        NO_LIMIT,
        Counts,
        OrderedQueue,
        Plan,
        Policy,
        QueueKey,
        check_policy,
        holds_finished,
        limit_draft_lengths,
        overtaking_bound_s,
        plan_by,
        plan_in_order,
        schedule,
    )
    from jaxkv.scheduling.linear_scores import (
        ADMISSION_FEATURES,
        MAX_WEIGHT,
        VICTIM_FEATURES,
        LinearScore,
        format_formula,
        linear_score,
    )
    from jaxkv.scheduling.policy_files import (
        IN_ORDER_NAMES,
        POLICY_NAMES,
        check_plan,
        find_eviction,
        find_policy,
        format_linear_score,
    )
    from jaxkv.scheduling.prefill_chunks import ChunkedPrefill, chunked_prefill
    from jaxkv.scheduling.remaining_work import shortest_remaining
    from jaxkv.scheduling.stalls import (
        MAX_STALLED_STEPS,
        StallError,
        StepCounter,
        stall_error,
    )
    from jaxkv.scheduling.static_batching import Static, static
    from jaxkv.scheduling.victims import Victim
    from jaxkv.scheduling.vllm import VLLMScheduler, vllm_scheduler

__all__, __getattr__, __dir__ = lazy_exports(__name__)
