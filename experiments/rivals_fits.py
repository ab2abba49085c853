"""Fits a law to each side of `rivals` and reads compute to equal loss off two of them.

A law of size and tokens, whose size is a token's training FLOPs over six: then 6 N D is
the exact compute of any architecture, its head, attention and all (so DeepSeek-AI 2024,
arXiv:2401.02954, section 3.2). Beside it the usual N, parameters outside embeddings.
"""

from typing import Any, NamedTuple

import numpy as np

from scaling import fitting, laws

NUM_POINTS = 40
"""Of every curve."""
SIZES = ("exact", "6ND")
"""How compute is counted."""


class Curve(NamedTuple):
    """The least loss of a side by compute, over the compute of its runs."""

    flops: np.ndarray
    loss: np.ndarray


class Ratio(NamedTuple):
    """Compute of a side over that of the reference, by loss; 90 % intervals."""

    loss: np.ndarray
    ratio: np.ndarray
    low: np.ndarray
    high: np.ndarray


def fit(rows: list[dict[str, Any]], size: str, resamples: int) -> Any:
    """Fits a side; None where its runs are too few or cannot be fitted.

    Args:
      rows: its runs.
      size: one of `SIZES`.
      resamples: for the intervals; runs that share a trunk are resampled one by one.
    """
    rows = [row for row in rows if np.isfinite(row["loss"])]
    column = "flops" if size == "exact" else "flops_6nd"
    flops, tokens, loss = (
        np.array([row[name] for row in rows], float)
        for name in (column, "num_tokens", "loss")
    )
    data = {"num_params": flops / (6 * tokens), "num_tokens": tokens, "loss": loss}
    try:
        # Tied exponents: four coefficients are as many as so few runs bear.
        law = laws.find("chinchilla-tied")
        return fitting.fit(law, data, loss="mse", bootstrap=resamples)
    except ValueError:
        return None


def curve(result: Any) -> Curve:
    """The compute optimum of a fit; not a number where there is none."""
    if result is None:
        return Curve(*np.full((2, NUM_POINTS), np.nan))
    flops = np.geomspace(*result.ranges["flops"], NUM_POINTS)
    best = laws.optimum(result.find_law(), result.coefficients, flops)
    return Curve(flops, np.asarray(best.loss))


def ratio(reference: Any, side: Any) -> Ratio:
    """Compares two fits where both have the loss; else not a number."""
    if reference is not None and side is not None:
        try:
            found = fitting.compare(reference, side, num_losses=NUM_POINTS)
            return Ratio(*found)
        except ValueError:
            pass
    return Ratio(*np.full((4, NUM_POINTS), np.nan))
