"""Token streams of texts, token files and languages of known entropy.

`open_corpus` makes a `Corpus` from any corpus config: a training stream, a held-out
stream, and their known properties. `draw_windows` computes the order of training.
"""

from pathlib import Path

from scaling.corpora import token_files, tokenizing_texts
from scaling.corpora.languages import LanguageConfig, open_language
from scaling.corpora.streams import Corpus, draw_windows, windows_per_epoch
from scaling.corpora.texts import (
    DOCUMENTATION,
    END_TOKEN,
    STANDARD_LIBRARY,
    VOCAB_SIZE,
    CorpusConfig,
    Document,
    TextSplit,
    count_bytes,
    describe_source,
    held_out_files,
    load_documents,
)
from scaling.corpora.token_files import TokenFileConfig
from scaling.corpora.tokenizing_texts import corpus_tokenizer, encode_documents

__all__ = [
    "DOCUMENTATION",
    "END_TOKEN",
    "STANDARD_LIBRARY",
    "VOCAB_SIZE",
    "AnyCorpus",
    "Corpus",
    "CorpusConfig",
    "Document",
    "LanguageConfig",
    "TextSplit",
    "TokenFileConfig",
    "corpus_tokenizer",
    "count_bytes",
    "describe_source",
    "draw_windows",
    "encode_documents",
    "held_out_files",
    "load_documents",
    "open_corpus",
    "windows_per_epoch",
]

AnyCorpus = CorpusConfig | TokenFileConfig | LanguageConfig
"""Configs of `open_corpus`; each has `vocab_size` and `num_unique_tokens`."""


def open_corpus(config: AnyCorpus, *, cache: Path | None = None) -> Corpus:
    """Opens the corpus of a config; the streams are deterministic.

    Args:
      config: config of a text, of token files, or of a language.
      cache: folder for byte pairs and tokenized texts, which are slow to compute;
        `tokenizing_texts.CACHE` by default. It can be deleted at any time.

    Returns:
      The corpus. Text is held out by document, and every document ends with an end
      token; a language has a known floor.

    Raises:
      ValueError: no text is found, a file cannot be read or holds an id that is not
        below `vocab_size`, or there are fewer than `num_unique_tokens` tokens.
    """
    if isinstance(config, CorpusConfig):
        return tokenizing_texts.open_text_corpus(config, cache=cache)
    if isinstance(config, TokenFileConfig):
        return token_files.open_token_files(config)
    return open_language(config)
