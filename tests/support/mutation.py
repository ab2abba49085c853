"""Bugs on trial: one plausible mistake in a function's text, for a check to notice."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest


class Bug(NamedTuple):
    """One place of a function, what stands there then, and the test that notices."""

    owner: Any
    """Module or class of the function."""
    name: str
    removed: str
    added: str
    noticed_by: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    """Of that test."""


def seed(patch: pytest.MonkeyPatch, bug: Bug) -> None:
    """Puts the bug in place."""
    function = inspect.unwrap(getattr(bug.owner, bug.name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(bug.removed) == 1, f"{bug.name} has changed: write the bug anew"
    source, space = source.replace(bug.removed, bug.added), {}
    exec(compile(source, f"{bug.name}, wrong", "exec"), function.__globals__, space)
    patch.setattr(bug.owner, bug.name, space[bug.name])


def assert_noticed(patch: pytest.MonkeyPatch, bug: Bug) -> None:
    """Runs the test without the bug, which it passes, and with it, which it fails."""
    bug.noticed_by(*bug.arguments)
    seed(patch, bug)
    with pytest.raises(AssertionError):
        bug.noticed_by(*bug.arguments)
