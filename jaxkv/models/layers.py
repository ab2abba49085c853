"""Layers of a transformer: attention with an MLP or a mixture of experts.

A layer is one implementation for serving and training. An `Orientation` arranges
activations, multiplies them and exchanges them between devices. Weights are `[out,
in]`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxkv.models import moe, nonlinear, partition, rotary
from jaxkv.models.config import AttentionKind, LatentConfig, ModelConfig
from pallas_kernels import devices
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.online_softmax import ScoreTransform

type Numerics = Literal["fast", "reproducible"]
type Activations = Float[Array, "..."]
"""`[features, rows]` or `[rows, features]`, as an `Orientation` arranges them."""
type Table = Float[Array, "entries hidden"]
type Function = Callable[[Activations, int], Activations]
"""A function of activations and the axis of the features."""


class LayerAttention(NamedTuple):
    """What attention takes from a layer besides its projection."""

    index: int | Int[Array, ""]
    """Number of the layer."""
    kind: AttentionKind
    """Its window and positions."""
    scoring: ScoreTransform
    """From products of queries and keys to scores."""


ROW_TILE = 32
"""Rows of each product under `numerics="reproducible"`. On a CPU 16 make a step of one
sequence 1.5 times as fast, and `jaxkv.score` slower."""

MIN_CAST_ROWS = 96
"""Number of rows from which on CPUs multiply faster with the rows first."""

FEW_ROWS = range(2, 5)
"""Numbers of rows that CPUs multiply faster by cached weights `[in, out]`."""


def multiply(
    weight: Float[Array, "outputs inputs"],
    x: Float[Array, "inputs rows"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "outputs rows"]:
    """Multiplies a weight by columns; CPUs pad to a fast number of columns.

    CPU kernels multiply 4, 8, 16 or 32 columns at a time and remaining columns one by
    one: 5 columns cost 1.3 times the time of 8, and 13 columns 1.5 times the time of
    16.

    Args:
      weight: a matrix.
      x: rows to multiply, as columns.
      dtype: dtype of sums and result; None means that of the operands.
    """
    num_rows = x.shape[1]
    is_few = 2 < num_rows <= 16 or 24 < num_rows <= 32
    if devices.current_target().platform == "cpu" and is_few:
        liked = 1 << (num_rows - 1).bit_length()
        x = jnp.pad(x, ((0, 0), (0, liked - num_rows)))
    return jnp.matmul(weight, x, preferred_element_type=dtype)[:, :num_rows]


@dataclasses.dataclass(frozen=True)
class Orientation:
    """Arrangement of activations, with their products and exchanges between devices.

    This class uses columns, `[features, rows]`, for decoding: a product is `weight @
    x`, in which the large operand is read once and in order. On CPUs this halves the
    time of small batches; on accelerators it is neutral. A subclass with `axis = -1`
    uses rows: `scaling.training.transformer_rows.RowOrientation`. Norms, activations,
    mixtures and the structure of a layer are shared functions.
    """

    numerics: Numerics = "fast"
    """Numerics of the experts' products."""
    live: Bool[Array, " rows"] | None = None
    """True for rows that are sent to experts; None means all."""
    routes: Int[Array, "rows mixtures top_k"] | None = None
    """Experts to use in place of the router's choice, see `moe.route`; None uses none.
    """
    axis: ClassVar[int] = -2
    """Axis of the features, counted from the end; the axis of heads precedes it."""

    def arrange(self, x: Activations) -> Activations:
        """Makes the features of a row contiguous in a GPU's memory.

        A norm is then one kernel. CPUs multiply faster with the other layout.
        """
        if self.axis == -1 or devices.current_target().platform != "gpu":
            return x
        return with_layout_constraint(x, Layout((1, 0)))

    def transpose(self, x: Float[Array, "_ _"]) -> Float[Array, "_ _"]:
        """Converts `[rows, features]` to activations and back."""
        return x if self.axis == -1 else x.T

    def embed(self, table: Table, tokens: Array, num_words: int) -> Activations:
        """Returns embeddings from a table of `num_words`, or of this device's part."""
        return self.transpose(partition.embed_tokens(table, tokens, num_words))

    def look_up_positions(self, table: Table, places: Int[Array, " n"]) -> Activations:
        """Returns learned position embeddings."""
        # NaN beyond the table: a clamped index would give a plausible embedding.
        return self.transpose(table.at[places].get(mode="fill", fill_value=jnp.nan))

    def matmul(
        self,
        weight: Float[Array, "outputs inputs"],
        x: Activations,
        *,
        dtype: DTypeLike | None = None,
        precision: jax.lax.Precision | None = None,
    ) -> Activations:
        """Multiplies every row by a weight; `dtype` None means the operands' dtype."""
        pair = (x, weight.T) if self.axis == -1 else (weight, x)
        return jnp.matmul(*pair, preferred_element_type=dtype, precision=precision)

    def map_tiles[Rows](
        self, function: Callable[..., Rows], *row_arrays: Activations
    ) -> Rows:
        """Applies a function of rows and the orientation.

        Reproducible numerics apply it to tiles of `ROW_TILE` rows, if the number of
        rows is a multiple: products and sums of another number have other bits.
        """
        if self.numerics == "fast":
            return function(*row_arrays, orientation=self)
        barrier = jax.lax.optimization_barrier

        def run(row_arrays: tuple[Activations, ...]) -> Rows:
            # Otherwise XLA fuses it with other operations, and rounds them otherwise.
            return barrier(function(*barrier(row_arrays), orientation=self))

        num_rows = row_arrays[0].shape[-1]
        if num_rows == ROW_TILE or num_rows % ROW_TILE:
            return run(row_arrays)

        def split(x: Array) -> Array:
            tiles = x.reshape(*x.shape[:-1], num_rows // ROW_TILE, ROW_TILE)
            return jnp.moveaxis(tiles, -2, 0)

        def join(tiles: Array) -> Array:
            tiles = jnp.moveaxis(tiles, 0, -2)
            return tiles.reshape(*tiles.shape[:-2], num_rows)

        return jax.tree.map(join, jax.lax.map(run, tuple(map(split, row_arrays))))

    def product(self, linear: "Linear", x: Activations) -> Activations:
        """Multiplies every row by this device's part of a weight, without the bias."""
        if linear.transposed is None or x.shape[1] not in FEW_ROWS:
            return multiply(linear.matrix, x)
        # Otherwise XLA transposes the product.
        rows = jax.lax.optimization_barrier(x.T) @ linear.transposed[...]
        return jax.lax.optimization_barrier(rows).T

    def add_up(self, x: Activations, *, part: int, full_size: int) -> Activations:
        """Sums over devices, if each has the sum over `part` of `full_size` numbers."""
        return partition.sum_parts(x, part=part, full_size=full_size)

    def expand(self, linear: Any, x: Activations, then: Function | None = None) -> Any:
        """Applies a product with divided outputs, followed by `then(y, axis)`.

        `linear` is a `Linear`, or without `then` any function of activations and the
        orientation.

        CPU kernels read the first operand in place and pack the second. For many rows
        and more outputs than inputs, multiplying rows is 8 to 19 % faster if `then`
        reduces the number of outputs before they are transposed.
        """
        if then is None:
            return linear(x, self)
        if devices.current_target().platform != "cpu" or x.shape[1] < MIN_CAST_ROWS:
            return then(linear(x, self), -2)
        # Otherwise XLA transposes the product.
        rows = jax.lax.optimization_barrier(x.T) @ linear.matrix.T
        return then(linear.add_bias(rows, -1), -1).T

    def split_heads(self, x: Activations, shape: tuple[int, ...]) -> Array:
        """Returns `[kv_heads, group + 2, head_dim, rows]`, `shape` and the rows."""
        return x.reshape(*shape, x.shape[1])

    def fuse(self, q: Array, k: Array, v: Array) -> rotary.Projected:
        """Joins parts of the result of `split_heads` again, as `attend` takes them."""
        return jnp.concatenate([q, k, v], self.axis - 1)

    def join_heads(self, x: Array) -> Activations:
        """Merges heads and their features into one axis."""
        return x.reshape(-1, x.shape[-1])

    def gather(self, x: Activations) -> Activations:
        """Returns all rows on every device, if devices have parts of them."""
        return x

    def share(self, x: Activations) -> Activations:
        """Marks where devices start to compute different terms from one `x`."""
        return x

    def mix(
        self, mixture: "Mixture", x: Activations, routing: moe.Routing
    ) -> Activations:
        """Sums the outputs of routed experts; each device computes its own experts."""
        num_local = mixture.down.weight.shape[0]
        num_experts = routing.probs.shape[1]
        own_routing = (
            partition.own_experts(routing, part=num_local)
            if num_local < num_experts
            else routing
        )
        answer = functools.partial(mixture.answer, numerics=self.numerics)
        y = self.transpose(
            moe.mix(self.transpose(x), own_routing, answer, live=self.live)
        )
        return y if num_local == num_experts else jax.lax.psum(y, partition.EXPERT)

    def unembed(
        self, table: Table, x: Activations, num_words: int
    ) -> Float[Array, "rows words"]:
        """Multiplies the last states by a table of `num_words`, in float32 at least."""
        columns = multiply(table, x, np.promote_types(x.dtype, np.float32))
        columns = partition.gather_words(columns, num_words)
        # Otherwise XLA transposes the product, and CPUs read the table half as fast.
        return jax.lax.optimization_barrier(columns).T


class Linear(nnx.Module):
    """A product and its bias, with the contracted axis last in the weight.

    If `with_transposed`, it stores the weight a second time with that axis first: see
    `param_forms.add_transposed_weights`.
    """

    def __init__(
        self,
        *shape,
        axes,
        rngs,
        std=0.02,
        bias=False,
        dtype=jnp.float32,
        bias_dtype=None,
        with_transposed=False,
    ):
        normal = rngs.params.normal(shape, dtype)
        self.weight = nnx.Param(normal * jnp.asarray(std, dtype), axes=axes)
        self.transposed = nnx.Param(normal) if with_transposed else None
        self.num_inputs = shape[-1]
        zeros = jnp.zeros(shape[:-1], bias_dtype or dtype)
        self.bias = nnx.Param(zeros, axes=axes[:-1]) if bias else None

    @property
    def matrix(self) -> Float[Array, "outputs inputs"]:
        """The weight with its outputs on one axis."""
        weight = self.weight[...]
        return weight.reshape(-1, weight.shape[-1])

    def __call__(self, x: Activations, orientation: Orientation) -> Activations:
        """Multiplies every row, sums the devices' terms, and adds the bias."""
        y = orientation.product(self, x)
        y = orientation.add_up(
            y, part=x.shape[orientation.axis], full_size=self.num_inputs
        )
        return self.add_bias(y, orientation.axis)

    def add_bias(self, y: Activations, axis: int) -> Activations:
        """Adds the bias, if any, along the axis of the features."""
        if self.bias is None:
            return y
        return y + self.bias[...].reshape((1, -1) if axis == -1 else (-1, 1))


class ExpertLinear(nnx.Module):
    """A matrix for every expert, `[experts, in, out]`, for grouped products."""

    def __init__(self, *shape, axes, rngs, std=0.02, bias=False, dtype=jnp.float32):
        normal = rngs.params.normal(shape, dtype)
        self.weight = nnx.Param(normal * jnp.asarray(std, dtype), axes=axes)
        zeros = jnp.zeros((shape[0], shape[2]), dtype)
        self.bias = nnx.Param(zeros, axes=(axes[0], axes[2])) if bias else None

    def __call__(
        self,
        x: Float[Array, "*experts rows inputs"],
        sizes: Int[Array, " experts"] | None,
        numerics: Numerics,
        *,
        share: float = 1.0,
    ) -> Float[Array, "*experts rows outputs"]:
        """Multiplies the rows of each expert, and adds `share` times its bias.

        Rows and `sizes` are those of `Mixture.answer`.
        """
        weight = self.weight[...]
        if sizes is None:
            y = jnp.einsum("erh,ehw->erw", x, weight)
        else:
            y = grouped_matmul(x, weight, group_sizes=sizes, numerics=numerics)
        if self.bias is None:
            return y
        bias = self.bias[...] * jnp.asarray(share, y.dtype)
        if sizes is None:
            return y + bias[:, None]
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        rows = jnp.arange(len(x), dtype=jnp.int32)
        expert = jnp.sum(rows[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
        return y + bias.at[expert].get(mode="clip")


class Vector(nnx.Module):
    """A parameter of one axis, 0 at first."""

    def __init__(self, size, *, axis, dtype):
        self.bias = nnx.Param(jnp.zeros((size,), dtype), axes=(axis,))


class Norm(nnx.Module):
    """A norm over the features, see `nonlinear.norm`."""

    def __init__(self, size, config: ModelConfig, *, kind, dtype=jnp.float32):
        form = nonlinear.NORMS[kind]
        one = jnp.full((size,), 1 - form.offset, dtype)
        zero = jnp.zeros((size,), dtype)
        self.scale = nnx.Param(one, axes=(None,)) if form.has_scale else None
        self.bias = nnx.Param(zero, axes=(None,)) if form.has_bias else None
        self.kind = kind
        self.eps = config.norm_eps

    def __call__(self, x: Activations, axis: int) -> Activations:
        """Normalises every row."""
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        return nonlinear.norm(x, scale, bias, kind=self.kind, eps=self.eps, axis=axis)


class HeadsNorm(nnx.Module):
    """An RMS norm over all heads of a row, which devices may divide."""

    def __init__(self, config: ModelConfig, heads_per_kv: int, *, dtype):
        c = config
        shape = c.num_kv_heads, heads_per_kv, c.head_dim
        axes = "kv_heads", None, "head_dim"
        one = jnp.full(shape, 1 - nonlinear.NORMS[c.norm].offset, dtype)
        self.scale = nnx.Param(one, axes=axes)
        self.config = c

    def __call__(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        """Normalises heads, as the axes `kv_heads, heads, head_dim` up to `axis`."""
        c = self.config
        wide = x.astype(np.promote_types(x.dtype, np.float32))
        total = jnp.sum(wide * wide, (axis - 2, axis - 1, axis), keepdims=True)
        part = x.shape[axis - 2]
        total = partition.sum_parts(total, part=part, full_size=c.num_kv_heads)
        size = c.num_kv_heads * x.shape[axis - 1] * x.shape[axis]
        y = wide * jax.lax.rsqrt(total / size + c.norm_eps)
        scale = self.scale[...]
        return nonlinear.scale_norm(
            y,
            scale,
            kind=c.norm,
            dtype=x.dtype,
            along=functools.partial(
                jnp.reshape,
                shape=(*(1,) * (x.ndim + axis - 2), *scale.shape, *(1,) * (-axis - 1)),
            ),
        )


class Mixture(nnx.Module):
    """A mixture of experts in place of an MLP: routed experts and shared ones."""

    def __init__(self, config: ModelConfig, *, rngs, dtype):
        c = config
        x = config.experts
        assert x is not None  # only models with experts have such layers
        make = functools.partial(Linear, rngs=rngs, dtype=dtype)
        make_linear = functools.partial(ExpertLinear, rngs=rngs, dtype=dtype)
        # The bias is for selection only, see `moe.route`. It is at least float32 for
        # any weights, since training changes it by thousandths.
        self.router = make(
            x.num_experts,
            c.hidden_size,
            axes=("experts", "hidden"),
            bias=x.gate_bias,
            bias_dtype=np.promote_types(dtype, np.float32),
        )
        if x.router_bias:
            self.logit_bias = Vector(x.num_experts, axis="experts", dtype=dtype)
        # Gate and up are one matrix, so that one product computes both.
        self.up = make_linear(
            x.num_experts,
            c.hidden_size,
            (1 + c.gated) * x.size,
            axes=("experts", "hidden", "mlp"),
            bias=x.expert_bias,
        )
        self.down = make_linear(
            x.num_experts,
            x.size,
            c.hidden_size,
            axes=("experts", "mlp", "hidden"),
            std=_out_std(c),
            bias=x.expert_bias,
        )
        if x.shared_size:
            self.shared_up, self.shared_down = _make_mlp(c, x.shared_size, make)
        if x.shared_gate:
            self.shared_gate = make(1, c.hidden_size, axes=(None, "hidden"))
        self.config = config

    def __call__(
        self,
        x: Activations,
        orientation: Orientation,
        replayed: Int[Array, "rows top_k"] | None = None,
    ) -> tuple[Activations, moe.Routing]:
        """Sums the outputs of every row's experts; returns the routing, too."""
        experts = self.config.experts
        axis = orientation.axis
        assert experts is not None
        x = orientation.gather(x)
        # At least float32 for any weights: two experts may have nearly equal
        # probabilities.
        wide = np.promote_types(x.dtype, np.float32)
        scores = orientation.matmul(
            self.router.weight[...].astype(wide),
            x.astype(wide),
            precision=jax.lax.Precision.HIGHEST,
        )
        if experts.router_bias:
            shift = self.logit_bias.bias[...].astype(wide)
            scores = scores + shift.reshape((1, -1) if axis == -1 else (-1, 1))
        bias = None if self.router.bias is None else self.router.bias[...].astype(wide)
        routing = moe.route(orientation.transpose(scores), experts, bias, replayed)
        gate = None
        if experts.shared_gate:
            gate = jax.nn.sigmoid(self.shared_gate(x, orientation))
        x = orientation.share(x)
        y = orientation.mix(self, x, routing)
        if experts.shared_size:
            hidden = self.shared_up(x, orientation)
            hidden = nonlinear.activate(self.config, hidden, axis)
            shared = orientation.product(self.shared_down, hidden)
            y = y + (shared if gate is None else shared * gate)
        part = self.down.weight.shape[1]
        return orientation.add_up(y, part=part, full_size=experts.size), routing

    def answer(
        self,
        x: Float[Array, "*experts rows hidden"],
        sizes: Int[Array, " experts"] | None = None,
        numerics: Numerics = "fast",
    ) -> Float[Array, "*experts rows hidden"]:
        """Returns the experts' outputs for their rows.

        Rows are sorted by expert, with the number of each in `sizes`; without `sizes`,
        experts have equal numbers of rows on an axis of their own.
        """
        hidden = self.up(x.astype(self.up.weight[...].dtype), sizes, numerics)
        hidden = nonlinear.activate(self.config, hidden, -1)
        experts = self.config.experts
        assert experts is not None
        # Devices that divide an expert add up their outputs, and so their biases.
        share = hidden.shape[-1] / experts.size
        return self.down(hidden, sizes, numerics, share=share)


class Layer(nnx.Module):
    """Attention, then an MLP or a mixture, added to the residual stream."""

    def __init__(
        self, config: ModelConfig, index: int, *, rngs, dtype, with_transposed=False
    ):
        c = config
        make = functools.partial(
            Linear, rngs=rngs, dtype=dtype, with_transposed=with_transposed
        )
        norm = functools.partial(Norm, c.hidden_size, c, kind=c.norm, dtype=dtype)
        is_before = c.norm_places != "after"
        is_after = c.norm_places != "before"
        self.attention_norm = norm() if is_before else None
        self.mlp_norm = norm() if is_before else None
        self.attention_out_norm = norm() if is_after else None
        self.mlp_out_norm = norm() if is_after else None
        if c.latent is None:
            # Fused by KV head: queries of the group, key, value.
            self.qkv = make(
                c.num_kv_heads,
                c.group_size + 2,
                c.head_dim,
                c.hidden_size,
                axes=("kv_heads", None, "head_dim", "hidden"),
                bias=c.qkv_bias,
            )
        else:
            self._make_latent(c, c.latent, make, dtype)
        self.out = make(
            c.hidden_size,
            c.num_q_heads * c.value_dim,
            axes=("hidden", "heads"),
            std=_out_std(c),
            bias=c.out_bias,
        )
        self.is_mixture = c.is_mixture(index)
        if self.is_mixture:
            self.mixture = Mixture(c, rngs=rngs, dtype=dtype)
        else:
            self.up, self.down = _make_mlp(c, c.mlp_size, make)
        if c.qk_norm and c.qk_norm_over == "head":
            kind = "rms" if c.norm == "layer" else c.norm
            self.q_norm, self.k_norm = (
                Norm(c.head_dim, c, kind=kind, dtype=dtype) for _ in range(2)
            )
        elif c.qk_norm:
            self.q_norm, self.k_norm = (
                HeadsNorm(c, num, dtype=dtype) for num in (c.group_size, 1)
            )
        if c.sinks:
            self.sinks = Vector(c.num_q_heads, axis="heads", dtype=dtype)
        self.config = config

    def _make_latent(self, config: ModelConfig, latent: LatentConfig, make, dtype):
        """Makes the projections of latent attention.

        Queries are divided over devices by heads, and so are keys and values; every
        device computes the compressed query and the latent.
        """
        c = config
        x = latent
        width = c.hidden_size
        if x.q_rank is not None:
            width = x.q_rank
            self.q_down = make(width, c.hidden_size, axes=(None, "hidden"))
            self.q_norm = Norm(width, c, kind="rms", dtype=dtype)
        q = make(c.num_q_heads, c.head_dim, width, axes=("heads", None, None))
        if x.q_rank is None:
            self.q = q
        else:
            self.q_up = q
        # The latent, then the rotary key.
        self.kv_down = make(
            x.kv_rank + x.rope_dim, c.hidden_size, axes=(None, "hidden")
        )
        self.kv_norm = Norm(x.kv_rank, c, kind="rms", dtype=dtype)
        # Of each head the keys without positions, then the values.
        self.kv_up = make(
            c.num_q_heads,
            x.nope_dim + x.value_dim,
            x.kv_rank,
            axes=("heads", None, None),
        )

    def _project_latent(self, x: Activations, orientation: Orientation):
        """Returns queries, normed latents and rotary keys of every row."""
        o = orientation
        latent = self.config.latent
        assert latent is not None
        if latent.q_rank is None:
            q = self.q(x, o)
        else:
            q = self.q_up(self.q_norm(self.q_down(x, o), o.axis), o)
        rank = latent.kv_rank
        kv_latent, key = jnp.split(self.kv_down(x, o), [rank], o.axis)
        return q, self.kv_norm(kv_latent, o.axis), key

    def _project(self, x: Activations, orientation: Orientation) -> rotary.Projected:
        """Returns the projection of every row that attention takes."""
        c = self.config
        o = orientation
        if self.attention_norm is not None:
            x = self.attention_norm(x, o.axis)
        if c.latent is not None:
            q, latent, key = o.expand(self._project_latent, x)
            q = o.split_heads(q, (-1, c.head_dim))
            latent, key = (o.split_heads(y, (y.shape[o.axis],)) for y in (latent, key))
            return rotary.LatentProjection(q, latent, key, self.kv_up.weight[...])
        qkv = o.split_heads(o.expand(self.qkv, x), self.qkv.weight.shape[:-1])
        if c.qk_norm:
            q, k, v = rotary.split_heads(qkv, o.axis)
            qkv = o.fuse(self.q_norm(q, o.axis), self.k_norm(k, o.axis), v)
        return qkv

    def __call__(self, index, kind, x, angles, attend, carry, orientation):
        """Runs layer `index`, with a kind of attention, on every row.

        `carry` is passed through `attend`.
        """
        o = orientation
        c = self.config
        if c.latent is not None:
            projected = self._project(x, o)
        else:
            projected = o.map_tiles(self._project, x)
        sinks = self.sinks.bias[...] if c.sinks else None
        scoring = ScoreTransform(c.score_scale, c.score_cap, sinks=sinks)
        layer = LayerAttention(index, kind, scoring)
        y, carry = attend(layer, projected, angles, carry)
        y = o.join_heads(y).astype(x.dtype)
        if not self.is_mixture:
            return o.map_tiles(self._add_mlp, x, y), carry, None
        x = x + self._scale_branch(self.attention_out_norm, self.out(y, o), o)
        replayed = o.routes
        if replayed is not None:
            first = c.num_layers - c.num_mixtures
            replayed = replayed[:, index - first]
        y, routing = self.mixture(self._mlp_inputs(x, o), o, replayed)
        return x + self._scale_branch(self.mlp_out_norm, y, o), carry, routing

    def _add_mlp(
        self, x: Activations, y: Activations, orientation: Orientation
    ) -> Activations:
        """Adds the projected output of attention, and that of the MLP."""
        o = orientation
        before = x
        x = x + self._scale_branch(self.attention_out_norm, self.out(y, o), o)
        activate = functools.partial(nonlinear.activate, self.config)
        inputs = before if self.config.residual == "parallel" else x
        hidden = o.expand(self.up, self._mlp_inputs(inputs, o), activate)
        return x + self._scale_branch(self.mlp_out_norm, self.down(hidden, o), o)

    def _mlp_inputs(self, x: Activations, orientation: Orientation) -> Activations:
        return x if self.mlp_norm is None else self.mlp_norm(x, orientation.axis)

    def _scale_branch(
        self, norm: Norm | None, y: Activations, orientation: Orientation
    ) -> Activations:
        """Returns the output of attention or MLP as it is added to the residual."""
        if norm is not None:
            y = norm(y, orientation.axis)
        scale = self.config.residual_scale
        return y if scale == 1 else y * jnp.asarray(scale, y.dtype)


def _make_mlp(config: ModelConfig, size: int, make) -> tuple[Linear, Linear]:
    """Returns the projections of an MLP: up (gate first), and down."""
    c = config
    up = make(
        1 + c.gated,
        size,
        c.hidden_size,
        axes=(None, "mlp", "hidden"),
        bias=c.mlp_bias,
    )
    down = make(
        c.hidden_size,
        size,
        axes=("hidden", "mlp"),
        std=_out_std(c),
        bias=c.mlp_bias,
    )
    return up, down


def _out_std(config: ModelConfig) -> float:
    """Returns 0.02 / sqrt(2 layers), which keeps the residual variance near 1."""
    return 0.02 / (2 * config.num_layers) ** 0.5
