"""Request arrivals, lengths and recordings, and serving metrics."""

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
