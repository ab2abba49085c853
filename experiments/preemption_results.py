"""All that the experiment on preemption measures, for those who draw and judge it."""

from typing import NamedTuple

from experiments.preemption_moving import Moves
from experiments.preemption_serving import Servings


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
