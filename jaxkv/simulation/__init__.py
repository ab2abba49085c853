"""The engine's schedule without a model, in simulated time."""

from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.costs import Apart, Received
from jaxkv.simulation.members import Bounds, Members, Part
from jaxkv.simulation.served import Served
from jaxkv.simulation.state import Capacity, Simulation
from jaxkv.simulation.step import Cost, Work

__all__ = [
    "Apart",
    "Bounds",
    "Capacity",
    "Cost",
    "Members",
    "Part",
    "Received",
    "Reservation",
    "Served",
    "Simulation",
    "Work",
    "contiguous",
    "costs",
    "disaggregated",
    "driver",
    "outcomes",
    "state",
    "step",
]
