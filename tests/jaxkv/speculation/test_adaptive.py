"""Adaptive draft length: the chosen length, acceptance counts, and tuned engines."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.engine import (
    EngineConfig,
    EngineParts,
    EngineRules,
    Speculation,
    VerifyOutput,
)
from jaxkv.models import PagedForward, make_model_pages
from jaxkv.sampling import Sampling
from jaxkv.serving import LOCAL
from jaxkv.speculation import (
    Adaptive,
    Jacobi,
    NGram,
    SharedNoiseVerifier,
    Synthetic,
    adaptive,
)
from jaxkv.speculation.adaptive import StepCosts
from tests.support import engine_programs, engines
from tests.support.engines import MODEL, Ask

CONFIG = EngineConfig(max_slots=6, max_drafts=12, num_draft_buckets=3, token_budget=100)


def learned(chance: Any, finds: float, steps: Any = None) -> adaptive.AdaptiveState:
    memory = Adaptive(NGram()).init(CONFIG)
    costs = memory.costs
    if steps is not None:
        steps = jnp.asarray(steps, "float32")
        costs = StepCosts(costs.batches, steps, 1.1 * steps[:, 0])
    places = jnp.ones(CONFIG.max_drafts, "float32")
    return memory._replace(
        costs=costs,
        accepted=places * 40 * jnp.asarray(chance, "float32"),
        judged=places * 40,
        found=jnp.float32(finds * 40),
        asked=jnp.float32(40),
    )


def test_lengths_are_halves() -> None:
    assert CONFIG.draft_buckets == (3, 6, 12)
    assert dataclasses.replace(CONFIG, max_drafts=1).draft_buckets == (1,)
    assert dataclasses.replace(CONFIG, max_drafts=0).draft_buckets == ()
    assert Adaptive(NGram()).init(CONFIG).costs.batches.tolist() == [1, 2, 4, 6]


@pytest.mark.parametrize("seed", range(20))
def test_the_chosen_length_gives_the_most_tokens_per_second(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chance = rng.uniform(0, 0.99, 12)
    finds = rng.uniform(0.05, 1)
    reached = np.cumprod(chance)
    num = int(rng.integers(1, 7))
    steps = np.sort(rng.uniform(1, 3, (4, 4)), axis=1)
    best = 0
    best_rate = 0.0
    for column, length in enumerate((0, 3, 6, 12)):
        tokens = 1 + finds * reached[:length].sum()
        costs = [np.interp(num, (1, 2, 4, 6), steps[:, c]) for c in (column, 0)]
        find_chance = 1 - (1 - finds) ** num
        rate = tokens / (find_chance * costs[0] + (1 - find_chance) * 1.1 * costs[1])
        rate = rate if column else 1.05 * tokens / costs[0]
        if rate > best_rate + 1e-6:
            best = column
            best_rate = rate
    chosen = adaptive.choose_draft_length(
        learned(chance, finds, steps), jnp.float32(num)
    )
    assert int(chosen) == best


@pytest.mark.parametrize(
    ("chance", "finds", "slope", "wanted"),
    [
        (0.99, 1.0, 0.0, 3),  # rows cost little, and all drafts are accepted
        (0.5, 1.0, 0.05, 1),
        (0.0, 1.0, 0.01, 0),  # no draft is accepted
        (0.99, 1.0, 9.0, 0),  # a row costs as much as a step
        (0.9, 0.0, 0.1, 0),  # no draft is found
    ],
)
def test_none_some_or_all(
    chance: float, finds: float, slope: float, wanted: int
) -> None:
    steps = [[1 + slope * length for length in (0, 3, 6, 12)]] * 4
    memory = learned(chance, finds, steps)
    assert int(adaptive.choose_draft_length(memory, jnp.float32(1))) == wanted


def test_acceptance_is_counted_by_position() -> None:
    """One of three sequences has no drafts; the first draft of one of two is
    rejected."""
    drafter = Adaptive(NGram(), half_life=1e9)
    config = dataclasses.replace(CONFIG, max_length=64)
    memory = drafter.init(CONFIG)
    memory = memory._replace(
        granted=jnp.asarray([True, True, True, False] + [False] * 2)
    )
    blank = jnp.zeros(6, jnp.int32)
    verified = VerifyOutput(
        emits=jnp.asarray([True] * 4 + [False] * 2),
        num_drafts=blank.at[:2].set(4),
        accepted=blank.at[0].set(3),
        path=jnp.zeros((6, 12), jnp.int32),
        follows=jnp.zeros((6, 13), jnp.int32),
    )
    after = drafter.learn(memory, engines.start(config), verified)
    accepted = after.accepted - memory.accepted
    judged = after.judged - memory.judged
    np.testing.assert_allclose(accepted[:5], [1, 1, 1, 0, 0], atol=1e-5)
    np.testing.assert_allclose(judged[:5], [2, 1, 1, 1, 0], atol=1e-5)
    assert float(after.found - memory.found) == pytest.approx(2, abs=1e-5)
    assert float(after.asked - memory.asked) == pytest.approx(3, abs=1e-5)
    for num, best in enumerate(after.best):
        assert int(adaptive.choose_draft_length(after, jnp.float32(num))) == best


def drafts_of(acceptance: float, patience: int) -> np.ndarray:
    """Drafts of one sequence in every decoding step."""
    config = dataclasses.replace(
        engines.ROOMY,
        max_drafts=4,
        num_draft_buckets=2,
        token_budget=60,
        max_logprobs=0,
        max_logit_rows=0,
    )
    drafter = Adaptive(Jacobi(), half_life=8.0, patience=patience)
    asks = [Ask(100, [5, 7], Sampling(max_tokens=57, temperature=1.0))]
    speculation = Speculation(drafter, Synthetic(acceptance))
    info = engines.serve(asks, config, speculation=speculation).info
    emits = np.asarray(info.num_emitted).sum(axis=1) > 0
    return np.asarray(info.num_drafts).sum(axis=1)[emits]


@pytest.mark.slow
def test_drafts_that_are_never_accepted_are_tried_again() -> None:
    drafts = drafts_of(0.0, patience=10)
    late = drafts[30:]  # the optimistic initial counts have decayed
    assert len(late) >= 25
    assert drafts[:4].max() == 4
    tried = np.flatnonzero(late)
    assert (late[tried] == 2).all()
    assert 2 <= len(tried) <= 3
    assert (np.diff(tried) > 10).all()


@pytest.mark.slow
def test_drafts_that_are_always_accepted_are_always_requested() -> None:
    assert (drafts_of(1.0, patience=10)[1:-2] == 4).all()


@pytest.mark.parametrize(
    ("running", "queued", "paying", "is_disabled"),
    [
        (1, 0, [], True),
        (1, 0, [1], False),
        (1, 0, [2, 6], True),
        (1, 1, [2], False),  # a second request is queued
        (2, 1, [2], False),  # no further request is queued
        (0, 1, [1], False),
        (0, 1, [0, 2], True),  # no request runs, and one is queued
        (6, 40, [6], False),
    ],
)
def test_drafting_is_disabled_where_no_drafts_pay(
    running: int, queued: int, paying: list[int], is_disabled: bool
) -> None:
    config = dataclasses.replace(CONFIG, max_length=64)
    drafter = Adaptive(NGram(), patience=9)
    state = engines.start(config)
    slots = jnp.where(jnp.arange(6, dtype=jnp.int32) < running, 0, -1)
    state = state.with_slots(state.slots._replace(sequence=slots))
    books = state.ledger._replace(num_waiting=jnp.int32(queued))
    state = state._replace(ledger=books)
    best = jnp.zeros(7, jnp.int32).at[jnp.asarray(paying, jnp.int32)].set(1)
    memory = drafter.init(CONFIG)._replace(best=best)

    def of(**changes: int) -> bool:
        values = {name: jnp.int32(value) for name, value in changes.items()}
        return bool(drafter.is_disabled(memory._replace(**values), state, CONFIG))

    assert of(idle=8) is is_disabled
    assert of(idle=9) is False
    assert of(idle=9, forced=0) is True
    assert of(idle=0, forced=1) is False
    assert int(drafter.on_skipped(memory, 4).idle) == 4


@pytest.mark.slow
def test_disabled_drafting_equals_an_engine_without_speculation() -> None:
    plain = engines.TIGHT
    config = dataclasses.replace(engines.TIGHT, max_drafts=2)
    speculation = Speculation(Adaptive(Jacobi(), patience=1000), SharedNoiseVerifier())
    asks = [
        Ask(100, [5, 7, 5], Sampling(max_tokens=20, temperature=1.0, logprobs=2)),
        Ask(101, [9] * 14, Sampling(max_tokens=9, temperature=0.0)),
        Ask(102, [3, 1], Sampling(max_tokens=12, n=2)),
    ]
    state = engines.start(config, speculation=speculation)
    costs = state.memory.costs
    costs = costs._replace(steps=jnp.ones_like(costs.steps).at[:, 1:].set(99))
    memory = adaptive.set_costs(state.memory, costs)
    drafting = engines.serve(
        asks,
        config,
        state=state._replace(memory=memory),
        speculation=speculation,
    )
    ours = drafting.info
    plain_info = engines.serve(asks, plain).info
    assert ours.num_drafts is not None
    assert not ours.num_drafts.any()
    assert ours.is_disabled is not None
    assert ours.is_disabled[
        : -config.steps_per_call
    ].all()  # no request is left after that
    assert not ours.tokens[:, :, 1:].any()
    # The first call may draft, so it runs another program.
    np.testing.assert_allclose(ours.logprobs[:, :, :1], plain_info.logprobs, atol=1e-6)
    ours = ours._replace(
        tokens=ours.tokens[:, :, :1],
        logprobs=plain_info.logprobs,
        num_drafts=None,
        is_disabled=None,
    )
    jax.tree.map(np.testing.assert_array_equal, ours, plain_info)


def scans_of(jaxpr: Any) -> list[Counter[str]]:
    """Operations of the outermost scans, including nested ones."""

    def inside(equation: Any) -> list[Any]:
        inner = jax.extend.core.jaxprs_in_params(equation.params)
        return [getattr(one, "jaxpr", one) for one in inner]

    def count(jaxpr: Any) -> Counter[str]:
        names: Counter[str] = Counter()
        for equation in jaxpr.eqns:
            names[equation.primitive.name] += 1
            for one in inside(equation):
                names += count(one)
        return names

    scans = []
    for equation in jaxpr.eqns:
        of = count if equation.primitive.name == "scan" else None
        for one in inside(equation):
            scans += [of(one)] if of else scans_of(one)
    return scans


@pytest.mark.slow
def test_a_call_without_drafts_traces_the_plain_steps() -> None:
    """The traced steps equal those of an engine without speculation."""

    def traced(may_draft: bool, **how: Any) -> Counter[str]:
        run, arguments, _ = engine_programs.steps(8, **how)
        run = functools.partial(run, may_draft=may_draft)
        (scan,) = scans_of(jax.make_jaxpr(run)(*arguments).jaxpr)
        return scan

    config = dataclasses.replace(engine_programs.CONFIG, max_drafts=2)
    speculation = Speculation(Adaptive(Jacobi()), SharedNoiseVerifier())
    other_counts, drafts = (
        traced(may, config=config, speculation=speculation) for may in (False, True)
    )
    plain = traced(True)
    for counts in (plain, other_counts):  # the state has more leaves, in the same order
        del counts["optimization_barrier"]
    assert other_counts == plain
    assert drafts.total() > 1.2 * other_counts.total()


def engine_of(drafter: Any, **changes: Any) -> jaxkv.Engine:
    config = dataclasses.replace(
        engines.SERVED, max_drafts=2, num_draft_buckets=2, debug=False, **changes
    )
    pages = make_model_pages(MODEL, config)
    parts = EngineParts(engines.params(), PagedForward(MODEL), pages, config)
    speculation = Speculation(drafter, SharedNoiseVerifier())
    return jaxkv.Engine(parts, EngineRules(speculation=speculation))


@pytest.mark.slow
def test_a_tuned_engine_is_idle_and_answers_as_before() -> None:
    prompts = [[1, 2, 3], [4, 5]]
    ask = Sampling.greedy(max_tokens=9)
    run: Any = LOCAL.run_steps
    engine = engine_of(Adaptive(NGram(1, 2)), steps_per_call=2)
    before = engine.generate(prompts, ask)
    num_programs = run._cache_size()
    guessed = np.array(engine.state.memory.costs.steps)
    engine.tune()
    assert run._cache_size() == num_programs + 1  # plain steps, compiled with the rest
    engine.tune()
    state = jax.tree.map(np.asarray, engine.state)
    assert not state.pool.ref.any()
    assert (state.slots.sequence < 0).all()
    assert state.memory.forced == -1
    assert (state.memory.costs.steps > 0).all()
    assert (state.memory.costs.steps != guessed).any()
    after = engine.generate(prompts, ask)
    assert run._cache_size() == num_programs + 1
    for one, other in zip(before, after, strict=True):
        assert one.answers[0].tokens == other.answers[0].tokens


@pytest.mark.thorough
def test_engines_that_cannot_be_tuned_are_refused() -> None:
    with pytest.raises(ValueError, match="only a drafter that is Adaptive has costs"):
        engine_of(NGram()).tune()
    with pytest.raises(ValueError, match=r"config.max_length=\d+ leaves no room"):
        engine_of(Adaptive(NGram()), steps_per_call=40).tune()
    with pytest.raises(ValueError, match=r"context=90 must be in \[1, \d+\]"):
        engine_of(Adaptive(NGram()), steps_per_call=2).tune(90)
    engine = engine_of(Adaptive(NGram()), steps_per_call=2)
    engine.submit([1, 2])
    with pytest.raises(ValueError, match="must be idle to be tuned"):
        engine.tune()


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="half_life"):
        Adaptive(NGram(), half_life=0.0)
    with pytest.raises(ValueError, match="patience=0 must be"):
        Adaptive(NGram(), patience=0)
