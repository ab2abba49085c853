"""Training curves: steps, learning rates and losses of runs, from one table."""

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxkv import validation
from jaxkv.files import RawRow, RawTable
from jaxkv.validation import ConfigRecord
from scaling.laws import RateSchedule
from scaling.logs import columns as log_columns
from scaling.logs import files, rules

MIN_LOSSES = 5
"""Fewest losses of a curve; the loss at its end is the mean of its last five."""


class CurveColumns(ConfigRecord):
    """Columns of a table of training curves; "" searches by name."""

    size: str = ""
    """Column of the model size; without one, all curves are of one model."""
    curve: str = ""
    """Column that names the curve, such as its schedule."""
    step: str = ""
    """Column of the step."""
    lr: str = ""
    """Column of the learning rate."""
    loss: str = ""
    """Column of the loss, in nats per token."""


_CURVE_NAMES = {
    "size": ("params_millions", "num_params", "params", "n_params", "N", "size"),
    "curve": ("schedule", "curve", "run_id", "run", "name"),
    "step": log_columns.STEP_COLUMNS,
    "lr": ("lr", "learning_rate", "rate"),
    "loss": ("loss", "val_loss", "eval_loss", "train_loss", "L"),
}
"""Column names that need no flag, by priority."""


class TrainingCurve(NamedTuple):
    """Losses of one run.

    Attributes:
      size: model size, in the unit of the file; 1 without a column.
      name: name of the curve, the same for one schedule at several sizes.
      schedule: steps and learning rates.
      loss: losses in nats per token, NaN where the file has none.
    """

    size: float
    name: str
    schedule: RateSchedule
    loss: Float[np.ndarray, " rows"]

    @property
    def label(self) -> str:
        """Size and name."""
        return f"{self.name} at {self.size:g}"

    @property
    def end_loss(self) -> float:
        """Mean of the last five losses; NaN if one is missing."""
        return float(self.loss[-MIN_LOSSES:].mean())

    @property
    def is_annealed(self) -> bool:
        """True if the rate falls below 90 % of its peak."""
        rate = np.asarray(self.schedule.rate)
        return bool(rate.min() < 0.9 * rate.max())


class CurveLog(NamedTuple):
    """The curves of a file.

    Attributes:
      curves: the curves, in the order of the file.
      is_held_out: True for each curve that the rule selects.
    """

    curves: tuple[TrainingCurve, ...]
    is_held_out: tuple[bool, ...]


def read_curves(
    path: str | os.PathLike[str],
    columns: CurveColumns | None = None,
    *,
    hold_out: str = "",
    needs_loss: bool = True,
) -> CurveLog:
    """Reads training curves, or schedules without losses, and checks every row.

    Args:
      path: a table (`jaxkv.files.tables`) with a row for each step of each curve. Steps
        ascend within a curve; its first row is the end of the warm-up.
      columns: the columns; by default searched by name.
      hold_out: a rule (`rules`) over the columns of the file that selects whole curves.
      needs_loss: True if every row must have a loss.

    Raises:
      ValueError: a column is missing, a cell is no number or outside its range, steps
        do not ascend, a curve has too few rows, or the rule selects a part of a curve;
        one line with the place.
    """
    table = files.read_log_table(validation.path("path", path))
    roles = _find_columns(table, columns or CurveColumns(), needs_loss)
    test = rules.parse_rule(hold_out, table.names) if hold_out else lambda cells: False
    rows: dict[tuple[float, str], list[RawRow]] = {}
    for row in table.rows:
        size = _read(table, row, roles, "size", 0.0, is_open=True)
        name = str(row.cells.get(roles["curve"], "curve")) if "curve" in roles else ""
        rows.setdefault((size, name or "curve"), []).append(row)
    curves = []
    selected = []
    for (size, name), members in rows.items():
        curve = _read_curve(table, members, roles, needs_loss)
        curves.append(TrainingCurve(size, name, *curve))
        tests = [test(row.cells) for row in members]
        if any(tests) != all(tests):
            raise ValueError(
                f"{path}: rule {hold_out!r} selects {sum(tests)} of the {len(tests)} "
                f"rows of {curves[-1].label}; it must select whole curves"
            )
        selected.append(tests[0])
    return CurveLog(tuple(curves), tuple(selected))


def _find_columns(
    table: RawTable, columns: CurveColumns, needs_loss: bool
) -> dict[str, str]:
    """Returns the column of each meaning that the file has."""
    roles = {}
    for meaning, names in _CURVE_NAMES.items():
        flag = getattr(columns, meaning)
        if flag and flag not in table.names and (needs_loss or meaning != "loss"):
            raise ValueError(
                f"{table.path}: no column {flag!r} (--{meaning}); there is "
                f"{', '.join(table.names)}"
            )
        matches = [x for x in ((flag,) if flag else names) if x in table.names]
        is_optional = meaning in ("size", "curve") or not (
            needs_loss or meaning != "loss"
        )
        if matches:
            roles[meaning] = matches[0]
        elif not is_optional:
            raise ValueError(
                f"{table.path}: no column for {meaning}; --{meaning} names one of "
                f"{', '.join(table.names)}"
            )
    return roles


def _read_curve(
    table: RawTable, members: list[RawRow], roles: Mapping[str, str], needs_loss: bool
) -> tuple[RateSchedule, Float[np.ndarray, " rows"]]:
    """Returns steps, rates and losses of one curve."""
    step = []
    rate = []
    loss = []
    for row in members:
        step.append(_read(table, row, roles, "step", step[-1] if step else 0.0))
        rate.append(_read(table, row, roles, "lr", 0.0, is_open=not rate))
        cell = row.cells.get(roles.get("loss", ""))
        is_missing = cell is None or str(cell).strip() == ""
        if is_missing and not needs_loss:
            loss.append(math.nan)
        else:
            loss.append(_read(table, row, roles, "loss", 0.0))
    min_rows = MIN_LOSSES if needs_loss else 2
    if len(step) < min_rows:
        raise ValueError(
            f"{table.path}: {members[0].place}: a curve of {len(step)} rows must have "
            f"at least {min_rows}"
        )
    return RateSchedule(np.array(step), np.array(rate)), np.array(loss)


def _read(
    table: RawTable,
    row: RawRow,
    roles: Mapping[str, str],
    meaning: str,
    low: float,
    *,
    is_open: bool = True,
) -> float:
    """Reads a finite number above `low`, or at least `low` if not `is_open`."""
    name = roles.get(meaning)
    if name is None:
        return 1.0
    hint = ": steps of a curve must ascend" if meaning == "step" and low else ""
    return files.read_number(table, row, name, low, is_open=is_open, hint=hint)
