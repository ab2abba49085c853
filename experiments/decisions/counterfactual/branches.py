"""The states, the policies and the branches of the counterfactual experiment."""

import dataclasses
import functools
import itertools
import math
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from experiments import lab
from experiments.harness import cut_held_out_prompts, load_text_model
from jaxkv.clock import from_seconds, to_seconds
from jaxkv.engine import (
    EngineConfig,
    EngineState,
    Speculation,
    StepInfo,
    advance_clock,
    branch,
    init,
    run_steps,
    submit,
)
from jaxkv.ledger import EVENTS
from jaxkv.memory import Eviction, Uses
from jaxkv.models import PagedForward, make_model_pages
from jaxkv.sampling import Sampling
from jaxkv.scheduling import Policy, RequestAttributes, ageing_priority, fcfs
from jaxkv.serving import make_requests
from jaxkv.speculation import NGram, SharedNoiseVerifier
from jaxkv.workloads import find_jobs
from scaling.fits import student_t

TOKENS_PER_LEVEL = 4
"""A request with this many more tokens to answer is less urgent by one level."""
METRICS = ("mean_latency_s", "p90_latency_s", "mean_job_s")
LEVEL = 0.9
"""Probability of the intervals."""


class Config(lab.ConfigRecord):
    """The load, the engine, the time of its steps, and the decisions."""

    model: str = "stdlib-bytes"
    """Folder, or name of a bundled model."""
    num_sessions: lab.PositiveInt = 5
    """Sessions; each request of a session has the prompt of the one before, and more
    text."""
    turns: lab.PositiveInt = 4
    """Requests of a session."""
    rate: lab.PositiveFloat = 12.0
    """Requests per second, at the times of a Poisson process."""
    first_tokens: lab.PositiveInt = 32
    """Tokens of the first prompt of a session."""
    turn_tokens: lab.PositiveInt = 24
    """Tokens that each further prompt adds."""
    output_tokens: Annotated[tuple[int, int], lab.Ascending(1)] = (8, 96)
    """Fewest and most tokens of an answer; the logarithm is uniform."""
    temperature: float = 0.7
    """Sampling temperature."""
    num_seeds: Annotated[int, lab.Range(2)] = 4
    """Draws of the load, each with its own state."""
    max_slots: lab.PositiveInt = 6
    """Sequences that run concurrently."""
    num_pages: lab.PositiveInt = 40
    """Pages of the pool, of 16 tokens."""
    token_budget: lab.PositiveInt = 48
    """Largest number of tokens fed in a step."""
    num_before: lab.PositiveInt = 32
    """Steps before the state that is continued."""
    num_calls: lab.PositiveInt = 170
    """Steps of each branch; the clock advances after each."""
    step_s: lab.PositiveFloat = 0.02
    """Time of a step without rows, in s."""
    row_s: lab.PositiveFloat = 0.0005
    """Time per token fed, drafts included, in s."""
    levels_ms: tuple[int, ...] = (1, 30, 300, 3000)
    """Orders of the queue: waiting time in ms that makes up for `TOKENS_PER_LEVEL`
    tokens of an answer; 1 is nearly first come, first served."""
    chunks: tuple[int, ...] = (8, 48)
    """Largest numbers of rows of one prompt in a step."""
    victims: tuple[Literal["latest", "longest_remaining"], ...] = (
        "latest",
        "longest_remaining",
    )
    """Rules for the request to preempt."""
    evictions: tuple[Literal["LRU", "LFU"], ...] = ("LRU", "LFU")
    """Eviction rules of the prefix cache."""
    drafters: tuple[Literal["none", "ngram"], ...] = ("none", "ngram")
    """Without drafts, and with drafts from n-grams of the text so far."""
    num_drafts: lab.PositiveInt = 3
    """Draft tokens of the branches with a drafter."""
    num_timed: lab.PositiveInt = 64
    """Branches of the measurement of time and memory."""
    batch_sizes: tuple[lab.PositiveInt, ...] = (64,)
    """Branches that run at the same time, by `vmap`, in further measurements."""
    num_simulated: lab.PositiveInt = 400
    """Requests of the simulations that are timed."""
    num_rounds: lab.PositiveInt = 3
    """Rounds of each measurement of time."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.drafters[:1] != ("none",):
            raise ValueError(f"drafters={self.drafters} must begin with 'none'")
        for name in ("levels_ms", "chunks", "victims", "evictions"):
            if not getattr(self, name):
                raise ValueError(f"{name}=() must have at least one entry")
        if self.max_length > 16 * self.num_pages:
            raise ValueError(
                f"num_pages={self.num_pages} must hold a prompt and its longest "
                f"answer, {self.max_length} tokens"
            )

    @property
    def longest_prompt(self) -> int:
        """Tokens of the last prompt of a session."""
        return self.first_tokens + (self.turns - 1) * self.turn_tokens

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt and answer."""
        return self.longest_prompt + self.output_tokens[1]

    @property
    def engine(self) -> EngineConfig:
        """Configuration of the engine, with a row for each request."""
        num = self.num_sessions * self.turns
        return EngineConfig(
            num_pages=self.num_pages,
            max_slots=self.max_slots,
            max_length=self.max_length,
            token_budget=self.token_budget,
            steps_per_call=1,
            max_sequences=num,
            queue_capacity=num,
            submit_width=num,
            queue_head=min(num, 32),
            prefix_cache=True,
        )


