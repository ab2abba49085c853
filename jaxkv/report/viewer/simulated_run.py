"""Traces of simulated runs: requests in slots, queue and counted pages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int

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

_STEPS_PER_CALL = 500
_MAX_CALLS = 10


@validation.checks_numbers(max_slots=1)
def record_simulation(
    member: SimulationMember, *, max_slots: int, head: int | None = None
) -> RunTrace:
    """Simulates one member, and returns the trace of its first 5,000 steps.

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
    w = member.workload
    has_more = w.chains is not None or member.acceptance is not None
    if has_more or int(member.capacity.max_swap_pages) or int(np.max(w.samples)) > 1:
        raise ValueError(
            "member must have requests of one sequence, without chains, acceptance and "
            "swapping"
        )

    member = jax.tree.map(jnp.asarray, member)  # its numbers may be NumPy's

    def advance(state: Simulation, _: None) -> tuple[Simulation, Any]:
        state, info = simulate_step(state, **member._asdict(), head=head)
        slots = state.ledger.slots
        is_running = ledger.is_running(slots)
        after = jnp.where(is_running, slots.sequence, ledger.NO_SEQUENCE)
        held = (ledger.is_occupied(slots) & ~is_running).astype(jnp.int32)
        by_slot = after, held, state.pages.position, info.drew
        return state, (info, jnp.stack(by_slot), state.ledger.queue)

    state = init_simulation(
        w,
        member.capacity,
        member.policy,
        max_slots=max_slots,
        head=head,
        reservation=member.reservation,
    )
    run = jax.jit(functools.partial(lax.scan, advance, length=_STEPS_PER_CALL))
    calls = []
    while len(calls) < _MAX_CALLS and int(state.num_done) < int(state.num_served):
        state, call = run(state, None)
        calls.append(jax.tree.map(np.asarray, call))
    if not calls:
        raise ValueError("member must have a request that fits into the capacity")
    return _make_trace(member, *jax.tree.map(lambda *x: np.concatenate(x), *calls))


def _make_trace(
    member: SimulationMember,
    info: SimulatedStep,
    by_slot: Int[np.ndarray, "steps 4 slots"],
    queue: Int[np.ndarray, "steps places"],
) -> RunTrace:
    """Makes the trace from what `record_simulation` records of each step."""
    # A sequence that ended in a step has left its slot, and has emitted a token.
    request_id = np.where(by_slot[:, 0] >= 0, by_slot[:, 0], by_slot[:, 3])
    is_busy = (request_id >= 0).any(1)
    info, by_slot, queue = jax.tree.map(lambda x: x[is_busy], (info, by_slot, queue))
    num_slots = int(np.flatnonzero((request_id >= 0).any(0))[-1]) + 1
    request_id = request_id[is_busy, :num_slots]
    after, held, position, drew = by_slot[:, :, :num_slots].swapaxes(0, 1)
    is_running = request_id >= 0
    length = np.zeros_like(position)  # before each step; slots may move
    for step in range(1, len(length)):
        is_same = request_id[step][:, None] == request_id[step - 1]
        is_same &= is_running[step][:, None]
        length[step] = is_same @ position[step - 1]
    zeros = np.zeros_like(position)
    pages = StepPages(
        page_ids=zeros[:, :, None][:, :, :0],
        length=length,
        ref=zeros[:, :0],
        is_cached=zeros[:, :0] > 0,
        copied_from=zeros - 1,
        copied_to=zeros - 1,
        num_cached=zeros,
        queue=queue,
        queue_swapped=np.zeros_like(queue),
    )
    per_slot: dict[str, Any] = {
        "tokens": zeros[:, :, None],
        "logprobs": zeros[:, :, None].astype(np.float32),
        "num_emitted": (drew >= 0).astype(np.int32),
        "sequence": request_id,
        "request_id": request_id,
        "sample": zeros,
        "reason": (is_running & (after < 0)) * FINISH_REASONS.index("length"),
        "num_rows": np.where(is_running, position - length, 0),
        "held": held > 0,
    }
    # Counts that the simulator does not have are 0.
    fields = dict.fromkeys(StepInfo._fields, zeros[:, 0]) | per_slot | info._asdict()
    fields |= dict.fromkeys(StepInfo._field_defaults) | {"violations": None}
    fields |= {"used_places": info.split.tokens, "asks_host": zeros[:, 0] > 0}
    fields |= {"used_window_pages": info.used_window_pages, "pages": pages}
    step_info = StepInfo(**{name: fields[name] for name in StepInfo._fields})
    second = np.array([1.0, 1e-6])
    w = member.workload
    arrival_s = (np.asarray(w.arrival) @ second).tolist()
    requests = tuple(
        TraceRequest(i, arrival_s[i], int(w.prompt[i]), "", [""])
        for i in np.unique(request_id[is_running]).tolist()
    )
    sizes = int(member.capacity.page_size), int(member.capacity.num_pages)
    return RunTrace(info.start @ second, step_info, *sizes, requests, {})
