"""Commands, called in this process with the words that a user types."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from jaxkv.cli import main
from tests.support.folders import ROOT

type Command = Callable[..., tuple[int, str, str]]
"""Words of a command -> status, stdout, stderr."""


def command(capsys: pytest.CaptureFixture[str], *first: str) -> Command:
    """Returns a command with some leading words."""

    def call(*args: str) -> tuple[int, str, str]:
        status = main.main([*first, *args])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def document(called: Command, *args: str) -> dict[str, Any]:
    """Returns the JSON output of a command that succeeds."""
    status, out, err = called(*args, "--json")
    assert status == 0, err
    return json.loads(out)


def words(called: Command, *args: str) -> str:
    """Returns the output of a command at 80 columns, joined to one line."""
    status, out, err = called(*args)
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 80
    return " ".join(out.split())


def assert_refused(called: Command, args: str, line: str) -> None:
    """Asserts status 2, an empty stdout, and one line with the reason on stderr."""
    status, out, err = called(*args.split(), "--json")
    assert (status, out) == (2, ""), err
    assert line in err
    assert err.startswith("jaxkv: "), err
    assert err.count("\n") == 1


def assert_nothing_heavy_is_imported(*commands: str) -> None:
    """Runs commands in a new process; they must not import slow libraries."""
    code = (
        "import sys; from jaxkv.cli import main as cli\n"
        f"for words in {[words.split() for words in commands]}:\n"
        "    assert cli.main(words) == 0\n"
        "heavy = {'jax', 'matplotlib', 'flax', 'numpy', 'orbax'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
