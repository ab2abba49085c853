"""Text corpora from files of this machine, and their held-out documents.

Whole documents are held out, chosen by a hash of their names, so a file is on the same
side on every machine, for any set of other files.
"""

import fnmatch
import glob
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Annotated, Literal, NamedTuple

from jaxkv.text import NUM_BYTES
from jaxkv.validation import ConfigRecord, NonNegativeInt, Range

END_TOKEN = NUM_BYTES
"""Last byte token: ends a document, and is the only token that is no byte."""
VOCAB_SIZE = NUM_BYTES + 1
"""Vocabulary size of byte tokens."""
MAX_VOCAB_SIZE = 2**16

# Excluded as atypical: test suites (half of the library, much of it data), installed
# packages, code tables, generated help texts, fixtures of a retired grammar; and
# descriptions of one build of Python, with its paths.
_LIBRARY_EXCLUDES = (
    "test/*",
    "tests/*",
    "*/test/*",
    "*/tests/*",
    "*/idle_test/*",
    "site-packages/*",
    "dist-packages/*",
    "encodings/*",
    "pydoc_data/*",
    "lib2to3/*",
    "config-*/*",
    "_sysconfigdata*",
    "__phello__/*",
)
_DOCUMENTATION_SUFFIXES = (".txt", ".md", ".rst")


class Document(NamedTuple):
    """One text file.

    Attributes:
      name: path relative to the corpus, with `/`; decides the side of the split.
      path: location of the file.
      text: bytes of the file, valid UTF-8, at least one.
    """

    name: str
    path: Path
    text: bytes


class CorpusConfig(ConfigRecord):
    """A text corpus, its tokenizer, and its held-out share."""

    pattern: str = ""
    """Glob of text files (`**` matches folders); "" means Python's standard library,
    `documentation` the documentation folders of this machine."""
    held_out: Annotated[float, Range(0, 1, "()")] = 0.05
    """Share of documents that is held out, in (0, 1)."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """Tokenizer; `bpe` learns byte pairs from the training side."""
    vocab_size: int = VOCAB_SIZE
    """Vocabulary size: 257 for bytes, in (257, 65536] for byte pairs."""
    num_unique_tokens: NonNegativeInt = 0
    """Training repeats `num_unique_tokens` tokens; 0 means all. The order of documents
    is hashed, and a smaller number is the beginning of a larger one."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.tokenizer == "bytes" and self.vocab_size != VOCAB_SIZE:
            raise ValueError(
                f"vocab_size={self.vocab_size} of bytes must be {VOCAB_SIZE}"
            )
        if self.tokenizer == "bpe" and not (
            VOCAB_SIZE < self.vocab_size <= MAX_VOCAB_SIZE
        ):
            raise ValueError(
                f"vocab_size={self.vocab_size} of byte pairs must be in "
                f"({VOCAB_SIZE}, {MAX_VOCAB_SIZE}]"
            )


STANDARD_LIBRARY = CorpusConfig()
DOCUMENTATION = CorpusConfig(pattern="documentation")


class TextSplit(NamedTuple):
    """The two sides of a corpus, each sorted by name."""

    train: list[Document]
    held_out: list[Document]


def load_documents(config: CorpusConfig) -> TextSplit:
    """Reads a corpus and splits it by document.

    Empty files, files that are not UTF-8, and duplicates are skipped.

    Raises:
      ValueError: no file matches, one cannot be read, or a side of the split has no
        document.
    """
    if config.pattern == DOCUMENTATION.pattern:
        what = "the documentation folders"
        entries = [*_documentation()]
    elif config.pattern:
        what = config.pattern
        entries = [*_matching(config.pattern)]
    else:
        what = "the standard library"
        entries = [*_standard_library()]
    documents = []
    digests = set()
    for name, path in sorted(entries):
        try:
            text = path.read_bytes()
            text.decode()
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        digest = hashlib.sha256(text).digest()
        if text and digest not in digests:
            digests.add(digest)
            documents.append(Document(name, path, text))
    if not documents:
        raise ValueError(
            f"no text files in {what}"
            + (f": {len(entries)} files, all empty or not UTF-8" if entries else "")
        )
    split = TextSplit([], [])
    for document in documents:
        split[document_position(document.name) < config.held_out].append(document)
    if not all(split):
        raise ValueError(
            f"{len(documents)} documents in {what} are too few to hold out "
            f"{config.held_out=}"
        )
    return split


def document_position(name: str) -> float:
    """Returns the hash of a name, in [0, 1); documents with a low hash are held out."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64


def held_out_files(config: CorpusConfig = STANDARD_LIBRARY) -> list[Path]:
    """Lists the held-out files."""
    return [document.path for document in load_documents(config).held_out]


def describe_source(config: CorpusConfig) -> str:
    """Returns a description of the text, with the version of Python if it matters."""
    if config.pattern == DOCUMENTATION.pattern:
        return "the documentation folders of a machine"
    if config.pattern:
        return f"the files matching `{config.pattern}`"
    return f"the source of the standard library of Python {platform.python_version()}"


def count_bytes(documents: Iterable[Document]) -> int:
    """Returns the bytes of the texts, without document ends."""
    return sum(len(document.text) for document in documents)


def _standard_library() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if not any(fnmatch.fnmatch(name, exclude) for exclude in _LIBRARY_EXCLUDES):
            yield name, path


def _documentation() -> Iterator[tuple[str, Path]]:
    folders = {
        "system": Path("/usr/share/doc"),
        "python": Path(sys.prefix, "share", "doc"),
        "packages": Path(sysconfig.get_path("purelib")),
    }
    for name, folder in folders.items():
        for path in folder.rglob("*"):
            if path.suffix in _DOCUMENTATION_SUFFIXES and path.is_file():
                yield f"{name}/{path.relative_to(folder).as_posix()}", path


def _matching(pattern: str) -> Iterator[tuple[str, Path]]:
    """Yields the files of a glob, with names relative to its part without wildcards."""
    parts = PurePath(pattern).parts
    fixed = next((i for i, p in enumerate(parts) if glob.has_magic(p)), len(parts) - 1)
    root = Path(*parts[:fixed])
    for filename in glob.iglob(pattern, recursive=True):
        path = Path(filename)
        if path.is_file():
            yield path.relative_to(root).as_posix(), path
