"""Options of a log of runs, shared by `jaxkv compare` and `jaxkv next`."""

from pathlib import Path
from typing import Annotated

from jaxkv.validation import ConfigRecord, Range
from scaling.laws import Law, find_law
from scaling.logs import Log, LogColumns, read_log


class LogOptions(ConfigRecord):
    """Rows and columns of a log, and the resamples of its fits."""

    where: str = ""
    """Rule for the rows to read, such as 'N <= 400M and seed == 0'."""
    best_of: str = ""
    """Columns for whose values only the row with the lowest loss is read."""
    n: str = ""
    """Column of the parameters; found by name if not given, like the next four."""
    d: str = ""
    """Column of the tokens."""
    c: str = ""
    """Column of the FLOPs."""
    loss: str = ""
    """Column of the loss."""
    run: str = ""
    """Column that identifies runs with several rows."""
    bootstrap: Annotated[int, Range(20, 100_000)] = 1000
    """Resamples of the runs."""
    level: Annotated[float, Range(0, 1, "()")] = 0.9
    """Probability of the intervals."""
    seed: int = 0
    """Seed of the resamples."""


def read_runs(log: str, options: LogOptions, law: str) -> tuple[Log, Law]:
    """Reads the rows of a log that a law needs.

    Raises:
      ValueError: the law or the log cannot be used, or the rule selects no row.
    """
    chosen = find_law(law)
    runs = read_log(
        Path(log),
        LogColumns(
            **{name: getattr(options, name) for name in ("n", "d", "c", "loss", "run")}
        ),
        needs=(*chosen.inputs, chosen.target),
        best_of=tuple(filter(None, options.best_of.replace(" ", "").split(","))),
    )
    if options.where:
        mask = runs.select(options.where)
        if not mask.any():
            raise ValueError(f"--where {options.where}: selects no row")
        runs = runs.take(mask)
    return runs, chosen
