"""The HTTP application: OpenAI's routes, health and metrics, for any backend."""

import asyncio
import collections
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxkv import validation
from jaxkv.server import openai_requests
from jaxkv.server.backend import Backend, OverloadedError
from jaxkv.server.openai_requests import ApiError, GenerationRequest, api_error
from jaxkv.server.openai_responses import ResponseWriter
from jaxkv.serving import Completion, Event

try:
    import fastapi
    from fastapi import Request, Response
    from starlette.exceptions import HTTPException
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"jaxkv.server.app needs {error.name}: pip install 'jaxkv[serve]'",
        name=error.name,
    ) from None

MAX_BODY_BYTES = 16 << 20
BODY_S = 30.0
"""Seconds within which the body of a request must arrive."""
SEND_S = 60.0
"""Seconds within which a client must accept a chunk of a stream; then it counts as
disconnected."""
READ = ["GET", "HEAD"]
"""Methods of the routes without a body."""
_STOPPING_MESSAGE = "the server is stopping"


class HttpService:
    """State of one application: backend, bounds, counters.

    Args:
      backend: system that answers requests.
      api_key: token that clients send as "Authorization: Bearer ..."; None requires no
        key.
      max_requests: bound on prompts in progress; further ones get status 503.
      deadline_s: time limit in s of a request without its own.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        api_key: str | None,
        max_requests: int = 256,
        deadline_s: float = 600.0,
    ):
        if backend.tokenizer is None:
            raise ValueError(f"{backend.model_name} has no tokenizer, which text needs")
        self.backend = backend
        self._api_key = api_key
        self._max_requests = validation.integer("max_requests", max_requests, low=1)
        self.deadline_s = validation.number(
            "deadline_s",
            deadline_s,
            low=0.001,
            high=openai_requests.MAX_DEADLINE_S,
            hint=f"in [0.001, {openai_requests.MAX_DEADLINE_S:g}]",
        )
        self.is_stopping = False
        self.num_running = 0
        """Prompts in progress."""
        self.counters: collections.defaultdict[str, float] = collections.defaultdict(
            float
        )
        self.responses: collections.Counter[int] = collections.Counter()
        """Responses by HTTP status."""

    async def authorize(self, request: Request) -> None:
        """Checks the bearer token, in constant time.

        Raises:
          ApiError: the token is missing or wrong.
        """
        if self._api_key is None:
            return
        authorization = request.headers.get("authorization", "")
        kind, _, token = authorization.partition(" ")
        # Bytes, since text beyond ASCII has no constant-time comparison.
        is_same = secrets.compare_digest(token.strip().encode(), self._api_key.encode())
        if kind.lower() != "bearer" or not is_same:
            raise ApiError(
                401,
                "the header 'Authorization: Bearer KEY' is missing or has a wrong key",
                code="invalid_api_key",
            )

    @contextlib.contextmanager
    def admit(self, num: int) -> Generator[None]:
        """Counts prompts as in progress.

        Raises:
          OverloadedError: too many prompts are in progress.
        """
        if self.is_stopping:
            raise OverloadedError(_STOPPING_MESSAGE)
        if num > self._max_requests:
            raise ApiError(
                400,
                f"{num} prompts must be at most {self._max_requests}",
                param="prompt",
            )
        if self.num_running + num > self._max_requests:
            raise OverloadedError(
                f"{self.num_running} requests are in progress, of at most "
                f"{self._max_requests}; try again later"
            )
        self.num_running += num
        try:
            yield
        finally:
            self.num_running -= num

    def to_api_error(self, error: Exception) -> ApiError:
        """Returns the API error for an exception of a request in progress."""
        if self.is_stopping and isinstance(error, RuntimeError):
            error = OverloadedError(_STOPPING_MESSAGE)
        return api_error(error)

    async def stop(self, grace_s: float) -> None:
        """Refuses new requests, and waits for those in progress."""
        self.is_stopping = True
        due = time.monotonic() + grace_s
        while self.num_running and time.monotonic() < due:
            await asyncio.sleep(0.02)

    async def events(self, ask: GenerationRequest) -> AsyncGenerator[tuple[int, Event]]:
        """Answers all prompts at once; yields events with the index of the prompt."""
        queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()

        async def pump(i: int) -> None:
            try:
                async with contextlib.aclosing(self._stream(ask, i)) as events:
                    async for event in events:
                        queue.put_nowait((i, event))
            except Exception as error:
                queue.put_nowait((i, error))

        if len(ask.prompts) == 1:
            async with contextlib.aclosing(self._stream(ask, 0)) as events:
                async for event in events:
                    yield 0, event
            return
        tasks = [asyncio.create_task(pump(i)) for i in range(len(ask.prompts))]
        try:
            left = len(tasks)
            while left:
                i, event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                left -= event.completion is not None
                yield i, event
        finally:
            await _cancel_all(*tasks)

    async def _stream(self, ask: GenerationRequest, i: int) -> AsyncGenerator[Event]:
        """Yields the events of one prompt and counts them."""
        begin = time.perf_counter()
        first_s = None
        stream: Any = self.backend.stream(
            ask.prompts[i],
            ask.samplings[i],
            attributes=ask.attributes,
            deadline_s=ask.deadline_s,
        )
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                if first_s is None:
                    first_s = time.perf_counter() - begin
                if (done := event.completion) is not None:
                    num = sum(len(answer.tokens) for answer in done.answers)
                    for name, value in (
                        ("requests_total", 1),
                        ("prompt_tokens_total", len(ask.prompts[i])),
                        ("cached_tokens_total", done.num_cached),
                        ("completion_tokens_total", num),
                        ("first_token_seconds_total", first_s),
                        ("request_seconds_total", time.perf_counter() - begin),
                    ):
                        self.counters[name] += value
                yield event

    def status(self) -> dict[str, object]:
        """Returns counts of the application and of its backend."""
        return {
            "model": self.backend.model_name,
            "max_length": self.backend.max_length,
            "in_progress": self.num_running,
            "is_stopping": self.is_stopping,
            **self.counters,
            "responses": {str(status): num for status, num in self.responses.items()},
            "backend": self.backend.status(),
        }

    def metrics(self) -> str:
        """Returns the counts in Prometheus' text format."""
        gauges: dict[str, float] = {"in_progress": self.num_running}
        for name, value in self.backend.status().items():
            if isinstance(value, int | float):
                gauges[f"backend_{name}"] = float(value)
        lines = []
        for kind, values in (("gauge", gauges), ("counter", self.counters)):
            for name, value in sorted(values.items()):
                lines += [f"# TYPE jaxkv_{name} {kind}", f"jaxkv_{name} {value:.10g}"]
        lines.append("# TYPE jaxkv_responses_total counter")
        for status, num in sorted(self.responses.items()):
            lines.append(f'jaxkv_responses_total{{code="{status}"}} {num}')
        return "\n".join([*lines, ""])


