"""Floating-point operations of a model, term by term, each with its formula.

Only matrix products count, two operations per multiply-add; norms, activations and
rotations are linear in b s h and add about 1 % at small widths, less at large ones.
Looking up an embedding counts 0.

Attention is counted `full`, with every pair of query and key, or `causal`, with half of
them: of s x s pairs the triangle of s^2 / 2 without the diagonal, as in Porian et al.
2024 (arXiv:2406.19146, appendix A). Published utilisations differ most often in this
choice.
"""

from typing import Literal, NamedTuple

from jaxkv import validation
from scaling.costs import parameters
from scaling.shapes import HeadAttention, ModelShape

type Attention = Literal["full", "causal"]
"""Pairs of query and key that are counted: all of them, or half of them."""

type Checkpointing = Literal["none", "selective", "full", "boundary"]
"""Recomputation in the backward pass: none; scores and values of attention; all layers
(`full` and `boundary` differ only in the memory that they count)."""


STATE_PRODUCTS = "state, token by token"
"""Name of the products with the state of a recurrent layer; products of chunks of
tokens have other counts."""


class FlopTerm(NamedTuple):
    """Operations of one kind of product, over all layers.

    Attributes:
      part: the part of the model.
      name: the product.
      formula: operations per token of one layer that has the product, in the letters of
        `shapes.description`; t is the number of keys of a query.
      flops: operations of the whole call, forward.
      growth: growth with the length of the sequence: "s" or "s^2".
    """

    part: str
    name: str
    formula: str
    flops: int
    growth: Literal["s", "s^2"]


class TrainingFlops(NamedTuple):
    """Operations of one training step.

    Attributes:
      forward: operations of the forward pass.
      backward: twice the forward operations: the gradients of a product with respect to
        its input and to its weight are products of the same size (for scores: with
        respect to queries and to keys).
      recomputed: operations of recomputation.
      model: forward and backward, the basis of model FLOPs utilization (MFU).
    """

    forward: int
    backward: int
    recomputed: int
    model: int


@validation.checks_numbers(
    batch=validation.SIZES, sequence=validation.SIZES, past=(0, 2**63)
)
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
      model: shape of the model.
      batch: sequences, at least 1.
      sequence: new tokens of each sequence, at least 1.
      past: earlier tokens in the KV cache, at least 0.
      attention: convention for pairs of query and key.
      logits: tokens of a sequence that need logits.

    Raises:
      ValueError: a size is out of range.

    Sources: Kaplan et al. 2020, arXiv:2001.08361, table 1; Narayanan et al. 2021,
    arXiv:2104.04473, appendix; DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 (MLA).
    """
    tokens = batch * sequence
    places = parameters.place_counts(model)
    terms = []
    for weight in parameters.list_weights(model):
        if not weight.applied or weight.place == "ahead":
            continue
        times = batch if weight.part == "head" and logits == "last" else tokens
        number = weight.applied * places[weight.place]
        repeats = f"{weight.applied} · " if weight.applied > 1 else ""
        formula = f"2 · {repeats}{weight.formula}"
        flops = 2 * weight.size * number * times
        terms.append(FlopTerm(weight.part, weight.name, formula, flops, "s"))
    if (r := model.recurrent) is not None and r.state_numbers:
        products = 2 * r.products_per_number
        flops = products * r.state_numbers * model.num_recurrent_layers * tokens
        formula = f"{products} nv dk dv"
        terms.append(FlopTerm("recurrent", STATE_PRODUCTS, formula, flops, "s"))
    scores, values, formulas = _widths(model, absorbed=past > 0)
    pairs = batch * model.over_layers(
        lambda window: twice_pairs(sequence, past, window, attention)
    )
    for name, width, formula in (
        ("scores", scores, formulas[0]),
        ("values", values, formulas[1]),
    ):
        terms.append(FlopTerm("attention", name, formula, pairs * width, "s^2"))
    return tuple(terms)


@validation.checks_numbers(
    batch=validation.SIZES, context=validation.SIZES, steps=validation.SIZES
)
def decode_terms(
    model: ModelShape, *, batch: int = 1, context: int, steps: int = 1
) -> tuple[FlopTerm, ...]:
    """Lists the products of decoding steps, one token of each sequence a step.

    Args:
      model: shape of the model.
      batch: sequences, at least 1.
      context: keys of the first step's query, its own included, at least 1.
      steps: steps, at least 1; the number of keys grows by 1 a step.

    Returns:
      The terms; latent attention works on the latents, see `forward_terms`.
    """
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


@validation.checks_numbers(batch=validation.SIZES, sequence=validation.SIZES)
def training_step_flops(
    model: ModelShape,
    *,
    batch: int = 1,
    sequence: int,
    attention: Attention = "full",
    checkpointing: Checkpointing = "none",
) -> TrainingFlops:
    """Counts the operations of one training step.

    GPT-3 with full recomputation: `96 B L s h^2 (1 + s/6h + v/16hL)`; without, 72 in
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
    """Returns the sum of the terms."""
    return sum(term.flops for term in terms)


@validation.checks_numbers(
    sequence=validation.SIZES, window=validation.SIZES, past=(0, 2**63)
)
def twice_pairs(
    sequence: int, past: int, window: int | None, attention: Attention
) -> int:
    """Returns twice the number of pairs of query and key of one sequence in a layer.

    Args:
      sequence: new tokens.
      past: earlier tokens.
      window: number of latest keys of a query, None for all.
      attention: `full`: a query has all keys, or as many as its window; `causal`: a
        query at position x has min(x, window) keys.
    """
    if attention == "full":
        return 2 * sequence * min(sequence + past, window or sequence + past)
    return _twice_triangle(sequence + past, window) - _twice_triangle(past, window)


def _twice_triangle(length: int, window: int | None) -> int:
    if window is None or window >= length:
        return length * length
    return 2 * window * length - window * window


def _widths(model: ModelShape, *, absorbed: bool) -> tuple[int, int, tuple[str, str]]:
    """Returns numbers multiplied per pair in scores and in values, over all heads.

    Latent attention computes keys and values of new tokens from latents. For cached
    tokens it multiplies with the latents of all heads: the matrices for keys and values
    are then applied to queries and outputs, at equal cost.
    """
    a = model.attention
    n = model.attention.num_q_heads
    if isinstance(a, HeadAttention):
        return n * a.head_dim, n * a.head_dim, ("2 n d t", "2 n d t")
    if absorbed:
        formulas = "2 n (c + dr) t", "2 n c t"
        return n * a.cached_numbers, n * a.kv_rank, formulas
    return n * a.key_dim, n * a.value_dim, ("2 n (dn + dr) t", "2 n dv t")


def check_sizes(**sizes: int) -> None:
    """Checks that sizes are at least 1.

    Raises:
      ValueError: a size is below 1; the message has the first one.
    """
    for name, value in sizes.items():
        validation.integer(name, value, low=1, below=2**63)
