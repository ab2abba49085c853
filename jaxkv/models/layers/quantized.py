"""Weights in 8 and 4 bits with scales: their container, encoders and decoders.

The products with weights of a layer are quantized. Embeddings, the output head, norms,
biases, routers and gates of experts, convolutions and decays of recurrent layers, and
the up-projection of latent attention, which other products absorb, keep the model's
type.

Sources: OCP Microscaling Formats, version 1.0, sections 5.3.3 and 6.3 (MXFP4); NVIDIA,
"Pretraining Large Language Models with NVFP4", arXiv:2509.25149, section 2 (NVFP4);
DeepSeek-V3, arXiv:2412.19437, section 3.3 (8 bits in blocks of 128).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, UInt8

from pallas_kernels import devices

type WeightFormat = Literal["model", "int8", "fp8", "mxfp4", "nvfp4"]
"""Storage of weights: "model" is the type of the model. "int8" has a scale for each
output; "fp8" (e4m3) one for 128 inputs; "mxfp4" (e2m1) a power of two for 32 inputs;
"nvfp4" (e2m1) a scale in e4m3 for 16 inputs, and one for each output."""
type _Numbers = Array | np.ndarray

BLOCK_SIZES = {"fp8": 128, "mxfp4": 32, "nvfp4": 16}
"""Inputs that share a scale; for other numbers of inputs, the largest divisor."""
FULL_PRECISION = frozenset(
    {"router", "shared_gate", "kv_up", "merge", "decay", "strength"}
)
"""Modules of layers whose weights keep the model's type."""

_MAX_E4M3 = 448.0
_MAX_E2M1 = 6.0
_E2M1_NIBBLES = 0xC8643210
"""Twice the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, the first in the lowest bits."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight in 8 or 4 bits, in place of the array of a parameter.

    Its parts are arrays with the axes of the weight, or what a tree has in their place,
    such as specs. XLA on CPUs converts whole arrays of 8-bit
    floats in loops, so their bits are stored as integers.
    """

    codes: PyTree
    """int8; or the bits of e4m3; or of two numbers in e2m1, the first input in the
    lower half."""
    block_scale: PyTree
    """Scale of each block of inputs: float32, for "mxfp4" the bits of e8m0, and for
    "nvfp4" of e4m3; or None."""
    row_scale: PyTree
    """Scale of each output, in float32, of size 1 along the inputs; or None."""
    format: WeightFormat = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    """Axis of the inputs, from the end."""
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    """Type of the products."""

    @property
    def is_packed(self) -> bool:
        """True if a byte has two numbers."""
        return self.format in ("mxfp4", "nvfp4")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        shape = [*self.codes.shape]
        shape[self.axis] *= 1 + self.is_packed
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return self.codes.ndim

    def __getitem__(self, index: object) -> "QuantizedWeight":
        """Returns the weight itself, as `array[...]` does."""
        if index is not Ellipsis:
            raise TypeError("a quantized weight has no items")
        return self

    def map_parts(self, function: Callable[[_Numbers], _Numbers]) -> "QuantizedWeight":
        """Applies a function to codes and scales."""
        return jax.tree.map(function, self)

    def values(self) -> list[_Numbers]:
        """Returns the numbers without `row_scale`, in the type of the products.

        Packed weights give the even inputs, then the odd ones: joining them would cost
        more than their conversion.
        """
        codes = [self.codes & 15, self.codes >> 4] if self.is_packed else [self.codes]
        if self.block_scale is None:
            return [_decode(x, self.format, self.dtype) for x in codes]
        scales = self.scales()
        place = self.codes.ndim + self.axis
        num_blocks = scales.shape[place]

        def scale(codes: _Numbers) -> _Numbers:
            shape = codes.shape
            split = (*shape[:place], num_blocks, -1, *shape[place + 1 :])
            numbers = _decode(codes, self.format, np.dtype(np.float32)).reshape(split)
            factors = scales.reshape(*scales.shape[: place + 1], 1, *split[place + 2 :])
            return (numbers * factors).reshape(shape).astype(self.dtype)

        return [scale(x) for x in codes]

    def scales(self) -> _Numbers:
        """Returns the scales of the blocks in float32."""
        assert self.block_scale is not None
        if self.format == "mxfp4":
            # The smallest one is not normal in float32, and products flush it to zero.
            return (self.block_scale.astype(np.uint32) << 23).view(np.float32)
        if self.format == "nvfp4":
            return _decode(self.block_scale, "fp8", np.dtype(np.float32))
        return self.block_scale

    def dequantize(self) -> _Numbers:
        """Returns the weight as an array of the type of the products."""
        xp = np if isinstance(self.codes, np.ndarray) else jnp
        values = xp.stack(self.values(), axis=self.axis).reshape(self.shape)
        if self.row_scale is None:
            return values
        return (values.astype(np.float32) * self.row_scale).astype(self.dtype)


