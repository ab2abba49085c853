"""What a fit.json must hold, before any of it is believed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from scaling.solving import Loss, Space


class _Kind(NamedTuple):
    """What a field must be: a test, and in words."""

    is_so: Callable[[Any], bool]
    what: str


def check(fields: Mapping[str, Any]) -> None:
    """Checks the fields that are not arrays.

    Raises:
      ValueError: one is of another kind; the line names it.
    """
    for name, kind in _KINDS.items():
        if not kind.is_so(fields[name]):
            raise ValueError(f"its {name} must be {kind.what}")


def check_array(name: str, array: Any) -> None:
    """Checks an array that was read from a list.

    Raises:
      ValueError: it was no list, or an empty one.
    """
    if array.ndim != 1 or not array.size:
        raise ValueError(f"its {name} must be a list of numbers")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    """Whether it is a number, or null for one that is not finite."""
    return value is None or type(value) in (int, float)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_number, value.values()))


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_share(value: Any) -> bool:
    return type(value) is float and 0 < value < 1


def _one_of(choices: tuple[str, ...]) -> _Kind:
    return _Kind(choices.__contains__, f"one of {', '.join(choices)}")


_TEXT, _TEXTS = _Kind(_is_text, "text"), _Kind(_are_texts, "a list of texts")
_NUMBER = _Kind(_is_number, "a number")
_NUMBERS = _Kind(_are_numbers, "numbers by name")
_COUNT = _Kind(_is_count, "a count")
_KINDS = {
    "law": _TEXT,
    "status": _TEXT,
    "inputs": _TEXTS,
    "statuses": _TEXTS,
    "bounds_hit": _TEXTS,
    "warnings": _TEXTS,
    "distinct_minima": _COUNT,
    "num_points": _COUNT,
    "objective": _NUMBER,
    "condition_number": _NUMBER,
    "delta": _NUMBER,
    "coefficients": _NUMBERS,
    "exponents": _NUMBERS,
    "level": _Kind(_is_share, "in (0, 1)"),
    "loss": _one_of(get_args(Loss)),
    "space": _one_of(get_args(Space)),
}
