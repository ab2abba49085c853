"""Preemption by swapping: pages come back with the same contents."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import clock, scheduling
from jaxkv.engine import StepInfo
from jaxkv.engine.state import EngineConfig, EngineState
from jaxkv.ledger import PROGRESS
from jaxkv.models import PagedForward
from jaxkv.sampling import Sampling
from jaxkv.scheduling.first_come import victims
from jaxkv.serving import LOCAL, HostSpace
from tests.support import engines
from tests.support.asks import groups
from tests.support.engines import MODEL, TIGHT, Ask, Run, greedy

SWAP = dataclasses.replace(TIGHT, max_swap_pages=24, steps_per_call=1)
NARROW = dataclasses.replace(SWAP, max_swap_pages=3)
"""A buffer that is too small for some requests."""
fcfs = functools.partial(scheduling.fcfs, stackable=True)
"""Every rule is compiled, so that all policies here share one program."""
ASKS = groups(1, 30)


@functools.cache
def served(
    config: EngineConfig = SWAP,
    host: int | None = None,
    preemption: Any = "swap",
    victim: Any = "latest",
    hold_new: bool = False,
) -> Run:
    """Serves the requests; by default new ones are admitted after preemptions."""
    policy = fcfs(preemption=preemption, victim=victim, hold_new=hold_new)
    space = None if host is None else HostSpace(host, LOCAL.move)
    return engines.serve(ASKS, config, policy, host=space)


def num_recomputed(run: Run) -> int:
    return sum(outcome.num_recomputed for outcome in run.outcomes.values())


@pytest.mark.parametrize("host", [None, pytest.param(24, marks=pytest.mark.slow)])
def test_answers_equal_those_of_a_plain_loop(host: int | None) -> None:
    run = served(host=host)
    engines.assert_equal_plain(run, ASKS, TIGHT)
    info = run.info
    assert info.num_swapped_out.sum() > 10
    # No token is recomputed: the buffer had room for all pages.
    assert (info.num_swapped_out == info.num_preempted).all()
    assert info.num_swapped_in.sum() == info.num_swapped_out.sum()
    assert num_recomputed(run) == 0
    assert info.asks_host.any()
    for name in ("num_swapped", "num_preempted"):
        times = sum(getattr(outcome, name) for outcome in run.outcomes.values())
        assert times == info.num_preempted.sum()


@pytest.mark.slow
@pytest.mark.parametrize("host", [None, 2, 24])
def test_requests_beyond_the_buffer_are_recomputed(host: int | None) -> None:
    run = served(NARROW, host)
    engines.assert_equal_plain(run, ASKS, TIGHT)
    info = run.info
    assert 3 < info.num_swapped_out.sum() < info.num_preempted.sum()
    assert 0 < num_recomputed(run) < num_recomputed(served(preemption="recompute"))


@pytest.mark.slow
@pytest.mark.parametrize("victim", victims.VICTIM_NAMES)
def test_answers_do_not_depend_on_the_victim(victim: str) -> None:
    ways = set()
    for preemption in ("recompute", "swap"):
        run = served(preemption=preemption, victim=victim)
        engines.assert_equal_plain(run, ASKS, TIGHT)
        assert run.info.num_preempted.sum() > 5
        ways.add(run.info.num_rows.tobytes())
    latest = (served(preemption=kind) for kind in ("recompute", "swap"))
    ways |= {run.info.num_rows.tobytes() for run in latest}
    assert len(ways) == (2 if victim == "latest" else 4)


def steps(
    state: EngineState, config: EngineConfig, policy: Any, num: int
) -> Iterator[tuple[EngineState, StepInfo]]:
    """Yields the state after every step."""
    for _ in range(num):
        state, info = engines.run_steps(
            engines.params(),
            state,
            clock.from_seconds(0),
            config=config,
            forward=PagedForward(MODEL, config.numerics),
            policy=policy,
        )
        engines.assert_sound(jax.tree.map(np.asarray, info))
        # Copied, since the next step consumes the state.
        yield jax.tree.map(jnp.copy, state), info


def crowd(num: int = 5, **fields: Any) -> list[Ask]:
    """Requests that are admitted together and soon exceed the pool."""
    rng = np.random.default_rng(4)
    return [
        greedy(i, rng.integers(0, 61, 7 + i).tolist(), 16, ignore_eos=True, **fields)
        for i in range(num)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("hold_new", [True, False])
def test_new_requests_wait_until_preempted_ones_complete(hold_new: bool) -> None:
    # The last one is small: there is nearly always room for it.
    asks = [*crowd(7), greedy(9, [1], 2, ignore_eos=True)]
    asks = [ask._replace(request_id=i) for i, ask in enumerate(asks)]
    state = start = engines.submitted(asks, SWAP)
    policy = fcfs(preemption="swap", hold_new=hold_new)
    owed = set()
    overtaken = 0
    earlier = set()
    for state, info in steps(start, SWAP, policy, 120):
        running = set(np.asarray(info.request_id).reshape(-1).tolist()) - {-1}
        s = state.sequences
        overtaken += bool(owed and running - earlier)
        earlier |= running
        alive = engines.unfinished(state)
        alive &= PROGRESS.read(np.asarray(state.ledger.progress), "num_preempted") > 0
        owed = set(np.asarray(s.request_id)[alive].tolist())
    assert earlier == set(range(len(asks)))
    assert (overtaken == 0) == hold_new


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_size", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_a_group_is_swapped_out_and_in_as_one(chunk_size: int | None) -> None:
    """During prefill or after the fork: the prompt is computed once in both cases."""
    asks = crowd(4)
    asks = [
        ask._replace(sampling=Sampling(n=2, max_tokens=9, ignore_eos=True))
        for ask in asks
    ]
    policy = fcfs(chunk_size=chunk_size, preemption="swap", hold_new=False)
    run = engines.serve(asks, SWAP, policy)
    engines.assert_equal_plain(run, asks, TIGHT)
    assert run.info.num_swapped_out.sum() >= 4
    once = sum(len(ask.prompt) + 2 * 8 for ask in asks)
    assert run.info.num_rows.sum() == once


@pytest.mark.thorough
@pytest.mark.parametrize("at_host", [pytest.param(False, marks=pytest.mark.slow), True])
def test_cancelling_a_swapped_request_frees_its_pages(at_host: bool) -> None:
    asks = [
        ask._replace(sampling=Sampling(n=2, max_tokens=9, ignore_eos=True))
        for ask in crowd(4)
    ]
    state = start = engines.submitted(asks, SWAP)
    policy = fcfs(preemption="swap")
    space = HostSpace(24, LOCAL.move)
    state = next(
        state
        for state, info in steps(start, SWAP, policy, 40)
        if info.asks_host or (not at_host and info.num_swapped_out > 0)
    )
    assert state.staging is not None
    if at_host:
        state = space.exchange(state)
        assert space.num_used > 0
    waits = engines.unfinished(state)
    waits[np.asarray(state.slots.sequence)[np.asarray(state.slots.sequence) >= 0]] = (
        False
    )
    names = set(np.asarray(state.sequences.request_id)[waits].tolist())
    target = sorted(names)[0]
    other = sorted(names)[-1]
    # One answer of one request, and all answers of another.
    state = engines.cancel(
        state, jnp.asarray([target, other], "int32"), jnp.asarray([1, -1], "int32")
    )
    later_run = engines.serve(
        [], SWAP, policy, state=state, host=space, num=len(asks) * 2
    )
    plain = engines.plain(asks, SWAP)
    for name, outcome in later_run.outcomes.items():
        cancelled = outcome.reason == "cancelled"
        request_id = name[0] if isinstance(name, tuple) else name
        assert cancelled == (request_id == other or name == (target, 1))
        if not cancelled:
            assert outcome.tokens == plain[name][0]
