"""What a log of runs says of the compute optimum before any law is fitted to it.

Approach 2 wherever runs share budgets, by every method, and approach 1 where there are
training curves: their exponents stand beside the fitted law's.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxkv.progress import QUIET, Progress
from scaling.frontiers import envelope, isoflop
from scaling.frontiers.frontier import (
    CHUNK,
    Frontier,
    bootstrap_frontier,
    compare_exponents,
    disagreement_warning,
)
from scaling.frontiers.groups import MIN_SIZES, SAME_SIZE, IsoflopGroups, find_groups
from scaling.logs import LETTERS, Log

ENVELOPE = "envelope"
PARABOLA = "parabola"
CORRECTED = "parabola, corrected"
ROBUST_RESAMPLES = 4 * CHUNK
"""Of the robust projection at most, since each takes several fits; the first ones of
every method's."""
MAX_GROUPED = 2048
"""Runs in isoFLOP groups; of more, so many drawn at random, from every group alike."""
_NO_GROUPS = IsoflopGroups((), np.empty(0, int), 0)


class FrontierSet(NamedTuple):
    """Frontiers of a log.

    Attributes:
      groups: its isoFLOP groups; there may be none.
      frontiers: by method.
      windows: of parabolas through 3, 5 and 7 sizes, without intervals.
      exponents: alpha and beta of the surface by projection; None if there is none, a
        term of it vanishes, or it is in doubt.
      notes: why something is not there, in sentences.
      doubts: about the surface and between methods, in sentences.
    """

    groups: IsoflopGroups
    frontiers: list[Frontier]
    windows: list[Frontier]
    exponents: tuple[float, float] | None
    notes: list[str]
    doubts: list[str]

    @property
    def warnings(self) -> list[str]:
        """What the methods warn of."""
        messages = [
            line
            for each in self.frontiers
            for line in each.warnings
            # An envelope always ends in its smallest and its largest size.
            if each.method != ENVELOPE or "edge of the sizes" not in line
        ]
        windows = compare_exponents(self.windows, what="window of the parabola")
        return [*messages, *self.doubts, *windows]


def find_frontiers(
    log: Log,
    *,
    tolerance: float,
    smoothing: float,
    resamples: int,
    level: float = 0.9,
    seed: int = 0,
    progress: Progress = QUIET,
) -> FrontierSet:
    """Finds the frontiers that a log has.

    Args:
      log: the runs.
      tolerance: of budgets in a group, as `groups.find_groups` has it.
      smoothing: of training curves, decades of FLOPs.
      resamples: of every bootstrap.
      level: of every bootstrap, as `frontier.bootstrap_frontier` has it.
      seed: of every bootstrap.
      progress: receives the state of every bootstrap.
    """
    names = ("num_params", "num_tokens", "loss")
    if missing := [LETTERS[x] for x in names if x not in log.columns]:
        messages = " and ".join(missing)
        note = f"no isoFLOP groups, no envelope: the log has no {messages}"
        return FrontierSet(_NO_GROUPS, [], [], None, [note], [])
    bootstrapped = functools.partial(
        bootstrap_frontier, level=level, seed=seed, progress=progress
    )
    notes: list[str] = []
    groups = _groups(log, tolerance, notes)
    if len(groups.groups) > 1:
        found = _by_groups(groups, notes, resamples, bootstrapped)
    else:
        notes.append(
            f"no isoFLOP groups: fewer than two budgets have {MIN_SIZES} "
            f"sizes within {tolerance:.0%}"
        )
        found = FrontierSet(_NO_GROUPS, [], [], None, notes, [])
    curves = log.curves
    if curves is None and not log.has_one_row_per_run:
        curves = log
    if curves is None:
        return found
    columns = (curves.columns[x] for x in ("num_params", "num_tokens", "flops", "loss"))
    try:
        read = envelope.interpolate_curves(
            curves.labels(), *columns, smoothing=smoothing
        )
    except ValueError as error:
        notes.append(f"no envelope: {error}")
        return found
    best, strata = envelope.find_envelope(read), np.zeros(len(read.num_params), int)
    last = bootstrapped(ENVELOPE, best, read.flops, strata, resamples=resamples)
    return found._replace(frontiers=[*found.frontiers, last])


