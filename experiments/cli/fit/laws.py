"""Fits laws to the rows of a log, with resamples, and scores them on other rows."""

import functools
from collections.abc import Callable, Iterator

import numpy as np

from experiments.cli.fit.command import Config
from jaxkv.progress import Progress
from scaling.fits import FitResult, HeldOut, diagnostics, prediction
from scaling.fits import fit as fits_fit
from scaling.fits.fit import scored
from scaling.laws import Law
from scaling.logs import Log

ROLLOUT = 0.1
"""Of the largest compute: what a rollout is fitted to, where no rule says which."""
ROLLOUT_RESAMPLES = 500
"""At most, for the intervals that a rollout's runs should lie in."""


class _Stopped(Exception):
    """Raised inside a bootstrap whose person has pressed Ctrl-C."""


def fit_all(
    config: Config, chosen: list[Law], seen: Log, others: Log, progress: Progress
) -> Iterator[FitResult]:
    """Fits each law to the rows that are seen, and scores it on others.

    Args:
      config: how to fit.
      chosen: the laws.
      seen: what to fit.
      others: what to score the fits on; if it has no rows, a fit to the small ones of
        `seen` is scored on the larger.
      progress: watches the resamples; once it is stopped there are no more.
    """
    for law in chosen:
        flops = prediction.compute(law, seen.columns)
        small = flops <= ROLLOUT * flops.max()
        fit = _fit(config, law, seen, progress)
        if others.runs:
            yield scored(fit, others.columns)
            continue
        most = 0 if progress.stopped else ROLLOUT_RESAMPLES
        held_out = _roll_out(config, law, seen, small, min(config.bootstrap, most))
        doubts = diagnostics.held_out(held_out) if held_out else []
        yield fit._replace(held_out=held_out, warnings=[*fit.warnings, *doubts])


def _fit(config: Config, law: Law, log: Log, progress: Progress) -> FitResult:
    """Fits a law with resamples, or, interrupted, without."""
    fit = _fitter(config, law, log)
    if not config.bootstrap:
        return fit(bootstrap=0)
    update = progress.bar(law.name, config.bootstrap, "resamples")

    def report(done: float) -> None:
        update(done)
        if progress.stopped:
            raise _Stopped

    if not progress.stopped:
        try:
            return fit(bootstrap=config.bootstrap, progress=report)
        except _Stopped:
            pass
    said = "interrupted before its resamples: the intervals are from the curvature"
    first = fit(bootstrap=0)
    return first._replace(warnings=[*first.warnings, said])


def _roll_out(
    config: Config, law: Law, log: Log, small: np.ndarray, resamples: int
) -> HeldOut | None:
    """Scores a fit to the small runs on the larger ones; None where there are few."""
    if small.sum() <= len(law.coefficients) - len(config.fix):
        return None
    try:
        fit = _fitter(config, law, log.take(small))(bootstrap=resamples)
    except ValueError:  # such as one size among the small runs
        return None
    return prediction.score(fit, log.take(~small).columns)


def _fitter(config: Config, law: Law, log: Log) -> Callable[..., FitResult]:
    """Binds what all fits to some rows share; runs are resampled, not rows."""
    return functools.partial(
        fits_fit.fit,
        law,
        log.columns,
        loss=config.loss_kind,
        delta=config.delta,
        space=config.space,
        level=config.level,
        seed=config.seed,
        cluster=log.labels(),
        fixed=config.fixed,
        bounds=config.bounds,
    )
