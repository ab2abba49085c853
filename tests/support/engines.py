"""Tiny models, random requests, and the plain loop that is the reference."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import clock, engine, models, scheduling
from jaxkv.engine import (
    CANCELLED,
    FINISH_REASONS,
    DrainedSequences,
    EngineConfig,
    EngineState,
    LogitsFn,
    RequestKinds,
    Requests,
    Speculation,
    StepInfo,
    init,
)
from jaxkv.engine.state import LENGTH_REACHED, NOT_A_NUMBER, NOT_ENDED, STOPPED
from jaxkv.ledger import EVENTS, NO_SEQUENCE, PROGRESS
from jaxkv.memory import Eviction, count_prefix_faults
from jaxkv.models import (
    AttentionKind,
    Experts,
    Forward,
    ModelConfig,
    PagedForward,
    Params,
    RecurrenceConfig,
    init_params,
    make_model_pages,
    param_shapes,
    save_model,
)
from jaxkv.sampling import Sampling, penalise
from jaxkv.sampling import sample as sample_tokens
from jaxkv.scheduling import Policy
from jaxkv.serving import HostSpace, make_requests
from jaxkv.text import ByteTokenizer
from tests.support.shapes import SMALL

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=40,
    max_positions=64,
    tie_embeddings=False,
)

SINGLE = dataclasses.replace(
    MODEL,
    num_layers=6,
    residual="single",
    gated=False,
    other_attention=(
        AttentionKind(is_recurrent=True),
        AttentionKind(feed_forward="experts"),
        AttentionKind(feed_forward="mlp"),
    ),
    attention_pattern=(1, 2, 0, 3, 2, 1),
    recurrence=RecurrenceConfig(
        kind="mamba2", num_key_heads=1, num_value_heads=2, key_dim=6, value_dim=5
    ),
    experts=Experts(num_experts=4, top_k=2, size=12, shared_size=8, latent_size=10),
)
"""A model whose layers have one branch: a state, experts, attention or an MLP."""

# Sixteen pages hold one sequence of `max_length`: the smallest possible pool.
TIGHT = EngineConfig(
    num_pages=16,
    page_size=4,
    max_slots=8,
    max_length=64,
    max_sequences=16,
    queue_capacity=12,
    token_budget=12,
    max_logit_rows=11,
    max_stop_tokens=3,
    max_logprobs=2,
    submit_width=8,
    steps_per_call=4,
    debug=True,
)
ROOMY = dataclasses.replace(TIGHT, num_pages=56)
"""A pool for three sequences of `max_length`, and a remainder."""
CACHED = dataclasses.replace(TIGHT, prefix_cache=True)
SERVED = dataclasses.replace(
    TIGHT,
    num_pages=24,
    max_slots=3,
    max_sequences=8,
    queue_capacity=4,
    token_budget=16,
    max_logit_rows=8,
    submit_width=4,
)
"""Configuration of a small `Engine`, shared so that tests share its programs."""
FCFS = scheduling.fcfs()
ADAPTERS = ("first", "second")
"""Names of the adapters of engines that have some."""

FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Compiler options for programs whose exact rounding does not matter."""

_compiled = functools.partial(
    jax.jit,
    engine.run_steps,
    static_argnames=(
        "config",
        "forward",
        "logits_fn",
        "speculation",
        "may_draft",
        "num_steps",
        "kinds",
    ),
    donate_argnames="state",
)
run_steps = _compiled(compiler_options=FAST_COMPILE)
run_steps_as_served = _compiled()
submit = jax.jit(engine.submit, static_argnames="config", donate_argnames="state")
cancel = jax.jit(engine.cancel, donate_argnames="state")
drain = jax.jit(engine.drain, donate_argnames="state")
full_logits = jax.jit(models.logits, static_argnames="config")


class Ask(NamedTuple):
    """A request in tests."""

    request_id: int
    prompt: list[int]
    sampling: Sampling
    arrival_s: float = 0.0


def greedy(request_id: int, prompt: list[int], max_tokens: int, **fields: Any) -> Ask:
    arrival_s = fields.pop("arrival_s", 0.0)
    ask = Sampling.greedy(max_tokens=max_tokens, **fields)
    return Ask(request_id, prompt, ask, arrival_s)


