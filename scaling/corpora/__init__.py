"""What models learn from: texts as tokens, and synthetic languages."""

from scaling.corpora.corpora import CorpusConfig as CorpusConfig
from scaling.corpora.streams import Corpus as Corpus

__all__ = [
    "Corpus",
    "CorpusConfig",
    "corpora",
    "languages",
    "streams",
]
