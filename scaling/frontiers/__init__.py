"""Compute-optimal frontiers: isoFLOP profiles, envelopes, projections."""

from scaling.frontiers.frontier import Frontier as Frontier
from scaling.frontiers.groups import IsoflopGroups as IsoflopGroups

__all__ = [
    "Frontier",
    "IsoflopGroups",
    "best_runs",
    "envelope",
    "frontier",
    "frontier_set",
    "groups",
    "isoflop",
    "parabola",
]
