"""Checks of what callers pass: one line that names the value and what is allowed.

A value is checked by its type as well as its range: True is no count, "5" is no number,
and 1.5 pages are none. What passes comes back as Python's own number, so that NumPy's
and JAX's scalars can stand wherever theirs do. Both are loaded where they are asked
for: configs are checked by programs that compute nothing with them. Checks of a config
are given it, and the names of fields, with dots where they are fields of fields.
"""

import dataclasses
import difflib
import functools
import importlib.util
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

INT32 = 2**31
"""What int32 counts stay below."""

_LONGEST = 60
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """A value as a message shows it: on one line, and not too long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever a stranger's object raises, or an int of 5,000 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def one_line(error: BaseException) -> str:
    """The message of an error on one line, or the error's type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class UnknownKeyword(TypeError, ValueError):
    """A keyword that a function does not have.

    A TypeError, as Python's own is, and a ValueError, as every refusal is.
    """


def format_unknown_name(kind: str, name: str, choices: Iterable[str]) -> str:
    """Formats the message for a name that is not one of the choices.

    Args:
      kind: what is named, such as "experiment".
      name: the name that was passed.
      choices: the names that exist.

    Returns:
      One line with up to three near names, or with every choice if none is near.
    """
    names = list(choices)
    near = difflib.get_close_matches(name, names, cutoff=0.5)
    every = ", ".join(names) or "(there are none)"
    hint = f"did you mean {' or '.join(near)}?" if near else f"one of: {every}"
    return f"unknown {kind} {name!r}; {hint}"


def check_keywords(
    function: str, given: Mapping[str, Any], known: Iterable[str]
) -> None:
    """Checks the names of keyword arguments.

    Args:
      function: what a message calls the function.
      given: the keyword arguments.
      known: the names that the function has.

    Raises:
      UnknownKeyword: names the first unknown keyword and the nearest known ones.
    """
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "see its help"
            raise UnknownKeyword(
                f"{function}() got an unexpected keyword argument {name!r}; {hint}"
            )


def suggests_keywords[T: Callable[..., Any]](function: T) -> T:
    """Decorates a function or class, to refuse a misspelt keyword with a suggestion."""
    if isinstance(function, type):
        own: Any = function
        own.__init__ = _suggesting(own.__init__, own.__name__)
        return function
    return _suggesting(function, getattr(function, "__qualname__", "function"))


def _suggesting(function: Any, title: str) -> Any:
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **fields: Any) -> Any:
        if not fields.keys() <= known:
            check_keywords(title, fields, sorted(known - {"self", "cls"}))
        return function(*args, **fields)

    return checked


def check_installed(user: str, extra: str, *modules: str) -> None:
    """Refuses the use of modules that are not installed.

    Args:
      user: the command or feature that needs them.
      extra: the extra of this package that brings them.
      *modules: their names.

    Raises:
      ValueError: one is missing; the message names the extra.
    """
    for module in modules:
        try:
            found = importlib.util.find_spec(module) is not None
        except ValueError:  # it is imported, and has no spec
            found = True
        if not found:
            raise ValueError(f"{user} needs {module}: pip install 'jaxkv[{extra}]'")


def integer(
    name: str, value: object, *, low: int = 0, below: int = INT32, hint: str = ""
) -> int:
    """Checks a whole number.

    Args:
      name: what a message calls it.
      value: what was passed; bools are none, floats neither.
      low: the smallest allowed.
      below: all allowed are smaller; a power of two.
      hint: what a message says instead of the range.

    Returns:
      The number.

    Raises:
      ValueError: it is no such number.
    """
    plain = _plain(value)
    if type(plain) is int and low <= plain < below:
        return plain
    allowed = hint or f"in [{low}, 2**{below.bit_length() - 1})"
    if not hint and type(plain) is not int:
        allowed = f"a whole number {allowed}"
    elif not hint and below == INT32 and plain < low:
        allowed = f"at least {low}"
    raise ValueError(f"{name}={shown(value)} must be {allowed}")


def number(
    name: str, value: object, *, low: int | float, high: int | float, hint: str
) -> float:
    """Checks a number, whole or not.

    Args:
      name: what a message calls it.
      value: what was passed; bools are none, and NaN is in no range.
      low: the smallest allowed.
      high: the largest allowed.
      hint: what a message says of the range.

    Returns:
      The number.

    Raises:
      ValueError: it is no such number.
    """
    plain = _plain(value)
    if type(plain) not in (int, float) or not low <= plain <= high:
        kind = "" if type(plain) in (int, float) else "a number, "
        raise ValueError(f"{name}={shown(value)} must be {kind}{hint}")
    return float(plain)


def boolean(name: str, value: object) -> bool:
    """Checks a truth value: 0, 1 and "no" are none.

    Raises:
      ValueError: it is not True or False.
    """
    plain = _plain(value)
    if type(plain) is not bool:
        raise ValueError(f"{name}={shown(value)} must be True or False")
    return plain


