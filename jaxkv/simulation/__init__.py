"""The simulator: the engine's scheduling with a cost model in place of the model."""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.simulation.acceptance import Acceptance
    from jaxkv.simulation.contiguous import (
        RESERVATION_RULES,
        Reservation,
        Rule,
        reservation,
    )
    from jaxkv.simulation.costs import (
        DrafterCost,
        KVTransferred,
        SerializedPhases,
        make_work,
    )
    from jaxkv.simulation.disaggregated import (
        Job,
        PhasePlacement,
        Replica,
        ReplicaRole,
        RequestLoad,
        RequestTiming,
        drop_late_arrivals,
        sample_requests,
        select_requests,
        simulate_jobs,
        simulate_placements,
    )
    from jaxkv.simulation.driver import pad_workload, part_size, simulate, stack
    from jaxkv.simulation.member_batch import MemberBatch, ProgramSizes
    from jaxkv.simulation.outcomes import read_outcomes
    from jaxkv.simulation.results import SimulationResult, Totals
    from jaxkv.simulation.state import Capacity, Simulation, init_simulation
    from jaxkv.simulation.step import (
        SimulatedStep,
        SimulationMember,
        simulate_step,
        simulate_steps,
        simulate_workload,
        upcoming_counts,
    )
    from jaxkv.simulation.work import Cost, Work

__all__, __getattr__, __dir__ = lazy_exports(__name__)
