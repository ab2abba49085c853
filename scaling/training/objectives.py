"""Training objectives, and scores on held-out text.

Losses are nats per token; documents are scored in bits per byte, which does not depend
on the tokenizer.
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

from jaxkv import validation
from jaxkv.models import TENSOR, ModelConfig, Params, own_words
from jaxkv.validation import ConfigRecord, NonNegativeFloat
from scaling.corpora import END_TOKEN, Document, count_bytes, encode_documents
from scaling.costs import Layout
from scaling.training import architectures, transformer_rows


@runtime_checkable
class TrainingObjective(Protocol):
    """A training objective: hashable, and equal if it computes the same."""

    def __hash__(self) -> int:
        """Returns a hash; objectives are static arguments."""
        ...

    @property
    def of_records(self) -> bool:
        """True if windows are whole records; False for text cut anywhere."""
        ...

    def check(self, seq_len: int, layout: Layout) -> None:
        """Checks that windows and layout are supported.

        Raises:
          ValueError: one of them is not supported.
        """
        ...

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "batch seq"],
        targets: Int[Array, "batch seq"],
        *,
        model: architectures.Architecture,
        layout: Layout,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns the loss to minimize and the loss to report, for one device's part.

        Targets are the next tokens. Means over devices are the losses of all.
        """
        ...


class DocumentScore(NamedTuple):
    """Score of a model on whole documents.

    Attributes:
      bits_per_byte: code length of the documents and their ends, over their bytes.
      loss: nats per token.
      num_tokens: predictions made, document ends included.
    """

    bits_per_byte: float
    loss: float
    num_tokens: int


class StreamScore(NamedTuple):
    """Score of a model on windows of a held-out stream.

    Attributes:
      loss: mean nats per token.
      loss_se: standard error of the loss for independent windows, due to the choice of
        text, which is the same for all models.
      num_tokens: number of predictions.
      windows: mean loss of each window, for paired comparisons of models.
      positions: mean loss at each position of a window, each after `carry` + 1 more
        tokens than its index.
      losses: loss of each token, without the first `carry` of each window.
    """

    loss: float
    loss_se: float
    num_tokens: int
    windows: Float[np.ndarray, " windows"]
    positions: Float[np.ndarray, " places"]
    losses: Float[np.ndarray, "windows places"]

    @classmethod
    def of(cls, losses: Float[np.ndarray, "windows places"]) -> "StreamScore":
        """Makes the score of the nats of each token."""
        means = losses.mean(1)
        num = len(means)
        se = float(means.std(ddof=1) / math.sqrt(num)) if num > 1 else math.inf
        places = losses.mean(0)
        return cls(float(means.mean()), se, losses.size, means, places, losses)


def token_losses(
    params: Params,
    windows: Int[Array, "batch window"],
    *,
    model: architectures.Architecture,
) -> Float[Array, "batch window-1"]:
    """Returns the nats of every token of each window after the first."""
    logits = architectures.forward(params, windows[:, :-1], config=model).logits
    return target_nats(logits, windows[:, 1:])


def mean_loss(
    params: Params,
    windows: Int[Array, "batch window"],
    *,
    model: architectures.Architecture,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the loss to minimize, and the mean nats per token.

    The two differ by the model's auxiliary loss, which scores exclude.
    """
    return part_loss(params, windows[:, :-1], windows[:, 1:], model=model)


def part_loss(
    params: Params,
    tokens: Int[Array, "batch seq"],
    targets: Int[Array, "batch seq"],
    *,
    model: architectures.Architecture,
    layout: Layout = architectures.ONE,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns `mean_loss` of one device's part of the windows with a `layout`.

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
    """Returns the nats of each target, with logits divided over devices by vocabulary.

    Words from `num_words` on are padding. Three numbers of each token are exchanged:
    the maximum logit, the sum of exponentials, and the target's logit.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    if (part := logits.shape[-1]) >= num_words:
        return target_nats(logits, targets)
    words = jnp.arange(part, dtype=jnp.int32)
    words = words + part * lax.axis_index(TENSOR).astype(jnp.int32)
    min_logit = jnp.asarray(-jnp.inf, logits.dtype)
    logits = jnp.where((words < num_words)[None, None, :], logits, min_logit)
    top = lax.pmax(lax.stop_gradient(logits.max(-1)), TENSOR)
    total = lax.psum(jnp.exp(logits - top[..., None]).sum(-1), TENSOR)
    local_targets, is_here = own_words(part, targets)
    picked = jnp.take_along_axis(logits, local_targets[..., None], axis=-1)[..., 0]
    picked = lax.psum(jnp.where(is_here, picked, jnp.zeros_like(picked)), TENSOR)
    return jnp.log(total) + top - picked


@dataclasses.dataclass(frozen=True)
class NextToken(TrainingObjective):
    """Next-token loss: the nats of each token given those before it."""

    @property
    def of_records(self) -> bool:
        """False: windows are cut anywhere."""
        return False

    def check(self, seq_len: int, layout: Layout) -> None:
        """Accepts all windows and layouts."""

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "batch seq"],
        targets: Int[Array, "batch seq"],
        *,
        model: architectures.Architecture,
        layout: Layout,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """See `part_loss`."""
        return part_loss(params, tokens, targets, model=model, layout=layout)


