"""The router: which worker reads a prompt, which one answers it, and what if one dies.

A prompt goes to the worker with the least to do, what it has read before of the same
beginning taken off. Its pages go from there straight to the worker that will answer,
which goes on decoding meanwhile. Whoever was lost, the request begins again with those
that are left: draws are keyed by request and position, so its tokens are the same.
"""

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Generator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from jaxkv import validation
from jaxkv.disaggregation import frames
from jaxkv.disaggregation.frames import Connection
from jaxkv.sampling import Sampling

type Address = tuple[str, int]
"""Host and port of a worker."""

_MOST_KNOWN = 1 << 16
"""Pages of which a router remembers at most who has them."""
_PAUSE_S = 0.05
"""Between two attempts, so that who is gone is known to be."""


class Lost(ConnectionError):
    """A worker is gone."""


class Served(NamedTuple):
    """What became of a request. Times are in seconds since the router was made."""

    tokens: list[int]
    """Of its first answer."""
    reason: str
    """Why that ended."""
    arrival_s: float
    """When it was asked."""
    first_token_s: float
    """When its first token came."""
    finish_s: float
    """When its last one came."""
    num_cached: int
    """Prompt tokens that the worker which answered had not to read."""
    num_attempts: int
    """How often it was begun: 1 if no worker was lost."""
    sent_bytes: int
    """Of the message that brought its pages; 0 if nobody had to."""
    read_s: float
    """Seconds in which the prompt was read, queueing among them."""
    sent_s: float
    """Seconds in which its pages were copied out, sent and written."""


