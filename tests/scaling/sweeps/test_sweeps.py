"""Sweeps: every run once, bit-identical after interruptions, with logs to fit."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.disaggregation import CLUSTER_ENVIRONMENT
from jaxkv.report import config_dumps
from scaling import training
from scaling.logs import best_rates
from scaling.sweeps import (
    SweepOutcome,
    branching,
    grid,
    open_on_device,
    planning,
    run_sweep,
)
from scaling.sweeps.executors import connect_ray
from scaling.sweeps.folder import RECORD, SweepFolder
from scaling.sweeps.grid import Cell, Lane, SweepConfig
from scaling.training import score_stream
from scaling.training.step import TrainStepInfo
from tests.support import sweeping
from tests.support.impatience import Stopping
from tests.support.sweeping import model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SweepConfig:
    return sweeping.config(tmp_path_factory.mktemp("sweep"))


@pytest.fixture
def small(config: SweepConfig) -> SweepConfig:
    """Two rates at two lengths of one model."""
    return dataclasses.replace(config, models=(model(8),), max_extensions=0)


@pytest.fixture(scope="module")
def full_sweep(config: SweepConfig, tmp_path_factory: pytest.TempPathFactory):
    return run_sweep(config, tmp_path_factory.mktemp("sweep") / "whole")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(folder: Path) -> dict[str, Any]:
    rows = lines(folder / "runs.jsonl")
    assert len({row["run_id"] for row in rows}) == len(rows)
    return {row["run_id"]: (row["loss"], row["status"]) for row in rows}


def test_every_run_is_made_and_described(full_sweep: SweepOutcome, config) -> None:
    assert full_sweep.num("done") == len(full_sweep.records) >= 8
    assert full_sweep.skipped == 0
    for row in full_sweep.records:
        assert [*row] == [*RECORD]
        assert row["flops_6nd"] == 6 * row["num_params"] * row["num_tokens"]
        assert 0 < (row["loss"] or 0.0) < np.log(257) * 1.1
        assert row["decayed"]
        assert (row["loss_se"] or 0.0) > 0
    points = lines(full_sweep.log / "curves.jsonl")
    assert {p["run_id"] for p in points} == {r["run_id"] for r in full_sweep.records}
    # If the best rate was at the edge, the rates were extended, in that cell only.
    rates = {
        row["learning_rate"] for row in full_sweep.records if row["hidden_size"] == 8
    }
    assert len(rates) > 2
    rows_by_run = {row["run_id"]: row for row in full_sweep.records}
    digest = SweepFolder(full_sweep.log).header()["corpus_digest"]
    assert planning.next_groups(config, rows_by_run, digest) == []


def test_a_branch_equals_the_separate_run(
    full_sweep: SweepOutcome, config, tmp_path
) -> None:
    single = dataclasses.replace(config, num_tokens=config.num_tokens[1:])
    run_losses = losses(run_sweep(single, tmp_path / "single").log)
    assert len(run_losses) >= 4
    for run_id, loss in run_losses.items():
        assert losses(full_sweep.log)[run_id] == loss


@pytest.mark.parametrize(
    ("schedule", "run_id", "cell_id"),
    [
        ("wsd", "0b7d7f77c934ac02", "6031b36779bbeaff"),
        ("stable", "0b7d7f77c934ac02", "6031b36779bbeaff"),
        ("cosine", "205b95f9337a4eb4", "68fc969ea0b9622e"),
    ],
)
def test_run_names_do_not_change(config, schedule, run_id, cell_id) -> None:
    plain = dataclasses.replace(config, schedule=schedule)
    run = grid.train_config(plain, Cell(model(8), 20), Lane(1e-2, 0))
    names = (grid.run_id(plain, run, "text"), grid.cell_id(plain, run, "text"))
    assert names == (run_id, cell_id)


AXES: dict[str, Any] = {
    "models": (model(8),),
    "learning_rates": (2e-2,),
    "max_extensions": 0,
    "batch_sizes": (2, 4),
    "weight_decays": (0.0, 0.1),
    "schedules": ("wsd", "constant"),
    "num_tokens": (32 * 19, 32 * 40),
}


def test_batches_have_equal_tokens(config) -> None:
    axes = dataclasses.replace(config, **AXES)
    settings = {*itertools.product((2, 4), (0.0, 0.1), ("wsd", "constant"))}
    # 19 steps of 2 windows become 20, so that 10 of 4 windows have as many tokens.
    assert {(steps, setting) for _, steps, setting in grid.list_cells(axes)} == {
        (steps * 2 // setting[0], setting)
        for steps, setting in itertools.product((20, 40), settings)
    }
    groups = planning.next_groups(axes, {}, "text")
    assert [group.setting for group in groups] == [*axes.settings]
    # A constant run is the beginning of every longer one.
    steps = {grid.group_steps(axes, group) for group in groups[:2]}
    assert steps == {40 - 16 + 16 + 8, 40}


@pytest.mark.slow
def test_axes_make_the_runs_of_separate_sweeps(config, tmp_path) -> None:
    axes = dataclasses.replace(config, **AXES)
    plain = dataclasses.replace(axes, batch_sizes=(), weight_decays=(), schedules=())
    out = tmp_path / "axes"
    assert run_sweep(axes, out, progress=Stopping(13)).is_stopped
    assert [*(out / "paused").iterdir()]
    records = run_sweep(axes, out).records
    assert len(records) == 2 * 2 * 2 * 2
    assert {x["num_tokens"] for x in records} == {32 * 20, 32 * 40}
    settings = {(x["batch_tokens"], x["weight_decay"], x["schedule"]) for x in records}
    assert settings == {*itertools.product((32, 64), (0.0, 0.1), ("wsd", "constant"))}
    assert {x["schedule"] for x in records if x["decayed"]} == {"wsd"}
    for setting in axes.settings[:2] + axes.settings[-1:]:
        decay = setting.weight_decay
        single = dataclasses.replace(
            plain,
            batch_size=setting.batch_size,
            optimizer=dataclasses.replace(plain.optimizer, weight_decay=decay),
            schedule=setting.schedule,
        )
        # One length: no branch, and no shorter constant run on the way.
        single = dataclasses.replace(single, num_tokens=(32 * 40,))
        separate = losses(run_sweep(single, tmp_path / "_".join(map(str, setting))).log)
        assert len(separate) == 1
        assert separate.items() <= losses(out).items()


def test_a_folder_with_the_earlier_name_of_wsd_continues(
    full_sweep: SweepOutcome, config, tmp_path
) -> None:
    out = tmp_path / "earlier"
    shutil.copytree(full_sweep.log, out)
    text = (out / "sweep.json").read_text()
    assert '"schedule": "wsd"' in text
    text = text.replace('"schedule": "wsd"', '"schedule": "stable"')
    (out / "sweep.json").write_text(text)
    assert run_sweep(config, out).skipped == len(full_sweep.records)


def test_cosines_of_two_lengths_share_the_warm_up(
    full_sweep: SweepOutcome, config, tmp_path
) -> None:
    cosine = dataclasses.replace(
        config, schedule="cosine", models=(model(8),), learning_rates=(2e-2,)
    )
    group = grid.RunGroup(model(8), (), (20, 40), cosine.settings[0])
    assert grid.group_steps(cosine, group) == 4 + 16 + 36
    both = losses(run_sweep(cosine, tmp_path / "both").log)
    single = dataclasses.replace(cosine, num_tokens=cosine.num_tokens[1:])
    run_losses = losses(run_sweep(single, tmp_path / "single").log)
    assert len(both) == 2
    assert len(run_losses) == 1
    assert run_losses.items() <= both.items()
    assert not both.keys() & losses(full_sweep.log).keys()
    run = grid.train_config(cosine, Cell(model(8), 40), Lane(2e-2, 0))
    corpus = open_on_device(cosine.corpus)
    (run_id,) = run_losses
    trained = training.train(run, tmp_path / "trained")
    score = score_stream(
        trained.params,
        corpus.held_out,
        model=run.model,
        seq_len=run.seq_len,
        num_windows=8,
    )
    assert run_losses[run_id][0] == pytest.approx(score.loss, rel=1e-5)


@pytest.mark.slow
def test_a_stopped_sweep_continues(full_sweep: SweepOutcome, config, tmp_path) -> None:
    out = tmp_path / "sweep"
    stopped = run_sweep(config, out, progress=Stopping(20))
    assert stopped.is_stopped
    assert 0 < len(stopped.records) < len(full_sweep.records)
    with (out / "runs.jsonl").open("a") as file:
        file.write('{"run_id": "half a li')  # a line of a killed process
    with (out / "curves.jsonl").open("a") as file:
        file.write('{"run_id": "no record", "step": 1.0}\n')
    second_sweep = run_sweep(config, out)
    assert second_sweep.skipped == len(stopped.records)
    assert losses(out) == losses(full_sweep.log)
    assert "no record" not in (out / "curves.jsonl").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["loop", pytest.param("vmap", marks=pytest.mark.slow)])
def test_partial_runs_are_resumed(small, tmp_path, monkeypatch, mode) -> None:
    small = dataclasses.replace(small, mode=mode, cooldown=0.7)
    unbroken = run_sweep(small, tmp_path / "unbroken")
    taken = []
    real = branching._go

    def count(call, lanes, *args):
        outcome = real(call, lanes, *args)
        taken.append((outcome[0].step - lanes.step) * len(lanes.alive))
        return outcome

    monkeypatch.setattr(branching, "_go", count)
    out = tmp_path / "sweep"
    calls = 1
    while run_sweep(small, out, progress=Stopping(13)).is_stopped:
        assert len([*(out / "paused").iterdir()]) == 1
        calls += 1
    assert calls > 1
    assert not (out / "paused").exists()
    # No repeated step, and the same bits.
    lanes = 2
    group = grid.RunGroup(model(8), (), (20, 40), small.settings[0])
    assert sum(taken) == lanes * grid.group_steps(small, group)
    assert losses(out) == losses(unbroken.log)
    for name in ("runs.jsonl", "curves.jsonl"):
        taken_up, unbroken_rows = (
            [row | {"seconds": 0} for row in lines(log / name)]
            for log in (out, unbroken.log)
        )
        assert taken_up == unbroken_rows


def test_a_damaged_pause_raises_an_error_with_advice(small, tmp_path) -> None:
    out = tmp_path / "sweep"
    assert run_sweep(small, out, progress=Stopping(1)).is_stopped
    (place,) = (out / "paused").iterdir()
    (place / "half.json").write_text("{}")
    with pytest.raises(ValueError, match=r"paused/.* cannot be continued; delete it"):
        run_sweep(small, out)


def test_divergence_is_recorded_once(config, tmp_path) -> None:
    # A rate at which float32 overflows.
    wild = dataclasses.replace(
        config, models=(model(8),), learning_rates=(1e30,), num_tokens=(32 * 20,)
    )
    first = run_sweep(wild, tmp_path / "sweep")
    assert [row["status"] for row in first.records] == ["diverged"]
    assert first.records[0]["loss"] is None
    again = run_sweep(wild, tmp_path / "sweep")
    assert (again.skipped, len(again.records)) == (1, 1)


def test_a_full_disk_leaves_whole_lines(
    full_sweep, config, tmp_path, monkeypatch
) -> None:
    out = tmp_path / "sweep"
    real = os.write
    room = [3000]

    def write(handle: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(28, "No space left on device")
        num = real(handle, data[: room[0]])
        room[0] -= num
        return num

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(ValueError, match=r"curves.jsonl: .*No space left on device"):
        run_sweep(config, out)
    monkeypatch.undo()
    for name in ("runs.jsonl", "curves.jsonl"):
        if (out / name).exists():
            assert (out / name).read_text()[-1:] in ("", "\n")
    run_sweep(config, out)
    assert losses(out) == losses(full_sweep.log)


def test_a_folder_is_of_one_recipe_and_one_process(full_sweep, config) -> None:
    other = dataclasses.replace(config, batch_size=4)
    with pytest.raises(ValueError, match=r"another sweep; differs in \['batch_size'\]"):
        run_sweep(other, full_sweep.log)
    folder = SweepFolder(full_sweep.log)
    with pytest.raises(ValueError, match=f"process {os.getpid()} is writing here"):
        run_sweep(config, full_sweep.log)
    folder.close()


@pytest.mark.thorough
def test_runs_side_by_side_are_one_program(small) -> None:
    corpus = open_on_device(small.corpus)
    cell = Cell(model(8), 20)
    runs = [grid.train_config(small, cell, Lane(x, 0)) for x in (1.0, 2.0)]
    call = branching._call(runs, corpus, True)
    lanes = branching.init_runs(runs, True)
    state, info = call(lanes.state, branching._schedules(runs, True), jnp.int32(1))
    assert state.step.tolist() == [1, 1]
    assert info.loss[0] == info.loss[1]  # before the first update


@pytest.mark.slow
def test_vmap_finds_what_a_loop_finds(full_sweep, config, tmp_path) -> None:
    vmap_sweep = run_sweep(dataclasses.replace(config, mode="vmap"), tmp_path / "vmap")
    vmapped = losses(vmap_sweep.log)
    looped = losses(full_sweep.log)
    for run_id in vmapped.keys() & looped.keys():
        assert vmapped[run_id][0] == pytest.approx(looped[run_id][0], rel=1e-3)
    assert len(vmapped.keys() & looped.keys()) >= 8
    assert json.loads((vmap_sweep.log / "sweep.json").read_text())["mode"] == "vmap"


def test_the_trial_of_modes_leaves_out_compilation(config, monkeypatch) -> None:
    calls = []

    def compiled_first(state, stream, schedule, seeds, num_steps):
        if not calls:
            time.sleep(0.4)
        calls.append(num_steps)
        return state, TrainStepInfo(jnp.float32(5.0), None)

    monkeypatch.setattr(branching, "_program", lambda *args: compiled_first)
    lane = grid.Lane(1e-2, 0)
    run = grid.train_config(config, grid.list_cells(config)[0], lane)
    corpus = open_on_device(config.corpus)
    speed = branching.measure_speed([run], corpus, is_vmapped=False, patience_s=0.1)
    assert speed > 1000  # with it, 4 steps in 0.4 s


def test_repetitions_are_of_the_best(full_sweep, config, tmp_path) -> None:
    again = dataclasses.replace(config, seeds=(0, 1, 2), num_repeated=1)
    digest = json.loads((full_sweep.log / "sweep.json").read_text())["corpus_digest"]
    rows_by_run = {row["run_id"]: row for row in full_sweep.records}
    groups = planning.next_groups(again, rows_by_run, digest)
    assert {group.model for group in groups} == {model(8)}
    assert sum(len(group.horizons) for group in groups) == 2
    for group in groups:
        for steps in group.horizons:
            rows = [
                row
                for row in full_sweep.records
                if (row["hidden_size"], row["num_steps"]) == (8, steps)
            ]
            best = min(rows, key=lambda row: row["loss"])
            assert {lane.learning_rate for lane in group.lanes} == {
                best["learning_rate"]
            }
            assert [lane.seed for lane in group.lanes] == [1, 2]


def test_budgets_become_steps(config) -> None:
    budget = 1e9
    sized = dataclasses.replace(config, num_tokens=(), budgets=(budget,))
    for cell in grid.list_cells(sized):
        per_token = grid.count_cost(cell.model, 16).flops_per_token
        assert abs(cell.num_steps * 32 * per_token - budget) <= 32 * per_token / 2
        ratio = cell.num_steps * 32 / grid.count_cost(cell.model, 16).params.total
        few = dataclasses.replace(sized, tokens_per_param=(ratio, 2 * ratio))
        assert cell in grid.list_cells(few)
        one_model = dataclasses.replace(sized, models=(cell.model,), min_steps=1)
        with pytest.raises(ValueError, match="no run is left"):
            dataclasses.replace(one_model, tokens_per_param=(0.0, 0.99 * ratio))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ()}, "models"),
        ({"num_tokens": ()}, "budgets or num_tokens"),
        ({"learning_rates": (2.0, 1.0)}, "must be ascending"),
        ({"min_steps": 10**6}, "min_steps=1000000 is more than the 40 steps"),
        ({"tokens_per_param": (1e5, 2e5)}, "no run is left: .*tokens_per_param="),
        ({"tokens_per_param": (20.0, 20.0)}, "must rise from 0 or more"),
        ({"seq_len": 17}, r"seq_len=17 must be at most model.max_positions=16"),
        ({"batch_size": 1000}, "batch_size=1000 windows of .*=16 tokens is more than"),
        ({"seeds": (1, 1)}, "different"),
        ({"batch_sizes": (2, 3)}, r"batch_sizes=\(2, 3\) must divide the largest one"),
        ({"batch_sizes": (4, 2)}, "must be ascending, from 1"),
        ({"weight_decays": (-1.0,)}, "must be ascending, from 0"),
        ({"schedules": ("wsd", "wsd")}, "schedules=.* must be different"),
        ({"schedules": ("stable",)}, "'stable' is named 'wsd'"),
    ],
)
def test_invalid_grids_are_refused(config, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)


def test_a_cluster_that_is_not_there_is_refused_at_once(
    config, tmp_path, monkeypatch
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        fake = types.SimpleNamespace(is_initialized=lambda: False)
        monkeypatch.setitem(sys.modules, "ray", fake)
        far = dataclasses.replace(config, executor="ray", ray_address=address)
        with pytest.raises(ValueError, match=r"127.*no cluster: .*refused"):
            run_sweep(far, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_cluster_opens_no_port_for_metrics(config, monkeypatch) -> None:
    environment: dict[str, str] = {}
    fake = types.SimpleNamespace(
        is_initialized=lambda: False, init=lambda **_: environment.update(os.environ)
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name in CLUSTER_ENVIRONMENT:  # restored after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")  # a choice of the user
    connect_ray(dataclasses.replace(config, executor="ray"))
    assert environment["AUTOSCALER_METRIC_PORT"] == "-1"
    assert environment["RAY_enable_metrics_collection"] == "0"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "1"


_CHILD = """
import sys, time
from pathlib import Path
from jaxkv.report import plain_json as config_json
from jaxkv import progress
from scaling.sweeps import sweep
from scaling.sweeps.grid import SweepConfig
import jax
jax.config.update("jax_disable_most_optimizations", True)

