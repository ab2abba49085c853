"""Shapes of models, the input of the cost formulas.

Wider than `jaxkv.models.ModelConfig`, which describes models that this package can run:
also latent attention, mixtures of experts, windows that differ by layer, and layers for
multi-token prediction. Plain Python, so that costs are computed without importing JAX.

The letters of the formulas: b sequences, s tokens of each, h hidden size, i FFN width,
n query heads, m KV heads, d head size, v vocabulary, L layers, e experts, k of them
used by a token, j the width of an expert.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from jaxkv.validation import ConfigRecord, NonNegativeInt, PositiveInt, Range


class HeadAttention(ConfigRecord):
    """Multi-head, grouped-query or multi-query attention."""

    num_q_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    """Size of a head; n d need not be the hidden size (Qwen3, Gemma)."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """RMS norm of queries and keys (Qwen3, Gemma 3)."""
    qk_norm_over: Literal["head", "layer"] = "head"
    """That norm is over head_dim of every head, or over all heads (OLMo 2)."""
    sinks: bool = False
    """True if each query head has a score without a key (gpt-oss)."""
    out_gate: bool = False
    """True if a product of the size of the queries' scales the outputs (Qwen3.5)."""

    def __post_init__(self) -> None:
        """Validates the head counts."""
        super().__post_init__()
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads={self.num_q_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )

    @property
    def key_dim(self) -> int:
        """Width of a query or key head."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim

    @property
    def cached_value_dim(self) -> int:
        """Width of attention's output over the KV cache, for one query head."""
        return self.head_dim

    @property
    def cached_numbers(self) -> int:
        """Numbers of a token in the KV cache of one layer: K and V."""
        return 2 * self.num_kv_heads * self.head_dim


class LatentAttention(ConfigRecord):
    """Multi-head latent attention: keys and values are projections of one short vector.

    Source: DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    num_q_heads: PositiveInt
    q_rank: Annotated[int | None, Range(1)]
    """Width of the compressed query; None for queries without compression."""
    kv_rank: PositiveInt
    """Width of the latent that is cached instead of K and V."""
    nope_dim: PositiveInt
    """Part of a query or key head without positions."""
    rope_dim: PositiveInt
    """Rotary part of a query head; all heads share one rotary key."""
    value_dim: PositiveInt

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of the projected keys and values."""
        return self.num_q_heads

    @property
    def key_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_value_dim(self) -> int:
        """Width of attention's output over the KV cache: a mean of latents."""
        return self.kv_rank

    @property
    def cached_numbers(self) -> int:
        """Cached numbers of a token in one layer: the latent and the rotary key."""
        return self.kv_rank + self.rope_dim


class RecurrentShape(ConfigRecord):
    """A recurrence: a state of each sequence in place of K and V.

    Source: as `jaxkv.models.RecurrenceConfig`, which has the same fields.
    """

    kind: Literal["gdn", "kda", "mamba2", "conv"] = "gdn"
    """Gated delta rule, Kimi delta attention, Mamba 2, or a short convolution."""
    num_key_heads: PositiveInt
    num_value_heads: PositiveInt
    key_dim: PositiveInt
    """Width of a key or query head."""
    value_dim: PositiveInt
    """Width of a value head."""
    kernel_size: PositiveInt = 4
    """Tokens that the convolution over queries, keys and values sees."""
    conv_bias: bool = False
    projection_bias: bool = False
    """True if the projections into and out of the recurrence have biases."""

    @property
    def num_channels(self) -> int:
        """Width of the convolution: queries, keys and values."""
        if self.kind == "conv":
            return self.num_outputs
        return 2 * self.num_key_heads * self.key_dim + self.num_outputs

    @property
    def num_outputs(self) -> int:
        """Width of the output: values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def state_numbers(self) -> int:
        """Numbers of a sequence's state in one layer, without the convolution's."""
        return 0 if self.kind == "conv" else self.num_outputs * self.key_dim

    @property
    def conv_numbers(self) -> int:
        """Inputs of the convolution that a sequence keeps in one layer."""
        return (self.kernel_size - 1) * self.num_channels

    @property
    def products_per_number(self) -> int:
        """Products of a token with each number of the state: write, read, correct."""
        return 2 if self.kind == "mamba2" else 3


type LayerSort = Literal["attention", "recurrent", "dense", "mixture"]
"""A branch of a layer: attention, a recurrent state, a dense FFN or experts."""


class MixtureShape(ConfigRecord):
    """Mixture of experts: a token uses `top_k` routed experts, and all shared ones."""

    num_experts: PositiveInt
    top_k: PositiveInt
    size: PositiveInt
    """FFN width of a routed expert."""
    shared_size: NonNegativeInt = 0
    """FFN width of all shared experts together."""
    latent_size: Annotated[int | None, Range(1)] = None
    """Width of the inputs and outputs of routed experts; None: the hidden size."""
    shared_gate: bool = False
    """True if a number per token, from h weights, scales the shared part (Qwen2)."""
    router_bias: bool = False
    """True if the router's logits have biases (gpt-oss)."""
    expert_bias: bool = False
    """True if the products of an expert have biases (gpt-oss)."""
    gate_bias: bool = False
    """True if routing adds a correction to each expert's score (DeepSeek-V3)."""

    def __post_init__(self) -> None:
        """Validates the counts."""
        super().__post_init__()
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} must be at most num_experts={self.num_experts}"
            )


