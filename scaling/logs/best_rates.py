"""Selection among competing rows: the best learning rate, the last step.

A size is represented by its loss at a good rate at the end of training; a fit to all
rates and checkpoints would mix tuning with scaling.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

CELL = "cell"
RATE_COLUMN = "learning_rate"
SEED = "seed"
LOSS_COLUMN = "loss"


def _read(row: Mapping[str, object], name: str, kind: type, place: int) -> Any:
    """Reads a cell of a competing row."""
    try:
        return kind(row[name])
    except (LookupError, TypeError, ValueError, OverflowError):
        message = f"{name}={row.get(name)!r} must be of type {kind.__name__}"
        raise ValueError(f"run {place + 1} of the sweep: {message}") from None


def find_winners(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Finds the runs with the best learning rate of their cell.

    Rates are compared by their mean loss over the seeds that all rates have; without
    common seeds, over their own. Of equal rates the smaller wins.

    Args:
      rows: rows with a `cell`, `learning_rate`, `seed` and `loss`; runs of one cell
        differ only in rate and seed.

    Returns:
      Indices of the rows of winning rates, every seed, rising.

    Raises:
      ValueError: a row lacks a field, or the field has another type.
    """
    cells: dict[str, dict[float, list[int]]] = {}
    for place, row in enumerate(rows):
        rates = cells.setdefault(_read(row, CELL, str, place), {})
        _read(row, SEED, int, place)
        rates.setdefault(_read(row, RATE_COLUMN, float, place), []).append(place)
    winners = []
    for rates in cells.values():
        common = set.intersection(
            *({rows[i][SEED] for i in places} for places in rates.values())
        )

        def mean(
            rate: float, rates: Mapping[float, list[int]] = rates, common: set = common
        ) -> float:
            indices = [i for i in rates[rate] if not common or rows[i][SEED] in common]
            return math.fsum(float(rows[i][LOSS_COLUMN]) for i in indices) / len(
                indices
            )

        winners += rates[min(sorted(rates), key=mean)]
    return sorted(winners)


def least_loss_rows(
    keys: Sequence[Hashable], losses: Sequence[float | None]
) -> list[int]:
    """Finds the row of lowest loss for each key, the first of equals.

    Args:
      keys: keys of the rows; rows with equal keys compete.
      losses: losses of the rows; one that is not finite and above 0 never wins.

    Returns:
      Indices, rising; none for a key without a loss.
    """
    counted = [i for i, x in enumerate(losses) if x is not None and 0 < x < math.inf]
    # The last row of a key wins, so the best comes last.
    counted.sort(key=lambda i: (losses[i] or math.inf, i), reverse=True)
    return sorted({keys[i]: i for i in counted}.values())


def last_rows(keys: Sequence[Hashable], progress: Sequence[float]) -> list[int]:
    """Finds the row with the most progress for each key, the later of equals.

    Args:
      keys: keys of the rows.
      progress: tokens, FLOPs or steps of the rows.

    Returns:
      Indices, rising.
    """
    order = sorted(range(len(keys)), key=progress.__getitem__)
    return sorted({keys[i]: i for i in order}.values())
