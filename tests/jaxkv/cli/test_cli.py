"""The command line: one JSON document, exit statuses, one-line errors."""

import dataclasses
import errno
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.cli import smoke_compilation
from experiments.framework import registry
from jaxkv.cli import parsing
from jaxkv.cli.arguments import HELP_COLUMNS, MAX_HELP_LINES
from jaxkv.cli.main import COMMANDS
from jaxkv.report import Experiment, run_folder
from scaling.cli import FitConfig
from tests.support.commands import (
    Command,
    assert_nothing_heavy_is_imported,
    assert_refused,
    command,
)
from tests.support.folders import ROOT
from tests.support.mutation import replace


@pytest.fixture
def jaxkv(work_folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in an empty folder, with one more experiment registered."""
    return command(capsys)


def test_run_prints_one_document_and_writes_a_folder(jaxkv: Command) -> None:
    status, out, _ = jaxkv("run", "made_up", "paper", "--load.rate", "4", "--json")
    assert status == 0
    document = json.loads(out)
    assert document["metrics"] == {"points": 9, "tail": {"p95_s": 4.5, "label": "µ|s"}}
    assert document["claims"][0]["verdict"] == "fails"
    config = json.loads((Path(document["out"]) / "config.json").read_text())
    assert config["load"]["rate"] == 4.0


def test_any_config_file_runs_again(jaxkv: Command) -> None:
    jaxkv("run", "made-up", "--num-points", "7", "--name", "x", "--out", "first")
    again = ("run", "made_up", "--config", "first/config.json", "--out", "second")
    assert jaxkv(*again)[0] == 0
    first = Path("first")
    second = Path("second")
    assert (second / "config.json").read_text() == (first / "config.json").read_text()
    assert (second / "figure.svg").read_bytes() == (first / "figure.svg").read_bytes()
    assert jaxkv(*again, "--num-points", "2", "--json")[0] == 0
    assert json.loads((second / "config.json").read_text())["num_points"] == 2


def test_run_prints_tables_without_json(
    jaxkv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = jaxkv("run", "made_up", "--out", "here")
    assert status == 0
    assert err == "points: 5 of 5 points, 0.0 s\n"
    assert (
        out
        == """
  metric  value
  points      5

  metric  tail
  p95     2.5 s
  label   µ|s

claims: 0 hold, 1 fail, 0 cannot be compared
  fails  the tail is short
         ours 2.5 s, published 3 s (us)

report: here/report.md
"""
    )


def test_compile_bound_smoke_runs_disable_optimization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def environment_of(name: str, **environ: str) -> dict[str, str]:
        smoke_compilation.disable_optimization(name, environ)
        return environ

    assert environment_of("jacobi") == {}  # jax has already read its variables
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert environment_of("jacobi")["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    assert environment_of("jacobi", XLA_FLAGS="mine")["XLA_FLAGS"] == "mine"
    assert environment_of("latency_vs_rate") == {}
    assert {x.name for x in registry.entries()} >= smoke_compilation.COMPILE_BOUND
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert environment_of("jacobi") == {}  # programs for a GPU need optimization


def test_list_names_every_experiment(jaxkv: Command) -> None:
    status, out, _ = jaxkv("list", "--json")
    assert status == 0
    assert json.loads(out)["experiments"][-1] == {
        "name": "made_up",
        "question": "Does a made-up experiment leave a whole folder?",
        "configs": ["smoke", "paper"],
    }
    assert "made_up" in jaxkv("list")[1]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("", "command is missing; one of"),
        ("rum", "unknown command 'rum'; did you mean run?"),
        ("run", "experiment is missing; one of"),
        ("run made_upp", "unknown experiment 'made_upp'; did you mean made_up?"),
        ("run made_up papr", "unknown config 'papr'; did you mean paper?"),
        ("run made_up --load.rat 4", "did you mean --load.rate?"),
        ("run made_up --load.rate x", "load.rate: could not convert string to float"),
        ("run made_up --load.rate -1", "load: rate=-1.0 must be above 0"),
        ("run made_up --config no.json", "no.json"),
        (
            "run made_up paper --config no.json",
            "paper and --config no.json exclude each other",
        ),
        ("run made_up --config bad.json", "bad.json: load: unknown field 'rat'"),
        ("run made_up --out bad.json", "bad.json: is a file"),
        ("run made_up --name refused", "model/config.json: not JSON"),
        ("list --bogus", "--bogus"),
        ("bench no_such_thing", "unknown benchmark 'no_such_thing'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    jaxkv: Command, args: str, line: str
) -> None:
    Path("bad.json").write_text('{"load": {"rat": 4}}')
    assert_refused(jaxkv, args, line)


def test_a_failed_run_keeps_the_earlier_one(jaxkv: Command) -> None:
    jaxkv("run", "made_up", "--out", "here")
    before = {path: path.read_bytes() for path in Path("here").iterdir()}
    for name, status in (("refused", 2), ("broken", 1)):
        assert jaxkv("run", "made_up", "--out", "here", "--name", name)[0] == status
        assert {path: path.read_bytes() for path in Path("here").iterdir()} == before
    assert jaxkv("run", "made_up", "--out", "new", "--name", "broken")[0] == 1
    assert json.loads(Path("new/env.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("width", ["40", "80", "120"])
def test_output_fits_the_width_without_control_characters(
    jaxkv: Command, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    for args in (("list",), ("run", "made_up")):
        _, out, err = jaxkv(*args)
        assert max(map(len, out.splitlines())) <= max(int(width), 80)
        assert "\x1b" not in out + err


def test_a_failure_keeps_its_traceback_and_status_1(jaxkv: Command) -> None:
    status, out, err = jaxkv("run", "made_up", "--name", "broken", "--json")
    assert (status, out) == (1, "")
    assert "Traceback" in err
    assert "invalid literal" in err


def running_by(experiment: Experiment, run: Callable[..., Any]) -> Experiment:
    """Returns the experiment with another `run` function in its only study."""
    (study,) = experiment.studies
    return experiment._replace(studies=(study._replace(run=run),))


def test_ctrl_c_keeps_the_partial_result(
    jaxkv: Command, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: Any, progress: Any) -> Any:
        real = progress.track

        def track(items: Any, label: str, unit: str) -> Any:
            for item in real(items, label, unit):
                if item == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                yield item

        monkeypatch.setattr(progress, "track", track)
        return experiment.studies[0].run(config, progress)

    interrupted = running_by(experiment, run)
    replace(monkeypatch, registry, "load_experiment", lambda name: interrupted)
    before = signal.getsignal(signal.SIGINT)
    status, out, err = jaxkv("run", "made_up", "--json")
    assert status == 130, err
    document = json.loads(out)
    assert document["interrupted"]
    assert document["metrics"]["points"] == 3
    assert "Interrupted" in (Path(document["out"]) / "report.md").read_text()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_stops_at_once(
    jaxkv: Command, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: Any, progress: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    interrupted = running_by(experiment, run)
    replace(monkeypatch, registry, "load_experiment", lambda name: interrupted)
    status, out, err = jaxkv("run", "made_up", "--out", "here", "--json")
    assert (status, out) == (130, "")
    assert "only the config is in here" in err
    assert Path("here/config.json").exists()


def test_a_full_disk_is_one_line_and_status_2(
    jaxkv: Command, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    replace(monkeypatch, run_folder, "draw_figure", full)
    replace(monkeypatch, run_folder, "mark_status", full)
    status, out, err = jaxkv("run", "made_up", "--out", "here", "--json")
    assert (status, out) == (2, "")
    line = "jaxkv: here: cannot be written: No space left on device"
    assert err.splitlines()[1:] == [line]  # after that of the bar
    assert Path("here/result.npz").exists()  # the result is kept


@pytest.mark.parametrize(
    "args",
    [
        "",
        "run",
        "bench",
        "list",
        "run made_up",
        "sweep",
        "train",
        "plan",
        "cost",
        "generate",
        "serve",
        "claims",
        "fit",
        "demo",
    ],
)
def test_help_is_status_0_and_describes_defaults(jaxkv: Command, args: str) -> None:
    status, out, _ = jaxkv(*args.split(), "--help")
    assert status == 0
    assert "usage: jaxkv" in out
    # A field of the made-up config may be None, and is.
    assert args == "run made_up" or "None" not in out


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_a_screen_and_help_all_has_every_option(
    jaxkv: Command, name: str
) -> None:
    short, full = (jaxkv(*name.split(), flag) for flag in ("--help", "--help-all"))
    assert short[0] == full[0] == 0
    lines = short[1].splitlines()
    assert len(lines) <= MAX_HELP_LINES
    assert max(map(len, lines)) <= HELP_COLUMNS
    flags = re.compile(r"^[│ ]{0,3}(--?\w[-\w]*)", re.MULTILINE)
    options = {*flags.findall(short[1])} - {"--help-all"}
    assert options == {*flags.findall(full[1])}
    if name == "fit":
        fields = (field.name for field in dataclasses.fields(FitConfig))
        fitted = {f"--{field.replace('_', '-')}" for field in fields}
        assert options == fitted | {"-h", "--out", "--config", "--max-seconds"}
        assert "--loss-kind {huber,lad,mse}" in full[1]
        assert "--loss-kind  " in short[1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Seed of the resamples. (default: 0)", "Seed of the resamples [0]"),
        ("Rates, in s. Later ones follow. (default: '')", "Rates, in s"),
        ("Rule for the rows: a long one, with many parts", "Rule for the rows"),
        ("Tokens, or some other thing with a long tail", "Tokens, or some other ..."),
        ("Tokens per step, or some other long thing", "Tokens per step"),
    ],
)
def test_the_line_of_an_option_is_its_first_clause(text: str, line: str) -> None:
    assert parsing._first_clause(text, 26) == line


def test_help_list_and_cost_do_not_import_jax() -> None:
    assert_nothing_heavy_is_imported(
        "--help",
        "run --help",
        "generate --help",
        "serve --help",
        "list --json",
        "cost deepseek-v3 --json",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("entry", registry.entries(), ids=lambda entry: entry.name)
def test_every_experiment_matches_its_registry_entry(
    entry: registry.RegistryEntry,
) -> None:
    experiment = registry.load_experiment(entry.name)
    assert entry.question.endswith("?")
    assert sorted(entry.configs) == sorted(experiment.configs)
    assert entry.configs[0] == next(iter(experiment.configs))
    for study in experiment.studies:
        assert {type(config) for config in study.configs.values()} == {
            study.config_type
        }
        assert not study.fields & {"config", "out", "json", "help", "max_seconds"}
    # Otherwise a config.json could belong to either study.
    fields = {frozenset(study.fields) for study in experiment.studies}
    assert len(fields) == len(experiment.studies)


def test_the_registry_lists_every_experiment_in_order() -> None:
    entries = registry.entries()
    assert [entry.name for entry in entries] == sorted(entry.name for entry in entries)
    root = Path(registry.__file__).parents[2]
    paths = (root / "experiments").glob("*/*/experiment.py")
    modules = {".".join(path.relative_to(root).with_suffix("").parts) for path in paths}
    assert modules == {entry.module for entry in entries}


def test_no_product_command_is_defined_in_the_laboratory() -> None:
    laboratory = {"demo", "list", "run", "bench", "claims", "course", "records"}
    homes = {name: x.function.partition(".")[0] for name, x in COMMANDS.items()}
    assert {x for x, home in homes.items() if home == "experiments"} == laboratory
    for entry in COMMANDS.values():
        module, _, function = entry.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
    "words",
    [
        "list",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("cost llama-2-7b", "run mean_estimation")
        ),
    ],
)
def test_a_folder_of_the_same_name_does_not_hide_the_packages(
    tmp_path: Path, words: str
) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("raise SystemExit(9)")
    (tmp_path / "scaling.py").write_text("raise SystemExit(9)")
    # The working folder first, as for `python -m` and in notebooks.
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "jaxkv.cli.main", *words.split()]
    subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
    )
