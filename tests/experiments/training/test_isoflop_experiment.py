"""`isoflop` and `learning_rate`: predictions are made first, and kept."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.framework import load_experiment
from experiments.training.isoflop import experiment as isoflop_experiment
from experiments.training.isoflop import report
from experiments.training.isoflop.prediction import average_predictions, seed_spread
from experiments.training.learning_rate import experiment as learning_rate_experiment
from jaxkv.cli import generate
from jaxkv.report import read_run
from scaling.sweeps import (
    count_cost,
    extrapolate,
    family_shape,
    fit_powers,
    nearest_shape,
    optimal_rates,
)
from tests.support import smoke
from tests.support.folders import RECORDS


@pytest.fixture(scope="module")
def folder() -> Path:
    """Returns the folder of the smoke run's sweep."""
    return Path(smoke.run("isoflop").config.folder)


@pytest.mark.slow
def test_the_folder_has_the_log_and_the_prediction(folder: Path) -> None:
    run = smoke.run("isoflop")
    assert run.metrics["held_out_factor"] == pytest.approx(2, rel=0.1)
    assert {"truth", "error_share", "is_inside"} <= run.metrics.keys()
    metrics = run.metrics
    measured = smoke.measured_values(run.claims)
    assert (
        metrics["truth"] == json.loads((folder / "held_out.json").read_text())["loss"]
    )
    missed = abs(metrics["predicted"] - metrics["truth"])
    gain = metrics["best_fitted_loss"] - metrics["truth"]
    predicted = "error of the predicted loss of a larger run, as a share of its gain"
    assert measured[predicted] == pytest.approx(abs(missed / gain))
    inside = "the truth is in the 90 % interval that was predicted"
    assert measured[inside] == (metrics["low"] <= metrics["truth"] <= metrics["high"])
    assert run.metrics["cosine_runs"] == 9
    assert metrics["interior_minima"] == interior_minima(run.result.runs)


def interior_minima(log: str) -> int:
    """Counts budgets whose parabola in ln N has a minimum between two sizes."""
    by_budget: dict[int, dict[int, list[float]]] = {}
    for row in map(json.loads, log.splitlines()):
        budget = round(4 * math.log(row["flops"]))  # they are 1.6 times apart
        sizes = by_budget.setdefault(budget, {})
        sizes.setdefault(row["num_params"], []).append(row["loss"])
    num = 0
    for sizes in by_budget.values():
        x = np.log([*sizes])
        a, b, _ = np.polyfit(x, [np.mean(losses) for losses in sizes.values()], 2)
        num += bool(a > 0 and x.min() < -b / (2 * a) < x.max())
    return num


@pytest.mark.slow
def test_the_prediction_precedes_the_held_out_run(folder: Path) -> None:
    prediction = folder / "prediction.json"
    truth = folder / "held_out.json"
    assert prediction.stat().st_mtime < truth.stat().st_mtime
    before = prediction.read_bytes()
    config = smoke.run("isoflop").config
    again = isoflop_experiment.run(config)  # neither trained nor predicted again
    assert prediction.read_bytes() == before
    assert json.loads(again.held_out) == json.loads(truth.read_text())
    prediction.write_text(before.decode().replace('"law"', '"low"', 1))
    with pytest.raises(ValueError, match="its truth is known"):
        isoflop_experiment.run(config)
    prediction.write_bytes(before)


@pytest.mark.slow
def test_the_engine_serves_the_trained_models(folder: Path) -> None:
    options = generate.GenerateOptions(prompt=("def ",), max_tokens=4)
    models = folder / "models"
    rows = [json.loads(line) for line in smoke.run("isoflop").result.runs.splitlines()]
    assert {row["status"] for row in rows} == {"done"}
    assert {x.name for x in models.iterdir()} == {
        *(row["run_id"] for row in rows),
        "held_out",
    }
    for name in (rows[0]["run_id"], "held_out"):
        answer = generate.generate(str(models / name), options)
        (completion,) = answer.document["completions"]
        assert len(completion["tokens"]) == 4


def test_laws_are_averaged_by_their_errors() -> None:
    by_law = {"a": 1.0, "b": math.e}
    value, spread = average_predictions(by_law, {"a": 0.01, "b": 0.02})
    assert value == pytest.approx(math.exp(0.2))  # weights 4 to 1
    assert spread == pytest.approx(0.4)
    value, spread = average_predictions(by_law, {"a": math.inf, "b": math.inf})
    assert (value, spread) == pytest.approx((math.exp(0.5), 0.5))
    value, spread = average_predictions(by_law, {"a": 0.01, "b": math.inf})
    assert (value, spread) == pytest.approx((1.0, 0.0))


def test_optimal_rates_are_found() -> None:
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
    optima = optimal_rates(rows)
    assert len(optima) == 6
    for width, tokens, rate in optima:
        assert rate == pytest.approx(1 / width / tokens**0.2, rel=1e-6)
    rate, powers = extrapolate(rows, 64, 64000)
    assert rate == pytest.approx(1 / 64 / 64000**0.2, rel=1e-3)
    assert powers == pytest.approx((-1, -0.2))
    fit = fit_powers(*np.array(optima, float).T, level=0.9)
    assert (fit.of_width, fit.of_tokens) == pytest.approx((-1, -0.2))
    edge = [row for row in rows if row["learning_rate"] * row["hidden_size"] > 0.2]
    assert optimal_rates(edge) == []


def test_the_nearest_model_has_the_nearest_size() -> None:
    for width in (8, 48, 112):
        shape = family_shape(width, 2, 64)
        size = count_cost(shape, 64).params.total
        assert nearest_shape(1.02 * size, num_layers=2, seq_len=64) == shape


def test_the_spread_of_seeds_is_pooled() -> None:
    rows = [
        {"cell": cell, "loss": math.exp(x)}
        for cell, values in {"a": (0, 0.2), "b": (1, 1.4), "c": (5,)}.items()
        for x in values
    ]
    spread = seed_spread(rows)
    assert spread == pytest.approx(math.sqrt((0.02 + 0.08) / 2))


@pytest.mark.slow
def test_the_learning_rate_experiment_trains_the_whole_grid() -> None:
    config = learning_rate_experiment.CONFIGS["smoke"]
    training_runs = smoke.run("learning_rate").result.runs
    runs = [
        *zip(
            training_runs.width.tolist(), training_runs.num_tokens.tolist(), strict=True
        )
    ]
    cells = list(itertools.product(config.widths, config.num_tokens))
    assert {*runs} == {*cells}
    # Two rates each, and one more if the better one was at the end.
    for cell in cells:
        row_mask = [run == cell for run in runs]
        rates = training_runs.learning_rate[row_mask]
        assert len(rates) == len({*rates}) == 2 + config.max_extensions


def test_the_table_of_budgets_has_tokens_per_parameter() -> None:
    result: Any = read_run(RECORDS / "isoflop", load_experiment("isoflop")).result
    optima = result.optima
    at = [*optima.methods].index("parabola")
    ratios = [float(row[4] or "nan") for row in report._budgets(result).rows]
    expected = optima.num_tokens[at] / optima.num_params[at]
    np.testing.assert_allclose(ratios, expected, rtol=5e-3)
