"""The commit of a run, in a small repository."""

import subprocess
from pathlib import Path

import pytest

from jaxkv.report import environment


def test_a_changed_checkout_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*args: str) -> str:
        names = ["-c", "user.name=name", "-c", "user.email=name@example.org"]
        command = ["git", "-C", str(tmp_path), *names, *args]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        return ran.stdout.strip()

    module = tmp_path / "environment.py"
    module.write_text("")
    monkeypatch.setattr(environment, "__file__", str(module))
    git("init")
    assert environment._commit() is None  # the file is not tracked
    git("add", ".")
    git("commit", "-m", "a file")
    commit = git("rev-parse", "HEAD")
    assert environment._commit() == commit
    module.write_text("changed")
    assert environment._commit() == commit + "+"
