"""Activations that a forward pass keeps for the backward pass, tensor by tensor.

The list assumes good kernels: a norm keeps its input, a product its input, an
activation function its input, attention its queries, keys and values and either all
weights or, with flash attention, the log-sum-exp of each row. The sum for a GPT layer
with dropout is the well-known `s b h (34 + 5 a s / h)`; a Llama layer has another.

Tensors that `jax.vjp` keeps for the models of this package are in `residuals`.

Sources: Korthikanti et al. 2022, arXiv:2205.05198, sections 4.1 and 4.2 (the list, and
its division by tensor and sequence parallelism); Dao et al. 2022, arXiv:2205.14135 (no
weights kept, one log-sum-exp a row).
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from jaxkv import validation
from scaling.costs.parallelism import Layout
from scaling.shapes import HeadAttention, ModelShape

type TensorPlace = Literal["every", "attention", "recurrent", "dense", "mixture"]
"""Layers that have a tensor."""

type Divided = Literal["sequence", "heads", "kv_heads", "no"]
"""Axis by which tensor parallelism divides a tensor; `sequence` applies only with
Megatron's sequence parallelism."""


class StoredTensor(NamedTuple):
    """A tensor that one layer keeps.

    Attributes:
      part: part of the layer: norms, attention, scores, recurrent, mlp, experts.
      name: description of the tensor.
      formula: bytes per token, in the letters of `shapes.description`.
      bytes: bytes per token.
      place: layers that have the tensor.
      divided: axis by which tensor parallelism divides it.
    """

    part: Literal["norms", "attention", "scores", "recurrent", "mlp", "experts"]
    name: str
    formula: str
    bytes: int | float
    place: TensorPlace
    divided: Divided


@validation.checks_numbers(sequence=validation.SIZES)
def stored_tensors(
    model: ModelShape,
    *,
    sequence: int,
    flash: bool = True,
    dropout: bool = False,
    number_bytes: int = 2,
) -> tuple[StoredTensor, ...]:
    """Lists the tensors that each layer keeps, in bytes per token.

    Llama-7B in 16 bits with flash attention: 131,584 + 128 bytes.

    Args:
      model: shape of the model.
      sequence: tokens of a sequence; matters if attention weights are kept.
      flash: True for flash attention, which keeps no attention weights.
      dropout: True if attention weights and both branches have dropout; a mask has one
        byte a number.
      number_bytes: bytes of a number, 2 or 4.

    Raises:
      ValueError: a size is out of range.
    """
    e = number_bytes
    h = model.hidden_size
    n = model.attention.num_q_heads
    norm = functools.partial(StoredTensor, "norms", place="every", divided="sequence")
    size = model.norms_per_layer * e
    num_branches = 1 if model.branches else 2
    outputs = num_branches * e
    tensors = [
        norm("inputs of the norms", f"{size} h", size * h),
        norm("outputs of the norms", f"{outputs} h", outputs * h),
    ]
    if dropout:
        masks = "h" if model.branches else "2 h"
        size = num_branches * h
        tensors.append(norm("dropout masks of the branches", masks, size))
    tensors += _attention(model, e)
    scores = functools.partial(
        StoredTensor, "scores", place="attention", divided="heads"
    )
    if flash:
        tensors.append(scores("log-sum-exp", "4 n", 4 * n))
    else:
        tensors.append(scores("weights", f"{e} n s", e * n * sequence))
    if dropout and not flash:
        tensors.append(scores("mask of the weights", "n s", n * sequence))
        tensors.append(scores("weights that are left", f"{e} n s", e * n * sequence))
    tensors += _recurrent(model, e)
    if model.num_dense_layers:
        inner = e * (2 + model.gated)
        name = "gate, up and their product" if model.gated else "up, before and after"
        width = inner * model.mlp_size
        tensors.append(StoredTensor("mlp", name, f"{inner} i", width, "dense", "heads"))
    return (*tensors, *_experts(model, e))


