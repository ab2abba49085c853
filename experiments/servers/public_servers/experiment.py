"""Predicts measured servers of public tables with coefficients that never saw them.

`jaxkv calibrate TABLE` makes the fits and predictions for any table. The coefficients
are fitted to the rows of all other models, or of all other developers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments import lab
from scaling import cli
from scaling.calibration import PUBLIC_SPLIT
from scaling.cli import (
    FIRST_TOKEN_TIME,
    TIME_PER_TOKEN,
    TOKEN_ENERGY,
    ServerTablesConfig,
    ServerTablesResult,
)

CONFIGS = {
    "real": ServerTablesConfig(leave_out=("model", "developer", "none")),
    "smoke": ServerTablesConfig(
        tables=("tests/golden/aic_servers.csv",), leave_out=("model", "none")
    ),
}
_KINDS = {"dense": "dense models", "mixture": "mixtures"}


@lab.claims_file(__file__).judge
def claims(result: ServerTablesResult) -> Iterator[lab.MeasuredValue]:
    """Judges errors and intervals of rows whose model or developer is left out."""
    for left_out in ("model", "developer"):
        errors = result.group_errors(left_out, "model").where(kind="dense")
        for quantity in (TIME_PER_TOKEN, FIRST_TOKEN_TIME):
            table = errors.where(quantity=quantity)  # worst first
            if not len(table):
                continue
            words: dict[str, Any] = {"quantity": quantity, "models": len(table)}
            yield lab.measured(
                "dense_worst_model",
                100 * float(table.median[0]),
                left_out=left_out,
                model=table.group[0],
                **words,
            )
            if left_out == "model":
                middle = 100 * float(np.median(table.median))
                yield lab.measured("dense_median", middle, **words)
    # A fold has the checkpoints of one shape.
    for id, quantity, by in (
        ("mixture_median", TIME_PER_TOKEN, "model"),
        ("mixture_first", FIRST_TOKEN_TIME, "fold"),
    ):
        errors = result.group_errors("model", by)
        table = errors.where(kind="mixture", quantity=quantity)
        if len(table):
            yield lab.measured(
                id,
                100 * float(np.median(table.median)),
                models=len(table),
                model=table.group[0],
                worst=f"{100 * table.median[0]:.1f}",
            )
    for row in result.group_errors("model", "kind").rows():
        quantity = row["quantity"]
        kind = _KINDS[row["group"]]
        rows = row["num_rows"]
        if quantity == TOKEN_ENERGY:
            yield lab.measured("energy", 100 * row["median"], kind=kind, rows=rows)
        covered = row["covered"]
        yield lab.measured("covered", covered, quantity=quantity, kind=kind, rows=rows)
    if result.predictions.distinct("left_out") == ["model", "developer", "none"]:
        yield lab.measured("split", float(result.split == PUBLIC_SPLIT))


STUDY = cli.SERVER_TABLES._replace(configs=CONFIGS, claims=claims)
