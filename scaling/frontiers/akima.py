"""Akima's interpolation and the minimum of its curve, for many curves at once.

Source: Akima 1970, "A new method of interpolation and smooth curve fitting based on
local procedures", J. ACM 17(4). For isoFLOP curves it is taken in log-log: Porian et
al. 2024, arXiv:2406.19146.
"""

import numpy as np
from jaxtyping import Bool, Float, Int


def find_lowest(
    x: Float[np.ndarray, " points"],
    y: Float[np.ndarray, "curves points"],
    present: Bool[np.ndarray, "curves points"],
) -> tuple[Float[np.ndarray, " curves"], Float[np.ndarray, " curves"]]:
    """Finds the lowest point of each curve between its first and last sample.

    Args:
      x: positions of the samples, rising.
      y: values of the samples.
      present: mask of the samples of each curve; at least three, at any positions.

    Returns:
      Position and value of the minimum. At a curve's end it is exactly a sample.
    """
    count = present.sum(1)
    order = np.argsort(~present, axis=1, kind="stable")  # the present ones first
    x = x[order]
    y = np.take_along_axis(y, order, 1)
    last = np.maximum(count - 1, 0)[:, None]
    column = np.arange(x.shape[1])[None, :]
    # Beyond the last sample the curve is flat, with unit spacing.
    beyond = np.maximum(column - last, 0)
    x = np.where(beyond > 0, np.take_along_axis(x, last, 1) + beyond, x)
    y = np.where(beyond > 0, np.take_along_axis(y, last, 1), y)
    tangent = _tangents(x, y, count)
    width = np.diff(x, axis=1)
    slope = np.diff(y, axis=1) / width
    t0 = tangent[:, :-1]
    t1 = tangent[:, 1:]
    # On each piece y0 + t0 s + b s² + c s³, s from 0 to its width.
    b = (3 * slope - 2 * t0 - t1) / width
    c = (t0 + t1 - 2 * slope) / width**2
    inner = b**2 - 3 * c * t0
    root = np.sqrt(np.maximum(inner, 0.0))
    # The minimum among the two stationary points, in the form without cancellation.
    top = np.where(b > 0, -t0, root - b)
    bottom = np.where(b > 0, b + root, 3 * c)
    s = np.divide(top, bottom, out=np.zeros_like(top), where=bottom != 0)
    inside = (inner >= 0) & (s > 0) & (s < width) & (column[:, :-1] < last)
    s = np.where(inside, s, 0.0)
    depth = y[:, :-1] + s * (t0 + s * (b + s * c))
    places = np.concatenate([x, x[:, :-1] + s], 1)
    values = np.concatenate([y, depth], 1)  # flat beyond: never below the last sample
    best = np.argmin(values, 1)[:, None]
    return (
        np.take_along_axis(places, best, 1)[:, 0],
        np.take_along_axis(values, best, 1)[:, 0],
    )


def _tangents(
    x: Float[np.ndarray, "curves points"],
    y: Float[np.ndarray, "curves points"],
    count: Int[np.ndarray, " curves"],
) -> Float[np.ndarray, "curves points"]:
    """Returns the slopes at the samples, each from the pieces on both sides."""
    curves, points = x.shape
    # Pieces 2 .. points are between samples; Akima's rule adds two on either side.
    piece = np.zeros((curves, points + 3))
    piece[:, 2:-2] = np.diff(y, axis=1) / np.diff(x, axis=1)
    piece[:, 1] = 2 * piece[:, 2] - piece[:, 3]
    piece[:, 0] = 2 * piece[:, 1] - piece[:, 2]
    # first piece beyond the last sample
    row = np.arange(curves)
    end = count + 1
    piece[row, end] = 2 * piece[row, end - 1] - piece[row, end - 2]
    piece[row, end + 1] = 2 * piece[row, end] - piece[row, end - 1]
    turn = np.abs(np.diff(piece, axis=1))
    after = turn[:, 2:]
    before = turn[:, :-2]
    total = after + before
    straight = total <= 1e-9 * total.max(initial=0.0)  # both sides straight: their mean
    share = np.where(straight, 0.5, after / np.where(straight, 1.0, total))
    return share * piece[:, 1:-2] + (1 - share) * piece[:, 2:-1]
