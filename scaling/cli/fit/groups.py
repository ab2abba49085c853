"""Fits laws to a whole log, or to each group of its rows, and scores them."""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from jaxkv.progress import Progress
from scaling.cli.fit.config import ALL_LAWS, FitConfig
from scaling.fits import (
    FitResult,
    Objective,
    Restrictions,
    bootstrap,
    held_out_warnings,
    run_flops,
    score,
)
from scaling.fits import fit as fit_law
from scaling.frontiers import FrontierSet, find_frontiers
from scaling.laws import CHINCHILLA, Law
from scaling.logs import Log

ROLLOUT = 0.1
"""Share of the largest compute below which runs are fitted in a rollout, if no rule is
given."""
ROLLOUT_RESAMPLES = 500
"""Largest number of resamples for the intervals of a rollout."""


class _Stopped(Exception):
    """Raised inside a bootstrap after Ctrl-C."""


class FitGroup(NamedTuple):
    """Rows that are fitted together, and their fits.

    Attributes:
      label: label of the group; empty if the log is one group.
      rows: mask of the log's rows, including held-out ones.
      fits: fits by law.
      frontier_set: frontiers of the rows.
    """

    label: str
    rows: Bool[np.ndarray, " runs"]
    fits: list[FitResult]
    frontier_set: FrontierSet

    def label_line(self, line: str) -> str:
        """Returns a sentence with the label of its group."""
        return f"{self.label}: {line}" if self.label else line


def fit_groups(
    config: FitConfig,
    chosen: list[Law],
    log: Log,
    is_fitted: Bool[np.ndarray, " runs"],
    progress: Progress,
) -> tuple[list[FitGroup], list[str]]:
    """Fits all laws to each group of `config.by`, or to the whole log.

    Args:
      config: options of the fit.
      chosen: laws to fit.
      log: runs.
      is_fitted: mask of the runs to fit; the remaining runs are held out.
      progress: progress bar.

    Returns:
      The groups, at least one, and sentences about groups that could not be fitted.

    Raises:
      ValueError: the log, or every group of it, cannot be fitted.
    """
    parts = []
    doubts = []
    groups = {"": np.ones(len(log.runs), bool)}
    if config.by:  # in the order of their first rows
        labels = np.array(log.label(config.names("by")))
        groups = {label: labels == label for label in labels.tolist()}
    for label, rows in groups.items():
        if label:
            progress.show(f"{config.by} {label}")
        try:
            parts.append(
                _fit_group(config, chosen, log, label, rows, is_fitted, progress)
            )
        except ValueError as error:
            if not config.by:
                raise
            doubts.append(f"{config.by} {label}: not fitted: {error}")
    if not parts:
        raise ValueError(f"{config.log}: no group can be fitted, such as {doubts[0]}")
    return parts, doubts


def _fit_group(
    config: FitConfig,
    chosen: list[Law],
    log: Log,
    label: str,
    rows: np.ndarray,
    is_fitted: np.ndarray,
    progress: Progress,
) -> FitGroup:
    """Fits all laws to one group, and finds its frontiers.

    With `--law all`, laws that the runs cannot determine are left out.
    """
    if not (rows & is_fitted).any():
        raise ValueError(f"{config.log}: the rule selects no row to fit")
    fit_log = log.take(rows & is_fitted)
    held_out_log = log.take(rows & ~is_fitted)
    if label and fit_log.curves is not None:
        selected = {log.runs[i] for i in np.flatnonzero(rows)}
        curves = fit_log.curves.take(
            np.array([x in selected for x in fit_log.curves.runs])
        )
        fit_log = fit_log._replace(curves=curves if curves.runs else None)
    fits = []
    for law in chosen:
        try:
            fits.append(_fit_law(config, law, fit_log, held_out_log, progress))
        except ValueError:
            if config.laws != (ALL_LAWS,) or law is CHINCHILLA:
                raise
    if config.laws == (ALL_LAWS,):
        fits.sort(key=lambda x: x.held_out.mean_error if x.held_out else math.inf)
    frontier_set = find_frontiers(
        fit_log,
        tolerance=config.tolerance,
        smoothing=config.smoothing,
        resamples=config.bootstrap,
        level=config.level,
        seed=config.seed,
        progress=progress,
    )
    return FitGroup(label, rows, fits, frontier_set)


def _fit_law(
    config: FitConfig, law: Law, fit_log: Log, held_out_log: Log, progress: Progress
) -> FitResult:
    """Fits a law to the given rows, and scores it on the held-out ones.

    Without held-out rows, a fit to the small runs is scored on the larger ones.
    """
    options: dict[str, Any] = {
        "objective": Objective(config.loss_kind, config.delta, config.space),
        "restrictions": Restrictions(config.fixed, config.bounds),
        "level": config.level,
    }
    fit = _resampled(config, law, fit_log, options, progress)
    if held_out_log.runs:
        return score(fit, held_out_log.columns)
    flops = run_flops(law, fit_log.columns)
    is_large = flops > ROLLOUT * flops.max()
    if (~is_large).sum() <= len(law.coefficients) - len(config.fix):
        return fit
    small_log = fit_log.take(~is_large)
    num_resamples = 0 if progress.stopped else min(config.bootstrap, ROLLOUT_RESAMPLES)
    try:
        rollout = fit_law(law, small_log.columns, cluster=small_log.labels(), **options)
        if num_resamples:
            rollout = bootstrap(
                rollout,
                small_log.columns,
                num_resamples=num_resamples,
                seed=config.seed,
                cluster=small_log.labels(),
            )
        held_out = score(rollout, fit_log.take(is_large).columns).held_out
    except ValueError:  # such as a single size among the small runs
        return fit
    assert held_out is not None
    doubts = held_out_warnings(held_out, fit.warnings)
    return fit._replace(held_out=held_out, warnings=[*fit.warnings, *doubts])


def _resampled(
    config: FitConfig,
    law: Law,
    log: Log,
    options: dict[str, Any],
    progress: Progress,
) -> FitResult:
    """Fits a law with bootstrap intervals, or without them after an interrupt."""
    columns = log.columns
    labels = log.labels()  # runs are resampled, not rows
    if not config.bootstrap:
        return fit_law(law, columns, cluster=labels, **options)
    update = progress.bar(law.name, config.bootstrap, "resamples")

    def report(done: float) -> None:
        update(done)
        if progress.stopped:
            raise _Stopped

    fit = fit_law(law, columns, cluster=labels, **options)
    if not progress.stopped:
        try:
            return bootstrap(
                fit,
                columns,
                num_resamples=config.bootstrap,
                seed=config.seed,
                cluster=labels,
                progress=report,
            )
        except _Stopped:
            pass
    warning = "interrupted before its resamples: intervals are from the curvature"
    return fit._replace(warnings=[*fit.warnings, warning])
