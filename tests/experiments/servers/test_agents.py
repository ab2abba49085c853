"""Agent jobs: their structure, and metrics recomputed by loops."""

from typing import Any

import numpy as np
import pytest

from experiments.servers.agents import experiment
from experiments.servers.agents.load import AgentTraffic, draw_agents
from tests.support import smoke

LAW = AgentTraffic(num_jobs=12, max_turns=8, sub_agent_turns=2.0)


def test_jobs_are_connected_and_their_tokens_add_up() -> None:
    load = draw_agents(LAW, 3)
    w: Any = load.workload
    after = np.asarray(w.after)
    tokens = np.asarray(w.prompt + w.output)
    delay_s = np.asarray(w.delay) @ [1, 1e-6]
    assert np.unique(load.job).tolist() == list(range(12))
    assert (after >= 0).sum(axis=1).max() > 1
    first = np.flatnonzero((after < 0).all(axis=1))
    assert load.job[first].tolist() == list(range(12))
    assert delay_s[first].tolist() == [0] * 12
    before: list[set[int]] = []
    for i, inputs in enumerate(after.tolist()):
        parents = {k for k in inputs if k >= 0}
        assert {load.job[k] for k in parents} <= {load.job[i]}
        before.append(parents.union(*(before[k] for k in parents)))
        attained = sum(int(tokens[k]) for k in before[i])
        assert load.attained[i] == attained
        assert load.remaining[i] == tokens[load.job == load.job[i]].sum() - attained
        # The cached context is a part of the tokens of earlier turns.
        assert int(w.context[i]) <= attained
        # It is a chain of turns up to an earlier turn, with its answer.
        chains = {int(w.context[k]) + int(tokens[k]) for k in before[i]}
        assert int(w.context[i]) in {0, *chains}
    ordered: Any = load.prioritised(load.remaining).attributes
    by_key = np.asarray(ordered.priority)[np.argsort(load.remaining, kind="stable")]
    assert (np.diff(by_key) >= 0).all()
    assert [by_key[0], by_key[-1]] == [-1000, 1000]


@pytest.mark.slow
def test_job_metrics_differ_from_token_metrics() -> None:
    """Every order serves all requests; claims are ratios of the table's columns."""
    saved = smoke.run("agents")
    table = saved.result.orders
    assert len(table) == 2 * 5
    numbers = smoke.measured_values(saved.claims)
    oldest, base = (
        table.where(order=x) for x in (experiment.OLDEST, experiment.FIRST_COME)
    )
    ratios = [a / b for a, b in zip(oldest.job_mean_s, base.job_mean_s, strict=True)]
    assert min(ratios) in numbers.values()
    assert (table.job_mean_s > table.request_mean_s).all()
    assert (table.first_token_mean_s < table.request_mean_s).all()