class ModelShape(ConfigRecord):
    """Shape of a decoder-only transformer."""

    name: str
    """Name in tables; does not affect the shape."""
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    attention: HeadAttention | LatentAttention
    mlp_size: PositiveInt
    """FFN width of the dense layers."""
    gated: bool = True
    """True if an MLP has a gate next to its up projection: three matrices, not two."""
    mlp_bias: bool = False
    experts: MixtureShape | None = None
    mixture_layers: tuple[bool, ...] = ()
    """Mask of the layers with experts; empty: all if there are experts, else none."""
    norm: Literal["rms", "layer", "plain"] = "rms"
    """Kind of norm; a layer norm has a bias in addition to its scale, and a plain one
    has no weights."""
    norms_per_layer: PositiveInt = 2
    """Norms over the hidden size; 4 if the branches' outputs have norms (Gemma 2)."""
    position_rows: NonNegativeInt = 0
    """Rows of a table of learned positions; 0 with rotary ones."""
    windows: tuple[int | None, ...] = ()
    """Window of each layer, None for all tokens; empty: no layer has a window."""
    recurrent: RecurrentShape | None = None
    """Recurrent layers that some models have in place of attention."""
    recurrent_layers: tuple[bool, ...] = ()
    """Mask of the layers with `recurrent` in place of attention; empty: none."""
    branches: tuple[LayerSort, ...] = ()
    """The only branch of each layer (Nemotron-H), which decides the two masks above;
    empty: a layer has attention or a state, and a dense FFN or experts."""
    tie_embeddings: bool = False
    num_ahead_layers: NonNegativeInt = 0
    """Layers for multi-token prediction, in addition to `num_layers` (DeepSeek-V3)."""
    max_positions: int | None = None
    """Longest sequence of the model, if known."""

    def __post_init__(self) -> None:
        """Validates the sizes, and expands per-layer fields to one entry per layer."""
        super().__post_init__()
        if self.branches:
            masks = {"mixture_layers": "mixture", "recurrent_layers": "recurrent"}
            for name, sort in masks.items():
                mask = tuple(branch == sort for branch in self.branches)
                object.__setattr__(self, name, mask)
            object.__setattr__(self, "norms_per_layer", 1)
        per_layer = {
            "mixture_layers": self.mixture_layers or (self.experts is not None,),
            "windows": self.windows or (None,),
        }
        for name, values in per_layer.items():
            if len(values) == 1:
                values *= self.num_layers
            if len(values) != self.num_layers:
                raise ValueError(
                    f"{len(values)} {name} for num_layers={self.num_layers}"
                )
            object.__setattr__(self, name, values)
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"{min(w for w in self.windows if w)=} must be at least 1")
        if any(self.mixture_layers) and self.experts is None:
            raise ValueError("mixture_layers without experts")
        if any(self.recurrent_layers) and self.recurrent is None:
            raise ValueError("recurrent_layers without recurrent")
        if not any(self.recurrent_layers):  # one form of a model without them
            object.__setattr__(self, "recurrent_layers", ())
            object.__setattr__(self, "recurrent", None)
        if len(self.recurrent_layers) not in (0, self.num_layers):
            raise ValueError(
                f"{len(self.recurrent_layers)} recurrent_layers for "
                f"num_layers={self.num_layers}"
            )

    @property
    def num_mixture_layers(self) -> int:
        """Number of layers with experts."""
        return sum(self.mixture_layers)

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a dense FFN."""
        if self.branches:
            return self.branches.count("dense")
        return self.num_layers - self.num_mixture_layers

    def sorts_of(self, layer: int) -> tuple[LayerSort, ...]:
        """Returns the branches of a layer."""
        if self.branches:
            return (self.branches[layer],)
        is_recurrent = bool(self.recurrent_layers) and self.recurrent_layers[layer]
        return (
            "recurrent" if is_recurrent else "attention",
            "mixture" if self.mixture_layers[layer] else "dense",
        )

    @property
    def num_recurrent_layers(self) -> int:
        """Number of layers with a state in place of attention."""
        return sum(self.recurrent_layers)

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with K and V."""
        if self.branches:
            return self.branches.count("attention")
        return self.num_layers - self.num_recurrent_layers

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """Windows of the layers with attention."""
        return tuple(
            window
            for layer, window in enumerate(self.windows)
            if "attention" in self.sorts_of(layer)
        )

    def over_layers(self, of_window: Callable[[int | None], int]) -> int:
        """Sums a function of a layer's window over the layers with attention."""
        kinds = Counter(self.attention_windows).items()
        return sum(layers * of_window(window) for window, layers in kinds)


def describe_fields(fields: Mapping[str, Any]) -> ModelShape:
    """Builds a shape from a flat mapping of fields, those of its parts included.

    Args:
      fields: fields of a `ModelConfig`, or of a `ModelShape` and its attention;
        `experts` and `recurrent` are mappings of fields, or absent. Unknown fields are
        ignored.
    """
    attention = LatentAttention if "kv_rank" in fields else HeadAttention
    experts = fields.get("experts")
    rows = 0
    if fields.get("positions") == "learned":
        rows = fields["max_positions"] + fields.get("position_offset", 0)
    recurrent = fields.get("recurrent")
    norm = fields.get("norm", "rms")
    parts = {
        "norm": {"layer": "layer", "rms_plain": "plain"}.get(norm, "rms"),
        "norms_per_layer": 4 if fields.get("norm_places") == "both" else 2,
        "experts": _build(MixtureShape, experts) if experts else None,
        "recurrent": _build(RecurrentShape, recurrent) if recurrent else None,
        "attention": _build(attention, fields),
        "position_rows": rows,
    }
    return _build(ModelShape, {**fields, **parts})


def _build[T](kind: type[T], fields: Mapping[str, Any]) -> T:
    return kind(**{name: fields[name] for name in field_names(kind) if name in fields})


@functools.cache
def field_names(kind: type[Any]) -> tuple[str, ...]:
    """Returns the names of a dataclass's fields."""
    return tuple(field.name for field in dataclasses.fields(kind))
