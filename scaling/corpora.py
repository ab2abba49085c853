"""Real text found on the machine, as bytes: documents, their split, a stream of tokens.

A corpus is a list of documents in a fixed order. Whole documents are held out, chosen
by a hash of their names, so a file is on the same side on every machine that has it.
The tokens of a corpus are its documents' bytes, each document ended by `END`; training
reads windows of that stream at places that `draw` computes from (seed, step) alone.
"""

import dataclasses
import fnmatch
import glob
import hashlib
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, UInt16, UInt32

from jaxkv.tokenizing import NUM_BYTES

END = NUM_BYTES
"""The token after the last byte of a document; the only one that is not a byte."""
VOCAB_SIZE = NUM_BYTES + 1

# Not typical text: test suites (half of the library, much of it data), installed
# packages, code tables, generated help texts, a retired grammar's fixtures; and what
# describes one build of Python, its paths included.
_LIBRARY_EXCLUDES = (
    *("test/*", "tests/*", "*/test/*", "*/tests/*", "*/idle_test/*"),
    *("site-packages/*", "dist-packages/*", "encodings/*", "pydoc_data/*"),
    *("lib2to3/*", "config-*/*", "_sysconfigdata*", "__phello__/*"),
)
_NUM_ROUNDS = 24


class Document(NamedTuple):
    """One text.

    Attributes:
      name: its path relative to the corpus, with `/`: what the split goes by.
      path: where it lies.
      text: its bytes, valid UTF-8, at least one.
    """

    name: str
    path: Path
    text: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text, and how much of it is never trained on."""

    pattern: str = ""
    """A glob of text files (`**` crosses folders); empty: Python's standard library."""
    held_out: float = 0.05
    """Share of the documents that is held out, in (0, 1)."""

    def __post_init__(self):
        """Refuses a split that leaves a side empty."""
        if not 0 < self.held_out < 1:
            raise ValueError(f"{self.held_out=} must be in (0, 1)")


STANDARD_LIBRARY = CorpusConfig()


class Split(NamedTuple):
    """The two sides of a corpus, each in order of names."""

    train: list[Document]
    held_out: list[Document]


def load(config: CorpusConfig) -> Split:
    """Reads a corpus and splits it by document.

    Empty files, files that are not UTF-8, and copies of a text are left out.

    Raises:
      ValueError: no file matches, or a side of the split has no document.
    """
    if config.pattern:
        what, found = config.pattern, _matching(config.pattern)
    else:
        what, found = "the standard library", _standard_library()
    documents = _distinct(found)
    if not documents:
        raise ValueError(f"no text files in {what}")
    split = Split([], [])
    for document in documents:
        split[_place(document.name) < config.held_out].append(document)
    if not all(split):
        raise ValueError(
            f"{len(documents)} documents in {what} are too few to hold out "
            f"{config.held_out=}"
        )
    return split


def held_out_files(config: CorpusConfig = STANDARD_LIBRARY) -> list[Path]:
    """Lists the files that are never trained on."""
    return [document.path for document in load(config).held_out]


def describe(config: CorpusConfig) -> str:
    """Names the text, with the version of Python where it depends on it."""
    if config.pattern:
        return f"the files matching `{config.pattern}`"
    return f"the source of the standard library of Python {platform.python_version()}"


def num_bytes(documents: Iterable[Document]) -> int:
    """Counts the bytes of the texts, document ends not included."""
    return sum(len(document.text) for document in documents)


def tokens(documents: Iterable[Document]) -> UInt16[np.ndarray, " tokens"]:
    """Concatenates the documents' bytes, each document followed by `END`."""
    end = np.array([END], np.uint16)
    parts = []
    for document in documents:
        parts += [np.frombuffer(document.text, np.uint8).astype(np.uint16), end]
    stream = np.concatenate(parts) if parts else end[:0]
    if len(stream) >= 2**31:
        raise ValueError(
            f"{len(stream)} tokens are too many: under 2**31 are supported"
        )
    return stream


