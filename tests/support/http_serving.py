"""An application on a loopback port, a backend that follows a script, and a client."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any, NamedTuple

from jaxkv import server
from jaxkv.sampling import Sampling
from jaxkv.scheduling import StallError
from jaxkv.server import HttpService, make_app
from jaxkv.serving import Completion, Event, FinishedAnswer
from jaxkv.text import ByteTokenizer

KEY = "a-secret-key"


class Scripted:
    """A backend that answers with the prompt, each letter replaced by the next one.

    A prompt that begins with "wait" gets one token and then waits until `go`; one with
    "fail" a failure after one token; one with "nan" an answer that broke down; one with
    "stall" is never served. Sample i repeats its first letter i times.
    """

    model_name = "scripted"
    adapters = ("formal",)
    max_length = 64

    def __init__(self) -> None:
        self.tokenizer: Any = ByteTokenizer(257)
        self.tokenizer.settings["chat_template"] = (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
            "{% for call in m.tool_calls %}"
            "<tool_call>{{ call.function | tojson }}</tool_call>"
            "{% endfor %}{% endfor %}"
            "{% if tools %}{{ tools[0].function.name }}{% endif %}"
        )
        self.running = 0
        self.asked: list[tuple[Sequence[int], Sampling, float | None]] = []
        self.attributes: list[Any] = []
        self.go = threading.Event()

    def status(self) -> dict[str, Any]:
        return {"is_ready": True, "running": self.running}

    async def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        key_id: int | None = None,
        attributes: Any = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Event]:
        del key_id
        assert not isinstance(prompt, str)
        self.asked.append((prompt, sampling, deadline_s))
        self.attributes.append(attributes)
        if 256 in prompt:
            raise ValueError("token id 256 must be in [0, 256)")
        text = self.tokenizer.decode(prompt)
        if text.startswith("stall"):
            raise StallError("policy Moody made no progress")
        self.running += 1
        try:
            answers = [self._answer(prompt, sampling, i) for i in range(sampling.n)]
            begun = time.monotonic()
            for sample, answer in enumerate(answers):
                for i, token in enumerate(answer.tokens):
                    piece = self.tokenizer.decode([token])
                    yield Event(0, [token], piece, None, sample)
                    if text.startswith("fail") and i == 0:
                        raise RuntimeError("the backend is broken")
                    while text.startswith("wait") and not self.go.is_set():
                        if deadline_s and time.monotonic() - begun > deadline_s:
                            raise TimeoutError(f"{deadline_s=} passed")
                        await asyncio.sleep(0.005)
            yield Event(0, [], "", self._completion(prompt, sampling, answers))
        finally:
            self.running -= 1

    def _answer(
        self, prompt: Sequence[int], sampling: Sampling, sample: int
    ) -> FinishedAnswer:
        tokens = [prompt[0] + 1] * sample + [x + 1 for x in prompt]
        is_whole = len(tokens) <= sampling.max_tokens
        tokens = tokens[: sampling.max_tokens]
        reason = "stop" if is_whole else "length"
        if self.tokenizer.decode(prompt).startswith("nan"):
            reason = "nan"
        scores = [-0.25 - 0.5 * i for i in range(len(tokens))]
        num = sampling.logprobs
        return FinishedAnswer(
            tokens=tokens,
            text=self.tokenizer.decode(tokens),
            reason=reason,
            sample=sample,
            score=None,
            logprobs=None if num is None else scores,
            top_logprobs=[
                _best(*pair, num) for pair in zip(tokens, scores, strict=True)
            ]
            if num
            else None,
        )

    def _completion(
        self, prompt: Sequence[int], sampling: Sampling, answers: list[FinishedAnswer]
    ) -> Completion:
        prompt_scores = None
        tops = None
        num = sampling.logprobs
        if sampling.prompt_logprobs:
            scores = [-0.5 * i for i in range(1, len(prompt))]
            prompt_scores = [None, *scores]
            if num:
                pairs = zip(prompt[1:], scores, strict=True)
                tops = [None, *[_best(*pair, num) for pair in pairs]]
        fields: dict[str, Any] = dict.fromkeys(Completion._fields, 0)
        fields |= {"answers": answers, "num_cached": 2}
        fields |= {"prompt_logprobs": prompt_scores, "prompt_top_logprobs": tops}
        return Completion(**fields)


def _best(token: int, logprob: float, num: int) -> dict[int, float]:
    """Returns the token and further ones as alternatives."""
    return {token + i: logprob - i for i in range(num)}


class Serving(NamedTuple):
    """An application that runs in a thread."""

    service: HttpService
    port: int
    stop: Callable[[], None]
    """Stops the server, and waits for its end."""

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        key: str | None = KEY,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Returns status and body of a response; the request is JSON unless bytes."""
        headers = dict(headers or {})
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        with contextlib.closing(self.connect()) as connection:
            method = "GET" if body is None else "POST"
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def completion(self, **fields: Any) -> dict[str, Any]:
        status, body = self.ask("/v1/completions", fields)
        assert status == 200, body
        return json.loads(body)

    def error(self, path: str, fields: Any, **more: Any) -> tuple[int, dict[str, Any]]:
        status, body = self.ask(path, fields, **more)
        assert status >= 400, body
        return status, json.loads(body)["error"]

    def chunks(self, path: str, **fields: Any) -> list[Any]:
        """Returns the documents of a stream; the last is [DONE] or an error."""
        status, body = self.ask(path, fields | {"stream": True})
        assert status == 200, body
        lines = [x.removeprefix("data: ") for x in body.decode().split("\n\n") if x]
        return [x if x == "[DONE]" else json.loads(x) for x in lines]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.005)


@contextlib.contextmanager
def serving(
    backend: Any, *, api_key: str | None = KEY, **fields: Any
) -> Generator[Serving]:
    """Serves a backend on a free port of loopback."""
    service = HttpService(backend, api_key=api_key, **fields)
    taken = server.listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    ready = threading.Event()
    failures = []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        loops.append((asyncio.get_running_loop(), over := asyncio.Event()))

        async def wait() -> None:
            await over.wait()
            await service.stop(0.5)

        await server.serve(make_app(service), taken, wait, ready.set)

    def run_all() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failures.append(error)
        finally:
            ready.set()

    def stop() -> None:
        loop, over = loops[0]
        with contextlib.suppress(RuntimeError):  # stopped before
            loop.call_soon_threadsafe(over.set)
        thread.join()
        assert not failures, failures

    thread = threading.Thread(target=run_all)
    thread.start()
    assert ready.wait(20)
    try:
        yield Serving(service, port, stop)
    finally:
        stop()
