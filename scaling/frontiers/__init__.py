"""Compute-optimal frontiers: isoFLOP profiles, envelopes, projections."""

from scaling.frontiers.frontier import Frontier as Frontier
from scaling.frontiers.groups import Groups as Groups

__all__ = [
    "Frontier",
    "Groups",
    "best_runs",
    "envelope",
    "find",
    "frontier",
    "groups",
    "isoflop",
    "parabola",
]
