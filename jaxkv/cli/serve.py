"""Serves a model over HTTP with OpenAI's API: `jaxkv serve`.

The module imports only the standard library at the top, so that `--help` is fast.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import secrets
import socket
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from jaxkv import files, validation
from jaxkv.cli import generate, parsing
from jaxkv.cli.arguments import parse_model_options, value_of
from jaxkv.cli.console import exit_now, handle_signals, status_of
from jaxkv.cli.output import CommandOutput
from jaxkv.files import model_folder
from jaxkv.report import from_plain

if TYPE_CHECKING:
    from jaxkv.server import IncidentRecorder
    from jaxkv.serving import Engine

API_KEY = "JAXKV_API_KEY"
"""Environment variable with the key, used without `--api-key`."""
SIGNAL_POLL_S = 0.2
"""Largest delay of a signal by a wait for workers."""
_DEFAULT_LENGTH = 1024
_TRACED_STEPS = 5000
"""Steps that `--trace` keeps, as many as a page of the viewer shows."""
_SORTING_HEAD = 64
"""Waiting requests that a policy sees which may sort them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Address, and bounds of the engine."""

    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback, use a proxy with TLS."""
    port: int = 8000
    """Port; 0 takes a free one, which is printed."""
    api_key: Annotated[
        str | None, parsing.describe_default(f"${API_KEY}, or generated")
    ] = None
    """Key that clients send; at least 8 visible ASCII characters. Other users of the
    machine can see the command line, so the environment variable is safer."""
    name: Annotated[str | None, parsing.describe_default("that of MODEL")] = None
    """Model name for clients."""
    max_requests: int = 256
    """Largest number of prompts in progress, including queued ones; further requests
    get status 503."""
    deadline_s: float = 600.0
    """Time limit of a request without its own deadline, in s."""
    grace_s: float = 10.0
    """Seconds for requests in progress to end when the server is stopped."""
    max_length: Annotated[
        int | None, parsing.describe_default("1024, or the model's")
    ] = None
    """Largest number of tokens of a prompt and its answer."""
    max_slots: int = 8
    """Sequences that run concurrently."""
    num_pages: Annotated[
        int | None, parsing.describe_default("enough for all slots")
    ] = None
    """Pages of K and V, of 16 tokens each."""
    token_budget: int = 64
    """Largest number of tokens in a step, at least --max-slots."""
    steps_per_call: int = generate.STEPS_PER_CALL
    """Tokens per event of a stream; larger values increase throughput."""
    max_logprobs: int = 5
    """Largest number of alternatives per token with log-probabilities; 0 disables them,
    and the log-probabilities of prompts."""
    max_beams: int = 0
    """Widest beam search; 0 disables beam search."""
    max_grammars: int = 0
    """Largest number of different grammars of running requests, for response_format;
    0 refuses them. Needs the extra `grammar`."""
    max_stop_tokens: int = 16
    """Token ids that can end an answer, including those of the model."""
    policy: Annotated[str, parsing.describe_default("fcfs")] = ""
    """Scheduling policy: fcfs, vllm, vllm-0.19, prefill-first, static, ageing-priority,
    earliest-deadline, fair-share or shortest-remaining; FILE.py:NAME, a policy of a
    Python file; or FILE.json, weights of a linear score."""
    queue_head: Annotated[
        int | None, parsing.describe_default("64 if the policy may sort")
    ] = None
    """Largest number of waiting requests that the policy sees, at most 511."""
    prefix_cache: bool = True
    """Share the K and V of common prefixes between requests."""
    release_window_pages: bool = False
    """Free the K and V behind the sliding windows of a model."""
    seed: int = 0
    """Seed for requests without one."""
    decode: Annotated[
        int | None, parsing.describe_default("one engine, without Ray")
    ] = None
    """Number of Ray decode workers; needs the extra `ray`, like the next three
    options."""
    prefill: Annotated[int | None, parsing.describe_default("decode workers read")] = (
        None
    )
    """Number of Ray prefill workers."""
    address: Annotated[str | None, parsing.describe_default("a new cluster")] = None
    """HOST:PORT of a Ray cluster's head; its token is in $RAY_AUTH_TOKEN."""
    service: Annotated[str | None, parsing.describe_default("drawn")] = None
    """Name under which routers of one cluster share workers."""
    keep_incidents: Annotated[
        Path | None, parsing.describe_default("none are kept")
    ] = None
    """Folder for the state and the requests around each breach of an objective; needs
    one. `jaxkv replay` runs them again."""
    objective_ttft: Annotated[float | None, parsing.describe_default("none")] = None
    """Largest time to first token, in s."""
    objective_tpot: Annotated[float | None, parsing.describe_default("none")] = None
    """Largest time per output token after the first, in s."""
    keep_prompts: bool = False
    """Keep the tokens of prompts and answers in incidents; without them, the schedule
    can be replayed, but no text."""
    max_incidents: int = 8
    """Largest number of incidents; the oldest is deleted."""
    trace: Annotated[Path | None, parsing.describe_default("none")] = None
    """File for the last 5,000 steps, for jaxkv view; written at the end. It has the
    texts of the requests."""
    config: Annotated[Path | None, parsing.describe_default("none")] = None
    """JSON object of these options to start from, such as {"decode": 2}."""
    loading: Annotated[generate.ModelOptions, parsing.UNNAMED] = dataclasses.field(
        default_factory=generate.ModelOptions
    )


