"""A worker: an engine of its own process, reached over a socket.

    python -m jaxkv.disaggregation.worker FOLDER '{"max_length": 512, ...}' [CORES]

prints its address in a line of JSON and serves until its standard input ends. The
secret is in the environment, `JAXKV_SECRET`.

It answers three kinds of messages. "prefill" reads a prompt and sends its pages to
another worker; "pages" are such; "decode" answers a prompt, token by token. Which of
them a worker is asked is the router's choice: all can do both.
"""

import asyncio
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax

from jaxkv.disaggregation import frames
from jaxkv.disaggregation.frames import Connection, Message
from jaxkv.sampling import Sampling
from jaxkv.serving.engine import Engine
from jaxkv.serving.outputs import Event

SECRET = "JAXKV_SECRET"
"""The environment variable that holds the secret, in hexadecimal digits."""
FIRST_OWN_NAME = 2**30
"""Names of requests from here on are a worker's own."""
SWITCH_S = 1e-4
"""Seconds that the engine's thread may keep others waiting."""
_IDLE_S = 0.5


class Worker:
    """Serves an engine over sockets.

    Args:
      engine: with a prefix cache, on one device; the worker runs it.
      secret: that everybody who connects must know.
      model: what the engine serves; workers with another do not fit together.
    """

    def __init__(self, engine: Engine, secret: bytes, *, model: str = ""):
        if not engine.config.prefix_cache:
            raise ValueError(f"{engine.config.prefix_cache=} must be True")
        self._engine, self._secret, self._model = engine, secret, model
        self._events: dict[int, asyncio.Queue[Event | BaseException]] = {}
        self._has_work = threading.Event()
        self._is_over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # Of prompts that are only read; routers name the others.
        self._names = itertools.count(FIRST_OWN_NAME)

    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> asyncio.Server:
        """Begins to listen; port 0 takes a free one."""
        self._loop = asyncio.get_running_loop()
        # Compiled before anybody waits.
        await asyncio.to_thread(self._warm_up)
        threading.Thread(target=self._run, daemon=True).start()
        return await asyncio.start_server(self._greet, host, port)

    def close(self) -> None:
        """Lets the engine's thread end."""
        self._is_over = True
        self._has_work.set()

    def _warm_up(self) -> None:
        ask = Sampling.greedy(max_tokens=1, ignore_eos=True, prefix_cache=False)
        self._engine.generate([[0]], ask)
        pages, _ = self._engine.take_prefix([0])
        self._structure = jax.tree.structure(pages)
        self._engine.bring_prefix([0], pages)

    def _run(self) -> None:
        """The engine's thread: runs it while there is work, and tells what happens."""
        assert self._loop is not None
        while not self._is_over:
            self._has_work.wait(_IDLE_S)
            self._has_work.clear()
            try:
                for event in self._engine.stream():
                    self._loop.call_soon_threadsafe(self._tell, event)
            except Exception as error:
                self._loop.call_soon_threadsafe(self._tell_all, error)
                return

    def _tell(self, event: Event) -> None:
        if event.request_id in self._events:
            self._events[event.request_id].put_nowait(event)

    def _tell_all(self, error: BaseException) -> None:
        for events in self._events.values():
            events.put_nowait(error)

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves one connection: every message is a task of its own."""
        connection, tasks = Connection(reader, writer), set()
        try:
            await connection.shake_hands(self._secret)
            await connection.send(self._described())
            while True:
                message = await connection.receive()
                task = asyncio.create_task(self._answer(connection, message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except ConnectionError:
            pass  # who asked is gone
        finally:
            for task in tasks:
                task.cancel()
            await connection.close()

    @property
    def _fits(self) -> dict[str, Any]:
        """What pages must be of."""
        return {"model": self._model, "version": frames.VERSION}

    def _described(self) -> dict[str, Any]:
        config = self._engine.config
        return {
            **self._fits,
            "kind": "hello",
            "page_size": config.page_size,
            "max_length": config.max_length,
            "kv_dtype": config.kv_dtype,
            "max_slots": config.max_slots,
            "seed": config.seed,
        }

    async def _answer(self, connection: Connection, message: Message) -> None:
        """Carries out one message; what goes wrong is said to who asked."""
        words = message.words
        try:
            act = {
                "prefill": self._prefill,
                "pages": self._bring,
                "decode": self._decode,
            }[words["kind"]]
            await act(connection, message)
        except ConnectionError as error:
            await self._say(connection, "lost", words, str(error))
        except (ValueError, KeyError, TypeError) as error:
            await self._say(connection, "refused", words, str(error))
        except RuntimeError as error:  # the engine is lost, and with it the worker
            await self._say(connection, "lost", words, str(error))
            await connection.close()

    async def _say(
        self, connection: Connection, kind: str, words: dict[str, Any], why: str
    ) -> None:
        try:
            await connection.send({"kind": kind, "id": words.get("id"), "why": why})
        except ConnectionError:
            pass  # nobody is there to be told

    async def _prefill(self, connection: Connection, message: Message) -> None:
        """Reads a prompt, sends its pages where they are wanted, and says so."""
        words, started = message.words, time.perf_counter()
        tokens, salt, (host, port) = words["tokens"], words["salt"], words["to"]
        ask = Sampling.greedy(max_tokens=1, ignore_eos=True, salt=salt)
        async for _ in self._stream(next(self._names), tokens, ask):
            pass
        read_s = time.perf_counter() - started
        pages, num = await asyncio.to_thread(
            self._engine.take_prefix, tokens, salt=salt
        )
        other = await frames.connect(host, int(port), self._secret)
        try:
            await other.receive()
            num_bytes = await other.send(
                self._fits | {"kind": "pages", "id": 0, "tokens": tokens, "salt": salt},
                jax.tree.leaves(pages),
            )
            reply = (await other.receive()).words
        finally:
            await other.close()
        if reply["kind"] != "brought":
            raise ValueError(reply["why"])
        told = {"kind": "prefilled", "id": words["id"], "num_pages": num}
        sent_s = time.perf_counter() - started - read_s
        times = {"num_bytes": num_bytes, "read_s": read_s, "sent_s": sent_s}
        await connection.send(told | times | {"num_cached": reply["num_pages"]})

    async def _bring(self, connection: Connection, message: Message) -> None:
        """Takes pages into the prefix cache; the engine goes on meanwhile."""
        words = message.words
        for name, mine in self._fits.items():
            if words.get(name) != mine:
                raise ValueError(
                    f"pages of {name}={words.get(name)!r} must be {mine!r}"
                )
        pages = jax.tree.unflatten(self._structure, message.arrays)
        num = await asyncio.to_thread(
            self._engine.bring_prefix, words["tokens"], pages, salt=words["salt"]
        )
        told = {"kind": "brought", "id": words["id"], "num_pages": num}
        await connection.send(told)

    async def _decode(self, connection: Connection, message: Message) -> None:
        """Answers a prompt, and tells every token."""
        words = message.words
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in words["sampling"].items()
        }
        told: dict[str, Any] = {"id": words["id"]}
        ask = Sampling(**fields)
        async for event in self._stream(words["request_id"], words["tokens"], ask):
            if event.tokens:
                more = {"tokens": event.tokens, "sample": event.sample}
                await connection.send(told | more | {"kind": "tokens"})
            if (done := event.completion) is not None:
                answers = [[answer.tokens, answer.reason] for answer in done.answers]
                last = {"answers": answers, "num_cached": done.num_cached}
                await connection.send(told | last | {"kind": "done"})

    async def _stream(
        self, name: int, tokens: list[int], ask: Sampling
    ) -> AsyncIterator[Event]:
        """Submits a request, and gives its events until it is complete."""
        if name in self._events:
            raise ValueError(f"request_id={name} is the name of a request")
        self._events[name] = events = asyncio.Queue()
        try:
            await asyncio.to_thread(self._engine.submit, tokens, ask, request_id=name)
            self._has_work.set()
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise RuntimeError(str(event)) from event
                yield event
                if event.completion is not None:
                    return
        finally:
            del self._events[name]
            self._engine.cancel(name)  # nothing, where it is complete
            self._has_work.set()


def describe(folder: Path) -> str:
    """Names what a folder serves, by its config and the sizes of its weights."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        found.update(f"{path.name} {path.stat().st_size}".encode())
    return found.hexdigest()


async def _main(folder: Path, fields: dict[str, Any]) -> None:
    # A step may last as long as Python's own turns of threads do, and tokens wait.
    sys.setswitchinterval(SWITCH_S)
    fields |= {"prefix_cache": True}
    engine = Engine.load(folder, **fields)
    secret = bytes.fromhex(os.environ[SECRET])
    worker = Worker(engine, secret, model=describe(folder))
    server = await worker.serve()
    host, port = server.sockets[0].getsockname()[:2]
    print(json.dumps({"address": [host, port]}), flush=True)
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        sys.stdin.read()  # until who started us is gone
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=wait, daemon=True).start()
    await over.wait()
    worker.close()
    server.close()


if __name__ == "__main__":
    if sys.argv[3:]:  # before JAX starts its threads
        os.sched_setaffinity(0, json.loads(sys.argv[3]))
    asyncio.run(_main(Path(sys.argv[1]), json.loads(sys.argv[2])))
