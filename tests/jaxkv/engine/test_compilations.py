"""`run_steps`, `submit`, `cancel` and `drain` compile once, for all requests."""

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import pytest
from jax import monitoring

import jaxkv
from jaxkv import scheduling
from jaxkv.engine import EngineParts, EngineRules
from jaxkv.models import PagedForward, make_model_pages
from jaxkv.scheduling import Policy
from tests.support import engines
from tests.support.engines import MODEL
from tests.support.folders import TOKENIZED

PROGRAMS = {"jit(run_steps)", "jit(submit)", "jit(cancel)", "jit(drain)"}
MOVE = "jit(apply_transfer)"
"""And one program for each direction of the host swap."""
COMPILED = "/jax/core/compile/backend_compile_duration"
"""Event that JAX reports for every compilation, cached or not."""


@contextmanager
def compilations() -> Generator[list[str]]:
    """Collects the names of all programs made in this process."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **facts: object) -> None:
        if event == COMPILED:
            names.append(str(facts.get("fun_name")))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        monitoring.unregister_event_duration_listener(listen)


BOUNDS = dataclasses.replace(
    engines.TIGHT,
    num_pages=17,
    max_slots=3,
    max_sequences=9,
    queue_capacity=5,
    token_budget=10,
    max_logit_rows=5,
    submit_width=4,
    steps_per_call=8,
    prefix_cache=True,
    max_swap_pages=24,
    debug=False,
)


def every_mode(rng: np.random.Generator, ask: jaxkv.Sampling) -> jaxkv.Sampling:
    """Requests with each number of answers, cached or not, of several tenants."""
    n = int(rng.integers(1, BOUNDS.max_slots + 1))
    best_of = None if rng.random() < 0.5 else int(rng.integers(n, BOUNDS.max_slots + 1))
    return dataclasses.replace(
        ask,
        n=n,
        best_of=best_of,
        salt=int(rng.integers(2)),
        prefix_cache=rng.random() < 0.7,
    )


def make_engine(policy: Policy | None = None) -> jaxkv.Engine:
    parts = EngineParts(
        engines.params(),
        PagedForward(MODEL, BOUNDS.numerics),
        make_model_pages(MODEL, BOUNDS),
        BOUNDS,
        vocab_size=MODEL.vocab_size,
    )
    return jaxkv.Engine(parts, EngineRules(policy=policy or jaxkv.fcfs()))


@pytest.mark.thorough
def test_one_program_each_for_every_workload_length_and_mode() -> None:
    rng = np.random.default_rng(0)
    with compilations() as names:
        engine = make_engine(jaxkv.fcfs(preemption="swap", hold_new=False))
        # The programs that make states do not count; from here on, all programs do.
        names.clear()
        engine.compile()
        # Every prompt length, in workloads of every kind.
        lengths = rng.permutation(np.arange(1, MODEL.max_positions)).tolist()
        modes = set()
        num_cached = 0
        num_swapped = 0
        for workload in range(21):
            asks = engines.random_asks(rng, 6, max_answer=6, scores=True)
            prompts = [ask.prompt for ask in asks]
            for index in range(min(3, len(lengths))):
                prompts[index] = rng.integers(0, 61, lengths.pop()).tolist()
            samplings = [ask.sampling for ask in asks]
            for index in (3, 4, 5):
                samplings[index] = every_mode(rng, samplings[index])
                prompts[index] = [*range(workload % 3 * 6), *prompts[index][:12]]
            done = engine.generate(prompts, samplings)
            assert [len(completion.answers) for completion in done] == [
                ask.n for ask in samplings
            ]
            num_cached += sum(completion.num_cached for completion in done)
            num_swapped += sum(completion.num_swapped for completion in done)
            modes |= {(ask.n, ask.num_sequences) for ask in samplings}
            if workload == 0:
                assert sorted({*names} - {MOVE}) == sorted(PROGRAMS)
        # Each of three requests needs all pages: two are swapped out, one to the host.
        done = engine.generate([[1, 2, 3, 4]] * 3, jaxkv.Sampling(max_tokens=50))
        num_swapped += sum(completion.num_swapped for completion in done)
        assert not lengths
        assert len(modes) == 6  # all that three slots allow
        assert num_cached > 0
        assert num_swapped > 0
        # A cancellation, an idle engine, a future arrival: no new program.
        name = engine.submit([1, 2, 3], jaxkv.Sampling.greedy(max_tokens=50))
        engine.submit([1, 2, 3], arrival_s=engine.now() + 0.05)
        for event in engine.stream():
            if event.request_id == name and event.tokens:
                engine.cancel(name)
        # A second engine of the same configuration, and other parameters of the rules.
        again = make_engine(
            jaxkv.fcfs(chunk_size=3, watermark=1, preemption="swap", hold_new=False)
        )
        again.compile()
        assert again.generate([[1, 2, 3]] * 3)
        assert names.count(MOVE) == 1
        assert len(names) == len(PROGRAMS) + 1, names


@pytest.mark.slow
def test_another_kind_of_policy_compiles_the_steps_once_more() -> None:
    with compilations() as names:
        engine = make_engine(scheduling.static())
        names.clear()
        for _ in range(3):
            engine.generate([[1, 2, 3]] * 5)
        assert names.count("jit(run_steps)") == 1


def test_loading_the_same_folder_twice_compiles_once() -> None:
    # `Forward` and `EngineConfig` are compared by value, never by identity.
    folder = TOKENIZED
    one, two = (
        jaxkv.Engine.load(folder, num_pages=8, max_length=32).static for _ in range(2)
    )
    assert one == two
    assert hash(tuple(one.values())) == hash(tuple(two.values()))