class Outcome(NamedTuple):
    """Outcome of a request."""

    tokens: list[int]
    reason: str
    logprobs: np.ndarray
    """Log-probabilities of the answer, where requested; else zeros."""
    prompt_logprobs: np.ndarray
    """Those of the prompt from its second token on, where requested; else zeros."""
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    prompt_top_ids: np.ndarray
    """Alternatives at the prompt's positions from the second on; else zeros."""
    prompt_top_logprobs: np.ndarray
    first_token_s: float
    finish_s: float
    num_recomputed: int
    num_cached: int
    num_preempted: int
    num_swapped: int
    score: float
    """Score of a beam search; else 0."""


type Name = int | tuple[int, int]
"""Name of an answer: the request id for the first, then (id, sample)."""


def names_of(asks: Iterable[Ask]) -> list[Name]:
    """Returns the names of all answers, in order of requests."""
    return [
        name_of(ask.request_id, sample)
        for ask in asks
        for sample in range(ask.sampling.num_sequences)
    ]


def name_of(request_id: int, sample: int) -> Name:
    return (request_id, sample) if sample else request_id


class Run(NamedTuple):
    """Results of a served workload."""

    outcomes: dict[Any, Outcome]
    info: StepInfo
    """`StepInfo` of all steps, as NumPy arrays."""
    state: EngineState
    """The idle engine at the end."""

    @property
    def tokens(self) -> dict[Any, list[int]]:
        return {name: outcome.tokens for name, outcome in self.outcomes.items()}


@functools.cache
def params(config: ModelConfig = MODEL, dtype: str = "float32") -> Params:
    """Random parameters with logits of a standard deviation of about 3.

    From NumPy, since JAX would compile a small program for each shape.
    """
    rng = np.random.default_rng(7)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return rng.normal(0, 0.25, shape) if len(shape) > 1 else np.ones(shape)

    weights = jax.tree.map(lambda x: draw(x.shape), param_shapes(config))
    if "head" in weights:
        weights["head"]["weight"] *= 3
    # Rounded once: the float64 parameters are the float32 parameters, widened.
    return jax.tree.map(lambda x: jnp.asarray(x.astype("float32"), dtype), weights)


def save_tiny_model(folder: Path, *, max_positions: int) -> str:
    """Saves a byte-level model with random weights that compiles in seconds."""
    shape = dataclasses.replace(SMALL, mlp_size=16, max_positions=max_positions)
    weights = init_params(shape, jax.random.key(0))
    save_model(folder, shape, weights, tokenizer=ByteTokenizer(257))
    return str(folder)


def start(
    config: EngineConfig,
    model: ModelConfig = MODEL,
    dtype: Any = "float32",
    speculation: Speculation | None = None,
) -> EngineState:
    """An idle engine with NaN in all pages, which no sequence may read."""
    pages = make_model_pages(model, config, dtype=dtype)
    memory = None if speculation is None else speculation.drafter.init(config)
    full = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pages)
    return init(config, full, memory)


def requests_of(asks: Sequence[Ask], config: EngineConfig) -> Requests:
    """Returns requests for `submit`: `submit_width` rows of NumPy arrays."""
    return make_requests(
        [ask.prompt for ask in asks],
        [ask.sampling for ask in asks],
        config=config,
        request_ids=[ask.request_id for ask in asks],
        arrivals_s=[ask.arrival_s for ask in asks],
        width=config.submit_width,
        adapters=ADAPTERS[: config.num_adapters],
    )


def submitted(asks: Sequence[Ask], config: EngineConfig) -> EngineState:
    """Returns an engine with the requests in its queue."""
    requests = requests_of(asks, config)
    state, taken = submit(start(config), requests, config=config)
    assert np.asarray(taken)[: len(names_of(asks))].all()
    return state


def assert_sound(info: StepInfo) -> None:
    """Asserts that no step violated an invariant or lacked pages."""
    assert info.violations is not None, "the engine must run in debug mode"
    for name, counts in info.violations._asdict().items():
        assert not np.asarray(counts).any(), name
    assert np.asarray(info.enough).all()


