"""Corpora of a training stream and a held-out stream, and the order of training.

`draw_windows` computes the windows of a step from (seed, step) only, so a run resumes
at any step without a stored order.
"""

import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, UInt, UInt32

from jaxkv import validation

_SHUFFLE_ROUNDS = 24
MAX_CORPUS_TOKENS = 2**31 - 1
"""Largest number of tokens of a stream that `draw_windows` can index."""
# The digest of a longer stream reads evenly spaced pieces.
_DIGESTED_WHOLE = 2**28
_NUM_PIECES = 256
_PIECE_BYTES = 2**20


class Corpus(NamedTuple):
    """A training stream, a held-out stream, and their properties.

    Attributes:
      stream: training tokens, uint16, or uint32 if the vocabulary needs it; possibly a
        memory map.
      held_out: held-out tokens of the same type, never trained on.
      vocab_size: upper bound of the token ids.
      bytes_per_token: mean bytes of a held-out token; nats per token become bits per
        byte by `loss / log(2) / bytes_per_token`; NaN for tokens without bytes.
      floor: lowest possible loss in nats per token, if known.
      floor_se: standard error of the floor; 0 if it is computed, not sampled.
      name: description of the corpus.
      digest: SHA-256 of the tokens of both streams.
    """

    stream: Any
    held_out: UInt[np.ndarray, " held_out"]
    vocab_size: int
    bytes_per_token: float
    floor: float | None
    floor_se: float
    name: str
    digest: str

    def epochs(self, num_tokens: int) -> float:
        """Returns the passes over the stream of a run of `num_tokens` tokens."""
        return num_tokens / len(self.stream)


def make_corpus(
    stream: np.ndarray,
    held_out: np.ndarray,
    *,
    vocab_size: int,
    name: str,
    num_unique_tokens: int = 0,
    bytes_per_token: float = float("nan"),
    floor: float | None = None,
    floor_se: float = 0.0,
) -> Corpus:
    """Makes a corpus of two streams; keeps the first `num_unique_tokens` to train on.

    Raises:
      ValueError: a stream is empty, too long, or shorter than `num_unique_tokens`.
    """
    for side, tokens in {"training": stream, "held-out": held_out}.items():
        if len(tokens) == 0:
            raise ValueError(f"{name}: the {side} side has no tokens")
        if len(tokens) > MAX_CORPUS_TOKENS:
            raise ValueError(
                f"{name}: {len(tokens)} tokens are too many: under 2**31 are supported"
            )
    if num_unique_tokens > len(stream):
        raise ValueError(
            f"{name}: {num_unique_tokens=} are more than its {len(stream)} tokens"
        )
    stream = stream[: num_unique_tokens or None]
    return Corpus(
        stream=stream,
        held_out=held_out,
        vocab_size=vocab_size,
        bytes_per_token=bytes_per_token,
        floor=floor,
        floor_se=floor_se,
        name=name,
        digest=digest_streams(stream, held_out),
    )


def digest_streams(*streams: np.ndarray) -> str:
    """Returns the SHA-256 of streams of tokens, which identifies the data of a run.

    Of a stream of more than 2**28 tokens, only the length and 256 evenly spaced pieces
    are hashed.
    """
    hasher = hashlib.sha256()
    for stream in streams:
        hasher.update(f"{stream.dtype.name} {len(stream)} ".encode())
        starts = range(0, len(stream), _PIECE_BYTES)
        if len(stream) > _DIGESTED_WHOLE:
            spaced = np.linspace(0, len(stream) - _PIECE_BYTES, _NUM_PIECES)
            starts = [int(start) for start in spaced]
        for start in starts:
            piece = stream[start : start + _PIECE_BYTES]
            hasher.update(piece.astype(piece.dtype.newbyteorder("<")).tobytes())
    return hasher.hexdigest()


