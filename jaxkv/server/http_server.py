"""Runs an application on a socket: uvicorn, with bounds on idle connections."""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from jaxkv import validation

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"jaxkv.server.http_server needs {error.name}: pip install 'jaxkv[serve]'",
        name=error.name,
    ) from None

CONNECTION_IDLE_S = 30.0
"""Seconds after which a connection without a request is closed; at most twice that."""
PROBE_S = 0.5
"""Seconds between checks for a client that has closed its sending side."""
MOST_DESCRIPTORS = 65536
_SPARE_DESCRIPTORS = 64
"""File descriptors reserved for other uses than connections."""


@validation.checks_numbers(port=(0, 2**16))
def listen(host: str, port: int) -> socket.socket:
    """Binds an address; connections wait until `serve` runs.

    Args:
      host: name or address of an interface.
      port: in [0, 65535]; 0 takes a free one.

    Raises:
      ValueError: the address is not available.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"{host}:{port} cannot be listened on: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"{host}:{port} cannot be listened on: {error.strerror}"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Returns the address of a socket as clients write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_descriptor_limit() -> int:
    """Raises this process's soft limit on open files; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


class _Protocol(H11Protocol):
    """Closes connections that send no request, and answers half-closed ones.

    uvicorn closes idle connections after a response; a connection that never sends a
    whole request would stay open and use a descriptor. uvicorn drops a client that
    closes its sending side, which may still read its response.
    """

    max_connections = MOST_DESCRIPTORS
    is_half_closed = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._seen: Any = self
        self._timer = self.loop.call_later(CONNECTION_IDLE_S, self._check)
        if len(self.connections) > self.max_connections:
            others: Any = self.connections - {self}
            next((x for x in others if x.is_idle), self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # ty: ignore[incompatible-method-override]
        """Keeps the connection if the request in progress is complete.

        A client that has closed both sides sends the same; its system refuses further
        bytes. To find out, the first bytes of the response are sent at once: they are
        the same for every status.
        """
        if self.is_idle or self.conn.their_state is h11.SEND_BODY:
            return None
        self.is_half_closed = True
        if not self.cycle.response_started:
            begin = b"HTTP/1.1 "

            def send_remainder(event: Any) -> bytes | None:
                del vars(self.conn)["send"]
                data = self.conn.send(event)
                return data and data.removeprefix(begin)

            vars(self.conn)["send"] = send_remainder
            self.transport.write(begin)
        self._probe()
        return True

    def _probe(self) -> None:
        """Disconnects once the client's system has refused bytes."""
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(PROBE_S, self._probe)

    def on_response_complete(self) -> None:
        """Closes a half-closed connection after its last complete request."""
        super().on_response_complete()
        is_partial = self.conn.their_state is h11.SEND_BODY
        if self.is_half_closed and (self.is_idle or is_partial):
            self.transport.close()

    @property
    def is_idle(self) -> bool:
        """True if no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def _check(self) -> None:
        if self.is_idle and self._seen is self.cycle:
            self.transport.abort()
            return
        self._seen = self.cycle
        self._timer = self.loop.call_later(CONNECTION_IDLE_S, self._check)


class _Server(uvicorn.Server):
    """Leaves signals to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(
    app: Any,
    listener: socket.socket,
    stop: Callable[[], Awaitable[object]],
    on_ready: Callable[[], object],
) -> None:
    """Serves an application until `stop` returns.

    Args:
      app: the ASGI application.
      listener: socket, as `listen` returns it; closed at the end.
      stop: returns an awaitable that waits for the request to stop, and then for the
        requests in progress.
      on_ready: called once connections are answered.
    """
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    max_connections = raise_descriptor_limit() - _SPARE_DESCRIPTORS
    protocol = type("Protocol", (_Protocol,), {"max_connections": max_connections})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(2 * CONNECTION_IDLE_S)
        + 1,  # later than `CONNECTION_IDLE_S`
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        if not running.done():
            on_ready()
            await stop()
    finally:
        server.should_exit = True
        await running
