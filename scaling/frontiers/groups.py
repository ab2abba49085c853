"""IsoFLOP groups: runs of one budget, for approach 2."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxkv import validation

MIN_SIZES = 3
"""Least number of different sizes in a group."""
SAME_SIZE = 0.01
"""Relative difference below which sizes are merged: a curve through both would follow
their noise."""


class IsoflopGroup(NamedTuple):
    """Runs of one budget.

    Attributes:
      flops: budget in FLOPs, the geometric mean over the runs.
      places: indices of its runs among all grouped runs, by rising size.
      num_params: size of each run.
      num_tokens: tokens of each run.
      loss: loss of each run.
      sizes: different sizes, rising, after `merge_sizes`.
      tokens: tokens of each size, geometric means.
      size_id: index of the size of each run.
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
    """The isoFLOP groups of a log.

    Attributes:
      groups: groups by rising budget.
      rows: row of each grouped run in the log, in the order of `IsoflopGroup.places`.
      num_left: runs in no group, whose budget has fewer than `MIN_SIZES` sizes.
      num_merged: sizes that were merged into another one.
    """

    groups: tuple[IsoflopGroup, ...]
    rows: Int[np.ndarray, " grouped"]
    num_left: int
    num_merged: int = 0

    @property
    def flops(self) -> Float[np.ndarray, " budgets"]:
        """Budgets of the groups."""
        return np.array([group.flops for group in self.groups], float)

    @property
    def strata(self) -> Int[np.ndarray, " grouped"]:
        """Group of each grouped run, the strata of a bootstrap."""
        lengths = [group.places.size for group in self.groups]
        return np.repeat(np.arange(len(lengths)), lengths)


@validation.checks_numbers(tolerance="[0, 1)")
def find_run_groups(
    num_params: Float[np.ndarray, " runs"],
    num_tokens: Float[np.ndarray, " runs"],
    flops: Float[np.ndarray, " runs"],
    loss: Float[np.ndarray, " runs"],
    *,
    tolerance: float = 0.1,
) -> IsoflopGroups:
    """Groups the runs that share a budget.

    Args:
      num_params: sizes.
      num_tokens: tokens.
      flops: budgets.
      loss: nats per token.
      tolerance: largest relative excess of a group's largest budget over its smallest.

    Returns:
      The groups, possibly none.

    Raises:
      ValueError: `tolerance` is not in [0, 1).
    """
    order = np.argsort(flops, kind="stable")
    members: list[list[int]] = []
    for i in order:
        if members and flops[i] <= flops[members[-1][0]] * (1 + tolerance + 1e-9):
            members[-1].append(int(i))
        else:
            members.append([int(i)])
    groups = []
    rows = []
    num_merged = 0
    for indices in members:
        runs = np.array(indices)
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
    """Merges neighbouring sizes that are closer than `SAME_SIZE`.

    Args:
      num_params: size of each run, in any order.

    Returns:
      The sizes, rising, each at least that far from the next, with the geometric mean
      for merged ones; and the index of the size of each run.
    """
    exact, size_id, count = np.unique(
        num_params, return_inverse=True, return_counts=True
    )
    size_id = size_id.reshape(-1)
    x = np.log(exact)
    weight = count.astype(float)
    places = np.arange(exact.size)  # index of the merged size of each exact one
    while (np.diff(x) < np.log1p(SAME_SIZE)).any():
        # Each size is merged into the first one within reach; means may be close again.
        into = np.zeros(x.size, int)
        first = 0
        for i in range(1, x.size):
            is_new = x[i] - x[first] >= np.log1p(SAME_SIZE)
            into[i] = into[i - 1] + is_new
            first = i if is_new else first
        x = np.bincount(into, x * weight)
        weight = np.bincount(into, weight)
        x = x / weight
        places = into[places]
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
      weights: weight of each run, in the order of the group.

    Returns:
      The mean loss of each size, 0 without weight, and the weight of its runs.
    """
    first = np.searchsorted(group.size_id, np.arange(group.sizes.size))
    weight = np.add.reduceat(weights, first, axis=1)
    total = np.add.reduceat(weights * group.loss, first, axis=1)
    return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), 0.0), weight
