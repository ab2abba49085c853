"""Scheduling policies: the interface, and the policies of the library."""

from jaxkv.scheduling.attributes import RequestAttributes
from jaxkv.scheduling.interface import (
    NO_LIMIT,
    Counts,
    Plan,
    Policy,
    plan_by,
    plan_in_order,
    schedule,
)
from jaxkv.scheduling.stalls import StallError
from jaxkv.scheduling.static_batching import static

__all__ = [
    "NO_LIMIT",
    "Counts",
    "Plan",
    "Policy",
    "RequestAttributes",
    "StallError",
    "ageing_priority",
    "attributes",
    "chunked_prefill",
    "earliest_deadline",
    "fair_share",
    "fcfs",
    "interface",
    "plan_by",
    "plan_in_order",
    "schedule",
    "shortest_remaining",
    "stalls",
    "static",
    "static_batching",
    "victims",
]
