"""The hashed k-gram mixture: a language with structure at several ranges.

    p(x | context) = sum over k of mixture[k] q_k(x | last k tokens)

Each q_k of each k tokens has four atoms, drawn from a base distribution by a hash of
the k tokens. So longer contexts always reduce the loss, rare contexts have nothing in
common with frequent ones, and no token is certain.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt64

from scaling.corpora.languages import markov

ATOM_WEIGHTS = (0.5, 0.25, 0.15, 0.1)


def make_kgram_chain(
    base: Float[np.ndarray, " tokens"], mixture: Sequence[float], *, seed: int
) -> markov.Chain:
    """Makes the language as a Markov chain whose order is the number of parts.

    Atoms are drawn from `base`, by a hash with this seed; `mixture` has the weight of
    each context length, from 1 token on.
    """
    size = len(base)
    order = len(mixture)
    context = np.arange(size**order, dtype=np.uint64)
    cumulative = np.cumsum(base)
    tokens = []
    weights = []
    for length, share in enumerate(mixture, 1):
        last = context % np.uint64(size**length)
        for atom, weight in enumerate(ATOM_WEIGHTS):
            place = hashed_uniform(last, (seed, length, atom)) * cumulative[-1]
            index = np.searchsorted(cumulative, place, side="right")
            tokens.append(np.minimum(index, size - 1))
            weights.append(np.full(len(context), share * weight))
    return markov.make_chain(size, order, np.stack(tokens, 1), np.stack(weights, 1))


def hashed_uniform(
    keys: UInt64[np.ndarray, " keys"], salt: Sequence[int]
) -> Float[np.ndarray, " keys"]:
    """Returns numbers in [0, 1) that depend on keys and salt only.

    Source: the finalizer of splitmix64, Steele, Lea and Flood 2014 (OOPSLA), figure 15.
    """
    bits = keys
    for extra in (*salt, 0):
        bits = bits + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = (bits ^ (bits >> np.uint64(31))) + np.uint64(extra)
    return (bits >> np.uint64(11)) * 2.0**-53
