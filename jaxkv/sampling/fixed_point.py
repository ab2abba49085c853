"""Sums of probability that come out alike in any order.

A mass is three integers, the digits of a fixed-point number. They add up exactly,
whatever order a batch makes XLA add in, and are compared without rounding.
"""

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

Mass = tuple[Array, ...]


def digit_bits(vocab: int) -> int:
    """The widest digits of which `vocab` add up without overflow: 15 at 50,000."""
    return 31 - vocab.bit_length()


def to_digits(values: Float[Array, "*shape"], bits: int) -> Mass:
    """Three digits, `bits` wide each, of numbers >= 0; the first holds all above."""
    digits = []
    for _ in range(3):
        values = values * 2.0**bits
        whole = jnp.floor(values)
        digits.append(whole.astype(jnp.int32))
        values = values - whole
    return tuple(digits)


def carry_digits(mass: Mass, bits: int) -> Mass:
    """Carries what is too large for the lower digits, so that sums compare."""
    first, second, third = mass
    second = second + (third >> bits)
    mask = (1 << bits) - 1
    return first + (second >> bits), second & mask, third & mask


def sum_digits(digits: Mass, bits: int) -> Mass:
    """Adds up the digits of each row."""
    zero = (np.int32(0),) * len(digits)
    # One reduction of three, so that XLA computes the digits once.
    total = lax.reduce(digits, zero, lambda a, b: tuple(map(operator.add, a, b)), (1,))
    return carry_digits(tuple(total), bits)


def is_at_least(mass: Mass, target: Mass) -> Array:
    """Whether a mass is at least the target, both of them carried."""
    reached = mass[-1] >= target[-1]
    for ours, theirs in zip(mass[-2::-1], target[-2::-1], strict=True):
        reached = (ours > theirs) | ((ours == theirs) & reached)
    return reached


def fraction_of(
    part: Float[Array, " rows"], total: Mass, bits: int, dtype: Any
) -> Mass:
    """`part` of a mass, rounded to `dtype` and never above the mass itself."""
    share = to_digits(part.astype(dtype) * to_float(total, bits, dtype), bits)
    over = is_at_least(share, total)
    return tuple(jnp.where(over, t, s) for t, s in zip(total, share, strict=True))


def to_float(mass: Mass, bits: int, dtype: Any) -> Array:
    """The mass as a float."""
    digits = (m.astype(dtype) * 2.0 ** (-bits * (i + 1)) for i, m in enumerate(mass))
    first, second, third = digits
    return first + (second + third)


def row_sums(values: Float[Array, "rows vocab"]) -> Float[Array, " rows"]:
    """Adds up each row of numbers in [0, 1]."""
    bits = digit_bits(values.shape[1])
    return to_float(sum_digits(to_digits(values, bits), bits), bits, values.dtype)


def normalise(weights: Float[Array, "rows vocab"]) -> Float[Array, "rows vocab"]:
    """Makes laws of weights: each row, of finite numbers >= 0, over its sum.

    A row without any mass stays as it is.
    """
    top = jnp.max(weights, axis=1, keepdims=True)
    # Of the largest first, so that the digits hold what there is of a faint row.
    weights = weights / jnp.where(top > 0, top, jnp.ones_like(top))
    mass = row_sums(weights)[:, None]
    return weights / jnp.where(mass > 0, mass, jnp.ones_like(mass))
