"""Token streams: real text, files of tokens, languages whose entropy is known.

`open_corpus` makes a `Corpus` of any of their configs: a stream to train on, one to
score, and
what is known of them. Training reads the stream in the order that `draw` computes.
"""

from pathlib import Path

from scaling.corpora import token_files, tokenizing_texts
from scaling.corpora.languages import LanguageConfig, language
from scaling.corpora.streams import Corpus, draw_windows, windows_per_epoch
from scaling.corpora.texts import (
    DOCUMENTATION,
    END,
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
    "END",
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
"""Whatever `open_corpus` takes; each has `vocab_size` and `num_unique_tokens`."""


def open_corpus(config: AnyCorpus, *, cache: Path | None = None) -> Corpus:
    """Makes the streams that a config describes, the same ones every time.

    Args:
      config: of text, of files of tokens, or of a language.
      cache: folder for what is costly to make again (byte pairs and what they make of
        a text); by default `tokenizing_texts.CACHE`. Deleting it costs time only.

    Returns:
      The corpus. Text is held out by document, each document ended by a token of its
      own; of a language the floor is known.

    Raises:
      ValueError: no text is found, a file cannot be read or holds what no model of
        `vocab_size` tokens takes, or there are fewer than `num_unique_tokens`.
    """
    if isinstance(config, CorpusConfig):
        return tokenizing_texts.open_text_corpus(config, cache=cache)
    if isinstance(config, TokenFileConfig):
        return token_files.open_token_files(config)
    return language.open_language(config)
