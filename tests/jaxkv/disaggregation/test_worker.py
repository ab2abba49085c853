"""Workers with engines: tokens of one engine; pages are checked before use."""

import asyncio
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling
from jaxkv.disaggregation import Router, WorkerSpec, digests, page_messages, worker
from jaxkv.disaggregation.page_messages import PageMessage
from jaxkv.disaggregation.worker import Attempt, PrefillResult, Report, Worker
from tests.support import engines, moods
from tests.support.folders import TOKENIZED

# In debug mode, as the engines of other tests, whose programs these are.
ENGINE: dict[str, Any] = vars(engines.SERVED) | {"prefix_cache": True}
PREFILL, DECODE = (
    WorkerSpec(role=role, folder=str(TOKENIZED), engine=ENGINE)
    for role in ("prefill", "decode")
)
RNG = np.random.default_rng(0)
COMMON = RNG.integers(5, 60, 16).tolist()
PROMPTS = [
    *([*COMMON, *RNG.integers(5, 60, num).tolist()] for num in (11, 3, 9)),
    *(RNG.integers(5, 60, num).tolist() for num in (2, 30, 9)),
]
ASK = Sampling(max_tokens=10, temperature=1.0, ignore_eos=True)


@functools.cache
def wanted() -> list[list[int]]:
    """The answers of a single engine."""
    engine = jaxkv.Engine.load(TOKENIZED, **ENGINE)
    for name, prompt in enumerate(PROMPTS):
        engine.submit(prompt, ASK, request_id=name)
    done = {x.request_id: x.completion for x in engine.stream() if x.completion}
    return [done[name].tokens for name in range(len(PROMPTS))]


class LocalHandle:
    """Calls to a worker in this process. Implements `WorkerHandle`."""

    def __init__(self, local: Worker):
        self.local = local
        self.cancels: set[asyncio.Task[None]] = set()

    async def describe(self) -> dict[str, Any]:
        return await self.local.describe()

    async def poll(self, router: str) -> list[Report] | None:
        return await self.local.poll(router)

    async def submit(
        self,
        attempt: Attempt,
        prompt: list[int],
        sampling: Sampling,
        key_id: int,
        attributes: Any = None,
    ) -> None:
        await self.local.submit(attempt, prompt, sampling, key_id, attributes)

    async def release(self, router: str) -> bool:
        return await self.local.release(router)

    async def prefill(
        self, attempt: Attempt, tokens: list[int], salt: int, attributes: Any = None
    ) -> tuple[PrefillResult, Any]:
        done, *pages = await self.local.prefill(attempt, tokens, salt, attributes)
        return done, pages

    async def bring(self, pages: Any) -> int:
        return await self.local.bring(*pages)

    def cancel(self, attempt: Attempt) -> None:
        self.cancels.add(asyncio.create_task(self.local.cancel(attempt)))


class LocalLauncher:
    """Implements `Launcher` in this process."""

    def __init__(self) -> None:
        self.workers: dict[str, LocalHandle] = {}

    def start(self, name: str, spec: WorkerSpec) -> LocalHandle:
        self.workers[name] = LocalHandle(Worker(name, spec))
        return self.workers[name]

    def find(self) -> Mapping[str, LocalHandle]:
        return {}

    def kill(self, name: str, handle: Any) -> None:
        del self.workers[name]
        handle.local.close()


@pytest.mark.slow
def test_two_workers_answer_as_one_engine() -> None:
    async def run() -> None:
        launcher = LocalLauncher()
        router = Router(launcher)
        await router.start([PREFILL, DECODE])
        workers = [handle.local._engine.engine for handle in launcher.workers.values()]
        compiled_s = [engine.compile_s for engine in workers]
        coroutines = (router.answer(x, ASK, key_id=i) for i, x in enumerate(PROMPTS))
        answers = await asyncio.gather(*coroutines)
        assert [x.completion.tokens for x in answers] == wanted()
        # No request waits for a compilation.
        assert [engine.compile_s for engine in workers] == compiled_s
        # Two tokens are less than a page: the decode worker reads them itself.
        sent = [x.transfer.num_bytes > 0 for x in answers]
        assert sent == [True] * 3 + [False] + [True] * 2
        assert sum(x.completion.num_cached for x in answers) >= 4 * 8
        events = [x async for x in router.stream(PROMPTS[4], ASK, key_id=4)]
        assert [token for x in events for token in x.tokens] == wanted()[4]
        several = Sampling(max_tokens=4, n=2, logprobs=1, prompt_logprobs=True, seed=3)
        answer = await router.answer(PROMPTS[0], several)
        engine = jaxkv.Engine.load(TOKENIZED, **ENGINE)
        [alone] = engine.generate([PROMPTS[0]], several)
        for routed_answer, engine_answer in zip(
            answer.completion.answers, alone.answers, strict=True
        ):
            assert (routed_answer.tokens, routed_answer.text) == (
                engine_answer.tokens,
                engine_answer.text,
            )
            assert routed_answer.logprobs == pytest.approx(
                engine_answer.logprobs, abs=1e-4
            )
        with pytest.raises(ValueError, match="max_length"):
            await router.answer([5] * 70, ASK)
        assert [x.load for x in router.workers.values()] == [0, 0]
        await router.close()
        assert not launcher.workers

    asyncio.run(run())


