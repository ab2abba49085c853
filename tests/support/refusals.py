"""Checks of error messages for bad input."""

import contextlib
import re
from collections.abc import Generator

import pytest


@contextlib.contextmanager
def refused(line: str, *others: str) -> Generator[None]:
    """Expects a ValueError of one line with these texts."""
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        yield
    for said in others:
        assert said in str(error.value)
    assert "\n" not in str(error.value)