def make_app(service: HttpService) -> fastapi.FastAPI:
    """Returns the application; `service` is also its `state.service`.

    /health and /metrics answer without the key; every other route needs it.
    """
    app = fastapi.FastAPI(
        title="jaxkv", openapi_url=None, docs_url=None, redoc_url=None
    )
    app.state.service = service
    backend = service.backend

    guarded = fastapi.APIRouter(dependencies=[fastapi.Depends(service.authorize)])

    @app.exception_handler(ApiError)
    @app.exception_handler(Exception)
    async def refuse(request: Request, error: Exception) -> Response:
        del request
        return _error_response(service, error)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        line = f"{request.method} {request.url.path}: {error.detail}"
        return _error_response(service, ApiError(error.status_code, line))

    app.add_middleware(_FramingCheck, service=service)

    @app.api_route("/health", methods=READ)
    async def health() -> Response:
        is_ready = backend.status()["is_ready"] and not service.is_stopping
        status = "ok" if is_ready else "unavailable"
        return _json_response({"status": status}, 200 if is_ready else 503)

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(service.metrics(), media_type=kind)

    @guarded.api_route("/status", methods=READ)
    async def status() -> Response:
        return _json_response(service.status())

    model = {
        "id": backend.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "jaxkv",
        "max_model_len": backend.max_length,
    }
    # As in vLLM, an adapter is a model with the served one as its parent.
    variants = {x: model | {"id": x, "parent": model["id"]} for x in backend.adapters}
    models_by_name = variants | {backend.model_name: model}

    @guarded.api_route("/v1/models", methods=READ)
    async def models() -> Response:
        return _json_response({"object": "list", "data": [model, *variants.values()]})

    @guarded.api_route("/v1/models/{name:path}", methods=READ)
    async def one_model(name: str) -> Response:
        if name not in models_by_name:
            value_text = validation.format_value(name)
            raise ApiError(
                404, f"there is no model {value_text}", code="model_not_found"
            )
        return _json_response(models_by_name[name])

    @guarded.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _respond(request, service, openai_requests.parse_completion)

    @guarded.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _respond(request, service, openai_requests.parse_chat)

    # As in vLLM; clients such as lm-eval read a tokenizer this way.
    @guarded.api_route("/tokenizer_info", methods=READ)
    async def tokenizer_info() -> Response:
        tokenizer = backend.tokenizer
        names = {"bos_token": None, "eos_token": None} | tokenizer.special_tokens
        template = tokenizer.settings.get("chat_template")
        return _json_response(names | {"chat_template": template})

    @guarded.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await _read_body(request)
        return _json_response(
            await _run_checked(openai_requests.tokenize, body, backend)
        )

    @guarded.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await _read_body(request)
        return _json_response(
            await _run_checked(openai_requests.detokenize, body, backend)
        )

    app.include_router(guarded)
    return app


