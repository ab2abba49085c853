"""What a policy sees and decides, and the policies shipped."""

from jaxkv.scheduling.interface import (
    NO_LIMIT,
    Counts,
    Plan,
    Policy,
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
    "StallError",
    "chunked_prefill",
    "fcfs",
    "interface",
    "plan_in_order",
    "schedule",
    "stalls",
    "static",
    "static_batching",
    "victims",
]
