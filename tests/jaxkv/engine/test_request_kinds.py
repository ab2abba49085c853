"""Programs for fewer kinds of requests take the same steps, bit for bit."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv.engine import ALL_KINDS, EngineRules, RequestKinds
from jaxkv.sampling import Sampling
from tests.support import engines

SWAPPING = dataclasses.replace(engines.TIGHT, max_swap_pages=24)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (SWAPPING, (True, False)),
        (engines.CACHED, (False, True)),
        (SWAPPING, (False, True)),
        (SWAPPING, (False, False)),
        (engines.CACHED, (True, False)),
        (engines.CACHED, (False, False)),
    ],
)
def test_steps_of_fewer_kinds(
    config: jaxkv.EngineConfig, kinds: tuple[bool, bool]
) -> None:
    """Serves random requests by both programs, with preemptions."""
    smaller = RequestKinds(*kinds)
    rng = np.random.default_rng(0)
    asks = engines.random_asks(rng, 12, scores=True, max_n=2 if smaller.grouped else 1)
    if not smaller.sampled:
        plain = [
            Sampling.greedy(max_tokens=ask.sampling.max_tokens, n=ask.sampling.n)
            for ask in asks
        ]
        asks = [ask._replace(sampling=x) for ask, x in zip(asks, plain, strict=True)]
    rule = jaxkv.fcfs(preemption="swap" if config.max_swap_pages else "recompute")
    if smaller.grouped:  # pages for two long answers
        config = dataclasses.replace(config, num_pages=24)
    small, full = (
        engines.serve(asks, config, rule, kinds=some, as_served=True)
        for some in (smaller, None)
    )
    assert small.info.num_preempted.sum() > 0
    leaves = (jax.tree.leaves((run.info, run.state)) for run in (small, full))
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (Sampling.greedy(), (False, False)),
        (Sampling.greedy(prompt_logprobs=True), (False, False)),
        (Sampling(), (True, False)),
        (Sampling.greedy(repetition_penalty=1.1), (True, False)),
        (Sampling.greedy(presence_penalty=-0.1), (True, False)),
        (Sampling.greedy(frequency_penalty=0.1), (True, False)),
        (Sampling.greedy(logprobs=0), (True, False)),
        (Sampling.greedy(n=2), (False, True)),
        (Sampling(best_of=2), (True, True)),
        (Sampling.greedy(beam_width=1), (False, True)),
    ],
)
def test_kinds_of_a_request(ask: Sampling, expected: tuple[bool, bool]) -> None:
    bounds: dict[str, Any] = {"max_logit_rows": 4, "max_beams": 1, "max_length": 32}
    engine = jaxkv.Engine.load("stdlib-bytes", max_slots=2, num_pages=8, **bounds)
    engine.submit([1, 2, 3], ask)
    assert engine.tracker.request_kinds() == RequestKinds(*expected)


def test_an_engine_prefers_compiled_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = jaxkv.Engine.load("stdlib-bytes", max_slots=2, num_pages=8, max_length=32)
    compiled: set[RequestKinds] = set()

    def has_steps(rules: EngineRules, kinds: RequestKinds) -> bool:
        return kinds in compiled

    monkeypatch.setattr(engine._programs, "has_steps", has_steps)
    plain = RequestKinds(sampled=False, grouped=False)
    engine.submit([1, 2, 3], Sampling.greedy())
    assert engine._kinds_to_run() == plain
    compiled.add(ALL_KINDS)
    assert engine._kinds_to_run() == ALL_KINDS
    compiled.add(plain)
    assert engine._kinds_to_run() == plain
    # One program serves all requests that are not complete.
    engine.submit([1, 2, 3], Sampling())
    assert engine._kinds_to_run() == ALL_KINDS
    compiled.clear()
    assert engine._kinds_to_run() == RequestKinds(sampled=True, grouped=False)
