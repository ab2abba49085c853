"""Ctrl-C as a real signal: one line, status 130, and a usable folder."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import jax.numpy as jnp
import pytest

from experiments.framework import load_experiment
from experiments.training.bundled_model import experiment
from jaxkv.cli.console import interrupts
from jaxkv.report import run_folder
from scaling.training import init_train_state, restore_checkpoint
from tests.support import engines

TIMEOUT_S = 120

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(popen: Start) -> Start:
    """Starts `jaxkv` after some lines of code."""
    # The parent of the tests may ignore SIGHUP, as `nohup make test` does.
    hears = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"

    def begin(*args: str, code: str = "") -> subprocess.Popen[str]:
        lines = ["import sys", hears, "from jaxkv.cli import main as cli", code]
        return popen("-c", "\n".join([*lines, "sys.exit(cli.main())"]), *args)

    return begin


def heard(stream: IO[str] | None) -> str:
    """Returns the next line of a stream of a process."""
    assert stream is not None
    return stream.readline()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return engines.save_tiny_model(folder, max_positions=1024)


def wait_for(is_so: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.01)


def press(
    process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT
) -> tuple[str, str]:
    process.send_signal(number)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    return out, err


STOPPING = "stopping after the current piece; Ctrl-C again stops at once\n"


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_ctrl_c_without_results_ends_at_once(
    start: Start, number: signal.Signals
) -> None:
    process = start("run", "demo", code=STUBBORN)
    assert heard(process.stdout) == "here\n"
    assert press(process, number) == ("", "jaxkv: interrupted\n")


# A library that swallows KeyboardInterrupt, like a garbage collector's callback.
STUBBORN = """if True:
    import time
    from experiments import framework
    from jaxkv.cli import main
    def load(name):
        print("here", flush=True)
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    framework.load_experiment = load
"""


@pytest.mark.thorough
def test_ctrl_c_during_compilation_leaves_a_complete_folder(
    start: Start, model: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start("demo", "smoke", "--model", model, "--out", str(out))
    wait_for(lambda: (out / "env.json").exists(), process)
    output, err = press(process)
    assert err == STOPPING
    assert "interrupted; the result is partial" in output
    stored_run = run_folder.read_run(out, load_experiment("demo"))
    assert stored_run.env["status"] == "interrupted"
    assert not stored_run.result.continuous.is_done.any()
    names = {path.name for path in out.iterdir()}
    panels = {name for name in names if re.fullmatch(r"figure-\d\.(svg|png)", name)}
    assert len(panels) >= 4
    assert names - panels == {
        *("config.json", "env.json", "result.npz", "claims.json", "report.md"),
        *("figure.svg", "figure.png", "figure.csv"),
    }


@pytest.mark.slow
def test_ctrl_c_during_serving_keeps_partial_results(
    start: Start, model: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    sizes = ("--num-requests", "400", "--max-length", "512")
    process = start("demo", "smoke", "--model", model, "--out", str(out), *sizes)
    static_line = "static batching: 400 of 400 requests"
    while not (line := heard(process.stderr)).startswith(static_line):
        assert line.startswith("static batching: ")  # a progress line on a busy machine
    assert press(process)[1] == STOPPING
    stored_run = run_folder.read_run(out, load_experiment("demo"))
    assert stored_run.env["status"] == "interrupted"
    assert stored_run.result.static.is_done.all()
    assert not stored_run.result.continuous.is_done.all()


def test_a_second_ctrl_c_does_not_wait_for_the_compiler(
    start: Start, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start("run", "demo", "--out", str(out), code=DEAF)
    assert heard(process.stdout) == "here\n"
    process.send_signal(signal.SIGINT)
    assert heard(process.stderr) == STOPPING
    line = f"jaxkv: interrupted at once; only the config is in {out}\n"
    assert press(process) == ("", line)
    assert json.loads((out / "env.json").read_text())["status"] == "interrupted"


# One bytecode instruction that takes minutes, like a compilation, without signals.
DEAF = """if True:
    import hashlib, os
    from experiments import framework
    from jaxkv.cli import main
    load = framework.load_experiment
    def run(config, progress):
        os.write(1, b"here\\n")  # atomic, unlike print, if a signal arrives
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)
    def deaf(name):
        found = load(name)
        return found._replace(studies=(found.studies[0]._replace(run=run),))
    framework.load_experiment = deaf
