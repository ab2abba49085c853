"""Futures of one state: regrets, recomputed from the table of branches."""

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from experiments.decisions.counterfactual import branches, drawing, experiment
from experiments.decisions.counterfactual.branches import (
    BranchTable,
    Config,
    LeastUsed,
    mean_and_width,
)
from jaxkv.memory import Uses
from jaxkv.plotting import render_figure
from tests.support import figures, smoke


def made_table(num_seeds: int = 5) -> BranchTable:
    """Returns a table of 64 branches with drawn metrics, and a common part by seed."""
    rng = np.random.default_rng(0)
    common = 10 * rng.random(num_seeds)
    c = Config()
    rows: list[dict[str, Any]] = []
    for names in itertools.product(
        c.drafters, c.evictions, c.levels_ms, c.chunks, c.victims
    ):
        row: dict[str, Any] = dict(zip(drawing.LEVELS, names, strict=True))
        for metric in branches.METRICS:
            row[metric] = common + len(rows) / 64 + 0.01 * rng.random(num_seeds)
        rows.append(row | {"num_preempted": 0.0, "num_cached": 0.0, "num_open": 0})
    return BranchTable.of(rows)


def test_a_regret_is_a_paired_difference_to_the_best_branch() -> None:
    table = made_table()
    regret, width = table.regret("p90_latency_s")
    values = table.p90_latency_s
    best = min(range(64), key=lambda i: float(np.mean(values[i])))
    assert (regret[best], width[best]) == (0, 0)
    for i in (5, 40, 63):
        differences = [a - b for a, b in zip(values[i], values[best], strict=True)]
        low, high = stats.t.interval(
            0.9, 4, np.mean(differences), stats.sem(differences)
        )
        np.testing.assert_allclose(regret[i], np.mean(differences))
        np.testing.assert_allclose(
            (regret[i] - width[i], regret[i] + width[i]), (low, high)
        )
    # Common random numbers: without pairs, the interval has the spread of the seeds.
    assert mean_and_width(values)[1].min() > 20 * width.max()


def test_the_figure_of_64_branches_has_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = made_table()
    panels = experiment.STUDY.panels

    def draw() -> None:
        render_figure(
            lambda axes: drawing.plot(axes, table),
            panels=panels[:2],
            size_inches=panels.size_inches,
        )

    sheet = figures.draw_sheet(draw, monkeypatch)
    assert figures.faults(sheet) == []
    tree, _ = sheet.axes
    # An edge for each node of the levels of 2, 4, 16, 32 and 64 nodes.
    assert len(tree.lines) == 118


def test_one_type_of_eviction_has_both_rules() -> None:
    uses = Uses(*(np.array([k, 2 * k]) for k in (1, 2, 3, 4)))  # ty: ignore
    for by_frequency, field in ((True, "num_uses"), (False, "last_used")):
        rule = LeastUsed(np.array(by_frequency))  # ty: ignore
        np.testing.assert_array_equal(rule.priority(uses), getattr(uses, field))


@pytest.mark.slow
def test_branches_of_a_state_are_continuations() -> None:
    saved = smoke.run("counterfactual")
    result = saved.result
    assert result.num_different == 0
    assert result.num_arrays > 50
    assert result.num_answers > 10
    table = result.branches
    assert len(table) == 2
    assert (table.mean_latency_s > 0).all()
    numbers = smoke.measured_values(saved.claims)
    assert 0.0 in numbers.values()
    costs = result.costs
    assert costs.num.tolist() == [4] * 4
    assert (costs.duration_s > 0).all()
