"""What is sent once more, where the backward pass computes activations again.

A collective runs again if a gradient needs its result. Stages of a pipeline keep of a
micro-batch what came in, and run all of their layers again. `StepConfig.remat` keeps
the results of products, and computes again what lies between: sums over devices go
into the next norm, exchanged rows, keys and values into attention, experts and the
gradients of weights. Only what a kept product alone was made of is not needed again;
and the loss of balance is asked for by its gradient alone, so it is computed once.

Source: Chen et al. 2016, arXiv:1604.06174, section 3.
"""

from collections.abc import Iterable

from scaling.costs import exchanges
from scaling.costs.exchanges import StagePass, Traffic


def stage_recomputation_traffic(
    sent_in: StagePass, layers: Iterable[Traffic]
) -> Iterable[Traffic]:
    """What layers send forward, and the embedding, for stages of a pipeline.

    All stages look tokens up, and one takes what is found.

    Args:
      sent_in: the pass forward.
      layers: what they send.
    """
    layout = sent_in.layout
    if layout.pipeline == 1:
        return
    for each in layers:
        if each.forward and each.scheme != "balance":
            yield _again(each, each.forward)
    if (p := layout.tensor) > 1:
        # An all-reduce; with sequence parallelism scattered alone.
        times = 1 if layout.sequence else 2
        sent = times * exchanges.ring_share(p) * sent_in.block
        formula = f"{times} (p-1)/p · b s h u".replace("1 (", "(")
        yield Traffic("vocabulary", "embedding, run again", formula, 0.0, sent)


def product_recomputation_traffic(
    sent_in: StagePass, layers: Iterable[Traffic]
) -> Iterable[Traffic]:
    """What is sent forward, where the results of products are kept.

    With sequence parallelism rows that are gathered for a product are not, but those
    for the head, and for experts, whose routing needs them. Of the loss the gradient
    needs the greatest logit and the sum, not the target's. Arguments are those of
    `stage_recomputation_traffic`.
    """
    layout, block, p = sent_in.layout, sent_in.block, sent_in.layout.tensor
    for each in layers:
        if each.scheme == "tensor" and layout.sequence:
            num = 2 * sent_in.model.num_layers + sent_in.mixtures
            sent = exchanges.ring_share(p) * block * num
            name, formula = "reduce-scatters of a layer", "2 (p-1)/p · b s h u · L"
            yield _again(each._replace(name=name, formula=formula), sent)
        elif each.forward and each.scheme != "balance":
            yield _again(each, each.forward)
    if p > 1:
        sent = 2 * exchanges.ring_share(p) * block
        name = "embedding, run again"
        if layout.sequence:
            name = "embedding and head's input, run again"
        formula = "2 (p-1)/p · b s h u"
        yield Traffic("vocabulary", name, formula, 0.0, sent)
        small = 2 * 2 * exchanges.ring_share(p) * sent_in.tokens * 4
        name, formula = "greatest logit and sum, run again", "2 · 2 (p-1)/p · 4 b s"
        yield Traffic("vocabulary", name, formula, 0.0, small)


def _again(each: Traffic, sent: float) -> Traffic:
    name = f"{each.name}, run again"
    return Traffic(each.scheme, name, each.formula, 0.0, sent)
