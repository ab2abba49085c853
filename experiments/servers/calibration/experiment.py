"""Predicts measured load stages of servers with coefficients that never saw them.

`jaxkv calibrate RUNS` makes the fits and predictions for any table.
"""

from collections.abc import Iterator
from typing import Any

from experiments import lab
from scaling import cli
from scaling.cli import (
    END_TO_END,
    FIRST_TOKEN,
    CalibrationConfig,
    CalibrationResult,
)

CONFIGS = {
    "real": CalibrationConfig(leave_out=("model", "load", "none"), roofline=True),
    "smoke": CalibrationConfig(runs="tests/golden/vllm_stages.csv", draws=8),
}


@lab.claims_file(__file__).judge
def claims(result: CalibrationResult) -> Iterator[lab.MeasuredValue]:
    """Judges the errors and intervals of left-out stages."""
    for kind in ("model", "load", "roofline"):
        if kind not in result.kinds():
            continue
        errors = result.errors(kind)
        for latency in (END_TO_END, FIRST_TOKEN):
            row = errors.where(latency=latency)
            number = {name: getattr(row, name)[0] for name in ("median", "worst")}
            words: dict[str, Any] = {"latency": latency, "stages": row.stages[0]}
            if kind == "roofline":
                if latency == END_TO_END:
                    yield lab.measured("roofline", 100 * number["median"], **words)
                continue
            if kind == "load":
                yield lab.measured("load_median", 100 * number["median"], **words)
                continue
            yield lab.measured("model_median", 100 * number["median"], **words)
            stage = row.worst_stage[0]
            yield lab.measured(
                "model_worst", 100 * number["worst"], stage=stage, **words
            )
            yield lab.measured("model_covered", row.in_90[0] / row.stages[0], **words)
            yield lab.measured("model_width", 100 * row.width[0], **words)
            if latency == END_TO_END:
                yield lab.measured("blis", 100 * number["median"], **words)


STUDY = cli.STUDY._replace(configs=CONFIGS, claims=claims)