NEXT_TOKEN = NextToken()


class MultiTokenPrediction(TrainingObjective, ConfigRecord):
    """Next-token loss, and the losses of the modules for multi-token prediction (MTP).

    The modules are those of `ModelConfig.num_ahead_layers`; module k predicts token i +
    k + 1 from the model's state of token i and the k tokens after it. The loss is the
    model's plus `weight` times the mean of the modules' losses, each the sum of nats
    over the tokens of a sequence that it predicts, divided by the sequence's length.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 21 to 25.
    """

    weight: NonNegativeFloat = 0.3
    """Weight of the modules' mean loss; in DeepSeek-V3 0.3 for 10T tokens, then 0.1
    (section 4.2), which are two runs, the second with `train(..., start=)`."""

    @property
    def of_records(self) -> bool:
        """False: windows are cut anywhere."""
        return False

    def check(self, seq_len: int, layout: Layout) -> None:
        """Checks that a device has all rows and layers of its sequences.

        A row needs the state of the row before it.
        """
        for name in ("ring", "ulysses", "pipeline"):
            if (degree := getattr(layout, name)) > 1:
                raise ValueError(
                    f"{name}={degree} must be 1 for multi-token prediction"
                )
        if layout.sequence:
            raise ValueError(
                f"sequence={layout.sequence} must be False for multi-token prediction"
            )

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "batch seq"],
        targets: Int[Array, "batch seq"],
        *,
        model: architectures.Architecture,
        layout: Layout = architectures.ONE,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns the loss to minimize, and the model's mean nats per token."""
        num = model.num_ahead_layers if isinstance(model, ModelConfig) else 0
        if not isinstance(model, ModelConfig) or not num:
            raise ValueError(
                f"num_ahead_layers={num} must be at least 1 for multi-token prediction"
            )
        outputs = transformer_rows.run_with_ahead(
            params, tokens, config=model, layout=layout, num_ahead=num
        )
        losses = []
        for depth, output in enumerate(outputs):
            nats = divided_nats(output.logits, targets, num_words=model.vocab_size)
            # Earlier rows of a module have no state to start from.
            has_state = jnp.arange(tokens.shape[1]) >= depth
            losses.append(jnp.where(has_state, nats, jnp.zeros_like(nats)).mean())
        main, *ahead = losses
        auxiliary = functools.reduce(jnp.add, [output.auxiliary for output in outputs])
        return main + self.weight * jnp.stack(ahead).mean() + auxiliary, main