class _FramingCheck:
    """Refuses requests of which a proxy may see another length, and disconnects.

    The bytes after such a request could be the hidden beginning of a second one.

    Source: RFC 9112, section 6.1.
    """

    def __init__(self, app: ASGIApp, service: HttpService):
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]}
        is_old = scope["http_version"] == "1.0"
        if b"transfer-encoding" in names and (is_old or b"content-length" in names):
            line = "Transfer-Encoding needs HTTP/1.1, and no Content-Length with it"
            response = _error_response(self._service, ApiError(400, line))
            response.headers["connection"] = "close"
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def _respond(
    request: Request,
    service: HttpService,
    parse: Callable[..., GenerationRequest],
) -> Response:
    """Processes a generation request; a client that disconnects cancels it."""
    body = await _read_body(request)
    headers = {name.lower(): value for name, value in request.headers.items()}
    ask = await _run_checked(parse, body, headers, service.backend, service.deadline_s)
    backend = service.backend
    name = ask.samplings[0].adapter or backend.model_name
    writer = ResponseWriter(ask, name, backend.tokenizer)

    async def complete() -> dict[str, object]:
        completions: dict[int, Completion] = {}
        async with contextlib.aclosing(service.events(ask)) as events:
            async for i, event in events:
                if event.completion is not None:
                    completions[i] = event.completion
        return writer.document([completions[i] for i in range(len(ask.prompts))])

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(service.admit(len(ask.prompts)))
            if not ask.is_streamed:
                document = await _unless_disconnected(request.receive, complete())
                response = _json_response(document)
                service.responses[200] += 1
                return response
            events = service.events(ask)
            # Awaited before the status is sent, so that errors have a status.
            first = await _unless_disconnected(request.receive, anext(events))
        except _ClientDisconnect:
            service.counters["disconnects_total"] += 1
            return Response(status_code=499)
        except Exception as error:
            raise service.to_api_error(error) from error
        lines = _stream_lines(first, events, writer, service)
        return _EventStream(lines, service, stack.pop_all())