@validation.checks_numbers()
def check_lengths(corpus: Corpus, seq_len: int) -> None:
    """Checks that both streams have a window of `seq_len` tokens and one token more.

    Raises:
      ValueError: a stream is too short.
    """
    sides = {"training": corpus.stream, "held-out": corpus.held_out}
    for side, tokens in sides.items():
        if len(tokens) < seq_len + 1:
            raise ValueError(
                f"{seq_len=} is longer than the {len(tokens)} tokens of the {side} "
                f"side of {corpus.name} allow"
            )


@validation.checks_numbers()
def windows_per_epoch(num_tokens: int, seq_len: int) -> int:
    """Returns the windows of one pass over a stream.

    Raises:
      ValueError: the stream is shorter than one window.
    """
    if num_tokens < seq_len + 1:
        raise ValueError(
            f"a corpus of {num_tokens} tokens is shorter than one window of "
            f"{seq_len=} tokens and the one after it"
        )
    return num_tokens // seq_len


@validation.checks_numbers()
def draw_windows(
    stream: UInt[Array, " tokens"],
    seed: Int[Array, ""],
    step: Int[Array, ""],
    *,
    batch_size: int,
    seq_len: int,
    aligned: bool = False,
) -> Int32[Array, "batch_size {seq_len}+1"]:
    """Returns the windows of one training step.

    The stream is circular, and divided into windows at a random offset in each epoch;
    every epoch visits each window once, in a random order. The order is computed, not
    stored, so the windows of a step depend on the arguments only.

    Args:
      stream: training tokens.
      seed: seed of the order.
      step: number of earlier steps.
      batch_size: number of windows.
      seq_len: predictions of a window; a window has one token more.
      aligned: True if windows must begin at multiples of `seq_len`, for a stream of
        records of that length; its length must be a multiple.

    Returns:
      The tokens of the windows.

    Raises:
      ValueError: the stream is shorter than a window, or is not whole records.

    Source: the order is the swap-or-not shuffle of Hoang, Morris and Rogaway 2012
    (arXiv:1208.1176), with a murmur finalizer as its round function.
    """
    num_tokens = stream.shape[0]
    num_windows = windows_per_epoch(num_tokens, seq_len)
    if aligned and num_tokens % seq_len:
        raise ValueError(f"{num_tokens} tokens are not whole records of {seq_len=}")
    index = step.astype(jnp.int32) * batch_size + jnp.arange(
        batch_size, dtype=jnp.int32
    )
    epoch = index // num_windows
    window = index % num_windows

    def start(epoch, window):
        key = jax.random.fold_in(jax.random.key(seed), epoch)
        offset_key, order_key = jax.random.split(key)
        offset = jax.random.randint(offset_key, (), 0, num_tokens, jnp.int32)
        if aligned:
            offset = offset // seq_len * seq_len
        rounds = jax.random.bits(order_key, (_SHUFFLE_ROUNDS, 2), jnp.uint32)
        place = _shuffled(window.astype(jnp.uint32), rounds, num_windows)
        return place * jnp.uint32(seq_len) + offset.astype(jnp.uint32)

    # Unsigned: the sum of two positions, each below 2**31, fits in 32 bits.
    starts = jax.vmap(start)(epoch, window)[:, None] % jnp.uint32(num_tokens)
    place = starts + jnp.arange(seq_len + 1, dtype=jnp.uint32)[None]
    return stream[place % jnp.uint32(num_tokens)].astype(jnp.int32)


def _shuffled(
    index: UInt32[Array, ""], rounds: UInt32[Array, "rounds 2"], size: int
) -> UInt32[Array, ""]:
    """Returns the image of an index under a permutation of `size` elements."""
    size_ = jnp.uint32(size)

    def swap(index, round_):
        partner = (round_[0] % size_ + size_ - index) % size_
        bits = jnp.maximum(index, partner) ^ round_[1]
        for factor in (0x85EBCA6B, 0xC2B2AE35):
            bits = (bits ^ (bits >> jnp.uint32(15))) * jnp.uint32(factor)
        return jnp.where(bits >> jnp.uint32(31) == 1, partner, index), None

    return jax.lax.scan(swap, index, rounds)[0]
