"""`--log`: destinations of the numbers of steps."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxkv.cli import open_step_log
from jaxkv.cli.console import Terminal
from tests.support.commands import assert_refused, command


def log_two_steps(kind: str, folder: Path) -> None:
    with open_step_log(kind, folder) as log:
        assert [*folder.iterdir()] == []  # no file before the first step
        terminal = Terminal(log=log)
        terminal.log(1, {"loss": 2.5})
        terminal.log(2, {"loss": 2.25, "rate": 0.5})


def test_lines_are_appended(tmp_path: Path) -> None:
    log_two_steps("jsonl", tmp_path)
    with open_step_log("jsonl", tmp_path) as log:
        log(3, {"loss": 2.0})
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": 2.25, "rate": 0.5},
        {"step": 3, "loss": 2.0},
    ]


def test_trackers_get_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            calls.append(folder)

        def add_scalar(self, *values: object) -> None:
            calls.append(values)

        def close(self) -> None:
            calls.append("closed")

    class Run:
        def log(self, numbers: Mapping[str, float], step: int) -> None:
            calls.append((step, numbers))

        def finish(self) -> None:
            calls.append("finished")

    modules = {
        "tensorboardX": SimpleNamespace(SummaryWriter=SummaryWriter),
        "wandb": SimpleNamespace(init=lambda **options: calls.append(options) or Run()),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    log_two_steps("tensorboard", tmp_path)
    assert calls == [
        str(tmp_path / "tensorboard"),
        ("loss", 2.5, 1),
        ("loss", 2.25, 2),
        ("rate", 0.5, 2),
        "closed",
    ]
    calls.clear()
    log_two_steps("wandb", tmp_path)
    options = {"project": "jaxkv", "name": tmp_path.name, "dir": str(tmp_path)}
    steps = (1, {"loss": 2.5}), (2, {"loss": 2.25, "rate": 0.5})
    assert calls == [options, *steps, "finished"]


@pytest.mark.parametrize(
    ("kind", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")]
)
def test_a_missing_package_is_named(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    line = f"--log {kind}: {package} is missing: pip install {package}"
    with (
        pytest.raises(ValueError, match=line),
        open_step_log(kind, tmp_path),
    ):
        pass


def test_what_has_no_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    called = command(capsys, "run")
    line = "--log jsonl: mean_estimation has no steps to log"
    assert_refused(called, "mean_estimation --log jsonl", line)
    line = "--log csv: must be jsonl, tensorboard or wandb"
    assert_refused(called, "grpo --log csv", line)
