"""Cost formulas compared with counts of JAX and XLA in small models."""

import pytest

from experiments.counting.cost_check.experiment import (
    CONFIGS,
    CountRow,
    claims,
    formula_over_count,
    run,
)
from experiments.framework import load_experiment
from tests.support import smoke


@pytest.mark.parametrize(
    "config", ["smoke", pytest.param("real", marks=pytest.mark.slow)]
)
def test_formulas_agree_with_jax_and_xla(config: str) -> None:
    rows = run(CONFIGS[config])
    assert len(claims(rows)) == 4 * len(CONFIGS[config].families)
    for row in rows:
        assert (
            formula_over_count(row, "parameters")
            == formula_over_count(row, "kept")
            == 1
        )
        # Norms, activations and the softmax are counted only by XLA.
        assert formula_over_count(row, "forward") == pytest.approx(1, abs=0.02)
        assert formula_over_count(row, "training") == pytest.approx(1, abs=0.02)
        assert row["xla_temporary_bytes"] > 0
    experiment = load_experiment("cost_check")
    (study,) = experiment.studies
    assert study.report_parts(rows)
    assert b"training" in smoke.draw(study, rows)["figure.svg"]
    # Errors of 1 % in operations, and of one byte, are detected.
    off: list[CountRow] = [
        {
            **row,
            "kept_bytes": row["kept_bytes"] + 1,
            "training_flops": int(row["training_flops"] * 1.04),
        }
        for row in rows
    ]
    noticed = [
        (before.verdict, after.verdict)
        for before, after in zip(claims(rows), claims(off), strict=True)
        if before.ours != after.ours
    ]
    assert noticed == [("holds", "fails")] * (2 * len(rows))
