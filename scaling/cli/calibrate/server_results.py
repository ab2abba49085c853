"""Results of predictions of servers: numbers of each row, and errors by group."""

from collections import Counter

import numpy as np

from jaxkv.report import (
    Floats,
    Ints,
    ResultRecord,
    ResultTable,
    Sheet,
    Texts,
    column,
    computed_column,
    format_percent,
)
from scaling.calibration import DETERMINED_SPREAD, LOOP_LATENCIES, TAIL_LEVELS

TIME_PER_TOKEN, FIRST_TOKEN_TIME = LOOP_LATENCIES
WATTS = "power"
TOKEN_ENERGY = "energy per token"
TAILS = tuple(f"P{100 * x:.0f} between tokens" for x in TAIL_LEVELS)
QUANTITIES = {
    TIME_PER_TOKEN: "s",
    FIRST_TOKEN_TIME: "s",
    **dict.fromkeys(TAILS, "s"),
    WATTS: "W",
    TOKEN_ENERGY: "J",
}
"""Predicted numbers of a server, with their units."""


class PredictedServers(ResultTable):
    """Predicted numbers of servers, up to six for each row of a table."""

    left_out: Texts = column("model or developer; none: fitted; table: another table")
    fold: Texts = column("name of what the fit left out; the file of another table")
    server: Texts = column("name of the row")
    model: Texts = column("shape of the checkpoint")
    kind: Texts = column("dense or mixture")
    device: Texts = column("accelerator")
    engine: Texts = column("inference engine")
    weight_format: Texts = column("format of the weights", heading="weights")
    num_devices: Ints = column("devices", heading="devices")
    concurrency: Floats = column("requests in the system", form="{:,.0f}")
    prompt_tokens: Floats = column("length of the prompts", form="{:,.0f}")
    answer_tokens: Floats = column("length of the answers", form="{:,.0f}")
    num_running: Floats = column("requests that fit into memory", form="{:,.0f}")
    outside: Texts = column("sizes outside the fitted ones, which widen intervals")
    quantity: Texts = column("a key of `QUANTITIES`")
    measured: Floats = column("as measured; NaN if it was not", form="{:.4g}")
    roofline: Floats = column("by data sheets; NaN for energy", form="{:.4g}")
    low: Floats = column("5 % quantile", heading="5 %", form="{:.4g}")
    predicted: Floats = column("median", form="{:.4g}")
    high: Floats = column("95 % quantile", heading="95 %", form="{:.4g}")

    @property
    @computed_column(heading="error", form=format_percent)
    def error(self) -> np.ndarray:
        """Relative error of the median; NaN without a measured value."""
        return self.predicted / self.measured - 1

    @property
    @computed_column(heading="roofline's error", form=format_percent)
    def roofline_error(self) -> np.ndarray:
        """Relative error of the roofline; NaN without a measured value."""
        return self.roofline / self.measured - 1

    @property
    @computed_column(heading="in 90 %")
    def is_in_90(self) -> np.ndarray:
        """True if the 90 % interval contains the measured value."""
        return (self.low <= self.measured) & (self.measured <= self.high)


class GroupErrors(ResultTable):
    """Signed errors of the predictions of a group, worst first."""

    quantity: Texts = column("a key of `QUANTITIES`")
    group: Texts = column("model, device or engine")
    kind: Texts = column("dense, mixture, or both")
    num_rows: Ints = column("rows with a measured value", heading="rows")
    median: Floats = column("of the error's size", heading="median", form="{:.1%}")
    bias: Floats = column("median signed error", heading="signed", form="{:+.1%}")
    worst: Floats = column("largest error", heading="worst", form="{:+.0%}")
    covered: Floats = column("in 90 % intervals", heading="in 90 %", form="{:.0%}")
    roofline: Floats = column(
        "median signed error of data sheets on the same rows; NaN for energy",
        heading="roofline, signed",
        form="{:+.1%}",
    )


class Refusals(ResultTable):
    """Rows that are not read or not fitted."""

    table: Texts = column("file")
    row: Texts = column("name of the row")
    reason: Texts = column("reason")

    def sheet_of_reasons(self) -> Sheet:
        """Returns the number of rows and the name of the first for each reason."""
        pairs = list(zip(self.table.tolist(), self.reason.tolist(), strict=True))
        names = dict(zip(reversed(pairs), reversed(self.row.tolist()), strict=True))
        rows = [
            (table, reason, str(number), names[table, reason])
            for (table, reason), number in Counter(pairs).most_common()
        ]
        heads = ("table", "reason", "rows", "first")
        return Sheet("rows that are not used", heads, rows)


class PooledEffects(ResultTable):
    """Factors of engines, devices and statistics on coefficients."""

    fit: Texts = column("dense or mixture")
    kind: Texts = column("kind of group")
    group: Texts = column("name of the group; all for a shared coefficient")
    coefficient: Texts = column("coefficient")
    value: Floats = column("factor, or shared value", form="{:.3g}")
    spread: Floats = column(
        "of its logarithm over the prior's", heading="spread over the prior's"
    )

    @property
    @computed_column(heading="determined by")
    def origin(self) -> np.ndarray:
        """The data, if they leave at most half of the prior's spread."""
        return np.where(self.spread < DETERMINED_SPREAD, "data", "prior")


class NextRows(ResultTable):
    """Servers whose measurement would narrow a prediction most."""

    target: Texts = column("name of the predicted row")
    concurrency: Floats = column("requests in the system", form="{:,.0f}")
    prompt_tokens: Floats = column("length of the prompts", form="{:,.0f}")
    answer_tokens: Floats = column("length of the answers", form="{:,.0f}")
    token_width: Floats = column("time per token", heading="time per token")
    first_width: Floats = column("first token", heading="first token")


class ServerTablesResult(ResultRecord):
    """Predictions of the rows of tables."""

    predictions: PredictedServers = column("predicted numbers", is_shown=False)
    refusals: Refusals = column("rows that were not read or not fitted")
    effects: PooledEffects = column("coefficients of the fit to all rows")
    next_rows: NextRows = column("rows of a server that would narrow its intervals")
    split: str = column("digest of the split of the fitted rows")
    num_fitted: int = column("fitted rows")
    server: str = column(
        "fits to all rows, as a file; empty without them", is_reported=False
    )

    def group_errors(self, left_out: str, by: str) -> GroupErrors:
        """Returns errors by a column of `PredictedServers`, worst median first."""
        rows = []
        table = self.predictions.where(left_out=left_out)
        table = table.at(np.isfinite(table.measured))
        for quantity in QUANTITIES:
            for group in table.where(quantity=quantity).distinct(by):
                part = table.where(quantity=quantity, **{by: group})
                kinds = part.distinct("kind")
                kind = kinds[0] if len(kinds) == 1 else "both"
                error = part.error
                size = np.abs(error)
                median = (float(np.median(size)), float(np.median(error)))
                worst = float(error[np.argmax(size)])
                covered = float(part.is_in_90.mean())
                sheet = float(np.median(part.roofline_error))
                errors = (*median, worst, covered, sheet)
                rows.append((quantity, group, kind, len(part), *errors))
        order = {quantity: i for i, quantity in enumerate(QUANTITIES)}
        rows.sort(key=lambda row: (order[row[0]], -row[4]))
        return GroupErrors.of(rows)
