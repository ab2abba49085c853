"""Keys and noise, by request or seed, sample, position, purpose and token id alone.

Nothing here knows of rows, slots or the order of arrival, so no draw can depend on
them.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels import devices

SAMPLE, DRAFT, ACCEPT, RESIDUAL = range(4)
"""What a draw is for. The draws of one position differ by it: the token itself, a
draft's token, the verdict on a draft, the token after a draft was turned down."""


def request_key(seed: int | None, engine_seed: int, request_id: int) -> np.ndarray:
    """Makes a request's key: of the caller's seed, else of the engine's and the id.

    Runs on the host without JAX, so that submitting a request launches nothing. The
    bits are those of `jax.random.key(seed)`, or of `fold_in` of `engine_seed`'s key and
    the id, under "threefry2x32" and with 64-bit integers enabled.

    Args:
      seed: the caller's seed in [0, 2**64), or None.
      engine_seed: the engine's in [0, 2**64), used where `seed` is None.
      request_id: the caller's name for the request, in [0, 2**32), never its rank in
        the order of arrival.

    Returns:
      Key data, uint32 of shape [2].

    Raises:
      ValueError: a number is out of its range.
    """
    chosen = engine_seed if seed is None else seed
    if not 0 <= chosen < 2**64:
        raise ValueError(f"{seed=}, {engine_seed=} must be in [0, 2**64)")
    if not 0 <= request_id < 2**32:
        raise ValueError(f"{request_id=} must be in [0, 2**32)")
    # Arrays, not scalars: NumPy warns where a scalar wraps.
    words = np.array([chosen >> 32, chosen & 0xFFFFFFFF], np.uint32)
    if seed is not None:
        return words
    counter = np.array([0, request_id], np.uint32)
    return np.concatenate(_threefry(words[:1], words[1:], counter[:1], counter[1:]))


def request_keys(
    key: UInt32[Array, " 2"], request_id: Int32[Array, "*rows"]
) -> UInt32[Array, "*rows 2"]:
    """Keys of requests without a seed, of the engine's `key`: as `request_key`'s."""
    zero = jnp.zeros_like(request_id, jnp.uint32)
    words = _threefry(key[0], key[1], zero, request_id.astype(jnp.uint32))
    return jnp.stack(words, axis=-1)


def draw_key(
    key: UInt32[Array, "*rows 2"],
    sample: Int32[Array, "*rows"],
    position: Int32[Array, "*rows"],
    purpose: int,
) -> UInt32[Array, "*rows 2"]:
    """Folds a request's key into that of one draw: its sample, position and purpose.

    The position is where the drawn token will stand in the sequence; the purpose is
    `SAMPLE`, `DRAFT`, `ACCEPT` or `RESIDUAL`.

    Returns:
      Key data, what `jax.random.fold_in` gives for the three in turn.
    """

    def fold(key: Array, data: Array) -> tuple[Array, None]:
        zero = jnp.zeros_like(data)
        return jnp.stack(_threefry(key[..., 0], key[..., 1], zero, data), axis=-1), None

    data = jnp.stack([sample, position, jnp.full_like(position, purpose)])
    # A loop, so that one fold is compiled; a GPU would launch kernels for each trip.
    unroll = 1 if devices.current_target().platform == "cpu" else 3
    return lax.scan(fold, key, data.astype(jnp.uint32), unroll=unroll)[0]


def gumbel(
    key: UInt32[Array, "rows 2"], ids: Int32[Array, "#rows tokens"], dtype: Any
) -> Float[Array, "rows tokens"]:
    """Draws standard Gumbel noise, a function of (key, token id) alone.

    The 32 bits behind it, those that `jax.random.bits` gives at index `id`, count a
    uniform number *up from zero*, where large noise comes from. A float32 is finest
    there, so that even the largest of 100,000 tie about once in 40,000 draws.

    Args:
      key: the key of each row's draw.
      ids: token ids.
      dtype: of the noise; float32 and float64 noise differ by rounding alone.

    Returns:
      Finite noise, at most 22.9.
    """
    return -jnp.log(exponential(key, ids, dtype))


def exponential(
    key: UInt32[Array, "rows 2"], ids: Int32[Array, "#rows tokens"], dtype: Any
) -> Float[Array, "rows tokens"]:
    """Draws standard exponential noise, that of which `gumbel` is minus the logarithm.

    The id with the largest probability over noise is the one with the largest
    logarithm of it plus Gumbel noise. Arguments as in `gumbel`.

    Returns:
      Noise in [1.1e-10, 16.7].
    """
    # Rounded to 1, a token would get -inf and might lose a race it runs alone.
    return -jnp.log1p(-_below_one((_bits(key, ids).astype(dtype) + 0.5) * 2.0**-32))


def uniform(
    key: UInt32[Array, "rows 2"],
    ids: Int32[Array, "#rows n"],
    dtype: Any = jnp.float32,
) -> Float[Array, "rows n"]:
    """Draws numbers in [0, 1), functions of (key, id) alone.

    They count up from zero as those behind `gumbel` do: below 1.0 is every one of
    them, below 0.0 none, and below a small chance as many as there should be.

    Args:
      key: the key of each row's draw.
      ids: what tells the draws of a row apart, such as the rank of a child.
      dtype: of the numbers.
    """
    return _below_one(_bits(key, ids).astype(dtype) * 2.0**-32)


def _bits(
    key: UInt32[Array, "rows 2"], ids: Int32[Array, "#rows n"]
) -> UInt32[Array, "rows n"]:
    """The 32 bits that `jax.random.bits` gives at index `id`."""
    counter = ids.astype(jnp.uint32)
    words = _threefry(key[:, :1], key[:, 1:], jnp.zeros_like(counter), counter)
    return words[0] ^ words[1]


def _below_one(numbers: Float[Array, "rows n"]) -> Float[Array, "rows n"]:
    """Numbers at most 1, those that were rounded up to it just below."""
    return jnp.minimum(numbers, 1 - 2.0**-24)


def _threefry(key0: Any, key1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds, on uint32 arrays of NumPy or JAX alike.

    Spelled out because XLA then fuses it into the pass over the logits. JAX's own runs
    as a loop on the CPU, 6 times slower over a large vocabulary.

    Source: Salmon et al. 2011, doi:10.1145/2063384.2063405.
    """
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(turn)) | (x1 >> np.uint32(32 - turn)))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