def choice[T](name: str, value: object, allowed: Sequence[T]) -> T:
    """Checks one of a few values; a 0 is no False.

    Raises:
      ValueError: it is none of them.
    """
    plain = _plain(value)
    for each in allowed:
        if isinstance(plain, type(each)) and plain == each:
            return each
    *first, last = map(repr, allowed)
    raise ValueError(f"{name}={shown(value)} must be {', '.join(first)} or {last}")


def settle(owner: Any, **bounds: int | tuple[int, int]) -> None:
    """Checks every field of a frozen config by its type.

    Whole numbers are at least 1, others above 0 and finite; a Literal is one of its
    values; None is allowed where the type has it. NumPy's and JAX's numbers become
    Python's, so that the config is hashable and can be written to a file.

    Args:
      owner: a dataclass.
      **bounds: the smallest number allowed, of fields of which that is another; or the
        smallest whole one, and what all are below.

    Raises:
      ValueError: names the first field that has another value.
    """
    for field in dataclasses.fields(owner):
        given = getattr(owner, field.name)
        value = _of_type(field.name, given, field.type, bounds.get(field.name))
        if type(given) not in (bool, int, float, str):
            object.__setattr__(owner, field.name, value)


def at_least(owner: object, *names: str, low: int | float = 1) -> None:
    """Checks fields of a config: numbers, or tuples of them, of `low` or more.

    Raises:
      ValueError: names the first field that has less, or NaN.
    """
    _entries(owner, names, lambda x: x >= low, f"at least {low}")


def above(
    owner: object, *names: str, low: int | float = 0, finite: bool = False
) -> None:
    """Checks fields of a config: numbers, or tuples of them, greater than `low`.

    Infinity is refused too where they are to be finite.

    Raises:
      ValueError: names the first field that has `low`, less or NaN.
    """
    allowed = f"above {low}" + (" and finite" if finite else "")
    _entries(owner, names, lambda x: x > low and (x < math.inf or not finite), allowed)


def within(
    owner: object, *names: str, low: int | float, high: int | float, ends: str = "[]"
) -> None:
    """Checks fields of a config: numbers, or tuples of them, of an interval.

    `ends` has a bracket at each end: "[" and "]" if it is part, "(" and ")" if not.

    Raises:
      ValueError: names the first field that leaves it, or has NaN.
    """

    def inside(x: Any) -> bool:
        above_low = x >= low if ends[0] == "[" else x > low
        return above_low and (x <= high if ends[1] == "]" else x < high)

    _entries(owner, names, inside, f"in {ends[0]}{low}, {high}{ends[1]}")


def ascending(
    owner: object,
    *names: str,
    low: int | float = -math.inf,
    least: int = 1,
    strictly: bool = True,
) -> None:
    """Checks fields of a config: tuples of numbers, each greater than the one before.

    There are `least` or more of them, all `low` or more; two may be equal unless they
    ascend strictly.

    Raises:
      ValueError: names the first field that has fewer, or others.
    """
    order = "ascending" if strictly else "in order"
    count = f"{least} or more, " if least > 1 else ""
    start = f", from {low}" if low > -math.inf else ""
    for name in names:
        values = attrgetter(name)(owner)
        ordered = sorted({*values} if strictly else values) == [*values]
        if len(values) < least or not ordered or not all(x >= low for x in values):
            raise ValueError(f"{name}={shown(values)} must be {count}{order}{start}")


def among(owner: object, *names: str, known: Iterable[str], least: int = 0) -> None:
    """Checks fields of a config: tuples of known names, `least` or more of them.

    Raises:
      ValueError: names the first field that has others, or fewer.
    """
    allowed = [*known]
    for name in names:
        values = attrgetter(name)(owner)
        if len(values) < least or not {*values} <= {*allowed}:
            some = f"{least} or more of" if least else "of"
            raise ValueError(f"{name}={shown(values)} must be {some} {allowed}")


def instance(name: str, value: object, *kinds: Any) -> Any:
    """Checks that a value is an object of one of several types.

    A class is refused, although it has the methods of a protocol.

    Raises:
      ValueError: it is of another type.
    """
    if isinstance(value, type) or not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        wanted = wanted.replace("NoneType", "None")
        raise ValueError(f"{name}={shown(value)} must be a {wanted}")
    return value


def path(name: str, value: object) -> Path:
    """Checks the path of a file or folder, which need not exist.

    Raises:
      ValueError: it is neither text nor an `os.PathLike` of text.
    """
    if isinstance(value, str | os.PathLike) and not isinstance(value, type):
        try:
            return Path(value)
        except TypeError:  # a path of bytes
            pass
    raise ValueError(f"{name}={shown(value)} must be a path, a str or os.PathLike")


