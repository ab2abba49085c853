"""The router: retries, deadlines, cancellation, worker pool; no answer is ever
wrong."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import pytest

from jaxkv import RequestAttributes, Sampling, StallError
from jaxkv.disaggregation import (
    Candidate,
    ReplayError,
    RequestCancelledError,
    Router,
    RouterConfig,
    WorkerLostError,
    choice,
)
from jaxkv.disaggregation.worker import Report, WorkerSpec
from jaxkv.server import OverloadedError
from jaxkv.serving import Event
from tests.support.scripted_workers import (
    DECODE,
    PREFILL,
    ScriptedLauncher,
    ScriptedWorker,
    tokens_of,
)

PROMPT = list(range(17))
ASK = Sampling(max_tokens=6)
QUICK = RouterConfig(backoff_s=0.001, heartbeat_s=2.0, discover_s=0.01)


@contextlib.asynccontextmanager
async def routing(
    *specs: Any,
    launcher: ScriptedLauncher | None = None,
    config: RouterConfig = QUICK,
    **how: Any,
) -> AsyncGenerator[tuple[Router, ScriptedLauncher]]:
    launcher = ScriptedLauncher() if launcher is None else launcher
    router = Router(launcher, config=config, **how)
    await router.start(specs)
    try:
        yield router, launcher
    finally:
        await asyncio.wait_for(router.close(), 10)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:  # scripted answers without a receiver
            task.cancel()


def runs(test: Any) -> Callable[[], None]:
    """Runs an asynchronous test in at most 20 s."""

    def run() -> None:
        async def limited() -> None:
            await asyncio.wait_for(test(), 20)

        asyncio.run(limited())

    run.__name__ = test.__name__
    return run


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@runs
async def test_a_prompt_is_read_by_one_worker_and_answered_by_another() -> None:
    async with routing(PREFILL, DECODE) as (router, launcher):
        answer = await router.answer(PROMPT, ASK, key_id=3)
        assert answer.completion.tokens == tokens_of(PROMPT, ASK, 3, 0)
        assert (answer.num_attempts, answer.transfer.num_bytes) == (1, 100)
        [reader] = launcher.role("prefill")
        [decoder] = launcher.role("decode")
        assert (reader.num_read, decoder.num_brought) == (1, 1)
        # The decode worker is known to have the pages now.
        urgent = RequestAttributes(priority=-2, session=7)
        await router.answer(PROMPT, ASK, key_id=4, attributes=urgent)
        assert decoder.attributes == [RequestAttributes(), urgent]
        assert (reader.num_read, decoder.num_brought) == (1, 1)
        await router.answer([8, *PROMPT], ASK, attributes=urgent)
        assert reader.attributes == [RequestAttributes(), urgent]
        assert reader.num_read == 2
        # Less than a page, or no prefix cache: the decode worker reads.
        await router.answer(PROMPT[:3], ASK)
        await router.answer([9, *PROMPT], Sampling(max_tokens=2, prefix_cache=False))
        assert reader.num_read == 2
        members = router.workers.values()
        assert [x.load for x in members] == [0, 0]
        times = answer.completion
        assert times.first_token_s is not None
        assert times.arrival_s <= times.first_token_s <= times.finish_s


@runs
async def test_streamed_events_are_those_of_the_answer() -> None:
    async with routing(DECODE) as (router, _):
        ask = Sampling(max_tokens=4, n=2)
        events = [x async for x in router.stream(PROMPT, ask, key_id=1)]
        for sample in range(2):
            sample_events = [x for x in events if x.sample == sample]
            wanted = tokens_of(PROMPT, ask, 1, sample)
            assert [token for x in sample_events for token in x.tokens] == wanted
            assert "".join(x.text for x in sample_events) == "".join(
                f"<{x}>" for x in wanted
            )
        assert [x.completion is not None for x in events].count(True) == 1
        assert events[-1].completion is not None
        assert len({x.request_id for x in events}) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_of_a_lost_worker_is_repeated(streamed: bool) -> None:
    def prepare(worker: ScriptedWorker) -> None:
        if ".1" in worker.name and worker.spec.role == "decode":
            worker.dies_after = 3

    @runs
    async def run() -> None:
        launcher = ScriptedLauncher(prepare)
        async with routing(DECODE, launcher=launcher) as (router, _):
            wanted = tokens_of(PROMPT, ASK, 5, 0)
            if streamed:
                events = [x async for x in router.stream(PROMPT, ASK, key_id=5)]
                assert [token for x in events for token in x.tokens] == wanted
                text = "".join(x.text for x in events)
                assert text == "".join(f"<{x}>" for x in wanted)
            else:
                answer = await router.answer(PROMPT, ASK, key_id=5)
                assert answer.completion.tokens == wanted
                assert answer.num_attempts == 2
            # The lost worker was replaced by one of the next generation.
            [serving] = [x for x in router.status()["workers"]]
            assert serving["name"].endswith(".2")

    run()


@runs
async def test_tokens_that_changed_after_they_were_streamed_are_an_error() -> None:
    def prepare(worker: ScriptedWorker) -> None:
        worker.dies_after = 3 if ".1" in worker.name else None
        worker.token_offset = 0 if ".1" in worker.name else 1
        worker.pace_s = 0.01  # the tokens arrive before the worker ends

    async with routing(DECODE, launcher=ScriptedLauncher(prepare)) as (router, _):
        streamed_tokens = []

        async def read() -> None:
            async for event in router.stream(PROMPT, ASK, key_id=5):
                streamed_tokens.extend(event.tokens)

        with pytest.raises(ReplayError, match="reproducible"):
            await read()
        assert streamed_tokens == tokens_of(PROMPT, ASK, 5, 0)[:3]


@runs
async def test_retries_end_in_one_clear_error() -> None:
    def prepare(worker: ScriptedWorker) -> None:
        worker.dies_after = 1

    async with routing(DECODE, launcher=ScriptedLauncher(prepare)) as (
        router,
        launcher,
    ):
        with pytest.raises(WorkerLostError, match="5 attempts have failed; the last"):
            await router.answer(PROMPT, ASK)
        assert len(launcher.workers) <= 6


@runs
async def test_one_attempt_is_made_without_a_retry() -> None:
    config = dataclasses.replace(QUICK, max_attempts=1)
    async with routing(DECODE, config=config) as (router, _):
        assert (await router.answer(PROMPT, ASK)).num_attempts == 1


@runs
async def test_without_a_worker_that_can_start_requests_fail_at_once() -> None:
    def prepare(worker: ScriptedWorker) -> None:
        if ".1" in worker.name:
            worker.dies_after = 1
        else:
            worker.failure = "OSError: the weights are gone"

    config = RouterConfig(backoff_s=0.001, max_restarts=0)
    launcher = ScriptedLauncher(prepare)
    async with routing(DECODE, launcher=launcher, config=config) as (router, _):
        with pytest.raises(WorkerLostError, match="no decode worker is left"):
            await router.answer(PROMPT, ASK)


@runs
async def test_failures_of_an_unknown_kind_leave_no_request_waiting() -> None:
    config = RouterConfig(backoff_s=0.001, max_restarts=0)
    async with routing(DECODE, config=config) as (router, launcher):
        [worker] = launcher.workers.values()
        worker.pace_s = 3600

        def fail(*_: Any) -> Any:
            raise LookupError("no node has room")

        task = asyncio.create_task(router.answer(PROMPT, ASK))
        await until(lambda: worker.running)
        for target, name in ((launcher, "start"), (worker, "_alive")):
            setattr(target, name, fail)
        worker.post(next(iter(_reports(worker))))  # the poll under way returns
        with pytest.raises(WorkerLostError, match="no decode worker is left"):
            await task


@runs
async def test_a_worker_that_stops_answering_is_killed_and_replaced() -> None:
    async with routing(DECODE) as (router, launcher):
        [worker] = launcher.workers.values()
        worker.pace_s = 3600
        task = asyncio.create_task(router.answer(PROMPT, ASK, key_id=1))
        await until(lambda: worker.running)
        worker.hangs = True
        worker.post(next(iter(_reports(worker))))  # the poll under way returns
        answer = await task
        assert answer.completion.tokens == tokens_of(PROMPT, ASK, 1, 0)
        assert answer.num_attempts == 2
        assert launcher.killed == [worker.name]


@pytest.mark.parametrize("heartbeat_s", [2.0, 600.0])
@pytest.mark.parametrize("streamed", [False, True])
def test_requests_that_a_worker_cancelled_during_a_stall_are_repeated(
    heartbeat_s: float, streamed: bool
) -> None:
    """For any order of the router's timeout and the worker's."""

    @runs
    async def run() -> None:
        config = dataclasses.replace(QUICK, heartbeat_s=heartbeat_s)
        async with routing(DECODE, config=config) as (router, launcher):
            [worker] = launcher.workers.values()
            worker.pace_s = 0.01
            tokens: list[int] = []

            async def read() -> None:
                if streamed:
                    async for event in router.stream(PROMPT, ASK, key_id=1):
                        tokens.extend(event.tokens)
                else:
                    answer = await router.answer(PROMPT, ASK, key_id=1)
                    tokens.extend(answer.completion.tokens)

            task = asyncio.create_task(read())
            await until(lambda: worker.running)
            await asyncio.sleep(0.025)
            [first] = worker.running
            worker.forget_routers()
            # Refused until the next poll, and repeated.
            await asyncio.gather(task, router.answer([5, *PROMPT], ASK))
            assert tokens == tokens_of(PROMPT, ASK, 1, 0)
            assert first in worker.cancelled
            assert not launcher.killed

    run()


@runs
async def test_a_stall_of_the_router_costs_no_worker() -> None:
    async with routing(DECODE, DECODE) as (router, launcher):
        await asyncio.sleep(0.1)
        time.sleep(QUICK.heartbeat_s + 0.5)
        answer = await router.answer(PROMPT, ASK, key_id=1)
        assert answer.completion.tokens == tokens_of(PROMPT, ASK, 1, 0)
        await asyncio.sleep(0.1)
        assert not launcher.killed


def _reports(worker: ScriptedWorker) -> Any:
    for attempt in worker.running:
        yield Report(attempt, event=Event(7, [], "", None))


@runs
async def test_lost_pages_cost_no_attempt() -> None:
    async with routing(PREFILL, DECODE) as (router, launcher):
        [reader] = launcher.role("prefill")
        [decoder] = launcher.role("decode")
        decoder.brings = False
        answer = await router.answer(PROMPT, ASK, key_id=2)
        assert (answer.num_attempts, answer.transfer.num_bytes) == (1, 0)
        reader.pace_s = 3600
        task = asyncio.create_task(router.answer([5, *PROMPT], ASK, key_id=2))
        await until(lambda: any(x.attempts for x in router.workers.values()))
        reader.kill()
        answer = await task
        assert answer.completion.tokens == tokens_of([5, *PROMPT], ASK, 2, 0)


@runs
async def test_a_deadline_ends_a_request_everywhere() -> None:
    async with routing(DECODE) as (router, launcher):
        [worker] = launcher.workers.values()
        worker.pace_s = 3600
        with pytest.raises(TimeoutError, match=r"deadline_s=0\.05 passed"):
            await router.answer(PROMPT, ASK, deadline_s=0.05)
        await until(lambda: not worker.running)
        assert len(worker.cancelled) == 1
        config = RouterConfig(deadline_s=0.05)
        async with routing(launcher=launcher, config=config) as (second, _):
            with pytest.raises(TimeoutError, match="deadline"):
                await second.answer(PROMPT, ASK)
        assert router.status()["running"] == 0


@runs
async def test_cancelling_ends_the_work() -> None:
    async with routing(DECODE) as (router, launcher):
        [worker] = launcher.workers.values()
        worker.pace_s = 3600
        task = asyncio.create_task(router.answer(PROMPT, ASK))
        await until(lambda: worker.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not worker.running)
        worker.pace_s = 0.01
        stream = router.stream(PROMPT, Sampling(max_tokens=60))
        first = await anext(stream)
        router.cancel(first.request_id)
        with pytest.raises(RequestCancelledError):
            async for _ in stream:
                pass
        await until(lambda: not worker.running)
        async with contextlib.aclosing(router.stream(PROMPT, ASK)) as closed:
            await anext(closed)
        await until(lambda: not worker.running)
        assert router.status()["running"] == 0
        router.cancel(99)  # unknown names are ignored


@runs
async def test_answers_of_an_abandoned_attempt_are_dropped() -> None:
    async with routing(DECODE, DECODE) as (router, launcher):
        first, _ = launcher.workers.values()
        first.pace_s = 3600
        task = asyncio.create_task(router.answer(PROMPT, ASK, key_id=1))
        await until(lambda: first.running)
        [late] = first.running
        router._pool.mark_lost(router.workers[first.name], "a test")
        # The lost worker continues, and its reports still arrive.
        wrong = Report(late, event=Event(7, [1], "wrong", None))
        router._deliver(wrong)
        answer = await task
        assert answer.completion.tokens == tokens_of(PROMPT, ASK, 1, 0)
        assert answer.num_attempts == 2


@runs
async def test_refusals_are_not_retried() -> None:
    async with routing(PREFILL, DECODE) as (router, _):
        with pytest.raises(ValueError, match="len"):
            await router.answer(list(range(61)), ASK)
        with pytest.raises(ValueError, match="adapter='a' must be None with"):
            await router.answer(PROMPT, Sampling(adapter="a"))
        with pytest.raises(ValueError, match="need a tokenizer"):
            await router.answer("text", ASK)
        with pytest.raises(ValueError, match="key_id=-1"):
            await router.answer(PROMPT, ASK, key_id=-1)
        wrong = RequestAttributes(priority=2000)
        with pytest.raises(ValueError, match="priority=2000 must be"):
            await router.answer(PROMPT, ASK, attributes=wrong)
        with pytest.raises(ValueError, match="deadline_s"):
            await router.answer(PROMPT, ASK, deadline_s=-1.0)
        assert router.status()["running"] == 0


@runs
async def test_a_stalled_request_costs_no_worker_and_no_further_attempt() -> None:
    async with routing(DECODE) as (router, launcher):
        [worker] = launcher.workers.values()
        worker.pace_s = 3600
        task = asyncio.create_task(router.answer(PROMPT, ASK))
        await until(lambda: worker.running)
        [attempt] = worker.running
        worker.post(Report(attempt, refusal=StallError("no progress")))
        with pytest.raises(StallError, match="no progress"):
            await task
        assert attempt.number == 1
        worker.pace_s = 0.0
        answer = await router.answer(PROMPT, ASK, key_id=1)
        assert answer.completion.tokens == tokens_of(PROMPT, ASK, 1, 0)
        assert not launcher.killed


@runs
async def test_two_routers_share_workers_and_their_requests_do_not_mix() -> None:
    launcher = ScriptedLauncher()
    async with (
        routing(DECODE, launcher=launcher) as (one, _),
        routing(launcher=launcher) as (two, _),
    ):
        assert [*one.workers] == [*two.workers]
        # The same names and keys in both; prompts differ.
        prompts = [[x, *PROMPT] for x in range(8)]
        coroutines = [
            (one if i % 2 else two).answer(x, ASK, key_id=1)
            for i, x in enumerate(prompts)
        ]
        for prompt, answer in zip(
            prompts, await asyncio.gather(*coroutines), strict=True
        ):
            assert answer.completion.tokens == tokens_of(prompt, ASK, 1, 0)
        # Workers are shared by both routers; a lost one is replaced once.
        name = one.add_worker(DECODE)
        await until(lambda: name in two.workers)
        launcher.workers[name].kill()
        new = name[:-1] + "2"
        await until(lambda: all(new in x.workers for x in (one, two)))
        assert len(launcher.workers) == 3


@runs
async def test_workers_join_leave_and_restart_while_requests_run() -> None:
    async with routing(DECODE) as (router, launcher):
        [old] = launcher.workers.values()
        old.pace_s = 0.01
        task = asyncio.create_task(router.answer(PROMPT, ASK, key_id=1))
        await until(lambda: old.running)
        new = await router.restart_worker(old.name)
        assert (await task).num_attempts == 1  # the last request was waited for
        assert [*router.workers] == [new]
        assert launcher.killed == [old.name]
        added = router.add_worker(PREFILL)
        await router.wait_for(added)
        assert (await router.answer(PROMPT, ASK)).transfer.num_bytes == 100
        await router.remove_worker(added)
        assert (await router.answer([1, *PROMPT], ASK)).transfer.num_bytes == 0
        with pytest.raises(ValueError, match="name='x' must be one of"):
            await router.remove_worker("x")


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"identity": {"weights": "b", "page_size": "4"}}, "weights='b' must be 'a'"),
        ({"max_length": 32}, "max_length=32 must be 64"),
        ({"seed": 1}, "seed=1 must be 0"),
        ({"failure": "ValueError: no config.json"}, "did not start: ValueError: no"),
    ],
)
def test_workers_that_do_not_fit_are_refused(described: Any, message: str) -> None:
    def prepare(worker: ScriptedWorker) -> None:
        if worker.spec.role == "decode":
            worker.described = described

    @runs
    async def run() -> None:
        router = Router(ScriptedLauncher(prepare), config=QUICK)
        try:
            with pytest.raises(ValueError, match=message):
                await router.start([PREFILL, DECODE])
        finally:
            await router.close()

    run()


@runs
async def test_bounds_and_ends() -> None:
    async with routing(DECODE, config=RouterConfig(max_requests=1)) as (
        router,
        launcher,
    ):
        [worker] = launcher.workers.values()
        worker.pace_s = 3600
        task = asyncio.create_task(router.answer(PROMPT, ASK))
        await until(lambda: worker.running)
        with pytest.raises(OverloadedError, match="at most max_requests=1"):
            await router.answer(PROMPT, ASK)
        await router.close()
        with pytest.raises(RequestCancelledError):
            await task
        with pytest.raises(RuntimeError, match="closed"):
            await router.answer(PROMPT, ASK)
        assert worker.released == [router.name]
        assert launcher.killed == [worker.name]
    router = Router(ScriptedLauncher(), config=QUICK)
    with pytest.raises(ValueError, match="1 or more decode workers"):
        await router.start([PREFILL])
    await router.close()


def test_configs_are_checked() -> None:
    wrong: dict[str, Any] = {"heartbeat_s": 1.0, "max_attempts": 0, "backoff_s": -1.0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            RouterConfig(**{name: value})
    with pytest.raises(ValueError, match="role"):
        WorkerSpec(role="both", folder="model")
    with pytest.raises(ValueError, match="mesh"):
        WorkerSpec(role="decode", folder="model", mesh={"tensor": 0})


def candidate(load: int, cached: int = 0) -> Candidate:
    return Candidate("a", "decode", load, 0, cached)


def test_requests_go_to_the_worker_with_the_least_load() -> None:
    idle = candidate(0)
    busy = candidate(10)
    cached = candidate(10, 12)
    assert choice.least_work([busy, idle], 17) == 1
    assert choice.prefix_affinity([busy, idle], 17) == 1
    assert choice.prefix_affinity([idle, cached], 17) == 1
    assert choice.least_work([idle, cached], 17) == 0
    keys = choice.page_keys(list(range(17)), 4, 0)
    assert len(keys) == 4
    assert choice.page_keys(list(range(16)), 4, 0) == keys[:3]
    assert not {*keys} & {*choice.page_keys(list(range(17)), 4, 1)}
    changed = choice.page_keys([0, 1, 2, 3, 9, *range(5, 17)], 4, 0)
    assert [a == b for a, b in zip(keys, changed, strict=True)] == [True, *[False] * 3]


def test_the_choice_of_a_worker_is_an_argument() -> None:
    candidates: list[list[Candidate]] = []

    def last(workers: Any, num_tokens: int) -> int:
        candidates.append(list(workers))
        return len(workers) - 1

    @runs
    async def run() -> None:
        async with routing(DECODE, DECODE, choose=last) as (router, launcher):
            for _ in range(3):
                await router.answer(PROMPT, ASK)
            first, second = launcher.workers.values()
            assert not first.reports
            assert candidates[0][1] == Candidate(second.name, "decode", 0, 0, 0)
            assert candidates[1][1].cached_tokens == 16
        async with routing(DECODE, choose=lambda workers, num: np.int64(3)) as (bad, _):
            with pytest.raises(ValueError, match=r"choose=3 must be in \[0, 0\]"):
                await bad.answer(PROMPT, ASK)

    run()
