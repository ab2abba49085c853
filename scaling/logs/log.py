"""Logs of training runs as columns in SI units, with every row accounted for.

A log is a CSV, JSON, or the folder of a sweep (`files`). Two of N, D and C are enough:
the third follows from `C = 6 N D`, and the log notes it; a law of one input needs only
that input. No row is dropped silently: an unusable row is an error with its number,
unless its run is marked as not completed, another row is better or later, or a rule
ignores it; `notes` counts such rows.
"""

import collections
import math
import os
import re
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv import validation
from jaxkv.files import RawRow, RawTable
from jaxkv.workloads import make_dataframe
from scaling.logs import best_rates, files, rules
from scaling.logs import columns as logs_columns
from scaling.logs.columns import (
    LETTERS,
    STEP_COLUMNS,
    ColumnRoles,
    LogColumns,
    find_columns,
    loss_column,
    parse,
    read_numbers,
)

_STATES = re.compile(r"(run|job|final)?(status|state)")
"""Names of columns with the state of a run: their letters in lower case."""
_COMPLETED = {
    *("completed", "complete", "done", "finished", "success", "succeeded"),
    *("successful", "ok"),
}
NOT_COMPLETED = re.compile(
    r"crash(ed)?|fail(ed|ure)?|error(ed)?|running|pending|queued|kill(ed)?|cancell?ed"
    r"|aborted|preempt(ed|ing)|diverged|oom|outofmemory|time(d)?out|interrupted"
    r"|stopped|terminated|incomplete|unfinished|paused|starting|started"
)
"""States of runs that did not complete: their letters in lower case."""


class Log(NamedTuple):
    """Completed runs that can be fitted.

    Attributes:
      source: file or folder.
      count: meaning of `num_params`: parameters in total, without embeddings, those in
        matrix products, or the active ones of a mixture of experts.
      columns: `num_params`, `num_tokens`, `flops`, `loss` and further required columns,
        positive and finite; those of the four that no law reads may be missing.
      runs: label of each row; rows of one run have equal labels.
      raw: the rows of the file, unchanged.
      curves: training curves, with rows labelled as in `runs`, or None.
      notes: derivations, ignored rows and assumptions, in sentences.
      roles: columns of the file by meaning, such as "num_params" or "run".
      units: units other than 1 that flags declare, by column of the file.
      doubtful: warnings about ambiguous cells, by column.
    """

    source: Path
    count: str
    columns: dict[str, Float[np.ndarray, " runs"]]
    runs: tuple[str, ...]
    raw: tuple[RawRow, ...]
    curves: "Log | None"
    notes: tuple[str, ...]
    roles: Mapping[str, str]
    units: Mapping[str, float] = {}
    doubtful: Mapping[str, str] = {}

    def to_dataframe(self) -> Any:
        """Returns a data frame with a row per run: its label and the columns.

        Raises:
          ImportError: neither pandas nor polars is installed.
        """
        return make_dataframe({"run": list(self.runs)} | self.columns)

    @property
    def has_one_row_per_run(self) -> bool:
        """True if no run has two rows."""
        return len({*self.runs}) == len(self.runs)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the file's columns."""
        return tuple(dict.fromkeys(name for row in self.raw for name in row.cells))

    def label(self, names: Sequence[str]) -> list[str]:
        """Returns the cells of each row in some columns of the file, as text.

        Raises:
          ValueError: a column does not exist, or a cell is empty.
        """
        for name in names:
            if name not in self.names:
                raise ValueError(
                    f"{self.source}: no column {name!r}; there is "
                    f"{', '.join(self.names)}"
                )
            for row in self.raw:
                if row.cells.get(name) in (None, ""):
                    raise ValueError(
                        f"{self.source}: {row.place}: {name} is missing; --ignore "
                        f"'row == {row.number}' leaves it out"
                    )
        return [", ".join(str(row.cells[x]) for x in names) for row in self.raw]

    def labels(self) -> Int[np.ndarray, " runs"]:
        """Returns indices of the runs; rows of one run have equal indices."""
        return np.unique(np.asarray(self.runs), return_inverse=True)[1].reshape(-1)

    def select(self, rule: str) -> Bool[np.ndarray, " runs"]:
        """Returns the mask of the rows that a rule selects.

        Args:
          rule: a rule (see `rules`) over `row`, the file's columns as written, numeric
            columns in the units of `columns`, and `num_params`, `num_tokens`, `flops`
            and `loss`, or their letters N, D, C and L.

        Raises:
          ValueError: the rule is invalid, or cannot be applied to a row.
        """
        letters = {x: y for x, y in LETTERS.items() if x in self.columns}
        names = (*self.names, "row", *self.columns, *letters.values())
        test = rules.parse_rule(rule, dict.fromkeys(names))
        read = {self.roles[x]: y for x, y in self.columns.items() if x in self.roles}
        mask = []
        for i, row in enumerate(self.raw):
            ours = {name: column[i] for name, column in self.columns.items()}
            named = {name: column[i] for name, column in read.items()}
            short = {letter: ours[name] for name, letter in letters.items()}
            cells = {**short, **ours, **row.cells, **named, "row": row.number}
            mask.append(_ask(test, row, cells))
        return np.asarray(mask, bool)

    def take(self, mask: Bool[np.ndarray, " runs"]) -> "Log":
        """Returns the log with some rows and all curves."""
        columns = {name: column[mask] for name, column in self.columns.items()}
        places = np.flatnonzero(mask)
        return self._replace(
            columns=columns,
            runs=tuple(self.runs[i] for i in places),
            raw=tuple(self.raw[i] for i in places),
        )


