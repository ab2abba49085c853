"""What workers say to each other: frames of JSON and arrays, for who knows a secret.

    4 bytes     length of the header, most significant first
    header      JSON: the words of a message, and types and shapes of its arrays
    arrays      their bytes, one after another, in C order

Nothing is ever unpickled. Both ends show first that they know the secret, each by a
keyed hash of what the other has just drawn.
"""

import asyncio
import hashlib
import hmac
import json
import math
import secrets
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

VERSION = 1
"""Of what frames say; it rises when workers of before would misunderstand."""
MAX_HEADER = 1 << 24
"""Bytes of a header at most."""
MAX_ARRAYS = 1 << 36
"""Bytes of a message's arrays at most."""
_LENGTH = struct.Struct("!I")
_NONCE = 32


class Message(NamedTuple):
    """What a frame holds."""

    words: dict[str, Any]
    """Plain JSON values; "kind" says what it is about."""
    arrays: list[np.ndarray]


class Connection:
    """One end of a connection between two that know the same secret."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()

    async def send(
        self, words: dict[str, Any], arrays: Sequence[np.ndarray] = ()
    ) -> int:
        """Sends a message; gives the bytes that it takes.

        Raises:
          ConnectionError: the other end is gone.
        """
        arrays = [np.ascontiguousarray(array) for array in arrays]
        told = [[array.dtype.name, array.shape] for array in arrays]
        header = json.dumps({"words": words, "arrays": told}).encode()
        async with self._turn:  # frames of several tasks do not mix
            self._writer.write(_LENGTH.pack(len(header)) + header)
            for array in arrays:
                self._writer.write(memoryview(array.view(np.uint8).reshape(-1)))
                await self._writer.drain()
            await self._writer.drain()
        return _LENGTH.size + len(header) + sum(array.nbytes for array in arrays)

    async def receive(self) -> Message:
        """Waits for a message.

        Raises:
          ConnectionError: the other end is gone, or sent something else.
        """
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            (length,) = _LENGTH.unpack(head)
            _check(length <= MAX_HEADER)
            told = json.loads(await self._reader.readexactly(length))
            kinds = [(_dtype(name), tuple(shape)) for name, shape in told["arrays"]]
            sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in kinds]
            _check(all(side >= 0 for _, shape in kinds for side in shape))
            _check(sum(sizes) <= MAX_ARRAYS)
            arrays = []
            for (dtype, shape), size in zip(kinds, sizes, strict=True):
                found = await self._reader.readexactly(size)
                arrays.append(np.frombuffer(found, dtype).reshape(shape))
            return Message(told["words"], arrays)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the other end is gone") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConnectionError(f"no frame: {error}") from error

    async def close(self) -> None:
        """Ends it."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass  # the other end was quicker

    async def shake_hands(self, secret: bytes) -> None:
        """Shows the secret, and has it shown.

        Raises:
          ConnectionError: the other end does not know it.
        """
        mine = secrets.token_bytes(_NONCE)
        self._writer.write(mine)
        await self._writer.drain()
        try:
            other = await self._reader.readexactly(_NONCE)
            # Of both, in an order of one's own: what is heard cannot be sent back.
            self._writer.write(_proof(secret, mine + other))
            await self._writer.drain()
            shown = await self._reader.readexactly(_NONCE)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the other end does not shake hands") from error
        is_echo = other == mine
        if is_echo or not hmac.compare_digest(shown, _proof(secret, other + mine)):
            raise ConnectionError("the other end does not know the secret")


def _proof(secret: bytes, drawn: bytes) -> bytes:
    return hmac.digest(secret, drawn, hashlib.sha256)


def _dtype(name: str) -> np.dtype:
    """A type of numbers, jax's short floats among them; no objects."""
    dtype = jax.numpy.dtype(name)
    _check(dtype.kind in "fiubV" and not dtype.hasobject)
    return dtype


def _check(is_allowed: bool) -> None:
    if not is_allowed:
        raise ValueError("too large, or of a kind that is not sent")


async def connect(host: str, port: int, secret: bytes) -> Connection:
    """Connects to a worker.

    Raises:
      ConnectionError: nobody is there, or it does not know the secret.
    """
    try:
        connection = Connection(*await asyncio.open_connection(host, port))
    except OSError as error:
        raise ConnectionError(f"{host}:{port}: {error.strerror or error}") from error
    try:
        await connection.shake_hands(secret)
    except BaseException:
        await connection.close()
        raise
    return connection
