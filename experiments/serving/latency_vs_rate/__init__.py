"""Experiments serving latency vs rate."""

from experiments.serving.latency_vs_rate.runs import Load as Load
from experiments.serving.latency_vs_rate.runs import Setting as Setting

__all__ = [
    "Load",
    "Setting",
    "capacity",
    "published",
    "runs",
    "settings",
]