def read_options(path: Path | str) -> ServeOptions:
    """Reads the options of a `--config` file; missing ones keep their defaults.

    Raises:
      ValueError: the file cannot be read, or an option or its value is invalid.
    """
    fields = files.parse_object(files.read_text(path), path)
    names = {field.name for field in dataclasses.fields(generate.ModelOptions)}
    loading = {name: value for name, value in fields.items() if name in names}
    server_fields = {name: value for name, value in fields.items() if name not in names}
    if "loading" in server_fields or "config" in server_fields:
        name = "loading" if "loading" in server_fields else "config"
        raise ValueError(f"{path}: {name!r} is not an option of a config file")
    document = server_fields | {"loading": loading}
    return from_plain(ServeOptions, document, str(path))


def main(args: list[str], documents: TextIO | None = None) -> CommandOutput:
    """Runs `serve MODEL [OPTIONS]`.

    Args:
      args: arguments after the command.
      documents: stream for the JSON document, which is written before the command
        ends; None prints lines.
    """
    file = value_of(args, "--config")
    base = None if file is None else read_options(file)
    request = parse_model_options(args, ServeOptions, "jaxkv serve MODEL", base)
    return serve_model(*request, documents)


def serve_model(
    model: str, options: ServeOptions, documents: TextIO | None = None
) -> CommandOutput:
    """Serves a model until Ctrl-C or SIGTERM.

    Args:
      model: folder, or name of a bundled model.
      options: address, and bounds of the engine.
      documents: stream for a line of JSON as soon as requests are accepted; None prints
        text to standard output.

    Returns:
      An output without a document; the status is 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
      ValueError: the model, an option, or the address cannot be used.
    """
    names = ("decode", "prefill", "address", "service")
    is_disaggregated = any(getattr(options, name) is not None for name in names)
    if is_disaggregated:
        validation.check_installed("disaggregated serving", "ray", "ray")
    validation.check_installed("jaxkv serve", "serve", "fastapi", "uvicorn")
    from jaxkv import server
    from jaxkv.sampling import Sampling
    from jaxkv.scheduling import find_eviction, find_policy
    from jaxkv.server import SWITCH_S, AsyncEngine

    api_key = options.api_key
    api_key = os.environ.get(API_KEY) if api_key is None else api_key
    if api_key is not None and (
        len(api_key) < 8 or not all("!" <= x <= "~" for x in api_key)
    ):
        raise ValueError("--api-key must have at least 8 characters, all visible ASCII")
    key = secrets.token_urlsafe(24) if api_key is None else api_key
    shown_key = key if api_key is None else None
    generate.check_drafting(options.loading)
    check_incident_options(options, is_disaggregated)
    if is_disaggregated:
        if options.max_grammars:
            raise ValueError(
                f"--max-grammars {options.max_grammars}: is not supported with "
                "--decode and --prefill"
            )
        if options.loading.lora:
            raise ValueError("--lora: is not supported with --decode and --prefill")
        if options.trace is not None:
            raise ValueError("--trace: is not supported with --decode and --prefill")
        if options.policy:
            raise ValueError(
                f"--policy {options.policy}: workers of disaggregated serving have "
                "fcfs only"
            )
        return _serve_workers(model, options, key, shown_key, documents)
    # Before the model is read, since a file of a policy is often wrong.
    name = options.policy or "fcfs"
    rules = {"policy": find_policy(name), "eviction": find_eviction(name)}
    read = generate.read_model(model, options.loading)
    longest = read.loaded.config.max_positions
    _check(options, longest)
    with contextlib.closing(server.listen(options.host, options.port)) as listener:
        bounds = _bounds(options, longest, read.page_size)
        engine = generate.load_engine(read, options.loading, **rules, **bounds)
        # Compiles all programs before the first request.
        engine.generate([[0]], Sampling.greedy(max_tokens=1, ignore_eos=True))
        engine.trace.clear()
        engine.trace.max_steps = _TRACED_STEPS
        recorder = None
        if options.keep_incidents is not None:
            recorder = make_recorder(engine, read, options, bounds)
        # From here on the event loop and the engine share the interpreter.
        sys.setswitchinterval(SWITCH_S)
        name = options.name or Path(model).name
        if name in engine.adapters:
            raise ValueError(f"--lora {name}=...: is the name of the model")
        with AsyncEngine(engine, model_name=name, recorder=recorder) as backend:
            output = serve_backend(
                backend, listener, options, shown_key, key, documents
            )
        if options.trace is not None:
            _save_trace(engine, options.trace)
        return output


