"""Fields of configs, checked by their types or by the bounds in their annotations."""

import dataclasses
import math
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

from jaxkv.validation.number_checks import interval_ends
from jaxkv.validation.values import (
    INT32,
    boolean,
    choice,
    format_value,
    instance,
    integer,
    integers,
    number,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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


def _of_type(
    name: str, value: object, kind: Any, bounds: int | tuple[int, int] | None
) -> object:
    """Checks the value of a field by the field's type."""
    kind = getattr(kind, "__value__", kind)
    ending = ""
    if isinstance(kind, types.UnionType) or get_origin(kind) is Union:
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
    if get_origin(kind) is tuple:
        entries = instance(name, value, tuple)
        return tuple(_of_type(name, x, get_args(kind)[0], bounds) for x in entries)
    if get_origin(kind) is Callable:
        return instance(name, value, Callable)
    if kind is float:
        low, high, hint = interval_ends(bounds)
        return number(name, value, low=low, high=high, hint=hint)
    return instance(name, value, kind, *([type(None)] if ending else []))
