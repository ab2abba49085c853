"""Hidden Markov models over tokens: forward filter, entropy rate, samples.

A hidden state follows a Markov chain and emits one token at each step. The forward
filter keeps the probability of each state given the tokens so far.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Int, Integer

from scaling.corpora.languages import markov

_MAX_BLOCKS = 2**20


class HiddenChain(NamedTuple):
    """A hidden Markov model.

    Attributes:
      moves: transition probabilities.
      writes: emission probabilities of the tokens in each state.
      share: stationary probability of each state.
    """

    moves: Float64[np.ndarray, "states states"]
    writes: Float64[np.ndarray, "states tokens"]
    share: Float64[np.ndarray, " states"]


class EntropyRate(NamedTuple):
    """An entropy rate in nats per token.

    Attributes:
      mean: the estimate.
      se: its standard error.
    """

    mean: float
    se: float


def make_hidden_chain(
    moves: Float[np.ndarray, "states states"],
    writes: Float[np.ndarray, "states tokens"],
) -> HiddenChain:
    """Makes a model from transition and emission probabilities."""
    return HiddenChain(moves, writes, markov.stationary_distribution(_states(moves)))


def random_rows(
    uniforms: Float[np.ndarray, "rows columns"], sharpness: float
) -> Float[np.ndarray, "rows columns"]:
    """Makes random distributions: normalized powers of exponential numbers."""
    weights = (-np.log1p(-uniforms)) ** sharpness
    return weights / weights.sum(1, keepdims=True)


def sample_hidden_chain(
    hidden: HiddenChain, num_tokens: int, random: np.random.Generator
) -> Int[np.ndarray, " tokens"]:
    """Samples tokens, from a state drawn from the stationary distribution."""
    uniforms = random.random((num_tokens + 1, 2))
    start = _choose(hidden.share[None], uniforms[:1, 0])[0]
    states = markov.sample_chain(_states(hidden.moves), int(start), uniforms[1:, 0])
    tokens = np.empty(num_tokens, np.int64)
    for state in range(len(hidden.share)):
        mask = states == state
        tokens[mask] = _choose(hidden.writes[[state]], uniforms[1:, 1][mask])
    return tokens


def entropy_rate(
    hidden: HiddenChain,
    random: np.random.Generator,
    *,
    num_texts: int = 512,
    length: int = 1024,
    burn_in: int = 128,
) -> EntropyRate:
    """Estimates the entropy rate: the entropy of a token given all tokens before it.

    The entropy of the filter's prediction is exact at every position. It is averaged
    over positions of independent texts, without the first positions, where the filter
    has seen fewer tokens.

    Args:
      hidden: the model.
      random: source of random numbers.
      num_texts: number of texts, at least 2; the standard error is that of their means.
      length: tokens of each text.
      burn_in: positions at the start of a text that are not averaged; below `length`.

    Source: Cover and Thomas, Elements of Information Theory, section 4.5: the
    filter's prediction approaches the rate from above.
    """
    text = np.stack(
        [sample_hidden_chain(hidden, length, random) for _ in range(num_texts)]
    )
    belief = np.broadcast_to(hidden.share, (num_texts, len(hidden.share)))
    entropies = np.zeros(num_texts)
    for t in range(length):
        expected = belief @ hidden.writes
        if t >= burn_in:
            entropies += markov.row_entropies(expected)
        belief = _filtered(hidden, belief, text[:, t])
    entropies /= length - burn_in
    return EntropyRate(
        float(entropies.mean()), float(entropies.std(ddof=1) / num_texts**0.5)
    )


def hidden_conditional_entropies(
    hidden: HiddenChain, max_order: int = 2
) -> tuple[float, ...]:
    """Returns entropies of a token given the last 0, ..., `max_order` tokens, in nats.

    Stops early if the number of token sequences exceeds a limit.
    """
    num_tokens = hidden.writes.shape[1]
    joint = hidden.share[None]  # token sequences, next state
    entropies = []
    before = 0.0
    for length in range(1, max_order + 2):
        if num_tokens**length > _MAX_BLOCKS:
            break
        joint = (joint[:, None] * hidden.writes.T).reshape(-1, len(hidden.share))
        total = markov.entropy(joint.sum(1))
        entropies.append(total - before)
        joint = joint @ hidden.moves
        before = total
    return tuple(entropies)


def hidden_code_lengths(
    hidden: HiddenChain, stream: Integer[np.ndarray, " tokens"]
) -> Float64[np.ndarray, " tokens"]:
    """Returns the negative log probability of each token by the filter, in nats."""
    belief = hidden.share[None]
    code_lengths = np.empty(len(stream))
    for t in range(len(stream)):
        token = stream[t : t + 1].astype(np.int64)
        code_lengths[t] = -np.log(belief @ hidden.writes[:, token[0]])[0]
        belief = _filtered(hidden, belief, token)
    return code_lengths


def _filtered(hidden: HiddenChain, belief: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Returns the probability of each next state after one more token."""
    joint = belief * hidden.writes[:, token].T
    return joint / joint.sum(1, keepdims=True) @ hidden.moves


def _states(moves: np.ndarray) -> markov.Chain:
    num = len(moves)
    return markov.make_chain(
        num, 1, np.broadcast_to(np.arange(num), moves.shape), moves
    )


def _choose(probs: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Returns the index of each uniform number in one row of probabilities."""
    cumulative = np.cumsum(probs[0])
    indices = np.searchsorted(cumulative, uniforms * cumulative[-1], side="right")
    return np.minimum(indices, len(cumulative) - 1)