def layer_bytes(
    tensors: Sequence[StoredTensor],
    model: ModelShape,
    layers: Iterable[int],
    layout: Layout | None = None,
) -> list[float]:
    """Returns the sum of the tensors of each layer, in bytes per token on one device.

    Args:
      tensors: as `stored_tensors` lists them.
      model: shape of the model.
      layers: numbers of the layers.
      layout: division over devices, one device by default; context parallelism is
        not applied here.
    """
    layout = layout or Layout()
    sums: dict[TensorPlace, float] = dict.fromkeys(get_args(TensorPlace.__value__), 0.0)
    for tensor in tensors:
        parts = 1
        if tensor.divided == "kv_heads":  # fewer heads than devices are copied
            parts = min(layout.tensor, model.attention.num_kv_heads)
        elif tensor.divided == "heads" or (
            tensor.divided == "sequence" and layout.sequence
        ):
            parts = layout.tensor
        sums[tensor.place] += tensor.bytes / parts
    return [
        functools.reduce(lambda x, sort: x + sums[sort], branches, sums["every"])
        for branches in map(model.sorts_of, layers)
    ]


def _attention(model: ModelShape, e: int) -> Iterable[StoredTensor]:
    a = model.attention
    n = model.attention.num_q_heads

    def tensor(name: str, formula: str, numbers: int, divided: Divided) -> StoredTensor:
        num_bytes = e * numbers
        return StoredTensor(
            "attention", name, f"{e} · {formula}", num_bytes, "attention", divided
        )

    if isinstance(a, HeadAttention):
        m = a.num_kv_heads
        d = a.head_dim
        yield tensor("queries", "n d", n * d, "heads")
        yield tensor("keys and values", "2 m d", 2 * m * d, "kv_heads")
        if a.qk_norm:
            yield tensor("before the query norm", "n d", n * d, "heads")
            yield tensor("before the key norm", "m d", m * d, "kv_heads")
        yield tensor("output", "n d", n * d, "heads")
        return
    latent = 2 * a.kv_rank + a.rope_dim
    if a.q_rank is not None:
        yield tensor("query latent, norm and output", "2 q", 2 * a.q_rank, "no")
    yield tensor("latent and its norm, rotary key", "(2 c + dr)", latent, "no")
    yield tensor("queries and keys", "2 n (dn + dr)", 2 * n * a.key_dim, "heads")
    yield tensor("values and output", "2 n dv", 2 * n * a.value_dim, "heads")


def _recurrent(model: ModelShape, e: int) -> Iterable[StoredTensor]:
    """Tensors of a recurrent layer, whose kernel recomputes the states of chunks."""
    if (r := model.recurrent) is None:
        return

    def tensor(name: str, formula: str, size: int) -> StoredTensor:
        text = f"{e} · {formula}"
        return StoredTensor("recurrent", name, text, e * size, "recurrent", "no")

    if r.kind == "conv":
        yield tensor("projections and their product", "4 dv", 4 * r.num_outputs)
        yield tensor("output and its product", "2 dv", 2 * r.num_outputs)
        return
    channels = "2 nk dk + nv dv"
    name = "before and after the convolution"
    yield tensor(name, f"2 ({channels})", 2 * r.num_channels)
    yield tensor("queries, keys and values", f"({channels})", r.num_channels)
    yield tensor("gate, output, gated output", "3 nv dv", 3 * r.num_outputs)
    numbers = r.num_value_heads * (r.key_dim if r.kind == "kda" else 1)
    formula = "nv dk" if r.kind == "kda" else "nv"
    if r.kind != "mamba2":
        numbers += r.num_value_heads
        formula = "(nv dk + nv)" if r.kind == "kda" else "2 nv"
    yield tensor("decays and rates", formula, numbers)


def _experts(model: ModelShape, e: int) -> Iterable[StoredTensor]:
    """Tensors of a mixture of experts without dropped tokens."""
    if (x := model.experts) is None or not model.num_mixture_layers:
        return

    def tensor(name: str, formula: str, size: int, divided: Divided) -> StoredTensor:
        return StoredTensor("experts", name, formula, size, "mixture", divided)

    width = x.latent_size or model.hidden_size
    letter = "h" if x.latent_size is None else "l"
    k = x.top_k
    inner = 2 + model.gated
    yield tensor("routing weights", "4 e", 4 * x.num_experts, "sequence")
    if x.latent_size is not None:
        size = 2 * e * width
        yield tensor("latent inputs and outputs", f"{2 * e} l", size, "no")
    yield tensor("inputs by expert", f"{e} k {letter}", e * k * width, "no")
    size = e * inner * k * x.size
    yield tensor("gate, up and their product", f"{e * inner} k j", size, "heads")
    yield tensor("outputs before weighting", f"{e} k {letter}", e * k * width, "no")
    if x.shared_size:
        width = e * inner * x.shared_size
        yield tensor("the same of shared experts", f"{e * inner} js", width, "heads")