def _save_trace(engine: "Engine", path: Path) -> None:
    """Writes the file of `--trace`, unless no request has run."""
    from jaxkv.report import RunTrace

    if any((info.request_id >= 0).any() for info in engine.trace):
        RunTrace.of_engine(engine).save(path)
    else:
        print("[no request has run; no trace is written]", file=sys.stderr)


def check_incident_options(options: ServeOptions, is_disaggregated: bool) -> None:
    """Validates the options of incidents.

    Raises:
      ValueError: incidents have no objective, an objective or --keep-prompts has no
        incidents, a number is out of range, or the engine's incidents are not
        supported.
    """
    objectives = "objective_ttft", "objective_tpot"
    for name in objectives:
        parsing.refuse_outside(options, name, "above 0 and below 1e6", 1e-9, 1e6)
    if not 1 <= options.max_incidents <= 1_000_000:
        raise ValueError(
            f"--max-incidents {options.max_incidents}: must be in [1, 1000000]"
        )
    if options.keep_incidents is None:
        for name in (*objectives, "keep_prompts"):
            if getattr(options, name):
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag}: needs --keep-incidents DIR")
        return
    flag = f"--keep-incidents {options.keep_incidents}"
    if all(getattr(options, name) is None for name in objectives):
        raise ValueError(f"{flag}: needs --objective-ttft S or --objective-tpot S")
    if is_disaggregated:
        raise ValueError(f"{flag}: is not supported with --decode and --prefill")
    for name in ("parallel", "lora"):
        if getattr(options.loading, name):
            raise ValueError(f"{flag}: is not supported with --{name}")
    if options.max_grammars:
        raise ValueError(f"{flag}: is not supported with --max-grammars")
    if not options.keep_prompts and (options.loading.speculate or options.max_beams):
        raise ValueError(
            f"{flag}: needs --keep-prompts with --speculate or --max-beams, since the "
            "tokens of drafts and beams cannot be masked"
        )


def make_recorder(
    engine: "Engine",
    read: generate.ReadModel,
    options: ServeOptions,
    bounds: dict[str, object],
) -> "IncidentRecorder":
    """Makes the recorder of --keep-incidents.

    Args:
      engine: the engine, without requests.
      read: its model.
      options: options of the command, with `keep_incidents`.
      bounds: bounds by which the engine was made.
    """
    from jaxkv.files import bundled_models
    from jaxkv.report import to_plain
    from jaxkv.server import (
        IncidentObjectives,
        IncidentRecorder,
        ModelOrigin,
        model_digests,
    )

    assert options.keep_incidents is not None
    is_path = read.name not in bundled_models() or Path(read.name).is_dir()
    return IncidentRecorder(
        engine,
        options.keep_incidents,
        IncidentObjectives(options.objective_ttft, options.objective_tpot),
        ModelOrigin(
            model=str(read.folder.resolve()) if is_path else read.name,
            digests=model_digests(read.folder),
            loading=to_plain(options.loading),
            bounds=to_plain(bounds),
            policy=options.policy or "fcfs",
        ),
        keep_prompts=options.keep_prompts,
        max_incidents=options.max_incidents,
    )


def _serve_workers(
    model: str,
    options: ServeOptions,
    key: str,
    shown_key: str | None,
    documents: TextIO | None,
) -> CommandOutput:
    """Serves a model by workers of a Ray cluster, see `serve_model`."""
    from jaxkv import server
    from jaxkv.disaggregation import HttpFront, Service, WorkerSpec
    from jaxkv.models import read_config
    from jaxkv.server import url_of

    folder = model_folder(model).resolve()
    longest = read_config(folder).max_positions
    _check(options, longest)
    # Without --decode and --prefill, a router is added to the workers of --service.
    is_second = options.decode is None and options.prefill is None
    counts = {"prefill": options.prefill or 0, "decode": options.decode or 0}
    if not is_second and counts["decode"] < 1:
        raise ValueError(f"--decode {options.decode}: must be at least 1")
    if counts["prefill"] < 0:
        raise ValueError(f"--prefill {options.prefill}: must be at least 0")
    if is_second and (options.address is None or options.service is None):
        raise ValueError(
            "without --decode, --address and --service must name the workers of "
            "another process"
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
    with contextlib.closing(server.listen(options.host, options.port)) as listener:
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
                wait=False,
            ) as service:
                # Each wait is short, since a signal is only recorded.
                while not signals and not service.wait_until_ready(SIGNAL_POLL_S):
                    pass
                if not signals:
                    fields: dict[str, Any] = {"model": name, **service.info}
                    lines = [f"cluster: {fields['head']}, service: {fields['service']}"]
                    if documents is not None:
                        workers = service.status()["workers"]
                        fields |= {"router_pid": service.pid, "workers": workers}
                    _announce(url_of(listener), fields, lines, shown_key, documents)
                while not signals and not service.wait(SIGNAL_POLL_S):
                    pass
                if not signals:
                    raise ConnectionError(service.end_reason())
    return CommandOutput({}, [], [], status_of(signals[0]))


