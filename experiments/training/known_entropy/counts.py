"""Learning a Zipf source by counting: the excess loss falls as (V - 1) / 2D.

Who estimates V probabilities from D independent tokens needs, beyond the entropy,
`(V - 1) / (2 D)` nats for the next token: half a nat for every free parameter, over D.
It is the mean that the lectures start with, in the words of a language model.
"""

from typing import NamedTuple

import numpy as np

from scaling.corpora.languages import markov
from scaling.corpora.languages.language import LanguageConfig, zipf
from scaling.fits import fit
from scaling.laws import published


class Counts(NamedTuple):
    """Excess losses of counting.

    Attributes:
      num_tokens: counted.
      excess: mean nats per token over the entropy.
      excess_se: its standard error.
      entropy: of the source.
      num_free: its free parameters, V - 1.
      slope: of ln excess against ln tokens, by a power law.
      slope_low: lower end of its 90 % interval.
      slope_high: upper end.
    """

    num_tokens: np.ndarray
    excess: np.ndarray
    excess_se: np.ndarray
    entropy: float
    num_free: int
    slope: float
    slope_low: float
    slope_high: float


def count(language: LanguageConfig, lengths: tuple[int, ...], repeats: int) -> Counts:
    """Counts texts of every length, and scores the counts by the true source.

    A count starts at one half, which is the least that costs no more, in the first
    order, for any source (Krichevsky and Trofimov 1981).
    """
    probs = zipf(language.vocab_size, language.exponent)
    entropy = markov.entropy(probs)
    random = np.random.default_rng([language.seed, 4])
    means, errors = [], []
    for length in lengths:
        counts = random.multinomial(length, probs, size=repeats) + 0.5
        estimated = counts / counts.sum(1, keepdims=True)
        excess = -np.log(estimated) @ probs - entropy
        means.append(excess.mean())
        errors.append(excess.std(ddof=1) / repeats**0.5)
    tokens, excess = np.array(lengths, float), np.array(means)
    power = fit.fit(
        published.find("power").over("num_tokens"),
        {"num_tokens": tokens, "loss": excess},
        loss="mse",
    )
    low, high = power.intervals["b"]
    slope = -power.coefficients["b"]
    return Counts(
        *(tokens, excess, np.array(errors), entropy, language.vocab_size - 1),
        *(slope, -high, -low),
    )
