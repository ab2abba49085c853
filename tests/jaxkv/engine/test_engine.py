"""The engine compared with a plain loop; order of service, pages and finish reasons."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import scheduling
from jaxkv.clock import from_seconds
from jaxkv.engine.state import (
    CANCELLED,
    EngineState,
)
from jaxkv.engine.steps import run_steps
from jaxkv.ledger import EVENTS, PROGRESS
from jaxkv.models import PagedForward
from jaxkv.sampling import Sampling
from jaxkv.scheduling import Counts, Plan
from tests.support import engines
from tests.support.asks import singles
from tests.support.engines import FCFS, MODEL, ROOMY, TIGHT, Ask, Run, greedy, run_on
from tests.support.marks import one_quick


@functools.cache
def served(chunk_size: int | None = None, watermark: int = 0) -> Run:
    policy = scheduling.fcfs(chunk_size=chunk_size, watermark=watermark)
    return engines.serve(singles(), TIGHT, policy)


POLICIES = [(None, 0), (1, 0), (5, 3)]


@pytest.mark.parametrize(("chunk_size", "watermark"), one_quick(POLICIES[::-1]))
def test_tokens_equal_those_of_a_plain_loop(chunk_size, watermark) -> None:
    run = served(chunk_size, watermark)
    engines.assert_equal_plain(run, singles(), TIGHT)
    reasons = {outcome.reason for outcome in run.outcomes.values()}
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize(("chunk_size", "watermark"), POLICIES)
def test_scores_equal_those_of_a_full_forward_pass(chunk_size, watermark) -> None:
    run = served(chunk_size, watermark)
    assert any(outcome.num_recomputed for outcome in run.outcomes.values())
    for ask in singles():
        got = run.outcomes[ask.request_id]
        law = engines.logprobs_of(ask, got.tokens)
        place = np.arange(len(law) - 1)
        scores = law[place, [*ask.prompt, *got.tokens][1:]]
        num = len(ask.prompt)
        sampling = ask.sampling
        answer = scores[num - 1 :] if sampling.logprobs is not None else 0
        np.testing.assert_allclose(got.logprobs, answer, rtol=0, atol=1e-4)
        prompt = scores[: num - 1] if sampling.prompt_logprobs else 0
        np.testing.assert_allclose(got.prompt_logprobs, prompt, rtol=0, atol=1e-4)
        if sampling.logprobs is None:
            assert not got.prompt_top_logprobs.any()
            continue
        rows = [(law[num - 1 : -1], got.top_ids, got.top_logprobs)]
        if sampling.prompt_logprobs:
            tops = got.prompt_top_ids, got.prompt_top_logprobs
            rows.append((law[: num - 1], *tops))
        for expected, ids, values in rows:
            best = np.sort(expected, axis=1)[:, ::-1][:, : TIGHT.max_logprobs]
            np.testing.assert_allclose(values, best, rtol=0, atol=1e-4)
            expected_best = np.take_along_axis(expected, ids, axis=1)
            np.testing.assert_allclose(expected_best, best, rtol=0, atol=1e-4)


def present(info, step: int) -> set[int]:
    return {int(name) for name in info.request_id[step] if name >= 0}


@pytest.mark.parametrize(("chunk_size", "watermark"), POLICIES)
def test_first_come_first_served(chunk_size, watermark) -> None:
    info = served(chunk_size, watermark).info
    assert info.num_preempted.sum() > 0
    before = set()
    ended = set()
    for step in range(len(info.enough)):
        now = present(info, step)
        # Request ids are in order of arrival. No request has a slot while an earlier
        # one waits, new or preempted.
        assert len(ended | now) == len(ended) + len(now)
        assert ended | now == set(range(100, 100 + len(ended | now)))
        lost = before - now
        assert len(lost) == info.num_preempted[step]
        assert not lost or not now or min(lost) > max(now)
        assert len(now - before) == info.num_admitted[step]
        finished = info.request_id[step][info.reason[step] > 0]
        ended |= set(finished.tolist())
        before = now - ended


@pytest.mark.parametrize(("chunk_size", "watermark"), POLICIES)
def test_rows_keep_to_the_budget_and_decoding_comes_first(
    chunk_size, watermark
) -> None:
    info = served(chunk_size, watermark).info
    prompts = {ask.request_id: len(ask.prompt) for ask in singles()}
    assert (info.num_rows.sum(axis=1) <= TIGHT.token_budget).all()
    assert (info.num_rows.sum(axis=1) > 0).sum() >= len(info.enough) - 4
    token_counts = dict(prompts)
    length = dict.fromkeys(prompts, 0)
    before: set[int] = set()
    for step in range(len(info.enough)):
        now = present(info, step)
        for name in before - now:
            length[name] = 0
        for slot, name in enumerate(info.request_id[step].tolist()):
            rows = int(info.num_rows[step, slot])
            if name < 0:
                assert rows == 0
                continue
            need = token_counts[name] - length[name]
            assert rows <= min(need, chunk_size or need)
            if need == 1:
                assert rows == 1
            length[name] += rows
            emitted = int(info.num_emitted[step, slot])
            assert emitted == (length[name] == token_counts[name])
            token_counts[name] += emitted
        places = sum(length[name] for name in now)
        live_names = [
            x for x in now if x not in info.request_id[step][info.reason[step] > 0]
        ]
        assert (
            info.used_places[step] == sum(length[name] for name in live_names) <= places
        )
        before = set(live_names)


def test_the_smallest_pool_starves_no_request() -> None:
    rng = np.random.default_rng(3)
    asks = [
        greedy(100 + index, rng.integers(0, 61, size).tolist(), 64)
        for index, size in enumerate([3, 1, 60, 40, 2, 63, 5, 1, 30, 20])
    ]
    run = engines.serve(asks, TIGHT)
    engines.assert_equal_plain(run, asks, TIGHT)
    assert {outcome.reason for outcome in run.outcomes.values()} == {"length"}
    assert run.info.num_preempted.sum() > 5
    # The first request feeds in every step, so this is the time of all in sequence.
    alone = [-(-len(ask.prompt) // 12) + 64 - len(ask.prompt) for ask in asks]
    assert len(run.info.enough) <= sum(alone) + 10 * TIGHT.steps_per_call


def test_preempted_requests_count_what_they_compute_again() -> None:
    info = served().info
    fed = {name: 0 for name in served().outcomes}
    for names, rows in zip(info.request_id, info.num_rows, strict=True):
        for name, num in zip(names.tolist(), rows.tolist(), strict=True):
            if name >= 0:
                fed[name] += num
    for ask in singles():
        outcome = served().outcomes[ask.request_id]
        once = len(ask.prompt) + len(outcome.tokens) - 1
        assert fed[ask.request_id] == once + outcome.num_recomputed


@pytest.mark.thorough
def test_no_request_is_admitted_before_arrival() -> None:
    asks = [
        greedy(1, [4, 5], 2, arrival_s=1.5),
        greedy(2, [4, 5, 6], 2, arrival_s=1.500001),
        greedy(3, [4], 2, arrival_s=3000.25),
    ]
    state = engines.submitted(asks, TIGHT)
    names_by_call = []
    stamps = (0.0, 1.499999, 1.5, 1.500001, 2999.75, 3001.0)
    for seconds in stamps:
        state, info = run_on(state, seconds)
        names_by_call.append(
            {name for step in range(4) for name in present(info, step)}
        )
    assert names_by_call == [set(), set(), {1}, {2}, set(), {3}]
    outcomes = engines.outcomes_of(engines.drain(state)[1])
    for name, seconds in ((1, 1.5), (2, 1.500001), (3, 3001.0)):
        assert outcomes[name].first_token_s == pytest.approx(seconds, abs=1e-9)
        assert outcomes[name].finish_s == pytest.approx(seconds, abs=1e-9)


def test_no_request_overtakes_one_that_has_not_arrived() -> None:
    """The engine blocks requests after it, since policies skip unmarked rows."""
    asks = [greedy(1, [4, 5], 2, arrival_s=5.0), greedy(2, [4, 5, 6], 2)]
    state, info = run_on(engines.submitted(asks, TIGHT), 1.0)
    assert not present(info, 3)
    _, info = run_on(state, 5.0)
    assert present(info, 0) == {1, 2}


def test_ends() -> None:
    free = engines.plain([greedy(1, [9, 8, 7], 12)], TIGHT)[1][0]
    middle = free[5]
    first_there = free.index(middle)
    asks = [
        greedy(1, [9, 8, 7], 12),
        greedy(2, [9, 8, 7], 12, stop_tokens=(60, middle)),
        greedy(3, [9, 8, 7], first_there + 1, stop_tokens=(middle,)),
        greedy(4, [9, 8, 7], 1),
        greedy(5, [middle] * 3, 500),
    ]
    got = engines.serve(asks, TIGHT).outcomes
    assert (got[1].tokens, got[1].reason) == (free, "length")
    assert (got[2].tokens, got[2].reason) == (free[: first_there + 1], "stop")
    assert (got[3].tokens, got[3].reason) == (free[: first_there + 1], "stop")
    assert (got[4].tokens, got[4].reason) == (free[:1], "length")
    assert len(got[5].tokens) == TIGHT.max_length - 3


@pytest.mark.thorough
def test_static_batching() -> None:
    config = ROOMY
    asks = list(singles())
    run = engines.serve(asks, config, scheduling.static())
    engines.assert_equal_plain(run, asks, config)
    info = run.info
    assert info.num_preempted.sum() == 0
    batch: set[int] = set()
    done: set[int] = set()
    num_batches = 0
    for step in range(len(info.enough)):
        now = present(info, step)
        if info.num_admitted[step]:
            # Admission is to an idle engine only, in order of arrival, as pages allow.
            assert not batch
            batch = now
            num_batches = num_batches + 1
            left = len(asks) - len(done)
            assert len(batch) == info.num_admitted[step] == min(3, left)
            assert min(batch) == 100 + len(done)
        ended = set(info.request_id[step][info.reason[step] > 0].tolist())
        assert now == batch - done
        done |= ended
        # All 16 pages of each stay reserved until the last one ends.
        assert info.used_pages[step] == 16 * len(batch)
        if batch <= done:
            batch = set()
        assert info.held[step].sum() == len(batch & done)
    assert num_batches == 8


WAITING = "waiting"
RUNNING = "running"
FINISHED = "finished"


def statuses(state: EngineState) -> dict[int, tuple[str, int]]:
    s = state.sequences
    books = state.ledger
    progress = np.asarray(books.progress)
    running = np.asarray(state.slots.sequence)
    finish_s = EVENTS.read(np.asarray(books.events), "finish_s")
    by_request = {}
    for row in np.flatnonzero(PROGRESS.read(progress, "num_tokens")):
        status = RUNNING if row in running else WAITING
        status = FINISHED if finish_s[row] else status
        by_request[int(s.request_id[row])] = status, int(s.reason[row])
    return by_request


def test_cancel_wherever_the_request_is() -> None:
    asks = [greedy(1, [3] * 30, 30), greedy(2, [4] * 20, 30), greedy(3, [5], 1)]
    asks += [greedy(4, [6] * 50, 3), greedy(5, [7] * 9, 4), greedy(6, [8] * 9, 4)]
    state, _ = run_on(engines.submitted(asks, TIGHT), calls=2)
    running = (RUNNING, 0)
    waiting = (WAITING, 0)
    assert statuses(state)[1] == statuses(state)[2] == running
    assert statuses(state)[5] == statuses(state)[6] == waiting
    free = int(state.pool.num_free)
    length = np.asarray(state.table.length).copy()
    slot = int(np.flatnonzero(np.asarray(state.slots.sequence) == 1)[0])
    names = jnp.asarray([2, 5, -1, 77, 2], jnp.int32)
    state = engines.cancel(state, names)
    ended = (FINISHED, CANCELLED)
    assert statuses(state)[2] == statuses(state)[5] == ended
    assert statuses(state)[1] == running
    assert statuses(state)[6] == waiting
    assert int(state.pool.num_free) == free + -(-length[slot] // 4)
    queue = np.asarray(state.ledger.queue)[: int(state.ledger.num_waiting)]
    assert 5 in queue  # the row of request 6 moved up
    assert 4 not in queue

    state, sequences = engines.drain(engines.cancel(state, names))
    assert statuses(state) == {1: running, 4: waiting, 6: waiting}
    cancelled = engines.outcomes_of(sequences)
    expected = engines.plain(asks, TIGHT)
    answer = cancelled[2].tokens
    assert answer == expected[2][0][: len(answer)]
    assert answer
    assert not cancelled[5].tokens

    state, _ = run_on(state, calls=30)
    state, sequences = engines.drain(state)
    outcomes = engines.outcomes_of(sequences)
    assert sorted(outcomes) == [1, 4, 6]
    for name, outcome in outcomes.items():
        assert (outcome.tokens, outcome.reason) == expected[name]
    engines.assert_empty(state)


def test_cancel_a_preempted_request() -> None:
    asks = [greedy(1, [3] * 20, 40), greedy(2, [4] * 20, 40)]
    state = engines.submitted(asks, TIGHT)
    for _ in range(30):
        state, info = run_on(state)
        if info.num_preempted.any():
            break
    assert statuses(state)[2] == (WAITING, 0)
    state = engines.cancel(state, jnp.asarray([2], jnp.int32))
    state, _ = run_on(state, calls=15)
    outcomes = engines.outcomes_of(engines.drain(state)[1])
    assert outcomes[1].reason == "length"
    assert outcomes[2].reason == "cancelled"
    assert outcomes[2].num_recomputed == 0  # it was never fed again


def test_refused_requests_do_not_change_the_state() -> None:
    config = dataclasses.replace(TIGHT, num_pages=9)  # 36 places
    good = greedy(1, [1, 2], 3)
    requests = engines.requests_of([good] * 8, config)
    prompt_length: Any = np.array([0, 5, 64, 3, 2, 33, 34, 4], np.int32)
    limit: Any = np.array([3, 5, 65, 65, 37, 37, 38, 9], np.int32)
    requests = requests._replace(prompt_length=prompt_length, limit=limit)
    state, taken = engines.submit(engines.start(config), requests, config=config)
    # An empty prompt; no room for an answer; three requests too long for a slot or for
    # the pool. The last ones fit, since the last token is never fed.
    fits = [False, False, False, False, True, True, False, True]
    assert np.asarray(taken).tolist() == fits
    assert int(state.ledger.num_waiting) == 3
    assert np.asarray(state.sequences.limit)[:4].tolist() == [37, 37, 9, 0]


def test_a_scored_prompt_needs_spare_logit_rows() -> None:
    config = dataclasses.replace(TIGHT, max_logit_rows=0)
    scored = greedy(1, [1, 2], 3, prompt_logprobs=True)
    requests = engines.requests_of([scored, greedy(2, [1], 2)], config)
    _, taken = engines.submit(engines.start(config), requests, config=config)
    assert np.asarray(taken)[:2].tolist() == [False, True]


def test_a_full_queue_refuses_and_loses_no_request() -> None:
    config = TIGHT
    state = engines.start(TIGHT)
    asks = [greedy(index, [index], 4) for index in range(40)]
    accepted: list[int] = []
    for first in (0, 8):
        requests = engines.requests_of(asks[first : first + 8], config)
        state, taken = engines.submit(state, requests, config=config)
        accepted += np.flatnonzero(np.asarray(taken)).tolist()
    assert accepted == [*range(8), *range(8)]
    before = jax.tree.map(np.asarray, state)
    requests = engines.requests_of(asks[16:24], config)
    state, taken = engines.submit(state, requests, config=config)
    assert not np.asarray(taken).any()  # all rows of `Sequences` are in use
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state))
    assert int(state.ledger.num_waiting) == 16


def test_the_queue_has_room_for_all_running_requests() -> None:
    # The queue has 3 places, and 8 running sequences may all be preempted.
    state, taken = submit_twice([greedy(index, [index], 4) for index in range(8)])
    assert taken == [True] * 8 + [True] * 3 + [False] * 5
    assert int(state.ledger.num_waiting) == 11


def test_a_request_without_room_blocks_later_ones() -> None:
    # A request that can never fit is refused by itself; a request without room blocks
    # all later ones.
    asks = [greedy(index, [index] * (index != 2), 4) for index in range(8)]
    _, taken = submit_twice(asks)
    possible = [index != 2 for index in range(8)]
    assert taken[:8] == possible
    assert taken[8:] == [True, True, False, True, True, False, False, False]


def submit_twice(asks: list[Ask]) -> tuple[EngineState, list[bool]]:
    """Submits the same eight requests twice, to an engine with a queue of three."""
    config = dataclasses.replace(TIGHT, queue_capacity=3)
    requests = engines.requests_of(asks, config)
    state = engines.start(config)
    state, first = engines.submit(state, requests, config=config)
    state, second = engines.submit(state, requests, config=config)
    return state, [*np.asarray(first).tolist(), *np.asarray(second).tolist()]


def test_not_a_number_ends_only_its_request() -> None:
    weights = jax.tree.map(lambda x: x, engines.params())
    broken = 17
    weights["embed"] = {"weight": weights["embed"]["weight"].at[broken].set(jnp.nan)}
    asks = [
        greedy(1, [5, 6, 7], 20),
        greedy(2, [broken] * 20, 20),
        Ask(3, [8, 9, 10, 11], Sampling(max_tokens=20, seed=1)),
        greedy(4, [3] * 25 + [broken], 20),
        *[greedy(5 + index, [index] * 9, 20) for index in range(6)],
    ]
    run = engines.serve(asks, TIGHT, weights=weights)
    expected = engines.plain(asks, TIGHT, weights=weights)
    got = {
        name: (outcome.tokens, outcome.reason) for name, outcome in run.outcomes.items()
    }
    assert got == expected
    assert got[2] == ([], "nan")
    assert got[4] == ([], "nan")
    sound = [name for name in got if got[name][1] == "length"]
    assert len(sound) >= 5
    # Their K and V were NaN; later sequences on the same pages are not affected.
    healthy = engines.plain(asks, TIGHT)
    assert all(got[name] == healthy[name] for name in sound)


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_an_infinity_in_the_head_ends_all_requests(value: float) -> None:
    weights = dict(engines.params())
    # Only the logits of one token are infinite.
    weights["head"] = {"weight": weights["head"]["weight"].at[60, 3].set(value)}
    run = engines.serve(singles(), TIGHT, weights=weights)
    assert {outcome.reason for outcome in run.outcomes.values()} == {"nan"}
    assert not any(run.tokens.values())


class Hoarder(NamedTuple):
    """Plans more pages than the pool has, once it admits a second request."""

    holds_finished = False

    def plan(self, counts: Counts) -> Plan:
        plan = scheduling.fcfs().plan(counts)
        return plan._replace(head_places=jnp.where(plan.admit, counts.max_length, 0))


@pytest.mark.slow
def test_a_plan_with_too_many_pages_feeds_no_rows() -> None:
    asks = [greedy(1, [3] * 5, 4), greedy(2, [3] * 5, 4)]
    state = engines.submitted(asks, TIGHT)
    state, info = engines.run_steps(
        engines.params(),
        state,
        from_seconds(0.0),
        config=TIGHT,
        forward=PagedForward(MODEL, TIGHT.numerics),
        policy=Hoarder(),
    )
    # Both got a slot, neither got a page; later plans ask for growth only.
    assert np.asarray(info.enough).tolist() == [False, True, True, True]
    assert not np.asarray(info.num_rows[0]).any()
    assert int(info.used_pages[0]) == 0
    assert present(jax.tree.map(np.asarray, info), 0) == {1, 2}
    assert not any(np.asarray(counts).any() for counts in info.violations)
    # A correct policy can continue from this state.
    state, _ = run_on(state, calls=8)
    outcomes = engines.outcomes_of(engines.drain(state)[1])
    got = {name: (outcome.tokens, outcome.reason) for name, outcome in outcomes.items()}
    assert got == engines.plain(asks, TIGHT)


def assert_close(x: Any, y: Any) -> None:
    """Asserts equal integers, and floats that are equal up to rounding."""
    tolerance = 1e-4 if jnp.issubdtype(x.dtype, jnp.floating) else 0
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_vmap_over_eight_engines_equals_eight_runs() -> None:
    fixed: dict[str, Any] = dict(
        config=TIGHT, forward=PagedForward(MODEL, TIGHT.numerics), policy=FCFS
    )
    alone = []
    for seed in range(8):
        asks = engines.random_asks(np.random.default_rng(seed), 8, scores=True)
        alone.append(engines.submitted(asks, TIGHT))
    together = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    run_together = jax.jit(
        jax.vmap(functools.partial(run_steps, **fixed), in_axes=(None, 0, None)),
        donate_argnums=1,
    )
    num_preempted = 0
    clock = from_seconds(0.0)
    for _ in range(8):
        together, infos = run_together(engines.params(), together, clock)
        num_preempted += int(infos.num_preempted.sum())
        for index in range(8):
            alone[index], info = engines.run_steps(
                engines.params(), alone[index], clock, **fixed
            )
            one = jax.tree.map(lambda x: x[index], (together, infos))  # noqa: B023
            jax.tree.map(assert_close, (alone[index], info), one)
    assert num_preempted > 0
