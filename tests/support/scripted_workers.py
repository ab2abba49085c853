"""Workers without a model for tests of the router: tokens hash the request."""

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv.disaggregation import WorkerSpec
from jaxkv.disaggregation.worker import POLL_S, Attempt, PrefillResult, Report
from jaxkv.sampling import Sampling
from jaxkv.serving import Completion, Event, FinishedAnswer

IDENTITY = {"weights": "a", "page_size": "4"}
PREFILL = WorkerSpec(role="prefill", folder="model")
DECODE = WorkerSpec(role="decode", folder="model")


def tokens_of(prompt: list[int], ask: Sampling, key_id: int, sample: int) -> list[int]:
    """Returns the answer of every worker."""
    start = f"{prompt}{key_id if ask.seed is None else -ask.seed}{sample}".encode()
    return [zlib.crc32(start + bytes([i])) % 1000 for i in range(ask.max_tokens)]


class ScriptedWorker:
    """Implements `WorkerHandle`. Switches make it fail."""

    def __init__(self, name: str, spec: WorkerSpec):
        self.name = name
        self.spec = spec
        self.is_dead = self.hangs = False
        self.failure: str | None = None
        self.described: dict[str, Any] = {}
        self.pace_s = 0.0
        self.dies_after: int | None = None
        """Number of tokens after which the worker fails."""
        self.token_offset = 0
        """Added to every token, so that answers differ from other workers'."""
        self.brings = True
        self.released: list[str] = []
        self.cancelled: list[Attempt] = []
        self.num_brought = self.num_read = 0
        self.running: dict[Attempt, asyncio.Task[None]] = {}
        self.reports: dict[str, list[Report]] = {}
        self.attributes: list[Any] = []
        """Attributes of each request that was submitted or prefilled."""
        self.routers: set[str] = set()
        self._filled = asyncio.Event()

    def forget_routers(self) -> None:
        """Cancels all attempts, as a worker does after a router's stall."""
        self.routers.clear()
        self.reports.clear()
        for task in self.running.values():
            task.cancel()
        self._filled.set()

    def kill(self) -> None:
        self.is_dead = True
        self._filled.set()
        for task in self.running.values():
            task.cancel()

    async def _alive(self) -> None:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.is_dead:
            raise ConnectionError("its process has ended")

    async def describe(self) -> dict[str, Any]:
        await self._alive()
        fields: dict[str, Any] = {"identity": IDENTITY, "page_size": 4}
        fields |= {"max_length": 64, "seed": 0}
        fields |= {"name": self.name, "spec": self.spec, "pid": 1}
        return fields | {"failure": self.failure} | self.described

    async def poll(self, router: str) -> list[Report] | None:
        await self._alive()
        if router not in self.routers:
            self.routers.add(router)
            return None
        if not self.reports.get(router):
            self._filled.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._filled.wait(), POLL_S)
        if not (reports := self.reports.pop(router, [])):
            await self._alive()
        return reports

    def post(self, report: Report) -> None:
        self.reports.setdefault(report.attempt.router, []).append(report)
        self._filled.set()

    async def submit(
        self,
        attempt: Attempt,
        prompt: list[int],
        sampling: Sampling,
        key_id: int,
        attributes: Any = None,
    ) -> None:
        self.attributes.append(attributes)
        await self._alive()
        if attempt.router not in self.routers:
            raise ConnectionError("the router is unknown")
        if len(prompt) > 60:
            refusal = ValueError(f"len(prompt)={len(prompt)}")
            self.post(Report(attempt, refusal=refusal))
            return
        work = self._answer(attempt, prompt, sampling, key_id)
        self.running[attempt] = task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self.running.pop(attempt, None))

    async def _answer(
        self, attempt: Attempt, prompt: list[int], ask: Sampling, key_id: int
    ) -> None:
        samples = [tokens_of(prompt, ask, key_id, i) for i in range(ask.n)]
        samples = [
            [token + self.token_offset for token in answer_tokens]
            for answer_tokens in samples
        ]
        for place in range(ask.max_tokens):
            await asyncio.sleep(self.pace_s)
            if self.dies_after is not None and place == self.dies_after:
                return self.kill()
            for sample, tokens in enumerate(samples):
                token = tokens[place]
                new = Event(7, [token], f"<{token}>", None, sample)
                self.post(Report(attempt, event=new))
        answers = [
            FinishedAnswer(tokens, "", "length", sample, None, None, None)
            for sample, tokens in enumerate(samples)
        ]
        blank: dict[str, Any] = dict.fromkeys(Completion._fields, 0)
        done = Completion(**blank)._replace(answers=answers)
        self.post(Report(attempt, event=Event(7, [], "", done)))
        return None

    async def prefill(
        self, attempt: Attempt, tokens: list[int], salt: int, attributes: Any = None
    ) -> tuple[PrefillResult, Any]:
        self.attributes.append(attributes)
        await self._alive()
        await asyncio.sleep(self.pace_s)
        await self._alive()
        self.num_read += 1
        return PrefillResult(100, 0.0, 0.0), len(tokens)

    async def bring(self, pages: Any) -> int:
        await self._alive()
        if not self.brings:
            raise ConnectionError("the pages are gone")
        self.num_brought += 1
        return (pages - 1) // 4

    def cancel(self, attempt: Attempt) -> None:
        self.cancelled.append(attempt)
        if (task := self.running.get(attempt)) is not None:
            task.cancel()

    async def release(self, router: str) -> bool:
        await self._alive()
        self.released.append(router)
        return True


class ScriptedLauncher:
    """Implements `Launcher`; `prepare` changes each worker as it is made."""

    def __init__(self, prepare: Callable[[ScriptedWorker], None] = lambda _: None):
        self.workers: dict[str, ScriptedWorker] = {}
        self.killed: list[str] = []
        self.prepare = prepare

    def start(self, name: str, spec: WorkerSpec) -> ScriptedWorker:
        if name not in self.workers:
            self.workers[name] = ScriptedWorker(name, spec)
            self.prepare(self.workers[name])
        return self.workers[name]

    def find(self) -> Mapping[str, ScriptedWorker]:
        return {name: x for name, x in self.workers.items() if name not in self.killed}

    def kill(self, name: str, handle: Any) -> None:
        self.killed.append(name)
        handle.kill()

    def role(self, role: str) -> list[ScriptedWorker]:
        return [x for x in self.workers.values() if x.spec.role == role]