def target_nats(
    logits: Float[Array, "batch seq vocab"], targets: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """Returns the nats of each target under the logits of its position."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def cut_windows(
    documents: Iterable[Document], seq_len: int
) -> tuple[
    Int[np.ndarray, "windows {seq_len}+1"], Bool[np.ndarray, "windows {seq_len}"]
]:
    """Cuts each document into windows that predict every byte and its end once.

    A document's first byte is predicted from `END_TOKEN`, the first of a later window
    from the token before it; so contexts are shorter than the whole text.

    Returns:
      The windows, padded with `END_TOKEN`, and the mask of predictions that count.
    """
    windows = []
    counts = []
    for document in documents:
        text = encode_documents([document]).astype(np.int32)
        text = np.concatenate([[np.int32(END_TOKEN)], text])
        num = len(text) - 1
        for start in range(0, num, seq_len):
            window = text[start : start + seq_len + 1]
            width = seq_len + 1 - len(window)
            windows.append(np.pad(window, (0, width), constant_values=END_TOKEN))
            counts.append(np.arange(start, start + seq_len) < num)
    return np.stack(windows), np.stack(counts)


@validation.checks_numbers()
def score_documents(
    params: Params,
    documents: Iterable[Document],
    *,
    model: architectures.Architecture,
    seq_len: int,
    batch_size: int = 16,
) -> DocumentScore:
    """Scores whole documents together, in consecutive windows of `seq_len` tokens.

    Parameters may be of any floating type; the model has the byte vocabulary of
    `corpora`. `batch_size` is the number of windows of a forward pass.

    Raises:
      ValueError: there is no document.
    """
    documents = list(documents)
    if not documents:
        raise ValueError("no documents to score")
    (windows, counts), start, nats = cut_windows(documents, seq_len), 0, 0.0
    for losses in _losses(params, windows, model, batch_size):
        end = start + len(losses)
        nats = nats + float(np.sum(losses * counts[start:end]))
        start = end
    num_tokens = int(counts.sum())
    bits = nats / math.log(2) / count_bytes(documents)
    return DocumentScore(bits, nats / num_tokens, num_tokens)


@validation.checks_numbers()
def stream_windows(
    held_out: UInt[np.ndarray, " tokens"], *, seq_len: int, num_windows: int
) -> Int[np.ndarray, "windows {seq_len}+1"]:
    """Returns the scored windows of a stream, the same ones for every model.

    A window has one token more than its `seq_len` predictions. The `num_windows`
    windows are evenly spaced, without a common prediction; a shorter stream gives all
    of its windows.

    Raises:
      ValueError: the stream is shorter than one window, or a size is below 1.
    """
    max_windows = (len(held_out) - 1) // seq_len
    if max_windows < 1:
        raise ValueError(
            f"{len(held_out)} held-out tokens are fewer than one window of {seq_len=} "
            "tokens and the one after it"
        )
    chosen = np.arange(max_windows)
    if num_windows < max_windows:
        chosen = np.arange(num_windows) * max_windows // num_windows
    place = chosen[:, None] * seq_len + np.arange(seq_len + 1)
    return held_out[place].astype(np.int32)


@validation.checks_numbers(carry=0)
def score_stream(
    params: Params,
    held_out: UInt[np.ndarray, " tokens"],
    *,
    model: architectures.Architecture,
    seq_len: int,
    num_windows: int,
    carry: int = 0,
    batch_size: int = 64,
) -> StreamScore:
    """Scores windows of a held-out stream.

    Windows are independent: the first prediction of each is made from one token, as in
    training. So the loss is higher than with the context of the whole stream.

    Args:
      params: parameters of the model, in any floating type.
      held_out: the stream, such as `Corpus.held_out`.
      model: config of the model.
      seq_len: predictions per window.
      num_windows: largest number of windows, see `stream_windows`.
      carry: predictions at the start of each window that are not counted, so that
        counted ones have a context of at least `carry` + 1 tokens; in [0, seq_len).
      batch_size: windows per forward pass.

    Raises:
      ValueError: the stream is shorter than one window or has a token outside the
        model's vocabulary, or a size is out of range.
    """
    if carry >= seq_len:
        raise ValueError(f"{carry=} must be in [0, {seq_len=})")
    windows = stream_windows(held_out, seq_len=seq_len, num_windows=num_windows)
    if (top := int(windows.max())) >= model.vocab_size:
        raise ValueError(f"token {top} is not below {model.vocab_size=}")
    losses = [*_losses(params, windows, model, batch_size)]
    return StreamScore.of(np.concatenate(losses)[:, carry:])


def _losses(
    params: Params,
    windows: Int[np.ndarray, "windows window"],
    model: architectures.Architecture,
    batch_size: int,
) -> Iterator[Float[np.ndarray, "batch window-1"]]:
    """Yields the nats of every token, batch by batch; the last batch is padded."""
    call = _compiled(model)
    for start in range(0, len(windows), batch_size):
        batch = windows[start : start + batch_size]
        fill = ((0, batch_size - len(batch)), (0, 0))
        losses = call(params, jnp.asarray(np.pad(batch, fill)))
        yield np.asarray(losses, np.float64)[: len(batch)]


@functools.cache
def _compiled(model: architectures.Architecture):
    return jax.jit(functools.partial(token_losses, model=model))
