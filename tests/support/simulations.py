"""Workloads and costs for simulations, and comparison with the engine."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import clock, scheduling
from jaxkv.engine import EngineConfig, EngineState, Speculation, init, run_steps, submit
from jaxkv.memory import WindowLayers, make_pages
from jaxkv.models import ForwardResult
from jaxkv.sampling import Sampling
from jaxkv.scheduling import NO_LIMIT, Policy, RequestAttributes
from jaxkv.serving import make_requests
from jaxkv.simulation import Acceptance, state, step
from jaxkv.workloads import Workload


class Cost(NamedTuple):
    """Cost of a step in s: a constant, plus a term for its work."""

    base: jax.Array

    def __call__(self, work: step.Work) -> jax.Array:
        rows = work.num_prompt_rows + work.num_swapped
        return self.base * (1.0 + 0.01 * rows.astype(jnp.float32))


COST = Cost(jnp.float32(0.01))


run_simulation = jax.jit(
    step.simulate_steps,
    static_argnames=("num_steps", "max_samples", "head"),
)


def workload(
    seed: int, num: int, *, max_samples: int = 1, rate: float = 200.0, longest: int = 30
) -> Workload:
    """Requests of up to `longest` prompt and answer tokens, some arriving together."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, num))
    arrival[:3] = 0

    def draw(limit: int) -> jax.Array:
        return jnp.asarray(rng.integers(1, limit + 1, num), jnp.int32)

    prompt = draw(longest)
    output = draw(longest)
    return Workload(
        arrival=jnp.asarray(clock.from_seconds(arrival)),
        prompt=prompt,
        output=output,
        samples=draw(max_samples),
        clients=jnp.int32(NO_LIMIT),
    )


