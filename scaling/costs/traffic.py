"""Bytes that each device sends in one training step, scheme by scheme.

An all-reduce of x bytes over p devices in a ring sends `2 (p-1)/p x` bytes per device,
an all-gather or reduce-scatter half of that, an all-to-all of x bytes held by each
`(p-1)/p x`. Forward and backward stand apart; a transfer that is hidden behind products
is counted like any other.
"""

from collections.abc import Iterable
from typing import NamedTuple

from scaling.costs import memory, parallelism
from scaling.costs.flops import check as check_sizes
from scaling.costs.parallelism import Layout
from scaling.shapes import Description, HeadAttention


class Traffic(NamedTuple):
    """One kind of exchange, over a step of one micro-batch.

    Attributes:
      scheme: tensor, vocabulary, sequence, pipeline, scatter_gather, ulysses, ring,
        pages, expert, balance or data.
      name: what is exchanged, and how.
      formula: bytes sent per device, in the letters of `shapes.description`
        with u bytes a number and the degree p.
      forward: those of all layers that the device has, forward.
      backward: the same, backward.
    """

    scheme: str
    name: str
    formula: str
    forward: float
    backward: float


def training(
    model: Description,
    layout: Layout,
    *,
    batch: int = 1,
    sequence: int,
    number_bytes: int = 2,
    dispatch_bytes: int | None = None,
    gradient_bytes: int = 2,
) -> tuple[Traffic, ...]:
    """Lists what a device sends in a training step, of its pipeline stage's layers.

    Llama-7B, 1 x 4,096 tokens, tensor parallel over 8: 3,758,096,384 bytes forward
    and as many backward.

    Args:
      model: its shape.
      layout: how it is divided.
      batch: sequences of a micro-batch on one data-parallel device, at least 1.
      sequence: tokens of each, at least 1.
      number_bytes: of an activation or weight on the wire.
      dispatch_bytes: of a number on its way to an expert; the same by default, 1 if
        it is sent in 8 bits.
      gradient_bytes: of a number of a weight's gradient.

    Raises:
      ValueError: a size out of range, or a degree that does not divide.
    """
    check_sizes(batch=batch, sequence=sequence, number_bytes=number_bytes)
    parallelism.check(model, layout, sequence=sequence)
    tokens = batch * sequence // layout.context
    layers = model.num_layers // layout.pipeline
    dispatch = number_bytes if dispatch_bytes is None else dispatch_bytes
    return (
        *_tensor(model, layout, tokens, layers, number_bytes),
        *_undivided(model, layout, gradient_bytes),
        *_vocabulary(model, layout, tokens, number_bytes),
        *_pipeline(model, layout, tokens, number_bytes),
        *_ulysses(model, layout, tokens, layers, number_bytes),
        *_ring(model, layout, tokens, layers, number_bytes),
        *_expert(model, layout, tokens, number_bytes, dispatch),
        *_data(model, layout, number_bytes, gradient_bytes),
    )


def _tensor(
    model: Description, layout: Layout, tokens: int, layers: int, u: int
) -> Iterable[Traffic]:
    """After attention and after the FFN; backward, before them.

    Sources: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
    arXiv:2205.05198, section 4.2.2: an all-gather and a reduce-scatter in place of an
    all-reduce send as much, but of what is kept in parts the products' inputs are
    gathered once more for the gradients of weights.
    """
    p, block = layout.tensor, tokens * model.hidden_size * u
    mixtures = _mixtures(model, layout)
    if p == 1:
        return
    once = 2 * _ring_share(p) * 2 * block * layers
    name = "all-gathers and reduce-scatters" if layout.sequence else "all-reduces"
    formula = "2 · 2 (p-1)/p · b s h u · L"
    yield Traffic("tensor", f"{name} of a layer", formula, once, once)
    if layout.sequence:
        # What goes into experts is kept.
        inputs = 2 * layers - mixtures
        again = _ring_share(p) * block * inputs
        name = "inputs gathered again for weights' gradients"
        yield Traffic("sequence", name, "2 · (p-1)/p · b s h u · L", 0.0, again)
    elif mixtures:
        assert model.experts is not None
        numbers = model.experts.top_k + model.experts.shared_gate
        shares = 2 * _ring_share(p) * tokens * numbers * 4 * mixtures
        name = "gradients of experts' shares, all-reduce"
        yield Traffic("tensor", name, "2 (p-1)/p · 4 k b s · L", 0.0, shares)


