"""`isoflop` and `learning_rate`: what is foreseen is foreseen first, and kept."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.cli import generate
from experiments.framework import registry, run_folder
from experiments.training.isoflop import experiment as isoflop_experiment
from experiments.training.isoflop.prediction import (
    average,
    learning_rate,
    optimal_rates,
    rows_of,
    seed_spread,
)
from experiments.training.isoflop.settings import nearest, shape
from experiments.training.learning_rate import experiment as learning_rate_experiment
from scaling.sweeps import grid


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `isoflop smoke` that keeps its sweep."""
    out = tmp_path_factory.mktemp("isoflop")
    config = dataclasses.replace(
        isoflop_experiment.CONFIGS["smoke"], folder=str(out / "sweep"), keep_models=True
    )
    experiment = registry.load("isoflop")
    run_folder.begin(out / "run", experiment, config)
    run_folder.finish(
        out / "run", experiment, isoflop_experiment.run(config), duration_s=1.0
    )
    return out


@pytest.mark.slow
def test_the_folder_has_the_log_and_the_prediction(folder: Path) -> None:
    run = run_folder.read(folder / "run", registry.load("isoflop"))
    names = ("runs.jsonl", "sweep.json", "cosine.json", "prediction.json", "fit.json")
    for name in names:
        assert (folder / "run" / name).stat().st_size > 0
    assert run.metrics["held_out_factor"] == pytest.approx(2, rel=0.1)
    assert {"truth", "error_share", "is_inside"} <= run.metrics.keys()
    assert len(run.claims) == 6
    assert run.metrics["cosine_runs"] == 9
    assert run.metrics["interior_minima"] >= 2


@pytest.mark.slow
def test_it_was_foreseen_before(folder: Path) -> None:
    prediction = folder / "sweep" / "prediction.json"
    truth = folder / "sweep" / "held_out.json"
    assert prediction.stat().st_mtime < truth.stat().st_mtime
    before = prediction.read_bytes()
    config = run_folder.read(folder / "run", registry.load("isoflop")).config
    again = isoflop_experiment.run(
        config
    )  # nothing is trained, and nothing foreseen, twice
    assert prediction.read_bytes() == before
    assert json.loads(again.held_out) == json.loads(truth.read_text())
    prediction.write_text(before.decode().replace('"law"', '"low"', 1))
    with pytest.raises(ValueError, match="its truth is known"):
        isoflop_experiment.run(config)
    prediction.write_bytes(before)


@pytest.mark.slow
def test_the_engine_serves_what_was_trained(folder: Path) -> None:
    options = generate.Options(prompt=("def ",), max_tokens=4)
    models = folder / "sweep" / "models"
    rows = rows_of(folder / "sweep")
    assert {x.name for x in models.iterdir()} == {
        *(row["run_id"] for row in rows),
        "held_out",
    }
    for name in (rows[0]["run_id"], "held_out"):
        answer = generate.generate(str(models / name), options)
        (completion,) = answer.document["completions"]
        assert len(completion["tokens"]) == 4


def test_laws_are_averaged_by_how_well_they_foretell() -> None:
    by_law = {"a": 1.0, "b": math.e}
    value, spread = average(by_law, {"a": 0.01, "b": 0.02})
    assert value == pytest.approx(math.exp(0.2))  # weights 4 to 1
    assert spread == pytest.approx(0.4)
    value, spread = average(by_law, {"a": math.inf, "b": math.inf})
    assert (value, spread) == pytest.approx((math.exp(0.5), 0.5))
    value, spread = average(by_law, {"a": 0.01, "b": math.inf})
    assert (value, spread) == pytest.approx((1.0, 0.0))


def test_optima_of_rates_are_found() -> None:
    rows: list[dict[str, Any]] = [
        {
            "cell": f"{width} {tokens}",
            "seed": 0,
            "hidden_size": width,
            "num_tokens": tokens,
            "learning_rate": rate,
            "loss": 2 + math.log(rate * width * tokens**0.2) ** 2,
        }
        for width in (8, 16, 32)
        for tokens in (1000, 8000)
        for rate in 1 / width * np.array([0.06, 0.12, 0.24, 0.48])
    ]
    found = optimal_rates(rows)
    assert len(found) == 6
    for width, tokens, rate in found:
        assert rate == pytest.approx(1 / width / tokens**0.2, rel=1e-6)
    rate, powers = learning_rate(rows, 64, 64000)
    assert rate == pytest.approx(1 / 64 / 64000**0.2, rel=1e-3)
    assert powers == pytest.approx((-1, -0.2))
    fit = learning_rate_experiment.fit(*np.array(found, float).T, level=0.9)
    assert (fit.of_width, fit.of_tokens) == pytest.approx((-1, -0.2))
    edge = [row for row in rows if row["learning_rate"] * row["hidden_size"] > 0.2]
    assert optimal_rates(edge) == []


def test_the_nearest_model_has_the_nearest_size() -> None:
    config = isoflop_experiment.CONFIGS["cpu"]
    for width in (8, 48, 112):
        size = grid.count(shape(width, 2, 64), 64).params.total
        assert nearest(config, 1.02 * size) == shape(width, 2, 64)


def test_seeds_spread_is_pooled() -> None:
    rows = [
        {"cell": cell, "loss": math.exp(x)}
        for cell, values in {"a": (0, 0.2), "b": (1, 1.4), "c": (5,)}.items()
        for x in values
    ]
    found = seed_spread(rows)
    assert found == pytest.approx(math.sqrt((0.02 + 0.08) / 2))


@pytest.mark.slow
def test_the_learning_rate_experiment_runs(tmp_path: Path) -> None:
    experiment = registry.load("learning_rate")
    config = learning_rate_experiment.CONFIGS["smoke"]
    run_folder.begin(tmp_path / "run", experiment, config)
    result = learning_rate_experiment.run(config)
    run = run_folder.finish(tmp_path / "run", experiment, result, duration_s=1.0)
    assert run.metrics["runs"] >= 8
