"""The router's process: joins or starts the cluster, and runs the router of a service.

A pipe connects it to the process that started it. When the pipe closes, since that
process has ended, everything that was started here ends.
"""

import asyncio
import contextlib
import functools
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv.disaggregation.config import RouterConfig
from jaxkv.disaggregation.router import Router
from jaxkv.disaggregation.worker import WorkerSpec
from jaxkv.models import load_tokenizer
from jaxkv.server import SWITCH_S


class HttpFront(NamedTuple):
    """HTTP in the router's process, see `jaxkv.server`; needs the extra `serve`."""

    descriptor: int
    """File descriptor of a socket from `http_server.listen`, inherited by the
    process."""
    api_key: str
    max_requests: int = 256
    """Bound on prompts in progress; further ones get status 503."""
    deadline_s: float = 600.0
    """Time limit in s of a request without its own."""
    grace_s: float = 10.0
    """Seconds within which requests in progress may complete when the service is
    closed."""


class Setup(NamedTuple):
    """First message of the pipe."""

    address: str | None
    """Address of the cluster's head; None starts a cluster in this process."""
    service: str
    scratch: str
    """Folder for Ray's sockets and logs, removed at the end."""
    folder: str
    model_name: str
    specs: tuple[WorkerSpec, ...]
    config: RouterConfig
    choose: bytes
    """A `choice.Choose`, pickled."""
    http: HttpFront | None


class RouterCall(NamedTuple):
    """Message from the service: a call of a router's method."""

    number: int
    method: str
    """"cancel_call" cancels the call with number `args[0]`."""
    args: tuple[object, ...] = ()
    fields: dict[str, object] = {}  # noqa: RUF012


class Reply(NamedTuple):
    """A message to the service."""

    number: int
    """Number of the call; 0 for the setup."""
    kind: str
    """"item" of a stream, "result", or "error"."""
    value: Any


ROUTER_METHODS = (
    "answer",
    "stream",
    "cancel",
    "status",
    "add_worker",
    "wait_for",
    "remove_worker",
    "restart_worker",
)


class _Dispatcher:
    """Carries out calls and sends their replies."""

    def __init__(self, connection: Connection, router: Router):
        self._connection = connection
        self._router = router
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def send(self, reply: Reply) -> None:
        """Sends a reply; the service reads all the time, so this hardly waits."""
        with contextlib.suppress(OSError):  # the service has ended: so will this
            self._connection.send(reply)

    def receive(self, call: RouterCall) -> None:
        """Starts a call."""
        if call.method == "cancel_call":
            if (task := self._tasks.get(call.args[0])) is not None:
                task.cancel()
            return
        self._tasks[call.number] = task = asyncio.create_task(self._carry_out(call))
        task.add_done_callback(lambda _: self._tasks.pop(call.number, None))

    async def _carry_out(self, call: RouterCall) -> None:
        number = call.number
        try:
            if call.method not in ROUTER_METHODS:
                raise ValueError(
                    f"method={call.method!r} must be one of {ROUTER_METHODS}"
                )
            reply_content = getattr(self._router, call.method)(
                *call.args, **call.fields
            )
            if call.method == "stream":
                async with contextlib.aclosing(reply_content) as events:
                    async for event in events:
                        self.send(Reply(number, "item", event))
                reply_content = None
            elif asyncio.iscoroutine(reply_content):
                reply_content = await reply_content
            self.send(Reply(number, "result", reply_content))
        except asyncio.CancelledError:
            self.send(Reply(number, "error", RuntimeError("the call was cancelled")))
        except Exception as error:
            self.send(Reply(number, "error", _picklable(error)))


async def run_router(connection: Connection, setup: Setup) -> None:
    """Runs a router until the pipe closes."""
    loop = asyncio.get_running_loop()
    is_over = asyncio.Event()
    # Imported late: Ray reads its environment variables at import.
    from jaxkv.disaggregation import cluster

    with cluster.connected(
        setup.address, setup.service, folder=setup.scratch
    ) as launcher:
        router = Router(
            launcher,
            config=setup.config,
            choose=cluster.loads(setup.choose),
            tokenizer=load_tokenizer(Path(setup.folder)),
            model_name=setup.model_name,
        )
        dispatcher = _Dispatcher(connection, router)
        early: list[RouterCall] = []
        receive: Callable[[RouterCall], None] = early.append

        def read() -> None:
            with contextlib.suppress(EOFError, OSError):
                while (call := connection.recv()).method != "close":
                    loop.call_soon_threadsafe(lambda x=call: receive(x))
            loop.call_soon_threadsafe(is_over.set)

        threading.Thread(target=read, daemon=True).start()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(router.close)
            start = asyncio.create_task(router.start(setup.specs))
            over = asyncio.create_task(is_over.wait())
            await asyncio.wait({start, over}, return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                start.result()
                connection_info = {
                    "head": cluster.head_address(),
                    "service": setup.service,
                }
                receive = dispatcher.receive
                for call in early:
                    receive(call)
                ready = functools.partial(
                    dispatcher.send, Reply(0, "result", connection_info)
                )
                if setup.http is None:
                    ready()
                    await over
                else:
                    await _serve_http(router, setup.http, is_over, ready)
            start.cancel()


async def _serve_http(
    router: Router, front: HttpFront, is_over: asyncio.Event, ready: Callable[[], None]
) -> None:
    """Serves HTTP until `is_over`, then until requests in progress complete."""
    from jaxkv import server
    from jaxkv.server import HttpService, make_app

    service = HttpService(
        router,
        api_key=front.api_key,
        max_requests=front.max_requests,
        deadline_s=front.deadline_s,
    )

    async def stop() -> None:
        await is_over.wait()
        await service.stop(front.grace_s)
        await router.close()  # ends the remaining requests with an error

    listener = socket.socket(fileno=front.descriptor)
    await server.serve(make_app(service), listener, stop, ready)


def _picklable(error: Exception) -> Exception:
    """Returns the error without cause and traceback, which may not be picklable."""
    try:
        return type(error)(str(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def main(fd: int) -> None:
    """Runs the router; `fd` is the descriptor of the pipe to the service's process."""
    sys.setswitchinterval(SWITCH_S)
    connection = Connection(fd)
    setup = connection.recv()
    try:
        asyncio.run(run_router(connection, setup))
    except (ValueError, ConnectionError, OSError) as error:
        with contextlib.suppress(OSError):
            connection.send(Reply(0, "error", _picklable(error)))
    finally:
        if setup.address is None:
            shutil.rmtree(setup.scratch, ignore_errors=True)
