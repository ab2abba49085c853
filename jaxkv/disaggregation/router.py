"""The router: chooses workers for a request, and retries it when a worker is lost.

A prefill worker reads the prompt, its pages are sent to the prefix cache of a decode
worker, and that worker answers. Samples are keyed by request and position, so a retried
request has the same tokens. `worker_pool` manages the workers.
"""

import asyncio
import dataclasses
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

from jaxkv import scheduling, validation
from jaxkv.disaggregation import choice
from jaxkv.disaggregation.choice import Candidate, Choose
from jaxkv.disaggregation.config import RouterConfig
from jaxkv.disaggregation.identity import tokenizer_identity
from jaxkv.disaggregation.worker import Attempt, Report, WorkerSpec
from jaxkv.disaggregation.worker_pool import (
    Launcher,
    WorkerLostError,
    WorkerPool,
    WorkerRecord,
)
from jaxkv.sampling import Sampling
from jaxkv.scheduling import RequestAttributes
from jaxkv.server import OverloadedError
from jaxkv.serving import Completion, Event

logger = logging.getLogger(__name__)


class RequestCancelledError(RuntimeError):
    """The request was cancelled by its number."""


class ReplayError(RuntimeError):
    """A retry gave other tokens than those already streamed.

    Possible only with `numerics="fast"`, where a near tie of two logits may be decided
    differently in another batch.
    """


class Transfer(NamedTuple):
    """KV transfer of a request to its decode worker."""

    num_bytes: int = 0
    """Bytes of the pages; 0 if none were sent."""
    prefill_s: float = 0.0
    """Seconds to read the prompt, including queueing."""
    transfer_s: float = 0.0
    """Seconds to copy the pages out, send and write them."""


class RoutedAnswer(NamedTuple):
    """A completed request."""

    completion: Completion
    """Completion; times are in seconds since the router was made."""
    num_attempts: int
    """Number of attempts; 1 if none failed."""
    transfer: Transfer
    """Transfer of the last attempt."""


