"""What training minimises, and how text that was held out is scored.

Losses are nats per token; texts are scored in bits per byte, which does not depend on
how the text is cut into tokens.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv import models
from scaling import architectures, corpora


class Score(NamedTuple):
    """How well a model predicts whole documents.

    Attributes:
      bits_per_byte: code length of the documents and their ends, over their bytes.
      loss: nats per token.
      num_tokens: predictions made, document ends included.
    """

    bits_per_byte: float
    loss: float
    num_tokens: int


def token_losses(
    params: models.Params,
    windows: Int[Array, "batch window"],
    *,
    model: architectures.Architecture,
) -> Float[Array, "batch window-1"]:
    """Nats of every token of each window but the first, given those before it."""
    logits = architectures.forward(params, windows[:, :-1], config=model).logits
    return _nats(logits, windows[:, 1:])


def mean_loss(
    params: models.Params,
    windows: Int[Array, "batch window"],
    *,
    model: architectures.Architecture,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """What training minimises, and the mean nats per token that it contains.

    The two differ by the model's auxiliary loss, which no score counts.
    """
    output = architectures.forward(params, windows[:, :-1], config=model)
    loss = _nats(output.logits, windows[:, 1:]).mean()
    return loss + output.auxiliary, loss


def _nats(
    logits: Float[Array, "batch seq vocab"], targets: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def cut(
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
        text = corpora.tokens([document]).astype(np.int32)
        text = np.concatenate([[np.int32(corpora.END)], text])
        num = len(text) - 1
        for start in range(0, num, seq_len):
            window = text[start : start + seq_len + 1]
            width = seq_len + 1 - len(window)
            windows.append(np.pad(window, (0, width), constant_values=corpora.END))
            counts.append(np.arange(start, start + seq_len) < num)
    return np.stack(windows), np.stack(counts)


def score(
    params: models.Params,
    documents: Iterable[corpora.Document],
    *,
    model: architectures.Architecture,
    seq_len: int,
    batch_size: int = 16,
) -> Score:
    """Scores whole documents in consecutive windows.

    Args:
      params: of the model, in any floating type.
      documents: at least one.
      model: its shape, with the byte vocabulary of `corpora`.
      seq_len: tokens per window.
      batch_size: windows per forward pass.

    Returns:
      The score over all documents together.

    Raises:
      ValueError: there is no document.
    """
    documents = list(documents)
    if not documents:
        raise ValueError("no documents to score")
    windows, counts = cut(documents, seq_len)
    losses = _losses(model)
    nats, num_windows = 0.0, len(windows)
    for start in range(0, num_windows, batch_size):
        batch, count = (x[start : start + batch_size] for x in (windows, counts))
        fill = ((0, batch_size - len(batch)), (0, 0))
        found = losses(params, jnp.asarray(np.pad(batch, fill)))
        nats += float(np.sum(np.asarray(found, np.float64)[: len(batch)] * count))
    num_tokens = int(counts.sum())
    bits = nats / math.log(2) / corpora.num_bytes(documents)
    return Score(bits, nats / num_tokens, num_tokens)


@functools.cache
def _losses(model: architectures.Architecture):
    return jax.jit(functools.partial(token_losses, model=model))