def _by_groups(
    groups: IsoflopGroups,
    notes: list[str],
    resamples: int,
    bootstrapped: Callable[..., Frontier],
) -> FrontierSet:
    """Approach 2 by every method; adds to the notes."""
    if num := groups.num_merged:
        sizes = "size is" if num == 1 else "sizes are"
        notes.append(
            f"{num} {sizes} within {SAME_SIZE:.0%} of another in an "
            "isoFLOP group, and merged with it"
        )
    if groups.num_left:
        notes.append(f"{groups.num_left} runs are in no isoFLOP group")
    runs: Any = {"flops": groups.flops, "strata": groups.strata}
    surface = isoflop.fit_group_surface(groups)
    robust = isoflop.fit_group_surface(groups, robust=True)
    few = min(resamples, ROBUST_RESAMPLES)
    found = [
        bootstrapped(method, minima, **runs, resamples=number)
        for method, minima, number in (
            (PARABOLA, isoflop.by_parabola(groups), resamples),
            ("akima", isoflop.by_akima(groups), resamples),
            ("projection", isoflop.by_projection(groups, surface), resamples),
            ("projection, robust", isoflop.by_projection(groups, robust), few),
        )
    ]
    windows = [
        bootstrap_frontier(
            f"parabola of {window}", isoflop.by_parabola(groups, window), **runs
        )
        for window in isoflop.WINDOWS
        if max(group.sizes.size for group in groups.groups) >= window
    ]
    doubts = [
        f"projection: {x}" for x in isoflop.surface_warnings(groups, surface, robust)
    ]
    doubts += disagreement_warning(found)
    exponents = None
    if doubts:
        notes.append(
            "the bias of parabolas is not told or taken out: the surface that it "
            "is computed from is in doubt"
        )
    elif np.isfinite(surface.log_a[0] + surface.log_b[0]):
        exponents = float(surface.alpha[0]), float(surface.beta[0])
        corrected = isoflop.by_parabola(groups, None, exponents)
        found.append(bootstrap_frontier(CORRECTED, corrected, **runs))
    return FrontierSet(groups, found, windows, exponents, notes, doubts)


def _groups(log: Log, tolerance: float, notes: list[str]) -> IsoflopGroups:
    """Groups what runs ended at: of several rows of a run, the last."""
    order = np.argsort(log.columns["flops"], kind="stable")
    last = {log.runs[i]: int(i) for i in order}
    names = ("num_params", "num_tokens", "flops", "loss")

    def group(rows: np.ndarray) -> IsoflopGroups:
        columns = (log.columns[name][rows] for name in names)
        found = find_groups(*columns, tolerance=tolerance)
        return found._replace(rows=rows[found.rows])

    groups = group(np.array(sorted(last.values()), int))
    num = groups.rows.size
    if num <= MAX_GROUPED:
        return groups
    notes.append(
        f"isoFLOP minima are found from {MAX_GROUPED:,} of {num:,} grouped runs"
    )
    places = np.random.default_rng(0).permutation(num)
    # The n-th run of each group before the n + 1-th of any, up to the groups' shares.
    strata = groups.strata[places]
    order = np.argsort(strata, kind="stable")
    first = np.searchsorted(strata[order], strata[order])
    share = np.empty(num)
    share[order] = (np.arange(num) - first) / np.bincount(strata)[strata[order]]
    chosen = places[np.argsort(share, kind="stable")[:MAX_GROUPED]]
    return group(np.sort(groups.rows[chosen]))._replace(num_left=groups.num_left)
