"""Validation of arguments: errors of one line with the value and the allowed range.

Checks cover the type as well as the range: True is not a count, "5" is not a number,
and 1.5 is not a number of pages. Accepted values are returned as Python numbers, so
that callers may pass scalars of NumPy and JAX. NumPy and JAX are imported only by the
checks that need them, because programs that only read configs also validate.
`ConfigRecord` checks a config by the bounds in its annotations.
"""

import dataclasses
import difflib
import functools
import importlib.util
import inspect
import math
import operator
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    dataclass_transform,
    get_args,
    get_origin,
)

if TYPE_CHECKING:
    import numpy as np
    from _typeshed import DataclassInstance

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


def integer(
    name: str, value: object, *, low: int = 0, below: int = INT32, hint: str = ""
) -> int:
    """Checks an integer.

    Args:
      name: name in the message.
      value: the value; booleans and floats are refused.
      low: smallest allowed value.
      below: exclusive upper bound, a power of two.
      hint: text of the allowed range, in place of the computed one.

    Returns:
      The integer.

    Raises:
      ValueError: the value is not an integer in [low, below).
    """
    plain = _plain(value)
    if type(plain) is int and low <= plain < below:
        return plain
    allowed = hint or f"in [{low}, 2**{below.bit_length() - 1})"
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


def check_fields(owner: "DataclassInstance", **bounds: int | tuple[int, int]) -> None:
    """Checks every field of a frozen config by its type, and converts its numbers.

    Integers must be at least 1, other numbers positive and finite, and a Literal one of
    its values; None is accepted where the type includes it. Numbers of NumPy and JAX
    become Python numbers, so that the config is hashable and can be written to a file.

    Args:
      owner: a dataclass.
      **bounds: by field, the smallest allowed number where it is not the default, or
        (smallest, exclusive upper bound) of an integer.

    Raises:
      ValueError: a field has another value; the message names the first such field.
    """
    for field in dataclasses.fields(owner):
        raw_value = getattr(owner, field.name)
        value = _of_type(field.name, raw_value, field.type, bounds.get(field.name))
        if type(raw_value) not in (bool, int, float, str):
            object.__setattr__(owner, field.name, value)


class Range(NamedTuple):
    """Interval of a number, or of every number of a tuple; metadata of `Annotated`.

    Attributes:
      low: lower end.
      high: upper end.
      ends: a bracket for each end: "[" or "]" includes it, "(" or ")" excludes it.
    """

    low: int | float = -math.inf
    high: int | float = math.inf
    ends: str = "[]"

    def check(
        self, name: str, value: int | float | Sequence[int | float] | None
    ) -> None:
        """Raises a ValueError unless the value is None or in the interval."""
        if value is None:
            return
        low, high, ends = self
        entries = value if isinstance(value, Sequence) else (value,)
        is_above = operator.ge if ends[0] == "[" else operator.gt
        is_below = operator.le if ends[1] == "]" else operator.lt
        if all(is_above(x, low) and is_below(x, high) for x in entries):
            return
        allowed = f"in {ends[0]}{low}, {high}{ends[1]}"
        if high == math.inf:
            allowed = f"{'at least' if ends[0] == '[' else 'above'} {low}"
            allowed += "" if ends[1] == "]" else " and finite"
        raise ValueError(f"{name}={format_value(value)} must be {allowed}")


class Entries(NamedTuple):
    """Smallest allowed number of entries of a tuple; metadata of `Annotated`."""

    minimum: int

    def check(self, name: str, values: Sequence[object]) -> None:
        """Raises a ValueError if the tuple is too short."""
        if len(values) < self.minimum:
            raise ValueError(
                f"{name}={format_value(values)} must be {self.minimum} or more"
            )


class Ascending(NamedTuple):
    """Order of a tuple of numbers; metadata of `Annotated`.

    Attributes:
      low: smallest allowed number.
      minimum: smallest allowed number of entries.
      strictly: True if equal neighbours are refused.
    """

    low: int | float = -math.inf
    minimum: int = 1
    strictly: bool = True

    def check(self, name: str, values: Sequence[int | float]) -> None:
        """Raises a ValueError if the tuple is unordered, too short or too low."""
        low, minimum, strictly = self
        ordered = sorted({*values} if strictly else values) == [*values]
        if len(values) >= minimum and ordered and all(x >= low for x in values):
            return
        order = "ascending" if strictly else "in order"
        count = f"{minimum} or more, " if minimum > 1 else ""
        start = f", from {low}" if low > -math.inf else ""
        raise ValueError(f"{name}={format_value(values)} must be {count}{order}{start}")


