"""Ways to choose learning rate and batch size, and the score of a chosen pair."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxkv import validation
from scaling.forecasts.rate_batch import STEP_LAW_BATCH, STEP_LAW_RATE, RateBatchFit
from scaling.logs import RunSize, TunedCell

SURFACE = "surface"
NEAREST_CELL = "nearest cell"
MEAN_PAIR = "mean pair"
PUBLISHED = "Step Law"
PAIR_CHOICES = (SURFACE, NEAREST_CELL, MEAN_PAIR, PUBLISHED)
"""The fitted surface, and its rivals."""


class PairScore(NamedTuple):
    """The measured pair of a cell that is nearest to a chosen one.

    Attributes:
      rate: its learning rate.
      batch: its batch size.
      loss: its loss.
      lost: its loss over the lowest of the cell, minus 1.
      rate_factor: factor between the chosen and the best measured rate, at least 1.
      batch_factor: the same of the batch size.
    """

    rate: float
    batch: float
    loss: float
    lost: float
    rate_factor: float
    batch_factor: float


@validation.checks_numbers(batch_tokens="[1, inf)")
def choose_pairs(
    fit: RateBatchFit,
    cells: Sequence[TunedCell],
    size: RunSize,
    batch_tokens: float = 2048.0,
) -> dict[str, tuple[float, float]]:
    """Returns rate and batch at a size, by each of `PAIR_CHOICES`.

    Args:
      fit: the surface.
      cells: the fitted cells.
      size: parameters and tokens.
      batch_tokens: tokens of a batch of 1, for the published law; at least 1.
    """
    return {
        SURFACE: (fit.rate.value(size), fit.batch.value(size)),
        NEAREST_CELL: copied_pair(cells, size),
        MEAN_PAIR: mean_pair(cells),
        PUBLISHED: (
            STEP_LAW_RATE.value(size),
            STEP_LAW_BATCH.value(size) / batch_tokens,
        ),
    }


@validation.checks_numbers(rate="(0, inf)", batch="(0, inf)")
def score_pair(cell: TunedCell, rate: float, batch: float) -> PairScore:
    """Scores a chosen pair by the nearest measured one."""
    best = cell.best
    near = nearest_run(cell, rate, batch)
    factors = np.exp(np.abs(np.log([rate, batch]) - cell.pairs[best]))
    return PairScore(
        float(cell.rate[near]),
        float(cell.batch[near]),
        float(cell.loss[near]),
        float(cell.loss[near] / cell.loss[best] - 1),
        *map(float, factors),
    )


@validation.checks_numbers(rate="(0, inf)", batch="(0, inf)")
def nearest_run(cell: TunedCell, rate: float, batch: float) -> int:
    """Returns the index of the measured pair nearest in ln(rate) and ln(batch)."""
    return int(np.argmin(((cell.pairs - np.log([rate, batch])) ** 2).sum(1)))


def copied_pair(cells: Sequence[TunedCell], size: RunSize) -> tuple[float, float]:
    """Returns the best measured pair of the cell nearest in ln N and ln D."""
    near = min(
        cells, key=lambda cell: float((np.log(np.divide(cell.size, size)) ** 2).sum())
    )
    return float(near.rate[near.best]), float(near.batch[near.best])


def mean_pair(cells: Sequence[TunedCell]) -> tuple[float, float]:
    """Returns the geometric mean of the best measured pairs of all cells."""
    mean = np.exp(np.mean([cell.pairs[cell.best] for cell in cells], axis=0))
    return float(mean[0]), float(mean[1])
