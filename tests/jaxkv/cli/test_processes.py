"""One command in several real processes: the answers of one, and failures."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxkv import files
from jaxkv.parallel import processes
from jaxkv.report import config_dumps
from scaling import training
from scaling.sweeps import TRAININGS
from tests.support.folders import ROOT


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(
    num: int, *words: str, first: tuple[str, ...] = ()
) -> list[subprocess.Popen[str]]:
    """Starts `jaxkv` in `num` processes; the first one gets additional arguments."""
    port = free_port()
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jaxkv.cli.main",
                *words,
                *(first if index == 0 else ()),
                "--coordinator",
                f"127.0.0.1:{port}",
                "--num-processes",
                str(num),
                "--process-id",
                str(index),
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(num)
    ]


def answers(started: list[subprocess.Popen[str]]) -> list[str]:
    """Returns the output of each process after successful ends."""
    both = [process.communicate(timeout=240) for process in started]
    for process, (_, output) in zip(started, both, strict=True):
        assert process.returncode == 0, output
    return [printed for printed, _ in both]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "layout"),
    [
        pytest.param(2, "dp=2", marks=pytest.mark.thorough),
        pytest.param(4, "dp=4", marks=pytest.mark.slow),
        pytest.param(2, "dp=4", marks=pytest.mark.slow),
    ],
)
def test_a_run_in_several_processes_equals_that_of_one(
    num: int, layout: str, tmp_path: Path
) -> None:
    words = ("train", "smoke", "--json", "--parallel", layout, "--zero", "1")
    first, *others = answers(start(num, *words, "--out", str(tmp_path / "many")))
    assert others == [""] * (num - 1)
    (alone,) = answers(start(1, *words, "--out", str(tmp_path / "one")))
    parallel_run = json.loads(first)
    one = json.loads(alone)
    for name in ("status", "num_tokens", "flops"):
        assert parallel_run[name] == one[name]
    for name in ("train_loss", "loss"):
        assert parallel_run[name] == pytest.approx(one[name], rel=1e-4)
    curves = [(tmp_path / x / "curve.jsonl").read_text() for x in ("many", "one")]
    assert len(curves[0].splitlines()) == len(curves[1].splitlines())


@pytest.mark.slow
def test_an_engine_in_several_processes_gives_the_same_answers() -> None:
    words = ("generate", "stdlib-bytes", "--prompt", "def ", "--max-tokens", "12")
    words = (*words, "--temperature", "0")
    first, other = answers(start(2, *words, "--parallel", "tp=2"))
    (alone,) = answers(start(1, *words))
    assert (first, other) == (alone, "")


@pytest.mark.slow
def test_a_lost_process_ends_all_and_the_run_resumes(tmp_path: Path) -> None:
    config = tmp_path / "long.json"
    (printed,) = answers(start(1, "train", "smoke", "--print-config"))
    reported = json.loads(printed) | {"num_steps": 10**6, "checkpoint_every": 500}
    config.write_text(json.dumps(reported))
    words = ("train", str(config), "--parallel", "dp=2", "--out", str(tmp_path / "run"))
    started = start(2, *words)
    limit = time.monotonic() + 120
    checkpoints = tmp_path / "run" / "checkpoints"
    while not (
        checkpoints.is_dir() and any(x.name.isdecimal() for x in checkpoints.iterdir())
    ):
        assert time.monotonic() < limit
        time.sleep(0.1)
    started[1].send_signal(signal.SIGKILL)
    _, output = started[0].communicate(timeout=60)
    assert started[0].returncode == 1
    assert re.search("jaxkv: another process has ended: .*Gloo", output)
    before = max(int(x.name) for x in checkpoints.iterdir() if x.name.isdecimal())
    # All processes stop with the first one and report it, independent of their clocks.
    again = start(2, *words, "--json", first=("--max-seconds", "15"))
    printed, _ = again[0].communicate(timeout=120)
    again[1].communicate(timeout=120)
    assert [process.returncode for process in again] == [75, 75]
    assert int(Path(json.loads(printed)["checkpoint"]).name) > before


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the config of a run that does not end by itself."""
    config = tmp_path_factory.mktemp("configs") / "long.json"
    endless = {"num_steps": 10**6, "checkpoint_every": 500}
    settings = json.loads(config_dumps(TRAININGS["smoke"]))
    config.write_text(json.dumps(settings | endless))
    return str(config)


