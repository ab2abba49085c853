"""Runs of one budget: what approach 2 takes its minima from."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

MIN_SIZES = 3
"""Different sizes that a group needs."""
SAME_SIZE = 0.01
"""Sizes that differ by less are one: a curve through both would follow their noise."""


class IsoflopGroup(NamedTuple):
    """Runs of one budget.

    Attributes:
      flops: the budget, the geometric mean of the runs', FLOPs.
      places: where its runs stand among all grouped runs, by rising size.
      num_params: of each run.
      num_tokens: of each run.
      loss: of each run.
      sizes: the different sizes, rising; those that `merge_sizes` takes for one, once.
      tokens: the tokens that go with each, geometric means.
      size_id: which of them each run has.
    """

    flops: float
    places: Int[np.ndarray, " runs"]
    num_params: Float[np.ndarray, " runs"]
    num_tokens: Float[np.ndarray, " runs"]
    loss: Float[np.ndarray, " runs"]
    sizes: Float[np.ndarray, " sizes"]
    tokens: Float[np.ndarray, " sizes"]
    size_id: Int[np.ndarray, " runs"]


class IsoflopGroups(NamedTuple):
    """A log's isoFLOP groups.

    Attributes:
      groups: by rising budget.
      rows: the log's row of each grouped run, in the order of `Group.places`.
      num_left: runs in no group: their budget has fewer than `MIN_SIZES` sizes.
      num_merged: sizes that were taken for another one.
    """

    groups: tuple[IsoflopGroup, ...]
    rows: Int[np.ndarray, " grouped"]
    num_left: int
    num_merged: int = 0

    @property
    def flops(self) -> Float[np.ndarray, " budgets"]:
        """The budgets."""
        return np.array([group.flops for group in self.groups], float)

    @property
    def strata(self) -> Int[np.ndarray, " grouped"]:
        """The group of each grouped run: what a bootstrap draws within."""
        lengths = [group.places.size for group in self.groups]
        return np.repeat(np.arange(len(lengths)), lengths)


def find_groups(
    num_params: Float[np.ndarray, " runs"],
    num_tokens: Float[np.ndarray, " runs"],
    flops: Float[np.ndarray, " runs"],
    loss: Float[np.ndarray, " runs"],
    *,
    tolerance: float = 0.1,
) -> IsoflopGroups:
    """Finds the runs that share a budget.

    Args:
      num_params: sizes.
      num_tokens: tokens.
      flops: budgets.
      loss: nats per token.
      tolerance: a group's largest budget is at most this share above its smallest.

    Returns:
      The groups; there may be none.

    Raises:
      ValueError: `tolerance` is not in [0, 1).
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"{tolerance=} must be in [0, 1)")
    order = np.argsort(flops, kind="stable")
    members: list[list[int]] = []
    for i in order:
        if members and flops[i] <= flops[members[-1][0]] * (1 + tolerance + 1e-9):
            members[-1].append(int(i))
        else:
            members.append([int(i)])
    groups, rows, num_merged = [], [], 0
    for each in members:
        runs = np.array(each)
        runs = runs[np.argsort(num_params[runs], kind="stable")]
        sizes, size_id = merge_sizes(num_params[runs])
        if sizes.size < MIN_SIZES:
            continue
        num_merged += np.unique(num_params[runs]).size - sizes.size
        log_d = np.bincount(size_id, np.log(num_tokens[runs])) / np.bincount(size_id)
        groups.append(
            IsoflopGroup(
                flops=float(np.exp(np.log(flops[runs]).mean())),
                places=np.arange(len(rows), len(rows) + runs.size),
                num_params=num_params[runs],
                num_tokens=num_tokens[runs],
                loss=loss[runs],
                sizes=sizes,
                tokens=np.exp(log_d),
                size_id=size_id,
            )
        )
        rows += [int(i) for i in runs]
    rows = np.array(rows, int)
    return IsoflopGroups(tuple(groups), rows, flops.size - rows.size, num_merged)


def merge_sizes(
    num_params: Float[np.ndarray, " runs"],
) -> tuple[Float[np.ndarray, " sizes"], Int[np.ndarray, " runs"]]:
    """Finds the different sizes: neighbours closer than `SAME_SIZE` become one.

    Args:
      num_params: of each run, in any order.

    Returns:
      The sizes, rising, each at least that far from the next, a merged one being the
      geometric mean of those in it; and which of them each run has.
    """
    exact, size_id, count = np.unique(
        num_params, return_inverse=True, return_counts=True
    )
    size_id, x, weight = size_id.reshape(-1), np.log(exact), count.astype(float)
    places = np.arange(exact.size)  # the merged size that each exact one is in
    while (np.diff(x) < np.log1p(SAME_SIZE)).any():
        # Into the first one within reach; their means may be close again.
        into, first = np.zeros(x.size, int), 0
        for i in range(1, x.size):
            is_new = x[i] - x[first] >= np.log1p(SAME_SIZE)
            into[i] = into[i - 1] + is_new
            first = i if is_new else first
        x, weight = np.bincount(into, x * weight), np.bincount(into, weight)
        x, places = x / weight, into[places]
    sizes = np.exp(x)
    alone = np.bincount(places, minlength=x.size) == 1
    sizes[alone] = exact[alone[places]]
    return sizes, places[size_id]


def average_by_size(
    group: IsoflopGroup, weights: Float[np.ndarray, "resamples runs"]
) -> tuple[Float[np.ndarray, "resamples sizes"], Float[np.ndarray, "resamples sizes"]]:
    """Averages the runs of each size (seeds, rates).

    Args:
      group: the runs.
      weights: how often each counts, in the order of the group.

    Returns:
      The mean loss of each size, 0 where no run counts, and the weight of its runs.
    """
    first = np.searchsorted(group.size_id, np.arange(group.sizes.size))
    weight = np.add.reduceat(weights, first, axis=1)
    total = np.add.reduceat(weights * group.loss, first, axis=1)
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), 0.0), weight
