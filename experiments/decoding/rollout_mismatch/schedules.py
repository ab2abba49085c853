"""Small models of four families, and engines that serve them by many schedules."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float32, Int32

import jaxkv
from jaxkv.engine import EngineConfig, EngineRules
from jaxkv.models import Experts, LatentConfig, ModelConfig, Params, init_params
from jaxkv.sampling import Sampling
from jaxkv.serving import Completion
from jaxkv.speculation import (
    Method,
    ModelWeights,
    build_speculative,
    parse_speculation,
)

LENGTH = 120
"""Largest number of tokens of a sequence."""
DENSE = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=40,
    max_positions=LENGTH + 8,
    tie_embeddings=False,
)
FAMILIES = {
    "dense": DENSE,
    "experts": dataclasses.replace(
        DENSE, experts=Experts(num_experts=4, top_k=2, size=24)
    ),
    "latent": dataclasses.replace(
        DENSE,
        num_kv_heads=4,
        head_dim=18,
        latent=LatentConfig(
            kv_rank=16, q_rank=14, nope_dim=12, rope_dim=6, value_dim=10
        ),
    ),
    "window": dataclasses.replace(DENSE, window=21),
}
"""Models by name; head sizes of latent attention are no powers of two."""


class EngineSetup(NamedTuple):
    """An engine's bounds, preemption and drafts.

    A policy has arrays, which would initialize JAX's devices while modules are loaded.
    """

    bounds: EngineConfig
    policy: Mapping[str, Any] = {}
    """Arguments of `fcfs`."""
    method: Method | None = None


_BOUNDS = EngineConfig(
    num_pages=36,
    page_size=8,
    max_slots=3,
    max_length=LENGTH,
    token_budget=40,
    max_logit_rows=30,
    numerics="reproducible",
    prefix_cache=True,
)
SETUPS = {
    # A pool for two of three slots: sequences are preempted.
    "recompute": EngineSetup(_BOUNDS),
    "swap": EngineSetup(
        dataclasses.replace(_BOUNDS, max_swap_pages=15),
        {"preemption": "swap", "hold_new": False},
    ),
    "small pages": EngineSetup(
        dataclasses.replace(_BOUNDS, page_size=2, num_pages=130, token_budget=7),
        {"chunk_size": 3},
    ),
    "large pages": EngineSetup(
        dataclasses.replace(
            _BOUNDS, page_size=64, num_pages=20, token_budget=200, max_slots=8
        ),
    ),
    "drafts": EngineSetup(dataclasses.replace(_BOUNDS, max_drafts=3), method="ngram"),
}
"""Engines by name."""
LOADS = ("together", "one by one", "one a step", "in waves")
"""Orders in which requests are submitted."""


class LogprobCount(NamedTuple):
    """Log-probabilities of an engine, and those that differ from `score`."""

    num_logprobs: int
    num_different: int


class ReportedLogprobs(NamedTuple):
    """Sequences of an engine with its log-probabilities; padding is arbitrary."""

    tokens: Int32[np.ndarray, "sequences length"]
    lengths: Int32[np.ndarray, " sequences"]
    logprobs: Float32[np.ndarray, "sequences length"]
    is_reported: Bool[np.ndarray, "sequences length"]


def make_setup_engine(
    config: ModelConfig, params: Params, setup: EngineSetup
) -> jaxkv.Engine:
    """Makes an engine of a model in the type of its parameters."""
    parts, speculation = build_speculative(
        ModelWeights(config, params),
        setup.bounds,
        parse_speculation(setup.method),
        dtype=str(params["embed"]["weight"].dtype),
    )
    rules = EngineRules(policy=jaxkv.fcfs(**setup.policy), speculation=speculation)
    return jaxkv.Engine(parts, rules)


def draw_requests(
    seed: int, num: int, vocab_size: int
) -> tuple[list[list[int]], list[Sampling]]:
    """Draws prompts, half of them with a common prefix, and sampling parameters."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab_size, 24).tolist()
    prompts = []
    asks = []
    for index in range(num):
        prompt = rng.integers(0, vocab_size, rng.integers(1, 40)).tolist()
        if index % 2:
            prompt = prefix + prompt
        ask = Sampling(
            max_tokens=LENGTH - len(prompt),
            temperature=float(rng.uniform(0.5, 1.2)),
            top_k=int(rng.integers(0, 30)),
            seed=index,
            logprobs=0,
            prompt_logprobs=index % 3 == 0,
            n=1 + index % 2,
            ignore_eos=True,
        )
        prompts.append(prompt)
        asks.append(ask)
    return prompts, asks


