"""Workers on this machine, each a process of its own, gone when who started them is."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv.disaggregation import worker


class Launched(NamedTuple):
    """Workers that were started."""

    processes: list[subprocess.Popen[str]]
    addresses: list[tuple[str, int]]
    secret: bytes


@contextlib.contextmanager
def workers(folder: Path, num: int, **fields: Any) -> Iterator[Launched]:
    """Starts workers that serve a model's folder, and ends them.

    Args:
      folder: of the model.
      num: how many, at least 1.
      **fields: of `Engine.load`, as plain JSON values.

    Raises:
      ValueError: one did not start; the message is what it said last.
    """
    secret = secrets.token_bytes(32)
    env = os.environ | {worker.SECRET: secret.hex()}
    command = [sys.executable, "-m", worker.__name__, str(folder), json.dumps(fields)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started: list[subprocess.Popen[str]] = []
    try:
        for _ in range(num):
            started.append(
                subprocess.Popen(command, env=env, stderr=subprocess.PIPE, **pipes)
            )
        yield Launched(started, [_address(process) for process in started], secret)
    finally:
        for process in started:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()


def _address(process: subprocess.Popen[str]) -> tuple[str, int]:
    assert process.stdout is not None
    if line := process.stdout.readline():
        host, port = json.loads(line)["address"]
        return host, port
    _, said = process.communicate()
    reason = (said.strip().splitlines() or ["nothing"])[-1]
    raise ValueError(f"a worker did not start: {reason}")
