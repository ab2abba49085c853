"""Values of a `config.json`, checked; every error names the key and what it should be.

A null counts as a key that is left out, except where `optional` says otherwise.
"""

from collections.abc import Mapping
from typing import Any

MAX_SIZE = 2**40
MAX_LAYERS = 100_000
"""More than any model has; layers are listed one by one."""

_NEEDED = object()


class Raw(dict[str, Any]):
    """A parsed `config.json`."""

    def size(self, key: str, default: Any = _NEEDED) -> int:
        """Reads a size of at least 1; without a default the key must be there."""
        value = self.get(key)
        if value is None and default is _NEEDED:
            raise ValueError(f"{key} is missing")
        return _checked(key, default if value is None else value, 1)

    def count(self, key: str, default: int) -> int:
        """Reads a count of at least 0."""
        value = self.get(key)
        return _checked(key, default if value is None else value, 0)

    def optional(self, key: str, default: int | None = None) -> int | None:
        """Reads a size that may be null; the default is for a key left out alone."""
        value = self.get(key, default)
        return None if value is None else _checked(key, value, 1)

    def flag(self, key: str, default: bool = False) -> bool:
        """Reads true or false."""
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise ValueError(f"{key}={value!r} must be true or false")
        return value

    def quotient(self, key: str, by: str) -> int:
        """Divides two sizes that must divide."""
        value, divisor = self.size(key), self.size(by)
        if value % divisor:
            raise ValueError(f"{key}={value} must be a multiple of {by}={divisor}")
        return value // divisor

    def without_aliases(self, aliases: Mapping[str, str]) -> "Raw":
        """Writes every key by one name; two names must not say different things.

        Args:
          aliases: another name of a key -> the key.
        """
        found = Raw({key: x for key, x in self.items() if key not in aliases})
        for alias, key in aliases.items():
            if (value := self.get(alias)) is None:
                continue
            if found.get(key) not in (None, value):
                raise ValueError(f"{alias}={value!r} contradicts {key}={found[key]!r}")
            found[key] = value
        return found


def _checked(key: str, value: Any, low: int) -> int:
    """Returns a whole number that is at least `low`, and no nonsense."""
    if type(value) is not int or value < low:
        raise ValueError(f"{key}={value!r} must be a whole number, at least {low}")
    most = MAX_LAYERS if key in ("num_hidden_layers", "n_layer") else MAX_SIZE
    if value > most:
        raise ValueError(f"{key} must be at most {most:,}")
    return value
