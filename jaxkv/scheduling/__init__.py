"""What a policy sees and decides, and the policies shipped."""

from jaxkv.scheduling.interface import NO_LIMIT as NO_LIMIT
from jaxkv.scheduling.interface import Counts as Counts
from jaxkv.scheduling.interface import Plan as Plan
from jaxkv.scheduling.interface import Policy as Policy
from jaxkv.scheduling.interface import schedule as schedule
from jaxkv.scheduling.static_batching import static as static

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
