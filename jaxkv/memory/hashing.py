"""Hashes of token sequences, a page at a time, each chained to the one before.

They only say where to look: whoever finds something by its hash compares what it holds.
So the hash need not withstand an adversary, who could at most fill one bucket.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

_LANES = np.array([0x243F6A88, 0x85A308D3], np.uint32)
"""Sets the two words of a hash apart. Binary digits of pi."""
_GOLDEN = np.uint32(0x9E3779B9)
"""Sets the places in a page apart: odd, so that its multiples repeat after 2**32."""


def start(salt: UInt32[Array, " n"]) -> UInt32[Array, "n 2"]:
    """Hashes the empty sequence under each salt."""
    return _scramble(salt[:, None] ^ _LANES[None, :])


def extend(
    before: UInt32[Array, "n 2"], tokens: Int32[Array, "n page_size"]
) -> UInt32[Array, "n 2"]:
    """Hashes sequences that go on by one page.

    Args:
      before: hash of what stands before the page.
      tokens: tokens of the page, in order.

    Returns:
      The hashes, of 64 bits in two words. They depend on every token, its place and
      all pages before, and are the same on every machine.
    """
    # Every place permutes the token ids in its own way. Then the words can be summed,
    # in any order, where a hash that takes its tokens in turn would need a loop.
    place = jnp.arange(tokens.shape[1], dtype=jnp.uint32) * _GOLDEN
    mask = _scramble(place[:, None] ^ _LANES[None, :])
    words = _scramble(tokens.astype(jnp.uint32)[:, :, None] ^ mask[None, :, :])
    return _scramble(before + jnp.sum(words, axis=1, dtype=jnp.uint32))


def _scramble(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Permutes the 32-bit words so that each bit depends on all.

    Source: the finaliser of Appleby's MurmurHash3 (2011), in the public domain.
    """
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))
