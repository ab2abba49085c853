"""All that the experiment on preemption measures, for those who draw and judge it."""

from typing import NamedTuple

import numpy as np

from experiments.serving.preemption.moving import Moves
from experiments.serving.preemption.serving import Servings
from experiments.serving.preemption.simulated import Simulated


class Result(NamedTuple):
    """The same requests, served in many ways; and one request, brought back."""

    ways: Servings
    """With room for all; then with too little, recomputing and swapping."""
    victims: Servings
    watermarks: Servings
    pools: Servings
    spaces: Servings
    """Swapping with a buffer that has not room for all."""
    hosts: Servings
    """Swapping with a small buffer and host memory beside it."""
    moves: Moves
    simulated: Simulated
    """At the paper's scale; then nothing else was measured."""


def simulated_only(found: Simulated) -> Result:
    """A result of nothing else."""
    none = Servings(*[np.empty(0)] * len(Servings._fields))
    moves = Moves(*[np.empty(0)] * len(Moves._fields))
    return Result(*[none] * 6, moves=moves, simulated=found)
