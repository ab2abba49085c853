"""One command in several real processes: the answers of one, and an end if one dies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxkv.parallel import processes
from tests.support.folders import ROOT


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(num: int, *words: str) -> list[subprocess.Popen[str]]:
    """Starts `jaxkv` with these words, `num` times."""
    port = free_port()
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "experiments.cli.main", *words),
                *("--coordinator", f"127.0.0.1:{port}"),
                *("--num-processes", str(num), "--process-id", str(index)),
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(num)
    ]


def answers(started: list[subprocess.Popen[str]]) -> list[str]:
    """What each printed, all having ended well."""
    both = [each.communicate(timeout=240) for each in started]
    for each, (_, said) in zip(started, both, strict=True):
        assert each.returncode == 0, said
    return [printed for printed, _ in both]


@pytest.mark.parametrize(
    ("num", "layout"),
    [
        pytest.param(2, "dp=2", marks=pytest.mark.thorough),
        pytest.param(4, "dp=4", marks=pytest.mark.slow),
        pytest.param(2, "dp=4", marks=pytest.mark.slow),
    ],
)
def test_a_run_in_processes_is_that_of_one(
    num: int, layout: str, tmp_path: Path
) -> None:
    words = ("train", "smoke", "--json", "--parallel", layout, "--zero", "1")
    first, *others = answers(start(num, *words, "--out", str(tmp_path / "many")))
    assert others == [""] * (num - 1)
    (alone,) = answers(start(1, *words, "--out", str(tmp_path / "one")))
    many, one = json.loads(first), json.loads(alone)
    for name in ("status", "num_tokens", "flops"):
        assert many[name] == one[name]
    for name in ("train_loss", "loss"):
        assert many[name] == pytest.approx(one[name], rel=1e-4)
    curves = [(tmp_path / x / "curve.jsonl").read_text() for x in ("many", "one")]
    assert len(curves[0].splitlines()) == len(curves[1].splitlines())


@pytest.mark.slow
def test_an_engine_in_processes_says_the_same() -> None:
    words = ("generate", "stdlib-bytes", "--prompt", "def ", "--max-tokens", "12")
    words = (*words, "--temperature", "0")
    first, other = answers(start(2, *words, "--parallel", "tp=2"))
    (alone,) = answers(start(1, *words))
    assert (first, other) == (alone, "")


@pytest.mark.slow
def test_a_lost_process_ends_the_others_and_the_run_goes_on(tmp_path: Path) -> None:
    config = tmp_path / "long.json"
    (printed,) = answers(start(1, "train", "smoke", "--print-config"))
    told = json.loads(printed) | {"num_steps": 10**6, "checkpoint_every": 500}
    config.write_text(json.dumps(told))
    words = ("train", str(config), "--parallel", "dp=2", "--out", str(tmp_path / "run"))
    started, limit = start(2, *words), time.monotonic() + 120
    kept = tmp_path / "run" / "checkpoints"
    while not (kept.is_dir() and any(x.name.isdecimal() for x in kept.iterdir())):
        assert time.monotonic() < limit
        time.sleep(0.1)
    started[1].send_signal(signal.SIGKILL)
    _, said = started[0].communicate(timeout=60)
    assert started[0].returncode == 1
    assert re.search("jaxkv: another process has ended: .*Gloo", said)
    before = max(int(x.name) for x in kept.iterdir() if x.name.isdecimal())
    again = start(2, *words, "--json", "--max-seconds", "15")
    printed, _ = again[0].communicate(timeout=120)
    again[1].communicate(timeout=120)
    assert [each.returncode for each in again] == [75, 75]
    assert int(Path(json.loads(printed)["checkpoint"]).name) > before


@pytest.mark.parametrize(
    ("coordinator", "numbers", "said"),
    [
        ("127.0.0.1", (2, 0), "must be host:port"),
        ("127.0.0.1:0", (2, 0), "must be host:port"),
        ("127.0.0.1:4000", (2, None), "needs num_processes and process_id"),
        ("127.0.0.1:4000", (0, 0), "num_processes=0 must be at least 1"),
        ("127.0.0.1:4000", (2, 2), r"process_id=2 must be in \[0, 1\]"),
        ("cluster", (2, 0), "says itself how many"),
    ],
)
def test_impossible_company_is_refused(
    coordinator: str, numbers: tuple[int | None, int | None], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        processes.join(coordinator, *numbers)


def test_a_coordinator_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "PATIENCE_S", 0.5)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=f"coordinator='{address}': nobody answers"):
        processes.join(address, 2, 1)
    assert processes.num() == 1
    assert processes.is_first()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--process-id", "1"], "--process-id needs --coordinator"),
        (["--coordinator"], "--coordinator needs a value"),
        (["--num-processes", "two", "--coordinator=h:1"], "must be a whole number"),
        (["--process-id=1", "--process-id=1"], "--process-id is given twice"),
    ],
)
def test_half_a_request_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiments.cli.main import main

    assert main(["list", *words]) == 2
    assert said in capsys.readouterr().err
