"""Names of keywords, choices and extras: messages with the closest names."""

import difflib
import functools
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
)

if TYPE_CHECKING:
    pass


class UnknownKeyword(TypeError, ValueError):
    """A keyword argument that a function does not have.

    A TypeError, as Python raises, and a ValueError, as all validation errors are.
    """


def format_unknown_name(kind: str, name: str, choices: Iterable[str]) -> str:
    """Formats the message for a name that is not one of the choices.

    Args:
      kind: kind of thing that is named, such as "experiment".
      name: the name that was passed.
      choices: the names that exist.

    Returns:
      One line with up to three close names, or with all choices if none is close.
    """
    names = list(choices)
    near = difflib.get_close_matches(name, names, cutoff=0.5)
    every = ", ".join(names) or "(there are none)"
    hint = f"did you mean {' or '.join(near)}?" if near else f"one of: {every}"
    return f"unknown {kind} {name!r}; {hint}"


def check_keywords(
    function: str, arguments: Mapping[str, object], names: Iterable[str]
) -> None:
    """Checks the names of keyword arguments.

    Args:
      function: name of the function in the message.
      arguments: the keyword arguments.
      names: names of the parameters of the function.

    Raises:
      UnknownKeyword: a keyword is not known; the message has the closest known name.
    """
    names = list(names)
    for name in arguments:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "see its help"
            raise UnknownKeyword(
                f"{function}() got an unexpected keyword argument {name!r}; {hint}"
            )


RENAMED = {"num_lengths": "num_draft_buckets"}
"""Former spellings of config fields, which are read with a warning."""


def suggests_keywords[T: Callable[..., Any]](function: T) -> T:
    """Decorates a function or class to refuse a misspelt keyword with a suggestion.

    Former spellings (`RENAMED`) are replaced, with a `DeprecationWarning`.
    """
    if isinstance(function, type):
        decorated = function
        decorated.__init__ = _suggesting(decorated.__init__, decorated.__name__)
        return function
    return _suggesting(function, getattr(function, "__qualname__", "function"))


def _suggesting(function: Callable, title: str) -> Any:
    names = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: object, **fields: object) -> object:
        for old in fields.keys() & RENAMED.keys() - names:
            new = RENAMED[old]
            if new in names and new not in fields:
                warnings.warn(
                    f"{title}: {old} is now called {new}",
                    DeprecationWarning,
                    stacklevel=2,
                )
                fields[new] = fields.pop(old)
        if not fields.keys() <= names:
            check_keywords(title, fields, sorted(names - {"self", "cls"}))
        return function(*args, **fields)

    return checked


def check_installed(user: str, extra: str, *modules: str) -> None:
    """Checks that modules are installed.

    Args:
      user: the command or feature that needs them.
      extra: the extra of this package that installs them.
      *modules: names of the modules.

    Raises:
      ValueError: a module is missing; the message names the extra.
    """
    for module in modules:
        try:
            is_installed = importlib.util.find_spec(module) is not None
        except ValueError:  # imported, without a spec
            is_installed = True
        if not is_installed:
            raise ValueError(f"{user} needs {module}: pip install 'jaxkv[{extra}]'")