def integers(
    name: str, value: object, *, low: int = 0, below: int = INT32
) -> tuple[int, ...]:
    """Checks a sequence of whole numbers in `[low, below)`.

    Raises:
      ValueError: it is no such sequence, or shows the first number out of range.
    """
    try:
        found = token_sequence(name, value).tolist()
    except ValueError:
        found = None
    if found is None or not all(low <= x < below for x in found):
        allowed = f" in [{low}, {below - 1}]" if low > -INT32 else ""
        raise ValueError(
            f"{name}={shown(value)} must be a sequence of whole numbers{allowed}"
        )
    return tuple(found)


def token_ids(name: str, value: object, *, vocab_size: int | None) -> Any:
    """Checks a sequence of token ids of a vocabulary; None means all of int32.

    Returns:
      The ids, an int32 NumPy array `[tokens]`.

    Raises:
      ValueError: it is no such sequence, or shows the first id out of range.
    """
    import numpy as np

    ids = token_sequence(name, value)
    top = INT32 if vocab_size is None else vocab_size
    outside = ids[(ids < 0) | (ids >= top)]
    if outside.size:
        raise ValueError(f"{name}: token id {outside[0]} must be in [0, {top})")
    return ids.astype(np.int32)


def token_sequence(name: str, value: object) -> Any:
    """Checks a sequence of token ids, as yet of any size.

    Args:
      name: what a message calls it.
      value: what was passed: a sequence or an array of integers of one axis.

    Returns:
      The ids, a NumPy array `[tokens]` of integers of some width, or of objects where
      no width holds them.

    Raises:
      ValueError: it is no such sequence.
    """
    import jax
    import numpy as np

    refused = ValueError(f"{name}={shown(value)} must be a sequence of token ids")
    if isinstance(value, np.ndarray | jax.Array):
        ids = np.asarray(value)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise refused
        return ids
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise refused
    # NumPy would make a 1 of a True among integers, and floats of mixed widths.
    if set(map(type, value)) - {int}:
        value = [_plain(entry) for entry in value]
    if set(map(type, value)) - {int}:
        raise refused
    try:
        return np.array(value, np.int64)
    except OverflowError:
        return np.array(value, object)


def floating(name: str, value: Any) -> Any:
    """Checks a floating type, by its name or itself; gives NumPy's.

    Raises:
      ValueError: it is none.
    """
    import jax.numpy as jnp
    import numpy as np

    try:
        # NumPy takes a number for its type.
        dtype = None if isinstance(value, np.generic) else jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name}={shown(value)} must be a floating type")
    return dtype


def seconds(name: str, value: object) -> float:
    """Checks a time that the engine's clock can show: seconds in [0, 2**31 - 1].

    Raises:
      ValueError: it is no such time.
    """
    return number(
        name,
        value,
        low=0.0,
        high=INT32 - 1.0,
        hint="in [0, 2**31 - 1] seconds",
    )


def _of_type(
    name: str, value: object, kind: Any, bounds: int | tuple[int, int] | None
) -> Any:
    """Checks a value of a field by the field's type."""
    kind, ending = getattr(kind, "__value__", kind), ""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        (kind, _), ending = get_args(kind), " or None"
    if get_origin(kind) is Literal:
        return choice(name, value, get_args(kind))
    if kind is bool:
        return boolean(name, value)
    if kind is int:
        low, below = bounds if isinstance(bounds, tuple) else (bounds, INT32)
        low = 1 if low is None else low
        hint = f"at least {low},{ending}" if ending else ""
        return integer(name, value, low=low, below=below, hint=hint)
    if get_origin(kind) is tuple and get_args(kind) == (int, ...):
        return integers(name, value, low=-INT32)
    if get_origin(kind) is Callable:
        return instance(name, value, Callable)
    if kind is float:
        least, hint = math.ulp(0.0), "above 0 and finite"
        if isinstance(bounds, int):
            least, hint = bounds, f"at least {bounds}"
        return number(name, value, low=least, high=sys.float_info.max, hint=hint)
    return instance(name, value, kind, *([type(None)] if ending else []))


def _entries(
    owner: object, names: Sequence[str], fits: Callable[[Any], bool], allowed: str
) -> None:
    """Refuses the first field with an entry that does not fit."""
    for name in names:
        value = attrgetter(name)(owner)
        entries = value if isinstance(value, tuple | list) else (value,)
        if not all(map(fits, entries)):
            raise ValueError(f"{name}={shown(value)} must be {allowed}")


def _plain(value: object) -> Any:
    """A NumPy or JAX scalar as Python's own; anything else as it is."""
    if type(value) in (bool, int, float):
        return value
    import jax.core
    import numpy as np

    if isinstance(value, jax.core.Tracer):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0:
        value = value.item()
    # Subclasses, such as enums, compare as their numbers do.
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value
