"""Weights in 4 bits with a scale for each 32 of them (MXFP4), as gpt-oss stores them.

Source: OCP Microscaling Formats, version 1.0, sections 5.3.3 and 6.3; the order of the
numbers in a byte is that of gpt-oss's published weights.
"""

import numpy as np
from jaxtyping import Float, UInt8

BLOCKS_SUFFIX = "_blocks"
SCALES_SUFFIX = "_scales"
"""Suffixes of the two tensors of a packed one."""
PACKED_BLOCK = 32
"""Numbers of a block, which have one scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.asarray([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of blocks and scales of a tensor `[experts, in, out]`.

    Raises:
      ValueError: the inputs are not a multiple of `PACKED_BLOCK`.
    """
    num_experts, inputs, outputs = shape
    if inputs % PACKED_BLOCK:
        raise ValueError(f"{inputs=} of packed weights must be a multiple of 32")
    scales = num_experts, outputs, inputs // PACKED_BLOCK
    return (*scales, PACKED_BLOCK // 2), scales


def dequantize_mxfp4(
    blocks: UInt8[np.ndarray, "experts outputs blocks half"],
    scales: UInt8[np.ndarray, "experts outputs blocks"],
) -> Float[np.ndarray, "experts inputs outputs"]:
    """Returns the numbers of packed weights in float32.

    A byte has two numbers, the first one in its lower half: a sign, two bits of an
    exponent and one of a mantissa. A scale is a power of two with a bias of 127.
    """
    numbers = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1)
    numbers = numbers.reshape(*scales.shape, PACKED_BLOCK)
    powers = scales.astype(np.int32) - 127
    rows = np.ldexp(numbers, powers[..., None]).reshape(*scales.shape[:2], -1)
    return rows.swapaxes(1, 2)
