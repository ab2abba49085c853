"""Formulas against what JAX and XLA count in small models."""

import pytest

from experiments import catalogue, cost_check, style


@pytest.mark.parametrize(
    "config", ["smoke", pytest.param("real", marks=pytest.mark.slow)]
)
def test_formulas_count_what_is_there(config: str) -> None:
    rows = cost_check.run(cost_check.CONFIGS[config])
    found = cost_check.claims(rows)
    assert len(found) == 4 * len(cost_check.CONFIGS[config].families)
    assert [claim for claim in found if claim.verdict != "holds"] == []
    for row in rows:
        assert row["xla_temporary_bytes"] > 0
    experiment = catalogue.load("cost_check")
    assert experiment.summary(rows)
    figure = style.render(lambda ax: experiment.plot(ax, rows))
    assert b"training" in figure["figure.svg"]
    # An operation more in a hundred is noticed, a byte is.
    off = [{**row, "kept_bytes": row["kept_bytes"] + 1} for row in rows]
    off = [{**row, "training_flops": int(row["training_flops"] * 1.04)} for row in off]
    assert sum(x.verdict == "fails" for x in cost_check.claims(off)) == 2 * len(rows)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"hidden_size": 100}, "hidden_size=100"),
        ({"sequence": 256}, "sequence=256"),
        ({"families": ("mamba",)}, "mamba"),
        ({"batch": 1}, "batch=1"),
    ],
)
def test_what_cannot_be_checked_is_refused(change: dict, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        cost_check.Config(**change)
