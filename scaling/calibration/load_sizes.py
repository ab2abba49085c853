"""Sizes of loads, and the uncertainty of loads outside the fitted ones."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from scaling.calibration.measurements import MeasuredStage

EXTRAPOLATION = np.array([0.05, 0.12])
"""Standard deviation of the logarithms of a time per token or end to end, and of a
first-token time, for a load outside the fitted sizes, for each factor of 2. Calibrated
to one stage that was not fitted: answers of 1,448 tokens, where the longest fitted ones
have 251, took 8 % longer than predicted, and first tokens came after 1.6 times the
predicted time."""
_COVERED_OCTAVES = math.log2(1.05)


class LoadSizes(NamedTuple):
    """Sizes of a load, by which a prediction is compared with the fitted ones."""

    prompt_tokens: float
    """Mean length of the prompts in tokens, cached ones included."""
    answer_tokens: float
    """Mean length of the answers in tokens."""
    batch: float
    """Requests in the system: by Little's law at most `max_num_seqs`."""

    @classmethod
    def of_stage(cls, stage: MeasuredStage, end_to_end_s: float) -> "LoadSizes":
        """Returns the sizes of a stage with a mean end-to-end time in s."""
        batch = min(stage.rate_per_s * end_to_end_s, stage.max_num_seqs)
        return cls(stage.prompt_tokens, stage.answer_tokens, batch)


type SizeRange = tuple[LoadSizes, LoadSizes]
"""Smallest and largest sizes of fitted loads."""


class OutsideSize(NamedTuple):
    """A size of a load outside those of the fitted loads."""

    value: float
    low: float
    """Smallest size of the fitted loads."""
    high: float
    """Largest size of the fitted loads."""

    @property
    def octaves(self) -> float:
        """Factors of 2 between the value and the nearest fitted size."""
        return max(math.log2(self.low / self.value), math.log2(self.value / self.high))


def find_size_range(sizes: Iterable[LoadSizes]) -> SizeRange:
    """Returns the smallest and the largest of each size of at least one load."""
    columns = list(zip(*sizes, strict=True))
    return LoadSizes(*map(min, columns)), LoadSizes(*map(max, columns))


def find_outside_sizes(
    fitted: SizeRange | None, sizes: LoadSizes
) -> dict[str, OutsideSize]:
    """Returns the sizes of a load, by name, that the fitted loads do not cover.

    Sizes within 5 % of the fitted ones count as covered, and so does a smaller batch:
    an idle server has less work of each kind.

    Args:
      fitted: sizes of the fitted loads; None if they are unknown.
      sizes: sizes of the load.
    """
    if fitted is None:
        return {}
    triples = zip(LoadSizes._fields, sizes, *fitted, strict=True)
    sizes_by_name = {name: OutsideSize(*values) for name, *values in triples}
    if sizes_by_name["batch"].value < sizes_by_name["batch"].low:
        del sizes_by_name["batch"]
    return {
        name: x for name, x in sizes_by_name.items() if x.octaves > _COVERED_OCTAVES
    }


def outside_variance(
    fitted: SizeRange | None, sizes: LoadSizes
) -> Float[np.ndarray, " 2"]:
    """Returns the variance of both logarithms for sizes outside the fitted ones.

    Arguments are those of `find_outside_sizes`.
    """
    outside = find_outside_sizes(fitted, sizes).values()
    return EXTRAPOLATION**2 * sum(x.octaves**2 for x in outside)
