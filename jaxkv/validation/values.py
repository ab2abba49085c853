"""Checks of single values: numbers, paths, sequences of tokens, types.

Checks cover the type as well as the range: True is not a count, "5" is not a number,
and 1.5 is not a number of pages. Accepted values are returned as Python numbers, so
that callers may pass scalars of NumPy and JAX. NumPy and JAX are imported only by the
checks that need them, because programs that only read configs also validate.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
)

if TYPE_CHECKING:
    import numpy as np

INT32 = 2**31
"""Upper bound (exclusive) of counts held in int32."""

SECONDS = f"[0, {INT32 - 1}]"
"""Interval of times in seconds, in the range of the engine's clock."""
SIZES = 1, 2**63
"""Smallest size, and exclusive upper bound, of exact counts."""
SEEDS = 0, 2**63
"""Smallest seed, and exclusive upper bound."""

_MAX_LENGTH = 60
"""Longest text of a value in a message, in characters."""


def format_value(value: object) -> str:
    """Returns a value as messages show it: on one line, at most 60 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a foreign `__repr__` may raise, as does an int of 5,000 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def one_line(error: BaseException) -> str:
    """Returns the message of an error on one line, or its type if it is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def integer_range(low: int, below: int) -> str:
    """Returns the text of a range of integers; powers of two keep their form."""
    if below & (below - 1):
        return f"in [{low}, {below - 1}]"
    return f"in [{low}, 2**{below.bit_length() - 1})"


def integer(
    name: str, value: object, *, low: int = 0, below: int = INT32, hint: str = ""
) -> int:
    """Checks an integer.

    Args:
      name: name in the message.
      value: the value; booleans and floats are refused.
      low: smallest allowed value.
      below: exclusive upper bound.
      hint: text of the allowed range, in place of the computed one.

    Returns:
      The integer.

    Raises:
      ValueError: the value is not an integer in [low, below).
    """
    plain = _plain(value)
    if type(plain) is int and low <= plain < below:
        return plain
    allowed = hint or integer_range(low, below)
    if not hint and type(plain) is not int:
        allowed = f"a whole number {allowed}"
    elif not hint and below in (INT32, SIZES[1]) and plain < low:
        allowed = f"at least {low}"
    raise ValueError(f"{name}={format_value(value)} must be {allowed}")


def number(
    name: str, value: object, *, low: int | float, high: int | float, hint: str
) -> float:
    """Checks a number, integer or floating.

    Args:
      name: name in the message.
      value: the value; booleans and NaN are refused.
      low: smallest allowed value.
      high: largest allowed value.
      hint: text of the allowed range.

    Returns:
      The number.

    Raises:
      ValueError: the value is not a number in [low, high].
    """
    plain = _plain(value)
    is_too_large = type(plain) is int and abs(plain) >= 2**1024  # no float is
    if type(plain) not in (int, float) or is_too_large or not low <= plain <= high:
        kind = "" if type(plain) in (int, float) else "a number, "
        raise ValueError(f"{name}={format_value(value)} must be {kind}{hint}")
    return float(plain)


def boolean(name: str, value: object) -> bool:
    """Checks a boolean; 0, 1 and "no" are refused.

    Raises:
      ValueError: the value is neither True nor False.
    """
    plain = _plain(value)
    if type(plain) is not bool:
        raise ValueError(f"{name}={format_value(value)} must be True or False")
    return plain


def choice[T](name: str, value: object, allowed: Sequence[T]) -> T:
    """Checks that a value is one of `allowed`; 0 does not match False.

    Raises:
      ValueError: the value is not one of them.
    """
    plain = _plain(value)
    for option in allowed:
        if isinstance(plain, type(option)) and plain == option:
            return option
    *first, last = map(repr, allowed)
    raise ValueError(
        f"{name}={format_value(value)} must be {', '.join(first)} or {last}"
    )


def instance[T](name: str, value: object, *kinds: type[T]) -> T:
    """Checks that a value is an instance of one of several types.

    A class is refused even if it has the methods of a protocol.

    Raises:
      ValueError: the value is of another type; for a protocol, the message has the
        attributes that it lacks.
    """
    if isinstance(value, type) or not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        wanted = wanted.replace("NoneType", "None")
        members = getattr(kinds[0], "__protocol_attrs__", ())
        lacks = " and ".join(x for x in sorted(members) if not hasattr(value, x))
        hint = f", but has no {lacks}" if lacks else ""
        if isinstance(value, type):
            hint = ", not a class"
        raise ValueError(f"{name}={format_value(value)} must be a {wanted}{hint}")
    return value


