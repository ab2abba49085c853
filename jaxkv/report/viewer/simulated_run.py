"""Traces of simulated runs: requests in slots, queue and counted pages."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Int32

from jaxkv import ledger, validation
from jaxkv.engine import FINISH_REASONS, StepInfo, StepPages
from jaxkv.report.viewer.run_trace import RunTrace, TraceRequest
from jaxkv.simulation import (
    SimulatedStep,
    Simulation,
    SimulationMember,
    init_simulation,
    simulate_step,
)

MAX_SIMULATED_STEPS = 5000
"""Largest number of steps of a trace, as many as a page shows."""


class _RecordedStep(NamedTuple):
    """A simulated step with the state after it."""

    info: SimulatedStep
    sequence: Int32[Array, " slots"]
    """Running sequence of each slot after the step, or `NO_SEQUENCE`."""
    held: Bool[Array, " slots"]
    position: Int32[Array, " slots"]
    """Tokens of each slot fed so far."""
    queue: Int32[Array, " places"]


@validation.checks_numbers(max_slots=1)
def record_simulation(
    member: SimulationMember, *, max_slots: int, head: int | None = None
) -> RunTrace:
    """Simulates one member, and returns the trace of its first steps.

    The simulator counts pages, so the trace has no page tables and no texts. Steps
    without a running request and slots that are never used are left out.

    Args:
      member: one simulation, not stacked: requests of one sequence, without chains,
        acceptance and swapping.
      max_slots: largest number of running sequences.
      head: as for `simulate_step`.

    Raises:
      ValueError: the member has chains, acceptance, swapping or requests of several
        sequences, or no request runs.
    """
    workload = member.workload
    if (
        workload.chains is not None
        or member.acceptance is not None
        or int(member.capacity.max_swap_pages) > 0
        or int(np.max(workload.samples)) > 1
    ):
        raise ValueError(
            "member must have requests of one sequence, without chains, acceptance and "
            "swapping"
        )

    def advance(state: Simulation, _: None) -> tuple[Simulation, _RecordedStep]:
        state, info = simulate_step(state, **member._asdict(), head=head)
        slots = state.ledger.slots
        is_running = ledger.is_running(slots)
        return state, _RecordedStep(
            info,
            jnp.where(is_running, slots.sequence, ledger.NO_SEQUENCE),
            ledger.is_occupied(slots) & ~is_running,
            state.pages.position,
            state.ledger.queue,
        )

    state = init_simulation(
        workload,
        member.capacity,
        member.policy,
        max_slots=max_slots,
        head=head,
        reservation=member.reservation,
    )
    run = jax.jit(
        functools.partial(lax.scan, advance, length=MAX_SIMULATED_STEPS // 10)
    )
    parts: list[_RecordedStep] = []
    while len(parts) < 10 and int(state.num_done) < int(state.num_served):
        state, part = run(state, None)
        parts.append(jax.tree.map(np.asarray, part))
    if not parts:
        raise ValueError("member must have a request that fits into the capacity")
    steps = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    # A sequence that ended in a step has left its slot, and has emitted a token.
    request_id = np.where(steps.sequence >= 0, steps.sequence, steps.info.drew)
    is_busy = (request_id >= 0).any(1)
    steps, request_id = jax.tree.map(lambda x: x[is_busy], (steps, request_id))
    num_slots = int(np.flatnonzero((request_id >= 0).any(0))[-1]) + 1
    request_id = request_id[:, :num_slots]
    return _make_trace(steps, request_id, member)


def _make_trace(
    steps: _RecordedStep,
    request_id: Int[np.ndarray, "steps slots"],
    member: SimulationMember,
) -> RunTrace:
    """Makes the trace of the steps in which the requests are in the slots."""
    num_steps, num_slots = request_id.shape
    info = steps.info
    length = np.zeros_like(request_id)  # before the step
    before: dict[int, int] = {}
    positions = steps.position[:, :num_slots]
    for step in range(num_steps):
        now = {}
        for slot in np.flatnonzero(request_id[step] >= 0).tolist():
            request = int(request_id[step, slot])
            length[step, slot] = before.get(request, 0)
            now[request] = int(positions[step, slot])
        before = now
    # JAX arrays, as the fields are declared; `RunTrace` has NumPy arrays.
    requests, lengths, position = map(jnp.asarray, (request_id, length, positions))
    is_running = requests >= 0
    ended = is_running & (jnp.asarray(steps.sequence)[:, :num_slots] < 0)
    zeros = jnp.zeros_like(requests)
    none = jnp.zeros(num_steps, jnp.int32)
    pages = StepPages(
        page_ids=jnp.zeros((num_steps, num_slots, 0), jnp.int32),
        length=lengths,
        ref=zeros[:, :0],
        is_cached=zeros[:, :0] > 0,
        copied_from=zeros - 1,
        copied_to=zeros - 1,
        num_cached=zeros,
        queue=steps.queue,
        queue_swapped=jnp.zeros_like(steps.queue),
    )
    step_info = StepInfo(
        tokens=zeros[:, :, None],
        num_emitted=(jnp.asarray(info.drew)[:, :num_slots] >= 0).astype(jnp.int32),
        logprobs=zeros[:, :, None].astype(jnp.float32),
        sequence=requests,
        request_id=requests,
        sample=zeros,
        reason=ended * FINISH_REASONS.index("length"),
        num_rows=jnp.where(is_running, position - lengths, 0),
        held=jnp.asarray(steps.held)[:, :num_slots],
        num_waiting=info.num_waiting,
        num_preempted=info.num_preempted,
        num_swapped_out=none,
        num_swapped_in=none,
        num_admitted=info.num_admitted,
        num_copied=none,
        used_pages=info.used_pages,
        used_places=info.split.tokens,
        asks_host=none > 0,
        enough=info.enough,
        violations=None,
        used_window_pages=info.used_window_pages,
        pages=pages,
    )
    workload = member.workload
    second = np.array([1.0, 1e-6])
    arrival_s = np.asarray(workload.arrival) @ second
    return RunTrace(
        np.asarray(info.start) @ second,
        jax.tree.map(np.asarray, step_info),
        int(member.capacity.page_size),
        int(member.capacity.num_pages),
        tuple(
            TraceRequest(i, float(arrival_s[i]), int(workload.prompt[i]), "", [""])
            for i in np.unique(request_id[request_id >= 0]).tolist()
        ),
        {},
    )