@pytest.mark.slow
def test_an_engine_that_fails_ends_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        launcher = LocalLauncher()
        router = Router(launcher)
        await router.start([DECODE, DECODE])
        [broken, _] = launcher.workers.values()
        engine = broken.local._engine.engine

        def fail(*args: Any, **rules: Any) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine._programs, "run_steps", fail)
        coroutines = (router.answer(x, ASK, key_id=i) for i, x in enumerate(PROMPTS))
        answers = await asyncio.gather(*coroutines)
        assert [x.completion.tokens for x in answers] == wanted()
        assert max(x.num_attempts for x in answers) > 1
        assert broken not in launcher.workers.values()
        await router.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_prefill_worker_whose_engine_fails_is_replaced() -> None:
    async def run() -> None:
        launcher = LocalLauncher()
        router = Router(launcher)
        await router.start([PREFILL, DECODE])
        [broken, _] = launcher.workers.values()

        def fail(*args: Any, **fields: Any) -> Any:
            raise RuntimeError("the device is gone")

        broken.local._engine.engine.take_prefix = fail
        answer = await router.answer(PROMPTS[0], ASK, key_id=0)
        assert (answer.completion.tokens, answer.num_attempts) == (wanted()[0], 1)
        while broken in launcher.workers.values() or len(launcher.workers) < 2:
            await asyncio.sleep(0.01)
        answer = await router.answer(PROMPTS[4], ASK, key_id=4)
        assert answer.completion.tokens == wanted()[4]
        assert answer.transfer.num_bytes > 0
        await router.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_stalled_request_ends_and_its_worker_continues() -> None:
    async def run() -> None:
        launcher = LocalLauncher()
        router = Router(launcher)
        policy = moods.Moody(jnp.int32(moods.PLAIN))
        specs = [
            dataclasses.replace(x, engine=ENGINE | {"policy": policy})
            for x in (PREFILL, DECODE)
        ]
        await router.start(specs)
        engines = [x.local._engine.engine for x in launcher.workers.values()]
        names = [*launcher.workers]
        for engine in engines:
            moods.with_mood(engine, moods.REFUSES)
        coroutines = (router.answer(x, ASK, key_id=i) for i, x in enumerate(PROMPTS))
        failures = await asyncio.gather(*coroutines, return_exceptions=True)
        assert {type(x) for x in failures} == {jaxkv.StallError}
        for engine in engines:
            moods.with_mood(engine, moods.PLAIN)
        coroutines = (router.answer(x, ASK, key_id=i) for i, x in enumerate(PROMPTS))
        answers = await asyncio.gather(*coroutines)
        assert [x.completion.tokens for x in answers] == wanted()
        assert [*launcher.workers] == names
        await router.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_worker_may_own_a_mesh() -> None:
    async def run() -> None:
        launcher = LocalLauncher()
        router = Router(launcher)
        divided = dataclasses.replace(DECODE, mesh={"tensor": 2})
        await router.start([PREFILL, divided])
        coroutines = (router.answer(x, ASK, key_id=i) for i, x in enumerate(PROMPTS))
        answers = await asyncio.gather(*coroutines)
        assert [x.completion.tokens for x in answers] == wanted()
        assert any(x.transfer.num_bytes for x in answers)
        await router.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_router_that_stops_polling_loses_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(worker, "POLL_S", 0.05)
    monkeypatch.setattr(worker, "ROUTER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(worker, "ORPHAN_S", 0.2)
    monkeypatch.setattr(worker.os, "_exit", ends.append)

    async def run() -> None:
        one = Worker("one", DECODE)
        assert (await one.describe())["failure"] is None
        endless = Sampling(max_tokens=40, ignore_eos=True)
        attempt = Attempt("gone", 1, 1)
        with pytest.raises(ConnectionError, match="router gone is unknown"):
            await one.submit(attempt, PROMPTS[3], endless, 0)
        assert await one.poll("gone") is None
        await one.submit(attempt, PROMPTS[3], endless, 0)
        assert (await one.status())["routers"] == 1
        assert await one.poll("there") is None
        assert (await one.status())["routers"] == 2
        while (await one.status())["routers"] == 2:
            await one.poll("there")
        assert (await one.status())["running"] == 0
        # The router learns that its attempts have ended.
        with pytest.raises(ConnectionError, match="router gone is unknown"):
            await one.prefill(attempt, PROMPTS[3], 0)
        assert await one.poll("gone") is None
        await one.release("gone")
        assert not ends
        await one.release("there")
        while not ends:
            await asyncio.sleep(0.01)
        one.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert ends[0] == 0


def test_a_worker_that_cannot_load_describes_why() -> None:
    spec = WorkerSpec(role="decode", folder=str(TOKENIZED), engine={"max_length": 1})
    described = asyncio.run(Worker("one", spec).describe())
    assert described["failure"].startswith("ValueError: ")
    assert "max_length=1" in described["failure"]


PAGES = {
    "k": np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4),
    "v": np.arange(2 * 3 * 2, dtype=np.int8).reshape(2, 3, 2),
}
LIKE = {name: np.zeros((2, 9, *x.shape[2:]), x.dtype) for name, x in PAGES.items()}
OWN = {"weights": "abc", "page_size": "4"}