class Slow(progress.Quiet):
    def bar(self, label, total, unit):
        print("begun", flush=True)
        return lambda done: time.sleep(0.05)

config = config_json.config_loads(SweepConfig, Path(sys.argv[1]).read_text(), "x")
sweep.run_sweep(config, Path(sys.argv[2]), progress=Slow())
"""


def kill(config: SweepConfig, out: Path, num_new: int, after_s: float) -> int:
    """Starts or continues a sweep in a process, and kills it during its runs.

    The kill is a short time after `num_new` new runs. Returns the number of runs in the
    folder.
    """

    def count() -> int:
        log = out / "runs.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    expected = count() + num_new
    path = out.with_suffix(".json")
    path.write_text(config_dumps(config))
    args = [sys.executable, "-c", _CHILD, str(path), str(out)]
    with subprocess.Popen(args, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        while count() < expected and child.poll() is None:
            time.sleep(0.01)
        time.sleep(after_s)
        child.kill()
    assert child.returncode == -signal.SIGKILL  # still running when killed
    return count()


@pytest.mark.thorough
def test_kill_9(full_sweep, small, tmp_path) -> None:
    num_done = kill(small, tmp_path / "sweep", 1, 0.1)
    again = run_sweep(small, tmp_path / "sweep")
    assert 0 < num_done == again.skipped < len(again.records) == 4
    for run_id, loss in losses(tmp_path / "sweep").items():
        assert losses(full_sweep.log)[run_id] == loss


@pytest.mark.slow
def test_kill_9_five_times(full_sweep, config, tmp_path) -> None:
    draws = np.random.default_rng()
    done_counts = [
        kill(config, tmp_path / "sweep", num_new, draws.uniform(0.0, 0.4))
        for num_new in (0, 1, 0, 1, 0)
    ]
    assert done_counts == sorted(done_counts)
    assert 2 <= done_counts[-1] < len(full_sweep.records)
    run_sweep(config, tmp_path / "sweep")
    assert losses(tmp_path / "sweep") == losses(full_sweep.log)


def test_the_best_rate_of_each_cell_wins() -> None:
    def row(cell: str, rate: float, seed: int, loss: float) -> dict[str, Any]:
        return {"cell": cell, "learning_rate": rate, "seed": seed, "loss": loss}

    rows = [
        row("a", 1.0, 0, 3.0),
        row("a", 2.0, 0, 2.9),
        row("a", 2.0, 1, 3.3),  # a worse mean, but the other rate has no seed 1
        row("b", 1.0, 0, 2.0),
        row("b", 0.5, 0, 2.0),
        row("c", 4.0, 7, 1.0),
    ]
    assert best_rates.find_winners(rows) == [1, 2, 4, 5]


def test_a_recorded_loss_is_at_the_mean_of_its_steps() -> None:
    def call(state: Any, schedule: Any, num_steps: Any) -> tuple[Any, Any]:
        steps = state + np.arange(1, int(num_steps) + 1)  # a loss equals its step
        return state + int(num_steps), types.SimpleNamespace(loss=steps.mean())

    lanes = branching.BatchedRuns(0, 0, np.ones(1, bool), ((),), 0.0)  # ty: ignore[invalid-argument-type]
    lanes, _ = branching._go(call, lanes, None, 100)  # ty: ignore[invalid-argument-type]
    (curve,) = lanes.curves
    assert len(curve) > 2
    assert all(place == loss for place, loss in curve)


def test_curves_of_runs_without_a_record_are_removed(tmp_path) -> None:
    SweepFolder(tmp_path).close()
    (tmp_path / "runs.jsonl").write_text('{"run_id": "a"}\n')
    row = '{"run_id": "a", "step": 1.0}\n'
    (tmp_path / "curves.jsonl").write_text(row + row.replace('"a"', '"b"'))
    SweepFolder(tmp_path).close()
    assert (tmp_path / "curves.jsonl").read_text() == row
