"""What one exchange sends, and those of tensor parallelism, which every step has."""

from collections.abc import Iterable
from typing import NamedTuple

from scaling.costs import memory
from scaling.costs.parallelism import Layout
from scaling.shapes import HeadAttention, ModelShape


class Traffic(NamedTuple):
    """One kind of exchange, over a step.

    Attributes:
      scheme: tensor, vocabulary, sequence, pipeline, scatter_gather, idle, tables,
        ulysses, ring, pages, expert, balance or data.
      name: what is exchanged, and how.
      formula: bytes sent per device, in the letters of `shapes.description`
        with u bytes a number and the degree p, for one of g micro-batches unless g is
        in it; T are a pipeline's ticks.
      forward: those of all layers that the device has, forward.
      backward: the same, backward.
    """

    scheme: str
    name: str
    formula: str
    forward: float
    backward: float


class StagePass(NamedTuple):
    """What goes through the layers of a pipeline's stage at once.

    Attributes:
      model: its shape.
      layout: how it is divided.
      tokens: of a micro-batch on a device.
      u: bytes of a number on the wire.
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
        """Layers with experts, of the stage that has most of them."""
        return max(
            sum(self.model.mixture_layers[first : first + self.layers])
            for first in range(0, self.model.num_layers, self.layers)
        )


def ring_share(p: int) -> float:
    """What of its data a device sends in an all-gather over p devices."""
    return (p - 1) / p


def tensor_traffic(sent_in: StagePass) -> Iterable[Traffic]:
    """After attention and after the FFN; backward, before them.

    Sources: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.2.2: an all-gather and a reduce-scatter in place of an
    all-reduce send as much, but of what is kept in parts the products' inputs are
    gathered once more for the gradients of weights.
    """
    model, layout, block = sent_in.model, sent_in.layout, sent_in.block
    p, num_mixtures = layout.tensor, sent_in.mixtures
    if p == 1:
        return
    once = 2 * ring_share(p) * 2 * block * sent_in.layers
    name = "all-gathers and reduce-scatters" if layout.sequence else "all-reduces"
    formula = "2 · 2 (p-1)/p · b s h u · L"
    yield Traffic("tensor", f"{name} of a layer", formula, once, once)
    if layout.sequence:
        # What goes into experts is kept.
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
    """Norms and biases that work on a part of the sequence each: gradients added up.

    Norms of queries and keys, which work on a device's heads, need it without, too.
    """
    a, layers = model.attention, model.num_layers // layout.pipeline
    if layout.sequence:
        scheme, size = "sequence", memory.max_undivided_params(model, layout)
        what = "norms and biases"
    elif layout.tensor > 1 and isinstance(a, HeadAttention) and a.qk_norm:
        scheme, size = "tensor", 2 * a.head_dim * layers
        what = "norms of queries and keys"
    else:
        return
    sent = 2 * ring_share(layout.tensor) * size * gradient
    name = f"gradients of {what}, all-reduce"
    yield Traffic(scheme, name, "2 (p-1)/p · N u of norms", 0.0, sent)


def vocabulary_traffic(sent_in: StagePass) -> Iterable[Traffic]:
    """The table and the head divided by vocabulary, on the stages that have them.

    Each device looks up its own words, and the sums make the embedding; the loss needs
    of all logits the greatest, the sum of exponentials and the target's, in float32.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    p = sent_in.layout.tensor
    if p == 1:
        return
    # Forward the looked-up parts are added, backward those of the head's input; with
    # sequence parallelism both are half of that, and gathered in the other direction.
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