def wait_for(is_so: Callable[[], object]) -> None:
    limit = time.monotonic() + 200
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.02)


def steps_of(checkpoints: Path) -> list[int]:
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return sorted(int(path.name) for path in folders if path.name.isdecimal())


INT = signal.SIGINT
TERM = signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "sent", "statuses"),
    [
        # A process without a signal has the status of the other one.
        ("curve.jsonl", [(1, INT)], (130, 130)),
        ("curve.jsonl", [(1, TERM)], (143, 143)),
        ("curve.jsonl", [(0, TERM)], (143, 143)),
        # At different times, with different statuses.
        ("curve.jsonl", [(1, INT), (0, TERM)], (143, 130)),
        # While it compiles, and while it saves.
        ("config.json", [(1, INT)], (130, 130)),
        ("checkpoints/.5*", [(1, INT)], (130, 130)),
        ("checkpoints/.5*", [(0, INT)], (130, 130)),
    ],
)
def test_a_signal_to_any_process_stops_all_with_a_checkpoint(
    after: str,
    sent: list[tuple[int, signal.Signals]],
    statuses: tuple[int, int],
    long: str,
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    started = start(2, "train", long, "--parallel", "dp=2", "--out", str(out))
    wait_for(lambda: [*out.glob(after)])
    for index, number in sent:
        started[index].send_signal(number)
        time.sleep(0.02)
    both = [process.communicate(timeout=120) for process in started]
    assert tuple(process.returncode for process in started) == statuses, both
    indices = {index for index, _ in sent}
    for index, (printed, err) in enumerate(both):
        assert ("stopping after the current piece" in err) == (index in indices)
        assert "Traceback" not in err
        assert (printed == "") == (index > 0)
    why = "interrupted" if 0 in indices else "another process was stopped"
    assert both[0][0].splitlines()[-1] == f"{why}; run the same command to continue"
    checkpoints = out / "checkpoints"
    assert not [path for path in checkpoints.iterdir() if not path.name.isdecimal()]
    files.verify_checksums(checkpoints / str(steps_of(checkpoints)[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_second_signal_ends_all_at_once(
    index: int, long: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    started = start(2, "train", long, "--parallel", "dp=2", "--out", str(out))
    wait_for((out / "curve.jsonl").exists)
    for _ in range(2):
        started[index].send_signal(signal.SIGINT)
        time.sleep(0.05)
    began = time.monotonic()
    for process in started:
        process.communicate(timeout=60)
    assert time.monotonic() - began < 40
    assert started[index].returncode == 130
    assert started[1 - index].returncode in (1, 130)  # the piece was just over


@pytest.mark.slow
def test_a_run_resumes_in_another_number_of_processes(tmp_path: Path) -> None:
    config = tmp_path / "mine.json"
    settings = json.loads(config_dumps(TRAININGS["smoke"]))
    # At the smoke run's rate rounding grows to a relative 2e-2.
    changed = {"num_steps": 400, "checkpoint_every": 100, "learning_rate": 3e-3}
    config.write_text(json.dumps(settings | changed))
    words = ("train", str(config), "--json")
    run = ("--out", str(tmp_path / "run"))
    two = start(2, *words, *run, "--parallel", "dp=2", "--zero", "1")
    wait_for(lambda: steps_of(tmp_path / "run" / "checkpoints"))
    two[1].send_signal(signal.SIGINT)
    printed, _ = two[0].communicate(timeout=120)
    two[1].communicate(timeout=120)
    assert json.loads(printed)["status"] == "stopped"
    step = steps_of(tmp_path / "run" / "checkpoints")[-1]
    assert 100 <= step < 400
    four = start(4, *words, *run, "--parallel", "dp=4", first=("--max-seconds", "1e-9"))
    both = [process.communicate(timeout=240) for process in four]
    assert [process.returncode for process in four] == [75] * 4, both
    assert steps_of(tmp_path / "run" / "checkpoints")[-1] == step
    (one,) = answers(start(1, *words, *run))
    (full_output,) = answers(start(1, *words, "--out", str(tmp_path / "whole")))
    report = json.loads(one)
    expected = json.loads(full_output)
    for name in ("train_loss", "loss"):
        assert report[name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.parametrize(
    ("coordinator", "numbers", "output"),
    [
        ("127.0.0.1", (2, 0), "must be host:port"),
        ("127.0.0.1:0", (2, 0), "must be host:port"),
        ("127.0.0.1:4000", (2, None), "needs num_processes and process_id"),
        ("127.0.0.1:4000", (0, 0), "num_processes=0 must be at least 1"),
        ("127.0.0.1:4000", (2, 2), r"process_id=2 must be in \[0, 1\]"),
        ("cluster", (2, 0), "sets num_processes"),
    ],
)
def test_invalid_process_groups_are_rejected(
    coordinator: str, numbers: tuple[int | None, int | None], output: str
) -> None:
    with pytest.raises(ValueError, match=output):
        processes.join_processes(coordinator, *numbers)


def test_a_missing_coordinator_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "TIMEOUT_S", 0.5)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=f"coordinator='{address}': no response"):
        processes.join_processes(address, 2, 1)
    assert processes.num_processes() == 1
    assert processes.is_first()


@pytest.mark.thorough
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_without_peers_reports_it_in_one_line(index: int) -> None:
    """The first process waits for the second, and the second for the first."""
    program = (
        "import sys; from jaxkv.parallel import processes; processes.TIMEOUT_S = 2; "
        "from jaxkv.cli import main; sys.exit(main.main())"
    )
    address = f"127.0.0.1:{free_port()}"
    words = ("list", "--coordinator", address, "--num-processes", "2")
    done = subprocess.run(
        [sys.executable, "-c", program, *words, "--process-id", str(index)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    output = (f"'{address}': not all of 2 processes", f"'{address}': no response")
    (line,) = done.stderr.splitlines()
    assert line.startswith("jaxkv: coordinator=" + output[index])
    assert line.endswith(("and its own index", "with this address"))


def test_a_process_without_devices_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_joined", processes._Joined(2, 0))
    with pytest.raises(ValueError, match="1 devices leaves some of 2 processes"):
        processes.check_all_used(1)
    with pytest.raises(ValueError, match="1 devices leaves some of 2 processes"):
        training.train(TRAININGS["smoke"], Path("nowhere"))


def test_undivided_commands_reject_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxkv.cli.main import main

    monkeypatch.setattr(processes, "_joined", processes._Joined(2, 0))
    assert main(["list"]) == 2
    output = capsys.readouterr().err
    assert "--coordinator is only for generate and train: each of 2" in output
    assert main(["generate", "stdlib-bytes", "--prompt", "a"]) == 2
    assert "1 devices leaves some of 2 processes" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_ends_while_idle_ends_all(lost: int) -> None:
    """No Python exception occurs: JAX aborts, and the parent reports the reason."""
    program = (
        "import sys, time; from jaxkv.cli import main; "
        "from scaling.cli.train import command; command.main = lambda _: ("
        "print('here', file=sys.stderr, flush=True), time.sleep(99));"
        "sys.exit(main.main())"
    )
    words = ("train", "--coordinator", f"127.0.0.1:{free_port()}")
    words = (*words, "--num-processes", "2", "--process-id")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, *words, str(index)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for process in started:
        assert process.stderr is not None
        assert any("here" in line for line in process.stderr)
    started[lost].kill()
    began = time.monotonic()
    _, output = started[1 - lost].communicate(timeout=60)
    assert time.monotonic() - began < 40
    assert started[1 - lost].returncode == 1
    last = output.splitlines()[-1]
    assert last == "jaxkv: ended because another process has ended"
    started[lost].communicate(timeout=10)


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--process-id", "1"], "--process-id needs --coordinator"),
        (["--coordinator"], "--coordinator needs a value"),
        (["--num-processes", "two", "--coordinator=h:1"], "must be a whole number"),
        (["--process-id=1", "--process-id=1"], "--process-id is given twice"),
    ],
)
def test_incomplete_process_flags_are_rejected(
    words: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxkv.cli.main import main

    assert main(["list", *words]) == 2
    assert output in capsys.readouterr().err
