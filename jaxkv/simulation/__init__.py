"""The simulator: the engine's scheduling with a cost model in place of the model."""

from jaxkv.simulation.accepting import Acceptance
from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.costs import Apart, Drafted, Received
from jaxkv.simulation.members import Bounds, Part
from jaxkv.simulation.served import Served
from jaxkv.simulation.state import Capacity, Simulation
from jaxkv.simulation.step import Members
from jaxkv.simulation.work import Cost, Work

__all__ = [
    "Acceptance",
    "Apart",
    "Bounds",
    "Capacity",
    "Cost",
    "Drafted",
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
