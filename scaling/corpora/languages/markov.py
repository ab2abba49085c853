"""Markov chains of any order over tokens: their entropies, exactly, and long samples.

A context is the last `order` tokens, as one number in base `vocab_size`, the newest
token its lowest digit. Of each context only the tokens that may follow are stored.
"""

import itertools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int, Int32, Integer

_NUM_SEGMENTS = 2048
_MAX_ITERATIONS = 20_000


class Chain(NamedTuple):
    """A Markov chain.

    Attributes:
      vocab_size: number of tokens.
      order: tokens that a context has.
      tokens: which may follow each context, each once, in rising order; a context
        with fewer is filled up with tokens of probability 0.
      probs: their probabilities, which sum to 1.
    """

    vocab_size: int
    order: int
    tokens: Int32[np.ndarray, "contexts atoms"]
    probs: Float64[np.ndarray, "contexts atoms"]


def make_chain(
    vocab_size: int,
    order: int,
    tokens: Int[np.ndarray, "contexts atoms"],
    weights: Float[np.ndarray, "contexts atoms"],
) -> Chain:
    """Makes a chain of tokens that may repeat, whose weights then add up."""
    order_ = np.argsort(tokens, axis=1, kind="stable")
    tokens = np.take_along_axis(tokens, order_, 1)
    weights = np.take_along_axis(weights, order_, 1)
    # Weights of a repeated token are gathered at its last place.
    sums = np.cumsum(weights, axis=1)
    last = np.ones(tokens.shape, bool)
    last[:, :-1] = tokens[:, 1:] != tokens[:, :-1]
    upto = np.where(last, sums, 0.0)
    before = np.maximum.accumulate(upto, axis=1)
    before = np.concatenate([np.zeros_like(before[:, :1]), before[:, :-1]], axis=1)
    probs = np.where(last, sums - before, 0.0) / sums[:, -1:]
    return Chain(vocab_size, order, tokens.astype(np.int32), probs)


def stationary_distribution(chain: Chain) -> Float64[np.ndarray, " contexts"]:
    """The share of time that a long run spends in each context.

    By iterating half a step of the chain, which no period can keep from converging.

    Raises:
      ValueError: the shares depend on where the chain starts, or it mixes too slowly.
    """
    num = len(chain.tokens)
    share = _settled(chain, np.full(num, 1 / num))
    if np.abs(_settled(chain, np.eye(1, num)[0]) - share).sum() > 1e-6:
        raise ValueError(
            "what a long run of this chain is like depends on its start; take another "
            "seed, or less sharp probabilities"
        )
    return share


def _settled(
    chain: Chain, share: Float[np.ndarray, " contexts"]
) -> Float64[np.ndarray, " contexts"]:
    """Iterates until another thousand times would not move 1e-11 of the whole."""
    num_contexts = len(share)
    to = _following(chain, np.arange(num_contexts)[:, None], chain.tokens).ravel()
    for _ in range(_MAX_ITERATIONS):
        flow = (share[:, None] * chain.probs).ravel()
        moved = np.bincount(to, flow, minlength=num_contexts)
        change = float(np.abs(moved - share).sum())
        share = (moved + share) / 2
        if change < 1e-14:
            return share / share.sum()
    raise ValueError(f"the chain mixes too slowly: {change:.1e} moves at each step")


def chain_conditional_entropies(chain: Chain) -> tuple[float, ...]:
    """Least loss of those who see the last 0, 1, ..., `order` tokens, in nats.

    The last is the chain's entropy rate; `sum over contexts of share x entropy of what
    follows`, and for fewer tokens the same of the contexts put together.

    Source: Cover and Thomas, Elements of Information Theory, theorem 4.2.4.
    """
    share = stationary_distribution(chain)
    blocks, joint = [], share
    for length in range(chain.order, 0, -1):
        blocks.append(entropy(joint))
        # Summing over the oldest token leaves the blocks of one token fewer.
        joint = joint.reshape(chain.vocab_size, -1).sum(0) if length > 1 else joint
    blocks = [0.0, *reversed(blocks)]
    lower = [b - a for a, b in itertools.pairwise(blocks)]
    return (*lower, float(share @ row_entropies(chain.probs)))


def entropy(probs: Float[np.ndarray, "..."]) -> float:
    """Entropy of one distribution, in nats."""
    return float(row_entropies(np.reshape(probs, (1, -1)))[0])


def row_entropies(
    probs: Float[np.ndarray, "rows tokens"],
) -> Float[np.ndarray, " rows"]:
    """Entropies of the rows, in nats; they sum to 1 but for rounding."""
    safe = np.where(probs > 0, probs, 1.0)
    return -(probs * np.log(safe)).sum(-1)


def sample_chain(
    chain: Chain, start: int, uniforms: Float[np.ndarray, " tokens"]
) -> Int32[np.ndarray, " tokens"]:
    """Runs the chain: the token of each uniform number, given the context before it.

    The result is that of going from token to token; but the run is cut into segments
    that are run side by side from guessed contexts, and each is put right by running
    it again from where its neighbour ended, until it meets what it did before. Chains
    driven by the same numbers soon meet.

    Args:
      chain: to run.
      start: the context before the first token.
      uniforms: in [0, 1).
    """
    cumulative = np.cumsum(chain.probs, axis=1)
    # The last token that can follow gets what rounding left over.
    cumulative[cumulative >= cumulative[:, -1:] - 1e-12] = 2.0
    if chain.order == 0:
        place = np.searchsorted(cumulative[0], uniforms, side="right")
        return chain.tokens[0, place]
    num = len(uniforms)
    segments = max(1, min(_NUM_SEGMENTS, num // 64))
    length = -(-num // segments)
    # Time along the first axis, so that a step reads and writes whole rows.
    drive = np.zeros(segments * length)
    drive[:num] = uniforms
    drive = np.ascontiguousarray(drive.reshape(segments, length).T)
    contexts = np.full((length, segments), -1, np.int64)  # after each token
    found = np.zeros((length, segments), np.int32)
    begun = np.full(segments, start, np.int64)
    active = np.arange(segments)
    while len(active):
        now = begun[active]
        for t in range(length):
            below = cumulative[now] <= drive[t, active, None]
            token = chain.tokens[now, below.sum(1)]
            now = _following(chain, now, token)
            going = contexts[t, active] != now
            found[t, active], contexts[t, active] = token, now
            if not going.all():
                active, now = active[going], now[going]
                if not len(active):
                    break
        ends = np.concatenate([[start], contexts[-1, :-1]])
        active = np.flatnonzero(ends != begun)
        begun = ends
    return found.T.reshape(-1)[:num]


def chain_code_lengths(
    chain: Chain, stream: Integer[np.ndarray, " tokens"]
) -> Float64[np.ndarray, " rest"]:
    """Nats that the chain itself needs for each token but the first `order`."""
    stream = stream.astype(np.int64)
    num = len(stream) - chain.order
    context = np.zeros(num, np.int64)
    for back in range(chain.order):
        context = context * chain.vocab_size + stream[back : back + num]
    token = stream[chain.order :]
    pairs, which = np.unique(context * chain.vocab_size + token, return_inverse=True)
    context, token = np.divmod(pairs, chain.vocab_size)
    hit = chain.tokens[context] == token[:, None]
    return -np.log(np.where(hit, chain.probs[context], 0.0).sum(1))[which]


def _following(chain: Chain, context: np.ndarray, token: np.ndarray) -> np.ndarray:
    """The context after a token."""
    return (context * chain.vocab_size + token) % chain.vocab_size**chain.order