class LinearTime(NamedTuple):
    """Time of a call: a constant for each step with rows, and a time per row."""

    step_s: float
    row_s: float

    def __call__(self, info: StepInfo) -> Float[Array, ""]:
        """Returns the seconds of a call."""
        rows = jnp.sum(info.num_rows, axis=1).astype(jnp.float32)
        steps = jnp.sum((rows > 0).astype(jnp.float32))
        return self.step_s * steps + self.row_s * jnp.sum(rows)


class LeastUsed(NamedTuple):
    """Eviction by least recent or by least frequent use; one type for both rules."""

    by_frequency: Bool[Array, ""]

    def priority(self, uses: Uses) -> Int32[Array, "..."]:
        """Returns the number of uses, or the tick of the last one."""
        return jnp.where(self.by_frequency, uses.num_uses, uses.last_used)


class Decision(NamedTuple):
    """Decisions of a branch, in the order of the tree."""

    drafter: str
    eviction: str
    level_ms: int
    chunk: int
    victim: Literal["latest", "longest_remaining"]

    @property
    def policy(self) -> Policy:
        """The scheduling policy; all have the same type."""
        inner = fcfs(chunk_size=self.chunk, victim=self.victim, stackable=True)
        return ageing_priority(level_ms=self.level_ms, inner=inner)

    @property
    def rule(self) -> Eviction:
        """The eviction rule."""
        return LeastUsed(jnp.asarray(self.eviction == "LFU"))


