"""Additional traffic if the backward pass recomputes activations.

A collective runs again if a gradient needs its result. Pipeline stages keep the input
of a micro-batch and run all of their layers again. `StepConfig.remat` keeps the results
of products and recomputes the operations in between: sums over devices are inputs of
the next norm; exchanged rows, keys and values are inputs of attention, experts and the
gradients of weights. Inputs of kept products only are not needed again; the
load-balancing loss is needed by its gradient only, so it is computed once.

Source: Chen et al. 2016, arXiv:1604.06174, section 3.
"""

from collections.abc import Iterable

from scaling.costs import exchanges
from scaling.costs.exchanges import StagePass, Traffic


def stage_recomputation_traffic(
    sent_in: StagePass, layers: Iterable[Traffic]
) -> Iterable[Traffic]:
    """Returns the traffic that pipeline stages repeat: of layers, and of the embedding.

    All stages look up token embeddings, and the first one uses them.

    Args:
      sent_in: the forward pass.
      layers: traffic of its layers.
    """
    layout = sent_in.layout
    if layout.pipeline == 1:
        return
    for traffic in layers:
        if traffic.forward and traffic.scheme != "balance":
            yield _recomputed(traffic, traffic.forward)
    if (p := layout.tensor) > 1:
        # An all-reduce; with sequence parallelism only a reduce-scatter.
        times = 1 if layout.sequence else 2
        sent = times * exchanges.ring_share(p) * sent_in.block
        formula = f"{times} (p-1)/p · b s h u".replace("1 (", "(")
        yield Traffic("vocabulary", "embedding, run again", formula, 0.0, sent)


def product_recomputation_traffic(
    sent_in: StagePass, layers: Iterable[Traffic]
) -> Iterable[Traffic]:
    """Returns the forward traffic that repeats if only results of products are kept.

    With sequence parallelism, rows that are gathered for a product are not gathered
    again, except for the head, and for experts, whose routing needs them. The gradient
    of the loss needs the maximum logit and the sum, but not the target's logit.
    Arguments are those of `stage_recomputation_traffic`.
    """
    layout = sent_in.layout
    block = sent_in.block
    p = sent_in.layout.tensor
    for traffic in layers:
        if traffic.scheme == "tensor" and layout.sequence:
            num = 2 * sent_in.model.num_layers + sent_in.mixtures
            sent = exchanges.ring_share(p) * block * num
            name = "reduce-scatters of a layer"
            formula = "2 (p-1)/p · b s h u · L"
            yield _recomputed(traffic._replace(name=name, formula=formula), sent)
        elif traffic.forward and traffic.scheme != "balance":
            yield _recomputed(traffic, traffic.forward)
    if p > 1:
        sent = 2 * exchanges.ring_share(p) * block
        name = "embedding, run again"
        if layout.sequence:
            name = "embedding and head's input, run again"
        formula = "2 (p-1)/p · b s h u"
        yield Traffic("vocabulary", name, formula, 0.0, sent)
        small = 2 * 2 * exchanges.ring_share(p) * sent_in.tokens * 4
        name = "greatest logit and sum, run again"
        formula = "2 · 2 (p-1)/p · 4 b s"
        yield Traffic("vocabulary", name, formula, 0.0, small)


def _recomputed(traffic: Traffic, sent: float) -> Traffic:
    name = f"{traffic.name}, run again"
    return Traffic(traffic.scheme, name, traffic.formula, 0.0, sent)
