"""Checks of a policy by random loads, with the smallest load that fails.

The checks, in order: plans are valid without corrections by `schedule`; every request
ends; no request is overtaken beyond the documented bound; the engine takes the steps of
the simulation; tokens are those of first come, first served. The engine serves a small
random model, whose tokens depend on all K and V, with `numerics="reproducible"`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jaxkv import arrays, scheduling, validation
from jaxkv.engine import EngineConfig, init, run_steps, submit
from jaxkv.models import (
    ModelConfig,
    PagedForward,
    Params,
    make_model_pages,
    param_shapes,
)
from jaxkv.scheduling import MAX_STALLED_STEPS, Counts, Plan, Policy
from jaxkv.simulation import (
    Acceptance,
    Capacity,
    SimulatedStep,
    Simulation,
    SimulationMember,
    Work,
    init_simulation,
    read_outcomes,
    simulate_step,
    upcoming_counts,
)
from jaxkv.verification.engine_replay import (
    engine_requests,
    find_difference,
    replay_in_engine,
)
from jaxkv.verification.loads import (
    LONGEST_PART,
    MAX_SEQUENCES_EACH,
    RandomLoad,
    RandomRequest,
    draw_random_load,
)

POLICY_CHECKS = (
    "valid plans",
    "every request ends",
    "no starvation",
    "engine",
    "tokens",
)
"""Names of the checks, in order."""
_LOAD_SIZE = 24
_STREAM = 72
_HEAD = 32
_STEPS_PER_CALL = 64
_MAX_SHRINKS = 60
_RANDOM_MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=1,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=40,
    max_positions=2 * LONGEST_PART,
    tie_embeddings=False,
)
_CONFIG = EngineConfig(
    num_pages=22,
    page_size=4,
    max_slots=6,
    max_length=2 * LONGEST_PART,
    max_sequences=_LOAD_SIZE * MAX_SEQUENCES_EACH,
    queue_capacity=_LOAD_SIZE * MAX_SEQUENCES_EACH,
    token_budget=16,
    submit_width=_LOAD_SIZE * MAX_SEQUENCES_EACH,
    queue_head=_HEAD,
    max_stop_tokens=1,
    numerics="reproducible",
    debug=True,
)


class PolicyFault(NamedTuple):
    """A check that a policy fails."""

    check: str
    """One of `POLICY_CHECKS`."""
    reason: str
    load: RandomLoad
    """The smallest load that was tried and fails the same check."""


class PolicyReport(NamedTuple):
    """Results of `verify_policy`."""

    policy: str
    """Type of the policy."""
    num_loads: int
    """Loads that were tried."""
    num_steps: int
    """Steps of the simulations."""
    overtaking: str
    """What is documented about overtaking, and what was seen."""
    fault: PolicyFault | None
    """None if all checks hold."""

    def __str__(self) -> str:
        """The report for a reader: verdict, checks, and the load that fails."""
        failed = None if self.fault is None else POLICY_CHECKS.index(self.fault.check)
        lines = [
            f"{self.policy}: {'holds' if failed is None else 'FAILS'} "
            f"({self.num_loads} random loads, {self.num_steps:,} steps)"
        ]
        for i, name in enumerate(POLICY_CHECKS):
            verdict = "holds" if failed is None or i < failed else "not reached"
            lines.append(f"  {name}: {'FAILS' if i == failed else verdict}")
        lines.append(f"  {self.overtaking}")
        if self.fault is not None:
            lines += [
                f"{self.fault.check}: {self.fault.reason}",
                f"load {self.fault.load.seed}, reduced to:",
                str(self.fault.load),
            ]
        return "\n".join(lines)


class _StepCost(NamedTuple):
    """A step takes 1 s, and 1 % more for each row of a prompt."""

    base_s: Float[Array, ""]

    def __call__(self, work: Work) -> Float[Array, ""]:
        """Returns the time in s."""
        rows = work.num_prompt_rows + work.num_swapped
        return self.base_s * (1.0 + 0.01 * rows.astype(jnp.float32))


class _PlanFaults(NamedTuple):
    """Invalid parts of a plan, which `schedule` corrects."""

    preempts_idle: Bool[Array, "*steps"]
    preempts_part: Bool[Array, "*steps"]
    swaps_others: Bool[Array, "*steps"]
    admits_unmarked: Bool[Array, "*steps"]
    wrong_rows: Bool[Array, "*steps"]
    wrong_head_rows: Bool[Array, "*steps"]
    over_budget: Bool[Array, "*steps"]
    wrong_places: Bool[Array, "*steps"]
    wrong_drafts: Bool[Array, "*steps"]


_FAULT_TEXTS = {
    "preempts_idle": "Plan.preempt marks a slot without a running sequence",
    "preempts_part": "Plan.preempt marks a sequence of a request and not the others",
    "swaps_others": "Plan.swap marks a sequence that Plan.preempt does not mark",
    "admits_unmarked": "Plan.admit marks a request that Counts.waiting does not mark",
    "wrong_rows": "Plan.num_rows is negative or exceeds the tokens left to feed",
    "wrong_head_rows": "Plan.head_rows is negative or exceeds the tokens left to feed",
    "over_budget": "the rows of the plan exceed the token budget",
    "wrong_places": "Plan.places does not cover the rows or exceeds the largest length",
    "wrong_drafts": "Plan.drafts is negative or exceeds Counts.drafts",
}


def _find_plan_faults(c: Counts, plan: Plan) -> _PlanFaults:
    """Compares the plan of a policy with the bounds in the docstring of `schedule`."""
    marked = plan.preempt & c.running
    preempted = arrays.reduce_groups(marked, c.group, "max") & c.running
    stays = c.running & ~preempted
    admit = plan.admit & c.waiting
    rows = jnp.where(stays, plan.num_rows, 0)
    head_rows = jnp.where(admit, plan.head_rows, 0)
    left = jnp.maximum(c.target_length - c.length, 0)
    head_left = jnp.where(c.waiting_swapped, 0, c.waiting_tokens - c.waiting_cached)
    ends = jnp.where(rows > 0, c.length + rows, 0)
    num_rows = jnp.sum(rows, dtype=jnp.int32) + jnp.sum(head_rows, dtype=jnp.int32)
    wrong_drafts = jnp.zeros((), bool)
    if plan.drafts is not None and c.drafts is not None:
        wrong_drafts = jnp.any((plan.drafts < 0) | (plan.drafts > c.drafts))
    places = jnp.where(stays, plan.places, 0)
    return _PlanFaults(
        preempts_idle=jnp.any(plan.preempt & ~c.running),
        preempts_part=jnp.any(marked != preempted),
        swaps_others=jnp.any(plan.swap & ~plan.preempt),
        admits_unmarked=jnp.any(plan.admit & ~c.waiting),
        wrong_rows=jnp.any((rows < 0) | (rows > left)),
        wrong_head_rows=jnp.any((head_rows < 0) | (head_rows > head_left)),
        over_budget=num_rows > c.token_budget,
        wrong_places=jnp.any((places < ends) | (places > c.max_length)),
        wrong_drafts=wrong_drafts,
    )


@functools.partial(jax.jit, static_argnames="head")
def _observe_steps(
    state: Simulation, member: SimulationMember, *, head: int
) -> tuple[Simulation, tuple[SimulatedStep, _PlanFaults, Int32[Array, "steps slots"]]]:
    """Runs steps; returns their infos, the faults of plans, and the slots after."""

    def body(state: Simulation, _: None) -> tuple[Simulation, Any]:
        counts = upcoming_counts(
            state, member, max_samples=MAX_SEQUENCES_EACH, head=head
        )
        faults = _find_plan_faults(counts, member.policy.plan(counts))
        state, info = simulate_step(
            state, **member._asdict(), max_samples=MAX_SEQUENCES_EACH, head=head
        )
        return state, (info, faults, state.ledger.slots.sequence)

    return jax.lax.scan(body, state, None, length=_STEPS_PER_CALL)


@functools.partial(jax.jit, static_argnames="head")
def _init(member: SimulationMember, *, head: int) -> Simulation:
    return init_simulation(
        member.workload,
        member.capacity,
        member.policy,
        max_slots=_CONFIG.max_slots,
        max_samples=MAX_SEQUENCES_EACH,
        head=head,
    )


class _Observed(NamedTuple):
    """A simulated load."""

    parts: list[SimulatedStep]
    """Steps, in parts, as NumPy arrays."""
    num_steps: int
    fault: tuple[str, str] | None
    """Check and reason."""
    overtaking_s: float
    """Largest time after a request of an arrival that was admitted before it."""
    num_overtaking: int
    """Largest number of later requests that were admitted before a request."""


def _simulate(
    policy: Policy, load: RandomLoad, *, size: int, acceptance: Acceptance | None = None
) -> _Observed:
    """Simulates a load, and checks plans, ends and overtaking."""
    workload = load.workload(size)
    capacity = Capacity.of(
        num_pages=_CONFIG.num_pages,
        page_size=_CONFIG.page_size,
        max_length=_CONFIG.max_length,
        token_budget=_CONFIG.token_budget,
        max_swap_pages=_CONFIG.max_swap_pages,
    )
    cost = _StepCost(jnp.float32(1.0))
    member = SimulationMember(workload, capacity, policy, cost, None, acceptance)
    state = _init(member, head=_HEAD)
    parts = []
    slots: list[np.ndarray] = []
    num_idle = 0
    fault = None
    while int(state.num_done) < int(state.num_served) and fault is None:
        state, results = _observe_steps(state, member, head=_HEAD)
        infos, faults, sequence = jax.tree.map(np.asarray, results)
        begin = len(parts) * _STEPS_PER_CALL
        parts.append(infos)
        slots.append(np.concatenate([sequence, infos.drew], axis=1))
        for name, is_wrong in faults._asdict().items():
            if is_wrong.any() and fault is None:
                step = begin + int(np.argmax(is_wrong))
                text = f"step {step}: {_FAULT_TEXTS[name]}"
                fault = POLICY_CHECKS[0], text
        if fault is None and not infos.enough.all():
            step = begin + int(np.argmin(infos.enough))
            fault = (
                POLICY_CHECKS[0],
                f"step {step}: Plan.places needs more pages than exist",
            )
        # A step that only waits for an arrival moves the clock without work.
        starts = np.concatenate([infos.start, np.asarray(state.ledger.clock)[None]])
        waits = (np.diff(starts, axis=0) != 0).any(axis=1) & (infos.micros == 0)
        moves = (infos.work.num_drawn > 0) | waits
        num_idle = 0 if moves.any() else num_idle + _STEPS_PER_CALL
        # A prompt of 20 tokens needs at most 20 steps without a token.
        if num_idle >= 2 * MAX_STALLED_STEPS and fault is None:
            fault = POLICY_CHECKS[1], _describe_stall(infos, state, load)
    outcome = read_outcomes(state, workload, warns=False)
    most_s, most = _find_overtaking(np.concatenate(slots), outcome.arrival_s)
    bound_s = scheduling.overtaking_bound_s(policy)
    if fault is None and bound_s is not None and most_s > bound_s + 1e-3:
        fault = (
            POLICY_CHECKS[2],
            f"a request was overtaken by one that arrived {most_s:.3f} s after it, and "
            f"overtaking_s={bound_s:g}",
        )
    num_steps = len(parts) * _STEPS_PER_CALL
    return _Observed(parts, num_steps, fault, most_s, most)


def _describe_stall(infos: SimulatedStep, state: Simulation, load: RandomLoad) -> str:
    """Returns the reason why requests do not end."""
    num = int(state.num_served) - int(state.num_done)
    cause = "no request is admitted and no row is fed"
    if np.any(infos.num_preempted):
        cause = "running requests are preempted again and again"
    elif np.any(infos.num_running):
        cause = "running requests feed no rows"
    return (
        f"{num} of {len(load.requests)} requests never end: in "
        f"{2 * MAX_STALLED_STEPS} steps no token is emitted, and {cause}"
    )


def _find_overtaking(slots: np.ndarray, arrival_s: np.ndarray) -> tuple[float, int]:
    """Returns how far and how often requests were overtaken at their admission."""
    num = arrival_s.size
    never = slots.shape[0]
    admitted = np.full(num, never)
    for step in range(never - 1, -1, -1):
        request = slots[step][slots[step] >= 0] // MAX_SEQUENCES_EACH
        admitted[request] = step
    sent = np.isfinite(arrival_s)
    later = arrival_s[None, :] - arrival_s[:, None]
    overtakes = (admitted[None, :] < admitted[:, None]) & (later > 0)
    overtakes &= sent[None, :] & sent[:, None]
    most_s = float(np.max(later, where=overtakes, initial=0.0))
    return most_s, int(overtakes.sum(axis=1).max())


@functools.cache
def _model() -> tuple[Params, PagedForward]:
    """Returns random parameters, with logits of a standard deviation of about 3."""
    rng = np.random.default_rng(7)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        numbers = rng.normal(0, 0.25, shape) if len(shape) > 1 else np.ones(shape)
        return numbers.astype(np.float32)

    weights = jax.tree.map(lambda x: draw(x.shape), param_shapes(_RANDOM_MODEL))
    return weights, PagedForward(_RANDOM_MODEL)


_serve = jax.jit(
    run_steps,
    static_argnames=("config", "forward", "num_steps"),
    donate_argnames="state",
)
_submit = jax.jit(submit, static_argnames="config", donate_argnames="state")


def _read_tokens(infos: Any) -> dict[tuple[int, int], list[int]]:
    """Returns the tokens of each request and sample."""
    tokens: dict[tuple[int, int], list[int]] = {}
    infos = jax.tree.map(np.asarray, infos)
    for step, slot in zip(*np.nonzero(infos.num_emitted > 0), strict=True):
        if infos.request_id[step, slot] < 0:
            continue
        name = int(infos.request_id[step, slot]), int(infos.sample[step, slot])
        emitted = infos.tokens[step, slot, : infos.num_emitted[step, slot]]
        tokens.setdefault(name, []).extend(emitted.tolist())
    return tokens


def _serve_first_come(load: RandomLoad) -> dict[tuple[int, int], list[int]]:
    """Serves all requests at once by `fcfs`, and returns their tokens."""
    workload = load.workload()
    params, forward = _model()
    requests = engine_requests(
        workload, _CONFIG, seed=load.seed, vocab_size=_RANDOM_MODEL.vocab_size
    )
    requests = requests._replace(arrival=jnp.zeros_like(requests.arrival))
    state = init(_CONFIG, make_model_pages(_RANDOM_MODEL, _CONFIG))
    state, _ = _submit(state, requests, config=_CONFIG)
    parts = []
    num_open = int(np.asarray(workload.samples).sum())
    while num_open > 0:
        state, infos = _serve(
            params,
            state,
            jnp.zeros(2, jnp.int32),
            config=_CONFIG,
            forward=forward,
            policy=scheduling.fcfs(),
            num_steps=32,
        )
        parts.append(jax.tree.map(np.asarray, infos))
        num_open -= int((parts[-1].reason > 0).sum())
    return _read_tokens(jax.tree.map(lambda *x: np.concatenate(x), *parts))


def _check_in_engine(
    policy: Policy, load: RandomLoad, observed: _Observed
) -> tuple[str, str] | None:
    """Compares the engine with the simulation, and its tokens with those of `fcfs`."""
    workload = load.workload()
    params, forward = _model()
    requests = engine_requests(
        workload, _CONFIG, seed=load.seed, vocab_size=_RANDOM_MODEL.vocab_size
    )
    replay = replay_in_engine(
        workload,
        observed.parts,
        policy,
        _CONFIG,
        requests=requests,
        model=(params, forward, make_model_pages(_RANDOM_MODEL, _CONFIG)),
    )
    joined = jax.tree.map(lambda *x: np.concatenate(x), *observed.parts)
    if (difference := find_difference(joined, replay)) is not None:
        return POLICY_CHECKS[3], difference
    tokens = _read_tokens(replay.infos)
    for name, expected in _serve_first_come(load).items():
        answer = tokens.get(name, [])
        if answer != expected:
            at = next(
                (
                    i
                    for i, x in enumerate(zip(answer, expected, strict=False))
                    if x[0] != x[1]
                ),
                min(len(answer), len(expected)),
            )
            return POLICY_CHECKS[4], (
                f"answer {name[1]} of request {name[0]} differs from that of fcfs "
                f"from token {at} on"
            )
    return None


def _find_fault(
    policy: Policy, load: RandomLoad, *, drafts: bool, engine: bool
) -> tuple[tuple[str, str] | None, _Observed]:
    """Applies the checks to a load, in order, until one fails."""
    acceptance = None
    if drafts:
        acceptance = Acceptance.of(0.6, num_drafts=3, seed=load.seed)
    observed = _simulate(policy, load, size=_STREAM, acceptance=acceptance)
    fault = observed.fault
    if fault is None and engine and not drafts:
        fault = _check_in_engine(policy, load, observed)
    return fault, observed


def _shrink(
    load: RandomLoad, check: str, find: Callable[[RandomLoad], tuple[str, str] | None]
) -> tuple[RandomLoad, str | None]:
    """Removes requests and reduces sizes while the load fails the same check.

    Returns:
      The smallest load, and the reason why it fails; None if nothing was removed.
    """
    reason = None
    num_tries = 0
    candidates = _smaller_loads(load)
    while (candidate := next(candidates, None)) and num_tries < _MAX_SHRINKS:
        num_tries += 1
        fault = find(candidate)
        if fault is not None and fault[0] == check:
            load = candidate
            reason = fault[1]
            candidates = _smaller_loads(load)
    return load, reason


def _smaller_loads(load: RandomLoad) -> Iterator[RandomLoad]:
    """Yields loads without some requests, then with simpler ones."""
    num = len(load.requests)
    size = num // 2
    while size >= 1:
        for begin in range(0, num, size):
            yield load.without(range(begin, min(begin + size, num)))
        size //= 2
    for i, row in enumerate(load.requests):
        for field, value in (("after", ()), ("samples", 1), ("output", 1)):
            if getattr(row, field) != value:
                smaller = dataclasses.replace(row, **{field: value})
                rows = (*load.requests[:i], smaller, *load.requests[i + 1 :])
                yield RandomLoad(load.seed, rows)


def _draw_stream(num: int) -> RandomLoad:
    """Draws a stream that keeps all slots busy, after four requests unlike the rest.

    The four are long, urgent or not, with and without a deadline or a session.
    """
    rng = np.random.default_rng(num)
    odd = [
        RandomRequest(
            arrival_s=0.1 * i,
            prompt=LONGEST_PART,
            output=LONGEST_PART,
            samples=1,
            priority=priority,
            deadline_ms=deadline_ms,
            session=session,
            predicted_length=2 * LONGEST_PART,
        )
        for i, (priority, deadline_ms, session) in enumerate(
            [(900, 2**30, -1), (-900, 2**30, 0), (900, 5_000, 0), (-900, 5_000, -1)]
        )
    ]
    stream = [
        RandomRequest(
            arrival_s=float(0.4 + 0.7 * i),
            prompt=int(rng.integers(1, 5)),
            output=int(rng.integers(2, 6)),
            samples=1,
            session=int(rng.integers(0, 3)),
            deadline_ms=20_000,
            predicted_length=10,
        )
        for i in range(num - len(odd))
    ]
    # The first ones fill the slots before the odd ones are visible.
    first = [dataclasses.replace(x, arrival_s=0.0) for x in stream[:8]]
    later = sorted([*odd, *stream[8:]], key=lambda x: x.arrival_s)
    return RandomLoad(num, (*first, *later))


@validation.checks_numbers(num_loads=(1, 100_001), seed=validation.SEEDS)
def verify_policy(
    policy: Policy, *, num_loads: int = 12, seed: int = 0
) -> PolicyReport:
    """Tests a policy by random loads, and reduces the first load that fails.

    A load has 24 requests, some with two sequences, some in sessions, for a pool that
    is too small for all. Every third load is simulated with drafts, and not served by
    the engine. A policy without a documented bound of overtaking (`overtaking_s`) fails
    if a request waits for the whole of a stream of later requests, however long.

    Args:
      policy: the policy.
      num_loads: number of random loads.
      seed: seed of the first load; the others have the next integers.

    Returns:
      The report; `str(report)` is for readers.

    Raises:
      ValueError: the policy is no policy, or its plan has wrong shapes.
    """
    scheduling.check_plan(policy)
    num_steps = 0
    most_s = 0.0
    fault = None
    num_tried = 0
    # The simulations first, which find most faults without an engine.
    for engine, index in itertools.product((False, True), range(num_loads)):
        drafts = index % 3 == 2
        if engine and drafts:
            continue
        load = draw_random_load(seed + index, _LOAD_SIZE)
        find = functools.partial(_find_fault, policy, drafts=drafts, engine=engine)
        problem, observed = find(load)
        num_tried = max(num_tried, index + 1)
        num_steps += 0 if engine else observed.num_steps
        most_s = max(most_s, observed.overtaking_s)
        if problem is not None:
            check, reason = problem
            load, last = _shrink(load, check, lambda x, find=find: find(x)[0])
            fault = PolicyFault(check, last or reason, load)
            break
    bound_s = scheduling.overtaking_bound_s(policy)
    documented = "no bound is documented"
    if bound_s is not None:
        documented = f"documented: {bound_s:g} s"
        if math.isinf(bound_s):
            documented = "documented: a request may starve"
    if fault is None:
        halves = [_simulate(policy, _draw_stream(n), size=_STREAM) for n in (36, 72)]
        most_s = max(most_s, *(x.overtaking_s for x in halves))
        fault = _find_starvation(bound_s, halves)
    overtaking = f"overtaken by arrivals up to {most_s:.1f} s later; {documented}"
    name = type(policy).__name__
    return PolicyReport(name, num_tried, num_steps, overtaking, fault)


def _find_starvation(
    bound_s: float | None, halves: list[_Observed]
) -> PolicyFault | None:
    """Judges a stream, and one twice as long."""
    for observed, num in zip(halves, (36, 72), strict=True):
        if observed.fault is not None:
            return PolicyFault(*observed.fault, _draw_stream(num))
    few, many = (x.num_overtaking for x in halves)
    if bound_s is None and many >= 1.6 * few and many >= 30:
        return PolicyFault(
            POLICY_CHECKS[2],
            f"a request was admitted after {many} later requests of a stream of 72, "
            f"and after {few} of a stream of 36: it waits as long as others arrive "
            "(document it by overtaking_s = math.inf)",
            _draw_stream(36),
        )
    return None
