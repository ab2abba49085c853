"""Policies with and without mismatch are compared seed by seed."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training.grpo import experiment
from experiments.training.grpo.experiment import mean_interval, mismatch_table
from experiments.training.grpo.runs import EXACT, MISMATCHES, SeedRuns
from scaling.policy import PolicyConfig, PolicyInfo
from tests.support import smoke


def seed_runs(reward: np.ndarray) -> SeedRuns:
    """Runs with these rewards, and 30 tokens of a rollout."""
    ones = jnp.ones(reward.shape)
    fields = dict.fromkeys(PolicyInfo._fields, ones)
    fields |= {"num_tokens": 30 * ones, "num_different": 3 * ones}
    info = PolicyInfo(**fields | {"reward": jnp.asarray(reward)})
    return SeedRuns(info, np.full(2, 5.0))


def test_an_interval_is_that_of_student() -> None:
    values = np.array([1.0, 2, 4, 5, 7, 8, 10, 11])
    mean, low, high = mean_interval(values)
    half = 3.499483 * np.std(values, ddof=1) / 8**0.5
    assert mean == 6
    np.testing.assert_allclose((low, high), (6 - half, 6 + half), rtol=1e-5)


def test_changes_are_those_of_the_last_rollouts() -> None:
    rng = np.random.default_rng(0)
    exact = rng.random((3, 20), np.float32)
    other = exact - 0.1 * np.arange(1, 4)[:, None]
    other[:, :10] = 1.0  # early rollouts do not count, except for the fall
    table = mismatch_table({EXACT: seed_runs(exact), "x": seed_runs(other)})
    np.testing.assert_allclose(table.change, [0, -0.2], atol=1e-6)
    assert table.low[1] < -0.2 < table.high[1]
    ends = other[:, 10:].mean(axis=1)
    np.testing.assert_allclose(table.worst[1], ends.min(), rtol=1e-5)
    np.testing.assert_allclose(table.fall[1], (1 - ends).mean(), rtol=1e-5)
    np.testing.assert_allclose(table.different_share, 0.1, rtol=1e-6)
    np.testing.assert_allclose(table.tokens_per_s, 180.0)
    early = seed_runs(exact).first(1)
    assert early.info.reward.tolist() == exact[:, :10].tolist()
    assert early.tokens_per_s.tolist() == [180.0]


def test_each_mismatch_changes_the_config_in_one_way() -> None:
    policy = PolicyConfig()
    configs = {name: change(policy) for name, change in MISMATCHES.items()}
    assert configs.pop(EXACT) == policy
    assert len({*configs.values(), policy}) == len(configs) + 1


@pytest.mark.slow
def test_a_smoke_run_has_equal_bits() -> None:
    result = smoke.run("grpo").result
    assert result.rewards.shape == result.passes.shape == (1, 2, 4)
    assert result.mismatch_rewards.shape == (2, 2, 2)
    assert result.check.num_leaves > 50
    assert result.check.num_different == 0
    assert result.learned.num_different.tolist() == [0, 0]
    exact, other = result.mismatched.k3
    assert exact == 0 < other
    assert tuple(result.mismatched.mismatch) == experiment.CONFIGS["smoke"].mismatches
    assert (result.rates > 0).all()