"""


@pytest.mark.slow
def test_an_interrupted_training_run_can_be_resumed(
    start: Start, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    folder = tmp_path / "training"
    process = start(
        "run",
        "bundled_model",
        "smoke",
        "--out",
        str(out),
        "--folder",
        str(folder),
        "--trunk.num-steps",
        "1000000",
        "--trunk.report-every",
        "10",
    )
    wait_for((folder / "trunk" / "curve.jsonl").exists, process)
    assert press(process)[1] == STOPPING
    stored_run = run_folder.read_run(out, load_experiment("bundled_model"))
    assert stored_run.env["status"] == "interrupted"
    assert stored_run.result.status == "stopped"
    (last,) = (folder / "trunk" / "checkpoints").iterdir()
    config = experiment.CONFIGS["smoke"].trunk
    like = init_train_state(config.model, config.optimizer, jnp.int32(0))
    step = int(restore_checkpoint(last, like).step)
    lines = (folder / "trunk" / "curve.jsonl").read_text().splitlines()
    assert step == json.loads(lines[-1])["step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_answer_keeps_its_text(
    start: Start, model: str, number: signal.Signals
) -> None:
    words = ("--prompt", "import ", "--max-tokens", "1000")
    process = start("generate", model, *words, "--json", code=SLOW)
    while "under way" not in (line := heard(process.stderr)):
        assert line
    out, err = press(process, number)
    (completion,) = json.loads(out)["completions"]
    assert completion["reason"] == "cancelled"
    assert completion["tokens"]
    assert err.splitlines()[-1].startswith("[cancelled; ")


SLOW = """if True:
    import time
    from jaxkv.cli.console import answer_writer
    write = answer_writer.AnswerWriter.__call__
    def call(self, index, text, complete, score=None):
        write(self, index, text, complete, score)
        if not complete:
            print("under way", file=sys.stderr, flush=True)
            time.sleep(60)
    answer_writer.AnswerWriter.__call__ = call
"""


@pytest.mark.slow
def test_sigterm_acts_like_ctrl_c(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start("run", "lecture_numbers", "--out", str(out), code=PATIENT)
    assert heard(process.stdout) == "here\n"
    output, err = press(process, signal.SIGTERM)
    assert err == "stopping after the current piece; SIGTERM again stops at once\n"
    assert output.splitlines()[-2:] == [
        "interrupted; the result is partial",
        f"report: {out / 'report.md'}",
    ]
    stored_run = run_folder.read_run(out, load_experiment("lecture_numbers"))
    assert stored_run.env["status"] == "interrupted"
    assert not (out / ".lock").exists()


# Waits to be stopped before it begins.
PATIENT = """if True:
    import time
    from experiments import framework
    from jaxkv.cli import main
    load = framework.load_experiment
    def waiting(experiment):
        (study,) = experiment.studies
        def run(config, progress):
            print("here", flush=True)
            while not progress.has_stopped:
                time.sleep(0.01)
            return study.run(config)
        return experiment._replace(studies=(study._replace(run=run),))
    framework.load_experiment = lambda name: waiting(load(name))
"""


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_ignored_signals_remain_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with interrupts.exit_on_interrupt():
            assert signal.getsignal(number) is signal.SIG_IGN
            os.kill(os.getpid(), number)
            others = {*interrupts.SIGNALS} - {number}
            assert signal.SIG_DFL not in map(signal.getsignal, others)
    finally:
        signal.signal(number, before)
