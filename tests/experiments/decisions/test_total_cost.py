"""The cheapest model to train and serve: findings of the smoke run, recomputed."""

import math

import numpy as np
import pytest

from experiments.decisions.total_cost import experiment
from experiments.decisions.total_cost.simulated import find_crossing
from experiments.decisions.total_cost.tables import Result
from scaling.laws import TwoPowers
from scaling.plan import allocate_budget, cheapest_model
from tests.support import smoke

CONFIG = experiment.CONFIGS["smoke"]


@pytest.fixture(scope="module")
def result() -> Result:
    return smoke.run("total_cost").result


@pytest.mark.slow
def test_claims_are_recomputed_from_the_tables(result: Result) -> None:
    measured = smoke.measured_values(experiment.claims(result))
    powers = TwoPowers(*result.powers)
    for row in result.closed_forms.rows():
        served = row["inference_tokens"]
        if row["aim"] == experiment.LOSS:
            exact = cheapest_model(powers, CONFIG.target_loss, inference_tokens=served)
        else:
            flops = CONFIG.budget_usd / result.flop_cost
            exact = allocate_budget(powers, flops, inference_tokens=served)
        assert row["num_params"] == pytest.approx(exact.num_params, rel=1e-4)
    worst = 100 * max(result.closed_forms.error)
    name = "if a served token takes 2 N operations, it is that of the closed form"
    assert measured[name] == pytest.approx(worst)
    for aim in (experiment.LOSS, experiment.BUDGET):
        sizes = result.loads.where(aim=aim).num_params
        assert np.all(np.diff(sizes) < 0)
        sizes = result.prices.where(aim=aim).num_params
        assert np.all(np.diff(sizes) <= 0)


@pytest.mark.slow
def test_costs_of_the_tables_add_up(result: Result) -> None:
    for row in result.loads.rows():
        training = 6 * result.flop_cost * row["num_params"] * row["num_tokens"]
        spent = training + row["serving_usd"]
        assert row["cost_usd"] == pytest.approx(spent, rel=1e-9)
        if row["aim"] == experiment.BUDGET:
            assert row["cost_usd"] == pytest.approx(CONFIG.budget_usd, rel=1e-9)
        assert row["params_low"] < row["num_params"] < row["params_high"]
        assert row["loss_low"] <= row["loss"] <= row["loss_high"]
    # No rule is cheaper than the optimum.
    assert result.loads.training_excess.min() > -1e-6
    assert result.loads.closed_excess.min() > -1e-6
    # The servers of one device take what the tables of loads pay for.
    servers = result.servers
    hours = 1e3 / servers.requests_per_s / 3600 * servers.num_devices
    np.testing.assert_allclose(servers.usd_per_thousand, 2.5 * hours, rtol=1e-6)


def test_the_rate_at_which_a_latency_reaches_its_limit() -> None:
    rates = np.array([1.0, 2.0, 4.0])
    assert find_crossing(rates, np.array([0.5, 0.8, 0.9])) == 4.0
    assert find_crossing(rates, np.array([1.5, 2.0, 3.0])) == 0.0
    assert find_crossing(rates, np.array([0.5, 0.8, math.inf])) == 2.0
    assert find_crossing(rates, np.array([0.5, 2.0, 3.0])) == pytest.approx(2**0.5)
