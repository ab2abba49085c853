"""At most one process writes to a folder, with any command."""

import errno
import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.framework import registry
from jaxkv.files import LOCK_FILE, WriterLock
from jaxkv.report import Experiment
from tests.support.commands import Command
from tests.support.mutation import replace

HOLD = """if True:
    import sys, time
    from pathlib import Path
    from jaxkv.files import LOCK_FILE, WriterLock
    lock = WriterLock(Path(sys.argv[1]))
    print("held", flush=True)
    time.sleep(600)
"""

Hold = Callable[[Path], subprocess.Popen[str]]


@pytest.fixture
def hold(popen: Callable[..., subprocess.Popen[str]]) -> Hold:
    """Returns a function that starts another process, which locks a folder."""

    def begin(folder: Path) -> subprocess.Popen[str]:
        process = popen("-c", HOLD, str(folder))
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    return begin


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_lock_is_one_writers_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    lock = WriterLock(folder)
    line = f"{folder}: process {os.getpid()} is writing here; one at a time"
    with pytest.raises(ValueError, match=line):
        WriterLock(folder)
    lock.close()
    lock.close()
    assert names(folder) == []
    WriterLock(folder).close()


def test_a_lock_ends_with_its_process_however_that_ends(
    tmp_path: Path, hold: Hold
) -> None:
    process = hold(tmp_path)
    with pytest.raises(ValueError, match=f"process {process.pid} is writing here"):
        WriterLock(tmp_path)
    process.kill()
    process.wait()
    assert names(tmp_path) == [LOCK_FILE]
    WriterLock(tmp_path).close()
    assert names(tmp_path) == []


def test_a_waiter_for_a_deleted_lock_takes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock
    calls = []

    def flock(file: Any, how: int) -> None:
        real(file, how)
        calls.append(how)
        if len(calls) == 1:  # the previous process has deleted the file in the meantime
            (tmp_path / LOCK_FILE).unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = WriterLock(tmp_path)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="is writing here"):
        WriterLock(tmp_path)
    lock.close()


def test_a_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: Any, how: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="its file system has no locks"):
        lock = WriterLock(tmp_path)
    lock.close()


@pytest.mark.parametrize(
    "command",
    [
        "run made_up --out OUT",
        "bench made_up --out OUT",
        "train smoke --out OUT",
        "sweep smoke --out OUT",
        "fit log.csv --out OUT",
        "plan --flops 1e20 --law lecture --out OUT",
        "cost llama-2-7b --out OUT",
    ],
)
def test_a_second_writer_is_refused_and_nothing_changes(
    command: str,
    tmp_path: Path,
    hold: Hold,
    experiment: Experiment,
    monkeypatch: pytest.MonkeyPatch,
    jaxkv: Command,
) -> None:
    entry_names = ("made_up", "bench_made_up")
    entries = [
        registry.RegistryEntry(name, "Is it?", ("smoke",), "") for name in entry_names
    ]
    replace(monkeypatch, registry, "entries", lambda: entries)
    replace(monkeypatch, registry, "load_experiment", lambda name: experiment)
    rows = [f"{n},{d},{2 + n**-0.3 + d**-0.3}" for n in (1, 2, 3) for d in (1, 2, 3)]
    Path("log.csv").write_text("\n".join(["N,D,loss", *rows]) + "\n")
    out = tmp_path / "out"
    process = hold(out)
    line = f"{out}: process {process.pid} is writing here; one at a time"
    words = command.replace("OUT", str(out)).split()
    assert jaxkv(*words) == (2, "", f"jaxkv: {line}\n")
    assert names(out) == [LOCK_FILE]
