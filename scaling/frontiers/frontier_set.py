"""Compute-optimal frontiers of a log of runs, before any law is fitted.

Approach 2 if runs share budgets, by every method, and approach 1 if there are training
curves. Reports list their exponents next to those of the fitted law.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from scaling.frontiers import envelope, isoflop
from scaling.frontiers.frontier import (
    RESAMPLES_PER_CHUNK,
    Frontier,
    bootstrap_frontier,
    compare_exponents,
    disagreement_warning,
)
from scaling.frontiers.groups import (
    MIN_SIZES,
    SAME_SIZE,
    IsoflopGroups,
    find_run_groups,
)
from scaling.logs import LETTERS, Log

ENVELOPE = "envelope"
PARABOLA = "parabola"
CORRECTED = "parabola, corrected"
ROBUST_RESAMPLES = 4 * RESAMPLES_PER_CHUNK
"""Largest number of resamples of the robust projection, which takes several fits each;
they are the first ones of the other methods."""
MAX_GROUPED = 2048
"""Largest number of runs in isoFLOP groups; of more, a random sample of every group."""
_NO_GROUPS = IsoflopGroups((), np.empty(0, int), 0)


class FrontierSet(NamedTuple):
    """Frontiers of a log.

    Attributes:
      groups: isoFLOP groups, possibly none.
      frontiers: frontiers by method.
      windows: frontiers of parabolas through 3, 5 and 7 sizes, without intervals.
      exponents: alpha and beta of the surface by projection; None without a surface, if
        one of its terms vanishes, or if it has warnings.
      notes: reasons for missing parts, in sentences.
      doubts: warnings about the surface and between methods, in sentences.
    """

    groups: IsoflopGroups
    frontiers: list[Frontier]
    windows: list[Frontier]
    exponents: tuple[float, float] | None
    notes: list[str]
    doubts: list[str]

    @property
    def warnings(self) -> list[str]:
        """Warnings of all methods; one that several methods share is one sentence."""
        methods: dict[str, list[str]] = {}
        for frontier in self.frontiers:
            for line in frontier.warnings:
                # An envelope always ends in its smallest and its largest size.
                if frontier.method != ENVELOPE or "edge of the sizes" not in line:
                    sentence = line.removeprefix(f"{frontier.method}: ")
                    methods.setdefault(sentence, []).append(frontier.method)
        messages = [f"{' / '.join(x)}: {line}" for line, x in methods.items()]
        windows = compare_exponents(self.windows, what="window of the parabola")
        return [*messages, *self.doubts, *windows]


@validation.checks_numbers(
    tolerance="[0, 1)", smoothing=0, resamples=0, level="(0, 1)", seed=validation.SEEDS
)
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
    """Finds the frontiers of a log.

    Args:
      log: the runs.
      tolerance: tolerance of budgets in a group, as in `groups.find_run_groups`.
      smoothing: smoothing of training curves in decades of FLOPs.
      resamples: number of resamples of every bootstrap.
      level: probability of intervals, as in `frontier.bootstrap_frontier`.
      seed: seed of every bootstrap.
      progress: receives the progress of every bootstrap.
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
        frontier_set = _by_groups(groups, notes, resamples, bootstrapped)
    else:
        notes.append(
            f"no isoFLOP groups: fewer than two budgets have {MIN_SIZES} "
            f"sizes within {tolerance:.0%}"
        )
        frontier_set = FrontierSet(_NO_GROUPS, [], [], None, notes, [])
    curves = log.curves
    if curves is None and not log.has_one_row_per_run:
        curves = log
    if curves is None:
        return frontier_set
    columns = (curves.columns[x] for x in ("num_params", "num_tokens", "flops", "loss"))
    try:
        read = envelope.interpolate_curves(
            curves.labels(), *columns, smoothing=smoothing
        )
    except ValueError as error:
        notes.append(f"no envelope: {error}")
        return frontier_set
    best = envelope.find_envelope(read)
    strata = np.zeros(len(read.num_params), int)
    last = bootstrapped(ENVELOPE, best, read.flops, strata, resamples=resamples)
    return frontier_set._replace(frontiers=[*frontier_set.frontiers, last])


def _by_groups(
    groups: IsoflopGroups,
    notes: list[str],
    resamples: int,
    bootstrapped: Callable[..., Frontier],
) -> FrontierSet:
    """Computes approach 2 by every method; adds to the notes."""
    if num := groups.num_merged:
        sizes = "size is" if num == 1 else "sizes are"
        notes.append(
            f"{num} {sizes} within {SAME_SIZE:.0%} of another in an "
            "isoFLOP group, and merged with it"
        )
    if groups.num_left:
        notes.append(f"{groups.num_left} runs are in no isoFLOP group")
    bootstrapped = functools.partial(
        bootstrapped, flops=groups.flops, strata=groups.strata
    )
    surface = isoflop.fit_group_surface(groups)
    robust = isoflop.fit_group_surface(groups, robust=True)
    few = min(resamples, ROBUST_RESAMPLES)
    frontiers = [
        bootstrapped(method, minima, resamples=number)
        for method, minima, number in (
            (PARABOLA, isoflop.by_parabola(groups), resamples),
            ("akima", isoflop.by_akima(groups), resamples),
            ("projection", isoflop.by_projection(groups, surface), resamples),
            ("projection, robust", isoflop.by_projection(groups, robust), few),
        )
    ]
    windows = [
        bootstrap_frontier(
            f"parabola of {window}",
            isoflop.by_parabola(groups, window),
            flops=groups.flops,
            strata=groups.strata,
        )
        for window in isoflop.WINDOWS
        if max(group.sizes.size for group in groups.groups) >= window
    ]
    doubts = [
        f"projection: {x}" for x in isoflop.surface_warnings(groups, surface, robust)
    ]
    doubts += disagreement_warning(frontiers)
    exponents = None
    if doubts:
        notes.append(
            "the bias of parabolas is not computed or corrected: the surface that "
            "it depends on is in doubt"
        )
    elif np.isfinite(surface.log_a[0] + surface.log_b[0]):
        exponents = float(surface.alpha[0]), float(surface.beta[0])
        corrected = isoflop.by_parabola(groups, None, exponents)
        frontiers.append(
            bootstrap_frontier(
                CORRECTED, corrected, flops=groups.flops, strata=groups.strata
            )
        )
    return FrontierSet(groups, frontiers, windows, exponents, notes, doubts)


def _groups(log: Log, tolerance: float, notes: list[str]) -> IsoflopGroups:
    """Groups the final rows of runs; of several rows of a run, the last."""
    order = np.argsort(log.columns["flops"], kind="stable")
    last = {log.runs[i]: int(i) for i in order}
    names = ("num_params", "num_tokens", "flops", "loss")

    def group(rows: np.ndarray) -> IsoflopGroups:
        columns = (log.columns[name][rows] for name in names)
        run_groups = find_run_groups(*columns, tolerance=tolerance)
        return run_groups._replace(rows=rows[run_groups.rows])

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