async def _stream_lines(
    first: tuple[int, Event],
    events: AsyncGenerator[tuple[int, Event]],
    writer: ResponseWriter,
    service: HttpService,
) -> AsyncGenerator[bytes]:
    """Yields the lines of a stream of server-sent events."""
    completions: dict[int, Completion] = {}
    num_prompts = len(writer.request.prompts)
    try:
        async with contextlib.aclosing(events):
            for prompt in range(num_prompts):
                for chunk in writer.opening(prompt):
                    yield _format_event(chunk)
            pair: tuple[int, Event] | None = first
            while pair is not None:
                prompt, event = pair
                for chunk in writer.chunks(prompt, event):
                    yield _format_event(chunk)
                if event.completion is not None:
                    completions[prompt] = event.completion
                pair = await anext(events, None)
        for chunk in writer.closing([completions[i] for i in range(num_prompts)]):
            yield _format_event(chunk)
    except Exception as error:
        yield _format_event(service.to_api_error(error).document)
    else:
        yield b"data: [DONE]\n\n"


def _format_event(document: dict[str, object]) -> bytes:
    return b"data: " + _dumps(document) + b"\n\n"


class _ClientDisconnect(Exception):
    """The client has closed the connection."""


async def _unless_disconnected[T](
    receive: Callable[[], Awaitable[Message]], work: Awaitable[T]
) -> T:
    """Awaits work; cancels it if the client closes the connection.

    Raises:
      _ClientDisconnect: the client has disconnected.
    """

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(leave())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ClientDisconnect
        return task.result()
    finally:
        await _cancel_all(task, disconnect)


async def _cancel_all(*tasks: asyncio.Future) -> None:
    """Cancels tasks and waits until they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _EventStream(Response):
    """Server-sent events; ends when the client disconnects or stops reading."""

    def __init__(
        self,
        lines: AsyncGenerator[bytes],
        service: HttpService,
        stack: contextlib.ExitStack,
    ):
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._lines = lines
        self._service = service
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start"} | start)
            async for line in self._lines:
                body = {"type": "http.response.body", "body": line, "more_body": True}
                async with asyncio.timeout(SEND_S):
                    await send(body)
            await send({"type": "http.response.body", "body": b""})

        del scope
        with self._stack:
            try:
                await _unless_disconnected(receive, write())
                self._service.responses[200] += 1
            except Exception:
                self._service.counters["disconnects_total"] += 1
            finally:
                await self._lines.aclose()


async def _read_body(request: Request) -> bytes:
    """Reads the body of a request.

    Raises:
      ApiError: the body is too large, or takes too long.
    """
    body = bytearray()
    stream = request.stream()
    is_large = int(request.headers.get("content-length", "0")) > MAX_BODY_BYTES
    try:
        async with asyncio.timeout(BODY_S):
            while not is_large and (part := await anext(stream, None)) is not None:
                body += part
                is_large = len(body) > MAX_BODY_BYTES
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {BODY_S:g} s") from None
    if is_large:
        raise ApiError(413, f"the body must have at most {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _run_checked[T](function: Callable[..., T], *args: object) -> T:
    """Calls a function in a thread, since encoding a text may take long.

    Raises:
      ApiError: the request is invalid.
    """
    try:
        return await asyncio.to_thread(function, *args)
    except ValueError as error:
        raise api_error(error) from error


def _dumps(document: object) -> bytes:
    # ASCII: an error may quote half a surrogate pair, which UTF-8 cannot carry.
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def _json_response(document: object, status: int = 200) -> Response:
    return Response(_dumps(document), status, media_type="application/json")


def _error_response(service: HttpService, error: Exception) -> Response:
    answer = api_error(error)
    service.responses[answer.status] += 1
    response = _json_response(answer.document, answer.status)
    if answer.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    elif answer.status == 503:
        response.headers["retry-after"] = "1"
    elif answer.status in (500, 504):
        # OpenAI's client would repeat a request that took its whole deadline.
        response.headers["x-should-retry"] = "false"
    return response
