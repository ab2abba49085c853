"""Formulas against what JAX and XLA count in small models."""

import pytest

from experiments.counting.cost_check.experiment import CONFIGS, claims, run
from experiments.framework import registry
from tests.support import smoke


@pytest.mark.parametrize(
    "config", ["smoke", pytest.param("real", marks=pytest.mark.slow)]
)
def test_formulas_count_what_is_there(config: str) -> None:
    rows = run(CONFIGS[config])
    found = claims(rows)
    assert len(found) == 4 * len(CONFIGS[config].families)
    assert [claim for claim in found if claim.verdict != "holds"] == []
    for row in rows:
        assert row["xla_temporary_bytes"] > 0
    experiment = registry.load("cost_check")
    (study,) = experiment.studies
    assert study.tell(rows)
    assert b"training" in smoke.draw(study, rows)["figure.svg"]
    # An operation more in a hundred is noticed, a byte is.
    off = [{**row, "kept_bytes": row["kept_bytes"] + 1} for row in rows]
    off = [{**row, "training_flops": int(row["training_flops"] * 1.04)} for row in off]
    assert sum(x.verdict == "fails" for x in claims(off)) == 2 * len(rows)
