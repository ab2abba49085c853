"""Branches of one state against plain continuations under the same policy."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.clock import from_seconds, to_seconds
from jaxkv.engine import (
    EngineConfig,
    EngineState,
    Speculation,
    StepInfo,
    advance_clock,
    branch,
    run_steps,
    widen,
)
from jaxkv.memory import FIFO
from jaxkv.models import PagedForward
from jaxkv.scheduling import Policy
from jaxkv.speculation import NGram, SharedNoiseVerifier
from tests.support import engines
from tests.support.engines import FCFS, MODEL
from tests.support.trees import assert_same

CONFIG = dataclasses.replace(
    engines.TIGHT,
    num_pages=24,
    max_slots=4,
    max_sequences=24,
    queue_capacity=24,
    submit_width=24,
    max_logit_rows=0,
    max_logprobs=0,
    steps_per_call=2,
)
CALLS = 6
START_S = 1.0


def call_time(info: StepInfo) -> jax.Array:
    rows = jnp.sum(info.num_rows, dtype=jnp.int32)
    return 0.004 + 0.001 * rows.astype(jnp.float32)


def loaded_state(config: EngineConfig) -> EngineState:
    """Returns an engine with running, waiting and later requests."""
    rng = np.random.default_rng(5)
    asks = engines.random_asks(rng, 12, max_prompt=20, max_answer=20)
    late = [ask._replace(arrival_s=START_S + 0.02 * i) for i, ask in enumerate(asks)]
    state = engines.submitted([*asks[:6], *late[6:]], config)
    for _ in range(2):
        state, _ = engines.run_steps(
            engines.params(),
            state,
            from_seconds(START_S - 0.5),
            config=config,
            forward=PagedForward(MODEL, config.numerics),
            policy=FCFS,
        )
    assert (np.asarray(state.slots.sequence) >= 0).sum() > 1
    assert int(state.ledger.num_waiting) > 2
    return state


def next_time(state: EngineState, now: np.ndarray, info: Any) -> np.ndarray:
    """The obvious twin of `advance_clock`, in Python."""
    if not np.asarray(info.num_rows).any():
        rows = np.asarray(state.ledger.queue)[: int(state.ledger.num_waiting)]
        times = [tuple(np.asarray(state.sequences.arrival)[row]) for row in rows]
        later = [time for time in times if time > tuple(now)]
        if later:
            return np.array(min(later), np.int32)
    seconds = np.float32(call_time(info))
    micros = int(now[1]) + int(np.round(seconds * np.float32(1e6)))
    return np.array([now[0] + micros // 10**6, micros % 10**6], np.int32)


def continued(
    state: EngineState, policy: Policy, config: EngineConfig, **options: Any
) -> tuple[EngineState, StepInfo]:
    """Continues a state call by call, on the host."""
    now = from_seconds(START_S)
    infos = []
    for _ in range(CALLS):
        state, info = engines.run_steps(
            engines.params(),
            jax.tree.map(jnp.copy, state),
            now,
            config=config,
            forward=PagedForward(MODEL, config.numerics),
            policy=policy,
            **options,
        )
        engines.assert_sound(jax.tree.map(np.asarray, info))
        now = next_time(state, now, info)
        infos.append(info)
    return state, jax.tree.map(lambda *x: jnp.concatenate(x), *infos)


def branched(
    state: EngineState, config: EngineConfig, static: dict[str, Any], **options: Any
) -> tuple[EngineState, StepInfo]:
    run = functools.partial(
        run_steps,
        config=config,
        forward=PagedForward(MODEL, config.numerics),
        **static,
    )
    program = functools.partial(
        branch, run=run, call_time=call_time, num_calls=CALLS, **options
    )
    jitted = jax.jit(program, compiler_options=engines.FAST_COMPILE)
    return jitted(engines.params(), state, from_seconds(START_S))


def member(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


def test_each_branch_equals_its_plain_continuation() -> None:
    state = loaded_state(CONFIG)
    policies = [FCFS, scheduling.fcfs(chunk_size=2)]
    results = branched(state, CONFIG, {}, policies=policies)
    for i, policy in enumerate(policies):
        assert_same(member(results, i), continued(state, policy, CONFIG))
    rows = np.asarray(results[1].num_rows)
    assert (rows[0] != rows[1]).any()
    clock = to_seconds(np.asarray(results[0].ledger.clock))
    assert (clock > START_S).all()


@pytest.mark.slow
def test_branches_of_other_types_and_eviction_rules_are_in_order() -> None:
    config = dataclasses.replace(CONFIG, prefix_cache=True)
    state = loaded_state(config)
    shortest = scheduling.shortest_remaining()
    policies = [FCFS, shortest, scheduling.fcfs(chunk_size=3)]
    evictions = [None, FIFO(), None]
    results = branched(
        state, config, {}, policies=policies, evictions=evictions, batch_size=2
    )
    for i, (policy, rule) in enumerate(zip(policies, evictions, strict=True)):
        end, infos = member(results, i)
        plain_end, plain_infos = continued(state, policy, config, eviction=rule)
        # A mapped batch may round otherwise, so pages are compared up to rounding.
        none: Any = None
        assert_same(end._replace(pages=none), plain_end._replace(pages=none))
        assert_same(infos._replace(logprobs=none), plain_infos._replace(logprobs=none))
        for x, y in zip(
            jax.tree.leaves(end.pages), jax.tree.leaves(plain_end.pages), strict=True
        ):
            np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.slow
def test_a_branch_of_another_drafter_has_the_same_tokens() -> None:
    config = dataclasses.replace(CONFIG, numerics="reproducible")
    state = loaded_state(config)
    plain_end, _ = branched(state, config, {}, policies=[FCFS])
    drafter = NGram()
    drafting = dataclasses.replace(config, max_drafts=2)
    drafts = branched(
        state._replace(memory=drafter.init(drafting)),
        drafting,
        {"speculation": Speculation(drafter, SharedNoiseVerifier())},
        policies=[FCFS, scheduling.fcfs(chunk_size=3)],
    )
    assert int(np.asarray(drafts[1].num_drafts).sum()) > 0
    first = np.asarray(plain_end.sequences.tokens)[None]
    ended = np.asarray(drafts[0].sequences.reason) > 0
    ended &= np.asarray(plain_end.sequences.reason)[0][None] > 0
    assert ended.any()
    same = (first[0] == np.asarray(drafts[0].sequences.tokens)).all(axis=-1)
    assert same[ended].all()


def test_without_work_the_clock_moves_to_the_next_arrival() -> None:
    asks = [engines.greedy(i, [1, 2], 3, arrival_s=5.0 - i) for i in range(3)]
    state = engines.submitted(asks, CONFIG)
    info: Any = StepInfo(**dict.fromkeys(StepInfo._fields))  # ty: ignore
    rows = jnp.zeros((2, 4), jnp.int32)
    now = jnp.asarray(from_seconds(3.5))
    moved = advance_clock(state, now, info._replace(num_rows=rows), call_time)
    assert to_seconds(np.asarray(moved)) == 4.0
    fed = info._replace(num_rows=rows.at[0].set(1))
    moved = advance_clock(state, now, fed, call_time)
    np.testing.assert_allclose(to_seconds(np.asarray(moved)), 3.508, atol=2e-6)
    late = jnp.asarray(from_seconds(9.0))
    moved = advance_clock(state, late, info._replace(num_rows=rows), call_time)
    np.testing.assert_allclose(to_seconds(np.asarray(moved)), 9.004, atol=2e-6)


def test_a_wider_state_takes_more_requests_and_changes_no_array() -> None:
    small = dataclasses.replace(CONFIG, max_sequences=12, queue_capacity=12)
    asks = [engines.greedy(i, [1, 2, i], 3) for i in range(12)]
    state = engines.submitted(asks, small)
    wide, config = widen(state, small, 12)
    assert (config.max_sequences, config.queue_capacity) == (24, 24)
    assert_same(engines.submitted(asks, config), wide)
    more = [engines.greedy(50 + i, [3, 4], 5) for i in range(12)]
    requests = engines.requests_of(more, config)
    _, taken = engines.submit(jax.tree.map(jnp.copy, wide), requests, config=config)
    assert np.asarray(taken)[:12].all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": []}, r"policies=\[\] must have at least one policy"),
        ({"policies": [3]}, "policies"),
        ({"evictions": [None, None]}, "must be len"),
        ({"num_calls": 0}, "num_calls=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"run": run_steps, "policies": [FCFS]} | changes
    with pytest.raises(ValueError, match=message):
        branch(None, None, from_seconds(0.0), **arguments)  # ty: ignore
