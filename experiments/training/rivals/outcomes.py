"""What came of `rivals`: all runs, and what is read off them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from experiments.training.rivals.fits import (
    SIZES,
    Curve,
    Ratio,
    curve,
    fit,
    ratio,
    resampled,
)

if TYPE_CHECKING:
    from experiments.training.rivals.runs import Trained


class Runs(NamedTuple):
    """Finished runs, a row each; `side` counts in `Result.sides`."""

    side: np.ndarray
    size: np.ndarray
    """What the shape came near to."""
    seed: np.ndarray
    """Of parameters and the order of the text."""
    num_params: np.ndarray
    num_params_non_embedding: np.ndarray
    hidden_size: np.ndarray
    num_tokens: np.ndarray
    flops: np.ndarray
    flops_6nd: np.ndarray
    loss: np.ndarray
    """Of held-out windows, nats per token."""
    loss_se: np.ndarray
    learning_rate: np.ndarray
    seconds: np.ndarray
    """Beside whatever else was trained at the time."""


class Trials(NamedTuple):
    """Learning rates tried, and the losses that they led to."""

    side: np.ndarray
    size: np.ndarray
    learning_rate: np.ndarray
    loss: np.ndarray


class Differences(NamedTuple):
    """Loss of a side minus the reference's, longest runs of equal size, same windows.

    Attributes:
      side: counts in `Result.sides`.
      size: what the shapes came near to.
      difference: mean over the seeds.
      se: its standard error by chance of the held-out text alone.
      by_seed: that of each seed, whose text came to both sides in the same order,
        `[rows, seeds]`.
    """

    side: np.ndarray
    size: np.ndarray
    difference: np.ndarray
    se: np.ndarray
    by_seed: np.ndarray


class Places(NamedTuple):
    """Loss by place in the window, of each side's longest runs of its largest size.

    Attributes:
      place: tokens seen, the middle of each bin.
      loss: mean over the bin, `[sides, bins]`.
      gain: mean loss over the second quarter of the window minus that over the last.
      gain_se: its standard error, by windows; most of it is how hard the text is at
        one place and the other, and common to all sides.
      lead: the reference's gain minus this side's.
      lead_se: its standard error, by windows that both have scored.
    """

    place: np.ndarray
    loss: np.ndarray
    gain: np.ndarray
    gain_se: np.ndarray
    lead: np.ndarray
    lead_se: np.ndarray


class Result(NamedTuple):
    """All runs, and what was read off them; the reference is the first side."""

    sides: np.ndarray
    runs: Runs
    trials: Trials
    differences: Differences
    places: Places
    curves: Curve
    """Through the frontier of each side, `[sides, points]`, exact compute."""
    ratios: Ratio
    """`[2, sides, points]`: exact compute, then 6 N D; the reference against itself."""


type Done = Mapping[tuple[int, int], "Trained"]
"""What was trained, by side and size."""


def collect(
    names: Sequence[str], trained: Done, *, seq_len: int, num_resamples: int
) -> Result:
    """Reads a result off what was trained, which may be a part of what was planned."""
    rows = [
        {"side": i, "size": size} | row
        for (i, size), found in trained.items()
        for row in found.rows
    ]
    trials = [
        (i, size, *trial) for (i, size), x in trained.items() for trial in x.trials
    ]
    by_side = [[row for row in rows if row["side"] == i] for i in range(len(names))]
    ratios, exact = [], []
    for size in SIZES:
        fits = [fit(mine, size) for mine in by_side]
        again = [
            resampled(mine, size, num_resamples, i) for i, mine in enumerate(by_side)
        ]
        exact = exact or fits
        ratios += [
            ratio(fits[0], side, (again[0], drawn))
            for side, drawn in zip(fits, again, strict=True)
        ]
    shape = (len(SIZES), len(names))
    parts = [np.array(part) for part in zip(*ratios, strict=True)]
    curves = [curve(each) for each in exact]
    return Result(
        np.array(names),
        Runs(*(np.array([row[name] for row in rows]) for name in Runs._fields)),
        Trials(*np.array(trials, float).reshape(-1, 4).T),
        _differences(trained),
        _places(trained, len(names), seq_len),
        Curve(*(np.array(part) for part in zip(*curves, strict=True))),
        Ratio(*(part.reshape(*shape, *part.shape[1:]) for part in parts)),
    )


def _differences(trained: Done) -> Differences:
    pairs, found, by_seed = [], [], []
    for (i, size), each in trained.items():
        if i and (0, size) in trained:
            apart = (each.losses - trained[0, size].losses).mean(2)
            pairs.append((i, size))
            found.append(_mean(apart.mean(0)))
            by_seed.append(apart.mean(1))
    means = np.array(found, float).reshape(-1, 2).T
    side, size = np.array(pairs, int).reshape(-1, 2).T
    return Differences(side, size, *means, np.array(by_seed, float))


def _places(trained: Done, num_sides: int, seq_len: int) -> Places:
    edges = np.unique(np.geomspace(1, seq_len + 1, 17).round().astype(int)) - 1
    middle = np.sqrt((edges[:-1] + 1.0) * edges[1:])
    loss = np.full((num_sides, len(middle)), np.nan)
    gains = np.full((4, num_sides), np.nan)
    quarter, reference = seq_len // 4, None
    for i in range(num_sides):
        sizes = [size for j, size in trained if j == i]
        if not sizes:
            continue
        losses = trained[i, max(sizes)].losses.mean(0)
        parts = itertools.pairwise(edges)
        loss[i] = [losses[:, low:high].mean() for low, high in parts]
        gain = losses[:, quarter : 2 * quarter].mean(1) - losses[:, -quarter:].mean(1)
        reference = gain if i == 0 else reference
        gains[:2, i] = _mean(gain)
        if reference is not None:
            gains[2:, i] = _mean(reference - gain)
    return Places(middle, loss, *gains)


def _mean(windows: np.ndarray) -> tuple[float, float]:
    """The mean over windows, and its standard error."""
    se = windows.std(ddof=1) / np.sqrt(len(windows))
    return float(windows.mean()), float(se)