class _Streamed:
    """Part of one sequence that was streamed, and the position of a retry in it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_text = 0
        self.has_ended = False
        self.replayed_tokens = self.replayed_text = 0

    def new_part(self, event: Event) -> Event:
        """Returns the part of an event that no earlier attempt has streamed.

        Raises:
          ReplayError: tokens differ from those that were streamed.
        """
        start = self.replayed_tokens
        earlier_tokens = self.tokens[start : start + len(event.tokens)]
        if event.tokens[: len(earlier_tokens)] != earlier_tokens:
            raise ReplayError(
                "a repeated attempt gave other tokens than those already streamed; "
                'numerics="reproducible" excludes it'
            )
        tokens = event.tokens[len(earlier_tokens) :]
        self.replayed_tokens += len(event.tokens)
        self.tokens += tokens
        text = event.text[max(0, self.num_text - self.replayed_text) :]
        self.replayed_text += len(event.text)
        self.num_text = max(self.num_text, self.replayed_text)
        reason = None if self.has_ended else event.reason
        self.has_ended |= event.reason is not None
        return event._replace(tokens=tokens, text=text, reason=reason, completion=None)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Request:
    """A request that is not complete."""

    number: int
    prompt: list[int]
    sampling: Sampling
    key_id: int
    attributes: RequestAttributes
    is_streamed: bool
    events: asyncio.Queue[Event | None] = dataclasses.field(
        default_factory=asyncio.Queue
    )
    streamed: dict[int, _Streamed] = dataclasses.field(default_factory=dict)
    """By the index of the sequence."""
    first_token_s: float | None = None
    is_cancelled: bool = False
    task: asyncio.Task[RoutedAnswer] | None = None


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
        """Makes a router without workers; `start` adds them.

        Args:
          launcher: starts and finds workers.
          config: timeouts and bounds.
          choose: chooses a worker for each phase of a request.
          tokenizer: tokenizer of text prompts; None accepts only token ids.
          model_name: name of the model for HTTP clients.
        """
        self.config = RouterConfig() if config is None else config
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.adapters: tuple[str, ...] = ()
        self.name = secrets.token_hex(8)
        # The router encodes prompts, and workers decode answers.
        fields = (
            {} if tokenizer is None else {"tokenizer": tokenizer_identity(tokenizer)}
        )
        self._pool = WorkerPool(self.name, launcher, self.config, self._deliver, fields)
        self.workers = self._pool.by_name
        self._choose = choose
        self._requests: dict[int, _Request] = {}
        self._reports: dict[Attempt, asyncio.Queue[Report]] = {}
        """Reports of attempts that are in progress on a decode worker."""
        self._numbers = itertools.count(1)
        self._is_closed = False
        self._started = time.perf_counter()

    def now(self) -> float:
        """Seconds since the router was made."""
        return time.perf_counter() - self._started

    @property
    def max_length(self) -> int:
        """Largest number of tokens of prompt and answer."""
        return self._pool.bounds["max_length"]

    async def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Starts workers, adopts running ones, and waits until all serve.

        Raises:
          ValueError: a worker cannot start, serves another model, or no worker decodes.
        """
        await self._pool.start(specs)

    def add_worker(self, spec: WorkerSpec) -> str:
        """Starts a worker; returns its name. It accepts requests once it is ready."""
        return self._pool.add(spec)

    async def wait_for(self, name: str) -> None:
        """Waits until a worker serves.

        Raises:
          ValueError: the worker cannot start; the message has the reason.
        """
        await self._pool.wait_for(name)

    async def remove_worker(self, name: str) -> None:
        """Drains a worker (no further requests, last ones complete) and releases it.

        The worker ends if no other router uses it.
        """
        await self._pool.remove(name)

    async def restart_worker(self, name: str) -> str:
        """Replaces a worker by a new one; returns the new name.

        Raises:
          ValueError: the name is unknown, or the replacement cannot start.
        """
        spec = self._pool.get(name).spec
        if spec is None:
            raise ValueError(f"worker {name} has not started yet")
        new = self.add_worker(spec)
        await self.wait_for(new)
        await self.remove_worker(name)
        return new

    def status(self) -> dict[str, Any]:
        """Returns the workers and counts, as plain JSON values."""
        workers = [
            {
                "name": worker.name,
                "role": worker.role,
                "state": worker.state,
                "reason": worker.reason,
                "load": worker.load,
                "requests": len(worker.attempts),
                "pid": worker.described.get("pid"),
            }
            for worker in self.workers.values()
        ]
        serving = self._pool.serving()
        is_ready = any(worker.role == "decode" for worker in serving)
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
        attributes: RequestAttributes | None = None,
        deadline_s: float | None = None,
    ) -> RoutedAnswer:
        """Answers a prompt, see `stream`; cancelling the call cancels the request."""
        request_fields = prompt, sampling, key_id, attributes, deadline_s
        request = self._start_request(*request_fields, is_streamed=False)
        assert request.task is not None
        try:
            return await request.task
        finally:
            self._end_request(request)

    async def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        key_id: int | None = None,
        attributes: RequestAttributes | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Event]:
        """Answers a prompt, event by event; closing the generator cancels the request.

        Args:
          prompt: text, or token ids.
          sampling: sampling parameters.
          key_id: number in [0, 2**31) that keys the samples if `sampling.seed` is None;
            None takes the router's number of the request.
          attributes: attributes for the scheduling policies of its workers; None means
            the defaults.
          deadline_s: time limit in s from now; None takes that of the router's config.

        Yields:
          Events; `request_id` is the router's number, as `cancel` takes it. The last
          event has the completion.

        Raises:
          ValueError: the request cannot be served.
          StallError: the scheduling policy of a worker never serves it.
          TimeoutError: the deadline has passed.
          WorkerLostError: no worker is left, or all attempts have failed.
          RequestCancelledError: `cancel` was called.
          ReplayError: a retry differs from the part that was streamed.
          OverloadedError: too many requests are in progress.
        """
        request_fields = prompt, sampling, key_id, attributes, deadline_s
        request = self._start_request(*request_fields, is_streamed=True)
        assert request.task is not None
        request.task.add_done_callback(lambda _: request.events.put_nowait(None))
        try:
            while (event := await request.events.get()) is not None:
                yield event
            await request.task
        finally:
            self._end_request(request)

    def cancel(self, request_id: int) -> None:
        """Cancels a request by the router's number; unknown ones are ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.task is not None:
            request.is_cancelled = True
            request.task.cancel()

    async def close(self) -> None:
        """Cancels all requests and releases all workers; those without a router end."""
        self._is_closed = True
        for number in [*self._requests]:
            self.cancel(number)
        await self._pool.close()

    def _deliver(self, report: Report) -> None:
        """Passes a report to its attempt; reports of abandoned attempts are dropped."""
        if (reports := self._reports.get(report.attempt)) is not None:
            reports.put_nowait(report)

    def _start_request(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        key_id: int | None,
        attributes: RequestAttributes | None,
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
        if sampling.adapter is not None:  # prefill workers and routes lack them
            name = validation.format_value(sampling.adapter)
            raise ValueError(f"adapter={name} must be None with disaggregated workers")
        if deadline_s is None:
            deadline_s = self.config.deadline_s
        else:
            deadline_s = validation.seconds("deadline_s", deadline_s)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("text prompts need a tokenizer; pass token ids")
            tokens = list(self.tokenizer.encode(prompt))
        else:
            tokens = validation.token_sequence("prompt", prompt).tolist()
        number = next(self._numbers)
        key_id = number if key_id is None else validation.integer("key_id", key_id)
        request = _Request(
            number=number,
            prompt=tokens,
            sampling=sampling,
            key_id=key_id,
            attributes=scheduling.check_attributes(attributes),
            is_streamed=is_streamed,
        )
        self._requests[number] = request

        async def within_deadline() -> RoutedAnswer:
            try:
                async with asyncio.timeout(deadline_s):
                    return await self._attempts(request)
            except TimeoutError:
                raise TimeoutError(
                    f"{deadline_s=} passed before the request was complete"
                ) from None
            except asyncio.CancelledError:
                if request.is_cancelled:
                    raise RequestCancelledError("the request was cancelled") from None
                raise

        request.task = asyncio.create_task(within_deadline())
        return request

    def _end_request(self, request: _Request) -> None:
        if request.task is not None and not request.task.done():
            request.task.cancel()
        self._requests.pop(request.number, None)

    async def _attempts(self, request: _Request) -> RoutedAnswer:
        """Tries to serve a request, each time with the workers that serve then."""
        arrival_s = self.now()
        reasons = []
        for number in range(1, self.config.max_attempts + 1):
            if number > 1:
                await asyncio.sleep(self.config.backoff_s * 2 ** (number - 2))
            for streamed in request.streamed.values():
                streamed.replayed_tokens = streamed.replayed_text = 0
            workers = await self._pool.wait_for_serving("decode")
            page_size = self._pool.bounds["page_size"]
            keys = choice.page_keys(request.prompt, page_size, request.sampling.salt)
            decode = self._choose_worker(workers, request, keys)
            attempt = Attempt(self.name, request.number, number)
            load = len(request.prompt) + request.sampling.max_tokens
            with decode.track_load(attempt, load):
                try:
                    transfer = await self._transfer(request, attempt, decode, keys)
                    completion = await self._decode(request, attempt, decode)
                except WorkerLostError as error:
                    reasons.append(str(error))
                    continue
                except BaseException:
                    decode.handle.cancel(attempt)
                    raise
                finally:
                    self._pool.note_change()
            decode.note_pages(keys)
            completion = completion._replace(
                request_id=request.number,
                arrival_s=arrival_s,
                first_token_s=request.first_token_s,
                finish_s=self.now(),
            )
            request.events.put_nowait(Event(request.number, [], "", completion))
            return RoutedAnswer(completion, number, transfer)
        raise WorkerLostError(
            f"{self.config.max_attempts} attempts have failed; the last: {reasons[-1]}"
        )

    def _choose_worker(
        self, workers: list[WorkerRecord], request: _Request, keys: list[bytes]
    ) -> WorkerRecord:
        num_tokens = len(request.prompt)
        page_size = self._pool.bounds["page_size"]
        candidates = [
            Candidate(
                worker.name,
                worker.role,
                worker.load,
                len(worker.attempts),
                min(worker.num_cached_pages(keys) * page_size, num_tokens),
            )
            for worker in workers
        ]
        index = self._choose(candidates, num_tokens)
        if not 0 <= validation.integer("choose", index) < len(workers):
            raise ValueError(f"choose={index} must be in [0, {len(workers) - 1}]")
        return workers[index]

    async def _transfer(
        self,
        request: _Request,
        attempt: Attempt,
        decode: WorkerRecord,
        keys: list[bytes],
    ) -> Transfer:
        """Has a prefill worker read the prompt and send its pages to `decode`.

        A failure only costs time: `decode` then reads the prompt itself.
        """
        workers = self._pool.serving("prefill")
        if not workers or not request.sampling.prefix_cache:
            return Transfer()
        if decode.num_cached_pages(keys) == len(keys):
            return Transfer()
        reader = self._choose_worker(workers, request, keys)
        prompt = request.prompt
        attributes = request.attributes
        prefill = reader.handle.prefill(
            attempt, prompt, request.sampling.salt, attributes
        )
        try:
            with reader.track_load(attempt, len(prompt)):
                begun = time.perf_counter()
                done, pages = await reader.unless_lost(prefill)
                reader.note_pages(keys)
                # Ray waits without a timeout for pages on a machine that hangs.
                num = await asyncio.wait_for(
                    decode.unless_lost(decode.handle.bring(pages)),
                    self.config.heartbeat_s,
                )
                decode.note_pages(keys[:num])
        except asyncio.CancelledError:
            reader.handle.cancel(attempt)
            raise
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            if decode.state == "lost":
                raise WorkerLostError(f"worker {decode.name}: {error}") from error
            logger.info("the pages of a prompt were lost: %s", error)
            return Transfer()
        finally:
            self._pool.note_change()
        whole_s = time.perf_counter() - begun
        return Transfer(done.num_bytes, done.prefill_s, whole_s - done.prefill_s)

    async def _decode(
        self, request: _Request, attempt: Attempt, decode: WorkerRecord
    ) -> Completion:
        """Has a decode worker answer the prompt.

        Raises:
          ValueError: the worker refuses the request.
          StallError: the worker's policy never serves it.
          WorkerLostError: the worker is lost.
        """
        self._reports[attempt] = reports = asyncio.Queue[Report]()
        try:
            await decode.unless_lost(
                decode.handle.submit(
                    attempt,
                    request.prompt,
                    request.sampling,
                    request.key_id,
                    request.attributes,
                )
            )
            while True:
                report = await reports.get()
                if report.refusal is not None:
                    raise report.refusal
                if (event := report.event) is None:
                    raise WorkerLostError(f"worker {decode.name}: {report.failure}")
                if event.tokens and request.first_token_s is None:
                    request.first_token_s = self.now()
                if request.is_streamed:
                    streamed = request.streamed.setdefault(event.sample, _Streamed())
                    new = streamed.new_part(event)._replace(request_id=request.number)
                    if new.tokens or new.text or new.reason is not None:
                        request.events.put_nowait(new)
                if event.completion is not None:
                    return event.completion
        finally:
            del self._reports[attempt]
