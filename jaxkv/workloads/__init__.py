"""Arrivals, lengths and recordings of requests, and metrics of how they were served."""

from jaxkv.workloads.arrivals import Workload
from jaxkv.workloads.load_curves import LatencyCurve, Load
from jaxkv.workloads.metrics import Objectives

__all__ = [
    "LatencyCurve",
    "Load",
    "Objectives",
    "Workload",
    "arrivals",
    "dataframes",
    "lengths",
    "load_curves",
    "metrics",
    "recordings",
]
