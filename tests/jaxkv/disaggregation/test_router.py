"""Prompts read here, answered there: the tokens of one engine, whoever is lost."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling
from jaxkv.disaggregation import (
    Lost,
    Router,
    Served,
    frames,
    launch,
    router,
    worker,
)
from jaxkv.disaggregation.frames import Connection
from jaxkv.disaggregation.worker import Worker
from tests.support import engines
from tests.support.folders import TOKENIZED

SECRET = b"a secret"
BOUNDS: dict[str, Any] = {
    name: x for name, x in vars(engines.SERVED).items() if name != "debug"
}
# In debug mode, as the engines of other tests, whose programs these are.
CACHED: dict[str, Any] = vars(engines.SERVED) | {"prefix_cache": True}
RNG = np.random.default_rng(0)
COMMON = RNG.integers(5, 60, 16).tolist()
PROMPTS = [
    *([*COMMON, *RNG.integers(5, 60, num).tolist()] for num in (11, 3, 9)),
    *(RNG.integers(5, 60, num).tolist() for num in (2, 30, 9)),
]
ASK = Sampling(max_tokens=10, temperature=1.0, ignore_eos=True)


def make_engine() -> jaxkv.Engine:
    return jaxkv.Engine.load(TOKENIZED, **CACHED)


@functools.cache
def wanted() -> list[list[int]]:
    """What a single engine answers."""
    engine = make_engine()
    for name, prompt in enumerate(PROMPTS):
        engine.submit(prompt, ASK, request_id=name)
    done = {x.request_id: x.completion for x in engine.stream() if x.completion}
    return [done[name].tokens for name in range(len(PROMPTS))]


@contextlib.asynccontextmanager
async def serving(*roles: int) -> AsyncGenerator[tuple[Router, list[Any]]]:
    """A router and its workers in this process: so many that read, that answer."""
    async with contextlib.AsyncExitStack() as stack:
        addresses, stops = [], []
        for _ in range(sum(roles)):
            one = Worker(make_engine(), SECRET)
            server = await one.serve()
            await stack.enter_async_context(server)
            stack.callback(one.close)
            addresses.append(server.sockets[0].getsockname()[:2])
            stops.append((one, server))
        found = await Router.connect(
            addresses[: roles[0]], addresses[roles[0] :], SECRET
        )
        stack.push_async_callback(found.close)
        yield found, stops


async def ask_all(found: Router) -> list[Served]:
    return await asyncio.gather(
        *(found.answer(x, ASK, request_id=name) for name, x in enumerate(PROMPTS))
    )


def test_two_workers_answer_as_one_engine() -> None:
    async def both() -> None:
        async with serving(1, 1) as (found, _):
            served = await ask_all(found)
            assert [each.tokens for each in served] == wanted()
            # Two tokens are no page: nobody reads them for another.
            assert [each.sent_bytes > 0 for each in served] == [True] * 3 + [False] + [
                True
            ] * 2
            assert sum(each.num_cached for each in served) >= 4 * 8
            for each in served:
                assert each.num_attempts == 1
                assert each.arrival_s < each.first_token_s <= each.finish_s
            again = await found.answer(PROMPTS[5], ASK, request_id=5)
            # It is known to be there: nothing is sent.
            assert (again.tokens, again.sent_bytes) == (wanted()[5], 0)
            assert {peer.load for peer in (*found.prefill, *found.decode)} == {0}
            with pytest.raises(ValueError, match="max_length"):
                await found.answer([5] * 70, ASK, request_id=9)

    asyncio.run(both())


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_of_a_lost_worker_begin_again(role: str) -> None:
    async def both() -> None:
        async with serving(2, 2) as (found, _):
            tasks = asyncio.create_task(ask_all(found))
            peers = getattr(found, role)
            while not max(peer.load for peer in peers):
                await asyncio.sleep(0)
            # Who answers is counted as busy while the prompt is read elsewhere.
            assert all(peer.load for peer in (*found.prefill, *found.decode))
            busy = max(peers, key=lambda peer: peer.load)
            await busy._connection.close()
            served = await tasks
            assert [each.tokens for each in served] == wanted()
            assert busy.is_lost
            assert any(each.num_attempts > 1 for each in served)

    asyncio.run(both())


@pytest.mark.thorough
def test_who_answers_reads_where_nobody_else_is_left() -> None:
    async def both() -> None:
        async with serving(1, 1) as (found, _):
            await found.prefill[0]._connection.close()
            served = await ask_all(found)
            assert [each.tokens for each in served] == wanted()
            assert {each.sent_bytes for each in served} == {0}
            await found.decode[0]._connection.close()
            with pytest.raises(Lost, match="no worker is left"):
                await found.answer(PROMPTS[0], ASK, request_id=0)

    asyncio.run(both())


@pytest.mark.thorough
def test_an_engine_that_fails_ends_its_worker() -> None:
    async def both() -> None:
        async with serving(0, 2) as (found, stops):
            broken = stops[0][0]._engine

            def fail(*args: Any, **rules: Any) -> None:
                raise RuntimeError("the device is gone")

            broken.core._programs = broken.core._programs._replace(run_steps=fail)
            served = await ask_all(found)
            assert [each.tokens for each in served] == wanted()
            assert [peer.is_lost for peer in found.decode] == [True, False]

    asyncio.run(both())


def test_pages_of_another_model_or_version_are_refused() -> None:
    async def both() -> None:
        one = Worker(make_engine(), SECRET, model="ours")
        async with await one.serve() as server:
            host, port = server.sockets[0].getsockname()[:2]
            connection = await frames.connect(host, port, SECRET)
            hello = (await connection.receive()).words
            assert (hello["model"], hello["version"]) == ("ours", frames.VERSION)
            sent = {"kind": "pages", "id": 0, "tokens": [1], "salt": 0}
            for name, wrong in (("model", "theirs"), ("version", 0)):
                await connection.send(sent | hello | {name: wrong, "kind": "pages"})
                reply = (await connection.receive()).words
                assert reply["kind"] == "refused"
                assert reply["why"].startswith(f"pages of {name}={wrong!r} must be ")
            await connection.close()
        one.close()

    asyncio.run(both())


def make_peer(load: int, *known: list[int]) -> router.Peer:
    nobody: Any = object.__new__(Connection)
    peer = router.Peer(("127.0.0.1", 1), nobody)
    peer.load = load
    for tokens in known:
        peer.learn(router._chain(tokens, 4, 0))
    return peer


def test_prompts_go_where_least_is_to_be_done() -> None:
    prompt = list(range(17))
    chain = router._chain(prompt, 4, 0)
    assert len(chain) == 4
    idle, busy = make_peer(0), make_peer(10)
    assert router._cheapest([busy, idle], chain, 17) is idle
    # 12 of its tokens are there, more than the 10 that come before it.
    knows = make_peer(10, [*prompt[:12], 99])
    assert knows.known(chain) == 3
    assert router._cheapest([idle, knows], chain, 17) is knows
    assert make_peer(0, [9, *prompt]).known(chain) == 0
    assert router._chain(prompt, 4, 1) != chain


@pytest.mark.thorough
def test_workers_that_do_not_fit_together_are_refused() -> None:
    async def both(**fields: Any) -> None:
        other = jaxkv.Engine.load(TOKENIZED, **CACHED | fields)
        one, two = Worker(make_engine(), SECRET), Worker(other, SECRET)
        async with await one.serve() as a, await two.serve() as b:
            ports = [each.sockets[0].getsockname()[:2] for each in (a, b)]
            with pytest.raises(ValueError, match="workers must have one max_length"):
                await Router.connect(ports[:1], ports[1:], SECRET)
        one.close()
        two.close()

    asyncio.run(both(max_length=32))


def test_who_may_not_or_cannot_take_part_is_refused() -> None:
    async def both() -> None:
        one = Worker(make_engine(), SECRET)
        async with await one.serve() as server:
            ports = [server.sockets[0].getsockname()[:2]]
            with pytest.raises(ValueError, match="1 or more workers"):
                await Router.connect(ports, [], SECRET)
            with pytest.raises(ConnectionError, match="does not know the secret"):
                await Router.connect([], ports, b"another")
        one.close()

    asyncio.run(both())
    with pytest.raises(ValueError, match=r"config\.prefix_cache=False must be True"):
        Worker(jaxkv.Engine.load(TOKENIZED, **BOUNDS), SECRET)


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why() -> None:
    fields: dict[str, Any] = BOUNDS | {"max_length": 1}
    with (
        pytest.raises(ValueError, match=r"did not start: .*max_length"),
        launch.workers(TOKENIZED, [fields]),
    ):
        pass


def test_a_model_is_named_by_what_it_is() -> None:
    assert worker.describe(TOKENIZED) == worker.describe(TOKENIZED)
    assert len(worker.describe(TOKENIZED)) == 64
