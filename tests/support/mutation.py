"""Replaced functions, and mutation tests.

A mutation test seeds a plausible mistake in a function's source, which must fail a
test.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

_PACKAGES = ("pallas_kernels", "jaxkv", "scaling", "experiments")


def replace(patch: pytest.MonkeyPatch, owner: Any, name: str, new: Any) -> None:
    """Replaces an attribute in its owner, and the object in all modules with it.

    Packages that export the name look it up first: otherwise one that does it later
    would keep the new object after the test.
    """
    old = getattr(owner, name)
    modules = [
        module
        for module in [*sys.modules.values()]
        if getattr(module, "__name__", "").partition(".")[0] in _PACKAGES
    ]
    for module in modules:
        if name in getattr(module, "__all__", ()):
            getattr(module, name, None)  # `__all__` may list modules not yet loaded
    patch.setattr(owner, name, new)
    for module in modules:
        for key in [key for key, value in vars(module).items() if value is old]:
            patch.setattr(module, key, new)


class Bug(NamedTuple):
    """A change of a function's source, and the test that must fail."""

    owner: Any
    """Module or class of the function."""
    name: str
    removed: str
    added: str
    noticed_by: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    """Arguments of the test."""


def seed(patch: pytest.MonkeyPatch, bug: Bug) -> None:
    """Replaces the function by the mutated one."""
    function = inspect.unwrap(getattr(bug.owner, bug.name))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(bug.removed) == 1, f"{bug.name} has changed: update the bug"
    source = source.replace(bug.removed, bug.added)
    space = {}
    exec(compile(source, f"{bug.name}, wrong", "exec"), function.__globals__, space)
    replace(patch, bug.owner, bug.name, space[bug.name])


def assert_noticed(patch: pytest.MonkeyPatch, bug: Bug) -> None:
    """Asserts that the test passes without the bug and fails with it."""
    bug.noticed_by(*bug.arguments)
    seed(patch, bug)
    with pytest.raises(AssertionError):
        bug.noticed_by(*bug.arguments)
