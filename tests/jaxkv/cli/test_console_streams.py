"""Output streams that are closed, full or unread: a one-line error, no lost work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxkv import files
from jaxkv.cli import compilation_cache
from jaxkv.cli.console import streams
from jaxkv.cli.console.printing import print_parts
from jaxkv.report import Sheet
from tests.support.folders import ROOT

FULL = "jaxkv: standard output: cannot be written: No space left on device\n"
CLOSED = "jaxkv: standard output is closed; send it to a file or /dev/null\n"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell line with JAXKV as the command, and PIPESTATUS."""
    jaxkv = f"{sys.executable} -m jaxkv.cli.main"
    return subprocess.run(
        ["bash", "-c", line.replace("JAXKV", jaxkv)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("line", "status", "err"),
    [
        ("JAXKV list > /dev/full", 1, FULL),
        ("JAXKV list --json > /dev/full", 1, FULL),
        ("JAXKV run --help > /dev/full", 1, FULL),
        ("JAXKV list >&-", 1, CLOSED),
        ("JAXKV list <&- >&- 2>&-", 1, ""),
        ("JAXKV list --bogus 2>&-", 2, ""),
        ("JAXKV list --bogus 2> /dev/full", 2, ""),
        ("JAXKV list 2> /dev/full > /dev/null", 0, ""),
    ],
)
def test_a_stream_that_fails_has_a_name(line: str, status: int, err: str) -> None:
    done = shell(line)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", err)


@pytest.mark.parametrize("words", ["list", "list --json", "run --help"])
def test_a_closed_pipe_gives_no_message(words: str) -> None:
    done = shell(f"JAXKV {words} | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_name_keeps_its_width_next_to_a_long_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "row" * 40
    sheet = Sheet("next", ("target", "concurrency"), [(long, "64"), (long, "256")])
    print_parts([sheet])
    lines = capsys.readouterr().out.splitlines()
    assert sum("concurrency" in line for line in lines) == 2
    assert "".join(lines).count("w") == 80


def test_unwritable_paths_are_named_and_unchanged(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(ValueError, match=f"{pipe}: cannot be written: it is no"):
        files.write_atomically(pipe, "x")
    assert pipe.is_fifo()
    with pytest.raises(ValueError, match=f"{tmp_path}/no/a.txt: cannot be written: No"):
        files.write_atomically(tmp_path / "no" / "a.txt", "x")


COMPILE = """if True:
    from jaxkv.cli import compilation_cache
    from jaxkv.cli.console import streams
    streams.guard_streams()
    compilation_cache.enable_program_cache()
    import jax
    jax.jit(lambda x: x + 1)(1)
    jax.jit(lambda x: x * 2)(1)
"""


def test_a_damaged_cache_gives_one_line_with_the_remedy(tmp_path: Path) -> None:
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def errors() -> str:
        return subprocess.run(
            [sys.executable, "-c", COMPILE],
            cwd=ROOT,
            env=os.environ | variables,
            text=True,
            capture_output=True,
            check=True,
        ).stderr

    assert errors() == ""
    cache_files = [*tmp_path.iterdir()]
    assert len(cache_files) >= 2
    for path in cache_files:
        path.write_bytes(b"garbage")
    line = f"{tmp_path}: cannot cache compiled programs: its files are damaged; every"
    remedy = "until it is deleted or JAX_COMPILATION_CACHE_DIR names another folder\n"
    output = errors()
    assert output.startswith(f"jaxkv: warning: {line}")
    assert output.endswith(remedy)
    assert output.count("\n") == 1


def test_an_unwritable_cache_gives_the_reason() -> None:
    warning = (
        "Error writing persistent compilation cache entry for 'jit_f': OSError: "
        "[Errno 30] Read-only file system: '/there/jit_f-cache'"
    )
    output = compilation_cache.explain_cache_warning(
        warning, {"JAX_COMPILATION_CACHE_DIR": "/there"}
    )
    start = "/there: cannot cache compiled programs: Read-only file system; every start"
    assert output.startswith(start)
    assert compilation_cache.explain_cache_warning("another one") == "another one"


def test_a_program_that_cannot_be_stored_gives_no_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warning = (
        "Error writing persistent compilation cache entry for 'jit_steps': "
        "MemoryError: std::bad_alloc"
    )
    streams._warn(warning, UserWarning, "", 0)
    assert capsys.readouterr().err == ""


def test_lines_are_written_at_once_without_python_buffers(tmp_path: Path) -> None:
    code = """
from jaxkv.cli.console import streams
import os, sys
streams.guard_streams()
print("a line")
print("another", file=sys.stderr)
os._exit(0)
"""
    path = tmp_path / "log"
    with path.open("wb") as log:
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=log,
            check=True,
        )
    assert path.read_text("utf-8") == "a line\nanother\n"
