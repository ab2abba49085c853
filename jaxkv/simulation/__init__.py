"""The engine's schedule without a model, in simulated time."""

from jaxkv.simulation.contiguous import Reservation as Reservation
from jaxkv.simulation.costs import Apart as Apart
from jaxkv.simulation.costs import Received as Received
from jaxkv.simulation.members import Bounds as Bounds
from jaxkv.simulation.members import Members as Members
from jaxkv.simulation.members import Part as Part
from jaxkv.simulation.served import Served as Served
from jaxkv.simulation.state import Capacity as Capacity
from jaxkv.simulation.state import Simulation as Simulation
from jaxkv.simulation.step import Cost as Cost
from jaxkv.simulation.step import Work as Work

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