def assert_empty(state: EngineState) -> None:
    """Asserts that only cached pages are in use, and slots and queue are empty."""
    cached = np.zeros(state.pool.ref.shape, int)
    if state.prefixes is not None:
        assert int(count_prefix_faults(state.prefixes, state.pool)) == 0
        cached = np.asarray(state.prefixes.pinned).astype(int)
    np.testing.assert_array_equal(state.pool.ref, cached)
    assert int(state.pool.num_free) == (cached == 0).sum()
    assert not state.table.length.any()
    assert not state.table.ahead.any()
    assert (state.slots.sequence == NO_SEQUENCE).all()
    assert not np.any(state.slots.held)
    assert int(state.ledger.num_waiting) == 0
    if state.staging is not None:
        assert (state.staging.owner < 0).all()
        assert not state.staging.on_host.any()
    assert (state.ledger.queue == NO_SEQUENCE).all()


def serve(
    asks: Iterable[Ask],
    config: EngineConfig,
    policy: Policy | None = None,
    *,
    state: EngineState | None = None,
    model: ModelConfig = MODEL,
    weights: Params | None = None,
    as_served: bool = False,
    step_s: float = 0.0,
    max_calls: int = 2000,
    host: HostSpace | None = None,
    num: int = 0,
    logits_fn: LogitsFn | None = None,
    eviction: Eviction | None = None,
    speculation: Speculation | None = None,
    forward: Forward | None = None,
    kinds: RequestKinds | None = None,
) -> Run:
    """Runs requests to their end; submits them as the queue has room.

    Args:
      asks: the requests, in order of arrival.
      config: the engine's configuration.
      policy: the scheduling policy; None means `fcfs()`.
      state: an engine to continue; None means a new one.
      model: the model.
      weights: its parameters; None means `params(model)`.
      as_served: True to run the program that users get, which compiles slowly.
      step_s: time between calls, in s.
      max_calls: calls after which the test fails.
      host: swap space in host memory.
      num: unfinished answers in `state`.
      logits_fn: changes logits before sampling.
      eviction: eviction rule of the prefix cache; None means LRU.
      speculation: drafter and verifier.
      forward: the model's forward pass; None means `PagedForward`.
      kinds: kinds of the requests; None means all.
    """
    waiting = list(asks)
    infos = []
    # Left out if None, so that the program is that of all other tests.
    rare = {"logits_fn": logits_fn, "speculation": speculation, "kinds": kinds}
    changed: dict[str, Any] = {
        name: value for name, value in rare.items() if value is not None
    }
    outcomes: dict[Name, Outcome] = {}
    num += len(names_of(waiting))
    weights = params(model) if weights is None else weights
    dtype = jax.tree.leaves(weights)[0].dtype
    state = start(config, model, dtype, speculation) if state is None else state
    policy = scheduling.fcfs() if policy is None else policy
    if forward is None:
        forward = PagedForward(model, config.numerics)
    for call in range(max_calls):
        if len(outcomes) == num:
            break
        if waiting:
            requests = requests_of(batch_of(waiting, config), config)
            state, taken = submit(state, requests, config=config)
            # A request without room blocks all later ones.
            assert sorted(np.asarray(taken), reverse=True) == list(np.asarray(taken))
            begun = np.asarray(taken) & (requests.params.sample == 0)
            waiting = waiting[int(begun.sum()) :]
        state, info = (run_steps_as_served if as_served else run_steps)(
            weights,
            state,
            clock.from_seconds(call * step_s),
            config=config,
            forward=forward,
            policy=policy,
            **changed,
            eviction=eviction,
        )
        infos.append(jax.tree.map(np.asarray, info))
        assert_sound(infos[-1])
        if infos[-1].is_disabled is not None:
            changed["may_draft"] = not infos[-1].is_disabled[-1]
        if host is not None and infos[-1].asks_host[-1]:
            state = host.exchange(state)
        state, sequences = drain(state)
        outcomes |= outcomes_of(sequences)
    assert len(outcomes) == num, f"stuck after {max_calls} calls"
    assert_empty(state)
    return Run(outcomes, jax.tree.map(lambda *x: np.concatenate(x), *infos), state)


def run_on(state, seconds: float = 0.0, calls: int = 1, policy=FCFS):
    """Runs further calls; returns the infos of the last call as NumPy arrays."""
    forward = PagedForward(MODEL, TIGHT.numerics)
    info = None
    for _ in range(calls):
        state, info = run_steps(
            params(),
            state,
            clock.from_seconds(seconds),
            config=TIGHT,
            forward=forward,
            policy=policy,
        )
        info = jax.tree.map(np.asarray, info)
        assert_sound(info)
    return state, info


