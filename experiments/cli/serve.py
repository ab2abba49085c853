"""Serves a model over HTTP, by OpenAI's API: `jaxkv serve`.

Only the standard library is imported up here: `--help` needs the options alone.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Any, TextIO

from experiments.cli import generate, parsing
from experiments.cli.console import interrupts
from experiments.cli.run import CommandOutput
from experiments.framework import config_json
from experiments.harness import bundled
from jaxkv import files, validation

API_KEY = "JAXKV_API_KEY"
"""The environment variable with the key, where `--api-key` is not given."""
_DEFAULT_LENGTH = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where to listen, and the bounds of the engine."""

    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback, put a proxy with TLS in front."""
    port: int = 8000
    """0 takes a free one, which is printed."""
    api_key: Annotated[
        str | None, parsing.describe_default(f"${API_KEY}, or generated")
    ] = None
    """Token that clients send; at least 8 visible ASCII characters. Other users of the
    machine see the command line: the environment variable is the better place."""
    name: Annotated[str | None, parsing.describe_default("that of MODEL")] = None
    """Name of the model for clients."""
    max_requests: int = 256
    """Prompts in progress, queued ones included; more are refused with status 503."""
    deadline_s: float = 600.0
    """Seconds that a request may take, unless it has a deadline of its own."""
    grace_s: float = 10.0
    """Seconds that requests in progress have to end when the server is stopped."""
    max_length: Annotated[
        int | None, parsing.describe_default("1024, or the model's")
    ] = None
    """Tokens of a prompt and its answer."""
    max_slots: int = 8
    """Sequences that run at once."""
    num_pages: Annotated[
        int | None, parsing.describe_default("enough for all slots")
    ] = None
    """Pages of K and V, of 16 tokens each."""
    token_budget: int = 64
    """Tokens that a step reads at most, at least --max-slots."""
    steps_per_call: int = generate.STEPS_PER_CALL
    """Tokens that a stream gets at a time; more of them are served faster."""
    max_logprobs: int = 5
    """Alternatives that a request may ask for with each token; 0 leaves them out, and
    the log-probabilities of prompts."""
    max_beams: int = 0
    """Widest beam search; 0 leaves it out."""
    max_stop_tokens: int = 16
    """Token ids that can end an answer, the model's own included."""
    prefix_cache: bool = True
    """Whether requests share the K and V of the tokens that they begin with."""
    seed: int = 0
    """Of the draws of requests that bring no seed."""
    decode: Annotated[
        int | None, parsing.describe_default("one engine, without Ray")
    ] = None
    """Ray workers that answer; needs the extra `ray`, like the next three."""
    prefill: Annotated[int | None, parsing.describe_default("decode workers read")] = (
        None
    )
    """Ray workers that read prompts for those that answer."""
    address: Annotated[str | None, parsing.describe_default("a cluster of its own")] = (
        None
    )
    """HOST:PORT of a Ray cluster's head; its token is in $RAY_AUTH_TOKEN."""
    service: Annotated[str | None, parsing.describe_default("drawn")] = None
    """Name under which routers of one cluster share workers."""
    config: Annotated[Path | None, parsing.describe_default("none")] = None
    """A JSON object of these options to start from, such as {"decode": 2}."""
    loading: Annotated[generate.ModelOptions, parsing.GROUP] = dataclasses.field(
        default_factory=generate.ModelOptions
    )


def read_options(path: Path | str) -> ServeOptions:
    """Reads the options of a `--config` file; those left out keep their defaults.

    Raises:
      ValueError: the file cannot be read, or an option or its value is wrong.
    """
    given = files.parse_object(files.read_text(path), path)
    names = {field.name for field in dataclasses.fields(generate.ModelOptions)}
    loading = {name: value for name, value in given.items() if name in names}
    own = {name: value for name, value in given.items() if name not in names}
    if "loading" in own or "config" in own:
        name = "loading" if "loading" in own else "config"
        raise ValueError(f"{path}: {name!r} is no option of a file")
    document = own | {"loading": loading}
    return config_json.from_plain(ServeOptions, document, str(path))


