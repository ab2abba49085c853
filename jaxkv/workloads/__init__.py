"""Arrivals, lengths and recordings of requests, and metrics of how they were served."""

from jaxkv.workloads.arrivals import Workload as Workload
from jaxkv.workloads.metrics import Objectives as Objectives

__all__ = [
    "Objectives",
    "Workload",
    "arrivals",
    "lengths",
    "metrics",
    "recordings",
]