def batch_of(asks: Sequence[Ask], config: EngineConfig) -> Sequence[Ask]:
    """Returns the first requests that fit into one call of `submit`."""
    rows = np.cumsum([ask.sampling.num_sequences for ask in asks])
    return asks[: max(1, int(np.searchsorted(rows, config.submit_width, "right")))]


def outcomes_of(drained: DrainedSequences) -> dict[Name, Outcome]:
    """Returns the outcomes of the finished requests."""
    outcomes = {}
    drained = jax.tree.map(np.asarray, drained)
    s = drained.sequences
    progress = drained.progress
    events = drained.events
    for row in np.flatnonzero(drained.is_final):
        start = s.prompt_length[row]
        end = progress.num_tokens[row]
        name = name_of(int(s.request_id[row]), int(s.params.sample[row]))
        outcomes[name] = Outcome(
            tokens=s.tokens[row, start:end].tolist(),
            reason=str(FINISH_REASONS[s.reason[row]]),
            logprobs=s.logprobs[row, start:end],
            prompt_logprobs=s.logprobs[row, 1:start],
            top_ids=s.top_ids[row, start:end],
            top_logprobs=s.top_logprobs[row, start:end],
            prompt_top_ids=s.top_ids[row, 1:start],
            prompt_top_logprobs=s.top_logprobs[row, 1:start],
            first_token_s=seconds_of(events.first_s[row], events.first_us[row]),
            finish_s=seconds_of(events.finish_s[row], events.finish_us[row]),
            num_recomputed=int(events.num_recomputed[row]),
            num_cached=int(s.num_cached[row]),
            num_preempted=int(progress.num_preempted[row]),
            num_swapped=int(s.num_swapped[row]),
            score=float(s.score[row]),
        )
    return outcomes


def seconds_of(seconds: Any, micros: Any) -> float:
    """Returns a time of `Events` in s; 0 if the event did not happen."""
    return max(0.0, float(seconds) - 1 + float(micros) / clock.MICROS_PER_SECOND)


def unfinished(state: EngineState) -> np.ndarray:
    """Returns a mask of the waiting and running sequences."""
    progress, events = (
        np.asarray(x) for x in (state.ledger.progress, state.ledger.events)
    )
    num_tokens = PROGRESS.read(progress, "num_tokens")
    return (num_tokens > 0) & (EVENTS.read(events, "finish_s") == 0)


def random_asks(
    rng: np.random.Generator,
    num: int,
    *,
    max_prompt: int = 30,
    max_answer: int = 24,
    vocab: int = MODEL.vocab_size,
    first_id: int = 100,
    scores: bool = False,
    max_n: int = 1,
) -> list[Ask]:
    """Requests of every kind: greedy or sampled, truncated, penalised, seeded, stops.

    With `scores`, some have log-probabilities of answers and prompts; with `max_n`,
    some have several answers.
    """
    asks = []
    for request_id in range(first_id, first_id + num):
        fields: dict[str, Any] = dict(max_tokens=int(rng.integers(1, max_answer + 1)))
        if rng.random() < 0.4:
            fields["temperature"] = 0.0
        else:
            fields["temperature"] = float(rng.uniform(0.3, 1.5))
            if rng.random() < 0.4:
                fields["top_k"] = int(rng.integers(1, vocab + 5))
            if rng.random() < 0.4:
                fields["top_p"] = float(rng.uniform(0.2, 1.0))
            if rng.random() < 0.3:
                fields["min_p"] = float(rng.uniform(0.0, 0.5))
        if rng.random() < 0.3:
            fields["repetition_penalty"] = float(rng.uniform(0.7, 1.6))
            fields["presence_penalty"] = float(rng.uniform(-1, 1))
            fields["frequency_penalty"] = float(rng.uniform(-0.5, 0.5))
        if rng.random() < 0.3:
            fields["seed"] = int(rng.integers(0, 2**40))
        if rng.random() < 0.3:
            fields["stop_tokens"] = tuple(rng.integers(0, vocab, 2).tolist())
        if scores and rng.random() < 0.6:
            fields["logprobs"] = int(rng.integers(0, 3))
        if scores and rng.random() < 0.4:
            fields["prompt_logprobs"] = True
        if max_n > 1 and rng.random() < 0.6:
            fields["n"] = int(rng.integers(1, max_n + 1))
        prompt = rng.integers(0, vocab, rng.integers(1, max_prompt + 1)).tolist()
        asks.append(Ask(request_id, prompt, Sampling(**fields)))
    return asks


