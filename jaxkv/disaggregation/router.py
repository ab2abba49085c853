"""The router: chooses workers for a request, and repeats it when one is lost.

A prompt is read by a prefill worker, its pages go to the prefix cache of a decode
worker, and that one answers. Draws are keyed by request and position, so a repeated
request has the same tokens. The router knows workers by `WorkerHandle` alone; `cluster`
implements it with Ray actors.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxkv import validation
from jaxkv.disaggregation import choice, identity
from jaxkv.disaggregation.choice import Candidate, Choose
from jaxkv.disaggregation.worker import Attempt, Prefilled, Report, WorkerSpec
from jaxkv.sampling import Sampling
from jaxkv.server.backend import OverloadedError
from jaxkv.serving import Completion, Event

logger = logging.getLogger(__name__)

MAX_KNOWN_PAGES = 1 << 16
"""Pages of a worker that the router remembers."""


class WorkerLostError(ConnectionError):
    """No worker is left that could serve a request, or too many attempts failed."""


class RequestCancelledError(RuntimeError):
    """The request was cancelled by its name."""


class ReplayError(RuntimeError):
    """A repeated attempt gave other tokens than those that were already streamed.

    Possible under `numerics="fast"` alone, where a near tie of two logits may be
    decided differently in another batch.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Times and bounds of a router."""

    heartbeat_s: float = 10.0
    """Seconds without an answer to a poll after which a worker counts as lost, above
    the second that a poll takes."""
    start_timeout_s: float = 300.0
    """Seconds that a worker may take to load its model."""
    max_attempts: int = 5
    """Attempts at a request before it fails, at least 1."""
    backoff_s: float = 0.05
    """Seconds before the second attempt; doubled before each further one."""
    max_restarts: int = 3
    """Failed starts in a row after which a worker is given up, at least 0."""
    max_requests: int = 4096
    """Requests that are not complete, at most."""
    deadline_s: float | None = None
    """Deadline of requests that bring none, in seconds; None for no deadline."""
    discover_s: float = 2.0
    """Seconds between looks for workers that other routers started."""

    def __post_init__(self) -> None:
        """Validates the fields.

        Raises:
          ValueError: a field is out of its range.
        """
        validation.above(self, "start_timeout_s", "backoff_s", "discover_s")
        validation.within(self, "heartbeat_s", low=2, high=3600)
        validation.at_least(self, "max_attempts", "max_requests")
        validation.at_least(self, "max_restarts", low=0)


@runtime_checkable
class WorkerHandle(Protocol):
    """Calls to one worker, see `worker.Worker`.

    Each raises ConnectionError once the worker is gone.
    """

    async def describe(self) -> dict[str, Any]: ...  # noqa: D102
    async def poll(self, router: str) -> list[Report]: ...  # noqa: D102
    async def submit(  # noqa: D102
        self, attempt: Attempt, prompt: list[int], sampling: Sampling, key_id: int
    ) -> None: ...
    async def prefill(
        self, attempt: Attempt, tokens: list[int], salt: int
    ) -> tuple[Prefilled, Any]:
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
        """Starts a worker, or returns the one of this name that already runs."""
        ...

    def find(self) -> Mapping[str, WorkerHandle]:
        """Returns all workers of the service, by name."""
        ...

    def kill(self, name: str, handle: WorkerHandle) -> None:
        """Ends a worker at once."""
        ...


class Transfer(NamedTuple):
    """How the pages of a prompt came to the worker that answered."""

    num_bytes: int = 0
    """Bytes of the pages; 0 if none were sent."""
    prefill_s: float = 0.0
    """Seconds in which the prompt was read, queueing included."""
    transfer_s: float = 0.0
    """Seconds in which its pages were copied out, sent and written."""


class RoutedAnswer(NamedTuple):
    """A completed request."""

    completion: Completion
    """Its answers; times are in seconds since the router was made."""
    num_attempts: int
    """1 if no attempt failed."""
    transfer: Transfer
    """Of the last attempt."""


class Member:
    """A worker as the router keeps it."""

    def __init__(self, name: str, handle: WorkerHandle, spec: WorkerSpec | None):
        self.name, self.handle = name, handle
        self.spec = spec
        """None until a worker that another router started has described itself."""
        self.is_replaced = False
        """True while a new worker is started in its place."""
        self.state = "starting"
        """"starting", "serving", "draining" or "lost"."""
        self.role = spec.role if spec is not None else "decode"
        self.load = 0
        self.described: dict[str, Any] = {}
        self.requests: set[_Request] = set()
        self.lost = asyncio.Event()
        self.reason = ""
        """Why it is lost."""
        self.task: asyncio.Task[None] | None = None
        self._known: collections.OrderedDict[bytes, None] = collections.OrderedDict()

    @contextlib.contextmanager
    def busy(self, request: "_Request", load: int) -> Generator[None]:
        """Counts a request and its tokens as work of this worker."""
        self.load += load
        self.requests.add(request)
        try:
            yield
        finally:
            self.load -= load
            self.requests.discard(request)

    def cached(self, keys: Sequence[bytes]) -> int:
        """Returns how many pages of a prompt it has had, from the first on."""
        found = (i for i, key in enumerate(keys) if key not in self._known)
        return next(found, len(keys))

    def learn(self, keys: Sequence[bytes]) -> None:
        """Notes that it has these pages."""
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN_PAGES:
            self._known.popitem(last=False)


class _Request:
    """A request that is not complete."""

    def __init__(self, number: int, prompt: list[int], sampling: Sampling, key_id: int):
        self.number, self.prompt = number, prompt
        self.sampling, self.key_id = sampling, key_id
        self.attempt = 0
        self.decode: Member | None = None
        """The worker that answers the attempt."""
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self.streamed: dict[int, _Streamed] = {}
        self.first_token_s: float | None = None
        self.is_cancelled = False
        self.task: asyncio.Task[RoutedAnswer] | None = None


class _Streamed:
    """The part of one sequence that was streamed, or replayed in a later attempt."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_text = 0
        self.has_ended = False
        self.replayed_tokens = 0
        self.replayed_text = 0


