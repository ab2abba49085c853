"""Languages whose entropy is known."""

from scaling.corpora.languages.language import LanguageConfig

__all__ = [
    "LanguageConfig",
    "language",
    "markov",
]