def test_pages_arrive_as_they_were_sent() -> None:
    message = page_messages.pack(PAGES, [1, 2, 3], 7, OWN)
    prefix_pages = page_messages.unpack(message, LIKE, OWN)
    assert (prefix_pages.tokens, prefix_pages.salt) == ([1, 2, 3], 7)
    for name, leaf in PAGES.items():
        assert prefix_pages.pages[name].dtype == leaf.dtype
        np.testing.assert_array_equal(prefix_pages.pages[name], leaf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"identity": {**OWN, "weights": "x"}}, "weights='x' must be 'abc'"),
        ({"identity": {"weights": "abc"}}, "page_size=None must be '4'"),
        ({"identity": 3}, "identity=3 must be an object"),
        ({"leaves": [["float32", [2, 3, 4]]]}, "1 arrays of pages must be 2"),
        ({"leaves": [["float16", [2, 3, 4]], ["int8", [2, 3, 2]]]}, "pages of float16"),
        (
            {"leaves": [["float32", [2, 3, 5]], ["int8", [2, 3, 2]]]},
            "3, 5. must",
        ),
        ({"leaves": [["float32", [2, -3, 4]], ["int8", [2, 3, 2]]]}, "must be float32"),
        ({"leaves": [["float32", [2, 9, 4]], ["int8", [2, 9, 2]]]}, "does not fit"),
        ({"leaves": [["float32", [2, 2, 4]], ["int8", [2, 2, 2]]]}, "does not fit"),
        ({"leaves": [["float32"], ["int8", [2, 3, 2]]]}, "damaged"),
        ({"leaves": 5}, "damaged"),
        ({"tokens": None, "leaves": [["object", [1 << 40]]]}, "must be 2"),
    ],
)
def test_messages_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    valid_message = page_messages.pack(PAGES, [1, 2, 3], 7, OWN)
    header = json.dumps(json.loads(valid_message.header) | change)
    with pytest.raises(ValueError, match=message):
        page_messages.unpack(valid_message._replace(header=header), LIKE, OWN)


def test_damaged_messages_are_refused() -> None:
    header, payload = page_messages.pack(PAGES, [1, 2, 3], 7, OWN)
    damaged: list[Any] = [
        ("{", payload),
        ("[]", payload),
        (header.encode(), payload),
        (header + " " * page_messages.MAX_HEADER_BYTES, payload),
        (header, payload[:-1]),
        (header, np.append(payload, np.uint8(0))),
        (header, payload.tobytes()),
        (header, payload.view(np.float32)),
    ]
    for wrong in damaged:
        with pytest.raises(ValueError, match=r"header|payload"):
            page_messages.unpack(PageMessage(*wrong), LIKE, OWN)


def test_digests_are_remembered_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"
    hashed = []
    folder.mkdir()
    files = [folder / "one.safetensors", folder / "two.safetensors"]
    for path in files:
        path.write_bytes(b"0123")
    file_digest = hashlib.file_digest

    def count(file: Any, kind: str) -> Any:
        hashed.append(Path(file.name).name)
        return file_digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", count)
    digests.digest_files(files)
    assert [*tmp_path.iterdir()] == [folder]  # small folders leave no file
    monkeypatch.setattr(digests, "REMEMBERED_BYTES", 1)
    first = digests.digest_files(files)
    hashed.clear()
    assert digests.digest_files(files) == first
    assert hashed == []
    files[0].write_bytes(b"9999")
    assert digests.digest_files(files) != first
    assert hashed == ["one.safetensors"]
    memory = tmp_path / ".a.sha256.json"
    for damaged in ("{", "[]", '{"one.safetensors": [1]}'):
        memory.write_text(damaged)
        assert digests.digest_files(files) != first
