"""Tokenization of documents into streams, by bytes or by byte pairs.

Byte pairs and the streams that they give are cached, in a folder named by the digest of
its inputs. The folder is written under another name and then renamed.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt16

from jaxkv import files
from jaxkv.text import (
    END_ID,
    END_TEXT,
    TOKENIZERS_VERSION,
    ByteTokenizer,
    Tokenizer,
    encode_texts,
    train_tokenizer,
)
from scaling.corpora import streams, texts
from scaling.corpora.texts import END_TOKEN, CorpusConfig, Document, TextSplit

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "jaxkv").expanduser()
"""Default cache folder of byte pairs."""


def open_text_corpus(
    config: CorpusConfig, *, cache: Path | None = None
) -> streams.Corpus:
    """Makes the streams of a text; `cache` is the folder of byte pairs.

    Raises:
      ValueError: see `texts.load_documents` and `streams.make_corpus`.
    """
    split = texts.load_documents(config)
    if config.tokenizer == "bytes":
        both = (encode_documents(split.train), encode_documents(split.held_out))
        end = END_TOKEN
    else:
        _, *both = _byte_pairs(split, config.vocab_size, cache or CACHE)
        end = END_ID
    train, held_out = both
    if config.num_unique_tokens:
        train = _reordered(train, split.train, end)
    return streams.make_corpus(
        train,
        held_out,
        vocab_size=config.vocab_size,
        name=texts.describe_source(config),
        num_unique_tokens=config.num_unique_tokens,
        bytes_per_token=texts.count_bytes(split.held_out) / len(held_out),
    )


def corpus_tokenizer(
    config: CorpusConfig, *, cache: Path | None = None
) -> ByteTokenizer | Tokenizer:
    """Returns the tokenizer of a text corpus."""
    if config.tokenizer == "bytes":
        return ByteTokenizer(config.vocab_size)
    return _byte_pairs(texts.load_documents(config), config.vocab_size, cache or CACHE)[
        0
    ]


def encode_documents(documents: Iterable[Document]) -> UInt16[np.ndarray, " tokens"]:
    """Concatenates the documents' bytes, each document followed by `END_TOKEN`."""
    end = np.array([END_TOKEN], np.uint16)
    parts = []
    for document in documents:
        parts += [np.frombuffer(document.text, np.uint8).astype(np.uint16), end]
    return np.concatenate(parts) if parts else end[:0]


def _byte_pairs(
    split: TextSplit, vocab_size: int, cache: Path
) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Reads byte pairs from the cache, or learns them and tries to cache them.

    Returns:
      The tokenizer, and the streams of both sides.
    """
    key = hashlib.sha256(f"1 {TOKENIZERS_VERSION} {vocab_size}".encode())
    for side in split:
        key.update(f" {len(side)} ".encode())
        for document in side:
            key.update(hashlib.sha256(document.text).digest())
    folder = Path(cache) / key.hexdigest()
    with contextlib.suppress(OSError, ValueError):
        text = (folder / "tokenizer.json").read_text("utf-8")
        settings = {"eos_token": END_TEXT}
        read = Tokenizer.from_json(text, eos_ids=(END_ID,), settings=settings)
        train, held_out = (
            np.load(folder / f"{x}.npy", mmap_mode="r") for x in TextSplit._fields
        )
        return read, train, held_out
    learnt = train_tokenizer((x.text.decode() for x in split.train), vocab_size)

    def stream(side: Sequence[Document]) -> np.ndarray:
        parts = encode_texts(learnt, [x.text.decode() for x in side])
        ended = [np.array([*ids, END_ID], np.uint16) for ids in parts]
        return np.concatenate(ended)

    train = stream(split.train)
    held_out = stream(split.held_out)
    # A failed write is ignored: byte pairs are learned again next time. If another
    # process was faster, it has written the same files.
    with contextlib.suppress(ValueError), files.replace_folder(folder) as new:
        for name, text in learnt.files().items():
            (new / name).write_text(text, encoding="utf-8")
        np.save(new / "train.npy", train)
        np.save(new / "held_out.npy", held_out)
    return learnt, train, held_out


def _reordered(
    stream: np.ndarray, documents: Sequence[Document], end: int
) -> np.ndarray:
    """Sorts the documents of a stream by their hashed positions.

    Sorted by name, the first ones would all be of one folder.
    """
    after = np.flatnonzero(stream == end) + 1
    parts = np.split(stream, after[:-1])
    pairs = sorted(
        zip(documents, parts, strict=True),
        key=lambda pair: texts.document_position(pair[0].name),
    )
    return np.concatenate([part for _, part in pairs])
