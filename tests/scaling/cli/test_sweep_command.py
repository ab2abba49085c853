"""`jaxkv sweep` and `jaxkv train`, followed by `jaxkv fit` and `plan`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxkv.models import read_config
from jaxkv.report import config_dumps, config_loads
from scaling.cli.train import coordinates
from scaling.fits import from_json
from scaling.sweeps import SWEEPS, TRAININGS, CoordinateCheck, SweepConfig
from scaling.sweeps import progress as sweep_progress
from scaling.training import TrainConfig
from tests.support import figures
from tests.support.commands import Command, assert_refused, document
from tests.support.folders import GOLDEN, RECORDS


@pytest.mark.slow
def test_from_a_config_to_a_plan(jaxkv: Command) -> None:
    config = document(jaxkv, "sweep", "smoke", "--print-config")
    config["num_tokens"] = [*config["num_tokens"][1:], 20480]
    Path("mine.json").write_text(json.dumps(config))
    done = document(jaxkv, "sweep", "mine.json", "--log", "jsonl")
    steps = (Path(done["log"]) / "steps.jsonl").read_text().splitlines()
    losses = {json.loads(line)["step"]: json.loads(line)["loss"] for line in steps}
    assert [*losses] == [*range(1, 19)]
    assert min(losses.values()) > 1
    assert Path(done["log"]) == Path("runs/sweep-mine").resolve()
    assert (done["completed"], done["diverged"], done["skipped"]) == (18, 0, 0)
    assert done["duration_s"] > 0
    again = document(jaxkv, "sweep", "mine.json")
    assert (again["completed"], again["skipped"]) == (18, 18)
    fitted = document(jaxkv, "fit", "runs/sweep-mine", "--bootstrap", "20")
    output = " ".join(fitted["notes"])
    assert "9 rows left out: not the best learning rate of size and tokens" in output
    law = json.loads(Path("runs/sweep-mine/fit.json").read_text())
    assert law["num_points"] == 9
    assert from_json(json.dumps(law)).law == "chinchilla"
    # No flag gives the byte vocabulary and the windows of 32 of these models.
    plan = document(
        jaxkv, "plan", "--law", "runs/sweep-mine/fit.json", "--flops", "1e12"
    )
    assert plan["architecture"]["vocab_size"] == 257
    assert plan["architecture"]["tie_embeddings"]
    assert law["shape"] == {"sequence": 32, "vocab_size": 257, "tie_embeddings": True}
    wider = document(
        jaxkv,
        "plan",
        "--law",
        "runs/sweep-mine/fit.json",
        "--flops",
        "1e12",
        "--vocab-size",
        "258",
    )
    assert wider["architecture"]["vocab_size"] == 258


@pytest.mark.thorough
def test_a_plan_uses_the_shipped_record(jaxkv: Command) -> None:
    law = RECORDS / "isoflop" / "fit.json"
    plan = document(
        jaxkv,
        "plan",
        "--law",
        str(law),
        "--flops",
        "1e16",
        "--vocab-size",
        "257",
    )
    assert 1e7 < plan["num_params"] < 4e7


@pytest.mark.slow
def test_one_training_run_writes_a_model(jaxkv: Command) -> None:
    done = document(jaxkv, "train", "smoke", "--log", "jsonl")
    assert done["status"] == "done"
    logged, curve = (
        (Path(done["out"]) / name).read_text()
        for name in ("steps.jsonl", "curve.jsonl")
    )
    assert logged == curve
    assert done["num_tokens"] == 40 * 8 * 32
    assert 0 < done["bits_per_byte"] < 8.1
    wrote = document(
        jaxkv, "generate", done["model"], "--prompt", "def ", "--max-tokens", "3"
    )
    assert wrote["completions"]
    shutil.rmtree(done["model"])
    again = document(jaxkv, "train", "smoke")
    assert again["loss"] == pytest.approx(done["loss"], rel=1e-6)


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_after_the_time_limit_the_same_command_continues(
    command: str, jaxkv: Command
) -> None:
    status, out, err = jaxkv(command, "smoke", "--max-seconds", "1e-9")
    assert status == 75
    assert "time limit reached; run the same command to continue" in out
    assert err.count("time limit reached") == 1


def test_an_experiment_without_a_result_does_not_change_its_folder(
    jaxkv: Command,
) -> None:
    late = ["run", "isoflop", "smoke", "--max-seconds", "1e-9"]
    status, _, err = jaxkv(*late, "--folder", "kept")
    assert status == 75
    output = err.splitlines()[-1]
    assert output.startswith("jaxkv: stopped; 0 runs are in ")
    assert output.endswith("kept, and the same command goes on")
    assert jaxkv(*late)[0] == 130  # the experiment cannot be resumed
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_bad_input_is_one_line(command: str, jaxkv: Command) -> None:
    Path("odd.json").write_text('{"modles": []}')
    for args, message in [
        ("", "CONFIG is missing"),
        ("smok", "did you mean smoke"),
        ("missing.json", "missing.json: no such file"),
        ("odd.json", "unknown field"),
        ("smoke --exekutor x", "--ex"),
        ("smoke --max-seconds 0", "--max-seconds 0: must be above 0"),
    ]:
        assert_refused(jaxkv, f"{command} {args}", message)


def test_the_coordinate_check_has_a_status_and_a_figure(
    jaxkv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    mup_slope = 0.2

    def measure(config, corpus, parametrization, *, models, progress):
        widths = tuple(model.hidden_size for model in models)
        places = ("embedding", *(f"layer {i}" for i in range(1, 9)), "logits")
        slopes = np.full(len(places), 0.0)
        slopes[3] = mup_slope if parametrization == "mup" else 1.0
        change = 0.1 * np.array(widths)[:, None] ** slopes * 1.2 ** np.arange(10)
        return CoordinateCheck(parametrization, widths, places, change, slopes)

    monkeypatch.setattr(coordinates, "measure_coordinates", measure)
    monkeypatch.setattr(coordinates, "open_on_device", lambda corpus: None)
    args = ("sweep", "smoke", "--check-coordinates", "--out", "run")
    status, out, _ = jaxkv(*args)
    assert status == 1
    assert "+1.00" in out
    saved = json.loads(Path("run/coordinates.json").read_text())
    assert saved["passes"] is False
    assert [x["parametrization"] for x in saved["checks"]] == ["mup", "standard"]
    kinds = ("png", "svg")
    saved_figure = {
        f"figure.{x}": Path(f"run/coordinates.{x}").read_bytes() for x in kinds
    }
    mup_slope = -0.1
    config = SWEEPS["smoke"]
    with monkeypatch.context() as patch:
        patch.setattr(coordinates, "render_figure", lambda *_, **__: saved_figure)
        assert coordinates.check_coordinates(config, Path("run"), 1e9).status == 0
    sheet = figures.draw_sheet(
        lambda: coordinates.check_coordinates(config, Path("run"), 1e9), monkeypatch
    )
    assert figures.faults(sheet) == []


def test_an_unknown_executor_lists_the_known_ones(jaxkv: Command) -> None:
    status, _, err = jaxkv("sweep", "smoke", "--executor", "slurm")
    assert (status, "local" in err, "None" in err) == (2, True, False)


def test_a_window_longer_than_the_text_is_rejected(jaxkv: Command) -> None:
    Path("long.txt").write_text("a line\n" * 100)
    for i in range(4):
        Path(f"{i}.txt").write_text(f"{i}")
    for command in ("train", "sweep"):
        config = document(jaxkv, command, "smoke", "--print-config")
        config["corpus"] |= {"pattern": "*.txt", "held_out": 0.3}
        Path("mine.json").write_text(json.dumps(config))
        assert_refused(jaxkv, f"{command} mine.json", "seq_len=32 is longer than the")
        assert not Path("runs").exists()


def test_shipped_configs_survive_json() -> None:
    for config_type, shipped in (
        (SweepConfig, SWEEPS),
        (TrainConfig, TRAININGS),
    ):
        for config in shipped.values():
            text = config_dumps(config)
            assert config_loads(config_type, text, "x") == config


def write_shape(family: str, **changes: object) -> None:
    """Writes a golden `config.json`, for a vocabulary of bytes, into a folder."""
    raw = json.loads((GOLDEN / family / "config.json").read_text())
    Path(family).mkdir(exist_ok=True)
    text = json.dumps(raw | {"vocab_size": 257} | changes)
    Path(family, "config.json").write_text(text)


def test_a_model_is_the_path_of_a_config(jaxkv: Command) -> None:
    write_shape("gpt_neox")
    write_shape("nanochat")
    smoke = document(jaxkv, "train", "smoke", "--print-config")
    Path("one.json").write_text(json.dumps(smoke | {"model": "gpt_neox"}))
    printed = document(jaxkv, "train", "one.json", "--print-config")
    pythia = read_config("gpt_neox")
    assert printed == smoke | {"model": json.loads(config_dumps(pythia))}
    paths = ["gpt_neox", smoke["model"], "nanochat/config.json"]
    settings = {"models": paths, "num_tokens": [100_000], "seq_len": 32}
    Path("all.json").write_text(json.dumps(settings))
    printed = document(jaxkv, "sweep", "all.json", "--print-config")
    config = config_loads(SweepConfig, json.dumps(printed), "x")
    assert config.models == (
        pythia,
        TRAININGS["smoke"].model,
        read_config("nanochat"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_neox", "nanochat"])
def test_from_folders_to_a_law_and_a_served_rung(family: str, jaxkv: Command) -> None:
    paths = []
    for width in (32, 48, 64):
        write_shape(family, hidden_size=width, intermediate_size=4 * width)
        paths.append(str(Path(family).rename(f"{family}-{width}")))
    config = document(jaxkv, "sweep", "smoke", "--print-config")
    Path("ladder.json").write_text(json.dumps(config | {"models": paths}))
    done = document(jaxkv, "sweep", "ladder.json", "--out", "log")
    assert (done["completed"], done["diverged"]) == (18, 0)
    document(jaxkv, "fit", "log", "--bootstrap", "20")
    assert json.loads(Path("log/fit.json").read_text())["num_points"] == 9
    one = document(jaxkv, "train", "smoke", "--print-config")
    Path("rung.json").write_text(json.dumps(one | {"model": paths[-1]}))
    run = document(jaxkv, "train", "rung.json", "--out", "run")
    saved = json.loads(Path(run["model"], "config.json").read_text())
    assert saved["model_type"] == family
    counted = document(jaxkv, "cost", run["model"])
    assert counted["num_params"]["total"] == run["num_params"]
    words = ("--prompt", "def ", "--max-tokens", "3")
    assert document(jaxkv, "generate", run["model"], *words)["completions"]


def test_a_path_without_a_trainable_model_is_one_line(jaxkv: Command) -> None:
    smoke = document(jaxkv, "train", "smoke", "--print-config")
    for name, model in (("one", "gpt_neox"), ("lost", "missing"), ("odd", 7)):
        Path(f"{name}.json").write_text(json.dumps(smoke | {"model": model}))
    assert_refused(jaxkv, "train lost.json", "missing: no such file")
    assert_refused(jaxkv, "train odd.json", "odd.json: model: 7 is not of type")
    for changes, line in [
        ({"embedding_multiplier": 3}, "embedding_multiplier=3 may change the logits"),
        ({"vocab_size": 128}, "model.vocab_size=128 must be at least"),
        ({"max_position_embeddings": 16}, "seq_len=32 must be at most"),
    ]:
        write_shape("gpt_neox", **changes)
        assert_refused(jaxkv, "train one.json", line)


def test_the_loss_table_shows_completed_runs() -> None:
    def record(size: int, tokens: int, loss: float | None, status: str = "done"):
        return {
            "num_params": size,
            "hidden_size": size,
            "num_tokens": tokens,
            "num_steps": tokens,
            "flops": 6.0 * size * tokens,
            "loss": loss,
            "status": status,
        }

    rows = [record(8, 10, 3.0), record(8, 10, 2.5), record(16, 20, None, "diverged")]
    assert sweep_progress.loss_table([]) == ""
    lines = sweep_progress.loss_table(rows).splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["8", "2.5000", "."]
    assert lines[2].split() == ["16", ".", "diverged"]
    records = [record(8, tokens, 2.0) for tokens in range(1, 12)]
    assert sweep_progress.loss_table(records).count("2.0000") == 11
