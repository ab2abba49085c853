"""Workers on this machine, each a process of its own, gone when who started them is."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxkv.disaggregation import worker


class Launched(NamedTuple):
    """Workers that were started."""

    processes: list[subprocess.Popen[str]]
    addresses: list[tuple[str, int]]
    secret: bytes


@contextlib.contextmanager
def workers(
    folder: Path | str,
    engines: Sequence[Mapping[str, Any]],
    *,
    cores: Sequence[Sequence[int]] | None = None,
) -> Generator[Launched]:
    """Starts workers that serve a model's folder, and ends them.

    Args:
      folder: of the model.
      engines: of each worker, what `Engine.load` is told, as plain JSON values.
      cores: of this machine, that each is bound to; None leaves it to the system.

    Raises:
      ValueError: one did not start; the message is what it said last.
    """
    secret = secrets.token_bytes(32)
    env = os.environ | {worker.SECRET: secret.hex()}
    command = [sys.executable, "-m", worker.__name__, str(folder)]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    started: list[subprocess.Popen[str]] = []
    try:
        for place, fields in enumerate(engines):
            words = [*command, json.dumps(dict(fields))]
            if cores is not None:
                words.append(json.dumps([*cores[place]]))
            started.append(subprocess.Popen(words, env=env, text=True, **pipes))
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
