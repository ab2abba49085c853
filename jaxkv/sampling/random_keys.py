"""Random keys and noise as functions of request, sample, position, purpose and token.

They do not depend on rows, slots or the order of arrival, and so neither does a draw.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt32

from jaxkv import validation
from pallas_kernels import devices

SAMPLE, DRAFT, ACCEPT, RESIDUAL = range(4)
"""Purposes of draws, which make the draws at one position differ: the token itself, a
draft token, the acceptance test of a draft token, the token after a rejected draft."""


@validation.checks_numbers(
    seed=(0, 2**64), engine_seed=(0, 2**64), request_id=(0, 2**32)
)
def request_key(seed: int | None, engine_seed: int, request_id: int) -> np.ndarray:
    """Makes a request's key from its seed, else from engine seed and request id.

    Runs on the host without JAX, so that submitting a request launches no kernel. The
    bits equal those of `jax.random.key(seed)`, or of `fold_in` of the key of
    `engine_seed` and the id, under "threefry2x32" with 64-bit integers enabled.

    Args:
      seed: the request's seed in [0, 2**64), or None.
      engine_seed: the engine's seed in [0, 2**64), used if `seed` is None.
      request_id: the caller's id of the request, in [0, 2**32), never its rank in the
        order of arrival.

    Returns:
      Key data, uint32 of shape [2].

    Raises:
      ValueError: a number is out of its range.
    """
    chosen = engine_seed if seed is None else seed
    # Arrays, not scalars: NumPy warns when a scalar wraps.
    words = np.array([chosen >> 32, chosen & 0xFFFFFFFF], np.uint32)
    if seed is not None:
        return words
    counter = np.array([0, request_id], np.uint32)
    return np.concatenate(_threefry(words[:1], words[1:], counter[:1], counter[1:]))


def request_keys(
    key: UInt32[Array, " 2"], request_id: Int32[Array, "*rows"]
) -> UInt32[Array, "*rows 2"]:
    """Makes the keys of requests without a seed from the engine's key.

    They equal those of `request_key`.
    """
    zero = jnp.zeros_like(request_id, jnp.uint32)
    words = _threefry(key[0], key[1], zero, request_id.astype(jnp.uint32))
    return jnp.stack(words, axis=-1)


@validation.checks_numbers(purpose=0)
def draw_key(
    key: UInt32[Array, "*rows 2"],
    sample: Int32[Array, "*rows"],
    position: Int32[Array, "*rows"],
    purpose: int,
) -> UInt32[Array, "*rows 2"]:
    """Folds sample, position and purpose of one draw into a request's key.

    The position is the drawn token's position in the sequence; the purpose is `SAMPLE`,
    `DRAFT`, `ACCEPT` or `RESIDUAL`.

    Returns:
      Key data, equal to three calls of `jax.random.fold_in`.
    """

    def fold(key: Array, data: Array) -> tuple[Array, None]:
        zero = jnp.zeros_like(data)
        return jnp.stack(_threefry(key[..., 0], key[..., 1], zero, data), axis=-1), None

    data = jnp.stack([sample, position, jnp.full_like(position, purpose)])
    # A loop on the CPU, so that one fold is compiled; a GPU would launch kernels per
    # trip.
    unroll = 1 if devices.current_target().platform == "cpu" else 3
    return lax.scan(fold, key, data.astype(jnp.uint32), unroll=unroll)[0]


def gumbel(
    key: UInt32[Array, "rows 2"], ids: Int32[Array, "#rows tokens"], dtype: DTypeLike
) -> Float[Array, "rows tokens"]:
    """Draws standard Gumbel noise, a function of key and token id only.

    The 32 random bits, equal to `jax.random.bits` at index `id`, are read as a uniform
    number near zero for large noise. A float32 is finest near zero, so that even the
    largest of 100,000 draws tie only once in about 40,000 times.

    Args:
      key: the key of each row's draw.
      ids: token ids.
      dtype: dtype of the noise; float32 and float64 noise differ by rounding only.

    Returns:
      Finite noise, at most 22.9.
    """
    return -jnp.log(exponential(key, ids, dtype))


def exponential(
    key: UInt32[Array, "rows 2"], ids: Int32[Array, "#rows tokens"], dtype: DTypeLike
) -> Float[Array, "rows tokens"]:
    """Draws standard exponential noise; `gumbel` is minus its logarithm.

    The id with the largest probability / noise is the id with the largest
    log-probability + Gumbel noise. Arguments as in `gumbel`.

    Returns:
      Noise in [1.1e-10, 16.7].
    """
    # A uniform number rounded to 1 would give -inf, and a token without rivals could
    # lose.
    return -jnp.log1p(-_below_one((_bits(key, ids).astype(dtype) + 0.5) * 2.0**-32))


def uniform(
    key: UInt32[Array, "rows 2"],
    ids: Int32[Array, "#rows n"],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "rows n"]:
    """Draws numbers in [0, 1), functions of key and id only.

    They have full resolution near zero, as for `gumbel`: all are below 1.0, none is
    below 0.0, and the fraction below a small chance is exact.

    Args:
      key: the key of each row's draw.
      ids: ids that make the draws of a row differ, such as the rank of a child.
      dtype: dtype of the numbers.
    """
    return _below_one(_bits(key, ids).astype(dtype) * 2.0**-32)


def _bits(
    key: UInt32[Array, "rows 2"], ids: Int32[Array, "#rows n"]
) -> UInt32[Array, "rows n"]:
    """Returns the 32 bits of `jax.random.bits` at index `id`."""
    counter = ids.astype(jnp.uint32)
    words = _threefry(key[:, :1], key[:, 1:], jnp.zeros_like(counter), counter)
    return words[0] ^ words[1]


def _below_one(numbers: Float[Array, "rows n"]) -> Float[Array, "rows n"]:
    """Replaces numbers that were rounded up to 1 by the largest number below 1."""
    return jnp.minimum(numbers, 1 - 2.0**-24)


type _Words = Array | np.ndarray
"""Numbers in uint32."""


def _threefry(
    key0: _Words, key1: _Words, x0: _Words, x1: _Words
) -> tuple[_Words, _Words]:
    """Computes Threefry-2x32 with 20 rounds on uint32 arrays of NumPy or JAX.

    Written out because XLA then fuses it into the pass over the logits. JAX's version
    is a loop on the CPU, 6 times slower over a large vocabulary.

    Source: Salmon et al. 2011, doi:10.1145/2063384.2063405.
    """
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0 = x0 + keys[0]
    x1 = x1 + keys[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(turn)) | (x1 >> np.uint32(32 - turn)))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
