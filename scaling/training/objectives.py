"""What training minimises, and how text that was held out is scored.

Losses are nats per token; texts are scored in bits per byte, which does not depend on
how the text is cut into tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxkv.models import partition, transformer
from jaxkv.models.partition import TENSOR
from scaling.corpora import corpora
from scaling.costs.parallelism import Layout
from scaling.training import architectures


@runtime_checkable
class Objective(Protocol):
    """What training minimises: hashable, and equal where it computes the same."""

    def __hash__(self) -> int:
        """It is a static argument."""
        ...

    @property
    def of_records(self) -> bool:
        """Whether windows are whole records, not pieces of text cut anywhere."""
        ...

    def check(self, seq_len: int, layout: Layout) -> None:
        """Refuses windows and layouts that it does not know.

        Raises:
          ValueError: says which.
        """
        ...

    def __call__(
        self,
        params: transformer.Params,
        tokens: Int[Array, "batch seq"],
        targets: Int[Array, "batch seq"],
        *,
        model: architectures.Architecture,
        layout: Layout,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """What is minimised, and what of it the curve shows, of one device's part.

        Targets are what follows each token. The means over devices are those of all.
        """
        ...


class DocumentScore(NamedTuple):
    """How well a model predicts whole documents.

    Attributes:
      bits_per_byte: code length of the documents and their ends, over their bytes.
      loss: nats per token.
      num_tokens: predictions made, document ends included.
    """

    bits_per_byte: float
    loss: float
    num_tokens: int


class StreamScore(NamedTuple):
    """How well a model predicts windows of a held-out stream.

    Attributes:
      loss: mean nats per token.
      loss_se: its standard error, as if the windows were independent; by chance of the
        text, which two models scored alike share.
      num_tokens: predictions made.
      windows: mean loss of each window, so that models can be compared pair by pair.
      positions: mean loss at each place of a window; `carry` more tokens than the
        place's index, and one, were seen before it.
      losses: of each token, without the first `carry` of each window.
    """

    loss: float
    loss_se: float
    num_tokens: int
    windows: Float[np.ndarray, " windows"]
    positions: Float[np.ndarray, " places"]
    losses: Float[np.ndarray, "windows places"]

    @classmethod
    def of(cls, losses: Float[np.ndarray, "windows places"]) -> "StreamScore":
        """Sums up the nats of each token."""
        means = losses.mean(1)
        num = len(means)
        se = float(means.std(ddof=1) / math.sqrt(num)) if num > 1 else math.inf
        places = losses.mean(0)
        return cls(float(means.mean()), se, losses.size, means, places, losses)


def token_losses(
    params: transformer.Params,
    windows: Int[Array, "batch window"],
    *,
    model: architectures.Architecture,
) -> Float[Array, "batch window-1"]:
    """Nats of every token of each window but the first, given those before it."""
    logits = architectures.forward(params, windows[:, :-1], config=model).logits
    return target_nats(logits, windows[:, 1:])


def mean_loss(
    params: transformer.Params,
    windows: Int[Array, "batch window"],
    *,
    model: architectures.Architecture,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """What training minimises, and the mean nats per token that it contains.

    The two differ by the model's auxiliary loss, which no score counts.
    """
    return part_loss(params, windows[:, :-1], windows[:, 1:], model=model)


def part_loss(
    params: transformer.Params,
    tokens: Int[Array, "batch seq"],
    targets: Int[Array, "batch seq"],
    *,
    model: architectures.Architecture,
    layout: Layout = architectures.ONE,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """As `mean_loss`, of one device's part of the windows under a `layout`.

    The mean over devices is the loss of all.
    """
    output = architectures.forward(params, tokens, config=model, layout=layout)
    loss = divided_nats(output.logits, targets, num_words=model.vocab_size).mean()
    return loss + output.auxiliary, loss


def divided_nats(
    logits: Float[Array, "batch seq words"],
    targets: Int[Array, "batch seq"],
    *,
    num_words: int,
) -> Float[Array, "batch seq"]:
    """Nats of each target, where every device has the logits of its words alone.

    Of `num_words` in all; what stands behind them does not count. Three numbers of each
    token are exchanged: the greatest logit, the sum of exponentials, the target's.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    if (part := logits.shape[-1]) >= num_words:
        return target_nats(logits, targets)
    words = jnp.arange(part, dtype=jnp.int32)
    words = words + part * lax.axis_index(TENSOR).astype(jnp.int32)
    least = jnp.asarray(-jnp.inf, logits.dtype)
    logits = jnp.where((words < num_words)[None, None, :], logits, least)
    top = lax.pmax(lax.stop_gradient(logits.max(-1)), TENSOR)
    total = lax.psum(jnp.exp(logits - top[..., None]).sum(-1), TENSOR)
    own, is_here = partition.own_words(part, targets)
    picked = jnp.take_along_axis(logits, own[..., None], axis=-1)[..., 0]
    picked = lax.psum(jnp.where(is_here, picked, jnp.zeros_like(picked)), TENSOR)
    return jnp.log(total) + top - picked


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """The nats of each token given those before it."""

    @property
    def of_records(self) -> bool:
        """Text, cut anywhere."""
        return False

    def check(self, seq_len: int, layout: Layout) -> None:
        """Takes all."""

    def __call__(
        self,
        params: transformer.Params,
        tokens: Int[Array, "batch seq"],
        targets: Int[Array, "batch seq"],
        *,
        model: architectures.Architecture,
        layout: Layout,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """See `part_loss`."""
        return part_loss(params, tokens, targets, model=model, layout=layout)


NEXT_TOKEN = NextToken()


def target_nats(
    logits: Float[Array, "batch seq vocab"], targets: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """Of each target, by the logits of what follows the token before it."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def cut_windows(
    documents: Iterable[corpora.Document], seq_len: int
) -> tuple[
    Int[np.ndarray, "windows {seq_len}+1"], Bool[np.ndarray, "windows {seq_len}"]
]:
    """Cuts each document into windows that predict every byte and its end once.

    A document's first byte is predicted from `END`, the first of a later window from
    the one token before it; so windows see less than a reader of the whole text would.

    Returns:
      The windows, padded with `END`; and which of their predictions count.
    """
    windows, counts = [], []
    for document in documents:
        text = corpora.encode_documents([document]).astype(np.int32)
        text = np.concatenate([[np.int32(corpora.END)], text])
        num = len(text) - 1
        for start in range(0, num, seq_len):
            window = text[start : start + seq_len + 1]
            width = seq_len + 1 - len(window)
            windows.append(np.pad(window, (0, width), constant_values=corpora.END))
            counts.append(np.arange(start, start + seq_len) < num)
    return np.stack(windows), np.stack(counts)


def score_documents(
    params: transformer.Params,
    documents: Iterable[corpora.Document],
    *,
    model: architectures.Architecture,
    seq_len: int,
    batch_size: int = 16,
) -> DocumentScore:
    """Scores whole documents together, in consecutive windows of `seq_len` tokens.

    Parameters may be of any floating type; the model has the byte vocabulary of
    `corpora`. A forward pass has `batch_size` windows.

    Raises:
      ValueError: there is no document.
    """
    documents = list(documents)
    if not documents:
        raise ValueError("no documents to score")
    (windows, counts), start, nats = cut_windows(documents, seq_len), 0, 0.0
    for losses in _losses(params, windows, model, batch_size):
        end = start + len(losses)
        nats, start = nats + float(np.sum(losses * counts[start:end])), end
    num_tokens = int(counts.sum())
    bits = nats / math.log(2) / corpora.count_bytes(documents)
    return DocumentScore(bits, nats / num_tokens, num_tokens)


def stream_windows(
    held_out: UInt[np.ndarray, " tokens"], *, seq_len: int, num_windows: int
) -> Int[np.ndarray, "windows {seq_len}+1"]:
    """Cuts the windows of a stream that are scored: the same ones for every model.

    A window has one token more than its `seq_len` predictions. There are `num_windows`,
    evenly spaced, none of whose predictions are another's; where the stream has no more
    than so many, all of them.

    Raises:
      ValueError: the stream is shorter than one window, or a size is below 1.
    """
    if seq_len < 1 or num_windows < 1:
        raise ValueError(f"{seq_len=} and {num_windows=} must be at least 1")
    there = (len(held_out) - 1) // seq_len
    if there < 1:
        raise ValueError(
            f"{len(held_out)} held-out tokens are fewer than one window of {seq_len=} "
            "tokens and the one after it"
        )
    chosen = np.arange(there)
    if num_windows < there:
        chosen = np.arange(num_windows) * there // num_windows
    place = chosen[:, None] * seq_len + np.arange(seq_len + 1)
    return held_out[place].astype(np.int32)


def score_stream(
    params: transformer.Params,
    held_out: UInt[np.ndarray, " tokens"],
    *,
    model: architectures.Architecture,
    seq_len: int,
    num_windows: int,
    carry: int = 0,
    batch_size: int = 64,
) -> StreamScore:
    """Scores windows of a held-out stream.

    Nothing is carried from window to window: the first prediction of each is made from
    one token, as in training. So the loss is that of a reader of short pieces, above
    that of a reader of the whole stream.

    Args:
      params: of the model, in any floating type.
      held_out: the stream, such as `Corpus.held_out`.
      model: its shape.
      seq_len: predictions per window.
      num_windows: how many windows at most, see `stream_windows`.
      carry: predictions at the start of each window that are made but not counted, so
        that all that count have at least `carry` + 1 tokens to go by; in [0, seq_len).
      batch_size: windows per forward pass.

    Raises:
      ValueError: the stream is shorter than one window, holds a token that the model
        does not have, or a size is out of range.
    """
    if not 0 <= carry < seq_len or batch_size < 1:
        raise ValueError(
            f"{carry=} must be in [0, {seq_len=}), {batch_size=} at least 1"
        )
    windows = stream_windows(held_out, seq_len=seq_len, num_windows=num_windows)
    if (top := int(windows.max())) >= model.vocab_size:
        raise ValueError(f"token {top} is not below {model.vocab_size=}")
    losses = [*_losses(params, windows, model, batch_size)]
    return StreamScore.of(np.concatenate(losses)[:, carry:])


def _losses(
    params: transformer.Params,
    windows: Int[np.ndarray, "windows window"],
    model: architectures.Architecture,
    batch_size: int,
) -> Iterator[Float[np.ndarray, "batch window-1"]]:
    """Nats of every token of some windows at a time, the last ones padded."""
    call = _compiled(model)
    for start in range(0, len(windows), batch_size):
        batch = windows[start : start + batch_size]
        fill = ((0, batch_size - len(batch)), (0, 0))
        found = call(params, jnp.asarray(np.pad(batch, fill)))
        yield np.asarray(found, np.float64)[: len(batch)]


@functools.cache
def _compiled(model: architectures.Architecture):
    return jax.jit(functools.partial(token_losses, model=model))