class Choices:
    """Names that a tuple may have; metadata of `Annotated`."""

    def __init__(self, allowed: Iterable[str], minimum: int = 0) -> None:
        """Initializes the names, and the smallest allowed number of entries."""
        self.allowed = [*allowed]
        self.minimum = minimum

    def check(self, name: str, values: Sequence[str]) -> None:
        """Raises a ValueError if a name is unknown, or too few are listed."""
        if len(values) < self.minimum or not {*values} <= {*self.allowed}:
            quantifier = f"{self.minimum} or more of" if self.minimum else "of"
            raise ValueError(
                f"{name}={format_value(values)} must be {quantifier} {self.allowed}"
            )


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, ends="(]")]
NonNegativeFloat = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveInts = Annotated[tuple[int, ...], Range(1)]
PositiveFloats = Annotated[tuple[float, ...], Range(0, ends="(]")]
Shares = Annotated[tuple[float, ...], Range(0, 1)]
Sizes = Annotated[tuple[int, ...], Range(1), Entries(1)]
AscendingInts = Annotated[tuple[int, ...], Ascending(1)]
AscendingFloats = Annotated[tuple[float, ...], Ascending(0)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class ConfigRecord:
    """A config: a frozen keyword-only dataclass that checks the bounds of its fields.

    Bounds are `Range`, `Entries`, `Ascending` and `Choices` in annotations:

        class Config(ConfigRecord):
            num_requests: PositiveInt = 24
            rates: Annotated[tuple[float, ...], Ascending(0)] = (1.0, 2.0)

    A subclass that checks relations between fields extends `__post_init__`. Bounds of
    a base class hold for a subclass that replaces a default.

    Raises:
      ValueError: a field is out of its bounds; the message names the first such field.
    """

    def __init_subclass__(cls) -> None:
        """Makes the subclass a dataclass."""
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        """Validates the fields."""
        for kind in type(self).__mro__:  # a subclass may replace a default
            for name, field in vars(kind).get("__dataclass_fields__", {}).items():
                for bound in getattr(field.type, "__metadata__", ()):
                    if isinstance(bound, Range | Entries | Ascending | Choices):
                        bound.check(name, getattr(self, name))


def checks_numbers[**P, R](
    **bounds: int | tuple[int, int] | str,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function to check its numbers by their annotations.

    As in `check_fields`, integers must be at least 1 and below 2**31, other numbers
    positive and finite, and None is accepted where the annotation includes it. Arrays
    are checked entry by entry where the annotation includes them. Tracers are accepted,
    so that `jit` and `vmap` apply as before.

    Args:
      **bounds: by parameter, the smallest allowed number where it is not the default,
        (smallest, exclusive upper bound) of an integer, or an interval of numbers such
        as "(0, 1]"; its ends are numbers, "inf" or "-inf".
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        checks = [
            (index, name, check)
            for index, (name, parameter) in enumerate(parameters.items())
            if (check := _number_check(name, parameter.annotation, bounds.get(name)))
        ]
        if unknown := bounds.keys() - {name for _, name, _ in checks}:
            raise TypeError(f"{function} has no numbers {sorted(unknown)}")

        @functools.wraps(function)
        def checked(*args: P.args, **keywords: P.kwargs) -> R:
            for index, name, check in checks:
                if index < len(args):
                    check(args[index])
                elif name in keywords:
                    check(keywords[name])
            return function(*args, **keywords)

        return checked

    return decorate


def _number_check(
    name: str, annotation: object, bounds: int | tuple[int, int] | str | None
) -> Callable[[object], object] | None:
    """Returns the check of a parameter; None if its annotation has no number."""
    kind = getattr(annotation, "__value__", annotation)  # of a type alias
    kinds = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if not {int, float} & {*kinds}:
        return None
    ending = " or None" if types.NoneType in kinds else ""
    has_arrays = any(hasattr(member_type, "array_type") for member_type in kinds)
    if float in kinds:
        low, high, hint = _interval(bounds)
        check = functools.partial(number, name, low=low, high=high, hint=hint + ending)
    else:
        low, below = bounds if isinstance(bounds, tuple) else (bounds, INT32)
        low = low if isinstance(low, int) else 1
        hint = f"in [{low}, 2**{below.bit_length() - 1}),{ending}" if ending else ""
        check = functools.partial(integer, name, low=low, below=below, hint=hint)

    def check_value(value: object) -> None:
        if value is None and ending:
            return
        if type(value) not in (int, float):
            import jax
            import numpy as np

            if isinstance(value, jax.core.Tracer):
                return
            if has_arrays and isinstance(value, np.ndarray | jax.Array) and value.size:
                array = np.asarray(value)  # `np.min` of JAX's array is traced in `jit`
                if array.dtype.kind in "iuf":
                    check(np.min(array).item())
                    value = np.max(array).item()  # NaN if an entry is NaN
        check(value)

    return check_value


def _interval(bounds: int | tuple[int, int] | str | None) -> tuple[float, float, str]:
    """Returns the smallest and largest number of an interval, and its text."""
    if isinstance(bounds, str):
        low, high = map(float, bounds[1:-1].split(","))
        low = math.nextafter(low, math.inf) if bounds[0] == "(" else low
        high = math.nextafter(high, -math.inf) if bounds[-1] == ")" else high
        is_open = bounds[0] == "[" and bounds.endswith("inf]")
        return low, high, f"at least {low:g}" if is_open else f"in {bounds}"
    if isinstance(bounds, int):
        return float(bounds), sys.float_info.max, f"at least {bounds} and finite"
    return math.ulp(0.0), sys.float_info.max, "above 0 and finite"


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


def _of_type(
    name: str, value: object, kind: Any, bounds: int | tuple[int, int] | None
) -> object:
    """Checks the value of a field by the field's type."""
    kind = getattr(kind, "__value__", kind)
    ending = ""
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
        low, high, hint = _interval(bounds)
        return number(name, value, low=low, high=high, hint=hint)
    return instance(name, value, kind, *([type(None)] if ending else []))


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
