"""Logs of training runs as columns in SI units, every row accounted for.

A log is a CSV, JSON lines, or the folder of a sweep (`log_tables`). Of N, D and C two
are enough: the third follows from `C = 6 N D` and the log says so. Nothing is dropped
in silence: a row that cannot be used is an error with its number, unless its run is
marked as not completed or a rule leaves it out, and then `notes` counts it.
"""

import collections
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from scaling import competing, log_columns, log_tables, selecting
from scaling.log_columns import Columns
from scaling.log_tables import RawRow, RawTable

_COMPLETED = {"completed", "complete", "done", "finished"}


class Log(NamedTuple):
    """Runs that are completed and can be fitted.

    Attributes:
      source: the file or folder.
      count: what `num_params` counts: parameters in total, without embeddings, those
        in matrix products, or the active ones of a mixture.
      columns: `num_params`, `num_tokens`, `flops`, `loss` and what else was asked for,
        positive and finite.
      runs: a label for each row; rows with equal labels are one run's.
      raw: the rows as they stand in the file.
      curves: the training curves, rows labelled like `runs`; None if there are none.
      notes: what was derived, left out or assumed, in sentences.
    """

    source: Path
    count: str
    columns: dict[str, Float[np.ndarray, " runs"]]
    runs: tuple[str, ...]
    raw: tuple[RawRow, ...]
    curves: "Log | None"
    notes: tuple[str, ...]

    @property
    def has_one_row_per_run(self) -> bool:
        """Whether no run has two rows."""
        return len({*self.runs}) == len(self.runs)

    def labels(self) -> Int[np.ndarray, " runs"]:
        """Numbers the runs: rows with equal numbers are one run's."""
        return np.unique(np.asarray(self.runs), return_inverse=True)[1].reshape(-1)

    def select(self, rule: str) -> Bool[np.ndarray, " runs"]:
        """Tells which rows a rule selects.

        Args:
          rule: as `selecting` reads it, over the file's columns as they are written,
            `row`, and `num_params`, `num_tokens`, `flops` and `loss` in SI units.

        Raises:
          ValueError: it is no rule, or cannot be asked of a row.
        """
        names = dict.fromkeys(name for row in self.raw for name in row.cells)
        names |= dict.fromkeys(["row", *self.columns])
        test = selecting.parse(rule, names)
        found = []
        for i, row in enumerate(self.raw):
            ours = {name: column[i] for name, column in self.columns.items()}
            found.append(_ask(test, row, {**ours, **row.cells, "row": row.number}))
        return np.asarray(found, bool)

    def take(self, mask: Bool[np.ndarray, " runs"]) -> "Log":
        """Keeps some rows, and all curves."""
        columns = {name: column[mask] for name, column in self.columns.items()}
        places = np.flatnonzero(mask)
        return self._replace(
            columns=columns,
            runs=tuple(self.runs[i] for i in places),
            raw=tuple(self.raw[i] for i in places),
        )


def read(
    path: Path,
    columns: Columns | None = None,
    *,
    needs: Iterable[str] = (),
    ignore: str = "",
) -> Log:
    """Reads a log and checks every row of it.

    Args:
      path: a CSV, JSON lines, or a folder with `runs.jsonl` and perhaps `curves.jsonl`.
      columns: which columns mean what.
      needs: other columns that a law reads, such as "num_unique_tokens".
      ignore: a rule (see `selecting`); the rows that it selects are left out, counted,
        and not checked.

    Returns:
      The log; a run that says it is not completed is left out and counted, and so are
      the runs of a sweep of ours whose learning rate was not the best (`competing`).

    Raises:
      ValueError: a column is missing; a cell is not a number, or not above 0; a run
        stands there twice; nothing is left. One line that says where.
    """
    columns = columns or Columns()
    is_sweep = path.is_dir()
    if is_sweep and not (path / log_tables.RUNS).exists():
        raise ValueError(f"{path}: holds no {log_tables.RUNS}; name a file")
    table = log_tables.read(path / log_tables.RUNS if is_sweep else path)
    rows, notes = _leave_out(table, ignore)
    table = table._replace(rows=rows)
    values, labels, said = log_columns.read(table, columns, needs)
    log = Log(
        source=path,
        count=columns.count,
        columns=values,
        runs=tuple(labels),
        raw=tuple(rows),
        curves=None,
        notes=(*notes, *said),
    )
    log = log._replace(notes=log.notes + _twins(log, is_sweep))
    if is_sweep and {competing.CELL, competing.RATE} <= {*table.names}:
        log = _best(log)
    if is_sweep and (path / log_tables.CURVES).exists():
        log = log._replace(curves=_curves(log, log_tables.read(path / "curves.jsonl")))
    return log