def _undivided(model: Description, layout: Layout, gradient: int) -> Iterable[Traffic]:
    """Norms and biases that work on a part of the sequence each: gradients added up.

    Norms of queries and keys, which work on a device's heads, need it without, too; a
    few numbers, not counted.
    """
    if layout.sequence:
        size = memory.most_undivided(model, layout)
        sent = 2 * _ring_share(layout.tensor) * size * gradient
        name = "gradients of norms and biases, all-reduce"
        yield Traffic("sequence", name, "2 (p-1)/p · N u of norms", 0.0, sent)


def _vocabulary(
    model: Description, layout: Layout, tokens: int, u: int
) -> Iterable[Traffic]:
    """The table and the head divided by vocabulary, on the stages that have them.

    Each device looks up its own words, and the sums make the embedding; the loss needs
    of all logits the greatest, the sum of exponentials and the target's, in float32.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    p, block = layout.tensor, tokens * model.hidden_size * u
    if p == 1:
        return
    # Forward the looked-up parts are added, backward those of the head's input; with
    # sequence parallelism both are half of that, and gathered in the other direction.
    reduce = 2 * _ring_share(p) * block
    formula = "2 (p-1)/p · b s h u"
    if layout.sequence:
        name = "embedding and head's input, scattered and gathered"
        yield Traffic("vocabulary", name, formula, reduce, reduce)
    else:
        yield Traffic("vocabulary", "embedding, all-reduce", formula, reduce, 0.0)
        yield Traffic("vocabulary", "head's input, all-reduce", formula, 0.0, reduce)
    small = 3 * 2 * _ring_share(p) * tokens * 4
    name = "greatest logit, sum and target's, all-reduces"
    yield Traffic("vocabulary", name, "3 · 2 (p-1)/p · 4 b s", small, 0.0)


def _pipeline(
    model: Description, layout: Layout, tokens: int, u: int
) -> Iterable[Traffic]:
    """One activation to the next stage, one gradient back: what an inner stage sends.

    Source: Narayanan et al. 2021, arXiv:2104.04473, sections 3.2 and 4.1: with tensor
    parallelism each device sends its part, and the stage that receives gathers them
    over its faster links; with sequence parallelism they are parts anyway.
    """
    if layout.pipeline == 1:
        return
    sent = tokens * model.hidden_size * u / layout.tensor
    formula = "b s h u / t" if layout.tensor > 1 else "b s h u"
    yield Traffic("pipeline", "to the next stage, and back", formula, sent, sent)
    if layout.tensor > 1 and not layout.sequence:
        gathered = _ring_share(layout.tensor) * tokens * model.hidden_size * u
        name = "parts gathered by the stage that receives"
        formula = "(t-1)/t · b s h u"
        yield Traffic("scatter_gather", name, formula, gathered, gathered)


def _ulysses(
    model: Description, layout: Layout, tokens: int, layers: int, u: int
) -> Iterable[Traffic]:
    """Queries, keys, values and output change between sequence and heads.

    KV heads fewer than devices are copied first.

    Source: Jacobs et al. 2023, arXiv:2309.14509, section 3.
    """
    p = layout.ulysses
    if p == 1:
        return
    a = model.attention
    outputs = a.num_q_heads * a.value_dim
    if isinstance(a, HeadAttention):
        kv_heads = max(a.num_kv_heads, p * layout.tensor)
        numbers = a.num_q_heads * a.head_dim + outputs + 2 * kv_heads * a.head_dim
    else:
        numbers = a.num_q_heads * (2 * a.key_dim + a.value_dim) + outputs
    sent = _ring_share(p) * tokens * numbers * u / layout.tensor * layers
    formula = "(2 n + 2 m) d · b s/p · (p-1)/p · u · L"
    yield Traffic("ulysses", "4 all-to-alls of a layer", formula, sent, sent)


def _ring(
    model: Description, layout: Layout, tokens: int, layers: int, u: int
) -> Iterable[Traffic]:
    """Keys and values go round in p - 1 hops; backward again, with their gradients.

    The gradients make p hops, the last one home.

    Source: Liu et al. 2023, arXiv:2310.01889, section 3.
    """
    p = layout.ring
    if p == 1:
        return
    a = model.attention
    heads = max(a.num_kv_heads // (layout.tensor * layout.ulysses), 1)
    block = tokens * layout.ulysses * heads * (a.key_dim + a.value_dim) * u * layers
    formula = "2 m d · b s/p · (p-1) · u · L; back with p more"
    forward = block * (p - 1)
    name, back = "keys and values, hop by hop", forward + block * p
    yield Traffic("ring", name, formula, float(forward), float(back))


def _expert(
    model: Description, layout: Layout, tokens: int, u: int, dispatch: int
) -> Iterable[Traffic]:
    """Each token to its k experts and back, or all tokens to all devices.

    Sent directly, as many bytes as experts that are drawn alike make on average. With a
    capacity, buffers of one size whether full or not. Gathered, every token once, with
    the numbers and shares of its experts, and the sums back.

    Sources: Lepikhin et al. 2020, arXiv:2006.16668, section 3; bytes in 8 bits:
    DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.2.
    """
    p, x, layers = layout.expert, model.experts, _mixtures(model, layout)
    if x is None:
        return
    if (copies := layout.copies) > 1:
        sent = 2 * _ring_share(copies) * 4 * x.num_experts * layers
        name = "loads of experts, for the loss of balance, all-reduce"
        yield Traffic("balance", name, "2 (p-1)/p · 4 E · L", sent, 0.0)
    if p == 1:
        return
    if layout.gather:
        block = (p - 1) * tokens * model.hidden_size * layers
        shares = (p - 1) * tokens * x.top_k * 4 * layers
        name = "all tokens gathered, sums scattered"
        formula = "(p-1) b s (h (dispatch u + u) + 8 k) · L; back 2 h u + 4 k"
        sent = float(block * (dispatch + u) + 2 * shares)
        yield Traffic("expert", name, formula, sent, float(block * 2 * u + shares))
        return
    # Tensor-parallel devices hold the same tokens; each sends its part.
    width = _ring_share(p) * model.hidden_size / layout.tensor * layers
    if layout.capacity is None:
        rows, many = tokens * x.top_k, "k b s"
    else:
        sizes = {"top_k": x.top_k, "num_experts": x.num_experts}
        rows, many = x.num_experts * layout.places(tokens, **sizes), "E C"
    formula = f"(p-1)/p · {many} h (dispatch u + combine u) / t · L"
    name = "to the experts and back, all-to-alls"
    sent, back = rows * width * (dispatch + u), rows * width * 2 * u
    yield Traffic("expert", name, formula, sent, back)


def _mixtures(model: Description, layout: Layout) -> int:
    """Layers with experts, of the stage that has most of them."""
    each = model.num_layers // layout.pipeline
    return max(
        sum(model.mixture_layers[x * each : (x + 1) * each])
        for x in range(layout.pipeline)
    )


def _data(
    model: Description, layout: Layout, u: int, gradient: int
) -> Iterable[Traffic]:
    """Gradients of all copies added up, weights gathered where they are divided.

    Source: Rajbhandari et al. 2019, arXiv:1910.02054, section 7.
    """
    most = memory.most_held(model, layout)
    groups = (
        ("weights", most.shared, layout.copies),
        ("experts", most.experts, layout.copies // layout.expert),
    )
    for what, size, p in groups:
        if p == 1 or not size:
            continue
        share = _ring_share(p)
        reduce, gather = share * size * gradient, share * size * u
        if layout.zero == 3:
            name = f"{what}: gathered twice, gradients reduced and scattered"
            formula = "3 (p-1)/p · N u"
            yield Traffic("data", name, formula, gather, gather + reduce)
        elif layout.zero:
            name = f"{what}: gradients reduced and scattered, weights gathered"
            yield Traffic("data", name, "2 (p-1)/p · N u", 0.0, reduce + gather)
        else:
            name = f"gradients of {what}, all-reduce"
            yield Traffic("data", name, "2 (p-1)/p · N u", 0.0, 2 * reduce)


def _ring_share(p: int) -> float:
    """What of its data a device sends in an all-gather over p devices."""
    return (p - 1) / p


def decode(
    model: Description, layout: Layout, *, batch: int, number_bytes: int = 2
) -> tuple[Traffic, ...]:
    """Lists what a device sends in a step of decoding, or of reading prompts.

    The logits are gathered on every device, each of which draws. With `gather` all
    devices that divide experts have all rows; otherwise `batch` is of each. `backward`
    is 0.

    Args:
      model: its shape.
      layout: how it is divided; of ring, Ulysses and data nothing is sent.
      batch: rows, one of each sequence when decoding, at least 1.
      number_bytes: of a number on the wire.

    Raises:
      ValueError: a size out of range, or a degree that does not divide.
    """
    check_sizes(batch=batch, number_bytes=number_bytes)
    parallelism.check(model, layout)
    layers = model.num_layers // layout.pipeline
    found = [
        *_tensor(model, layout, batch, layers, number_bytes),
        *_vocabulary(model, layout, batch, number_bytes),
        *_pipeline(model, layout, batch, number_bytes),
        *_pages(model, layout, batch, layers),
    ]
    if layout.gather:
        found += _answers(model, layout, batch, number_bytes)
    else:
        found += _expert(model, layout, batch, number_bytes, number_bytes)
    kept = [
        traffic._replace(backward=0.0)
        for traffic in found
        if traffic.forward and "target" not in traffic.name
    ]
    if layout.tensor > 1:
        sent = _ring_share(layout.tensor) * batch * model.vocab_size * 4
        name = "logits, all-gather"
        kept.append(Traffic("vocabulary", name, "(p-1)/p · 4 b v", sent, 0.0))
    return tuple(kept)


def _pages(
    model: Description, layout: Layout, rows: int, layers: int
) -> Iterable[Traffic]:
    """States of attention over parts of the pages, merged by log-sum-exp in float32.

    Of every row and query head an all-reduce of the greatest log-sum-exp, and one of
    the weighted values with the sum of the weights.

    Source: Dao et al. 2022, arXiv:2205.14135, section 3.1, for the merge.
    """
    if (p := layout.pages) == 1:
        return
    a = model.attention
    if not isinstance(a, HeadAttention):
        raise ValueError(f"pages={p} needs keys and values by heads: {model.name}")
    numbers = rows * a.num_q_heads / layout.tensor * (a.value_dim + 2)
    sent = 2 * _ring_share(p) * numbers * 4 * layers
    formula = "2 (p-1)/p · 4 b n (d + 2) / t · L"
    yield Traffic("pages", "states of attention, all-reduces", formula, sent, 0.0)


def _answers(
    model: Description, layout: Layout, rows: int, u: int
) -> Iterable[Traffic]:
    """What experts answer to rows that every device has, added up."""
    p = layout.expert
    sent = 2 * _ring_share(p) * rows * model.hidden_size * u
    sent *= _mixtures(model, layout)
    name = "experts' answers, all-reduce"
    yield Traffic("expert", name, "2 (p-1)/p · b h u · L", sent, 0.0)
