"""Made-up languages whose entropy is known, with the best losses of lesser readers.

    zipf           tokens drawn one by one: p(i) ~ 1 / i^exponent
    markov         any token may follow the last `order` ones, with random probabilities
    kgram          a mixture over k of few tokens that may follow the last k ones
    hidden_markov  tokens of a hidden state that moves by a Markov chain

No model can score below a language's floor, its entropy per token, but by chance, or by
seeing what it should not. A reader of only the last k tokens can come no lower than the
k-th of its `optimal_loss`. The entropies of the first three are computed from
stationary distributions; that of `hidden_markov` is sampled and has a standard error.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from jaxkv import validation
from scaling.corpora import streams
from scaling.corpora.languages import hidden_markov, kgrams, markov

MAX_CONTEXTS = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Which language, and how much of it is written."""

    kind: Literal["zipf", "markov", "kgram", "hidden_markov"]
    """See the module."""
    vocab_size: int = 16
    """Number of tokens."""
    exponent: float = 1.0
    """Of Zipf's law: of the tokens of `zipf_probabilities`, of the candidates of
    `kgram`."""
    sharpness: float = 2.0
    """Of `markov` and `hidden_markov`: probabilities are powers of exponential numbers;
    0 makes them equal, 1 uniform over all distributions, more of it few likely."""
    order: int = 1
    """Tokens that the next one of `markov` depends on."""
    mixture: tuple[float, ...] = (0.30, 0.35, 0.35)
    """Of `kgram`: shares of what follows the last 1, 2, ... tokens; they sum to 1."""
    num_states: int = 8
    """Of `hidden_markov`."""
    seed: int = 0
    """Of the language and of what is written in it."""
    num_tokens: int = 2_000_000
    """To train on; a shorter text is the beginning of a longer."""
    num_held_out: int = 262_144
    """To score."""
    num_unique_tokens: int = 0
    """Training reads the first so many tokens, again and again; 0: all there are."""

    def __post_init__(self):
        """Refuses languages that cannot be, or whose entropy cannot be computed."""
        if self.kind not in ("zipf", "markov", "kgram", "hidden_markov"):
            raise ValueError(f"kind={self.kind!r} is no kind of language")
        validation.within(self, "vocab_size", low=2, high=2**16)
        validation.at_least(self, "order", "num_states", "num_tokens", "num_held_out")
        amounts = ("exponent", "sharpness", "seed", "num_unique_tokens")
        validation.within(self, *amounts, low=0, high=math.inf, ends="[)")
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
        """Distributions of the next token that there are."""
        orders = {"zipf": 0, "markov": self.order, "kgram": len(self.mixture)}
        if self.kind == "hidden_markov":
            return self.num_states * max(self.num_states, self.vocab_size)
        # Where any token may follow, all of them are stored.
        return self.vocab_size ** (orders[self.kind] + (self.kind == "markov"))


class OptimalLoss(NamedTuple):
    """The least losses there are, in nats per token.

    Attributes:
      by_order: of readers of the last 0, 1, 2, ... tokens: uni-, bi-, trigram...
      floor: of readers of all.
      floor_se: standard error of that; 0 where it was computed.
    """

    by_order: tuple[float, ...]
    floor: float
    floor_se: float


def open_language(config: LanguageConfig) -> streams.Corpus:
    """Writes a text to train on and one to score.

    Raises:
      ValueError: the language has no single entropy, or `num_unique_tokens` is more
        than there are.
    """
    found = optimal_loss(config)
    return streams.make_corpus(
        _written(config, config.num_tokens, 1),
        _written(config, config.num_held_out, 2),
        vocab_size=config.vocab_size,
        name=f"{config.kind} language of {config.vocab_size} tokens",
        num_unique_tokens=config.num_unique_tokens,
        floor=found.floor,
        floor_se=found.floor_se,
    )


def optimal_loss(config: LanguageConfig) -> OptimalLoss:
    """Computes the least losses of a language."""
    language = dataclasses.replace(
        config, num_tokens=1, num_held_out=1, num_unique_tokens=0
    )
    return _optimal_loss(language)


def code_lengths(
    config: LanguageConfig, stream: Integer[np.ndarray, " tokens"]
) -> Float[np.ndarray, " rest"]:
    """Nats that who knows the language needs for each token of a text in it.

    The mean differs from the floor by chance; a model's loss on the same tokens shares
    that chance, so the difference to this is known better than that to the floor.

    Returns:
      Of the tokens past the first context: `stream[-len(result):]`.
    """
    if config.kind == "hidden_markov":
        return hidden_markov.hidden_code_lengths(_hidden(config), stream)
    return markov.chain_code_lengths(_chain(config), stream)


def zipf_probabilities(
    vocab_size: int, exponent: float
) -> Float[np.ndarray, " tokens"]:
    """Probabilities that fall with a power of the rank."""
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
        probs, order = zipf_probabilities(size, config.exponent)[None], 0
    else:
        order = config.order
        drawn = _random(config, 0).random((size**order, size))
        probs = hidden_markov.random_rows(drawn, config.sharpness)
    tokens = np.broadcast_to(np.arange(size), probs.shape)
    return markov.make_chain(size, order, tokens, probs)


def _hidden(config: LanguageConfig) -> hidden_markov.HiddenChain:
    random, states = _random(config, 0), config.num_states
    moves = hidden_markov.random_rows(random.random((states,) * 2), config.sharpness)
    drawn = random.random((states, config.vocab_size))
    return hidden_markov.make_hidden_chain(
        moves, hidden_markov.random_rows(drawn, config.sharpness)
    )


def _written(config: LanguageConfig, num_tokens: int, part: int) -> np.ndarray:
    random = _random(config, part)
    if config.kind == "hidden_markov":
        found = hidden_markov.sample_hidden_chain(_hidden(config), num_tokens, random)
    else:
        chain = _chain(config)
        share = np.cumsum(markov.stationary_distribution(chain))
        start = min(int(np.searchsorted(share, random.random())), len(share) - 1)
        found = markov.sample_chain(chain, start, random.random(num_tokens))
    return found.astype(np.uint16)


def _random(config: LanguageConfig, part: int) -> np.random.Generator:
    """A source of its own for each part; only its uniform numbers are used."""
    return np.random.default_rng([config.seed, part])
