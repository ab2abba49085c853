"""Learning rates that a sweep tried, and verdicts from intervals, as text."""

import numpy as np
from jaxtyping import Float

from jaxkv.report import Direction

RATE_HEADS = ("rate: loss", "taken", "at the edge")
"""Column headings for `format_rates`."""


def format_rates(
    rates: Float[np.ndarray, " trials"],
    losses: Float[np.ndarray, " trials"],
    chosen: float,
) -> tuple[str, str, str]:
    """Returns learning rates, ascending, with their losses, and the chosen one."""
    order = np.argsort(rates)
    pairs = zip(rates[order], losses[order], strict=True)
    shown = ", ".join(f"{rate:.2g}: {loss:.3f}" for rate, loss in pairs)
    is_edge = chosen in (rates.min(), rates.max())
    return shown, f"{chosen:.2g}", "yes" if is_edge else "no"


def format_interval(low: float, high: float, digits: int = 2) -> str:
    """Returns an interval as text; "not identified" if an end is not finite."""
    if not np.isfinite([low, high]).all():
        return "not identified"
    return f"{low:.{digits}f} to {high:.{digits}f}"


def judge_direction(low: float, high: float, *, above: float = 1.0) -> str:
    """Returns whether an interval shows that a number is above a bound."""
    if low > above:
        return "shows"
    return "does not show: the other way" if high < above else "is not decided"


def direction_verdict(shown: str) -> Direction:
    """Returns the verdict of a claim whose source states a direction.

    Args:
      shown: result of `judge_direction`.
    """
    if shown == "shows":
        return "holds"
    return "fails" if shown.startswith("does not show") else "not decided"
