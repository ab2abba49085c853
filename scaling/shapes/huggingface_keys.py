"""Values of a `config.json`, checked; every error names the key and what it should be.

A null counts as a key that is left out, except where `optional` says otherwise.
"""

from collections.abc import Mapping
from typing import Any

type Raw = Mapping[str, Any]

MAX_SIZE = 2**40
MAX_LAYERS = 100_000
"""More than any model has; layers are listed one by one."""

_NEEDED = object()


def size(raw: Raw, key: str, default: Any = _NEEDED) -> int:
    """Reads a size of at least 1; without a default the key must be there."""
    value = raw.get(key)
    if value is None:
        if default is _NEEDED:
            raise ValueError(f"{key} is missing")
        value = default
    return checked(key, value, 1)


def count(raw: Raw, key: str, default: int) -> int:
    """Reads a count of at least 0."""
    value = raw.get(key)
    return checked(key, default if value is None else value, 0)


def optional(raw: Raw, key: str, default: int | None) -> int | None:
    """Reads a size that may be null; the default is for a key left out alone."""
    value = raw.get(key, default)
    return None if value is None else checked(key, value, 1)


def flag(raw: Raw, key: str, default: bool) -> bool:
    """Reads true or false."""
    value = raw.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise ValueError(f"{key}={value!r} must be true or false")
    return value


def checked(key: str, value: Any, low: int) -> int:
    """Returns a whole number that is at least `low`, and no nonsense."""
    if type(value) is not int or value < low:
        raise ValueError(f"{key}={value!r} must be a whole number, at least {low}")
    most = MAX_LAYERS if key in ("num_hidden_layers", "n_layer") else MAX_SIZE
    if value > most:
        raise ValueError(f"{key} must be at most {most:,}")
    return value


def quotient(name: str, value: int, by: str, divisor: int) -> int:
    """Divides two sizes that must divide, given with their names."""
    if value % divisor:
        raise ValueError(f"{name}={value} must be a multiple of {by}={divisor}")
    return value // divisor


def without_aliases(raw: Raw, aliases: Mapping[str, str]) -> Raw:
    """Writes every key by one name; two names must not say different things.

    Args:
      raw: the file.
      aliases: another name of a key -> the key.
    """
    found = {key: value for key, value in raw.items() if key not in aliases}
    for alias, key in aliases.items():
        if (value := raw.get(alias)) is None:
            continue
        if found.get(key) not in (None, value):
            raise ValueError(f"{alias}={value!r} contradicts {key}={found[key]!r}")
        found[key] = value
    return found
