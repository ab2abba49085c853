"""A worker: one engine that reads prompts, answers them, and exchanges pages.

Plain asyncio code without Ray; `cluster` wraps it in an actor. Several routers may
share a worker. A router numbers its requests and attempts, and collects the reports of
all of them with one call of `poll`.
"""

import asyncio
import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkv import validation
from jaxkv.disaggregation import identity, page_messages
from jaxkv.disaggregation.page_messages import PageMessage
from jaxkv.parallel import make_mesh, set_cpu_devices
from jaxkv.sampling import Sampling
from jaxkv.scheduling import RequestAttributes, StallError
from jaxkv.server import SWITCH_S, AsyncEngine
from jaxkv.serving import Engine, Event, compile_once

POLL_S = 1.0
"""Seconds after which `poll` returns without reports."""
ROUTER_TIMEOUT_S = 15.0
"""Seconds without a poll after which a router's requests are cancelled. A router that
polls again later learns of it and repeats them, so no other timeout depends on it."""
ORPHAN_S = 60.0
"""Seconds without any router after which a worker ends itself."""


WORKER_ROLES = ("prefill", "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Specification of a worker."""

    role: str
    """Phase that the router uses it for, one of `WORKER_ROLES`; every worker can do
    both."""
    folder: str
    """Hugging Face folder of the model, readable on the worker's machine."""
    engine: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Arguments of `Engine.load`; `prefix_cache` is set."""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Arguments of `parallel.make_mesh`; empty for one device."""
    cores: tuple[int, ...] | None = None
    """CPU cores that the process is bound to; None for all."""
    num_gpus: float = 0.0
    """GPUs that Ray reserves for it."""
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Further Ray resources that it needs, such as a node's name."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: the role is unknown, or a number is out of its range.
        """
        validation.choice("role", self.role, WORKER_ROLES)
        for name, value in self.mesh.items():
            validation.integer(f"mesh[{name!r}]", value, low=1)


class Attempt(NamedTuple):
    """Identifier of one attempt at a request."""

    router: str
    request: int
    """Number of the request, of this router."""
    number: int
    """1 for the first attempt."""


class Report(NamedTuple):
    """An event, refusal or failure of an attempt; exactly one of the three is set."""

    attempt: Attempt
    event: Event | None = None
    refusal: ValueError | StallError | None = None
    """The error of a request that no attempt can serve."""
    failure: str | None = None
    """Reason why the engine failed; the worker cannot be used any more."""


class PrefillResult(NamedTuple):
    """Times and size of a prefill."""

    num_bytes: int
    """Bytes of the message with its full pages."""
    prefill_s: float
    """Seconds to read the prompt, including queueing."""
    copy_s: float
    """Seconds to copy its pages out of the pool."""


class _Mailbox:
    """Reports that a router has not collected yet."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.is_filled = asyncio.Event()
        self.last_poll_s = time.monotonic()
        self.tasks: dict[Attempt, asyncio.Task] = {}


class Worker:
    """Serves an engine to routers.

    The constructor never raises, since Ray reports errors of constructors badly;
    `describe` returns the failure.
    """

    def __init__(self, name: str, spec: WorkerSpec):
        self.name = name
        self.spec = spec
        self._failure: str | None = None
        self._mailboxes: dict[str, _Mailbox] = {}
        self._watch_task: asyncio.Task[None] | None = None
        try:
            self._start()
        except Exception as error:
            line = " ".join(str(error).split())
            self._failure = f"{type(error).__name__}: {line}"

    def _start(self) -> None:
        spec = self.spec
        if spec.cores is not None:
            # All threads of this process; later ones inherit it.
            for thread in Path("/proc/self/task").glob("*"):
                with contextlib.suppress(OSError):  # the thread has just ended
                    os.sched_setaffinity(int(thread.name), spec.cores)
        # A step may take less than Python's default interval, see `SWITCH_S`.
        sys.setswitchinterval(SWITCH_S)
        fields: dict[str, Any] = {**spec.engine, "prefix_cache": True}
        mesh = None
        if spec.mesh:
            set_cpu_devices(math.prod(spec.mesh.values()))
            mesh = make_mesh(**spec.mesh)
        engine = Engine.load(Path(spec.folder), mesh=mesh, **fields)
        self._pages = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), engine.state.pages
        )
        self.identity = identity.engine_identity(engine)
        # All programs are compiled before the first request, whatever its kind.
        ask = Sampling.greedy(max_tokens=1, ignore_eos=True, prefix_cache=False)
        programs = [*engine.static.values(), engine.rules, spec.mesh]
        with compile_once(f"{programs} {self.identity['software']}"):
            engine.compile()
            engine.generate([[0]], ask)
            pages, _ = engine.take_prefix([0])
            engine.bring_prefix([0], pages)
        self._engine = AsyncEngine(engine)

    async def describe(self) -> dict[str, Any]:
        """Returns name, bounds, identity, and the failure if there is one."""
        if self._watch_task is None:
            self._watch_task = asyncio.create_task(self._watch_routers())
        description: dict[str, Any] = {"name": self.name, "spec": self.spec}
        description |= {"pid": os.getpid()}
        if self._failure is not None:
            return description | {"failure": self._failure}
        config = self._engine.engine.config
        return description | {
            "failure": None,
            "identity": self.identity,
            "page_size": config.page_size,
            "max_length": config.max_length,
            "max_slots": config.max_slots,
            "seed": config.seed,
        }

    async def poll(self, router: str) -> list[Report] | None:
        """Returns all reports for a router, once there is one or after `POLL_S`.

        Regular polls also keep the router's requests, and the worker, alive. None is
        returned at once if the router is unknown: it has just been added, and all
        attempts that it may have started earlier have ended without a report.
        """
        if (box := self._mailboxes.get(router)) is None:
            self._mailboxes[router] = _Mailbox()
            return None
        if not box.reports:
            box.is_filled.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(box.is_filled.wait(), POLL_S)
        box.last_poll_s = time.monotonic()
        reports = box.reports
        box.reports = []
        return reports

    async def submit(
        self,
        attempt: Attempt,
        prompt: list[int] | str,
        sampling: Sampling,
        key_id: int,
        attributes: RequestAttributes | None = None,
    ) -> None:
        """Starts to answer a prompt; reports are returned by `poll`.

        Raises:
          ConnectionError: the router is unknown, see `poll`.
        """

        async def answer() -> None:
            try:
                stream = self._engine.stream(
                    prompt, sampling, key_id=key_id, attributes=attributes
                )
                async with contextlib.aclosing(stream):
                    async for event in stream:
                        self._post(Report(attempt, event=event))
            except (ValueError, StallError) as error:
                self._post(Report(attempt, refusal=type(error)(str(error))))
            except Exception as error:
                self._post(Report(attempt, failure=str(error)))

        self._start_task(attempt, answer())

    async def prefill(
        self,
        attempt: Attempt,
        tokens: list[int],
        salt: int,
        attributes: RequestAttributes | None = None,
    ) -> tuple[PrefillResult, str, np.ndarray]:
        """Reads a prompt and returns its full pages, as fields of a `PageMessage`.

        Raises:
          ValueError: the prompt cannot be served.
          ConnectionError: the router is unknown, see `poll`.
          StallError: the policy never reads the prompt.
          RuntimeError: the engine has failed, or the attempt was cancelled.
        """

        async def read_prompt() -> tuple[PrefillResult, str, np.ndarray]:
            started = time.perf_counter()
            ask = Sampling.greedy(max_tokens=1, ignore_eos=True, salt=salt)
            stream = self._engine.stream(tokens, ask, attributes=attributes)
            async with contextlib.aclosing(stream):
                async for _ in stream:
                    pass
            read = time.perf_counter()
            take = self._engine.engine.take_prefix
            pages, _ = await self._engine.run(lambda: take(tokens, salt=salt))
            header, payload = page_messages.pack(pages, tokens, salt, self.identity)
            num_bytes = len(header) + payload.nbytes
            copied = time.perf_counter()
            return (
                PrefillResult(num_bytes, read - started, copied - read),
                header,
                payload,
            )

        task = self._start_task(attempt, read_prompt())
        try:
            return await task
        except asyncio.CancelledError:
            raise RuntimeError("the attempt was cancelled") from None
        except (ValueError, StallError):
            raise
        except Exception as error:
            # Without a report, the router would keep using a broken worker.
            self._post(Report(attempt, failure=str(error)))
            raise

    async def bring(self, header: str, payload: np.ndarray) -> int:
        """Writes another worker's pages to the prefix cache; returns the number cached.

        Args:
          header: as the other worker's `prefill` returned it.
          payload: as the other worker's `prefill` returned it.

        Raises:
          ValueError: the message is damaged, or of another model or layout.
          RuntimeError: the engine has failed.
        """
        message = PageMessage(header, payload)
        prefix = page_messages.unpack(message, self._pages, self.identity)
        put = self._engine.engine.bring_prefix
        return await self._engine.run(
            lambda: put(prefix.tokens, prefix.pages, salt=prefix.salt)
        )

    async def cancel(self, attempt: Attempt) -> None:
        """Ends an attempt; unknown ones are ignored."""
        if (box := self._mailboxes.get(attempt.router)) is not None:
            if (task := box.tasks.get(attempt)) is not None:
                task.cancel()

    async def release(self, router: str) -> bool:
        """Forgets a router and its requests; returns True if no router is left."""
        if (box := self._mailboxes.pop(router, None)) is not None:
            for task in box.tasks.values():
                task.cancel()
        return not self._mailboxes

    async def status(self) -> dict[str, Any]:
        """Returns counts for monitoring."""
        running = 0 if self._failure else self._engine.num_running
        return {"running": running, "routers": len(self._mailboxes)}

    def close(self) -> None:
        """Ends the engine's thread and the watch over routers."""
        if self._watch_task is not None:
            self._watch_task.cancel()
        if self._failure is None:
            self._engine.close()

    def _start_task(
        self, attempt: Attempt, work: Coroutine[object, object, object]
    ) -> asyncio.Task:
        if (box := self._mailboxes.get(attempt.router)) is None:
            work.close()
            raise ConnectionError(f"router {attempt.router} is unknown")
        tasks = box.tasks
        tasks[attempt] = task = asyncio.create_task(work)
        task.add_done_callback(lambda _: tasks.pop(attempt, None))
        return task

    def _post(self, report: Report) -> None:
        if (box := self._mailboxes.get(report.attempt.router)) is not None:
            box.reports.append(report)
            box.is_filled.set()

    async def _watch_routers(self) -> None:
        """Forgets routers that stopped polling; ends the process if none is left."""
        since = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            for router, box in list(self._mailboxes.items()):
                if now - box.last_poll_s > ROUTER_TIMEOUT_S:
                    await self.release(router)
            if self._mailboxes:
                since = now
            elif now - since > ORPHAN_S:
                os._exit(0)