def path(name: str, value: object) -> Path:
    """Checks the path of a file or folder, which need not exist.

    Raises:
      ValueError: the value is neither text nor an `os.PathLike` of text.
    """
    if isinstance(value, str | os.PathLike) and not isinstance(value, type):
        try:
            return Path(value)
        except TypeError:  # a path of bytes
            pass
    raise ValueError(
        f"{name}={format_value(value)} must be a path, a str or os.PathLike"
    )


def integers(
    name: str, value: object, *, low: int = 0, below: int = INT32
) -> tuple[int, ...]:
    """Checks a sequence of integers in `[low, below)`.

    Raises:
      ValueError: the value is not such a sequence.
    """
    try:
        numbers = token_sequence(name, value).tolist()
    except ValueError:
        numbers = None
    if numbers is None or not all(low <= x < below for x in numbers):
        allowed = f" in [{low}, {below - 1}]" if low > -INT32 else ""
        raise ValueError(
            f"{name}={format_value(value)} must be a sequence of whole numbers{allowed}"
        )
    return tuple(numbers)


def token_ids(name: str, value: object, *, vocab_size: int | None) -> "np.ndarray":
    """Checks a sequence of token ids in [0, vocab_size).

    `vocab_size` None allows all of int32.

    Returns:
      The ids, an int32 NumPy array `[tokens]`.

    Raises:
      ValueError: the value is not such a sequence; the message has the first id that is
        out of range.
    """
    import numpy as np

    ids = token_sequence(name, value)
    top = INT32 if vocab_size is None else vocab_size
    outside = ids[(ids < 0) | (ids >= top)]
    if outside.size:
        raise ValueError(f"{name}: token id {outside[0]} must be in [0, {top})")
    return ids.astype(np.int32)


def token_sequence(name: str, value: object) -> "np.ndarray":
    """Checks a sequence of token ids without checking their range.

    Args:
      name: name in the message.
      value: a sequence, or an array of integers with one axis.

    Returns:
      The ids, a NumPy array `[tokens]` of integers, or of objects if an id does not fit
      into 64 bits.

    Raises:
      ValueError: the value is not such a sequence.
    """
    import jax
    import numpy as np

    refused = ValueError(
        f"{name}={format_value(value)} must be a sequence of token ids"
    )
    if isinstance(value, np.ndarray | jax.Array):
        ids = np.asarray(value)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise refused
        return ids
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise refused
    # NumPy would convert True among integers to 1, and mixed widths to floats.
    if set(map(type, value)) - {int}:
        value = [_plain(entry) for entry in value]
    if set(map(type, value)) - {int}:
        raise refused
    try:
        return np.array(value, np.int64)
    except OverflowError:
        return np.array(value, object)


def floating(name: str, value: Any) -> "np.dtype":
    """Checks a floating dtype, given by name or as a type; returns NumPy's dtype.

    Raises:
      ValueError: the value is not a floating dtype.
    """
    import jax.numpy as jnp
    import numpy as np

    try:
        # NumPy would read a scalar as its own dtype.
        dtype = None if isinstance(value, np.generic) else jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name}={format_value(value)} must be a floating type")
    return dtype


def seconds(name: str, value: object) -> float:
    """Checks a time in seconds, in the range of the engine's clock: [0, 2**31 - 1].

    Raises:
      ValueError: the value is not such a number.
    """
    return number(
        name,
        value,
        low=0.0,
        high=INT32 - 1.0,
        hint="in [0, 2**31 - 1] seconds",
    )


def _plain(value: object) -> Any:
    """Converts a scalar of NumPy or JAX to Python's; returns other values unchanged."""
    if type(value) in (bool, int, float):
        return value
    import jax.core
    import numpy as np

    if isinstance(value, jax.core.Tracer):
        return value
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0:
        value = value.item()
    # Enums and other subclasses become plain numbers.
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value