def serve_load(
    engine: jaxkv.Engine,
    prompts: Sequence[list[int]],
    asks: Sequence[Sampling],
    load: str = "together",
) -> list[Completion]:
    """Serves requests, submitted in one of `LOADS`; returns completions in order."""
    if load == "together":
        return engine.generate(prompts, asks)
    order = [*range(len(prompts))]
    waves = {
        "one by one": [[index] for index in order],
        "one a step": [[index] for index in order],
        "in waves": [order[max(0, end - 3) : end + 1] for end in order[::-4]],
    }[load]
    ids: dict[int, int] = {}
    done: dict[int, Completion] = {}
    for wave in waves:
        for index in wave:
            ids[engine.submit(prompts[index], asks[index])] = index
        if load == "one a step":
            engine.step()
            continue
        done |= _complete(engine, ids)
    done |= _complete(engine, ids)
    return [done[index] for index in order]


def _complete(
    engine: jaxkv.Engine, ids: dict[int, int]
) -> Iterable[tuple[int, Completion]]:
    """Runs the engine until all requests are complete."""
    for event in engine.stream():
        if event.completion is not None:
            yield ids[event.request_id], event.completion


def reported_logprobs(
    prompts: Sequence[list[int]],
    completions: Sequence[Completion],
    length: int = LENGTH,
) -> ReportedLogprobs:
    """Collects the log-probabilities of prompts and answers that an engine reported."""
    sequences = []
    for prompt, completion in zip(prompts, completions, strict=True):
        first = completion.prompt_logprobs or [None] * len(prompt)
        sequences += [
            (prompt + answer.tokens, [*first, *(answer.logprobs or ())])
            for answer in completion.answers
        ]
    tokens = np.zeros((len(sequences), length), np.int32)
    logprobs = np.full(tokens.shape, np.nan, np.float32)
    for row, (sequence, values) in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        logprobs[row, : len(values)] = [np.nan if x is None else x for x in values]
    lengths = np.array([len(sequence) for sequence, _ in sequences], np.int32)
    return ReportedLogprobs(tokens, lengths, logprobs, ~np.isnan(logprobs))


def count_different(
    engine: jaxkv.Engine,
    config: ModelConfig,
    params: Params,
    *,
    seed: int = 5,
    num_requests: int = 12,
    load: str = "together",
    mesh: Mesh | None = None,
) -> LogprobCount:
    """Serves random requests, and counts log-probabilities that differ from `score`."""
    prompts, asks = draw_requests(seed, num_requests, min(config.vocab_size, 61))
    reported = reported_logprobs(prompts, serve_load(engine, prompts, asks, load))
    scores = jaxkv.score(
        params, reported.tokens, reported.lengths, config=config, mesh=mesh
    )
    is_different = (np.asarray(scores) != reported.logprobs) & reported.is_reported
    return LogprobCount(int(reported.is_reported.sum()), int(is_different.sum()))


def count_schedules(
    family: str, dtype: str, *, num_setups: int, num_requests: int
) -> Iterator[tuple[str, str, LogprobCount]]:
    """Counts the differences of a family's engines under every load.

    Yields:
      Names of the setup and of the load, and the counts.
    """
    config = FAMILIES[family]
    params = init_params(config, jax.random.key(0), dtype=dtype)
    for name in [*SETUPS][:num_setups]:
        engine = make_setup_engine(config, params, SETUPS[name])
        for seed, load in enumerate(LOADS):
            counts = count_different(
                engine, config, params, seed=seed, num_requests=num_requests, load=load
            )
            yield name, load, counts
