"""Keys and values in 8 bits: numbers and what each of them is worth.

`value = number * scale`, with the scale chosen so that the largest value of a group
gets the largest number. A group is a token's key or value of one head, or all of them
in a page. The engine takes groups of tokens, since pages fill token by token: a larger
token would change the scale of its page, so that all numbers before it would have to be
read, rounded a second time and written again, and what a token is stored as would
depend on what came after it. A token's own scale is final when it is written. That
costs 4 bytes a head and token: 3 % of 128 numbers.

Sources: int8 by token, Xiao et al. 2023, arXiv:2211.10438, section 3; fp8, Micikevicius
et al. 2022, arXiv:2209.05433, table 1 and section 4.
"""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Num, UInt8

type Kind = Literal["int8", "fp8"]
"""int8: steps of equal size, -127 to 127. fp8: float8_e4m3fn, three bits behind the
point at any size from 2 ** -6 to 448."""

NUMBERS = {"int8": np.dtype(np.int8), "fp8": np.dtype(np.uint8)}
"""Type that the numbers of each kind are kept in. fp8 is kept as its bits: XLA for CPUs
knows no scatter of it, and would widen and narrow all pages to write a token."""
FP8 = np.dtype(jnp.float8_e4m3fn)
"""What those bits mean."""
_LARGEST = {"int8": 127.0, "fp8": 448.0}


class QuantizedArray(NamedTuple):
    """Numbers of 8 bits and their scales."""

    numbers: Int8[Array, "*lead head_dim"] | UInt8[Array, "*lead head_dim"]
    """-127 to 127, or the bits of -448 to 448."""
    scales: Float[Array, "*groups"]
    """What the number 1 is worth, in float32 (float64 if the values are)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.numbers.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the numbers."""
        return self.numbers.dtype


def quantize(
    values: Float[Array, "*lead head_dim"],
    kind: Kind,
    *,
    per: Literal["token", "page"] = "token",
) -> QuantizedArray:
    """Rounds keys or values to 8 bits, to the nearest number, ties to even.

    Args:
      values: keys or values; `[..., page_size, head_dim]` if per page.
      kind: of number.
      per: "token" shares a scale among head_dim values, "page" among those of all
        tokens of a page.

    Returns:
      Numbers in the shape of the values and a scale for each group. A group of zeros,
      or of nothing above 1e-36, has scale 0; one with a NaN has NaN as its scale.
    """
    wide = values.astype(np.promote_types(values.dtype, np.float32))
    axes = (-1,) if per == "token" else (-2, -1)
    top = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
    # Below this the scale would leave the normal numbers, which a CPU may flush to 0.
    some = ~(top < 1e-36)
    one = jnp.ones_like(top)
    scales = jnp.where(some, top / _LARGEST[kind], jnp.zeros_like(top))
    numbers = jnp.where(some, wide / jnp.where(some, scales, one), 0.0)
    if kind == "int8":
        numbers = jnp.round(numbers).astype(jnp.int8)
    else:
        numbers = lax.bitcast_convert_type(numbers.astype(FP8), jnp.uint8)
    return QuantizedArray(numbers, jnp.squeeze(scales, axes))


def as_number_type(numbers: Num[Array, "..."]) -> Num[Array, "..."]:
    """Gives numbers a type that says what they are: bits of fp8 that of fp8."""
    if numbers.dtype != NUMBERS["fp8"]:
        return numbers
    return lax.bitcast_convert_type(numbers, FP8)


def dequantize(
    numbers: Num[Array, "*lead head_dim"],
    scales: Float[Array, "*groups"],
) -> Float[Array, "*lead head_dim"]:
    """Turns numbers back into values, in the type of the scales.

    Args:
      numbers: in 8 bits.
      scales: of each token, or of each page where they have an axis less.
    """
    missing = tuple(range(scales.ndim, numbers.ndim))
    return as_number_type(numbers).astype(scales.dtype) * jnp.expand_dims(
        scales, missing
    )


def quantization_kind(dtype: DTypeLike) -> Kind | None:
    """Names the kind of number of a type; None if it is not one of 8 bits."""
    if dtype == NUMBERS["int8"]:
        return "int8"
    return "fp8" if dtype in (NUMBERS["fp8"], FP8) else None


def split_quantized(values: Array | QuantizedArray | None) -> tuple[Any, Array | None]:
    """Takes keys or values apart: numbers and scales, None where there are none."""
    return values if isinstance(values, QuantizedArray) else (values, None)


def join_quantized(numbers: Array, scales: Array | None) -> Any:
    """Puts together what `split_quantized` took apart."""
    return numbers if scales is None else QuantizedArray(numbers, scales)
