"""Synthetic languages of known entropy, with the optimal loss of shorter contexts.

    zipf           independent tokens: p(i) ~ 1 / i^exponent
    markov         random probabilities of all tokens given the last `order` tokens
    kgram          mixture over k of few candidates given the last k tokens
    hidden_markov  emissions of a hidden state that follows a Markov chain

A model cannot score below a language's floor, its entropy per token, except by chance
or by leaked tokens. A model of only the last k tokens has the k-th loss of
`optimal_loss` as its floor. The entropies of the first three are computed from
stationary distributions; that of `hidden_markov` is sampled and has a standard error.
"""

import dataclasses
import functools
from typing import Annotated, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from jaxkv import validation
from jaxkv.validation import ConfigRecord, PositiveInt, Range
from scaling.corpora import streams
from scaling.corpora.languages import hidden_markov, kgrams, markov

MAX_CONTEXTS = 2**20


class LanguageConfig(ConfigRecord):
    """A synthetic language, and the lengths of its texts."""

    kind: Literal["zipf", "markov", "kgram", "hidden_markov"]
    """Kind of language, see the module."""
    vocab_size: Annotated[int, Range(2, 2**16)] = 16
    """Number of tokens."""
    exponent: Annotated[float, Range(0, ends="[)")] = 1.0
    """Exponent of Zipf's law: of the tokens of `zipf`, of the candidates of `kgram`."""
    sharpness: Annotated[float, Range(0, ends="[)")] = 2.0
    """For `markov` and `hidden_markov`: power of exponential random numbers; 0 gives
    equal probabilities, 1 uniformly random distributions, more concentrates them."""
    order: PositiveInt = 1
    """For `markov`: tokens of a context."""
    mixture: tuple[float, ...] = (0.30, 0.35, 0.35)
    """For `kgram`: weights of contexts of 1, 2, ... tokens; they sum to 1."""
    num_states: PositiveInt = 8
    """For `hidden_markov`: number of states."""
    seed: Annotated[int, Range(0, ends="[)")] = 0
    """Seed of the language and of its texts."""
    num_tokens: PositiveInt = 2_000_000
    """Tokens of the training text; a shorter text is the beginning of a longer one."""
    num_held_out: PositiveInt = 262_144
    """Tokens of the held-out text."""
    num_unique_tokens: Annotated[int, Range(0, ends="[)")] = 0
    """Training repeats the first `num_unique_tokens` tokens; 0 means all."""

    def __post_init__(self) -> None:
        """Validates the fields; there may be at most `MAX_CONTEXTS` contexts."""
        super().__post_init__()
        if self.kind not in ("zipf", "markov", "kgram", "hidden_markov"):
            raise ValueError(f"kind={self.kind!r} is no kind of language")
        if min(self.mixture, default=0) <= 0 or abs(sum(self.mixture) - 1) > 1e-9:
            raise ValueError(
                f"mixture={self.mixture!r} must be positive shares that sum to 1"
            )
        if self.num_contexts > MAX_CONTEXTS:
            raise ValueError(
                f"{self.num_contexts} contexts of {self.kind} are too many: at most "
                f"{MAX_CONTEXTS}"
            )

    @property
    def num_contexts(self) -> int:
        """Number of distributions of the next token."""
        orders = {"zipf": 0, "markov": self.order, "kgram": len(self.mixture)}
        if self.kind == "hidden_markov":
            return self.num_states * max(self.num_states, self.vocab_size)
        # If any token may follow, probabilities of all tokens are stored.
        return self.vocab_size ** (orders[self.kind] + (self.kind == "markov"))


class OptimalLoss(NamedTuple):
    """Optimal losses of a language in nats per token.

    Attributes:
      by_order: losses given the last 0, 1, 2, ... tokens: unigram, bigram, trigram...
      floor: loss given all earlier tokens, the entropy rate.
      floor_se: standard error of the floor; 0 if it is computed exactly.
    """

    by_order: tuple[float, ...]
    floor: float
    floor_se: float


