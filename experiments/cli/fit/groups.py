"""Fits a log as one, or each group of its rows by itself."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from experiments.cli.fit import frontiers, laws
from experiments.cli.fit.command import Config
from experiments.cli.fit.frontiers import Found
from jaxkv.progress import Progress
from scaling.fits import FitResult
from scaling.laws import Law
from scaling.logs import Log


class Part(NamedTuple):
    """Rows that are fitted together, and what was fitted to them.

    Attributes:
      label: of the group; empty for a log that is one.
      rows: which of the log's rows, those held out among them.
      fits: by law.
      found: their frontiers.
    """

    label: str
    rows: Bool[np.ndarray, " runs"]
    fits: list[FitResult]
    found: Found

    def say(self, line: str) -> str:
        """Says which group a sentence is about."""
        return f"{self.label}: {line}" if self.label else line


def fit_parts(
    config: Config,
    chosen: list[Law],
    log: Log,
    is_fitted: Bool[np.ndarray, " runs"],
    progress: Progress,
) -> tuple[list[Part], list[str]]:
    """Fits all laws to each group of `config.by`, or to the log as one.

    Args:
      config: how to fit.
      chosen: the laws.
      log: the runs.
      is_fitted: which of them are fitted; the others are held out.
      progress: watches.

    Returns:
      The groups, at least one, and why others were not fitted, in sentences.

    Raises:
      ValueError: the log, or every group of it, cannot be fitted.
    """
    parts, doubts = [], []
    for label, rows in _groups(config, log):
        if label:
            progress.show(f"{config.by} {label}")
        try:
            parts.append(_fit(config, chosen, log, rows, is_fitted, label, progress))
        except ValueError as error:
            if not config.by:
                raise
            doubts.append(f"{config.by} {label}: not fitted: {error}")
    if not parts:
        raise ValueError(f"{config.log}: no group can be fitted, such as {doubts[0]}")
    return parts, doubts


def _groups(config: Config, log: Log) -> Iterator[tuple[str, np.ndarray]]:
    """The groups in the order of their first rows."""
    if not config.by:
        yield "", np.ones(len(log.runs), bool)
        return
    labels = np.array(log.label(config.names("by")))
    for label in dict.fromkeys(labels.tolist()):
        yield label, labels == label


def _fit(
    config: Config,
    chosen: list[Law],
    log: Log,
    rows: np.ndarray,
    is_fitted: np.ndarray,
    label: str,
    progress: Progress,
) -> Part:
    if not (rows & is_fitted).any():
        raise ValueError(f"{config.log}: the rule leaves no row to fit")
    seen, others = log.take(rows & is_fitted), log.take(rows & ~is_fitted)
    if label and seen.curves is not None:
        mine = {log.runs[i] for i in np.flatnonzero(rows)}
        curves = seen.curves.take(np.array([x in mine for x in seen.curves.runs]))
        seen = seen._replace(curves=curves if curves.runs else None)
    fits = [*laws.fit_all(config, chosen, seen, others, progress)]
    found = frontiers.find(
        seen,
        tolerance=config.tolerance,
        smoothing=config.smoothing,
        resamples=config.bootstrap,
        level=config.level,
        seed=config.seed,
        progress=progress,
    )
    return Part(label, rows, fits, found)