def read_log(
    path: str | os.PathLike[str],
    columns: LogColumns | None = None,
    *,
    needs: Iterable[str] = (),
    ignore: str = "",
    last_of: Sequence[str] = (),
    best_of: Sequence[str] = (),
) -> Log:
    """Reads a log and checks every row of it.

    Args:
      path: a CSV, JSON, or a folder with `runs.jsonl` and optionally `curves.jsonl`.
      columns: names and units of the columns.
      needs: columns that a law reads, such as "num_unique_tokens"; if not empty, those
        of N, D, C and the loss that are not among them may be missing.
      ignore: a rule (see `rules`); the rows that it selects are ignored and counted,
        and not checked.
      last_of: columns; of rows that agree in them the one with most tokens (or FLOPs,
        or steps) is read, and the other ones are counted and not checked.
      best_of: columns; of the remaining rows that agree in them, the one with the
        lowest loss is read.

    Returns:
      The log, without runs that are marked as not completed, and without those of a
      sweep of this package whose learning rate was not the best (`best_rates`); both
      are counted.

    Raises:
      ValueError: a column is missing; a cell is not a number, or not above 0; a run
        occurs twice; or no row remains. One line with the place.
    """
    path = validation.path("path", path)
    columns = columns or LogColumns()
    is_sweep = path.is_dir()
    if is_sweep and not (path / files.RUNS).exists():
        raise ValueError(f"{path}: holds no {files.RUNS}; name a file")
    table = files.read_log_table(path / files.RUNS if is_sweep else path)
    roles = find_columns(table, columns)
    units = logs_columns.declared_units(table, columns, roles.names)
    rows, notes = _leave_out(table, ignore, units)
    table = table._replace(rows=rows)
    if last_of:
        table = _last(table, roles, last_of, notes)
    if best_of:
        loss = loss_column(table, roles)
        losses = [parse(row.cells.get(loss), None) for row in table.rows]
        best = best_rates.least_loss_rows(
            _keys(table, roles, best_of, "--best-of"), losses
        )
        message = f"not the lowest {loss} of rows with one {' and '.join(best_of)}"
        table = _keep(table, best, message, notes)
    rows = table.rows
    values, labels, message = logs_columns.read_log_columns(
        table, columns, roles, [*needs]
    )
    log = Log(
        source=path,
        count=columns.count,
        columns=values,
        runs=tuple(labels),
        raw=tuple(rows),
        curves=None,
        notes=(*notes, *message),
        roles=roles.names,
        units=units,
        doubtful=table.doubtful,
    )
    log = log._replace(notes=log.notes + _twins(log, is_sweep))
    if is_sweep and {best_rates.CELL, best_rates.RATE_COLUMN} <= {*table.names}:
        best = best_rates.find_winners([row.cells for row in log.raw])
        if num_left := len(log.raw) - len(best):
            words = "left out: not the best learning rate of size and tokens"
            log = log.take(np.isin(np.arange(len(log.raw)), best))
            log = log._replace(notes=(*log.notes, f"{_rows(num_left)} {words}"))
    if is_sweep and (path / files.CURVES).exists():
        log = log._replace(
            curves=_curves(log, files.read_log_table(path / "curves.jsonl"))
        )
    return log


