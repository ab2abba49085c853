"""Load and latency of systems that keep keys and values in different ways."""

from experiments.serving.latency_vs_rate.runs import Load as Load
from experiments.serving.latency_vs_rate.runs import Setting as Setting

__all__ = ["Load", "Setting", "published", "runs", "settings"]
