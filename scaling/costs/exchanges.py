"""Bytes of one communication, and the communication of tensor parallelism."""

from collections.abc import Iterable
from typing import NamedTuple

from scaling.costs import memory
from scaling.costs.parallelism import Layout
from scaling.shapes import HeadAttention, ModelShape


class Traffic(NamedTuple):
    """One kind of communication, over a step.

    Attributes:
      scheme: tensor, vocabulary, sequence, pipeline, scatter_gather, idle, tables,
        ulysses, ring, pages, expert, balance or data.
      name: data and operation.
      formula: bytes sent per device, in the letters of `shapes.description`
        with u bytes a number and the degree p, for one of g micro-batches unless g is
        in it; T are a pipeline's ticks.
      forward: bytes of all layers on the device, forward pass.
      backward: bytes of all layers on the device, backward pass.
    """

    scheme: str
    name: str
    formula: str
    forward: float
    backward: float


class StagePass(NamedTuple):
    """One pass of a micro-batch through the layers of a pipeline stage.

    Attributes:
      model: shape of the model.
      layout: division over devices.
      tokens: tokens of a micro-batch on a device.
      u: bytes of a number that is sent.
    """

    model: ModelShape
    layout: Layout
    tokens: int
    u: int

    @property
    def layers(self) -> int:
        """Layers of a stage."""
        return self.model.num_layers // self.layout.pipeline

    @property
    def block(self) -> int:
        """Bytes of the tokens' hidden states."""
        return self.tokens * self.model.hidden_size * self.u

    @property
    def mixtures(self) -> int:
        """Layers with experts, in the stage that has the most."""
        return max(
            sum(self.model.mixture_layers[first : first + self.layers])
            for first in range(0, self.model.num_layers, self.layers)
        )


def ring_share(p: int) -> float:
    """Returns the share of its data that a device sends in an all-gather over p."""
    return (p - 1) / p


def tensor_traffic(sent_in: StagePass) -> Iterable[Traffic]:
    """Returns the traffic after attention and the FFN, and before them backward.

    Sources: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.2.2: an all-gather and a reduce-scatter send as much as
    an all-reduce, but inputs of products that are kept in parts are gathered once more
    for the gradients of weights.
    """
    model = sent_in.model
    layout = sent_in.layout
    block = sent_in.block
    p = layout.tensor
    num_mixtures = sent_in.mixtures
    if p == 1:
        return
    once = 2 * ring_share(p) * 2 * block * sent_in.layers
    name = "all-gathers and reduce-scatters" if layout.sequence else "all-reduces"
    formula = "2 · 2 (p-1)/p · b s h u · L"
    a = model.attention
    if isinstance(a, HeadAttention) or layout.sequence:
        yield Traffic("tensor", f"{name} of a layer", formula, once, once)
    else:
        # Gradients of the inputs of divided products, not of the layer's input.
        yield Traffic("tensor", f"{name} of a layer", formula, once, once / 2)
        width = model.hidden_size if a.q_rank is None else a.q_rank
        numbers = sent_in.tokens * (width + a.cached_numbers)
        sent = 2 * ring_share(p) * numbers * sent_in.u * sent_in.layers
        name = "gradients of latents"
        letter = "h" if a.q_rank is None else "q"
        formula = f"2 (p-1)/p · b s ({letter} + c + dr) u · L"
        yield Traffic("tensor", f"{name}, all-reduces", formula, 0.0, sent)
    if layout.sequence:
        # Inputs of experts are kept whole.
        inputs = 2 * sent_in.layers - num_mixtures
        again = ring_share(p) * block * inputs
        name = "inputs gathered again for weights' gradients"
        yield Traffic("sequence", name, "2 · (p-1)/p · b s h u · L", 0.0, again)
    elif num_mixtures:
        assert model.experts is not None
        numbers = model.experts.top_k + model.experts.shared_gate
        shares = 2 * ring_share(p) * sent_in.tokens * numbers * 4 * num_mixtures
        name = "gradients of experts' shares, all-reduce"
        yield Traffic("tensor", name, "2 (p-1)/p · 4 k b s · L", 0.0, shares)


def norm_gradient_traffic(
    model: ModelShape, layout: Layout, gradient: int
) -> Iterable[Traffic]:
    """Returns the traffic of gradients of norms and biases that see part of a sequence.

    Norms of queries and keys, which see the heads of a device, need it with tensor
    parallelism alone.
    """
    a = model.attention
    layers = model.num_layers // layout.pipeline
    if layout.sequence:
        scheme = "sequence"
        size = memory.max_undivided_params(model, layout)
        what = "norms and biases"
    elif layout.tensor > 1 and isinstance(a, HeadAttention) and a.qk_norm:
        scheme = "tensor"
        size = 2 * a.head_dim * layers
        what = "norms of queries and keys"
    else:
        return
    sent = 2 * ring_share(layout.tensor) * size * gradient
    name = f"gradients of {what}, all-reduce"
    yield Traffic(scheme, name, "2 (p-1)/p · N u of norms", 0.0, sent)


def vocabulary_traffic(sent_in: StagePass) -> Iterable[Traffic]:
    """Returns the traffic of embedding and head, which are divided by vocabulary.

    Each device looks up its own tokens, and the sum is the embedding. The loss needs
    the maximum of all logits, the sum of exponentials and the target's logit, in
    float32.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    p = sent_in.layout.tensor
    if p == 1:
        return
    # Forward, embeddings are summed; backward, gradients of the head's input. With
    # sequence parallelism both are a reduce-scatter and an all-gather, half of that
    # each.
    reduce = 2 * ring_share(p) * sent_in.block
    formula = "2 (p-1)/p · b s h u"
    if sent_in.layout.sequence:
        name = "embedding and head's input, scattered and gathered"
        yield Traffic("vocabulary", name, formula, reduce, reduce)
    else:
        yield Traffic("vocabulary", "embedding, all-reduce", formula, reduce, 0.0)
        yield Traffic("vocabulary", "head's input, all-reduce", formula, 0.0, reduce)
    small = 3 * 2 * ring_share(p) * sent_in.tokens * 4
    name = "greatest logit, sum and target's, all-reduces"
    yield Traffic("vocabulary", name, "3 · 2 (p-1)/p · 4 b s", small, 0.0)
