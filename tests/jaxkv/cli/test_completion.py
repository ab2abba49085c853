"""Completion scripts of shells."""

import shutil
import subprocess

import pytest

from jaxkv.cli import completion
from tests.support.commands import assert_refused, command, document

NAMES = ("run", "train", "cost", "completion")


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves four commands, whose modules are imported soon."""
    chosen = {name: completion.COMMANDS[name] for name in NAMES}
    monkeypatch.setattr(completion, "COMMANDS", chosen)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_and_experiments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = document(command(capsys, "completion"), "bash")["script"]
    typed = ("", "co", "train small --lo", "run isof", "cost m --s", "completion ''")
    for words in typed:
        last = len(words.split(" "))
        script += f"\nCOMP_WORDS=(jaxkv {words or chr(39) * 2})\nCOMP_CWORD={last}\n"
        script += '_jaxkv; echo "${COMPREPLY[*]}"'
    bash = ["bash", "-uc", f"{script}\ncomplete -p jaxkv"]
    output = subprocess.run(bash, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [
        "run train cost completion",
        "cost completion",
        "--log",
        "isoflop",
        "--sequence --style",
        "bash zsh fish",
        "complete -o default -F _jaxkv jaxkv",
    ]


def test_other_shells_have_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    bash, zsh, fish = (
        document(command(capsys, "completion"), shell)["script"]
        for shell in ("bash", "zsh", "fish")
    )
    assert zsh == f"autoload -U +X bashcompinit && bashcompinit\n{bash}"
    seen = "complete -c jaxkv -n '__fish_seen_subcommand_from"
    assert f"{seen} train' -l resume" in fish.splitlines()
    assert f"{seen} run' -a isoflop" in fish.splitlines()


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    called = command(capsys, "completion")
    assert_refused(called, "tcsh", "tcsh")
    assert_refused(called, "bash zsh", "zsh: jaxkv completion has no further arguments")
