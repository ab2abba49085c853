"""The workers of a router: start, health, loss, replacement and removal.

The pool calls workers through `WorkerHandle`; `cluster` implements it with Ray actors.
"""

import asyncio
import collections
import contextlib
import logging
import secrets
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from jaxkv.disaggregation import identity
from jaxkv.disaggregation.config import RouterConfig
from jaxkv.disaggregation.worker import Attempt, PrefillResult, Report, WorkerSpec
from jaxkv.sampling import Sampling
from jaxkv.scheduling import RequestAttributes

logger = logging.getLogger(__name__)

MAX_KNOWN_PAGES = 1 << 16
"""Pages of a worker that the router remembers."""
SLICE_S = 0.5
"""Seconds of a wait for an answer that are counted at once."""
RELEASE_S = 5.0
"""Seconds within which a worker must release a router."""


class WorkerLostError(ConnectionError):
    """No worker can serve a request, or all attempts have failed."""


@runtime_checkable
class WorkerHandle(Protocol):
    """Calls to one worker, see `worker.Worker`.

    Each raises ConnectionError once the worker is lost.
    """

    async def describe(self) -> dict[str, Any]: ...  # noqa: D102
    async def poll(self, router: str) -> list[Report] | None: ...  # noqa: D102
    async def submit(  # noqa: D102
        self,
        attempt: Attempt,
        prompt: list[int],
        sampling: Sampling,
        key_id: int,
        attributes: RequestAttributes | None = None,
    ) -> None: ...
    async def prefill(
        self,
        attempt: Attempt,
        tokens: list[int],
        salt: int,
        attributes: RequestAttributes | None = None,
    ) -> tuple[PrefillResult, Any]:
        """Returns the result and a reference to the pages."""
        ...

    async def bring(self, pages: Any) -> int:
        """Takes the reference that another handle's `prefill` returned."""
        ...

    def cancel(self, attempt: Attempt) -> None: ...  # noqa: D102
    async def release(self, router: str) -> bool: ...  # noqa: D102


@runtime_checkable
class Launcher(Protocol):
    """Starts, finds and kills workers."""

    def start(self, name: str, spec: WorkerSpec) -> WorkerHandle:
        """Starts a worker, or returns the running one of this name."""
        ...

    def find(self) -> Mapping[str, WorkerHandle]:
        """Returns all workers of the service, by name."""
        ...

    def kill(self, name: str, handle: WorkerHandle) -> None:
        """Ends a worker immediately."""
        ...


class WorkerRecord:
    """State of a worker in the pool."""

    def __init__(self, name: str, handle: WorkerHandle, spec: WorkerSpec | None):
        self.name = name
        self.handle = handle
        self.spec = spec
        """None until a worker of another router has described itself."""
        self.is_replaced = False
        """True while a replacement is being started."""
        self.state = "starting"
        """"starting", "serving", "draining" or "lost"."""
        self.role = spec.role if spec is not None else "decode"
        self.load = 0
        self.described: dict[str, Any] = {}
        self.attempts: set[Attempt] = set()
        """Attempts in progress on the worker."""
        self.lost = asyncio.Event()
        self.reason = ""
        """Reason of its loss."""
        self.task: asyncio.Task[None] | None = None
        self._known: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    @contextlib.contextmanager
    def track_load(self, attempt: Attempt, load: int) -> Generator[None]:
        """Counts an attempt and its tokens as load of this worker."""
        self.load += load
        self.attempts.add(attempt)
        try:
            yield
        finally:
            self.load -= load
            self.attempts.discard(attempt)

    def num_cached_pages(self, keys: Sequence[bytes]) -> int:
        """Returns the number of leading pages of a prompt that the worker has had."""
        missing_indices = (i for i, key in enumerate(keys) if key not in self._known)
        return next(missing_indices, len(keys))

    def note_pages(self, keys: Sequence[bytes]) -> None:
        """Notes that the worker has these pages."""
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN_PAGES:
            self._known.popitem(last=False)

    async def unless_lost[T](self, call: Coroutine[object, object, T]) -> T:
        """Awaits a call of this worker, or its loss.

        Raises:
          WorkerLostError: the worker is lost.
        """
        if self.state == "lost":
            call.close()
            raise WorkerLostError(f"worker {self.name}: {self.reason}")
        task = asyncio.create_task(call)
        lost = asyncio.create_task(self.lost.wait())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ConnectionError(self.reason)
        except ConnectionError as error:
            raise WorkerLostError(f"worker {self.name}: {error}") from error
        finally:
            task.cancel()
            lost.cancel()