@functools.partial(jax.jit, static_argnames="model", compiler_options=FAST_COMPILE)
def _plain_loop(weights, requests: Requests, model: ModelConfig):
    """Answers every request by a full forward pass for each token."""
    rows = jnp.arange(requests.limit.shape[0], dtype=jnp.int32)

    def step(carry):
        tokens, num_tokens, reason = carry
        logits = models.logits(weights, jnp.maximum(tokens, 0), config=model)
        logits = logits[rows, jnp.maximum(num_tokens - 1, 0)]
        changed = penalise(
            logits, tokens, requests.prompt_length, num_tokens, requests.params
        )
        draw = sample_tokens(changed, requests.params, num_tokens, raw=logits)
        goes_on = (reason == NOT_ENDED) & ~draw.invalid
        place = jnp.where(goes_on, num_tokens, tokens.shape[1])
        tokens = tokens.at[rows, place].set(draw.token, mode="drop")
        num_tokens = num_tokens + goes_on.astype(jnp.int32)
        ends = jnp.where(num_tokens == requests.limit, LENGTH_REACHED, NOT_ENDED)
        stops = jnp.any(draw.token[:, None] == requests.stop_tokens, axis=1)
        ends = jnp.where(stops, STOPPED, ends)
        ends = jnp.where(draw.invalid, NOT_A_NUMBER, ends)
        ends = jnp.where(reason == NOT_ENDED, ends, reason)
        return tokens, num_tokens, ends

    unused = requests.prompt_length == 0
    reason = jnp.where(unused, CANCELLED, NOT_ENDED)
    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[2] == NOT_ENDED),
        step,
        (requests.tokens, requests.prompt_length, reason.astype(jnp.int32)),
    )


def plain(
    asks: Sequence[Ask],
    config: EngineConfig,
    *,
    model: ModelConfig = MODEL,
    weights: Params | None = None,
) -> dict[Any, tuple[list[int], str]]:
    """Returns tokens and reason of every answer, computed without batch and pages."""
    weights = params(model) if weights is None else weights
    answers = {}
    while asks:
        batch = batch_of(asks, config)
        asks = asks[len(batch) :]
        requests = requests_of(batch, config)
        tokens, num, reason = map(np.asarray, _plain_loop(weights, requests, model))
        for row, name in enumerate(names_of(batch)):
            answer = tokens[row, requests.prompt_length[row] : num[row]].tolist()
            answers[name] = answer, FINISH_REASONS[reason[row]]
    return answers


def assert_equal_plain(run: Run, asks: Sequence[Ask], config: EngineConfig) -> None:
    """Asserts that tokens and finish reasons equal those of the plain loop."""
    expected = plain(asks, config)
    got = {
        name: (outcome.tokens, outcome.reason) for name, outcome in run.outcomes.items()
    }
    assert got == expected


def logprobs_of(
    ask: Ask,
    answer: Sequence[int],
    model: ModelConfig = MODEL,
    weights: Params | None = None,
) -> np.ndarray:
    """Returns log-probabilities [position, vocab] of one forward pass, in float64.

    Row i is the distribution of token i + 1 of prompt and answer.
    """
    weights = params(model) if weights is None else weights
    tokens = np.zeros((1, model.max_positions), np.int32)
    sequence = [*ask.prompt, *answer]
    tokens[0, : len(sequence)] = sequence
    logits = full_logits(weights, tokens, config=model)[0, : len(sequence)]
    wide = np.asarray(logits, np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def pages_of(ask: Ask, page_size: int = TIGHT.page_size) -> int:
    """Returns the largest number of pages that a request can need."""
    shared = len(ask.prompt) // page_size
    limit = min(len(ask.prompt) + ask.sampling.max_tokens, TIGHT.max_length)
    return shared + ask.sampling.num_sequences * (-(-(limit - 1) // page_size) - shared)