def _announce(
    url: str,
    fields: dict[str, Any],
    lines: list[str],
    shown_key: str | None,
    documents: TextIO | None,
) -> None:
    """Prints the address of the server, as JSON or as text."""
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
    """Collects signal numbers; a second signal ends the process at once.

    Args:
      call: called after the first signal, in another thread.
    """
    heard: list[int] = []

    def hear(number: int) -> None:
        if heard:
            exit_now(status=status_of(number))
        heard.append(number)
        call()

    with handle_signals(lambda number, frame: None, hear):
        yield heard


def serve_backend(
    backend: Any,
    listener: socket.socket,
    options: ServeOptions,
    shown_key: str | None,
    key: str,
    documents: TextIO | None,
) -> CommandOutput:
    """Serves a backend on a socket until a signal; closes both afterwards.

    Args:
      backend: `jaxkv.server.Backend` with a `close`.
      listener: listening socket.
      options: options with `max_requests`, `deadline_s` and `grace_s`.
      shown_key: key to print, if any.
      key: key that clients send.
      documents: as in `serve_model`.

    Returns:
      An output without a document, with the status of the signal.
    """
    from jaxkv import server
    from jaxkv.server import HttpService, make_app, url_of

    service = HttpService(
        backend,
        api_key=key,
        max_requests=options.max_requests,
        deadline_s=options.deadline_s,
    )
    url = url_of(listener)

    async def serve_app() -> list[int]:
        loop = asyncio.get_running_loop()
        stop_requested = asyncio.Event()

        async def stop() -> None:
            await stop_requested.wait()
            await service.stop(options.grace_s)
            # Remaining requests end with an error.
            await asyncio.to_thread(backend.close)

        def on_ready() -> None:
            fields = {"model": backend.model_name}
            _announce(url, fields, [], shown_key, documents)

        with _signals(lambda: loop.call_soon_threadsafe(stop_requested.set)) as signals:
            await server.serve(make_app(service), listener, stop, on_ready)
        return signals

    signals = asyncio.run(serve_app())
    counts = {name: x for name, x in service.counters.items() if "{" not in name}
    num = counts.get("requests_total", 0)
    tokens = counts.get("completion_tokens_total", 0)
    print(f"[{num:,.0f} requests, {tokens:,.0f} tokens]", file=sys.stderr)
    status = status_of(signals[0]) if signals else 1
    return CommandOutput({}, [], [], status)


def _check(options: ServeOptions, longest: int) -> None:
    """Validates ranges of options; the engine validates its own fields."""
    for name, low, high in (
        ("port", 0, 65535),
        ("grace_s", 0, 86400),
        ("deadline_s", 0.001, 86400),
        ("max_requests", 1, 1_000_000),
        ("max_length", 2, longest),
        ("max_slots", 1, 1_000_000),
        ("num_pages", 1, 2**31 - 1),
        ("queue_head", 1, 511),
    ):
        value = getattr(options, name)
        flag = "--" + name.replace("_", "-")
        if value is not None and not low <= value <= high:
            raise ValueError(f"{flag} {value}: must be in [{low}, {high}]")


def _bounds(options: ServeOptions, longest: int, page_size: int) -> dict[str, object]:
    """Returns the bounds of the engine."""
    max_length = options.max_length
    if max_length is None:
        max_length = min(_DEFAULT_LENGTH, longest)
    slots = options.max_slots
    num_pages = options.num_pages
    if num_pages is None:
        num_pages = slots * -(-max_length // page_size)
    # Rows with logits for the log-probabilities of prompts.
    rows = slots + options.token_budget if options.max_logprobs else 0
    head = options.queue_head
    if head is None:
        from jaxkv.scheduling import IN_ORDER_NAMES

        sorts = options.policy not in ("", *IN_ORDER_NAMES)
        head = _SORTING_HEAD if sorts else 0
    names = ("token_budget", "steps_per_call", "max_logprobs", "max_beams")
    names += ("max_stop_tokens", "prefix_cache", "release_window_pages", "seed")
    names += ("max_grammars",)
    return {name: getattr(options, name) for name in names} | {
        "max_length": max_length,
        "max_slots": slots,
        "num_pages": num_pages,
        "max_logit_rows": rows,
        "queue_head": head,
        "record_pages": options.trace is not None,
    }
