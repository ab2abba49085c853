"""Users' token files: memory mapping, checks, and one-line errors."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from scaling.corpora import open_corpus
from scaling.corpora.corpora import TokenFileConfig


def write(path: Path, tokens: np.ndarray) -> str:
    if path.suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    return str(path)


TOKENS = np.arange(1000) * 7 % 300


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_are_mapped(tmp_path: Path, suffix: str, dtype) -> None:
    path = write(tmp_path / f"t{suffix}", TOKENS.astype(dtype))
    config = TokenFileConfig(train=path, vocab_size=300, dtype=dtype)
    corpus = open_corpus(config)
    assert corpus.stream.dtype == corpus.held_out.dtype == np.uint16
    assert isinstance(corpus.stream, np.memmap) == (dtype == "uint16")
    assert [*corpus.stream, *corpus.held_out] == TOKENS.tolist()
    assert len(corpus.held_out) == 50
    assert np.isnan(corpus.bytes_per_token)
    assert corpus.floor is None
    # The same tokens are the same corpus, in any file format.
    other = write(tmp_path / "other.bin", TOKENS.astype(np.uint16))
    assert open_corpus(TokenFileConfig(train=other, vocab_size=300)).digest == (
        corpus.digest
    )


def test_a_file_of_its_own_is_held_out(tmp_path: Path) -> None:
    config = TokenFileConfig(
        train=write(tmp_path / "a.bin", TOKENS.astype(np.uint32)),
        held_out=write(tmp_path / "b.npy", (TOKENS[:9] + 70_000).astype(np.uint32)),
        vocab_size=100_000,
        dtype="uint32",
        bytes_per_token=4.0,
        num_unique_tokens=100,
    )
    corpus = open_corpus(config)
    assert corpus.stream.dtype == np.uint32
    assert corpus.stream.tolist() == TOKENS[:100].tolist()
    assert corpus.held_out.tolist() == (TOKENS[:9] + 70_000).tolist()
    assert corpus.bytes_per_token == 4
    assert corpus.epochs(250) == 2.5


def test_unreadable_token_files_are_refused(tmp_path: Path) -> None:
    good = write(tmp_path / "good.bin", TOKENS.astype(np.uint16))
    config = TokenFileConfig(train=good, vocab_size=300)

    def refused(message: str, **change) -> None:
        with pytest.raises(ValueError, match=message):
            open_corpus(dataclasses.replace(config, **change))

    refused(r"good.bin: token 257 is 299, not below", vocab_size=299)
    refused(r"none.bin: cannot be read: No such file", train=f"{tmp_path}/none.bin")
    refused(r"good.txt: a file of tokens ends in", train=f"{tmp_path}/good.txt")
    refused("num_unique_tokens=951 are more than its 950", num_unique_tokens=951)
    refused("held-out side has no tokens", held_out_share=1e-6)
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"abc")
    refused(r"odd.bin: cannot be read: 3 bytes are no whole", train=str(odd))
    wide = write(tmp_path / "wide.npy", TOKENS.reshape(10, 100).astype(np.uint16))
    refused(r"wide.npy: holds uint16 in 2 axes", train=wide)
    signed = write(tmp_path / "signed.npy", TOKENS)
    refused(r"signed.npy: holds int64 in 1 axes, not uint16", train=signed)
    (tmp_path / "text.npy").write_text("not an array")
    refused(r"text.npy: cannot be read", train=f"{tmp_path}/text.npy")
