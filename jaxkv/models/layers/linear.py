"""Products of activations with weights, and how activations are arranged.

An `Orientation` arranges activations, multiplies them and exchanges them between
devices. Weights are `[out, in]`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxkv.models import moe, partition, rotary
from jaxkv.models.config import ModelConfig
from jaxkv.models.layers.quantized import QuantizedWeight
from pallas_kernels import devices
from pallas_kernels.grouped_matmul import grouped_matmul

type Numerics = Literal["fast", "reproducible"]
type Activations = Float[Array, "..."]
"""`[features, rows]` or `[rows, features]`, as an `Orientation` arranges them."""
type Table = Float[Array, "entries hidden"]
type Function = Callable[[Activations, int], Activations]
"""A function of activations and the axis of the features."""


ROW_TILE = 32
"""Rows of each product under `numerics="reproducible"`. On a CPU 16 make a step of one
sequence 1.5 times as fast, and `jaxkv.score` slower."""

MIN_CAST_ROWS = 96
"""Number of rows from which on CPUs multiply faster with the rows first."""

FEW_ROWS = range(2, 5)
"""Numbers of rows that CPUs multiply faster by cached weights `[in, out]`."""

DEQUANTIZED_OUTPUTS = 32
"""Outputs of a quantized weight that a CPU converts and multiplies at once: they stay
in its caches. A converted weight of 4096 x 4096 takes 15 times as long for one row."""

BLOCK_PRODUCT_ROWS = 16
"""Largest number of rows for which accelerators scale the products of blocks in "fp8".
XLA fuses the conversion of the weight with these, but none that has scales."""


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


def multiply_quantized(
    weight: QuantizedWeight, x: Float[Array, "inputs rows"]
) -> Float[Array, "outputs rows"]:
    """Multiplies a quantized weight by columns, without storing its numbers.

    On a CPU parts of the weight are converted and multiplied one after another. On
    accelerators XLA fuses the conversion with the product: for "int8" always, for "fp8"
    up to `BLOCK_PRODUCT_ROWS` rows, and in 4 bits for one row. Otherwise it stores the
    numbers of this weight for the time of the product.

    Args:
      weight: a weight whose last axis is that of the inputs.
      x: rows to multiply, as columns.
    """
    matrix = weight.map_parts(lambda part: part.reshape(-1, part.shape[-1]))
    wide = np.promote_types(x.dtype, np.float32)
    columns = [x[::2], x[1::2]] if weight.is_packed else [x]
    num_outputs = matrix.shape[0]

    def product(part: QuantizedWeight) -> Float[Array, "some rows"]:
        # Otherwise XLA converts the numbers one by one inside of the product.
        values = part.values()
        if is_cpu:
            values = jax.lax.optimization_barrier(values)
        pairs = zip(values, columns, strict=True)
        return functools.reduce(
            jnp.add,
            [multiply(jnp.asarray(numbers), column, wide) for numbers, column in pairs],
        )

    is_cpu = devices.current_target().platform == "cpu"
    if is_cpu and num_outputs > DEQUANTIZED_OUTPUTS:
        end = num_outputs - num_outputs % DEQUANTIZED_OUTPUTS
        tiles = matrix.map_parts(
            lambda part: part[:end].reshape(-1, DEQUANTIZED_OUTPUTS, part.shape[-1])
        )
        y = jax.lax.map(product, tiles).reshape(end, -1)
        if end < num_outputs:
            last = product(matrix.map_parts(lambda part: part[end:]))
            y = jnp.concatenate([y, last])
    elif not is_cpu and matrix.format == "fp8" and x.shape[1] <= BLOCK_PRODUCT_ROWS:
        scales = matrix.scales()
        numbers = dataclasses.replace(matrix, block_scale=None).values()[0]
        blocks = numbers.reshape(*scales.shape, -1)
        rows = x.reshape(*blocks.shape[1:], -1)
        terms = jnp.einsum("obi,bir->bor", blocks, rows, preferred_element_type=wide)
        y = jnp.sum(terms * scales.T[:, :, None], axis=0)
    else:
        y = product(matrix)
    if matrix.row_scale is not None:
        y = y * matrix.row_scale
    return y.astype(x.dtype)


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
    layer_inputs: Float[Array, "layers _ _"] | None = None
    """Embeddings of the rows for each layer, see `ModelConfig.layer_input_size`."""
    adapter: Int[Array, " tile_rows"] | None = None
    """Adapter of each row, of each row of the tile inside `map_tiles`, from 1 on, see
    `Linear.add_adapters`; 0 for the model's weights. None for these in all rows."""
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
        if self.axis == -1:
            return x
        if self.numerics == "reproducible":
            # Otherwise XLA transposes a product before it, and CPUs may multiply the
            # last rows of a tile in another order.
            x = jax.lax.optimization_barrier(x)
        return x.T

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

        def run(
            row_arrays: tuple[Activations, ...], adapter: Array | None = None
        ) -> Rows:
            o = self if adapter is None else dataclasses.replace(self, adapter=adapter)
            # Otherwise XLA fuses it with other operations, and rounds them otherwise.
            return barrier(function(*barrier(row_arrays), orientation=o))

        num_rows = row_arrays[0].shape[-1]
        if num_rows == ROW_TILE or num_rows % ROW_TILE:
            return run(row_arrays)

        def split(x: Array) -> Array:
            tiles = x.reshape(*x.shape[:-1], num_rows // ROW_TILE, ROW_TILE)
            return jnp.moveaxis(tiles, -2, 0)

        def join(tiles: Array) -> Array:
            tiles = jnp.moveaxis(tiles, 0, -2)
            return tiles.reshape(*tiles.shape[:-2], num_rows)

        tiles = tuple(map(split, row_arrays))
        if self.adapter is None:
            return jax.tree.map(join, jax.lax.map(run, tiles))
        return jax.tree.map(
            join, jax.lax.map(lambda x: run(*x), (tiles, split(self.adapter)))
        )

    def product(self, linear: "Linear", x: Activations) -> Activations:
        """Multiplies every row by this device's part of a weight, without the bias.

        Adds the terms of the rows' adapters.
        """
        if isinstance(weight := linear.weight[...], QuantizedWeight):
            y = multiply_quantized(weight, x)
        elif linear.transposed is None or x.shape[1] not in FEW_ROWS:
            y = multiply(linear.matrix, x)
        else:
            # Otherwise XLA transposes the product.
            rows = jax.lax.optimization_barrier(x.T) @ linear.transposed[...]
            y = jax.lax.optimization_barrier(rows).T
        delta = linear.multiply_adapters(x, self.adapter)
        return y if delta is None else y + delta

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
        is_quantized = isinstance(linear.weight[...], QuantizedWeight)
        on_cpu = devices.current_target().platform == "cpu"
        if is_quantized or not on_cpu or x.shape[1] < MIN_CAST_ROWS:
            return then(linear(x, self), -2)
        # Otherwise XLA transposes the product.
        rows = jax.lax.optimization_barrier(x.T) @ linear.matrix.T
        delta = linear.multiply_adapters(x, self.adapter)
        rows = rows if delta is None else rows + delta.T
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
        self, mixture: "RoutedExperts", x: Activations, routing: moe.Routing
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

    After `add_adapters` it has the low-rank factors of adapters (LoRA), whose product
    is added to the weight in the rows of an adapter: `lora_a`, `[adapters, ranks, in]`,
    and `lora_b`, `[*outputs, adapters, ranks]`. All rows are multiplied by the factors
    of all adapters, and the results of other adapters are masked between the two
    products. On a CPU gathering the factors of each row takes 2 to 8 times as long from
    32 rows on, and at least as long below. A row has the same bits for any adapters of
    the other rows.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.

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

    def add_adapters(self) -> None:
        """Adds the parameters of adapters, without a shape."""
        names = self.weight.get_metadata("axes")
        zero = jnp.zeros(())
        self.lora_a = nnx.Param(zero, axes=(None, None, names[-1]))
        self.lora_b = nnx.Param(zero, axes=(*names[:-1], None, None))

    def multiply_adapters(
        self, x: Activations, adapter: Int[Array, " rows"] | None
    ) -> Float[Array, "outputs rows"] | None:
        """Returns the term of each row's adapter, 0 without one; None if there is none.

        Args:
          x: rows to multiply, as columns.
          adapter: adapter of each row, from 1 on.
        """
        if adapter is None or not hasattr(self, "lora_a"):
            return None
        a = self.lora_a[...]
        b = self.lora_b[...]
        num, ranks, _ = a.shape
        narrow = multiply(a.reshape(num * ranks, -1), x)
        owner = jnp.repeat(jnp.arange(1, num + 1, dtype=adapter.dtype), ranks)
        is_own = owner[:, None] == adapter[None, :]
        narrow = jnp.where(is_own, narrow, jnp.zeros_like(narrow))
        return multiply(b.reshape(-1, num * ranks), narrow)

    @property
    def matrix(self) -> Float[Array, "outputs inputs"]:
        """The weight with its outputs on one axis, dequantized."""
        weight = self.weight[...]
        if isinstance(weight, QuantizedWeight):
            weight = weight.dequantize()
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
        if isinstance(weight, QuantizedWeight):
            # The grouped product has no form that converts the weights of an expert.
            weight = weight.dequantize()
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


@runtime_checkable
class RoutedExperts(Protocol):
    """What `Orientation.mix` calls of a mixture of experts."""

    down: ExpertLinear

    def answer(
        self,
        x: Float[Array, "*experts rows hidden"],
        sizes: Int[Array, " experts"] | None = None,
        numerics: Numerics = "fast",
    ) -> Float[Array, "*experts rows hidden"]:
        """Returns the experts' outputs for their rows, see `Mixture.answer`."""
        ...


class Vector(nnx.Module):
    """A parameter of one axis, 0 at first."""

    def __init__(self, size, *, axis, dtype):
        self.bias = nnx.Param(jnp.zeros((size,), dtype), axes=(axis,))


def make_mlp(config: ModelConfig, size: int, make) -> tuple[Linear, Linear]:
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
        std=out_std(c),
        bias=c.mlp_bias,
    )
    return up, down


def out_std(config: ModelConfig) -> float:
    """Returns 0.02 / sqrt(2 layers), which keeps the residual variance near 1."""
    return 0.02 / (2 * config.num_layers) ** 0.5
