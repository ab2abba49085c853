"""Runs of several learning rates and batch sizes at each size, from one table."""

import math
import os
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxkv import validation
from jaxkv.validation import ConfigRecord
from scaling.logs import files, rules
from scaling.logs.run_sizes import RunSize


class TunedColumns(ConfigRecord):
    """Columns of a table of tuned runs; "" searches by name."""

    n: str = ""
    """Column of the parameters; active ones of a mixture of experts."""
    d: str = ""
    """Column of the training tokens."""
    lr: str = ""
    """Column of the peak learning rate."""
    batch: str = ""
    """Column of the batch size."""
    loss: str = ""
    """Column of the loss, in nats per token."""


_NAMES = {
    "n": ("num_params_active", "Na", "N_active", "num_params", "N", "params"),
    "d": ("num_tokens", "D", "tokens"),
    "lr": ("lr", "learning_rate", "learning_rate_peak", "rate"),
    "batch": ("bs", "batch_size", "batch", "batch_size_in_tokens", "batch_tokens"),
    "loss": ("smooth loss", "smooth_loss", "final_loss", "val_loss", "loss"),
}
"""Column names that need no flag, by priority."""


class TunedCell(NamedTuple):
    """Runs of one model size and one number of tokens.

    Attributes:
      size: parameters and tokens.
      rate: peak learning rates.
      batch: batch sizes, in the unit of the file.
      loss: losses in nats per token.
      is_held_out: True if the rule selects the cell.
    """

    size: RunSize
    rate: Float[np.ndarray, " runs"]
    batch: Float[np.ndarray, " runs"]
    loss: Float[np.ndarray, " runs"]
    is_held_out: bool

    @property
    def best(self) -> int:
        """Index of the run with the lowest loss."""
        return int(np.argmin(self.loss))

    @property
    def pairs(self) -> Float[np.ndarray, "runs 2"]:
        """Logarithms of rate and batch of each run."""
        return np.log(np.stack([self.rate, self.batch], axis=1))


def read_tuned_runs(
    path: str | os.PathLike[str],
    columns: TunedColumns | None = None,
    *,
    hold_out: str = "",
    where: str = "",
) -> tuple[list[TunedCell], int]:
    """Reads runs, one cell for each pair of parameters and tokens.

    Args:
      path: a table (`jaxkv.files.tables`) with a row for each run, or the folder of a
        sweep.
      columns: the columns; by default found by name.
      hold_out: a rule (`rules`) over the columns of the file, N and D that selects
        whole cells.
      where: a rule over the same columns for the rows to read.

    Returns:
      The cells by parameters and tokens, and the number of runs without a finite loss,
      which are left out.

    Raises:
      ValueError: a column is missing, a number is outside its range, no run has a loss,
        or a rule selects no row or a part of a cell; one line with the place.
    """
    place = validation.path("path", path)
    table = files.read_log_table(place / files.RUNS if place.is_dir() else place)
    chosen = columns or TunedColumns()
    roles = {}
    for meaning, names in _NAMES.items():
        flag = getattr(chosen, meaning)
        matches = [x for x in ((flag,) if flag else names) if x in table.names]
        if not matches:
            missing = repr(flag) if flag else f"for {meaning}"
            raise ValueError(
                f"{path}: no column {missing}; --{meaning} names one of "
                f"{', '.join(table.names)}"
            )
        roles[meaning] = matches[0]
    names = {*table.names, "N", "D"}
    test = rules.parse_rule(hold_out, names) if hold_out else None
    is_read = rules.parse_rule(where, names) if where else None
    members: dict[RunSize, list[tuple[float, float, float, bool]]] = {}
    num_dropped = 0
    for row in table.rows:
        n, d, rate, batch = (
            files.read_number(table, row, roles[x]) for x in ("n", "d", "lr", "batch")
        )
        cells_of_row = {**row.cells, "N": n, "D": d}
        if is_read is not None and not is_read(cells_of_row):
            continue
        loss = rules.parse_number(row.cells.get(roles["loss"]), 1.0)
        if loss is None or not math.isfinite(loss) or loss <= 0:
            num_dropped += 1
            continue
        is_held_out = test is not None and test(cells_of_row)
        members.setdefault(RunSize(n, d), []).append((rate, batch, loss, is_held_out))
    if not members and where and not num_dropped:
        raise ValueError(f"{path}: --where {where}: selects no row")
    if not members:
        raise ValueError(f"{path}: no run has a loss in column {roles['loss']!r}")
    cells = []
    for size, runs in sorted(members.items()):
        rates, batches, losses, marks = zip(*runs, strict=True)
        if any(marks) != all(marks):
            raise ValueError(
                f"{path}: rule {hold_out!r} selects {sum(marks)} of the {len(marks)} "
                f"runs of {size.label}; it must select whole cells of N and D"
            )
        arrays = (np.array(x) for x in (rates, batches, losses))
        cells.append(TunedCell(size, *arrays, marks[0]))
    return cells, num_dropped
