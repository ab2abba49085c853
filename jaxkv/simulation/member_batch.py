"""Parts of a simulation: members that advance together, and sums over their steps."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxkv import clock, scheduling
from jaxkv.ledger import EVENTS
from jaxkv.scheduling import MAX_STALLED_STEPS, StepCounter
from jaxkv.simulation import outcomes, step
from jaxkv.simulation.results import Means, SimulationResult, StepTrace, Totals
from jaxkv.simulation.state import Simulation, init_simulation
from jaxkv.simulation.step import SimulationMember


class ProgramSizes(NamedTuple):
    """Static arguments of a compiled program."""

    max_slots: int
    max_samples: int
    head: int | None
    num_steps: int
    keep_trace: bool


@functools.partial(jax.jit, static_argnames="bounds")
def _init(members: SimulationMember, bounds: ProgramSizes) -> Simulation:
    def one(member: SimulationMember) -> Simulation:
        return init_simulation(
            member.workload,
            member.capacity,
            member.policy,
            max_slots=bounds.max_slots,
            max_samples=bounds.max_samples,
            head=bounds.head,
            reservation=member.reservation,
        )

    return jax.vmap(one)(members)


@functools.partial(jax.jit, static_argnames="bounds", donate_argnames="state")
def _advance(
    state: Simulation, members: SimulationMember, bounds: ProgramSizes
) -> tuple[Simulation, step.SimulatedStep]:
    def one(
        state: Simulation, member: SimulationMember
    ) -> tuple[Simulation, step.SimulatedStep]:
        state, info = step.simulate_steps(
            state,
            **member._asdict(),
            num_steps=bounds.num_steps,
            max_samples=bounds.max_samples,
            head=bounds.head,
        )
        if not bounds.keep_trace:  # XLA does not compute unused outputs
            empty = jnp.zeros((bounds.num_steps, 0), jnp.int32)
            info = info._replace(drew=empty, num_drawn=None)
        return state, info

    return jax.vmap(one)(state, members)


class MemberBatch:
    """Members that advance together."""

    def __init__(
        self,
        members: SimulationMember,
        bounds: ProgramSizes,
        since_s: float,
        until_s: float | None,
        names: Sequence[int] | None = None,
    ) -> None:
        """Makes the part.

        Args:
          members: the members, stacked.
          bounds: static arguments of the program.
          since_s: start of the measurement in s.
          until_s: simulated time at which to stop, in s; None means at the end.
          names: indices of the members in messages; None means from 0 on.
        """
        # On the CPU, since a loop of small operations is slow on an accelerator.
        self._cpu = jax.local_devices(backend="cpu")[0]
        self._members: Any = jax.device_put(members, self._cpu)
        self._bounds = bounds
        self._since_s = since_s
        self._until_s = np.inf if until_s is None else until_s
        num = members.workload.prompt.shape[0]
        self._names = range(num) if names is None else names

    def num_behind(self) -> float:
        """Number of requests done, for a progress bar.

        A member with a time limit also advances by its share of the simulated time.
        """
        share = self.num_done / np.maximum(self.num_served, 1)
        share = np.maximum(share, np.minimum(self.clock_s / self._until_s, 1.0))
        return float(np.sum(np.where(self.done, 1.0, share) * self.num_served))

    def num_steps(self) -> Int[np.ndarray, " members"]:
        """Number of steps that took time, by member."""
        return self._sums["steps"]

    def start(self) -> None:
        """Resets the part and runs the first steps, which compiles the program."""
        self.reset()
        self.advance()

    def reset(self) -> None:
        """Resets all members to idle engines at time 0."""
        with jax.default_device(self._cpu):
            self._state: Any = _init(self._members, self._bounds)
        self._weighted: dict[str, np.ndarray] = {}
        self._sums: dict[str, np.ndarray] = {}
        self._infos: list[tuple[np.ndarray, step.SimulatedStep]] = []
        self.num_served = np.asarray(self._state.num_served)
        self.num_done = np.zeros_like(self.num_served)
        self.clock_s = np.zeros(self.num_served.shape)
        self.done = self.num_served == 0
        self._idle = [StepCounter() for _ in self.num_served]

    def advance(self) -> None:
        """Runs `num_steps` steps of every member, and adds them to the sums.

        Raises:
          StallError: a policy makes no progress.
        """
        with jax.default_device(self._cpu):
            self._state, info = _advance(self._state, self._members, self._bounds)
        info = jax.tree.map(np.asarray, info)
        self._fold(info)
        self.num_done = np.asarray(self._state.num_done)
        clocks = np.asarray(self._state.ledger.clock)
        self.clock_s = clock.to_seconds(clocks)
        self.done = self.num_done == self.num_served
        self.done |= self.clock_s >= self._until_s
        draws = info.work.num_drawn > 0
        late = draws[:, -MAX_STALLED_STEPS:].any(axis=1)
        for member in np.flatnonzero(~self.done).tolist():
            if late[member]:
                self._idle[member].reset()
            else:
                one = jax.tree.map(lambda x, at=member: x[at], info)
                self._refuse_stall(member, draws[member], one, clocks[member])

    def _refuse_stall(
        self,
        member: int,
        draws: np.ndarray,
        info: PyTree[Array | np.ndarray],
        end: np.ndarray,
    ) -> None:
        """Raises a `StallError` after too many steps without progress.

        `end` is the clock after the steps.
        """
        idle = self._idle[member]
        work = info.work
        load = self._members.workload
        # Not by the queue and the slots, which do not have lost sequences.
        opened = self._open(member)
        if not opened.size:
            idle.reset()
            return
        num_rows = work.num_decodes + work.num_prompt_rows
        starts = np.concatenate([info.start, end[None]])
        jumps = (np.diff(starts, axis=0) != 0).any(axis=1) & (info.micros == 0)

        def num_tokens() -> int:
            # Each sequence of an open request may feed all of its tokens.
            request_tokens = np.asarray(load.prompt[member]) + np.asarray(
                load.output[member]
            )
            request_tokens = request_tokens * np.asarray(load.samples[member])
            return int(request_tokens[opened].sum())

        idle.count(draws, num_rows, num_tokens=num_tokens, waits=jumps)
        if idle.num_steps < MAX_STALLED_STEPS:
            return
        first = int(opened[0])
        size = f"{int(load.prompt[member, first])} + {int(load.output[member, first])}"
        raise scheduling.stall_error(
            self._members.policy,
            f"request {first} of member {self._names[member]}, {size} tokens,",
            has_pages=bool(info.enough[-1]),
            preempts=bool(info.num_preempted[-MAX_STALLED_STEPS:].any()),
        )

    def _open(self, member: int) -> np.ndarray:
        """Returns the unfinished requests in queue and slots of a member, in order.

        With sessions, these are all that have arrived.
        """
        state = self._state
        load = self._members.workload
        taken = np.asarray(state.order[member])[: int(state.num_taken[member])]
        if state.sessions is not None:
            served = np.asarray(state.order[member])[: int(state.num_served[member])]
            sent_s = clock.to_seconds(state.sessions.arrival[member])[served]
            has_come = sent_s <= clock.to_seconds(state.ledger.clock[member])
            taken = served[np.argsort(sent_s, kind="stable")[: has_come.sum()]]
        ends = EVENTS.read(np.asarray(state.ledger.events[member]), "finish_s")
        ends = ends.reshape(load.prompt.shape[1], -1)
        sample = np.arange(ends.shape[1])[None, :]
        alive = (ends == 0) & (sample < np.asarray(load.samples[member])[:, None])
        return taken[alive.any(axis=1)[taken]]

    def _fold(self, info: PyTree[Array | np.ndarray]) -> None:
        """Adds steps to the sums."""
        start_s = clock.to_seconds(info.start)
        seconds = info.micros / clock.MICROS_PER_SECOND
        counts = (start_s >= self._since_s) & (start_s < self._until_s)
        weight = np.where(counts, seconds, 0.0)
        work = info.work
        sizes = {
            "batch": info.num_running,
            "waiting": info.num_waiting,
            "used_pages": info.used_pages,
            "saved_pages": info.saved_pages,
            **info.split._asdict(),
        }
        for name, values in sizes.items():
            _add(self._weighted, name, np.sum(values * weight, axis=1))
        amounts = {
            "steps": info.micros > 0,
            "decoded": work.num_decodes,
            "drafted": 0 if work.num_drafts is None else work.num_drafts,
            "read": work.num_prompt_rows,
            "drawn": work.num_drawn,
            "swapped_pages": work.num_swapped,
            "preempted": info.num_preempted,
        }
        for name, values in amounts.items():
            total = np.sum(np.where(counts, values, 0), axis=1, dtype=np.int64)
            _add(self._sums, name, total)
        _add(self._sums, "busy_s", weight.sum(axis=1))
        if self._bounds.keep_trace:
            self._infos.append((start_s, info))

    def result(self) -> SimulationResult:
        """Returns the results so far."""
        outcome = outcomes.read_outcomes(
            self._state, self._members.workload, until_s=self._until_s, warns=False
        )
        busy_s = np.maximum(self._sums["busy_s"], np.finfo(float).tiny)
        means = {name: x / busy_s for name, x in self._weighted.items()}
        capacity = self._members.capacity
        places = np.asarray(capacity.num_pages) * np.asarray(capacity.page_size)
        shares = {x: means[x] / places for x in ("tokens", "reserved", "internal")}
        external = np.where(
            self._sums["busy_s"] > 0, 1.0 - sum(shares.values()), np.nan
        )
        trace = None
        if self._bounds.keep_trace:
            start_s, infos = zip(*self._infos, strict=True)
            joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *infos)
            trace = StepTrace(np.concatenate(start_s, axis=1), joined)
        return SimulationResult(
            **vars(outcome),
            end_s=np.minimum(self.clock_s, self._until_s),
            means=Means(**means | shares, external=external),
            totals=Totals(**self._sums),
            trace=trace,
        )


def _add(sums: dict[str, np.ndarray], name: str, values: np.ndarray) -> None:
    sums[name] = sums.get(name, np.zeros_like(values)) + values