def _last(
    table: RawTable, roles: ColumnRoles, names: Sequence[str], notes: list[str]
) -> RawTable:
    """Keeps the last of the rows that agree in some columns."""
    size_columns = [roles.names.get(x) for x in ("num_tokens", "flops")]
    orders = [x for x in (*size_columns, *STEP_COLUMNS) if x in table.names]
    if not orders:
        raise ValueError(
            f"{table.path}: --last-of {','.join(names)}: which row is last? It needs D "
            f"(--d), C (--c) or a column of steps; there is {', '.join(table.names)}"
        )
    progress = []
    for row in table.rows:
        cell = row.cells.get(orders[0])
        if (how_far := parse(cell, 1.0)) is None or math.isnan(how_far):
            raise ValueError(
                f"{table.path}: {row.place}: {orders[0]} is {cell!r}, not a number: "
                f"--last-of {','.join(names)} needs it"
            )
        progress.append(how_far)
    last_rows = best_rates.last_rows(_keys(table, roles, names, "--last-of"), progress)
    message = f"not the last by {orders[0]} of rows with one {' and '.join(names)}"
    return _keep(table, last_rows, message, notes)


def _keys(
    table: RawTable, roles: ColumnRoles, names: Sequence[str], flag: str
) -> list[tuple[object, ...]]:
    """Returns the cells of the rows in some columns, as numbers if possible."""
    columns = [logs_columns.find_column(table, roles, name, flag) for name in names]
    return [
        tuple(
            cell if (number := parse(cell, 1.0)) is None else number
            for cell in (row.cells.get(name) for name in columns)
        )
        for row in table.rows
    ]


def _keep(
    table: RawTable, places: list[int], message: str, notes: list[str]
) -> RawTable:
    """Keeps some rows, and counts the dropped ones."""
    if num_left := len(table.rows) - len(places):
        notes.append(f"{_rows(num_left)} left out: {message}")
    if not places:
        raise ValueError(f"{table.path}: no run is left: {'; '.join(notes)}")
    return table._replace(rows=[table.rows[i] for i in places])


def _leave_out(
    table: RawTable, ignore: str, units: Mapping[str, float]
) -> tuple[list[RawRow], list[str]]:
    """Removes and counts rows that a rule ignores or that did not complete."""
    rows = table.rows
    notes = list(table.notes)
    if ignore:
        test = rules.parse_rule(ignore, (*table.names, "row"))

        def is_kept(row: RawRow) -> bool:
            read = {x: parse(row.cells.get(x), unit) for x, unit in units.items()}
            numbers = {name: x for name, x in read.items() if x is not None}
            return not _ask(test, row, {**row.cells, **numbers, "row": row.number})

        selected_rows = [row for row in rows if is_kept(row)]
        notes.append(f"{_rows(len(rows) - len(selected_rows))} left out by {ignore!r}")
        rows = selected_rows
    for name in table.names:
        states = [str(row.cells.get(name)) for row in rows]
        words = {*map(normalize_name, states)}
        is_known = words & _COMPLETED or any(map(NOT_COMPLETED.fullmatch, words))
        # "status" is a column of sweeps here; other names need a known state.
        if name != "status" and not (
            is_known and _STATES.fullmatch(normalize_name(name))
        ):
            continue
        places = [
            i for i, state in enumerate(states) if normalize_name(state) in _COMPLETED
        ]
        if num_left := len(rows) - len(places):
            others = collections.Counter(
                state.lower()
                for state in states
                if normalize_name(state) not in _COMPLETED
            )
            message = ", ".join(f"{n} {state}" for state, n in others.items())
            notes.append(f"{_rows(num_left)} left out by {name}: {message}")
        rows = [rows[i] for i in places]
    if not rows:
        raise ValueError(f"{table.path}: no run is left: {'; '.join(notes)}")
    return rows, notes