def serve_model(
    model: str, options: ServeOptions, documents: TextIO | None = None
) -> CommandOutput:
    """Serves a model until Ctrl-C or SIGTERM.

    Args:
      model: a folder, or the name of a bundled model.
      options: where to listen, and the bounds of the engine.
      documents: receives a line of JSON once requests are answered; None prints the
        same for a person.

    Returns:
      An output without a document; the status is 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
      ValueError: the model, an option, or the address cannot be used.
    """
    names = ("decode", "prefill", "address", "service")
    is_disaggregated = any(getattr(options, name) is not None for name in names)
    if is_disaggregated:
        validation.installed("disaggregated serving", "ray", "ray")
    validation.installed("jaxkv serve", "serve", "fastapi", "uvicorn")
    from jaxkv.sampling import Sampling
    from jaxkv.server import SWITCH_S, AsyncEngine, http_server

    given = options.api_key
    given = os.environ.get(API_KEY) if given is None else given
    if given is not None and (
        len(given) < 8 or not all("!" <= x <= "~" for x in given)
    ):
        raise ValueError("--api-key must have at least 8 characters, all visible ASCII")
    key = secrets.token_urlsafe(24) if given is None else given
    shown_key = key if given is None else None
    generate.check_drafting(options.loading)
    if is_disaggregated:
        return _serve_workers(model, options, key, shown_key, documents)
    read = generate.read_model(model, options.loading)
    longest = read.loaded.config.max_positions
    _check(options, longest)
    with contextlib.closing(http_server.listen(options.host, options.port)) as listener:
        bounds = _bounds(options, longest, read.page_size)
        engine = generate.load_engine(read, options.loading, **bounds)
        # Compiles all programs, before anyone waits.
        engine.generate([[0]], Sampling.greedy(max_tokens=1, ignore_eos=True))
        # From here on the event loop and the engine take turns.
        sys.setswitchinterval(SWITCH_S)
        name = options.name or Path(model).name
        with AsyncEngine(engine, model_name=name) as backend:
            return serve_backend(backend, listener, options, shown_key, key, documents)


def _serve_workers(
    model: str,
    options: ServeOptions,
    key: str,
    shown_key: str | None,
    documents: TextIO | None,
) -> CommandOutput:
    """Serves a model by workers of a Ray cluster, see `serve`."""
    from jaxkv.disaggregation import HttpFront, Service, WorkerSpec
    from jaxkv.models import checkpoints
    from jaxkv.server import http_server

    folder = bundled.find_model_folder(model).resolve()
    longest = checkpoints.read_config(folder).max_positions
    _check(options, longest)
    # Alone, `--address` adds a router to the workers of `--service`.
    is_second = options.decode is None and options.prefill is None
    counts = {"prefill": options.prefill or 0, "decode": options.decode or 0}
    if not is_second and counts["decode"] < 1:
        raise ValueError(f"--decode {options.decode}: must be at least 1")
    if counts["prefill"] < 0:
        raise ValueError(f"--prefill {options.prefill}: must be at least 0")
    if is_second and (options.address is None or options.service is None):
        raise ValueError(
            "without --decode, workers of another process are shared: give --address "
            "and --service"
        )
    degrees = generate.mesh_degrees(options.loading.parallel)
    page_size = generate.PAGE_SIZE * degrees["context"]
    engine = generate.speculation_fields(model, options.loading)
    engine |= _bounds(options, longest, page_size) | {"page_size": page_size}
    engine = {
        name: str(x) if isinstance(x, Path) else x
        for name, x in engine.items()
        if x is not None
    }
    mesh = degrees if math.prod(degrees.values()) > 1 else {}
    specs = [
        WorkerSpec(role=role, folder=str(folder), engine=engine, mesh=mesh)
        for role, num in counts.items()
        for _ in range(num)
    ]
    name = options.name or Path(model).name
    with contextlib.closing(http_server.listen(options.host, options.port)) as listener:
        front = HttpFront(
            descriptor=listener.fileno(),
            api_key=key,
            max_requests=options.max_requests,
            deadline_s=options.deadline_s,
            grace_s=options.grace_s,
        )
        listener.set_inheritable(True)
        with _signals() as signals:
            with Service(
                folder,
                specs,
                prefill=0,
                decode=0,
                address=options.address,
                name=options.service,
                http=front,
                model_name=name,
            ) as service:
                fields: dict[str, Any] = {"model": name, **service.info}
                lines = [f"cluster: {fields['head']}, service: {fields['service']}"]
                if documents is not None:
                    workers = service.status()["workers"]
                    fields |= {"router_pid": service.pid, "workers": workers}
                url = http_server.url_of(listener)
                _announce(url, fields, lines, shown_key, documents)
                while not signals and not service.wait(0.2):
                    pass
                if not signals:
                    raise ConnectionError(service.end_reason())
    return CommandOutput({}, [], [], interrupts.status_of(signals[0]))


