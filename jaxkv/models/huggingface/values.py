"""Checks values of a Hugging Face `config.json`; errors have key and value."""

import math
from typing import Any

from jaxkv import validation

MAX_CONFIG_SIZE = 2**31 - 1
"""Largest size; counts and positions have 32 bits."""
MAX_LAYERS = 100_000
"""Larger than in any model; layers are listed one by one."""
FP8_BLOCK = 128
"""Rows and columns of a block of 8-bit weights with one scale."""
_MAX_NUMBER = float.fromhex("0x1.fffffep127")  # the largest float32

_BOOLEAN_FIELDS = (
    "tie_embeddings",
    "qkv_bias",
    "mlp_bias",
    "qk_norm",
    "residual",
    "experts.renormalise",
    "experts.gate_bias",
    "recurrence.conv_bias",
    "recurrence.projection_bias",
    "recurrence.write_scale",
)
_REAL_FIELDS = (
    "norm_eps",
    "attention_scale",
    "score_cap",
    "logit_cap",
    "logit_scale",
    "embed_scale",
    "residual_scale",
    "activation_slope",
    "activation_limit",
    "experts.scale",
    "experts.balance_weight",
    "experts.bias_rate",
    "recurrence.min_step",
)
_FIELDS_FROM_ZERO = (
    *("num_ahead_layers", "layer_input_size"),
    "experts.num_dense_layers",
)
"""Fields that are flags, numbers, and counts from 0; all other fields are sizes."""


def parse_field(
    key: str, field: str, value: object, high: int = MAX_CONFIG_SIZE
) -> object:
    """Returns a value as the type of its field; errors as in the functions below."""
    if field in _BOOLEAN_FIELDS:
        return parse_flag(key, value)
    if field == "experts.dense_layers":
        if not isinstance(value, list):
            raise ValueError(f"{key}={shorten(value)} must be a list")
        return value
    if field == "num_layers":
        high = MAX_LAYERS
    if field not in _REAL_FIELDS:
        return parse_size(
            key, value, low=0 if field in _FIELDS_FROM_ZERO else 1, high=high
        )
    may_be_zero = field in (
        "experts.balance_weight",
        "experts.bias_rate",
        "recurrence.min_step",
    )
    if may_be_zero and type(value) in (int, float) and value == 0:
        return 0.0
    return parse_positive_number(key, value)


@validation.checks_numbers(low=(0, 2**63), high=validation.SIZES)
def parse_size(
    key: str, value: object, *, low: int = 1, high: int = MAX_CONFIG_SIZE
) -> int:
    """Returns an integer in [low, most].

    Raises:
      ValueError: the value is not such an integer.
    """
    if type(value) is not int or value < low:
        raise ValueError(
            f"{key}={shorten(value)} must be a whole number, at least {low}"
        )
    if value > high:
        raise ValueError(f"{key}={shorten(value)} must be at most {high}")
    return value


def parse_positive_number(key: str, value: Any) -> float:
    """Returns a positive number that float32 can hold.

    Raises:
      ValueError: the value is not such a number.
    """
    if type(value) not in (int, float) or not 0 < value <= _MAX_NUMBER:
        raise ValueError(
            f"{key}={shorten(value)} must be a number above 0, at most "
            f"{_MAX_NUMBER:.1e}"
        )
    return float(value)


def parse_range(key: str, value: Any) -> tuple[float, float | None]:
    """Returns the ends of a range from 0 up; the second is None for infinity.

    transformers 5 writes infinity as `{"__float__": "Infinity"}`.

    Raises:
      ValueError: the value is not a list of two such numbers.
    """
    ends = value if isinstance(value, list | tuple) else []
    infinity = {"__float__": "Infinity"}
    numbers = [math.inf if x == infinity else x for x in ends]
    is_range = len(numbers) == 2 and all(type(x) in (int, float) for x in numbers)
    if not is_range or not 0 <= numbers[0] <= min(numbers[1], _MAX_NUMBER):
        raise ValueError(
            f"{key}={shorten(value)} must be a list of two numbers from 0 up"
        )
    low, high = numbers
    return float(low), None if high > _MAX_NUMBER else float(high)


def parse_flag(key: str, value: object) -> bool:
    """Returns a boolean.

    Raises:
      ValueError: the value is not a boolean.
    """
    if type(value) is not bool:
        raise ValueError(f"{key}={shorten(value)} must be true or false")
    return value


def shorten(value: object) -> str:
    """Returns a value from a file as one short line."""
    if isinstance(value, int) and abs(value) > 10**20:
        return f"{'-' * (value < 0)}10^{abs(value).bit_length() * 0.30103:.0f}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"
