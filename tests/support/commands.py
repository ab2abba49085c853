"""Commands, called in this process as a user would type them."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from experiments.cli import main
from tests.support.folders import ROOT

type Command = Callable[..., tuple[int, str, str]]
"""Words of a command -> status, and what it said on stdout and on stderr."""


def command(capsys: pytest.CaptureFixture[str], *first: str) -> Command:
    """A command that begins with some words."""

    def call(*args: str) -> tuple[int, str, str]:
        status = main.main([*first, *args])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


def document(called: Command, *args: str) -> dict[str, Any]:
    """What a command that succeeds answers to a program."""
    status, out, err = called(*args, "--json")
    assert status == 0, err
    return json.loads(out)


def words(called: Command, *args: str) -> str:
    """What a command that succeeds says on a screen of 80 columns, as one line."""
    status, out, err = called(*args)
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 80
    return " ".join(out.split())


def assert_refused(called: Command, args: str, line: str) -> None:
    """Status 2, nothing on stdout, and one line on stderr that says why."""
    status, out, err = called(*args.split(), "--json")
    assert (status, out) == (2, ""), err
    assert line in err
    assert err.startswith("jaxkv: "), err
    assert err.count("\n") == 1


def assert_nothing_heavy_is_imported(*commands: str) -> None:
    """Runs commands in a process of their own, which must not wait for libraries."""
    code = (
        "import sys; from experiments.cli import main as cli\n"
        f"for words in {[each.split() for each in commands]}:\n"
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
