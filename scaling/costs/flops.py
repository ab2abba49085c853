"""Floating-point operations of a model, term by term, each with its formula.

Counted are matrix products, two operations per multiply-add; norms, activations and
rotations grow with b s h alone and add about 1 % at small widths, less at large ones.
Looking up an embedding is no product: 0.

Attention is counted `full`, as if every query met every key, or `causal`, half of that:
of s x s pairs the triangle of s^2 / 2, diagonal neglected, as Porian et al. 2024
(arXiv:2406.19146, appendix A) do. Which of the two a published utilisation means is the
commonest difference between two numbers.
"""

from typing import Literal, NamedTuple

from scaling.costs import parameters
from scaling.shapes import HeadAttention, ModelShape

type Attention = Literal["full", "causal"]

type Checkpointing = Literal["none", "selective", "full", "boundary"]
"""What is computed a second time in the backward pass: nothing; scores and values of
attention; all layers (`full` and `boundary` differ in the memory that they count)."""


class FlopTerm(NamedTuple):
    """Operations of one kind of product, over all layers.

    Attributes:
      part: the part of the model.
      name: the product.
      formula: per token, of one layer that has it, in the letters of
        `shapes.description`; t stands for the keys that a query meets.
      flops: of the whole call, forward.
      growth: how it grows with the length of the sequence: "s" or "s^2".
    """

    part: str
    name: str
    formula: str
    flops: int
    growth: Literal["s", "s^2"]


class TrainingFlops(NamedTuple):
    """Operations of one training step.

    Attributes:
      forward: the products of the forward pass.
      backward: twice these: the gradient of a product with respect to its input is a
        product of the same size, and so is that with respect to its weight (of scores:
        with respect to queries, and to keys).
      recomputed: what is computed again because it was not kept.
      model: forward and backward, what a model's utilisation (MFU) is measured with.
    """

    forward: int
    backward: int
    recomputed: int
    model: int


def forward_terms(
    model: ModelShape,
    *,
    batch: int = 1,
    sequence: int,
    past: int = 0,
    attention: Attention = "full",
    logits: Literal["all", "last"] = "all",
) -> tuple[FlopTerm, ...]:
    """Lists the products of one forward pass.

    Llama-7B, 2,048 tokens, full attention: 14.288 GFLOP per token; one layer at 4,096:
    1.932735 TFLOP.

    Args:
      model: its shape.
      batch: sequences, at least 1.
      sequence: new tokens of each, at least 1.
      past: tokens before them whose keys and values are kept, at least 0.
      attention: how pairs of query and key are counted.
      logits: of which tokens of a sequence logits are wanted.

    Raises:
      ValueError: a size out of range.

    Sources: Kaplan et al. 2020, arXiv:2001.08361, table 1; Narayanan et al. 2021,
    arXiv:2104.04473, appendix; DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 (MLA).
    """
    check_sizes(batch=batch, sequence=sequence)
    if past < 0:
        raise ValueError(f"{past=} must be at least 0")
    tokens, places = batch * sequence, parameters.place_counts(model)
    found = []
    for weight in parameters.list_weights(model):
        if not weight.applied or weight.place == "ahead":
            continue
        times = batch if weight.part == "head" and logits == "last" else tokens
        number = weight.applied * places[weight.place]
        repeats = f"{weight.applied} · " if weight.applied > 1 else ""
        formula = f"2 · {repeats}{weight.formula}"
        flops = 2 * weight.size * number * times
        found.append(FlopTerm(weight.part, weight.name, formula, flops, "s"))
    scores, values, formulas = _widths(model, absorbed=past > 0)
    pairs = batch * model.over_layers(
        lambda window: twice_pairs(sequence, past, window, attention)
    )
    for name, width, formula in (
        ("scores", scores, formulas[0]),
        ("values", values, formulas[1]),
    ):
        found.append(FlopTerm("attention", name, formula, pairs * width, "s^2"))
    return tuple(found)


def decode_terms(
    model: ModelShape, *, batch: int = 1, context: int, steps: int = 1
) -> tuple[FlopTerm, ...]:
    """Lists the products of decoding steps, a token of each sequence a step.

    Args:
      model: its shape.
      batch: sequences, at least 1.
      context: keys that the first step's query meets, its own included, at least 1.
      steps: steps, at least 1; every later query meets one key more.

    Returns:
      The terms; latent attention works on the latents, see `forward_terms`.
    """
    check_sizes(batch=batch, context=context, steps=steps)
    terms = forward_terms(model, batch=batch, sequence=steps, past=context)
    scores, values, _ = _widths(model, absorbed=True)

    def keys_met(window: int | None) -> int:
        growing = steps if window is None else min(steps, max(window - context, 0))
        met = growing * context + growing * (growing - 1) // 2
        return met + (steps - growing) * min(context + growing, window or 0)

    met = model.over_layers(keys_met)
    widths = {"scores": scores, "values": values}
    return tuple(
        x._replace(flops=2 * batch * met * widths[x.name]) if x.growth == "s^2" else x
        for x in terms
    )


def training_step_flops(
    model: ModelShape,
    *,
    batch: int = 1,
    sequence: int,
    attention: Attention = "full",
    checkpointing: Checkpointing = "none",
) -> TrainingFlops:
    """Counts one training step.

    GPT-3 with everything recomputed: `96 B L s h^2 (1 + s/6h + v/16hL)`, else 72 in
    place of 96 and 12 in place of 16.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 5.1 and appendix.
    """
    terms = forward_terms(model, batch=batch, sequence=sequence, attention=attention)
    once = total_flops(terms)
    again = {
        "none": 0,
        "selective": sum(term.flops for term in terms if term.growth == "s^2"),
    }.get(checkpointing, once - sum(x.flops for x in terms if x.part == "head"))
    return TrainingFlops(once, 2 * once, again, 3 * once)


def total_flops(terms: tuple[FlopTerm, ...]) -> int:
    """Adds terms up."""
    return sum(term.flops for term in terms)


def twice_pairs(
    sequence: int, past: int, window: int | None, attention: Attention
) -> int:
    """Twice the pairs of query and key of one sequence, in one layer.

    Args:
      sequence: new tokens.
      past: tokens before them.
      window: latest keys that a query sees, None for all.
      attention: `full`: every query meets all keys, or as many as its window holds;
        `causal`: a query at place x meets min(x, window) of them.
    """
    if attention == "full":
        return 2 * sequence * min(sequence + past, window or sequence + past)
    return _twice_triangle(sequence + past, window) - _twice_triangle(past, window)


def _twice_triangle(length: int, window: int | None) -> int:
    if window is None or window >= length:
        return length * length
    return 2 * window * length - window * window


def _widths(model: ModelShape, *, absorbed: bool) -> tuple[int, int, tuple[str, str]]:
    """Numbers multiplied per pair in scores and in values, over all heads.

    Latent attention makes keys and values where it meets them once. Where it meets
    kept ones it works on the latents themselves, for all heads the same: the matrices
    that would make keys and values then act on queries and outputs, at equal cost.
    """
    a, n = model.attention, model.attention.num_q_heads
    if isinstance(a, HeadAttention):
        return n * a.head_dim, n * a.head_dim, ("2 n d t", "2 n d t")
    if absorbed:
        formulas = "2 n (c + dr) t", "2 n c t"
        return n * a.cached_numbers, n * a.kv_rank, formulas
    return n * a.key_dim, n * a.value_dim, ("2 n (dn + dr) t", "2 n dv t")


def check_sizes(**sizes: int) -> None:
    """Refuses sizes below 1.

    Raises:
      ValueError: names the first.
    """
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
