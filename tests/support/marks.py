"""Marks of test cases."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_quick(cases: Iterable[Any]) -> list[Any]:
    """Returns the cases of a test: the first is quick, the rest are thorough.

    Cases with several arguments are tuples, lists are not.
    """
    first, *other_cases = cases
    return [
        first,
        *(
            pytest.param(
                *(case if isinstance(case, tuple) else (case,)),
                marks=pytest.mark.thorough,
            )
            for case in other_cases
        ),
    ]