def _best(log: Log) -> Log:
    """Leaves out the learning rates of a sweep that were not the best."""
    kept = competing.winners([row.cells for row in log.raw])
    num_left = len(log.raw) - len(kept)
    if not num_left:
        return log
    said = f"{_rows(num_left)} left out: not the best learning rate of size and tokens"
    mask = np.isin(np.arange(len(log.raw)), kept)
    return log.take(mask)._replace(notes=(*log.notes, said))


def _leave_out(table: RawTable, ignore: str) -> tuple[list[RawRow], list[str]]:
    """Leaves out what a rule ignores and what was not completed, and counts them."""
    rows, notes = table.rows, list(table.notes)
    if ignore:
        test = selecting.parse(ignore, (*table.names, "row"))
        kept = [
            row for row in rows if not _ask(test, row, {**row.cells, "row": row.number})
        ]
        notes.append(f"{_rows(len(rows) - len(kept))} left out by {ignore!r}")
        rows = kept
    if "status" in table.names:
        states = [str(row.cells.get("status")).lower() for row in rows]
        others = collections.Counter(s for s in states if s not in _COMPLETED)
        if others:
            said = ", ".join(f"{n} {state}" for state, n in others.items())
            notes.append(f"{_rows(sum(others.values()))} left out by status: {said}")
        pairs = zip(rows, states, strict=True)
        rows = [row for row, state in pairs if state in _COMPLETED]
    if not rows:
        raise ValueError(f"{table.path}: no run is left: {'; '.join(notes)}")
    return rows, notes


def _twins(log: Log, is_sweep: bool) -> tuple[str, ...]:
    """Refuses a run that stands there twice; tells of rows that may be chance."""

    def cells(i: int) -> Hashable:
        items = log.raw[i].cells.items()
        return tuple(sorted((name, repr(cell)) for name, cell in items))

    keys = [cells, lambda i: log.runs[i]] if is_sweep else [cells]
    for key in keys:
        for before, after in _repeated(len(log.raw), key):
            first, again = log.raw[before].number, log.raw[after].number
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
    """Finds rows of a key that was there before: the first such row, and this one.

    Keys are kept as their hashes, so that very many rows fit, and made again where
    those agree.
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
    """Reads a sweep's training curves: of the runs that the log has, and no others.

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
    kept = table._replace(rows=rows)
    runs = [str(row.cells["run_id"]) for row in rows]
    places = np.asarray([row_of[run] for run in runs], np.int64)
    columns = {"num_params": log.columns["num_params"][places]}
    for name in ("num_tokens", "flops"):
        columns[name] = log_columns.numbers(kept, name, 1.0)
    columns["loss"] = log_columns.numbers(kept, "loss", None)
    return Log(table.path, log.count, columns, tuple(runs), tuple(rows), None, ())


def _ask(
    test: selecting.Test, row: RawRow, cells: Mapping[str, log_tables.Cell]
) -> bool:
    """Asks a rule of a row; an error says which row."""
    try:
        return test(cells)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from None


def _rows(number: int) -> str:
    return f"{number} row" if number == 1 else f"{number} rows"