def normalize_name(text: str) -> str:
    """Reduces text to its letters and digits in lower case."""
    return re.sub(r"[\W_]", "", text.lower())


def _twins(log: Log, is_sweep: bool) -> tuple[str, ...]:
    """Refuses a run that occurs twice; notes rows with equal numbers."""

    def cells(i: int) -> Hashable:
        items = log.raw[i].cells.items()
        return tuple(sorted((name, repr(cell)) for name, cell in items))

    keys = [cells, lambda i: log.runs[i]] if is_sweep else [cells]
    for key in keys:
        for before, after in _repeated(len(log.raw), key):
            first = log.raw[before].number
            again = log.raw[after].number
            raise ValueError(
                f"{log.source}: rows {first} and {again} are the same run; --ignore "
                f"'row == {again}' leaves one out"
            )
    points = np.stack([*log.columns.values()], 1)
    alike = [
        f"{log.raw[before].number} and {log.raw[after].number}"
        for before, after in _repeated(len(points), lambda i: points[i].tobytes())
    ]
    if not alike:
        return ()
    more = f" and {len(alike) - 3} more" if len(alike) > 3 else ""
    return (f"equal numbers in rows {'; '.join(alike[:3])}{more}: one run twice?",)


def _repeated(
    num_rows: int, key: Callable[[int], Hashable]
) -> Iterator[tuple[int, int]]:
    """Yields rows with a repeated key: the first row of the key, and this one.

    Keys are stored as hashes, to save memory with many rows, and computed again for
    equal hashes.
    """
    hashes = np.fromiter((hash(key(i)) for i in range(num_rows)), np.int64, num_rows)
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(np.diff(hashes[order]) == 0)
    shared = np.unique(order[np.concatenate([again, again + 1])])
    first: dict[Hashable, int] = {}
    for row in map(int, shared):
        before = first.setdefault(key(row), row)
        if before != row:
            yield before, row


def _curves(log: Log, table: RawTable) -> Log:
    """Reads a sweep's training curves for the runs of the log.

    A report without a loss is not a point of the curve.
    """
    row_of = {run: i for i, run in enumerate(log.runs)}
    rows = [
        row
        for row in table.rows
        if str(row.cells.get("run_id")) in row_of and row.cells.get("loss") is not None
    ]
    if not rows:
        raise ValueError(f"{table.path}: no curve belongs to a run of {log.source}")
    curve_table = table._replace(rows=rows)
    runs = [str(row.cells["run_id"]) for row in rows]
    places = np.asarray([row_of[run] for run in runs], np.int64)
    columns = {"num_params": log.columns["num_params"][places]}
    for name in ("num_tokens", "flops"):
        columns[name] = read_numbers(curve_table, name, 1.0)
    columns["loss"] = read_numbers(curve_table, "loss", None)
    return Log(table.path, log.count, columns, tuple(runs), tuple(rows), None, (), {})


def _ask(test: rules.Test, row: RawRow, cells: Mapping[str, files.Cell]) -> bool:
    """Applies a rule to a row; an error has the row's place."""
    try:
        return test(cells)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from None


def _rows(number: int) -> str:
    return f"{number} row" if number == 1 else f"{number} rows"
