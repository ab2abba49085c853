"""Dense models and mixtures are compared at equal active compute."""

import math

import numpy as np
import pytest

from experiments.framework import load_experiment
from experiments.training.experts import experiment, runs
from jaxkv.report import Sheet
from scaling.training import count_model_parameters
from tests.support import smoke
from tests.support.impatience import Stopping

(STUDY,) = load_experiment("experts").studies


def test_pairs_have_equal_cost_except_for_the_router() -> None:
    shapes = runs.Shapes()
    for width in experiment.CONFIGS["cpu"].widths:
        pair = [runs.make_model(kind, width, shapes) for kind in ("dense", "mixture")]
        dense, mixture = map(count_model_parameters, pair)
        router = shapes.num_layers * shapes.num_experts * width
        assert mixture.matmul == dense.matmul + router
        ffn = shapes.num_layers * 3 * shapes.mlp_ratio * width**2
        assert mixture.total == dense.total + router + 3 * ffn


@pytest.mark.slow
def test_smoke_compares_all_pairs() -> None:
    smoke_run = smoke.run("experts")
    result = smoke_run.result
    training_runs = smoke_run.result.runs
    assert training_runs.kind.tolist() == 3 * ["dense", "mixture"] + ["unbalanced"]
    assert training_runs.is_fitted.tolist() == 6 * [True] + [False]
    assert (np.diff(training_runs.flops[0:6:2]) > 0).all()
    np.testing.assert_allclose(
        training_runs.flops[1:6:2] / training_runs.flops[0:6:2], 1, atol=0.1
    )
    assert (training_runs.loss < 5.6).all()  # log(257) is 5.55, before training
    assert result.loads.shape == (2, 1, 4)
    np.testing.assert_allclose(result.loads.mean(axis=2), 1)
    assert result.curve_loss.shape == (2, 50, 3)
    assert smoke_run.claims[0].ours == result.routing_error < 1e-6
    numbers = smoke_run.metrics
    assert len(numbers["runs"]) == 7
    by_layer = [(row["balancing"], row["layer"]) for row in numbers["imbalance"]]
    assert by_layer == [("with", 1), ("without", 1)]
    busiest = [row["busiest"] for row in numbers["imbalance"]]
    np.testing.assert_allclose(busiest, result.loads[:, 0].max(1), rtol=1e-6)
    sheets = [part for part in STUDY.report_parts(result) if isinstance(part, Sheet)]
    assert [len(sheet.rows) for sheet in sheets] == [2, 1, 2, 7]
    for sheet in sheets:
        assert all(len(row) == len(sheet.columns) for row in sheet.rows)
        assert "{" not in str(sheet)


def test_both_kinds_try_the_same_rates_and_seeds() -> None:
    config = experiment.CONFIGS["cpu"]
    training_runs: list[runs.TrainingRun] = []
    for kind, width, rate, seed in runs.tuning_jobs(config):
        best = {"dense": 1.2e-2, "mixture": 4.8e-2}[kind] * 16 / width
        loss = 2 + abs(math.log(rate / best)) + width / 100
        names = {"kind": kind, "width": width, "learning_rate": rate, "seed": seed}
        unused = runs.MixtureScore(loss, 0.0, *2 * [np.zeros((0, 0))])
        training_runs.append(runs.TrainingRun(names | {"loss": loss}, unused))
    jobs = runs.remaining_jobs(config, training_runs)
    assert jobs.pop() == ("unbalanced", 32, 2.4e-2, 0)
    for kind, rate in (("dense", 1.2e-2), ("mixture", 4.8e-2)):
        kind_jobs = [job[1:] for job in jobs if job[0] == kind]
        # The rate scales as 1 / width.
        later = [(width, rate * 16 / width, 0) for width in (32, 40, 48)]
        again = [(width, rate * 16 / width, 1) for width in config.widths]
        assert kind_jobs == later + again


def test_an_empty_run_has_a_report() -> None:
    empty_result = experiment.run(experiment.CONFIGS["smoke"], Stopping(0))
    assert len(empty_result.runs) == 0
    assert STUDY.metrics(empty_result)["runs"] == []
    assert STUDY.report_parts(empty_result)
    assert "not identified" in str(STUDY.report_parts(empty_result)[1])


def test_router_shares_follow_the_formula() -> None:
    router = np.random.default_rng(0).normal(size=(4, 8)).astype("f4")
    assert experiment.routing_error(router, top_k=2) < 1e-6
    assert experiment.routing_error(router, top_k=1) == 0