def dependencies(seed: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Random sessions: chains, fan-out and joins, some delays 0 and many equal.

    Returns:
      `after`, of shape [num, 3], and delays in microseconds.
    """
    rng = np.random.default_rng(seed)
    after = np.full((num, 3), -1)
    for i in range(1, num):
        if rng.random() < 0.8:
            recent = np.arange(max(0, i - 8), i)
            size = min(recent.size, int(rng.integers(1, 4)))
            after[i, :size] = rng.choice(recent, size, replace=False)
    delay_us = rng.choice([0, 0, 10_000, 40_000, 123_457], num)
    return after, np.where(after[:, 0] < 0, 0, delay_us)


VOCAB = 4099
"""Large enough that two sequences rarely sample the same token."""


def forward(params: Any, pages: Any, rows: Any) -> ForwardResult:
    """A model with equal logits."""
    return ForwardResult(jnp.zeros((rows.logit_rows.shape[0], VOCAB)), pages)


_run_engine = jax.jit(
    run_steps,
    static_argnames=("config", "forward", "speculation", "num_steps"),
    donate_argnames="state",
)
_submit = jax.jit(submit, static_argnames="config", donate_argnames="state")


def with_attributes(w: Workload, seed: int) -> Workload:
    """Adds limits and random attributes to a workload; some keep the defaults."""
    rng = np.random.default_rng(seed)
    num = w.prompt.shape[0]

    def draw_column(low: int, high: int, default: int) -> jax.Array:
        numbers = rng.integers(low, high, num)
        return jnp.asarray(np.where(rng.random(num) < 0.3, default, numbers), jnp.int32)

    default: Any = RequestAttributes()
    return w._replace(
        limit=w.prompt + w.output,
        attributes=RequestAttributes(
            arrival_ms=jnp.zeros((num,), jnp.int32),
            priority=draw_column(-3, 4, default.priority),
            deadline_ms=draw_column(0, 900, default.deadline_ms),
            session=draw_column(0, 4, default.session),
            predicted_length=draw_column(1, 60, default.predicted_length),
        ),
    )


class Case(NamedTuple):
    """A policy, and bounds under which its rules apply."""

    policy: Policy
    max_samples: int = 1
    num_pages: int = 22
    max_swap_pages: int = 0
    head: int | None = None
    window: int | None = None


CASES = {
    "plain": Case(scheduling.fcfs(chunk_size=7, watermark=2)),
    "swap": Case(
        scheduling.fcfs(preemption="swap", hold_new=False, victim="fewest_pages"),
        max_swap_pages=20,
    ),
    "static": Case(scheduling.static(), num_pages=70),
    "vllm": Case(
        scheduling.vllm_scheduler(max_num_seqs=7, long_prefill_token_threshold=9)
    ),
    "groups": Case(scheduling.fcfs(), max_samples=3, num_pages=42),
    "groups, swap": Case(
        scheduling.fcfs(
            chunk_size=3, preemption="swap", hold_new=False, victim="cheapest"
        ),
        max_samples=3,
        num_pages=42,
        max_swap_pages=30,
    ),
    "groups, static": Case(scheduling.static(), max_samples=3, num_pages=80),
}


BY_ATTRIBUTES = {
    "shortest remaining": Case(scheduling.shortest_remaining(), head=20),
    "ageing priority": Case(
        scheduling.ageing_priority(
            level_ms=40, inner=scheduling.fcfs(victim="least_urgent")
        ),
        head=20,
    ),
    "earliest deadline": Case(
        scheduling.earliest_deadline(), max_samples=3, num_pages=42, head=14
    ),
    "fair share": Case(scheduling.fair_share(), max_samples=3, num_pages=42, head=5),
    "longest remaining goes": Case(
        scheduling.fcfs(victim="longest_remaining", preemption="swap"),
        max_swap_pages=20,
    ),
}
"""Cases of policies that read request attributes."""


class EngineComparison(NamedTuple):
    """A simulation and an engine that served the same workload."""

    simulation: state.Simulation
    engine: EngineState
    infos: Any
    """Steps of the simulation."""
    engine_infos: Any
    """Steps of the engine."""


def compare_with_engine(
    w: Workload,
    case: Case,
    seed: int,
    *,
    acceptance: Acceptance | None = None,
    speculation: Speculation | None = None,
) -> EngineComparison:
    """Runs a simulation to its end, and an engine with the same clock."""
    num = w.prompt.shape[0] * case.max_samples
    config = EngineConfig(
        num_pages=case.num_pages,
        page_size=4,
        max_slots=9,
        max_length=60,
        max_sequences=num,
        queue_capacity=num,
        token_budget=24,
        submit_width=num,
        max_swap_pages=case.max_swap_pages,
        queue_head=case.head or 0,
        max_stop_tokens=1,
        max_drafts=0 if acceptance is None else acceptance.chances.shape[0],
        release_window_pages=case.window is not None,
        debug=True,
    )
    bounds = capacity(config, case.window)
    idle, requests = engine_requests(w, config, seed, case.window)
    client = SessionClient(w, requests, config)
    if w.dependencies is None:
        idle, _ = _submit(idle, requests, config=config)
    real = idle
    simulated_state = state.init_simulation(
        w,
        bounds,
        case.policy,
        max_slots=config.max_slots,
        max_samples=case.max_samples,
        head=case.head,
    )
    infos = []
    engine_infos = []
    # Left out if None, so that the program is that of other tests.
    judged: Any = {} if speculation is None else {"speculation": speculation}
    while int(simulated_state.num_done) < int(simulated_state.num_served):
        simulated_state, call_infos = run_simulation(
            simulated_state,
            w,
            capacity=bounds,
            policy=case.policy,
            cost=COST,
            num_steps=64,
            max_samples=case.max_samples,
            head=case.head,
            acceptance=acceptance,
        )
        infos.append(jax.tree.map(np.asarray, call_infos))
        for start, micros in zip(infos[-1].start, infos[-1].micros, strict=True):
            if w.dependencies is not None:
                real = client.submit_due(real, start)
            real, one = _run_engine(
                None,
                real,
                jnp.asarray(start),
                config=config,
                forward=forward,
                policy=case.policy,
                num_steps=1,
                **judged,
            )
            engine_infos.append(one)
            if w.dependencies is not None:
                client.read_answers(one, start, micros)
    joined: Any = (
        jax.tree.map(lambda *x: np.concatenate(x), *info_list)
        for info_list in (infos, engine_infos)
    )
    return EngineComparison(simulated_state, real, *joined)


def assert_equal_steps(run: EngineComparison) -> None:
    """Asserts that both have equal steps."""
    infos = run.infos
    engine_infos = run.engine_infos
    work = infos.work
    is_present = engine_infos.sequence >= 0
    drafts = 0 if work.num_drafts is None else work.num_drafts
    stay = (infos.num_finished == 0) & ~engine_infos.held.any(axis=1)
    did = {
        "rows": (
            work.num_decodes + work.num_prompt_rows + drafts,
            engine_infos.num_rows.sum(axis=1),
        ),
        "drawn": (
            work.num_drawn,
            np.where(is_present, engine_infos.num_emitted, 0).sum(axis=1),
        ),
        "finished": (infos.num_finished, (engine_infos.reason > 0).sum(axis=1)),
        "copied": (work.num_copied, engine_infos.num_copied),
        # The engine counts after ended sequences have released their pages.
        "places": (infos.split.tokens[stay], engine_infos.used_places[stay]),
    }
    if engine_infos.num_drafts is not None:
        did["drafts"] = work.num_drafts, engine_infos.num_drafts.sum(axis=1)
    names = ["num_admitted", "num_preempted", "used_pages", "enough"]
    if engine_infos.used_window_pages is not None:
        names.append("used_window_pages")
    for name in names:
        did[name] = getattr(infos, name), getattr(engine_infos, name)
    for name, (ours, real) in did.items():
        np.testing.assert_array_equal(ours, real, name)
    for name, broken in engine_infos.violations._asdict().items():
        assert not np.any(broken), name


class SessionClient:
    """Sends requests to an engine when those that they wait for are answered."""

    def __init__(self, w: Workload, requests: Any, config: EngineConfig) -> None:
        self.w = w
        self.requests = requests
        self.config = config
        self.samples = np.asarray(w.samples)
        self.ends = np.cumsum(self.samples)
        self.num_open = self.samples.copy()
        self.rows: list[int] = []
        """Request of each sequence of the engine, in order of submission."""
        self.known: list[tuple[int, int]] = []
        """Arrival times in microseconds, and requests, that were not submitted yet."""
        self.unsent = set(range(self.samples.size))
        if w.dependencies is not None:
            self.after = np.asarray(w.after)
            self.delay = np.asarray(w.delay)
            self.delay = self.delay.astype(np.int64) @ [1_000_000, 1]
            self.release(None)

    def release(self, now_us: int | None) -> None:
        """Gives arrival times to requests whose predecessors are answered."""
        for i in sorted(self.unsent):
            before = self.after[i][self.after[i] >= 0]
            if (self.num_open[before] == 0).all():
                self.unsent.remove(i)
                at = np.asarray(self.w.arrival)[i].astype(np.int64) @ [1_000_000, 1]
                if before.size:
                    assert now_us is not None
                    at = now_us + self.delay[i]
                self.known.append((int(at), i))

    def submit_due(self, real: EngineState, start: np.ndarray) -> EngineState:
        """Submits the requests that have arrived, in order of arrival."""
        start_us = int(start.astype(np.int64) @ [1_000_000, 1])
        for at, i in sorted(x for x in self.known if x[0] <= start_us):
            self.known.remove((at, i))
            row = np.arange(self.requests.prompt_length.shape[0])
            is_mine = (row >= self.ends[i] - self.samples[i]) & (row < self.ends[i])
            length = np.where(is_mine, self.requests.prompt_length, 0)
            arrival = np.where(is_mine[:, None], divmod(at, 1_000_000), 0)
            requests = self.requests._replace(
                prompt_length=length.astype(np.int32), arrival=arrival.astype(np.int32)
            )
            real, taken = _submit(real, requests, config=self.config)
            assert int(taken.sum()) == self.samples[i]
            self.rows += [i] * int(self.samples[i])
        return real

    def read_answers(self, info: Any, start: np.ndarray, micros: np.ndarray) -> None:
        """Counts sequences that ended in a step, and releases requests."""
        ended = np.asarray(info.sequence)[np.asarray(info.reason) > 0]
        np.subtract.at(self.num_open, [self.rows[k] for k in ended], 1)
        if ended.size:
            self.release(int(start.astype(np.int64) @ [1_000_000, 1]) + int(micros))


def engine_requests(
    w: Workload, config: EngineConfig, seed: int, window: int | None = None
) -> tuple[EngineState, Any]:
    """Returns an idle engine, and the workload's requests for it."""
    rng = np.random.default_rng(seed)
    windowed = None
    if window is not None:
        windowed = WindowLayers(1, config.num_window_pages(window), window)
    pages = make_pages(
        num_layers=1,
        num_pages=config.num_pages,
        num_kv_heads=1,
        page_size=config.page_size,
        head_dim=1,
        dtype="float32",
        windowed=windowed,
    )
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in np.asarray(w.prompt)]
    asks = [
        Sampling(n=int(n), max_tokens=int(max_tokens), temperature=1.0)
        for n, max_tokens in zip(
            np.asarray(w.samples), np.asarray(w.output), strict=True
        )
    ]
    attributes = None
    if w.attributes is not None:
        rows = zip(*(np.asarray(x).tolist() for x in w.attributes), strict=True)
        attributes = [RequestAttributes(*row) for row in rows]
    requests = make_requests(
        prompts,
        asks,
        config=config,
        attributes=attributes,
        width=config.submit_width,
    )
    arrival = np.repeat(np.asarray(w.arrival), np.asarray(w.samples), axis=0)
    short = config.submit_width - len(arrival)
    arrival = jnp.asarray(np.pad(arrival, [(0, short), (0, 0)]))
    return init(config, pages), requests._replace(arrival=arrival)


def capacity(config: EngineConfig, window: int | None = None) -> state.Capacity:
    return state.Capacity.of(
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_length=config.max_length,
        token_budget=config.token_budget,
        max_swap_pages=config.max_swap_pages,
        window=window,
    )