def _decode(codes: _Numbers, weight_format: str, dtype: np.dtype) -> _Numbers:
    """Returns the numbers of codes, one in each."""
    if weight_format == "int8":
        return codes.astype(dtype)
    is_array = isinstance(codes, np.ndarray)
    if weight_format == "fp8":
        if not is_array and devices.current_target().platform == "gpu":
            return codes.view(jnp.float8_e4m3fn).astype(dtype)
        # As float16, whose exponent has a bias of 15 in place of 7.
        bits = codes.astype(np.uint16)
        half = (((bits & 128) << 8) | ((bits & 127) << 7)).view(np.float16)
        return (half.astype(np.float32) * np.float32(256)).astype(dtype)
    xp = np if is_array else jnp
    code = codes.astype(np.uint32)
    doubled = (np.uint32(_E2M1_NIBBLES) >> (4 * (code & 7))) & 15
    doubled = doubled.astype(np.int32)
    signed = xp.where(code >= 8, -doubled, doubled)
    return (signed.astype(np.float32) * np.float32(0.5)).astype(dtype)


def quantize_weight(
    weight: _Numbers,
    weight_format: WeightFormat,
    *,
    axis: int = -1,
    dtype: DTypeLike = "float32",
) -> QuantizedWeight:
    """Quantizes a weight on the host, rounding to the nearest number.

    Args:
      weight: finite numbers, with any axes.
      weight_format: the format, not "model".
      axis: axis of the inputs, from the end.
      dtype: type of the products.

    Raises:
      ValueError: the format has 4 bits, and the number of inputs is odd.
    """
    rows = np.moveaxis(np.asarray(weight, np.float32), axis, -1)
    num_inputs = rows.shape[-1]
    size = find_block_size(weight_format, num_inputs)
    blocks = rows.reshape(*rows.shape[:-1], -1, size)
    largest = np.abs(blocks).max(-1)
    block_scale = row_scale = None
    if weight_format == "int8":
        row_scale = _nonzero(largest / np.float32(127))
        codes = np.rint(rows / row_scale).astype(np.int8)
    elif weight_format == "fp8":
        block_scale = _nonzero(largest / np.float32(_MAX_E4M3))
        codes = _to_bits(blocks / block_scale[..., None], jnp.float8_e4m3fn)
    elif weight_format == "mxfp4":
        _, exponent = np.frexp(largest)  # the largest number is below 2 ** exponent
        biased = np.clip(exponent - 1 - 2 + 127, 1, 254)
        block_scale = np.where(largest > 0, biased, 127).astype(np.uint8)
        powers = np.ldexp(np.float32(1), biased - 127).astype(np.float32)
        codes = _encode_e2m1(blocks / powers[..., None])
    else:
        full = np.float32(_MAX_E2M1 * _MAX_E4M3)
        row_scale = _nonzero(largest.max(-1, keepdims=True) / full)
        wanted = largest / np.float32(_MAX_E2M1) / row_scale
        block_scale = _to_bits(wanted, jnp.float8_e4m3fn)
        decoded = _decode(block_scale, "fp8", np.dtype(np.float32))
        factors = np.asarray(decoded) * row_scale
        codes = _encode_e2m1(blocks / _nonzero(factors)[..., None])
    codes = codes.reshape(*rows.shape[:-1], -1)
    result = QuantizedWeight(
        codes=codes,
        block_scale=block_scale,
        row_scale=row_scale,
        format=weight_format,
        axis=-1,
        dtype=np.dtype(dtype),
    )
    return result if axis == -1 else move_inputs(result, axis)


def find_block_size(weight_format: WeightFormat, num_inputs: int) -> int:
    """Returns the number of inputs that share a scale.

    Raises:
      ValueError: the format has 4 bits, and the number of inputs is odd.
    """
    if weight_format == "int8":
        return num_inputs
    if weight_format != "fp8" and num_inputs % 2:
        raise ValueError(
            f"weights={weight_format!r} needs even numbers of inputs, and a layer has "
            f"{num_inputs}"
        )
    return math.gcd(BLOCK_SIZES[weight_format], num_inputs)


def move_inputs(weight: QuantizedWeight, axis: int) -> QuantizedWeight:
    """Returns a weight of NumPy arrays with the inputs on another axis."""
    moved = weight.map_parts(
        lambda x: np.ascontiguousarray(np.moveaxis(np.asarray(x), weight.axis, axis))
    )
    return dataclasses.replace(moved, axis=axis)


def _nonzero(x: np.ndarray) -> np.ndarray:
    """Replaces zeros by ones, for a division."""
    return np.where(x > 0, x, np.float32(1)).astype(np.float32)


def _to_bits(x: np.ndarray, dtype: DTypeLike) -> UInt8[np.ndarray, "..."]:
    return x.astype(dtype).view(np.uint8)


def _encode_e2m1(x: Float[np.ndarray, "... block"]) -> UInt8[np.ndarray, "... half"]:
    """Rounds to e2m1, saturating, and packs two numbers in a byte."""
    codes = _to_bits(np.clip(x, -_MAX_E2M1, _MAX_E2M1), jnp.float4_e2m1fn) & 15
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def inputs_axis(path: tuple[str | int, ...]) -> int | None:
    """Returns the axis of the inputs of a quantized parameter, from the end.

    Args:
      path: keys from the root of the parameter tree.

    Returns:
      The axis; None if the parameter keeps the model's type.
    """
    if path[0] not in ("layers", "ahead") or path[-1] != "weight":
        return None
    if path[-2] in FULL_PRECISION:
        return None
    return -2 if path[-3:] in _EXPERT_PATHS else -1


_EXPERT_PATHS = (("mixture", "up", "weight"), ("mixture", "down", "weight"))
