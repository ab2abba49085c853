"""Training corpora: tokenized texts, token files, synthetic languages."""

from scaling.corpora.corpora import CorpusConfig
from scaling.corpora.streams import Corpus

__all__ = [
    "Corpus",
    "CorpusConfig",
    "corpora",
    "languages",
    "streams",
]
