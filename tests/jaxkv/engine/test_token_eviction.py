"""An engine that evicts tokens per head equals a model that masks them."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.engine import EngineConfig, init, load_state, save_state
from jaxkv.memory import EVICTION_RULES
from jaxkv.models import AttentionKind, make_model_pages
from jaxkv.sampling import Sampling
from jaxkv.scoring import score
from tests.support import engine_programs, engines, evictions, simulations

BUDGET = 14
WINDOW = 6
EVICTING = dataclasses.replace(
    engines.TIGHT,
    num_pages=40,
    max_slots=3,
    max_logprobs=0,
    max_logit_rows=0,
    evict="keydiff",
    evict_budget=BUDGET,
    evict_window=WINDOW,
)
# Prompts below and above the budget, and one that ends where an eviction is due.
LENGTHS = [(31, 20), (9, 30), (BUDGET + 4, 24), (23, 1)]


RULES = (*EVICTION_RULES, "quest")


def evicting(rule: Any) -> EngineConfig:
    budget = 12 if rule == "quest" else BUDGET
    return dataclasses.replace(EVICTING, evict=rule, evict_budget=budget)


def asks() -> list[engines.Ask]:
    rng = np.random.default_rng(3)
    return [
        engines.greedy(i, rng.integers(0, 61, prompt).tolist(), answer, logprobs=0)
        for i, (prompt, answer) in enumerate(LENGTHS)
    ]


def expected(ask: engines.Ask, config: EngineConfig) -> tuple[list[int], list[float]]:
    num_tokens = ask.sampling.max_tokens
    weights = engines.params()
    return evictions.generate(weights, engines.MODEL, ask.prompt, num_tokens, config)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "rule",
    [pytest.param(x, marks=[] if x == "quest" else pytest.mark.slow) for x in RULES],
)
def test_answers_are_those_of_a_model_with_masks(rule: Any) -> None:
    config = evicting(rule)
    run = engines.serve(asks(), config)
    for ask in asks():
        tokens, logprobs = expected(ask, config)
        outcome = run.outcomes[ask.request_id]
        assert outcome.tokens == tokens
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_tokens_do_not_depend_on_chunks_batch_and_preemption(rule: Any) -> None:
    """A preempted request evicts the same tokens again, bit for bit."""
    config = dataclasses.replace(evicting(rule), numerics="reproducible")
    alone = engines.serve(asks(), dataclasses.replace(config, max_slots=1))
    tight = dataclasses.replace(config, num_pages=13)
    policy = scheduling.fcfs(chunk_size=5, watermark=0, hold_new=False)
    run = engines.serve(asks(), tight, policy)
    assert run.info.num_preempted.sum() > 0
    for name, outcome in run.outcomes.items():
        assert outcome.tokens == alone.outcomes[name].tokens
        np.testing.assert_array_equal(outcome.logprobs, alone.outcomes[name].logprobs)
    assert run.info.used_pages.max() <= 13


@pytest.mark.slow
def test_quest_keeps_all_pages() -> None:
    """With a budget for all pages an answer has the same bits, with any the same pages.

    Pages that several answers share, copy or swap carry their bounds.
    """
    quest = dataclasses.replace(evicting("quest"), numerics="reproducible")
    plain = engines.serve(
        asks(), dataclasses.replace(quest, evict=None, evict_budget=0)
    )
    wide = engines.serve(asks(), dataclasses.replace(quest, evict_budget=64))
    narrow = engines.serve(asks(), quest)
    for name, outcome in plain.outcomes.items():
        assert outcome.tokens == wide.outcomes[name].tokens
        np.testing.assert_array_equal(outcome.logprobs, wide.outcomes[name].logprobs)
    np.testing.assert_array_equal(plain.info.used_pages, narrow.info.used_pages)
    assert any(plain.outcomes[x].tokens != y.tokens for x, y in narrow.outcomes.items())

    group = [
        engines.Ask(9, asks()[0].prompt, Sampling(n=2, max_tokens=30, seed=4)),
        engines.Ask(8, asks()[1].prompt, Sampling(n=2, max_tokens=30, seed=5)),
    ]
    swapping = dataclasses.replace(quest, max_slots=4, num_pages=24, max_swap_pages=24)
    policy = scheduling.fcfs(chunk_size=5, preemption="swap", hold_new=False)
    swapped = engines.serve(group, swapping, policy)
    assert swapped.info.num_swapped_out.sum() > 0
    alone = engines.serve(group[:1], quest)
    alone = alone.outcomes | engines.serve(group[1:], quest).outcomes
    assert swapped.outcomes.keys() == alone.keys()
    for name, outcome in alone.items():
        assert swapped.outcomes[name].tokens == outcome.tokens


def test_the_simulator_counts_all_pages_under_quest() -> None:
    bounds = simulations.capacity(EVICTING)
    assert bounds.with_eviction("quest", 12) is bounds


@pytest.mark.slow
def test_snapshots_have_evicted_tokens(tmp_path: Any) -> None:
    config = dataclasses.replace(EVICTING, evict="h2o")
    state = engines.start(config)
    requests = engines.requests_of(asks()[:1], config)
    state, _ = engines.submit(state, requests, config=config)
    options = {
        "config": config,
        "forward": engines.PagedForward(engines.MODEL),
        "policy": engines.FCFS,
    }
    now = jnp.zeros(2, jnp.int32)
    for _ in range(2):
        state, _ = engines.run_steps(engines.params(), state, now, **options)
    assert int(state.table.evicted[0]) > 0
    save_state(tmp_path / "saved", state, config)
    loaded = load_state(tmp_path / "saved", config, state.pages)
    runs = []
    for start in (state, loaded):
        start, info = engines.run_steps(engines.params(), start, now, **options)
        runs.append(np.asarray(info.tokens))
    np.testing.assert_array_equal(runs[0], runs[1])


REFUSED: dict[str, dict[str, Any]] = {
    "evict_budget=0 must be in [1, max_length=64] with evict='keydiff'": {
        "evict_budget": 0
    },
    "evict_budget=6 must be in [7, max_length=64] with evict='snapkv'": {
        "evict": "snapkv",
        "evict_budget": 6,
    },
    "evict_budget=14 must be 0 without evict": {"evict": None},
    "evict_budget=14 must be a multiple of page_size=4 with evict='quest'": {
        "evict": "quest"
    },
    "kv_dtype='int8' must be 'model' with evict='quest'": {
        "evict": "quest",
        "evict_budget": 12,
        "kv_dtype": "int8",
    },
    "prefix_cache=True must be False with evict='quest'": {
        "evict": "quest",
        "evict_budget": 12,
        "prefix_cache": True,
    },
    "evict_window=3 must be at least page_size=4 with evict='h2o'": {
        "evict": "h2o",
        "evict_window": 3,
    },
    "prefix_cache=True must be False with evict='keydiff'": {"prefix_cache": True},
    "max_swap_pages=4 must be 0 with evict='keydiff'": {"max_swap_pages": 4},
    "max_beams=2 must be 0 with evict='keydiff'": {"max_beams": 2},
    "max_drafts=2 must be 0 with evict='keydiff'": {"max_drafts": 2},
    "record_routes=True must be False with evict='keydiff'": {"record_routes": True},
    "release_window_pages=True must be False with evict='keydiff'": {
        "release_window_pages": True
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_contradicting_bounds_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dataclasses.replace(EVICTING, **REFUSED[message])


@pytest.mark.parametrize(
    ("obstacle", "change"),
    [
        ("with sliding windows", {"window": 8}),
        (
            "with sinks or capped scores",
            {"score_cap": 5.0},
        ),
        (
            "whose layers have sizes of their own or share K and V",
            {
                "other_attention": (AttentionKind(shares_kv=True),),
                "attention_pattern": (0, 1),
            },
        ),
    ],
)
def test_models_are_refused(obstacle: str, change: dict[str, Any]) -> None:
    model = dataclasses.replace(engines.MODEL, **change)
    config = dataclasses.replace(EVICTING, evict="snapkv")
    message = f"evict='snapkv' must be None for a model {obstacle}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_model_pages(model, config)


def test_groups_are_refused_and_pages_must_fit() -> None:
    config = dataclasses.replace(EVICTING, evict="snapkv")
    plain = jax.eval_shape(lambda: make_model_pages(engines.MODEL, engines.TIGHT))
    with pytest.raises(ValueError, match="needs pages that `make_model_pages` made"):
        init(dataclasses.replace(config, num_pages=16), plain)
    group = engines.Ask(0, [1, 2], Sampling(n=2, max_tokens=3))
    state = engines.start(EVICTING)
    requests = engines.requests_of([group], EVICTING)
    assert not engines.submit(state, requests, config=EVICTING)[1].any()


@pytest.mark.slow
def test_the_simulator_counts_the_same_pages() -> None:
    """Steps, pages and places are equal, also where sequences are preempted."""
    case = simulations.Case(
        scheduling.fcfs(chunk_size=7, watermark=0, hold_new=False),
        num_pages=17,
        evict="keydiff",
        evict_budget=10,
    )
    w = simulations.workload(4, 24)
    run = simulations.compare_with_engine(w, case, 4)
    simulations.assert_equal_steps(run)
    assert run.infos.num_preempted.sum() > 0
    assert int(run.simulation.num_done) == 24


def test_score_refuses_eviction() -> None:
    with pytest.raises(ValueError, match="evict='h2o' must be None in score"):
        score(
            engines.params(),
            np.zeros((1, 4), np.int32),
            config=engines.MODEL,
            evict="h2o",
        )


@pytest.mark.slow
def test_programs_without_eviction_are_unchanged() -> None:
    """Bounds of eviction that no rule reads change no program."""
    texts = []
    for config in (engines.SERVED, dataclasses.replace(engines.SERVED, evict_window=7)):
        run, arguments, _ = engine_programs.steps(
            config.num_pages, model=engines.MODEL, config=config
        )
        texts.append(jax.jit(run, donate_argnums=1).lower(*arguments).as_text())
    assert texts[0] == texts[1]
    assert "evict" not in texts[0]
