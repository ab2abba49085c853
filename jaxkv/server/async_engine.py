"""An engine for asyncio code: one thread runs it, and any event loop may use it."""

import asyncio
import collections
import concurrent.futures
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from jaxkv import validation
from jaxkv.sampling import Sampling
from jaxkv.scheduling import RequestAttributes, StallError
from jaxkv.server.incident_recorder import IncidentRecorder
from jaxkv.serving import Engine, Event

SWITCH_S = 1e-4
"""Value in s for `sys.setswitchinterval` in a process that serves. A step may take less
than Python's default interval of 5 ms, for which the event loop would wait."""


class _Listener(NamedTuple):
    """Receiver of the events of one request."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event | StallError | None]
    """Events; None once the engine has failed or is closed."""


class AsyncEngine:
    """Serves one engine to asyncio code on any event loop. Implements `Backend`.

    Owns the only thread that runs the engine; no other code may call the engine's
    `stream` or `generate`.

    Args:
      engine: the engine.
      model_name: name of the model for HTTP clients.
      recorder: records the engine, and is closed with it; None for no incidents.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model_name: str = "model",
        recorder: IncidentRecorder | None = None,
    ):
        self.engine = engine
        self._recorder = recorder
        self.model_name = model_name
        self._names = itertools.count()
        self._listeners: dict[int, _Listener] = {}
        self._failure: str | None = None
        self._is_closed = False
        self._has_work = threading.Event()
        # One thread: requests arrive in the order of the calls, and a cancellation
        # always comes after the submission that it cancels. Both may wait for the
        # engine's lock, which an event loop must not.
        self._calls = concurrent.futures.ThreadPoolExecutor(1, "jaxkv-submit")
        self._thread = threading.Thread(target=self._run, name="jaxkv-engine")
        self._thread.daemon = True
        self._thread.start()

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the engine's adapters."""
        return self.engine.adapters

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer; None without text."""
        return self.engine.tokenizer

    @property
    def max_length(self) -> int:
        """Largest number of tokens of prompt and answer."""
        return self.engine.config.max_length

    @property
    def num_running(self) -> int:
        """Requests that are not complete."""
        return len(self._listeners)

    def status(self) -> dict[str, object]:
        """Returns counts for monitoring, see `Backend.status`."""
        return {"is_ready": self._end_reason() is None, "running": self.num_running}

    async def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        key_id: int | None = None,
        attributes: RequestAttributes | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Event]:
        """Answers a prompt, see `Backend.stream`."""
        loop = asyncio.get_running_loop()
        due = None
        if deadline_s is not None:
            due = loop.time() + validation.seconds("deadline_s", deadline_s)
        name = next(self._names) % validation.INT32
        is_complete = False
        if key_id is None:
            key_id = name
        listener = _Listener(loop, asyncio.Queue())
        # Registered before the check for a failure, so that a failure between the two
        # is delivered.
        self._listeners[name] = listener

        def submit() -> None:
            self.engine.submit(
                prompt,
                sampling,
                request_id=name,
                attributes=attributes,
                key_id=key_id,
            )
            self._has_work.set()

        def cancel() -> None:
            self.engine.cancel(name)
            self._has_work.set()

        try:
            self._raise_if_ended()
            submitted = loop.run_in_executor(self._calls, submit)
            await _await_until(submitted, due, deadline_s)
            while not is_complete:
                event = await _await_until(listener.events.get(), due, deadline_s)
                if event is None:
                    self._raise_if_ended()
                    continue
                if isinstance(event, StallError):
                    raise event
                is_complete = event.completion is not None
                yield event
        finally:
            self._listeners.pop(name, None)
            if not is_complete and self._end_reason() is None:
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._calls.submit(cancel)

    async def run[T](self, function: Callable[..., T], *args: object) -> T:
        """Calls a function of the engine that may take long, in a thread.

        Raises:
          RuntimeError: the engine has failed or is closed.
        """
        self._raise_if_ended()
        return await asyncio.to_thread(function, *args)

    def close(self) -> None:
        """Ends the engine's thread. Streams that still run raise a RuntimeError."""
        if self._is_closed:
            return
        self._is_closed = True
        self._has_work.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if self._recorder is not None:
            self._recorder.close()
        self._calls.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "AsyncEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_reason(self) -> str | None:
        """Returns the reason why the engine does not answer any more, or None."""
        closed = "the engine is closed" if self._is_closed else None
        return self._failure or closed

    def _raise_if_ended(self) -> None:
        if (reason := self._end_reason()) is not None:
            raise RuntimeError(reason)

    def _run(self) -> None:
        """Runs the engine while it has work."""
        engine = self.engine
        try:
            while not self._is_closed:
                self._has_work.wait()
                self._has_work.clear()
                # For requests of all kinds, so that no later one waits for it.
                engine.compile()
                while engine.has_pending() and not self._is_closed:
                    try:
                        engine.step()
                    except StallError as error:
                        self._end_stalled(error)
                    if self._recorder is not None:
                        self._recorder.observe(tuple(engine.tracker.events))
                    self._deliver(engine.tracker.events)
        except Exception as error:
            line = str(error).partition("\n")[0]
            self._failure = f"the engine has failed; {type(error).__name__}: {line}"
        for loop, events in list(self._listeners.values()):
            _schedule(loop, events.put_nowait, None)

    def _end_stalled(self, error: StallError) -> None:
        """Ends the request that the error names; the engine continues without it."""
        name = error.request_id
        assert name is not None
        self._deliver(self.engine.tracker.events)
        if (listener := self._listeners.pop(name, None)) is not None:
            _schedule(listener.loop, listener.events.put_nowait, error)
        self.engine.cancel(name)

    def _deliver(self, events: collections.deque[Event]) -> None:
        """Passes the events of one engine call to each event loop in one call."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue, Event]]] = {}
        while events:
            event = events.popleft()
            if (listener := self._listeners.get(event.request_id)) is not None:
                by_loop.setdefault(listener.loop, []).append((listener.events, event))

        def put_all(pairs: list[tuple[asyncio.Queue, Event]]) -> None:
            for queue, event in pairs:
                queue.put_nowait(event)

        for loop, pairs in by_loop.items():
            if not _schedule(loop, put_all, pairs):
                for name in {event.request_id for _, event in pairs}:
                    self._listeners.pop(name, None)
                    self.engine.cancel(name)


def _schedule(
    loop: asyncio.AbstractEventLoop, function: Callable, *args: object
) -> bool:
    """Schedules a call in an event loop; returns False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True


async def _await_until[T](
    work: Awaitable[T], due: float | None, deadline_s: float | None
) -> T:
    """Awaits work until a time of the loop's clock; the error names the limit."""
    try:
        async with asyncio.timeout_at(due):
            return await work
    except TimeoutError:
        raise TimeoutError(
            f"{deadline_s=} passed before the request was complete"
        ) from None
