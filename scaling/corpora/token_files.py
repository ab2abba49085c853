"""Memory-mapped files of token ids, `.bin` and `.npy`.

A `.bin` file has only token ids, little-endian, the format of nanoGPT; a `.npy` file is
a NumPy array of one axis.
"""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from jaxkv import validation
from jaxkv.validation import ConfigRecord, NonNegativeFloat, NonNegativeInt, Range
from scaling.corpora import streams

_SCANNED = 2**24


class TokenFileConfig(ConfigRecord):
    """Token files and their vocabulary."""

    train: str
    """File of the tokens to train on, `.bin` or `.npy`."""
    vocab_size: Annotated[int, Range(2)]
    """Upper bound of the token ids of all files."""
    held_out: str = ""
    """File of the held-out tokens; "" holds out the end of the training file."""
    held_out_share: Annotated[float, Range(0, 1, "()")] = 0.05
    """Share of the training file that is held out, in (0, 1)."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of a `.bin` file; a `.npy` file has its own."""
    bytes_per_token: NonNegativeFloat = 0.0
    """Mean bytes of text of a token, for bits per byte; 0 means unknown."""
    num_unique_tokens: NonNegativeInt = 0
    """Training repeats the first `num_unique_tokens` tokens; 0 means all."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        for path in filter(None, (self.train, self.held_out)):
            if Path(path).suffix not in (".bin", ".npy"):
                raise ValueError(f"{path}: a file of tokens ends in .bin or .npy")
        validation.choice("dtype", self.dtype, ("uint16", "uint32"))


def open_token_files(config: TokenFileConfig) -> streams.Corpus:
    """Maps the files and checks every token.

    Raises:
      ValueError: a file cannot be read, is no array of tokens, or has an id that is not
        below `vocab_size`; or there are too few tokens.
    """
    train = _mapped(Path(config.train), config)
    if config.held_out:
        held_out = _mapped(Path(config.held_out), config)
    else:
        cut = len(train) - int(len(train) * config.held_out_share)
        held_out = train[cut:]
        train = train[:cut]
    dtype = np.uint16 if config.vocab_size <= 2**16 else np.uint32
    # A map of the right type is not copied.
    return streams.make_corpus(
        train.astype(dtype, copy=False),
        held_out.astype(dtype, copy=False),
        vocab_size=config.vocab_size,
        name=config.train,
        num_unique_tokens=config.num_unique_tokens,
        bytes_per_token=config.bytes_per_token or float("nan"),
    )


def _mapped(path: Path, config: TokenFileConfig) -> np.ndarray:
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r")
        else:
            dtype = np.dtype(config.dtype).newbyteorder("<")
            size = path.stat().st_size
            if size == 0 or size % dtype.itemsize:
                raise ValueError(f"{size} bytes are no whole {config.dtype} tokens")
            tokens = np.memmap(path, dtype, "r")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        raise ValueError(
            f"{path}: holds {tokens.dtype} in {tokens.ndim} axes, not uint16 or uint32 "
            "in one"
        )
    for start in range(0, len(tokens), _SCANNED):
        piece = tokens[start : start + _SCANNED]
        if (top := int(piece.max())) >= config.vocab_size:
            where = start + int(piece.argmax())
            raise ValueError(
                f"{path}: token {where} is {top}, not below {config.vocab_size=}"
            )
    return tokens
