"""What a policy sees and decides, and the policies shipped."""

from jaxkv.scheduling.interface import NO_LIMIT, Counts, Plan, Policy, schedule
from jaxkv.scheduling.static_batching import static

__all__ = [
    "NO_LIMIT",
    "Counts",
    "Plan",
    "Policy",
    "chunked_prefill",
    "fcfs",
    "interface",
    "schedule",
    "static",
    "static_batching",
    "victims",
]