class Router:
    """Serves requests by workers. Implements `server.Backend`."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        config: RouterConfig | None = None,
        choose: Choose = choice.prefix_affinity,
        tokenizer: Any = None,
        model_name: str = "model",
    ):
        """Makes a router without workers; `start` adds some.

        Args:
          launcher: starts and finds workers.
          config: times and bounds.
          choose: chooses a worker for each phase of a request.
          tokenizer: for prompts that are text; None serves token ids alone.
          model_name: name of the model, as HTTP clients see it.
        """
        self.config = RouterConfig() if config is None else config
        self.tokenizer, self.model_name = tokenizer, model_name
        self.members: dict[str, Member] = {}
        self.name = secrets.token_hex(8)
        self._launcher, self._choose = launcher, choose
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count(1)
        self._identity: dict[str, str] | None = None
        self._bounds: dict[str, Any] = {}
        self._removed: set[str] = set()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._started = time.perf_counter()

    def now(self) -> float:
        """Seconds since the router was made."""
        return time.perf_counter() - self._started

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer that a request may have."""
        return self._bounds["max_length"]

    async def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Starts workers, adopts those that run already, and waits for all of them.

        Raises:
          ValueError: a worker cannot start, differs from the first, or none decodes.
        """
        self._adopt()
        names = [self.add_worker(spec) for spec in specs]
        for name in [*self.members]:
            try:
                await self.wait_for(name)
            except ValueError:
                if name in names:
                    raise
        if not any(member.role == "decode" for member in self._serving()):
            raise ValueError("1 or more decode workers are needed")
        self._background(self._discover())

    def add_worker(self, spec: WorkerSpec) -> str:
        """Starts a worker; returns its name. It takes requests once it is ready."""
        name = f"{spec.role}-{secrets.token_hex(4)}.1"
        self._attach(name, self._launcher.start(name, spec), spec)
        return name

    async def wait_for(self, name: str) -> None:
        """Waits until a worker serves.

        Raises:
          ValueError: it cannot start; the message has its reason.
        """
        member = self._member(name)
        while member.state == "starting":
            await self._next_change()
        if member.state == "lost":
            raise ValueError(f"worker {name} did not start: {member.reason}")

    async def remove_worker(self, name: str) -> None:
        """Gives a worker no further requests, waits for its last, and leaves it.

        The worker ends if no other router uses it.
        """
        member = self._member(name)
        self._removed.add(name)
        if member.state == "serving":
            member.state = "draining"
        while member.requests and member.state != "lost":
            await self._next_change()
        await self._leave(member)

    async def restart_worker(self, name: str) -> str:
        """Starts a new worker in place of one, then removes that; returns its name.

        Raises:
          ValueError: the name is unknown, or the new one cannot start.
        """
        member = self._member(name)
        if member.spec is None:
            raise ValueError(f"worker {name} has not started yet")
        new = self.add_worker(member.spec)
        await self.wait_for(new)
        await self.remove_worker(name)
        return new

    def status(self) -> dict[str, Any]:
        """Returns the workers and counts, as plain JSON values."""
        workers = [
            {
                "name": member.name,
                "role": member.role,
                "state": member.state,
                "reason": member.reason,
                "load": member.load,
                "requests": len(member.requests),
                "pid": member.described.get("pid"),
            }
            for member in self.members.values()
        ]
        serving = self._serving()
        is_ready = any(member.role == "decode" for member in serving)
        return {
            "is_ready": is_ready and not self._is_closed,
            "running": len(self._requests),
            "num_workers": len(serving),
            "workers": workers,
        }

    async def answer(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        key_id: int | None = None,
        deadline_s: float | None = None,
    ) -> RoutedAnswer:
        """Answers a prompt, see `stream`; cancelling the call cancels the request."""
        request = self._begin(prompt, sampling, key_id, deadline_s, is_streamed=False)
        assert request.task is not None
        try:
            return await request.task
        finally:
            self._end(request)

    async def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        key_id: int | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Event]:
        """Answers a prompt, event by event; closing the generator cancels the request.

        Args:
          prompt: text, or token ids.
          sampling: how to draw.
          key_id: number in [0, 2**31) that keys the draws where `sampling.seed` is
            None; None takes the router's number of the request.
          deadline_s: seconds from now by which the request must be complete; None
            takes that of the router's config.

        Yields:
          Events; `request_id` is the router's number, as `cancel` takes it. The last
          event has the completion.

        Raises:
          ValueError: the request cannot be served.
          StallError: the scheduling policy of a worker never serves it.
          TimeoutError: the deadline has passed.
          WorkerLostError: no worker is left, or all attempts have failed.
          RequestCancelledError: `cancel` was called.
          ReplayError: a repeated attempt differs from the part that was streamed.
          OverloadedError: too many requests are under way.
        """
        request = self._begin(prompt, sampling, key_id, deadline_s, is_streamed=True)
        assert request.task is not None
        request.task.add_done_callback(lambda _: request.events.put_nowait(None))
        try:
            while (event := await request.events.get()) is not None:
                yield event
            await request.task
        finally:
            self._end(request)

    def cancel(self, request_id: int) -> None:
        """Cancels a request by the router's number; unknown ones are ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.task is not None:
            request.is_cancelled = True
            request.task.cancel()

    async def close(self) -> None:
        """Cancels all requests and leaves all workers; those without a router end."""
        self._is_closed = True
        for request in list(self._requests.values()):
            self.cancel(request.number)
        for task in [*self._tasks]:
            task.cancel()
        members = list(self.members.values())
        await asyncio.gather(*map(self._leave, members), return_exceptions=True)

    # Membership.

    def _serving(self, role: str | None = None) -> list[Member]:
        members = [m for m in self.members.values() if m.state == "serving"]
        return [m for m in members if role is None or m.role == role]

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise ValueError(f"{name=} must be one of {sorted(self.members)}")
        return self.members[name]

    def _attach(
        self, name: str, handle: WorkerHandle, spec: WorkerSpec | None
    ) -> Member:
        self.members[name] = member = Member(name, handle, spec)
        member.task = self._background(self._keep(member))
        return member

    def _adopt(self) -> None:
        """Attaches to workers that other routers started."""
        for name, handle in self._launcher.find().items():
            if name not in self.members and name not in self._removed:
                self._attach(name, handle, None)

    async def _discover(self) -> None:
        while True:
            await asyncio.sleep(self.config.discover_s)
            try:
                self._adopt()
            except Exception as error:
                logger.warning("workers cannot be listed: %s", error)

    async def _keep(self, member: Member) -> None:
        """Waits until a worker is ready, then collects its reports until it is lost."""
        try:
            limit = self.config.start_timeout_s
            described = await asyncio.wait_for(member.handle.describe(), limit)
            self._welcome(member, described)
            while True:
                reports = await asyncio.wait_for(
                    member.handle.poll(self.name), self.config.heartbeat_s
                )
                for report in reports:
                    if report.failure is not None:
                        raise ConnectionError(report.failure)
                    self._dispatch(report)
        except TimeoutError:
            self._lose(member, "it has stopped answering")
        except (ConnectionError, ValueError) as error:
            self._lose(member, str(error))

    def _welcome(self, member: Member, described: dict[str, Any]) -> None:
        """Takes a worker that is ready among those that serve.

        Raises:
          ValueError: it could not load its model, or serves another one.
        """
        if described["failure"] is not None:
            raise ValueError(described["failure"])
        bounds = {key: described[key] for key in ("max_length", "seed")}
        if self._identity is None:
            self._identity, self._bounds = described["identity"], bounds
        differs = identity.difference(described["identity"], self._identity)
        for key, value in bounds.items():
            if value != self._bounds[key]:
                differs = differs or f"{key}={value} must be {self._bounds[key]}"
        if differs is not None:
            raise ValueError(f"workers must serve one model: {differs}")
        member.described, member.spec = described, described["spec"]
        member.role = described["spec"].role
        member.state = "serving"
        self._change()

    def _dispatch(self, report: Report) -> None:
        """Hands a report to its request; those of abandoned attempts are dropped."""
        request = self._requests.get(report.attempt.request)
        if request is not None and request.attempt == report.attempt.number:
            request.reports.put_nowait(report)

    def _lose(self, member: Member, reason: str) -> None:
        """Gives up a worker, wakes its requests, and starts a new one in its place."""
        if member.state == "lost":
            return
        was_ready = member.state != "starting"
        is_wanted = member.state != "draining" and not self._is_closed
        member.state, member.reason = "lost", reason
        member.lost.set()
        logger.warning("worker %s is lost: %s", member.name, reason)
        with contextlib.suppress(Exception):
            self._launcher.kill(member.name, member.handle)
        for request in self._requests.values():
            if request.decode is member:
                attempt = Attempt(self.name, request.number, request.attempt)
                request.reports.put_nowait(Report(attempt, failure=reason))
        if was_ready and is_wanted:
            self._removed.add(member.name)
            member.is_replaced = True
            self._background(self._replace(member))
        self._change()

    async def _replace(self, member: Member) -> None:
        """Starts new workers in place of a lost one until one serves."""
        assert member.spec is not None
        base, _, generation = member.name.rpartition(".")
        for more in range(self.config.max_restarts + 1):
            if more > 0:
                await asyncio.sleep(min(2.0 ** (more - 1), 30))
            # Routers that share the worker agree on the name, so one is started.
            name = f"{base}.{int(generation) + 1 + more}"
            try:
                if name not in self.members:
                    handle = self._launcher.start(name, member.spec)
                    self._attach(name, handle, member.spec)
                await self.wait_for(name)
                break
            except (ValueError, ConnectionError) as error:
                logger.warning("worker %s cannot be replaced: %s", member.name, error)
                self.members.pop(name, None)
        self.members.pop(member.name, None)
        self._change()

    async def _leave(self, member: Member) -> None:
        """Forgets a worker; it ends if no other router uses it."""
        if member.task is not None:
            member.task.cancel()
        was_lost, member.state = member.state == "lost", "lost"
        member.lost.set()
        if not was_lost:
            is_last = True
            with contextlib.suppress(ConnectionError, TimeoutError):
                is_last = await asyncio.wait_for(member.handle.release(self.name), 5)
            if is_last:
                with contextlib.suppress(Exception):
                    self._launcher.kill(member.name, member.handle)
        self.members.pop(member.name, None)
        self._change()

    # Requests.

    def _begin(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        key_id: int | None,
        deadline_s: float | None,
        *,
        is_streamed: bool,
    ) -> _Request:
        if self._is_closed:
            raise RuntimeError("the router is closed")
        if len(self._requests) >= self.config.max_requests:
            raise OverloadedError(
                f"{len(self._requests)} requests are under way; at most "
                f"max_requests={self.config.max_requests}"
            )
        if deadline_s is None:
            deadline_s = self.config.deadline_s
        else:
            deadline_s = validation.seconds("deadline_s", deadline_s)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("text prompts need a tokenizer; pass token ids")
            tokens = list(self.tokenizer.encode(prompt))
        else:
            tokens = validation.tokens("prompt", prompt).tolist()
        number = next(self._numbers)
        key_id = number if key_id is None else validation.integer("key_id", key_id)
        request = _Request(number, tokens, sampling, key_id)
        self._requests[number] = request
        request.task = asyncio.create_task(
            self._within(request, deadline_s, is_streamed)
        )
        return request

    def _end(self, request: _Request) -> None:
        if request.task is not None and not request.task.done():
            request.task.cancel()
        self._requests.pop(request.number, None)

    async def _within(
        self, request: _Request, deadline_s: float | None, is_streamed: bool
    ) -> RoutedAnswer:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._attempts(request, is_streamed)
        except TimeoutError:
            raise TimeoutError(
                f"{deadline_s=} passed before the request was complete"
            ) from None
        except asyncio.CancelledError:
            if request.is_cancelled:
                raise RequestCancelledError("the request was cancelled") from None
            raise

    async def _attempts(self, request: _Request, is_streamed: bool) -> RoutedAnswer:
        """Tries to serve a request, each time with workers that are still there."""
        arrival_s, reasons = self.now(), []
        for number in range(1, self.config.max_attempts + 1):
            if number > 1:
                await asyncio.sleep(self.config.backoff_s * 2 ** (number - 2))
            request.attempt, request.decode = number, None
            request.reports = asyncio.Queue()
            for streamed in request.streamed.values():
                streamed.replayed_tokens = streamed.replayed_text = 0
            decode = await self._worker("decode", request)
            attempt = Attempt(self.name, request.number, number)
            load = len(request.prompt) + request.sampling.max_tokens
            with decode.busy(request, load):
                try:
                    transfer = await self._transfer(request, attempt, decode)
                    completion = await self._decode(
                        request, attempt, decode, is_streamed
                    )
                except WorkerLostError as error:
                    reasons.append(str(error))
                    continue
                except BaseException:
                    decode.handle.cancel(attempt)
                    raise
                finally:
                    self._change()
            decode.learn(self._keys(request, decode))
            completion = completion._replace(
                request_id=request.number,
                arrival_s=arrival_s,
                first_token_s=request.first_token_s,
                finish_s=self.now(),
            )
            answer = RoutedAnswer(completion, number, transfer)
            last = Event(request.number, [], "", completion)
            request.events.put_nowait(last)
            return answer
        raise WorkerLostError(
            f"{self.config.max_attempts} attempts have failed; the last: {reasons[-1]}"
        )

    async def _worker(self, role: str, request: _Request) -> Member:
        """Chooses a worker that serves; waits while one is starting.

        Raises:
          WorkerLostError: none serves, and none is starting.
        """
        while not (members := self._serving(role)):
            mine = [m for m in self.members.values() if m.role == role]
            if not any(m.state == "starting" or m.is_replaced for m in mine):
                raise WorkerLostError(f"no {role} worker is left")
            await self._next_change()
        return self._chosen(members, request)

    def _chosen(self, members: list[Member], request: _Request) -> Member:
        num_tokens = len(request.prompt)
        candidates = [
            Candidate(
                member.name,
                member.role,
                member.load,
                len(member.requests),
                min(
                    member.cached(self._keys(request, member))
                    * member.described["page_size"],
                    num_tokens,
                ),
            )
            for member in members
        ]
        index = self._choose(candidates, num_tokens)
        if not 0 <= validation.integer("choose", index) < len(members):
            raise ValueError(f"choose={index} must be in [0, {len(members) - 1}]")
        return members[index]

    def _keys(self, request: _Request, member: Member) -> list[bytes]:
        size = member.described["page_size"]
        return choice.page_keys(request.prompt, size, request.sampling.salt)

    async def _transfer(
        self, request: _Request, attempt: Attempt, decode: Member
    ) -> Transfer:
        """Has a prompt read by a prefill worker and its pages sent to `decode`.

        A failure costs time alone: `decode` then reads the prompt itself.
        """
        keys, members = self._keys(request, decode), self._serving("prefill")
        if not members or not request.sampling.prefix_cache:
            return Transfer()
        if decode.cached(keys) == len(keys):
            return Transfer()
        reader = self._chosen(members, request)
        try:
            with reader.busy(request, len(request.prompt)):
                begun = time.perf_counter()
                done, pages = await self._unless_lost(
                    reader,
                    reader.handle.prefill(
                        attempt, request.prompt, request.sampling.salt
                    ),
                )
                reader.learn(keys)
                # Ray waits without limit for pages on a machine that hangs.
                num = await asyncio.wait_for(
                    self._unless_lost(decode, decode.handle.bring(pages)),
                    self.config.heartbeat_s,
                )
                decode.learn(keys[:num])
        except asyncio.CancelledError:
            reader.handle.cancel(attempt)
            raise
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            if decode.state == "lost":
                raise WorkerLostError(f"worker {decode.name}: {error}") from error
            logger.info("the pages of a prompt were lost: %s", error)
            return Transfer()
        finally:
            self._change()
        whole_s = time.perf_counter() - begun
        return Transfer(done.num_bytes, done.prefill_s, whole_s - done.prefill_s)

    async def _decode(
        self, request: _Request, attempt: Attempt, decode: Member, is_streamed: bool
    ) -> Completion:
        """Has a prompt answered.

        Raises:
          ValueError: the worker refuses the request.
          StallError: the worker's policy never serves it.
          WorkerLostError: the worker is gone.
        """
        request.decode = decode
        sent = decode.handle.submit(
            attempt, request.prompt, request.sampling, request.key_id
        )
        await self._unless_lost(decode, sent)
        while True:
            report = await request.reports.get()
            if report.refusal is not None:
                raise report.refusal
            if (event := report.event) is None:
                raise WorkerLostError(f"worker {decode.name}: {report.failure}")
            if event.tokens and request.first_token_s is None:
                request.first_token_s = self.now()
            if is_streamed:
                self._forward(request, event)
            if event.completion is not None:
                return event.completion

    def _forward(self, request: _Request, event: Event) -> None:
        """Streams the part of an event that an earlier attempt has not streamed.

        Raises:
          ReplayError: tokens differ from those that were streamed.
        """
        streamed = request.streamed.setdefault(event.sample, _Streamed())
        start = streamed.replayed_tokens
        known = streamed.tokens[start : start + len(event.tokens)]
        if event.tokens[: len(known)] != known:
            raise ReplayError(
                "a repeated attempt gave other tokens than those already streamed; "
                'numerics="reproducible" excludes it'
            )
        tokens = event.tokens[len(known) :]
        streamed.replayed_tokens += len(event.tokens)
        streamed.tokens += tokens
        skipped = max(0, streamed.num_text - streamed.replayed_text)
        text = event.text[skipped:]
        streamed.replayed_text += len(event.text)
        streamed.num_text = max(streamed.num_text, streamed.replayed_text)
        reason = None if streamed.has_ended else event.reason
        streamed.has_ended |= event.reason is not None
        if tokens or text or reason is not None:
            request.events.put_nowait(
                Event(request.number, tokens, text, None, event.sample, reason)
            )

    async def _unless_lost[T](self, member: Member, work: Any) -> T:
        """Waits for a call or a report, or until the worker is lost.

        Raises:
          WorkerLostError: the worker is gone.
        """
        if member.state == "lost":
            if asyncio.iscoroutine(work):
                work.close()
            raise WorkerLostError(f"worker {member.name}: {member.reason}")
        task = asyncio.ensure_future(work)
        lost = asyncio.create_task(member.lost.wait())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ConnectionError(member.reason)
        except ConnectionError as error:
            raise WorkerLostError(f"worker {member.name}: {error}") from error
        finally:
            task.cancel()
            lost.cancel()

    # Helpers.

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self) -> None:
        await self._changed.wait()

    def _background(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