def windows_per_epoch(num_tokens: int, seq_len: int) -> int:
    """Counts the windows of one pass over a stream.

    Raises:
      ValueError: the stream is shorter than one window.
    """
    if num_tokens < seq_len + 1:
        raise ValueError(
            f"a corpus of {num_tokens} tokens is shorter than one window of "
            f"{seq_len=} tokens and the one after it"
        )
    return num_tokens // seq_len


def draw(
    stream: UInt16[Array, " tokens"],
    seed: Int[Array, ""],
    step: Int[Array, ""],
    *,
    batch_size: int,
    seq_len: int,
) -> Int32[Array, "batch_size {seq_len}+1"]:
    """Takes the windows of one training step.

    The stream is a ring, cut into windows at an offset that is new in each epoch; every
    epoch visits each window once, in an order of its own. The order is computed, not
    stored, so a step's windows depend on nothing but the arguments.

    Args:
      stream: the tokens of the training side.
      seed: of the order.
      step: how many batches came before this one, from 0.
      batch_size: number of windows.
      seq_len: predictions per window; a window has one token more.

    Returns:
      The windows' tokens.

    Source: the order is the swap-or-not shuffle of Hoang, Morris and Rogaway 2012
    (arXiv:1208.1176), with a murmur finalizer as its round function.
    """
    num_tokens = stream.shape[0]
    num_windows = windows_per_epoch(num_tokens, seq_len)
    index = step.astype(jnp.int32) * batch_size + jnp.arange(
        batch_size, dtype=jnp.int32
    )
    epoch, window = index // num_windows, index % num_windows

    def start(epoch, window):
        key = jax.random.fold_in(jax.random.key(seed), epoch)
        offset_key, order_key = jax.random.split(key)
        offset = jax.random.randint(offset_key, (), 0, num_tokens, jnp.int32)
        rounds = jax.random.bits(order_key, (_NUM_ROUNDS, 2), jnp.uint32)
        place = _shuffled(window.astype(jnp.uint32), rounds, num_windows)
        return place * jnp.uint32(seq_len) + offset.astype(jnp.uint32)

    # Without a sign the sum of two places, each below 2**31, fits in 32 bits.
    starts = jax.vmap(start)(epoch, window)[:, None] % jnp.uint32(num_tokens)
    place = starts + jnp.arange(seq_len + 1, dtype=jnp.uint32)[None]
    return stream[place % jnp.uint32(num_tokens)].astype(jnp.int32)


def _shuffled(
    index: UInt32[Array, ""], rounds: UInt32[Array, "rounds 2"], size: int
) -> UInt32[Array, ""]:
    """Maps an index to its place in a permutation of `size` elements."""
    size_ = jnp.uint32(size)

    def swap(index, round_):
        partner = (round_[0] % size_ + size_ - index) % size_
        bits = jnp.maximum(index, partner) ^ round_[1]
        for factor in (0x85EBCA6B, 0xC2B2AE35):
            bits = (bits ^ (bits >> jnp.uint32(15))) * jnp.uint32(factor)
        return jnp.where(bits >> jnp.uint32(31) == 1, partner, index), None

    return jax.lax.scan(swap, index, rounds)[0]


def _standard_library() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if not any(fnmatch.fnmatch(name, exclude) for exclude in _LIBRARY_EXCLUDES):
            yield name, path


def _matching(pattern: str) -> Iterator[tuple[str, Path]]:
    """Yields the files of a glob, named relative to its part without wildcards."""
    parts = PurePath(pattern).parts
    fixed = next((i for i, p in enumerate(parts) if glob.has_magic(p)), len(parts) - 1)
    root = Path(*parts[:fixed])
    for found in glob.iglob(pattern, recursive=True):
        path = Path(found)
        if path.is_file():
            yield path.relative_to(root).as_posix(), path


def _distinct(found: Iterable[tuple[str, Path]]) -> list[Document]:
    """Reads the files in order of their names, the first of equal texts only."""
    documents, seen = [], set()
    for name, path in sorted(found):
        text = path.read_bytes()
        digest = hashlib.sha256(text).digest()
        if text and digest not in seen and _is_utf8(text):
            seen.add(digest)
            documents.append(Document(name, path, text))
    return documents


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _place(name: str) -> float:
    """A number in [0, 1) that a name alone decides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64
