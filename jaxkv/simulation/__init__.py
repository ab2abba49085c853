"""The engine's schedule without a model, in simulated time."""

from jaxkv.simulation.contiguous import Reservation as Reservation
from jaxkv.simulation.state import Capacity as Capacity
from jaxkv.simulation.state import Simulation as Simulation
from jaxkv.simulation.step import Cost as Cost
from jaxkv.simulation.step import Work as Work

__all__ = [
    "Capacity",
    "Cost",
    "Reservation",
    "Simulation",
    "Work",
    "contiguous",
    "outcomes",
    "state",
    "step",
]