def open_language(config: LanguageConfig) -> streams.Corpus:
    """Samples a training text and a held-out text.

    Raises:
      ValueError: the language has no unique entropy, or `num_unique_tokens` is more
        than `num_tokens`.
    """
    optimum = optimal_loss(config)
    return streams.make_corpus(
        _written(config, config.num_tokens, 1),
        _written(config, config.num_held_out, 2),
        vocab_size=config.vocab_size,
        name=f"{config.kind} language of {config.vocab_size} tokens",
        num_unique_tokens=config.num_unique_tokens,
        floor=optimum.floor,
        floor_se=optimum.floor_se,
    )


def optimal_loss(config: LanguageConfig) -> OptimalLoss:
    """Computes the optimal losses of a language."""
    language = dataclasses.replace(
        config, num_tokens=1, num_held_out=1, num_unique_tokens=0
    )
    return _optimal_loss(language)


def code_lengths(
    config: LanguageConfig, stream: Integer[np.ndarray, " tokens"]
) -> Float[np.ndarray, " rest"]:
    """Returns the negative log probability of each token by the language, in nats.

    The mean differs from the floor by chance. A model's loss on the same tokens has the
    same chance, so its difference to this mean has a smaller error than its difference
    to the floor.

    Returns:
      Values of the tokens after the first context: `stream[-len(result):]`.
    """
    if config.kind == "hidden_markov":
        return hidden_markov.hidden_code_lengths(_hidden(config), stream)
    return markov.chain_code_lengths(_chain(config), stream)


@validation.checks_numbers(exponent="[0, 100]")
def zipf_probabilities(
    vocab_size: int, exponent: float
) -> Float[np.ndarray, " tokens"]:
    """Returns probabilities proportional to a power of the rank."""
    weights = np.arange(1, vocab_size + 1, dtype=float) ** -exponent
    return weights / weights.sum()


@functools.lru_cache(maxsize=8)
def _optimal_loss(config: LanguageConfig) -> OptimalLoss:
    if config.kind == "hidden_markov":
        hidden = _hidden(config)
        floor, se = hidden_markov.entropy_rate(hidden, _random(config, 3))
        return OptimalLoss(
            hidden_markov.hidden_conditional_entropies(hidden), floor, se
        )
    by_order = markov.chain_conditional_entropies(_chain(config))
    return OptimalLoss(by_order, by_order[-1], 0.0)


def _chain(config: LanguageConfig) -> markov.Chain:
    size = config.vocab_size
    if config.kind == "kgram":
        base = zipf_probabilities(size, config.exponent)
        return kgrams.make_kgram_chain(base, config.mixture, seed=config.seed)
    if config.kind == "zipf":
        probs = zipf_probabilities(size, config.exponent)[None]
        order = 0
    else:
        order = config.order
        uniforms = _random(config, 0).random((size**order, size))
        probs = hidden_markov.random_rows(uniforms, config.sharpness)
    tokens = np.broadcast_to(np.arange(size), probs.shape)
    return markov.make_chain(size, order, tokens, probs)


def _hidden(config: LanguageConfig) -> hidden_markov.HiddenChain:
    random = _random(config, 0)
    states = config.num_states
    moves = hidden_markov.random_rows(random.random((states,) * 2), config.sharpness)
    uniforms = random.random((states, config.vocab_size))
    return hidden_markov.make_hidden_chain(
        moves, hidden_markov.random_rows(uniforms, config.sharpness)
    )


def _written(config: LanguageConfig, num_tokens: int, part: int) -> np.ndarray:
    random = _random(config, part)
    if config.kind == "hidden_markov":
        tokens = hidden_markov.sample_hidden_chain(_hidden(config), num_tokens, random)
    else:
        chain = _chain(config)
        share = np.cumsum(markov.stationary_distribution(chain))
        start = min(int(np.searchsorted(share, random.random())), len(share) - 1)
        tokens = markov.sample_chain(chain, start, random.random(num_tokens))
    return tokens.astype(np.uint16)


def _random(config: LanguageConfig, part: int) -> np.random.Generator:
    """Returns the random source of a part; only its uniform numbers are used."""
    return np.random.default_rng([config.seed, part])
