"""Sums of probabilities that are equal in any order of summation.

A mass is three integers, the digits of a fixed-point number. Integers add exactly
in any order, also in those that XLA chooses by batch size, and compare without
rounding.
"""

import operator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Mass = tuple[Array, ...]


def digit_bits(vocab: int) -> int:
    """Returns the widest digits of which `vocab` sum without overflow: 15 at 50,000."""
    return 31 - vocab.bit_length()


def to_digits(values: Float[Array, "*shape"], bits: int) -> Mass:
    """Converts numbers >= 0 to three digits; all but the first have `bits` bits."""
    digits = []
    for _ in range(3):
        values = values * 2.0**bits
        integers = jnp.floor(values)
        digits.append(integers.astype(jnp.int32))
        values = values - integers
    return tuple(digits)


def carry_digits(mass: Mass, bits: int) -> Mass:
    """Carries overflow of the lower digits to the higher ones, so that sums compare."""
    first, second, third = mass
    second = second + (third >> bits)
    mask = (1 << bits) - 1
    return first + (second >> bits), second & mask, third & mask


def sum_digits(digits: Mass, bits: int) -> Mass:
    """Sums the digits of each row."""
    zero = (np.int32(0),) * len(digits)
    # One reduction of three operands, so that XLA computes the digits once.
    total = lax.reduce(digits, zero, lambda a, b: tuple(map(operator.add, a, b)), (1,))
    return carry_digits(tuple(total), bits)


def is_at_least(mass: Mass, target: Mass) -> Array:
    """Returns True if a mass is at least the target; both must be carried."""
    reached = mass[-1] >= target[-1]
    for digit, bound in zip(mass[-2::-1], target[-2::-1], strict=True):
        reached = (digit > bound) | ((digit == bound) & reached)
    return reached


def fraction_of(
    part: Float[Array, " rows"], total: Mass, bits: int, dtype: DTypeLike
) -> Mass:
    """Returns `part` of a mass, rounded to `dtype` and at most the mass."""
    share = to_digits(part.astype(dtype) * to_float(total, bits, dtype), bits)
    over = is_at_least(share, total)
    return tuple(jnp.where(over, t, s) for t, s in zip(total, share, strict=True))


def to_float(mass: Mass, bits: int, dtype: DTypeLike) -> Array:
    """Converts a mass to a float."""
    digits = (m.astype(dtype) * 2.0 ** (-bits * (i + 1)) for i, m in enumerate(mass))
    first, second, third = digits
    return first + (second + third)


def row_sums(values: Float[Array, "rows vocab"]) -> Float[Array, " rows"]:
    """Sums each row of numbers in [0, 1]."""
    bits = digit_bits(values.shape[1])
    return to_float(sum_digits(to_digits(values, bits), bits), bits, values.dtype)


def normalise(weights: Float[Array, "rows vocab"]) -> Float[Array, "rows vocab"]:
    """Divides each row of finite weights >= 0 by its sum.

    A row of zeros is unchanged.
    """
    top = jnp.max(weights, axis=1, keepdims=True)
    # Divided by the largest weight first, so that the digits resolve a row of small
    # weights.
    weights = weights / jnp.where(top > 0, top, jnp.ones_like(top))
    mass = row_sums(weights)[:, None]
    return weights / jnp.where(mass > 0, mass, jnp.ones_like(mass))