def _announce(
    url: str,
    fields: dict[str, Any],
    lines: list[str],
    shown_key: str | None,
    documents: TextIO | None,
) -> None:
    """Prints where a model is served: fields as JSON, or lines for a person."""
    if documents is not None:
        fields = {"url": url, "model": fields["model"], "pid": os.getpid()} | fields
        shown = {} if shown_key is None else {"api_key": shown_key}
        print(json.dumps(fields | shown), file=documents, flush=True)
        return
    lines = [f"serving {fields['model']} at {url}/v1", *lines]
    lines += [] if shown_key is None else [f"api key: {shown_key}"]
    print("\n".join(lines), flush=True)


@contextlib.contextmanager
def _signals(call: Callable[[], object] = bool) -> Generator[list[int]]:
    """Collects the numbers of signals; a second one ends the process at once.

    Args:
      call: called after the first, in another thread.
    """
    heard: list[int] = []

    def hear(number: int) -> None:
        if heard:
            interrupts.exit_now(status=interrupts.status_of(number))
        heard.append(number)
        call()

    with interrupts.handle_signals(lambda number, frame: None, hear):
        yield heard


def serve_backend(
    backend: Any,
    listener: Any,
    options: Any,
    shown_key: str | None,
    key: str,
    documents: TextIO | None,
) -> CommandOutput:
    """Serves a backend on a socket until a signal; closes neither before it.

    Args:
      backend: a `jaxkv.server.Backend` with a `close`.
      taken: the socket.
      options: with `max_requests`, `deadline_s` and `grace_s`.
      shown_key: the key, if it is to be printed.
      key: the token that clients send.
      documents: as in `serve`.

    Returns:
      An output without a document, with the status of the signal.
    """
    from jaxkv.server import app, http_server

    service = app.Service(
        backend,
        api_key=key,
        max_requests=options.max_requests,
        deadline_s=options.deadline_s,
    )
    url = http_server.url_of(listener)

    async def serve_app() -> list[int]:
        loop, stop_requested = asyncio.get_running_loop(), asyncio.Event()

        async def stop() -> None:
            await stop_requested.wait()
            await service.stop(options.grace_s)
            # What is left gets one clear error.
            await asyncio.to_thread(backend.close)

        def on_ready() -> None:
            fields = {"model": backend.model_name}
            _announce(url, fields, [], shown_key, documents)

        with _signals(lambda: loop.call_soon_threadsafe(stop_requested.set)) as signals:
            await http_server.serve(app.make_app(service), listener, stop, on_ready)
        return signals

    signals = asyncio.run(serve_app())
    counts = {name: x for name, x in service.counters.items() if "{" not in name}
    num = counts.get("requests_total", 0)
    tokens = counts.get("completion_tokens_total", 0)
    print(f"[{num:,.0f} requests, {tokens:,.0f} tokens]", file=sys.stderr)
    status = interrupts.status_of(signals[0]) if signals else 1
    return CommandOutput({}, [], [], status)


def _check(options: ServeOptions, longest: int) -> None:
    """Refuses options that are out of their ranges; the engine checks its own."""
    for name, low, high in (
        ("port", 0, 65535),
        ("grace_s", 0, 86400),
        ("deadline_s", 0.001, 86400),
        ("max_requests", 1, 1_000_000),
        ("max_length", 2, longest),
        ("max_slots", 1, 1_000_000),
        ("num_pages", 1, 2**31 - 1),
    ):
        value, flag = getattr(options, name), "--" + name.replace("_", "-")
        if value is not None and not low <= value <= high:
            raise ValueError(f"{flag} {value}: must be in [{low}, {high}]")


def _bounds(options: ServeOptions, longest: int, page_size: int) -> dict[str, Any]:
    """The engine's bounds."""
    max_length = options.max_length
    if max_length is None:
        max_length = min(_DEFAULT_LENGTH, longest)
    slots, num_pages = options.max_slots, options.num_pages
    if num_pages is None:
        num_pages = slots * -(-max_length // page_size)
    # Rows with logits for the log-probabilities of prompts.
    rows = slots + options.token_budget if options.max_logprobs else 0
    names = ("token_budget", "steps_per_call", "max_logprobs", "max_beams")
    names += ("max_stop_tokens", "prefix_cache", "seed")
    return {name: getattr(options, name) for name in names} | {
        "max_length": max_length,
        "max_slots": slots,
        "num_pages": num_pages,
        "max_logit_rows": rows,
    }