class BranchTable(lab.ResultTable):
    """Metrics of each branch, by seed."""

    drafter: lab.Texts = lab.column('"none" or "ngram"')
    eviction: lab.Texts = lab.column("eviction rule of the prefix cache")
    level_ms: lab.Ints = lab.column("waiting time that makes up for a level, in ms")
    chunk: lab.Ints = lab.column("largest number of rows of one prompt in a step")
    victim: lab.Texts = lab.column("rule for the request to preempt")
    mean_latency_s: Float[np.ndarray, "rows seeds"] = lab.column(
        "mean latency of a request", of=np.mean
    )
    p90_latency_s: Float[np.ndarray, "rows seeds"] = lab.column(
        "its 90th percentile", of=np.mean
    )
    mean_job_s: Float[np.ndarray, "rows seeds"] = lab.column(
        "mean time of a session, from its first arrival to its last answer", of=np.mean
    )
    num_preempted: lab.Floats = lab.column("preemptions, mean over seeds")
    num_cached: lab.Floats = lab.column("cached prompt tokens, mean over seeds")
    num_open: lab.Ints = lab.column("requests that the last call left open")

    def regret(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the regret of each branch, and half of the width of its interval.

        Differences are taken within a seed, so that what all branches share cancels.
        """
        values = getattr(self, metric)
        best = np.argmin(values.mean(axis=1))
        return mean_and_width(values - values[best])


def mean_and_width(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns means over the last axis, and half of the width of their intervals."""
    num = values.shape[-1]
    error = values.std(axis=-1, ddof=1) / math.sqrt(num)
    return values.mean(axis=-1), student_t(LEVEL, num - 1) * error


class BranchSetting:
    """The model, the decisions, and the jitted programs of an experiment."""

    def __init__(self, config: Config) -> None:
        """Loads the model."""
        self.config = config
        self.model = load_text_model(config.model, max_length=config.max_length)
        self.forward = PagedForward(self.model.config)
        self.decisions = [
            Decision(*values)
            for values in itertools.product(
                config.drafters,
                config.evictions,
                config.levels_ms,
                config.chunks,
                config.victims,
            )
        ]
        self.time = LinearTime(config.step_s, config.row_s)
        self.run = functools.partial(
            run_steps, config=config.engine, forward=self.forward
        )
        self.call = jax.jit(self.run)
        """One call of the engine."""
        self._advance = jax.jit(functools.partial(advance_clock, call_time=self.time))
        self._submit = jax.jit(functools.partial(submit, config=config.engine))
        drafting = dataclasses.replace(config.engine, max_drafts=config.num_drafts)
        drafter = NGram()
        runs = {
            "none": self.run,
            "ngram": functools.partial(
                run_steps,
                config=drafting,
                forward=self.forward,
                speculation=Speculation(drafter, SharedNoiseVerifier()),
            ),
        }
        self.memories = {"none": None, "ngram": drafter.init(drafting)}
        self.programs = {
            name: jax.jit(self.branches(run, num_calls=config.num_calls))
            for name, run in runs.items()
            if name in config.drafters
        }

    def branches(self, run: Any, **options: Any) -> Any:
        """Returns `branch` with its static arguments."""
        return functools.partial(
            branch, run=run, call_time=self.time, **{"keep_pages": False} | options
        )

    @property
    def first(self) -> Decision:
        """Decisions of the engine before the state is continued."""
        return self.decisions[0]

    def draw_state(self, seed: int) -> tuple[EngineState, np.ndarray]:
        """Returns an idle engine with all requests of a seed, and their sessions."""
        c = self.config
        rng = np.random.default_rng(seed)
        ask = Sampling(temperature=c.temperature, max_tokens=1, ignore_eos=True)
        texts = cut_held_out_prompts(
            self.model.tokenizer,
            [c.longest_prompt] * c.num_sessions,
            [ask] * c.num_sessions,
            rng,
        )
        num = c.num_sessions * c.turns
        # Turns of a session are in order, and sessions overlap.
        session = rng.permuted(np.repeat(np.arange(c.num_sessions), c.turns))
        turn = [int((session[:i] == session[i]).sum()) for i in range(num)]
        low, high = np.log(c.output_tokens)
        limits = np.exp(rng.uniform(low, high, num)).round().astype(int).tolist()
        requests = make_requests(
            [
                texts[s].tokens[: c.first_tokens + t * c.turn_tokens]
                for s, t in zip(session, turn, strict=True)
            ],
            [
                dataclasses.replace(ask, max_tokens=limit, seed=1000 * seed + i)
                for i, limit in enumerate(limits)
            ],
            config=c.engine,
            arrivals_s=np.cumsum(rng.exponential(1 / c.rate, num)).tolist(),
            attributes=[
                RequestAttributes(priority=x // TOKENS_PER_LEVEL) for x in limits
            ],
        )
        state = init(c.engine, make_model_pages(self.model.config, c.engine))
        state, taken = self._submit(state, requests)
        assert np.asarray(taken).all()
        return state, session

    def go_on(
        self, state: EngineState, now: Any, num_calls: int
    ) -> tuple[EngineState, Any, list[StepInfo]]:
        """Runs the engine with its own policy, call by call."""
        infos = []
        for _ in range(num_calls):
            state, info = self.call(
                self.model.params,
                state,
                now,
                policy=self.first.policy,
                eviction=self.first.rule,
            )
            now = self._advance(state, now, info)
            infos.append(info)
        return state, now, infos

    def snapshot(self, seed: int) -> tuple[EngineState, Any, np.ndarray]:
        """Returns a busy state, its clock, and the sessions of the requests."""
        state, session = self.draw_state(seed)
        state, now, _ = self.go_on(
            state, jnp.asarray(from_seconds(0.0)), self.config.num_before
        )
        return state, now, session


def continue_all(
    setting: BranchSetting, progress: lab.Progress
) -> tuple[list[dict[str, Any]], tuple[int, int, int, int]]:
    """Continues the state of each seed in all branches.

    Returns:
      The rows of `BranchTable`, and the last fields of the experiment's `Result`.
    """
    decisions = setting.decisions
    by_seed = []
    num_arrays = num_different = num_answers = num_other = 0
    for seed in progress.track(range(setting.config.num_seeds), "states", "seeds"):
        state, now, session = setting.snapshot(seed)
        results = []
        for drafter, program in setting.programs.items():
            progress.show(f"seed {seed}, drafter {drafter}")
            chosen = [x for x in decisions if x.drafter == drafter]
            ends, infos = program(
                setting.model.params,
                state._replace(memory=setting.memories[drafter]),
                now,
                policies=[x.policy for x in chosen],
                evictions=[x.rule for x in chosen],
            )
            results.append(jax.tree.map(np.asarray, (ends, infos)))
        by_seed.append([_metrics(*x, session) for x in results])
        if seed == 0:
            end, _, calls = setting.go_on(state, now, setting.config.num_calls)
            plain = (
                end._replace(pages=None),  # ty: ignore[invalid-argument-type]
                jax.tree.map(lambda *x: np.concatenate(x), *calls),
            )
            pairs = [
                (np.asarray(x), y[0])
                for x, y in zip(
                    jax.tree.leaves(plain), jax.tree.leaves(results[0]), strict=True
                )
            ]
            num_arrays = len(pairs)
            num_different = sum(x.tobytes() != y.tobytes() for x, y in pairs)
        first = jax.tree.map(lambda x: x[:1], results[0][0])
        for ends, _ in results:
            both = (ends.sequences.reason > 0) & (first.sequences.reason > 0)
            other = (ends.sequences.tokens != first.sequences.tokens).any(axis=-1)
            num_answers += int(both.sum())
            num_other += int((both & other).sum())
    rows = []
    for i, decision in enumerate(decisions):
        group, place = divmod(i, len(decisions) // len(setting.programs))
        columns = {
            name: [metrics[group][name][place] for metrics in by_seed]
            for name in (*METRICS, "num_preempted", "num_cached", "num_open")
        }
        for name, combine in (
            ("num_preempted", np.mean),
            ("num_cached", np.mean),
            ("num_open", np.sum),
        ):
            columns[name] = combine(columns[name])
        rows.append(decision._asdict() | columns)
    return rows, (num_arrays, num_different, num_answers, num_other)


def _metrics(
    ends: EngineState, infos: StepInfo, session: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the metrics of branches; open requests count up to the last clock.

    All arrays are NumPy's.
    """
    s: Any = ends.sequences
    clock: Any = ends.ledger.clock
    steps: Any = infos
    events: Any = EVENTS.unpack(ends.ledger.events)
    arrival_s = to_seconds(s.arrival)
    end_s = to_seconds(clock)[:, None]
    # Events have the second plus 1.
    finish_s = to_seconds(np.stack([events.finish_s - 1, events.finish_us], axis=-1))
    is_open = events.finish_s == 0
    finish_s = np.where(is_open, np.maximum(end_s, arrival_s), finish_s)
    latency_s = finish_s - arrival_s
    jobs = find_jobs(arrival_s, finish_s, session)
    return {
        "mean_latency_s": latency_s.mean(axis=1),
        "p90_latency_s": np.percentile(latency_s, 90, axis=1),
        "mean_job_s": jobs.latency_s.mean(axis=1),
        "num_preempted": steps.num_preempted.sum(axis=1),
        "num_cached": s.num_cached.sum(axis=1),
        "num_open": is_open.sum(axis=1),
    }
