"""Client of disaggregated serving: starts the router's process and calls it.

Ray ends the processes of a cluster when its head node is lost, so the user's process
never joins the cluster: it is connected by a pipe to a child that does.
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxkv import files, validation
from jaxkv.disaggregation import choice, process
from jaxkv.disaggregation.choice import Choose
from jaxkv.disaggregation.config import RouterConfig
from jaxkv.disaggregation.process import HttpFront, Reply, RouterCall, Setup
from jaxkv.disaggregation.router import RoutedAnswer
from jaxkv.disaggregation.worker import WorkerSpec
from jaxkv.sampling import Sampling
from jaxkv.scheduling import RequestAttributes
from jaxkv.serving import MIN_COMPILE_TIME_S, Event, usable_folder

STOP_S = 20.0
"""Seconds within which the router's process must end."""


class ServiceLostError(ConnectionError):
    """The router's process has ended, possibly with the cluster's head."""


class Service:
    """Workers, their router, and the cluster, until `close`.

    Methods may be called from any thread, asynchronous ones from any event loop.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        specs: Sequence[WorkerSpec] = (),
        *,
        prefill: int = 1,
        decode: int = 1,
        engine: Mapping[str, object] | None = None,
        address: str | None = None,
        name: str | None = None,
        config: RouterConfig | None = None,
        choose: Choose = choice.prefix_affinity,
        http: HttpFront | None = None,
        model_name: str | None = None,
        wait: bool = True,
    ):
        """Starts the service and waits until the workers serve.

        Args:
          folder: Hugging Face folder of the model, or the name of a bundled one.
          specs: specification of each worker; empty makes `prefill` and `decode` equal
            ones.
          prefill: number of prefill workers if `specs` is empty; with 0, decode workers
            read the prompts.
          decode: number of decode workers if `specs` is empty.
          engine: arguments of `Engine.load` for these workers.
          address: "HOST:PORT" of a Ray cluster's head, whose token is in the
            environment as `RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH`; None starts a
            cluster on this machine, with a token of its own.
          name: name of the service; services of one name on one cluster share workers.
          config: timeouts and bounds of the router.
          choose: chooses a worker for each phase of a request.
          http: also serves OpenAI's API from the router's process.
          model_name: name of the model for HTTP clients; None takes the folder's.
          wait: False returns while the workers start, see `wait_until_ready`.

        Raises:
          ValueError: an extra is not installed, or a worker cannot start.
          ConnectionError: the cluster cannot be reached.
        """
        validation.check_installed("disaggregated serving", "ray", "ray")
        if http is not None:
            validation.check_installed("http", "serve", "fastapi", "uvicorn")
        from jaxkv.disaggregation import cluster

        token = None
        if address is None:
            token = secrets.token_hex(32)
        elif not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            raise ValueError(
                f"{address=} needs the cluster's token in RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH"
            )
        folder = files.model_folder(folder).resolve()
        if not specs:
            roles = ["prefill"] * prefill + ["decode"] * decode
            specs = [
                WorkerSpec(role=role, folder=str(folder), engine=dict(engine or {}))
                for role in roles
            ]
        # Paths of Ray's sockets must be short.
        short = "/tmp" if os.path.isdir("/tmp") else None
        self._scratch = tempfile.mkdtemp(prefix="jaxkv-", dir=short)
        setup = Setup(
            address=address,
            service=name or f"jaxkv-{secrets.token_hex(4)}",
            scratch=self._scratch,
            folder=str(folder),
            model_name=model_name or folder.name,
            specs=tuple(specs),
            config=RouterConfig() if config is None else config,
            choose=cluster.dumps(choose),
            http=http,
        )
        self._grace_s = 0.0 if http is None else http.grace_s
        self._sending = threading.Lock()
        self._is_over = False
        self._replies: dict[int, Callable[[Reply], None]] = {}
        self._numbers = itertools.count(1)
        self._connection, remote_end = Pipe()
        # Not `-m`: the classes of messages would be those of `__main__` there.
        code = f"from {process.__name__} import main; main({remote_end.fileno()})"
        command = [sys.executable, "-c", code]
        self._log = Path(self._scratch, "router.log")
        environment = os.environ | cluster.environment(token)
        cache = environment.get("JAX_COMPILATION_CACHE_DIR", "")
        if "://" not in cache and usable_folder(cache) is None:
            # A new worker reads the programs of the first one.
            environment |= {
                "JAX_COMPILATION_CACHE_DIR": f"{self._scratch}/programs",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(MIN_COMPILE_TIME_S),
            }
        with remote_end, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[remote_end.fileno(), *([] if http is None else http[:1])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only this process
            )
        self._started: concurrent.futures.Future[dict[str, str]] = (
            concurrent.futures.Future()
        )
        self._replies[0] = _resolve_future(self._started)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._send(setup)
            if wait:
                self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> dict[str, str]:
        """`head`, the address of the cluster's head, and `service`, its name."""
        return self._started.result()

    def wait_until_ready(self, limit_s: float | None = None) -> bool:
        """Waits until the workers serve; returns True if they do.

        Args:
          limit_s: largest wait in s; None waits as long as they start.

        Raises:
          ValueError: a worker cannot start.
          ConnectionError: the cluster cannot be reached.
        """
        if not concurrent.futures.wait([self._started], limit_s).done:
            return False
        self._started.result()
        return True

    def wait(self, limit_s: float | None = None) -> bool:
        """Waits for the router's process to end; returns True if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        """Process id of the router's process."""
        return self._process.pid

    def answer(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        key_id: int | None = None,
        attributes: RequestAttributes | None = None,
        deadline_s: float | None = None,
    ) -> "concurrent.futures.Future[RoutedAnswer]":
        """Starts to answer a prompt, see `Router.stream`.

        Cancelling the future cancels the request.

        Returns:
          A future; `asyncio.wrap_future` makes it awaitable.
        """
        fields = dict(key_id=key_id, attributes=attributes, deadline_s=deadline_s)
        return self._call("answer", prompt, sampling or Sampling(), fields=fields)

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        deadline_s: float | None = None,
    ) -> list[RoutedAnswer]:
        """Answers prompts and waits for all; the index of a prompt keys its samples."""
        futures = [
            self.answer(prompt, sampling, key_id=i, deadline_s=deadline_s)
            for i, prompt in enumerate(prompts)
        ]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        key_id: int | None = None,
        attributes: RequestAttributes | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[Event]:
        """Answers a prompt, event by event, see `Router.stream`."""
        loop = asyncio.get_running_loop()
        replies = asyncio.Queue[Reply]()

        def receive(reply: Reply) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(replies.put_nowait, reply)

        fields = dict(key_id=key_id, attributes=attributes, deadline_s=deadline_s)
        number = self._begin(
            receive, "stream", (prompt, sampling or Sampling()), fields
        )
        try:
            while (reply := await replies.get()).kind == "item":
                yield reply.value
            if reply.kind == "error":
                raise reply.value
        finally:
            self._forget(number)

    def events(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        key_id: int | None = None,
        attributes: RequestAttributes | None = None,
        deadline_s: float | None = None,
    ) -> Iterator[Event]:
        """Like `stream`, for code without an event loop."""
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        fields = dict(key_id=key_id, attributes=attributes, deadline_s=deadline_s)
        arguments = prompt, sampling or Sampling()
        number = self._begin(replies.put, "stream", arguments, fields)
        try:
            while (reply := replies.get()).kind == "item":
                yield reply.value
            if reply.kind == "error":
                raise reply.value
        finally:
            self._forget(number)

    def cancel(self, request_id: int) -> None:
        """Cancels a request by the `request_id` of its events."""
        self._call("cancel", request_id).result()

    def status(self) -> dict[str, Any]:
        """Returns the workers and counts, see `Router.status`."""
        return self._call("status").result()

    def add_worker(self, spec: WorkerSpec, *, wait: bool = True) -> str:
        """Starts a worker and returns its name; with `wait`, waits until it serves.

        Raises:
          ValueError: it cannot start.
        """
        name = self._call("add_worker", spec).result()
        if wait:
            self._call("wait_for", name).result()
        return name

    def remove_worker(self, name: str) -> None:
        """Ends a worker after its last request."""
        self._call("remove_worker", name).result()

    def restart_worker(self, name: str) -> str:
        """Replaces a worker by a new one without losing a request; returns its name."""
        return self._call("restart_worker", name).result()

    def close(self) -> None:
        """Ends requests, workers, router, and a cluster that was started here."""
        with contextlib.suppress(ServiceLostError):
            self._send(RouterCall(0, "close"))
        try:
            self._process.wait(STOP_S + self._grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._connection.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self,
        method: str,
        *args: object,
        fields: Mapping[str, object] = MappingProxyType({}),
    ) -> "concurrent.futures.Future[Any]":
        future: concurrent.futures.Future[object] = concurrent.futures.Future()
        number = self._begin(_resolve_future(future), method, args, fields)

        def forget(done: "concurrent.futures.Future[Any]") -> None:
            if done.cancelled():
                self._forget(number)

        future.add_done_callback(forget)
        return future

    def _begin(
        self,
        receive: Callable[[Reply], None],
        method: str,
        args: tuple[object, ...],
        fields: Mapping[str, object],
    ) -> int:
        """Sends a call; its replies go to `receive`, from another thread."""
        number = next(self._numbers)
        self._replies[number] = receive
        try:
            self._send(RouterCall(number, method, args, dict(fields)))
        except BaseException:
            self._replies.pop(number, None)
            raise
        return number

    def _forget(self, number: int) -> None:
        """Cancels a call unless its last reply has arrived."""
        if self._replies.pop(number, None) is not None:
            with contextlib.suppress(ServiceLostError):
                self._send(RouterCall(0, "cancel_call", (number,)))

    def _send(self, message: object) -> None:
        with self._sending:
            if self._is_over:
                raise ServiceLostError(self.end_reason())
            try:
                self._connection.send(message)
            except OSError:
                raise ServiceLostError(self.end_reason()) from None

    def _read(self) -> None:
        """Passes replies on until the router's process ends; then fails all calls."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                reply: Reply = self._connection.recv()
                if reply.kind == "item":
                    receive = self._replies.get(reply.number)
                else:
                    receive = self._replies.pop(reply.number, None)
                if receive is not None:
                    receive(reply)
        with self._sending:
            self._is_over = True
        for number in [*self._replies]:
            if (receive := self._replies.pop(number, None)) is not None:
                receive(Reply(number, "error", ServiceLostError(self.end_reason())))
        # Ends Ray's agents, which are in the same process group and would outlive a
        # lost head by 65 s. Not later, when the id may belong to another group.
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            self._process.wait(5)
            os.killpg(self._process.pid, signal.SIGKILL)

    def end_reason(self) -> str:
        """Describes how the router's process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
        last = f"; its last line: {lines[-1].strip()}" if lines else ""
        status = self._process.poll()
        return f"the router's process has ended with status {status}{last}"


def _resolve_future(
    future: "concurrent.futures.Future[Any]",
) -> Callable[[Reply], None]:
    """Returns a receiver that puts a reply into a future."""

    def receive(reply: Reply) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if reply.kind == "error":
            future.set_exception(reply.value)
        else:
            future.set_result(reply.value)

    return receive
