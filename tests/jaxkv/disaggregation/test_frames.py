"""Frames between workers: whole or not at all, and only for who knows the secret."""

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.disaggregation import frames
from jaxkv.disaggregation.frames import Connection

SECRET = b"a secret"
ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3).T,
    np.zeros((4, 0, 2), np.int8),
    np.asarray(jnp.asarray([1.5, -2.0], jnp.bfloat16)),
    np.asarray(jnp.asarray([1.5, -2.0], jnp.float8_e4m3fn)),
]


def meet(
    serve: Callable[[Connection], Awaitable[None]],
    ask: Callable[[str, int], Awaitable[Any]],
) -> Any:
    """Has one end serve whoever comes, and the other ask."""

    async def both() -> Any:
        async def greet(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            connection = Connection(reader, writer)
            try:
                await serve(connection)
            except ConnectionError:
                pass
            finally:
                await connection.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        async with server:
            return await ask(*server.sockets[0].getsockname()[:2])

    return asyncio.run(both())


async def echo(connection: Connection) -> None:
    await connection.shake_hands(SECRET)
    message = await connection.receive()
    await connection.send(message.words, message.arrays)


def test_a_message_comes_as_it_went() -> None:
    words = {"kind": "pages", "tokens": [1, 2, 3], "why": "naïve ☃"}

    async def ask(host: str, port: int) -> Any:
        connection = await frames.connect(host, port, SECRET)
        size = await connection.send(words, ARRAYS)
        assert size > sum(array.nbytes for array in ARRAYS)
        message = await connection.receive()
        await connection.close()
        return message

    found = meet(echo, ask)
    assert found.words == words
    for came, went in zip(found.arrays, ARRAYS, strict=True):
        assert (came.dtype, came.shape) == (went.dtype, went.shape)
        np.testing.assert_array_equal(came, went)


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    heard = []

    async def serve(connection: Connection) -> None:
        await connection.shake_hands(SECRET)
        heard.append(await connection.receive())

    async def ask(host: str, port: int) -> None:
        with pytest.raises(ConnectionError, match="does not"):
            await frames.connect(host, port, b"another")

    meet(serve, ask)
    assert heard == []


def test_what_was_heard_proves_nothing() -> None:
    """Who sends back all that it hears does not know the secret."""
    heard = []

    async def serve(connection: Connection) -> None:
        await connection.shake_hands(SECRET)
        heard.append("a friend")

    async def ask(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        drawn = await reader.readexactly(32)
        writer.write(drawn)
        proof = await reader.read(32)
        writer.write(proof)
        assert await reader.read() == b""
        writer.close()

    meet(serve, ask)
    assert heard == []


def header(arrays: Any, words: Any = None) -> bytes:
    told = json.dumps({"words": words or {}, "arrays": arrays}).encode()
    return struct.pack("!I", len(told)) + told


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (struct.pack("!I", 2**31), "too large"),
        (struct.pack("!I", 4) + b"null", "no frame"),
        (struct.pack("!I", 4) + b"{{{{", "no frame"),
        (header([["float32", [2**40]]]), "too large"),
        (header([["float32", [-1]]]), "of a kind that is not sent"),
        (header([["object", [1]]]), "of a kind that is not sent"),
        (header([["nothing", [1]]]), "no frame"),
        (header([["float32", [4]]]) + b"half", "is gone"),
        (b"\0\0", "is gone"),
        (b"", "is gone"),
    ],
)
def test_what_is_no_frame_is_refused(sent: bytes, said: str) -> None:
    async def serve(connection: Connection) -> None:
        connection._writer.write(sent)

    async def ask(host: str, port: int) -> None:
        connection = Connection(*await asyncio.open_connection(host, port))
        with pytest.raises(ConnectionError, match=said):
            await connection.receive()
        await connection.close()

    meet(serve, ask)


def test_nobody_there_has_a_name() -> None:
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:1: "):
        asyncio.run(frames.connect("127.0.0.1", 1, SECRET))
