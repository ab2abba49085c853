"""Workers that are killed at random, in the middle of frames too: nothing is lost."""

import asyncio
import contextlib
import dataclasses
import subprocess
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

import jaxkv
from jaxkv import Sampling
from jaxkv.disaggregation import Router, Served, launch
from tests.support import engines
from tests.support.folders import TOKENIZED

BOUNDS: dict[str, Any] = {
    name: x for name, x in vars(engines.SERVED).items() if name != "debug"
} | {"prefix_cache": True}
ASK = Sampling(max_tokens=10, temperature=1.0, ignore_eos=True)
AT_ONCE = 12
"""Requests of a round."""
MOST_ROUNDS = 60


@dataclasses.dataclass
class Doomed:
    """A worker behind a door that counts bytes, and what it dies of.

    The byte after the last one allowed is not passed on: it dies inside of a frame, or
    `later_s` after that, wherever it is then.
    """

    process: subprocess.Popen[str]
    address: tuple[str, int]
    num_bytes: float = float("inf")
    later_s: float = 0.0
    is_dead: bool = False
    died_inside: bool = False

    async def greet(self, near: Any, to_near: asyncio.StreamWriter) -> None:
        """Passes on what either end says."""
        try:
            far, to_far = await asyncio.open_connection(*self.address)
        except OSError:
            to_near.close()
            return
        try:
            await asyncio.gather(self._pass(near, to_far), self._pass(far, to_near))
        finally:
            for writer in (to_far, to_near):
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _pass(self, reader: Any, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                allowed = data[: max(0, int(min(self.num_bytes, len(data))))]
                self.num_bytes -= len(data)
                writer.write(allowed if not self.later_s else data)
                await writer.drain()
                if self.num_bytes <= 0 and not self.is_dead:
                    self.is_dead, self.died_inside = True, not self.later_s
                    await asyncio.sleep(self.later_s)
                    self.process.kill()
        writer.close()


@contextlib.asynccontextmanager
async def doors(workers: list[Doomed]) -> AsyncGenerator[list[tuple[str, int]]]:
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for each in workers:
            server = await asyncio.start_server(each.greet, "127.0.0.1", 0)
            stack.callback(server.close)
            found.append(server.sockets[0].getsockname()[:2])
        yield found
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
        await asyncio.wait([task])


def draw_prompts(rng: np.random.Generator) -> list[list[int]]:
    """Half of them begin alike; none was seen before, so they must be read."""
    common = rng.integers(5, 60, 16).tolist()
    return [
        [*(common if place % 2 else []), *rng.integers(5, 60, num).tolist()]
        for place, num in enumerate(rng.integers(9, 34, AT_ONCE))
    ]


def doom(
    workers: list[Doomed], num_readers: int, num_each: int, rng: np.random.Generator
) -> None:
    """Of those that read and of those that answer, so many will die."""
    readers, others = workers[:num_readers], workers[num_readers:]
    for role, most in ((readers, 3_000), (others, 15_000)):
        for place, one in enumerate(rng.permutation(len(role))[:num_each]):
            # Beyond the greetings of router and worker.
            role[one].num_bytes = float(rng.integers(600, most))
            role[one].later_s = float(rng.uniform(1e-3, 0.1)) * (place % 2)


async def serve(
    workers: list[Doomed],
    secret: bytes,
    *,
    num_readers: int,
    num_kills: int,
    rng: np.random.Generator,
) -> tuple[list[list[int]], list[Served]]:
    """Asks until so many have died, and one round more."""
    prompts: list[list[int]] = []
    served: list[Served] = []
    async with doors(workers) as addresses:
        readers, others = addresses[:num_readers], addresses[num_readers:]
        found = await Router.connect(readers, others, secret)
        for _ in range(MOST_ROUNDS):
            gone = [each.process.poll() is not None for each in workers]
            is_last = sum(gone) == num_kills
            asked = draw_prompts(rng)
            names = range(len(prompts), len(prompts) + AT_ONCE)
            prompts += asked
            served += await asyncio.wait_for(
                asyncio.gather(
                    *(
                        found.answer(prompt, ASK, request_id=name)
                        for name, prompt in zip(names, asked, strict=True)
                    )
                ),
                timeout=120,
            )
            if is_last:
                break
        left = [each for each in (*found.prefill, *found.decode) if not each.is_lost]
        assert [each.load for each in left] == [0] * (len(workers) - num_kills)
        await found.close()
    return prompts, served


@pytest.mark.parametrize(
    ("num_readers", "num_others", "num_kills", "seed"),
    [
        pytest.param(1, 2, 2, 0, marks=pytest.mark.thorough),
        pytest.param(2, 2, 2, 1, marks=pytest.mark.slow),
        pytest.param(6, 6, 10, 2, marks=pytest.mark.slow),
    ],
)
def test_killed_workers_cost_nothing_but_time(
    num_readers: int,
    num_others: int,
    num_kills: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those that read and of those that answer as many are killed; one is left."""
    rng = np.random.default_rng(seed)
    num_workers = num_readers + num_others
    with launch.workers(TOKENIZED, [BOUNDS] * num_workers) as started:
        workers = [
            Doomed(process, address)
            for process, address in zip(
                started.processes, started.addresses, strict=True
            )
        ]
        doom(workers, num_readers, num_kills // 2, rng)
        how: Any = {"num_readers": num_readers, "num_kills": num_kills, "rng": rng}
        prompts, served = asyncio.run(serve(workers, started.secret, **how))
        killed = [each.process.wait(10) for each in workers if each.is_dead]
        assert killed == [-9] * num_kills
        assert any(each.died_inside for each in workers)
        alive = [each.process for each in workers if not each.is_dead]
        assert all(process.poll() is None for process in alive)
    assert any(each.num_attempts > 1 for each in served)
    engine = jaxkv.Engine.load(TOKENIZED, **BOUNDS)
    for name, prompt in enumerate(prompts):
        engine.submit(prompt, ASK, request_id=name)
    done = {x.request_id: x.completion for x in engine.stream() if x.completion}
    assert [each.tokens for each in served] == [
        done[name].tokens for name in range(len(prompts))
    ]