class WorkerPool:
    """All workers of one router, by name, and the tasks that watch them.

    Args:
      router: name of the router.
      launcher: starts and finds workers.
      config: timeouts and bounds.
      deliver: receives each report of a worker, and a failure for each attempt of a
        lost worker.
      identity_fields: fields of the identity that the router itself requires.
    """

    def __init__(
        self,
        router: str,
        launcher: Launcher,
        config: RouterConfig,
        deliver: Callable[[Report], None],
        identity_fields: Mapping[str, str] = MappingProxyType({}),
    ):
        self.by_name: dict[str, WorkerRecord] = {}
        self.bounds: dict[str, int] = {}
        """`max_length`, `seed` and `page_size` of all workers."""
        self._router = router
        self._launcher = launcher
        self._config = config
        self._deliver = deliver
        self._identity: dict[str, str] | None = None
        self._identity_fields = identity_fields
        self._removed: set[str] = set()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()

    async def start(self, specs: Sequence[WorkerSpec]) -> None:
        """See `Router.start`."""
        self._attach_existing()
        names = [self.add(spec) for spec in specs]
        for name in [*self.by_name]:
            try:
                await self.wait_for(name)
            except ValueError:
                if name in names:
                    raise
        if not self.serving("decode"):
            raise ValueError("1 or more decode workers are needed")

        async def discover() -> None:
            while True:
                await asyncio.sleep(self._config.discover_s)
                try:
                    self._attach_existing()
                except Exception as error:
                    logger.warning("workers cannot be listed: %s", error)

        self._background(discover())

    def serving(self, role: str | None = None) -> list[WorkerRecord]:
        """Returns the workers of a role, or of both, that accept requests."""
        workers = [m for m in self.by_name.values() if m.state == "serving"]
        return [m for m in workers if role is None or m.role == role]

    def get(self, name: str) -> WorkerRecord:
        """Returns a worker.

        Raises:
          ValueError: no worker has the name.
        """
        if name not in self.by_name:
            raise ValueError(f"{name=} must be one of {sorted(self.by_name)}")
        return self.by_name[name]

    def add(self, spec: WorkerSpec) -> str:
        """Starts a worker; returns its name."""
        name = f"{spec.role}-{secrets.token_hex(4)}.1"
        self._attach(name, self._launcher.start(name, spec), spec)
        return name

    async def wait_for(self, name: str) -> None:
        """Waits until a worker serves.

        Raises:
          ValueError: the worker cannot start; the message has the reason.
        """
        worker = self.get(name)
        while worker.state == "starting":
            await self.next_change()
        if worker.state == "lost":
            raise ValueError(f"worker {name} did not start: {worker.reason}")

    async def wait_for_serving(self, role: str) -> list[WorkerRecord]:
        """Returns the workers of a role that serve; waits while the first one starts.

        Raises:
          WorkerLostError: no worker of the role serves or starts.
        """
        while not (workers := self.serving(role)):
            of_role = [m for m in self.by_name.values() if m.role == role]
            if not any(m.state == "starting" or m.is_replaced for m in of_role):
                raise WorkerLostError(f"no {role} worker is left")
            await self.next_change()
        return workers

    async def remove(self, name: str) -> None:
        """Drains a worker (no further requests, last ones complete) and releases it."""
        worker = self.get(name)
        self._removed.add(name)
        if worker.state == "serving":
            worker.state = "draining"
        while worker.attempts and worker.state != "lost":
            await self.next_change()
        await self._release(worker)

    def mark_lost(self, worker: WorkerRecord, reason: str) -> None:
        """Marks a worker as lost, fails its attempts, and starts a replacement."""
        if worker.state == "lost":
            return
        worker.is_replaced = worker.state == "serving"
        worker.state = "lost"
        worker.reason = reason
        worker.lost.set()
        logger.warning("worker %s is lost: %s", worker.name, reason)
        with contextlib.suppress(Exception):
            self._launcher.kill(worker.name, worker.handle)
        for attempt in worker.attempts:
            self._deliver(Report(attempt, failure=reason))
        if worker.is_replaced:
            self._removed.add(worker.name)
            self._background(self._replace(worker))
        self.note_change()

    async def close(self) -> None:
        """Releases all workers; those without another router end."""
        for task in [*self._tasks]:
            task.cancel()
        workers = list(self.by_name.values())
        await asyncio.gather(*map(self._release, workers), return_exceptions=True)

    def note_change(self) -> None:
        """Wakes all tasks that wait for `next_change`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def next_change(self) -> None:
        """Waits until a worker's state or load changes."""
        await self._changed.wait()

    def _attach(self, name: str, handle: WorkerHandle, spec: WorkerSpec | None) -> None:
        self.by_name[name] = worker = WorkerRecord(name, handle, spec)
        worker.task = self._background(self._watch(worker))

    def _attach_existing(self) -> None:
        """Attaches to workers that other routers started."""
        for name, handle in self._launcher.find().items():
            if name not in self.by_name and name not in self._removed:
                self._attach(name, handle, None)

    async def _watch(self, worker: WorkerRecord) -> None:
        """Waits until a worker is ready, then collects its reports until it is lost."""
        config = self._config
        try:
            described = await asyncio.wait_for(
                worker.handle.describe(), config.start_timeout_s
            )
            await self._poll(worker)  # adds this router
            self._mark_serving(worker, described)
            while True:
                if (reports := await self._poll(worker)) is None:
                    self._fail_attempts(worker, "it had cancelled the attempt")
                    continue
                for report in reports:
                    if report.failure is not None:
                        raise ConnectionError(report.failure)
                    self._deliver(report)
        except TimeoutError:
            self.mark_lost(worker, "it has stopped answering")
        except Exception as error:
            self.mark_lost(worker, str(error))

    async def _poll(self, worker: WorkerRecord) -> list[Report] | None:
        """Polls a worker once.

        Raises:
          TimeoutError: there is no answer within `heartbeat_s`.
        """
        poll = asyncio.create_task(worker.handle.poll(self._router))
        left_s = self._config.heartbeat_s
        try:
            while not poll.done():
                if left_s <= 0:
                    raise TimeoutError
                # A stall of this process, however long, counts as one slice, since the
                # answer may have arrived meanwhile.
                await asyncio.wait([poll], timeout=min(SLICE_S, left_s))
                left_s -= SLICE_S
            return poll.result()
        finally:
            poll.cancel()

    def _fail_attempts(self, worker: WorkerRecord, reason: str) -> None:
        """Ends all attempts on a worker; their requests are repeated."""
        for attempt in worker.attempts:
            worker.handle.cancel(attempt)
            self._deliver(Report(attempt, failure=reason))

    def _mark_serving(self, worker: WorkerRecord, described: dict[str, Any]) -> None:
        """Marks a worker that is ready as serving.

        Raises:
          ValueError: the worker could not load its model, or serves another model.
        """
        if described["failure"] is not None:
            raise ValueError(described["failure"])
        bounds = {key: described[key] for key in ("max_length", "seed", "page_size")}
        required = described["identity"] if self._identity is None else self._identity
        differs = identity.describe_difference(
            described["identity"], {**required, **self._identity_fields}
        )
        for key, value in bounds.items():
            if value != self.bounds.get(key, value):
                differs = differs or f"{key}={value} must be {self.bounds[key]}"
        if differs is not None:
            raise ValueError(f"workers must serve one model: {differs}")
        self._identity = required
        self.bounds = bounds
        worker.described = described
        worker.spec = described["spec"]
        worker.role = described["spec"].role
        worker.state = "serving"
        self.note_change()

    async def _replace(self, worker: WorkerRecord) -> None:
        """Starts replacements of a lost worker until one serves."""
        assert worker.spec is not None
        base, _, generation = worker.name.rpartition(".")
        for more in range(self._config.max_restarts + 1):
            if more > 0:
                await asyncio.sleep(min(2.0 ** (more - 1), 30))
            # Routers that share a worker choose the same name, so one is started.
            name = f"{base}.{int(generation) + 1 + more}"
            try:
                if name not in self.by_name:
                    handle = self._launcher.start(name, worker.spec)
                    self._attach(name, handle, worker.spec)
                await self.wait_for(name)
                break
            except Exception as error:
                logger.warning("worker %s cannot be replaced: %s", worker.name, error)
                self.by_name.pop(name, None)
        self.by_name.pop(worker.name, None)
        self.note_change()

    async def _release(self, worker: WorkerRecord) -> None:
        """Releases a worker; it ends if no other router uses it."""
        if worker.task is not None:
            worker.task.cancel()
        before = worker.state
        worker.state = "lost"
        worker.lost.set()
        # A worker that starts answers no call; the router that started it ends it.
        is_last = before == "starting" and worker.spec is not None
        if before in ("serving", "draining"):
            is_last = True
            with contextlib.suppress(ConnectionError, TimeoutError):
                released = worker.handle.release(self._router)
                is_last = await asyncio.wait_for(released, RELEASE_S)
        if is_last:
            with contextlib.suppress(Exception):
                self._launcher.kill(worker.name, worker.handle)
        self.by_name.pop(worker.name, None)
        self.note_change()

    def _background(self, work: Coroutine[object, object, None]) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
