"""Runs with the loss and the accuracy of downstream tasks, from one table."""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxkv import validation
from jaxkv.files import RawRow, RawTable
from scaling.logs import files, rules, run_sizes
from scaling.logs.run_sizes import RunSize

_PARAMS = ("num_params", "N", "params", "n_params", "parameters")
_TOKENS = ("num_tokens", "D", "tokens", "throughput/total_tokens", "training_tokens")
_RUN_COLUMNS = ("run", "run_id", "name", "model")


class DownstreamTask(NamedTuple):
    """A downstream task, and the columns of its metrics.

    Attributes:
      name: name of the task.
      loss: columns of the loss of the right answer, in bits per byte.
      accuracy: columns of the accuracy, from 0 to 1, one for each of `loss`.
      weights: weights of the columns; their sum is 1.
      chance: accuracy of a random choice.
    """

    name: str
    loss: tuple[str, ...]
    accuracy: tuple[str, ...]
    weights: tuple[float, ...]
    chance: float


def _ladder_task(name: str, split: str, chance: float = 0.25) -> DownstreamTask:
    """Returns a task by the names of OLMo's ladder, five examples in the prompt."""
    key = f"{name}_{split}_rc_5shot"
    loss = f"eval/downstream_bpb/{key}_bpb"
    accuracy = f"eval/downstream/{key}_len_norm"
    return DownstreamTask(name, (loss,), (accuracy,), (1.0,), chance)


_MMLU_SHARES = {"stem": 0.215, "humanities": 0.335, "social_sciences": 0.219}
"""Shares of the 14,042 test questions of MMLU; the last group has the rest."""
_MMLU_GROUPS = (*_MMLU_SHARES, "other")
LADDER_TASKS: dict[str, DownstreamTask] = {
    "mmlu": DownstreamTask(
        "mmlu",
        tuple(f"eval/downstream_bpb/mmlu_{x}_test_rc_5shot_bpb" for x in _MMLU_GROUPS),
        tuple(f"eval/downstream/mmlu_{x}_test_rc_5shot_len_norm" for x in _MMLU_GROUPS),
        (*_MMLU_SHARES.values(), 1 - sum(_MMLU_SHARES.values())),
        0.25,
    ),
    "hellaswag": _ladder_task("hellaswag", "val"),
    "arc_challenge": _ladder_task("arc_challenge", "test"),
    "arc_easy": _ladder_task("arc_easy", "test"),
    "piqa": _ladder_task("piqa", "val", 0.5),
    "csqa": _ladder_task("csqa", "val", 0.2),
    "socialiqa": _ladder_task("socialiqa", "val", 1 / 3),
    "openbookqa": _ladder_task("openbookqa", "test"),
}
"""The eight tasks of Bhagia et al. 2024, arXiv:2412.04403, as ranked classification:
the answer is the choice with the least loss per character."""


class TaskRuns(NamedTuple):
    """Runs with losses and accuracies of tasks.

    Attributes:
      names: names of the runs.
      num_params: parameters.
      num_tokens: training tokens.
      loss: bits per byte of each task, by its name; NaN where the file has none.
      accuracy: accuracy of each task, by its name; NaN where the file has none.
      is_held_out: True for each run that the rule selects.
    """

    names: tuple[str, ...]
    num_params: Float[np.ndarray, " runs"]
    num_tokens: Float[np.ndarray, " runs"]
    loss: dict[str, Float[np.ndarray, " runs"]]
    accuracy: dict[str, Float[np.ndarray, " runs"]]
    is_held_out: Bool[np.ndarray, " runs"]

    def select(self, mask: Bool[np.ndarray, " runs"]) -> "TaskRuns":
        """Returns the runs of a mask."""
        rows = np.flatnonzero(mask)
        return TaskRuns(
            tuple(self.names[i] for i in rows),
            self.num_params[rows],
            self.num_tokens[rows],
            {name: values[rows] for name, values in self.loss.items()},
            {name: values[rows] for name, values in self.accuracy.items()},
            self.is_held_out[rows],
        )


def parse_task(text: str) -> DownstreamTask:
    """Parses a task of the ladder by name, or NAME=LOSS,ACCURACY,CHANCE.

    Raises:
      ValueError: the name is no task, or the text has another form.
    """
    name, equals, columns = validation.instance("text", text, str).partition("=")
    if not equals:
        if name in LADDER_TASKS:
            return LADDER_TASKS[name]
        raise ValueError(
            f"no task {name!r}; there are {', '.join(LADDER_TASKS)}, and "
            "NAME=LOSS,ACCURACY,CHANCE names columns"
        )
    parts = [part.strip() for part in columns.split(",")]
    chance = rules.parse_number(parts[-1], None) if len(parts) == 3 else None
    if chance is None or not name or not 0 <= chance < 1:
        raise ValueError(
            f"{text!r} must be NAME=LOSS,ACCURACY,CHANCE with a chance in [0, 1)"
        )
    return DownstreamTask(name, (parts[0],), (parts[1],), (1.0,), chance)


