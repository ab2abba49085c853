"""The simulator: the engine's scheduling with a cost model in place of the model."""

from jaxkv.simulation.acceptance import Acceptance
from jaxkv.simulation.contiguous import Reservation
from jaxkv.simulation.costs import DrafterCost, KVTransferred, SerializedPhases
from jaxkv.simulation.member_batch import MemberBatch, ProgramSizes
from jaxkv.simulation.results import SimulationResult
from jaxkv.simulation.state import Capacity, Simulation
from jaxkv.simulation.step import SimulationMember
from jaxkv.simulation.work import Cost, Work

__all__ = [
    "Acceptance",
    "Capacity",
    "Cost",
    "DrafterCost",
    "KVTransferred",
    "MemberBatch",
    "ProgramSizes",
    "Reservation",
    "SerializedPhases",
    "Simulation",
    "SimulationMember",
    "SimulationResult",
    "Work",
    "contiguous",
    "costs",
    "disaggregated",
    "driver",
    "outcomes",
    "state",
    "step",
]