class Peer:
    """A worker, as the router sees it."""

    def __init__(self, address: Address, connection: Connection):
        self.address, self._connection = address, connection
        self.is_lost = False
        self.load = 0
        """Tokens that it was asked to read or write, and has not yet."""
        self._known: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._replies: dict[int, asyncio.Queue[dict[str, Any] | None]] = {}
        self._ids = itertools.count()
        self._reader: asyncio.Task[None] | None = None
        self.described: dict[str, Any] = {}

    async def begin(self) -> None:
        """Hears what it serves, then goes on listening."""
        self.described = (await self._connection.receive()).words
        self._reader = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            while True:
                words = (await self._connection.receive()).words
                if (queue := self._replies.get(words["id"])) is not None:
                    queue.put_nowait(words)
        except ConnectionError:
            self.is_lost = True
            for queue in self._replies.values():
                queue.put_nowait(None)

    @contextlib.contextmanager
    def busy(self, load: int) -> Generator[None]:
        """Counts so many tokens as to be done, from the choice of it on."""
        self.load += load
        try:
            yield
        finally:
            self.load -= load

    async def ask(self, words: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Sends a message, and yields what is answered to it, to the end.

        Raises:
          Lost: it is gone, or says that another one is.
          ValueError: it refuses.
        """
        number = next(self._ids)
        self._replies[number] = queue = asyncio.Queue()
        try:
            if self.is_lost:
                raise Lost("the worker is gone")
            try:
                await self._connection.send(words | {"id": number})
            except ConnectionError as error:
                self.is_lost = True
                raise Lost(str(error)) from error
            while (reply := await queue.get()) is not None:
                if reply["kind"] == "refused":
                    raise ValueError(reply["why"])
                if reply["kind"] == "lost":
                    raise Lost(reply["why"])
                yield reply
                if reply["kind"] in ("prefilled", "done"):
                    return
            raise Lost("the worker is gone")
        finally:
            del self._replies[number]

    def known(self, chain: Sequence[bytes]) -> int:
        """How many pages of a prompt it has had, from the first on."""
        return next(
            (i for i, page in enumerate(chain) if page not in self._known), len(chain)
        )

    def learn(self, chain: Sequence[bytes]) -> None:
        """Notes that it has these pages."""
        for page in chain:
            self._known[page] = None
            self._known.move_to_end(page)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    async def close(self) -> None:
        """Leaves it."""
        if self._reader is not None:
            self._reader.cancel()
        await self._connection.close()


class Router:
    """Sends requests to workers; made by `connect`."""

    def __init__(self, prefill: list[Peer], decode: list[Peer]):
        self.prefill, self.decode = prefill, decode
        self._started = time.perf_counter()

    @classmethod
    async def connect(
        cls, prefill: Sequence[Address], decode: Sequence[Address], secret: bytes
    ) -> Self:
        """Connects to workers.

        Args:
          prefill: those that read prompts; where none is left, who answers reads.
          decode: those that answer, one at least.
          secret: that all of them know.

        Raises:
          ValueError: there is none that answers, or they serve different things.
          ConnectionError: one of them is not there, or does not know the secret.
        """
        if not decode:
            raise ValueError("decode=() must be 1 or more workers")
        router = cls([], [])
        try:
            for mine, addresses in ((router.prefill, prefill), (router.decode, decode)):
                for address in addresses:
                    connection = await frames.connect(*address, secret)
                    mine.append(peer := Peer(address, connection))
                    await peer.begin()
            told = [peer.described for peer in (*router.prefill, *router.decode)]
            for name in (
                "version",
                "model",
                "page_size",
                "kv_dtype",
                "max_length",
                "seed",
            ):
                if len(values := {str(each.get(name)) for each in told}) > 1:
                    raise ValueError(f"workers must have one {name}: {sorted(values)}")
        except BaseException:
            await router.close()
            raise
        return router

    async def close(self) -> None:
        """Leaves the workers, which go on."""
        for peer in (*self.prefill, *self.decode):
            await peer.close()

    def now(self) -> float:
        """Seconds since the router was made."""
        return time.perf_counter() - self._started

    async def answer(
        self, tokens: Sequence[int], sampling: Sampling, *, request_id: int
    ) -> Served:
        """Has a prompt read and answered, however many workers are lost meanwhile.

        Args:
          tokens: the prompt.
          sampling: how to draw.
          request_id: the caller's name for it, below 2**30, not in use; it also keys
            the draws if there is no seed.

        Raises:
          Lost: no worker is left that could answer.
          ValueError: the request cannot be served.
        """
        prompt = validation.tokens("tokens", tokens).tolist()
        validation.integer("request_id", request_id, below=2**30)
        arrival_s, first_s = self.now(), None
        for attempt in itertools.count(1):
            if not (left := [peer for peer in self.decode if not peer.is_lost]):
                raise Lost("no worker is left that could answer")
            chain = _chain(prompt, left[0].described["page_size"], sampling.salt)
            decode = _cheapest(left, chain, len(prompt))
            done: dict[str, Any] = {}
            words = {
                "kind": "decode",
                "tokens": prompt,
                "sampling": dataclasses.asdict(sampling),
                "request_id": request_id,
            }
            try:
                with decode.busy(len(prompt) + sampling.max_tokens):
                    sent = await self._read(prompt, chain, sampling, decode)
                    async for reply in decode.ask(words):
                        if first_s is None:
                            first_s = self.now()
                        done = reply
                decode.learn(chain)
                answer, reason = done["answers"][0]
                return Served(
                    tokens=answer,
                    reason=reason,
                    arrival_s=arrival_s,
                    first_token_s=self.now() if first_s is None else first_s,
                    finish_s=self.now(),
                    num_cached=done["num_cached"],
                    num_attempts=attempt,
                    sent_bytes=sent.get("num_bytes", 0),
                    read_s=sent.get("read_s", 0.0),
                    sent_s=sent.get("sent_s", 0.0),
                )
            except Lost:
                await asyncio.sleep(_PAUSE_S)
        raise AssertionError("attempts do not end")

    async def _read(
        self, prompt: list[int], chain: list[bytes], sampling: Sampling, decode: Peer
    ) -> dict[str, Any]:
        """Has a prompt's pages read and sent, unless who answers has them or must."""
        left = [peer for peer in self.prefill if not peer.is_lost]
        if not left or not sampling.prefix_cache or decode.known(chain) == len(chain):
            return {}
        reader = _cheapest(left, chain, len(prompt))
        words = {
            "kind": "prefill",
            "tokens": prompt,
            "salt": sampling.salt,
            "to": decode.address,
        }
        reply: dict[str, Any] = {}
        with reader.busy(len(prompt)):
            async for reply in reader.ask(words):
                reader.learn(chain)
                decode.learn(chain[: reply["num_cached"]])
        return reply


def _cheapest(peers: list[Peer], chain: list[bytes], num_tokens: int) -> Peer:
    """The worker with the least to do, this prompt read; of equals the first."""
    share = num_tokens / max(len(chain), 1)
    return min(peers, key=lambda peer: peer.load - share * peer.known(chain))


def _chain(tokens: list[int], page_size: int, salt: int) -> list[bytes]:
    """Names every full page of a prompt by all tokens up to its end."""
    found, names = hashlib.sha256(str(salt).encode()), []
    for end in range(page_size, len(tokens), page_size):
        found.update(np.asarray(tokens[end - page_size : end], np.int32).tobytes())
        names.append(found.copy().digest())
    return names
