"""Checks of what callers pass: one line that names the value and what is allowed.

A value is checked by its type as well as its range: True is no count, "5" is no number,
and 1.5 pages are none. What passes comes back as Python's own number, so that NumPy's
and JAX's scalars can stand wherever theirs do.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

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


def tokens(name: str, value: object) -> np.ndarray:
    """Checks a sequence of token ids, as yet of any size.

    Args:
      name: what a message calls it.
      value: what was passed: a sequence or an array of integers of one axis.

    Returns:
      The ids, as integers of some width, or as objects where no width holds them.

    Raises:
      ValueError: it is no such sequence.
    """
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


def floating(name: str, value: Any) -> np.dtype:
    """Checks a floating type, by its name or itself.

    Raises:
      ValueError: it is none.
    """
    try:
        dtype = jnp.dtype(value)
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
        *(name, value),
        low=0.0,
        high=INT32 - 1.0,
        hint="in [0, 2**31 - 1] seconds",
    )


def _plain(value: object) -> Any:
    """A NumPy or JAX scalar as Python's own; anything else as it is."""
    if type(value) in (bool, int, float) or isinstance(value, jax.core.Tracer):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0:
        value = value.item()
    # Subclasses, such as enums, compare as their numbers do.
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value