def read_task_runs(
    path: str | os.PathLike[str],
    tasks: Sequence[DownstreamTask] = tuple(LADDER_TASKS.values()),
    *,
    n: str = "",
    d: str = "",
    hold_out: str = "",
    needs_metrics: bool = True,
) -> TaskRuns:
    """Reads runs with the metrics of tasks, and checks every number.

    Parameters and tokens are columns, or follow from names such as `190M-0.5xC`. With a
    column of tokens, the parameters of a size are then those tokens over 20 times the
    multiple of its longest run, since names are rounded. A blank cell of a size takes
    that of the name.

    Args:
      path: a table (`jaxkv.files.tables`) with a row for each run.
      tasks: the tasks to read.
      n: column of the parameters; by default found by name, like the next.
      d: column of the tokens.
      hold_out: a rule (`rules`) over the columns of the file, N and D.
      needs_metrics: True if every run must have all metrics.

    Raises:
      ValueError: a column or a metric is missing, a number is outside its range, or a
        run has no size; one line with the place.
    """
    table = files.read_log_table(validation.path("path", path))
    for flag, name in (("--n", n), ("--d", d)):
        if name and name not in table.names:
            raise ValueError(f"{path}: no column {name!r} ({flag})")
    sizes = _read_sizes(table, n or _first(table, _PARAMS), d or _first(table, _TOKENS))
    test = rules.parse_rule(hold_out, {*table.names, "N", "D"}) if hold_out else None
    if needs_metrics:
        for task in tasks:
            for name in (*task.loss, *task.accuracy):
                if name not in table.names:
                    raise ValueError(
                        f"{path}: no column {name!r} of task {task.name}; "
                        "--tasks names the tasks to read"
                    )
    metrics = [
        {
            task.name: [
                _mean(table, row, names, task, high, needs_metrics)
                for row in table.rows
            ]
            for task in tasks
            for names in (task.loss if high > 1 else task.accuracy,)
        }
        for high in (math.inf, 1.0)
    ]
    column = _first(table, _RUN_COLUMNS)
    return TaskRuns(
        tuple(
            str(row.cells.get(column) or size.label)
            for row, size in zip(table.rows, sizes, strict=True)
        ),
        np.array([size.num_params for size in sizes]),
        np.array([size.num_tokens for size in sizes]),
        *({name: np.array(x) for name, x in part.items()} for part in metrics),
        np.array(
            [
                test is not None
                and test({**row.cells, "N": size.num_params, "D": size.num_tokens})
                for row, size in zip(table.rows, sizes, strict=True)
            ]
        ),
    )


def _first(table: RawTable, names: Sequence[str]) -> str:
    return next((name for name in names if name in table.names), "")


def _read_sizes(table: RawTable, params: str, tokens: str) -> list[RunSize]:
    """Returns parameters and tokens of every row."""
    column = _first(table, _RUN_COLUMNS)
    names = [run_sizes.parse_run_name(str(x.cells.get(column))) for x in table.rows]
    longest: dict[str, RunSize] = {}
    sizes = []
    for row, name in zip(table.rows, names, strict=True):
        num_params, num_tokens = (
            None
            if not column_name or (name is not None and _is_blank(row, column_name))
            else files.read_number(table, row, column_name)
            for column_name in (params, tokens)
        )
        if name is None and (num_params is None or num_tokens is None):
            raise ValueError(
                f"{table.path}: {row.place}: no parameters and tokens; --n and --d "
                "name columns, or the run's name is like 190M-0.5xC or 7B-4T"
            )
        if name is not None:
            if num_params is None and num_tokens is not None and name.multiple:
                scale = run_sizes.TOKENS_PER_PARAM * name.multiple
                best = longest.get(name.size)
                if best is None or best.num_tokens < num_tokens:
                    longest[name.size] = RunSize(num_tokens / scale, num_tokens)
            num_params = num_params or name.run_size.num_params
            num_tokens = num_tokens or name.run_size.num_tokens
        sizes.append(RunSize(num_params or 0.0, num_tokens or 0.0))
    if params:
        return sizes
    return [
        RunSize(longest[name.size].num_params, size.num_tokens)
        if name is not None and name.size in longest
        else size
        for name, size in zip(names, sizes, strict=True)
    ]


def _is_blank(row: RawRow, name: str) -> bool:
    return str(row.cells.get(name) or "").strip().lower() in ("", "nan")


def _mean(
    table: RawTable,
    row: RawRow,
    names: Sequence[str],
    task: DownstreamTask,
    high: float,
    is_needed: bool,
) -> float:
    """Returns the weighted mean of columns; NaN if one is missing."""
    values = []
    for name in names:
        if not is_needed and _is_blank(row, name):
            return math.nan
        value = files.read_number(table, row, name, is_open=high > 1)
        if value > high:
            place = f"{table.path}: {row.place}: {name}"
            raise ValueError(f"{place}={value:g} must be in [0, {high:g}]")
        values.append(value)
    return math.fsum(w * x for w, x in zip(task.weights, values, strict=True))
