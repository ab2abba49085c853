"""Synthetic languages of known entropy."""

from scaling.corpora.languages.language import LanguageConfig

__all__ = [
    "LanguageConfig",
    "language",
    "markov",
]
