"""Values of a Hugging Face `config.json`, checked; every error names key and value."""

from typing import Any

MAX_SIZE = 2**31 - 1
"""What counts and positions are held in is 32 bits wide."""
_MAX_NUMBER = float.fromhex("0x1.fffffep127")  # the largest float32


_FLAGS = ("tie_embeddings", "qkv_bias", "mlp_bias", "renormalise")
_NUMBERS = ("norm_eps", "balance_weight")
"""Fields of ours that are; all others are sizes."""


def of_field(key: str, field: str, value: Any) -> Any:
    """Returns a value that has the type its field needs; errors as those below."""
    if field in _FLAGS:
        return flag(key, value)
    return number(key, value) if field in _NUMBERS else size(key, value)


def size(key: str, value: Any) -> int:
    """Returns a whole number that is at least 1.

    Raises:
      ValueError: it is none, or past `MAX_SIZE`.
    """
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={shown(value)} must be a whole number, at least 1")
    if value > MAX_SIZE:
        raise ValueError(f"{key}={shown(value)} must be at most {MAX_SIZE}")
    return value


def number(key: str, value: Any) -> float:
    """Returns a number above 0 that float32 holds.

    Raises:
      ValueError: it is none.
    """
    if type(value) not in (int, float) or not 0 < value <= _MAX_NUMBER:
        raise ValueError(
            f"{key}={shown(value)} must be a number above 0, at most {_MAX_NUMBER:.1e}"
        )
    return float(value)


def flag(key: str, value: Any) -> bool:
    """Returns true or false.

    Raises:
      ValueError: it is neither.
    """
    if type(value) is not bool:
        raise ValueError(f"{key}={shown(value)} must be true or false")
    return value


def shown(value: Any) -> str:
    """Writes a value in one short line, whatever a file holds."""
    if isinstance(value, int) and abs(value) > 10**20:
        return f"{'-' * (value < 0)}10^{abs(value).bit_length() * 0.30103:.0f}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"
