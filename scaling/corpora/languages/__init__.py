"""Languages whose entropy is known."""

from scaling.corpora.languages.language import LanguageConfig as LanguageConfig

__all__ = [
    "LanguageConfig",
    "language",
    "markov",
]
