"""Policies that make no progress in the engine, and long waits that are no stalls."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.engine.paging import prefix_caching
from jaxkv.scheduling import StepCounter
from tests.support import engines, moods
from tests.support.engines import SERVED
from tests.support.moods import (
    FILLS,
    PAUSES,
    PLAIN,
    REFUSES,
    SHORTEST,
    THRASHES,
    with_mood,
)


@pytest.fixture(scope="module")
def shared() -> jaxkv.Engine:
    return moods.make_engine()


ASK = jaxkv.Sampling.greedy(max_tokens=4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mood",
    [REFUSES, pytest.param(THRASHES, marks=pytest.mark.slow), PAUSES],
)
def test_a_policy_without_progress_is_an_error(shared: jaxkv.Engine, mood: int) -> None:
    engine = with_mood(shared, mood)
    with pytest.raises(
        jaxkv.StallError, match="policy Moody made no progress for 64 s"
    ):
        engine.generate([[7, 8, 9]], ASK)
    name = engine.submit([1, 2, 3, 4], ASK)
    with pytest.raises(jaxkv.StallError, match=f"request_id={name}, 4 prompt tokens"):
        list(engine.stream())
    # The engine is not lost: another policy serves the same request.
    with_mood(engine, PLAIN)
    done = [event.completion for event in engine.stream() if event.completion]
    assert [completion.request_id for completion in done] == [name]
    ask = engines.Ask(name, [1, 2, 3, 4], ASK)
    assert done[0].tokens == engines.plain([ask], SERVED)[name][0]


@pytest.mark.thorough
def test_a_stalled_request_can_be_cancelled(shared: jaxkv.Engine) -> None:
    engine = with_mood(shared, REFUSES)
    name = engine.submit([1, 2, 3], ASK)
    with pytest.raises(jaxkv.StallError):
        list(engine.stream())
    engine.cancel(name)
    [event] = engine.stream()
    assert event.completion is not None
    assert event.completion.reason == "cancelled"


@pytest.mark.thorough
def test_a_policy_that_masks_the_queue_serves_every_request(
    shared: jaxkv.Engine,
) -> None:
    """Only the shortest request is visible, which need not be the first."""
    engine = with_mood(shared, SHORTEST)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, num).tolist() for num in (30, 3, 20, 2, 9, 25, 4)]
    done = engine.generate(prompts, ASK)
    asks = [engines.Ask(i, prompt, ASK) for i, prompt in enumerate(prompts)]
    wanted = engines.plain(asks, SERVED)
    for i, completion in enumerate(done):
        assert completion.tokens == wanted[i][0]


@pytest.mark.thorough
def test_waiting_for_an_arrival_is_no_stall(shared: jaxkv.Engine) -> None:
    """A policy may wait for a second request, and an engine for the first."""
    engine = with_mood(shared, FILLS)
    late = engine.now() + 0.5
    engine.submit([1, 2, 3], ASK)
    engine.submit([4, 5], ASK, arrival_s=late)
    done = [event.completion for event in engine.stream() if event.completion]
    assert len(done) == 2
    with_mood(engine, REFUSES)
    name = engine.submit([4, 5], ASK, arrival_s=engine.now() + 0.2)
    start = time.perf_counter()
    with pytest.raises(jaxkv.StallError):
        list(engine.stream())
    assert time.perf_counter() - start > 0.15
    engine.cancel(name)
    list(engine.stream())


# The counter


def count(*calls: tuple[list[int], list[int]], num_tokens: int = 9) -> list[int]:
    """Steps without progress after each call, given (tokens, rows) of its steps."""
    counter = StepCounter()
    step_counts = []
    for draws, rows in calls:
        arrays: Any = np.array(draws, bool), np.array(rows, np.int32)
        counter.count(*arrays, num_tokens=lambda: num_tokens)
        step_counts.append(counter.num_steps)
    return step_counts


def test_steps_without_progress_are_counted() -> None:
    nothing = [0, 0, 0]
    assert count((nothing, nothing), (nothing, nothing)) == [3, 6]
    assert count((nothing, nothing), ([0, 1, 0], [0, 1, 0])) == [3, 1]
    # Rows of prompts are progress, up to as many as there are tokens.
    assert count((nothing, [4, 0, 4]), (nothing, [1, 4, 0]), (nothing, [4, 4, 4])) == [
        0,
        2,
        5,
    ]
    assert count((nothing, [4, 4, 4]), ([1, 0, 0], [1, 4, 0])) == [1, 1]


# Sequences that the device has lost


@pytest.mark.thorough
def test_a_sequence_lost_by_the_device_is_a_stall() -> None:
    engine = moods.make_engine()
    ask = jaxkv.Sampling.greedy(max_tokens=30)
    name = engine.submit([1, 2, 3], ask)
    engine.step()
    state = engine.state
    lost = state.slots.sequence >= 0
    state = prefix_caching.release_slots(state, lost, None)
    empty = jnp.full_like(state.slots.sequence, -1)
    engine.state = state.with_slots(state.slots._replace(sequence=empty))
    with pytest.raises(jaxkv.StallError, match=f"request_id={name}, 3 prompt tokens"):
        list(engine.stream())


@pytest.mark.slow
def test_preempting_a_part_of_a_request_is_an_error_or_changes_no_token() -> None:
    """Preempts the first or all other sequences of a request, once or always."""
    prompts = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    asks = [
        jaxkv.Sampling(n=2, max_tokens=7, temperature=1.0, seed=seed)
        for seed in range(3)
    ]
    engine = moods.make_engine()
    wanted = engine.generate(prompts, asks)
    for part in (0, 1):
        engine.policy = Splits(jnp.int32(part), jnp.bool_(False), jaxkv.fcfs())
        served = engine.generate(prompts, asks)
        for completion, other in zip(served, wanted, strict=True):
            assert [x.tokens for x in completion.answers] == [
                x.tokens for x in other.answers
            ]
        engine.policy = Splits(jnp.int32(part), jnp.bool_(True), jaxkv.fcfs())
        with pytest.raises(jaxkv.StallError, match=r"Plan\.preempt returns"):
            engine.generate(prompts, asks)
        engine.policy = jaxkv.fcfs()
        engine.generate(prompts[:1], asks[:1])


class Splits(NamedTuple):
    """Preempts a part of each request with several sequences, once or always."""

    part: jax.Array
    always: jax.Array
    inner: jaxkv.Policy
    holds_finished = False

    def plan(self, counts: jaxkv.Counts) -> jaxkv.Plan:
        c = counts
        plan = self.inner.plan(counts)
        assert c.group is not None
        is_first = jnp.equal(c.group, jnp.arange(c.group.size, dtype=jnp.int32))
        size = jnp.sum(c.group[:, None] == c.group[None, :], axis=0)
        out = jnp.where(self.part == 0, is_first, ~is_first) & (size > 1) & c.running
        out &= self.always | (~c.preempted & (c.length > 5))
        return plan._replace(
            preempt=plan.preempt | out,
            places=jnp.where(out, 0, plan.places),
            num_rows=jnp.where(out, 0, plan.num_rows),
        )
