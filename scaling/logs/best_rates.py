"""Of rows that compete, the one that counts: the best learning rate, the last step.

What a size is worth is its loss at a rate that suits it, when its training is over; a
fit to all rates and checkpoints would mix tuning with scaling.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

CELL, RATE, SEED, LOSS = "cell", "learning_rate", "seed", "loss"


def _read(row: Mapping[str, Any], name: str, kind: type, place: int) -> Any:
    """Reads a cell of a row that competes."""
    try:
        return kind(row[name])
    except (LookupError, TypeError, ValueError, OverflowError):
        message = f"{name}={row.get(name)!r} must be of type {kind.__name__}"
        raise ValueError(f"run {place + 1} of the sweep: {message}") from None


def find_winners(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Finds the runs that have the best learning rate of their cell.

    Rates are compared on the seeds that all of them have, by their mean loss; where
    there are none, each on its own. Of equal ones the smaller rate wins.

    Args:
      rows: with a `cell`, `learning_rate`, `seed` and `loss`; runs of one cell differ
        in rate and seed alone.

    Returns:
      Their places, rising: every seed of a winning rate.

    Raises:
      ValueError: a row lacks one of them, or it is of another kind.
    """
    cells: dict[Any, dict[float, list[int]]] = {}
    for place, row in enumerate(rows):
        rates = cells.setdefault(_read(row, CELL, str, place), {})
        _read(row, SEED, int, place)
        rates.setdefault(_read(row, RATE, float, place), []).append(place)
    kept = []
    for rates in cells.values():
        common = set.intersection(
            *({rows[i][SEED] for i in places} for places in rates.values())
        )

        def mean(
            rate: float, rates: Mapping[float, list[int]] = rates, common: set = common
        ) -> float:
            seen = [i for i in rates[rate] if not common or rows[i][SEED] in common]
            return math.fsum(float(rows[i][LOSS]) for i in seen) / len(seen)

        kept += rates[min(sorted(rates), key=mean)]
    return sorted(kept)


def least_loss_rows(
    keys: Sequence[Hashable], losses: Sequence[float | None]
) -> list[int]:
    """Finds the row of least loss among those of each key, the first of equals.

    Args:
      keys: of the rows; equal ones compete.
      losses: of the rows; what is not a finite number above 0 is never the best.

    Returns:
      Places, rising; none of a key without a loss.
    """
    counted = [i for i, x in enumerate(losses) if x is not None and 0 < x < math.inf]
    # The last of a key stays, so the best comes last.
    counted.sort(key=lambda i: (losses[i] or math.inf, i), reverse=True)
    return sorted({keys[i]: i for i in counted}.values())


def last_rows(keys: Sequence[Hashable], progress: Sequence[float]) -> list[int]:
    """Finds the row that is furthest among those of each key, the later of equals.

    Args:
      keys: of the rows.
      progress: tokens, FLOPs or steps; numbers.

    Returns:
      Places, rising.
    """
    order = sorted(range(len(keys)), key=progress.__getitem__)
    return sorted({keys[i]: i for i in order}.values())
