"""Keys and values in 8 bits: numbers and their scales.

`value = number * scale`; the scale maps the largest value of a group to the largest
number. A group is a token's key or value of one head, or all of them in a page. The
engine groups by token, since pages are filled token by token: with groups by page, a
larger token would change the scale of its page, all earlier numbers would have to be
read, rounded again and written, and the stored value of a token would depend on later
tokens. The scale of a token is final when it is written. Scales cost 4 bytes for each
head and token: 3 % of 128 numbers.

Sources: int8 by token, Xiao et al. 2023, arXiv:2211.10438, section 3; fp8, Micikevicius
et al. 2022, arXiv:2209.05433, table 1 and section 4.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Num, UInt8

type Kind = Literal["int8", "fp8"]
"""int8: equal steps, -127 to 127. fp8: float8_e4m3fn, three mantissa bits at magnitudes
from 2 ** -6 to 448."""

CODE_DTYPES = {"int8": np.dtype(np.int8), "fp8": np.dtype(np.uint8)}
"""Storage type of each kind. fp8 is stored as its bits: XLA for CPUs has no scatter of
fp8, and would convert all pages to a wider type and back to write a token."""
FP8 = np.dtype(jnp.float8_e4m3fn)
"""Type of the bits of fp8."""
_MAX_CODES = {"int8": 127.0, "fp8": 448.0}


class QuantizedArray(NamedTuple):
    """An array of 8-bit numbers and their scales."""

    numbers: Int8[Array, "*lead head_dim"] | UInt8[Array, "*lead head_dim"]
    """-127 to 127, or the bits of -448 to 448."""
    scales: Float[Array, "*groups"]
    """Value of the number 1, in float32 (float64 if the values are)."""

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
      kind: kind of the numbers.
      per: "token" shares a scale among head_dim values, "page" among those of all
        tokens of a page.

    Returns:
      Numbers in the shape of the values, and a scale for each group. A group without a
      value above 1e-36 has scale 0; one with a NaN has scale NaN.
    """
    wide = values.astype(np.promote_types(values.dtype, np.float32))
    axes = (-1,) if per == "token" else (-2, -1)
    top = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
    # A smaller scale would be subnormal, which a CPU may flush to 0.
    is_nonzero = ~(top < 1e-36)
    one = jnp.ones_like(top)
    scales = jnp.where(is_nonzero, top / _MAX_CODES[kind], jnp.zeros_like(top))
    numbers = jnp.where(is_nonzero, wide / jnp.where(is_nonzero, scales, one), 0.0)
    if kind == "int8":
        numbers = jnp.round(numbers).astype(jnp.int8)
    else:
        numbers = lax.bitcast_convert_type(numbers.astype(FP8), jnp.uint8)
    return QuantizedArray(numbers, jnp.squeeze(scales, axes))


def as_number_type(numbers: Num[Array, "..."]) -> Num[Array, "..."]:
    """Returns numbers in their own type: bits of fp8 become fp8."""
    if numbers.dtype != CODE_DTYPES["fp8"]:
        return numbers
    return lax.bitcast_convert_type(numbers, FP8)


def dequantize(
    numbers: Num[Array, "*lead head_dim"],
    scales: Float[Array, "*groups"],
) -> Float[Array, "*lead head_dim"]:
    """Turns numbers back into values, in the type of the scales.

    Args:
      numbers: 8-bit numbers.
      scales: scale of each token; with one axis less, of each page.
    """
    missing = tuple(range(scales.ndim, numbers.ndim))
    return as_number_type(numbers).astype(scales.dtype) * jnp.expand_dims(
        scales, missing
    )


def quantization_kind(dtype: DTypeLike) -> Kind | None:
    """Returns the kind of an 8-bit type, or None for other types."""
    if dtype == CODE_DTYPES["int8"]:
        return "int8"
    return "fp8" if dtype in (CODE_DTYPES["fp8"], FP8) else None


def split_quantized[A: Array | None](
    values: A | QuantizedArray,
) -> tuple[A | Array, Array | None]:
    """Returns the numbers and scales of keys or values; scales are None without any."""
    return values if isinstance(values, QuantizedArray) else (values, None)


def join_quantized(numbers: Array, scales: Array | None) -> Array | QuantizedArray:
    """Returns numbers and scales as one value, the inverse of `split_quantized`."""
    return numbers if scales is None else QuantizedArray(numbers, scales)
