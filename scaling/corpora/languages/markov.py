"""Markov chains of any order over tokens: exact entropies, and long samples.

A context is the last `order` tokens, as one number in base `vocab_size`, the newest
token its lowest digit. Only the tokens that may follow a context are stored.
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
      order: tokens of a context.
      tokens: tokens that may follow each context, without repetition, in ascending
        order; padded with tokens of probability 0.
      probs: probabilities of these tokens, which sum to 1.
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
    """Makes a chain from weights; weights of repeated tokens are added."""
    order_ = np.argsort(tokens, axis=1, kind="stable")
    tokens = np.take_along_axis(tokens, order_, 1)
    weights = np.take_along_axis(weights, order_, 1)
    # Weights of a repeated token are added at its last index.
    sums = np.cumsum(weights, axis=1)
    last = np.ones(tokens.shape, bool)
    last[:, :-1] = tokens[:, 1:] != tokens[:, :-1]
    upto = np.where(last, sums, 0.0)
    before = np.maximum.accumulate(upto, axis=1)
    before = np.concatenate([np.zeros_like(before[:, :1]), before[:, :-1]], axis=1)
    probs = np.where(last, sums - before, 0.0) / sums[:, -1:]
    return Chain(vocab_size, order, tokens.astype(np.int32), probs)


def stationary_distribution(chain: Chain) -> Float64[np.ndarray, " contexts"]:
    """Returns the stationary probability of each context.

    Iterates the average of the chain and the identity, which converges for periodic
    chains, too.

    Raises:
      ValueError: the distribution depends on the first context, or mixes too slowly.
    """
    num = len(chain.tokens)
    share = _settled(chain, np.full(num, 1 / num))
    if np.abs(_settled(chain, np.eye(1, num)[0]) - share).sum() > 1e-6:
        raise ValueError(
            "the stationary distribution of this chain depends on its start; take "
            "another seed, or less sharp probabilities"
        )
    return share


def _settled(
    chain: Chain, share: Float[np.ndarray, " contexts"]
) -> Float64[np.ndarray, " contexts"]:
    """Iterates until 1,000 more iterations would change less than 1e-11 in total."""
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
    """Returns entropies of a token given the last 0, ..., `order` tokens, in nats.

    The last is the chain's entropy rate, the sum over contexts of stationary
    probability times entropy of the next token; shorter contexts merge contexts.

    Source: Cover and Thomas, Elements of Information Theory, theorem 4.2.4.
    """
    share = stationary_distribution(chain)
    blocks = []
    joint = share
    for length in range(chain.order, 0, -1):
        blocks.append(entropy(joint))
        # Summing over the oldest token gives sequences of one token fewer.
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
    """Returns the entropies of rows, in nats; rows sum to 1 up to rounding."""
    safe = np.where(probs > 0, probs, 1.0)
    return -(probs * np.log(safe)).sum(-1)


def sample_chain(
    chain: Chain, start: int, uniforms: Float[np.ndarray, " tokens"]
) -> Int32[np.ndarray, " tokens"]:
    """Runs the chain: inverts the distribution of each token at a uniform number.

    The result is that of sampling token by token. The run is divided into segments that
    start from guessed contexts and are sampled in parallel. Each segment is sampled
    again from the end of the one before, until its context equals the earlier one:
    chains driven by the same numbers soon coincide.

    Args:
      chain: the chain.
      start: context before the first token.
      uniforms: numbers in [0, 1).
    """
    cumulative = np.cumsum(chain.probs, axis=1)
    # The last possible token gets the remainder of rounding.
    cumulative[cumulative >= cumulative[:, -1:] - 1e-12] = 2.0
    if chain.order == 0:
        place = np.searchsorted(cumulative[0], uniforms, side="right")
        return chain.tokens[0, place]
    num = len(uniforms)
    segments = max(1, min(_NUM_SEGMENTS, num // 64))
    length = -(-num // segments)
    # Time is the first axis, so that a step reads and writes whole rows.
    drive = np.zeros(segments * length)
    drive[:num] = uniforms
    drive = np.ascontiguousarray(drive.reshape(segments, length).T)
    contexts = np.full((length, segments), -1, np.int64)  # after each token
    tokens = np.zeros((length, segments), np.int32)
    begun = np.full(segments, start, np.int64)
    active = np.arange(segments)
    while len(active):
        now = begun[active]
        for t in range(length):
            below = cumulative[now] <= drive[t, active, None]
            token = chain.tokens[now, below.sum(1)]
            now = _following(chain, now, token)
            going = contexts[t, active] != now
            tokens[t, active] = token
            contexts[t, active] = now
            if not going.all():
                active = active[going]
                now = now[going]
                if not len(active):
                    break
        ends = np.concatenate([[start], contexts[-1, :-1]])
        active = np.flatnonzero(ends != begun)
        begun = ends
    return tokens.T.reshape(-1)[:num]


def chain_code_lengths(
    chain: Chain, stream: Integer[np.ndarray, " tokens"]
) -> Float64[np.ndarray, " rest"]:
    """Returns the negative log probability of each token after the first `order`."""
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
    """Returns the context after a token."""
    return (context * chain.vocab_size + token) % chain.vocab_size**chain.order
