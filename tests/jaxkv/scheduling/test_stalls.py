"""Counts of steps without progress, call by call."""

import numpy as np

from jaxkv.scheduling.stalls import StepCounter


def test_rows_of_a_step_that_draws_do_not_count_again() -> None:
    counter = StepCounter()

    def count(draws: list[bool], num_rows: list[int]) -> int:
        counter.count(np.array(draws), np.array(num_rows), num_tokens=lambda: 6)
        return counter.num_steps

    assert count([False, True], [3, 5]) == 0
    # A request feeds its 6 tokens once, but not a seventh.
    assert count([False, False], [6, 0]) == 1
    assert count([False, False], [1, 0]) == 3
    assert count([True, False, False], [1, 0, 0]) == 2
