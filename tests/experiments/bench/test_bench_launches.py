"""Kernel launches of a step: upper bounds, and counts of a hand-made plan."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.bench.launches import experiment
from experiments.bench.launches.experiment import CONFIGS, Launches
from experiments.framework import load_experiment
from jaxkv.cli import run
from jaxkv.report import Experiment, run_folder
from pallas_kernels.bench import Route, Thunk, deviceless
from tests.support import folders, smoke
from tests.support.mutation import replace

WHY_NOT = deviceless.unavailable_reason()
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

# Launches of a layer, of a forward pass without layers, of a step without both.
# Lower the bars with the counts; never raise them.
BARS = {
    "smoke": {"greedy": (10, 10, 41), "sampled": (10, 10, 63), "mixed": (10, 19, 43)}
}


def assert_below_the_bars(name: str, result: Launches) -> None:
    per_unit = [result.per(which) for which in ("layer", "forward", "step")]
    for path, bars in BARS[name].items():
        for counts_by_path, bar in zip(per_unit, bars, strict=True):
            assert counts_by_path[path] <= bar, (name, path)


@needs_compiler
@pytest.mark.slow
def test_launch_counts_do_not_exceed_the_bars() -> None:
    result = smoke.run("bench_launches").result
    assert_below_the_bars("smoke", result)
    # The host reads no condition, no weight is copied, pools are updated in place.
    assert result.waits.captured.all()
    assert len(result.waits) > 10
    assert result.weight_copies == 0
    assert result.alias_bytes >= result.pool_bytes


def thunk(kind: str, scope: str = "", **fields: Any) -> Thunk:
    trips = fields.pop("trips", None)
    return Thunk(kind, "name", scope, trips, {k: v for k, v in fields.items()})


STEP = "jit(run_steps)/while/body"
PLAN = [
    thunk("Copy"),  # before the scan: once a call, not once a step
    thunk(
        "While",
        "jit(run_steps)/while",
        trips=8,
        condition=[thunk("CustomKernel")],
        body=[
            thunk("CustomKernel", f"{STEP}/counts/reduce_sum"),
            thunk("CustomKernel"),  # nameless
            thunk(
                "While",
                f"{STEP}/decode/while",
                condition=[thunk("CustomKernel", f"{STEP}/decode/while/cond/lt")],
                body=[
                    thunk("CublasLtMatmul", f"{STEP}/decode/while/body/dot_general"),
                    thunk("CustomKernel", f"{STEP}/decode/while/body/layer/add"),
                    thunk("CustomKernel", f"{STEP}/decode/while/body/layer/mul"),
                    thunk("CustomKernel", f"{STEP}/decode/while/body/layer/mul"),
                ],
            ),
            thunk(
                "Conditional",
                f"{STEP}/emit/draw/sampled/cond",
                false_branch=[],
                true_branch=[
                    thunk(
                        "CustomKernel", f"{STEP}/emit/draw/sampled/cond/branch_1_fun/x"
                    )
                ],
            ),
            thunk(
                "While",
                f"{STEP}/apply_plan/copy/while",
                condition=[thunk("CustomKernel")],
                body=[thunk("Copy")],
            ),
        ],
    ),
]


def test_parts_of_a_step() -> None:
    counts = experiment.count_launches(PLAN, 2)
    rows = {
        (path, part): num
        for path, part, num in zip(*vars(counts).values(), strict=True)
        if num
    }
    # A loop's condition runs once more than its body; three launches of two layers
    # count as two per layer; an unnamed loop has no trip.
    every = {"counts": 1, "apply_plan": 1, "other": 1}
    decode = {"forward": 1 + 2, "layer": 2}
    expected = {
        "greedy": {**every, **decode},
        "sampled": {**every, **decode, "emit": 1},
        "mixed": {**every, "forward": 1},
    }
    assert rows == {
        (path, part): num
        for path, parts in expected.items()
        for part, num in parts.items()
    }


def test_scopes_of_jax_and_xla_are_removed() -> None:
    scope = "jit(run_steps)/while/body/eval_jaxpr/emit/draw/cond/branch_1_fun/cut/cond"
    assert experiment.scope_of(thunk("Conditional", scope)) == "emit/draw/cut"


def test_copies_of_weights_are_found() -> None:
    params = {"up": jax.ShapeDtypeStruct((2, 4, 8), jnp.bfloat16)}
    text = """
      %a = bf16[4,8]{1,0} copy(%w)
      %b = bf16[2,4,8]{2,1,0} copy(%w)
      %c = f32[4,8]{1,0} copy(%x)
      %d = bf16[4,8]{1,0} add(%a, %a)
    """
    assert experiment.weight_copies(text, params) == 2


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, deviceless, "unavailable_reason", lambda: "there is none")
    with pytest.raises(ValueError, match=r"cannot compile for an H200: there is none"):
        experiment.run(CONFIGS["smoke"])


def test_the_document_has_each_count_by_path() -> None:
    counts = experiment.count_launches(PLAN, 2)
    waits = experiment.DataDependentLoops.of([("emit/draw", "Conditional", 0)])
    compiled = experiment.CompileTimes.of([(2, 3.0, 1.5), (8, 9.0, 4.5)])
    metrics = experiment.metrics(Launches(counts, waits, compiled, False, 0, 1, 1))
    assert metrics["per_layer"] == {"greedy": 2, "sampled": 2, "mixed": 0}
    assert metrics["per_forward"] == {"greedy": 3, "sampled": 3, "mixed": 1}
    assert metrics["per_step"] == {"greedy": 3, "sampled": 4, "mixed": 3}
    assert metrics["compile_s"] == 6.0
    assert metrics["loops_outside_graphs"] == 1
    for path, parts in metrics["parts"].items():
        assert sum(parts.values()) == metrics["per_step"][path]
        assert {"counts", "emit", "other"} < parts.keys()
        # Keys of the document in earlier versions.
        assert metrics[path]["step"] == metrics["per_step"][path]
        assert metrics[path]["layer"] == metrics["per_layer"][path]
    assert metrics["compile_8_layers_s"] == 4.5
    output = experiment.summary(Launches(counts, waits, compiled, False, 0, 1, 1))
    assert "per_layer" not in str(output)


def test_prepare_runs_before_devices_are_initialized(
    experiment_with_all: Experiment,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    [launches] = load_experiment("bench_launches").studies
    assert launches.prepare is experiment.prepare
    calls = []
    begin = run_folder.begin_run
    made_up = experiment_with_all.studies[0]._replace(prepare=lambda: calls.append(1))
    replace(
        monkeypatch,
        run_folder,
        "begin_run",
        lambda *args: (calls.append(2), begin(*args)),
    )
    experiment_with_one = experiment_with_all._replace(studies=(made_up,))
    run.run_study(experiment_with_one, made_up.configs["smoke"], tmp_path / "out")
    assert calls == [1, 2]


@pytest.fixture(name="experiment_with_all")
def _experiment_with_all(request: pytest.FixtureRequest) -> Experiment:
    """The fixture `experiment`, whose name is a module in this file."""
    return request.getfixturevalue("experiment")


def test_the_compiler_is_found_where_setup_puts_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(deviceless, "_is_installed", lambda name: False)
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    monkeypatch.setattr(deviceless, "_DRIVER", tmp_path / "driver")
    deviceless.load_compiler()
    assert sys.path == []
    (tmp_path / "deviceless").mkdir()
    deviceless.load_compiler()
    assert sys.path == [str(tmp_path / "deviceless")]
    assert os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1"
    # With a GPU, the checks of JAX are useful.
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    (tmp_path / "driver").touch()
    deviceless.load_compiler()
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ


STARTED = """if True:
    from pallas_kernels.bench import deviceless
    deviceless.load_compiler()
    assert deviceless.unavailable_reason() is None
    import jax
    assert jax.devices()[0].platform == "cpu"
    assert deviceless.make_h200_mesh({"device": 1}).size == 1
"""


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("is_named", [False, True])
def test_jax_starts_with_the_compiler_and_without_a_gpu(is_named: bool) -> None:
    taken = ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "PYTHONPATH")
    variables = {k: v for k, v in os.environ.items() if k not in taken}
    folder = [str(Path(sys.prefix, "deviceless"))] if is_named else []
    variables["PYTHONPATH"] = os.pathsep.join([str(folders.ROOT), *folder])
    words = [sys.executable, "-c", STARTED]
    done = subprocess.run(words, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_route_matches_the_innermost_scope() -> None:
    quiet = experiment._Quiet("made up", {"draw": 1})
    assert isinstance(quiet, Route)
    assert quiet.choice(thunk("Conditional", "emit/draw/cond")) == 1
    assert quiet.choice(thunk("Conditional", "emit/draw/branch_1_fun/cut/cond")) == 0
