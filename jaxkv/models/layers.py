"""The layers of a transformer: attention with an MLP or a mixture of experts.

Activations are columns, `[features, rows]`, and weights are `[out, in]`: a product is
then `weight @ x`, in which the large operand is read once and in order. On CPUs this
halves the time of small batches; accelerators do not mind.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxkv.models import moe, partition
from jaxkv.models.config import ModelConfig
from pallas_kernels import devices
from pallas_kernels.grouped_matmul import api

type Numerics = Literal["fast", "reproducible"]

MANY = 96
"""Rows from which on CPUs multiply faster with the rows first: see `Linear.by_rows`."""

FEW = range(2, 5)
"""Numbers of rows that CPUs multiply faster by weights `[in, out]` in their caches."""


def multiply(
    weight: Float[Array, "outputs inputs"],
    x: Float[Array, "inputs rows"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "outputs rows"]:
    """A product with the weights first; of few rows with as many as CPUs like.

    What multiplies there takes 4, 8, 16 or 32 rows at a time, and what is left over one
    by one: 5 rows cost 1.3 times what 8 do, 13 rows 1.5 times what 16 do.

    Args:
      weight: a matrix.
      x: rows to multiply with, as columns.
      dtype: sums and result in this one; None: the operands'.
    """
    num_rows = x.shape[1]
    is_few = 2 < num_rows <= 16 or 24 < num_rows <= 32
    if devices.current().platform == "cpu" and is_few:
        liked = 1 << (num_rows - 1).bit_length()
        x = jnp.pad(x, ((0, 0), (0, liked - num_rows)))
    return jnp.matmul(weight, x, preferred_element_type=dtype)[:, :num_rows]


class Linear(nnx.Module):
    """`weight @ x + bias` with the contracted axis last in the weight.

    With `for_few` it has the weight a second time, that axis first: see
    `param_forms.for_few_rows`.
    """

    def __init__(
        self,
        *shape,
        axes,
        rngs,
        std=0.02,
        bias=False,
        dtype=jnp.float32,
        for_few=False,
    ):
        normal = rngs.params.normal(shape, dtype)
        self.weight = nnx.Param(normal * jnp.asarray(std, dtype), axes=axes)
        self.transposed = nnx.Param(normal) if for_few else None
        self.num_inputs = shape[-1]
        self.bias = (
            nnx.Param(jnp.zeros(shape[:-1], dtype), axes=axes[:-1]) if bias else None
        )

    def term(self, x: Float[Array, "inputs rows"]) -> Float[Array, "outputs rows"]:
        """Multiplies every column by what this device has, without the bias."""
        if self.transposed is not None and x.shape[1] in FEW:
            # Else XLA turns the product round.
            rows = jax.lax.optimization_barrier(x.T) @ self.transposed[...]
            return jax.lax.optimization_barrier(rows).T
        return multiply(self.weight[...].reshape(-1, x.shape[0]), x)

    def __call__(self, x: Float[Array, "inputs rows"]) -> Float[Array, "..."]:
        """Multiplies every column; adds up what devices have of it."""
        y = partition.add_up(self.term(x), part=x.shape[0], whole=self.num_inputs)
        if self.bias is not None:
            y = y + self.bias[...].reshape(-1, 1)
        return y.reshape(*self.weight.shape[:-1], x.shape[1])

    def by_rows(self, x: Float[Array, "inputs rows"]) -> Float[Array, "rows ..."]:
        """As `__call__`, with the rows first.

        What multiplies on CPUs takes the first operand as it lies and packs the second.
        Of many rows and more outputs than inputs that way is 8 to 19 % faster.
        """
        # Else XLA turns the product round.
        rows = jax.lax.optimization_barrier(x.T)
        y = rows @ self.weight[...].reshape(-1, x.shape[0]).T
        y = partition.add_up(y, part=x.shape[0], whole=self.num_inputs)
        if self.bias is not None:
            y = y + self.bias[...].reshape(1, -1)
        return y.reshape(x.shape[1], *self.weight.shape[:-1])


class ExpertLinear(nnx.Module):
    """A matrix for every expert, `[experts, in, out]` as grouped products take them."""

    def __init__(self, *shape, axes, rngs, std=0.02, dtype=jnp.float32):
        normal = rngs.params.normal(shape, dtype)
        self.weight = nnx.Param(normal * jnp.asarray(std, dtype), axes=axes)

    def __call__(
        self,
        x: Float[Array, "rows inputs"],
        sizes: Int[Array, " experts"],
        numerics: Numerics,
    ) -> Float[Array, "rows outputs"]:
        """Multiplies rows, sorted by expert."""
        weight = self.weight[...]
        return api.grouped_matmul(
            x.astype(weight.dtype), weight, sizes, numerics=numerics
        )


class Norm(nnx.Module):
    """RMS or layer norm over the features (axis -2 of a column layout), in float32."""

    def __init__(self, size, config: ModelConfig, *, kind, dtype=jnp.float32):
        self.scale = nnx.Param(jnp.ones((size,), dtype), axes=(None,))
        centred = kind == "layer"
        self.bias = (
            nnx.Param(jnp.zeros((size,), dtype), axes=(None,)) if centred else None
        )
        self.eps = config.norm_eps

    def __call__(self, x: Float[Array, "*lead size rows"]) -> Float[Array, "..."]:
        """Norms every column."""
        y = x.astype(np.promote_types(x.dtype, np.float32))
        if self.bias is not None:
            y = y - y.mean(-2, keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean(-2, keepdims=True) + self.eps)
        y = y.astype(x.dtype) * _column(self.scale[...], x.ndim)
        return y if self.bias is None else y + _column(self.bias[...], x.ndim)


class Mixture(nnx.Module):
    """Experts in place of an MLP: those that a router chooses, and shared ones."""

    def __init__(self, config: ModelConfig, *, rngs, dtype):
        c, x = config, config.experts
        assert x is not None  # only models with experts have such layers
        make = functools.partial(Linear, rngs=rngs, dtype=dtype)
        each = functools.partial(ExpertLinear, rngs=rngs, dtype=dtype)
        self.router = make(x.num_experts, c.hidden_size, axes=("experts", "hidden"))
        # Gate and up side by side: one product makes both.
        self.up = each(
            x.num_experts,
            c.hidden_size,
            (1 + c.gated) * x.size,
            axes=("experts", "hidden", "mlp"),
        )
        self.down = each(
            x.num_experts,
            x.size,
            c.hidden_size,
            axes=("experts", "mlp", "hidden"),
            std=_out_std(c),
        )
        if x.shared_size:
            self.shared_up, self.shared_down = _make_mlp(c, x.shared_size, make)
        if x.shared_gate:
            self.shared_gate = make(1, c.hidden_size, axes=(None, "hidden"))
        self.config = config

    def __call__(
        self,
        x: Float[Array, "hidden rows"],
        live: Bool[Array, " rows"] | None,
        numerics: Numerics,
    ) -> tuple[Float[Array, "hidden rows"], moe.Routing]:
        """Routes every column, and says where to."""
        c, experts = self.config, self.config.experts
        assert experts is not None
        # In 32 bits whatever the weights: two experts may be nearly as probable.
        wide = np.promote_types(x.dtype, np.float32)
        scores = jnp.matmul(
            self.router.weight[...].astype(wide),
            x.astype(wide),
            precision=jax.lax.Precision.HIGHEST,
        )
        routing = moe.route(
            scores.T, top_k=experts.top_k, renormalise=experts.renormalise
        )

        def answer(rows, sizes):
            hidden = self.up(rows, sizes, numerics)
            return self.down(
                activate(c, jnp.split(hidden, 1 + c.gated, 1)), sizes, numerics
            )

        own = self.down.weight.shape[0]
        if own < experts.num_experts:
            mine = partition.own_experts(routing, part=own)
            y = moe.mix(x.T, mine, answer, live=live).T
            y = jax.lax.psum(y, partition.EXPERT)
        else:
            y = moe.mix(x.T, routing, answer, live=live).T
        if experts.shared_size:
            shared = self.shared_down.term(activate(c, self.shared_up(x)))
            if experts.shared_gate:
                shared = shared * jax.nn.sigmoid(self.shared_gate(x))
            y = y + shared
        part = self.down.weight.shape[1]
        return partition.add_up(y, part=part, whole=experts.size), routing


class Layer(nnx.Module):
    """Pre-norm attention, then an MLP or a mixture, added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, *, rngs, dtype, for_few=False):
        c = config
        make = functools.partial(Linear, rngs=rngs, dtype=dtype, for_few=for_few)
        norm = functools.partial(Norm, c.hidden_size, c, kind=c.norm, dtype=dtype)
        self.attention_norm, self.mlp_norm = norm(), norm()
        # Fused, KV head by KV head: the group's queries, the key, the value.
        self.qkv = make(
            c.num_kv_heads,
            c.group_size + 2,
            c.head_dim,
            c.hidden_size,
            axes=("kv_heads", None, "head_dim", "hidden"),
            bias=c.qkv_bias,
        )
        self.out = make(
            c.hidden_size,
            c.num_q_heads * c.head_dim,
            axes=("hidden", "heads"),
            std=_out_std(c),
            bias=c.out_bias,
        )
        self.is_mixture = c.is_mixture(index)
        if self.is_mixture:
            self.mixture = Mixture(c, rngs=rngs, dtype=dtype)
        else:
            self.up, self.down = _make_mlp(c, c.mlp_size, make)
        if c.qk_norm:
            self.q_norm, self.k_norm = (
                Norm(c.head_dim, c, kind="rms", dtype=dtype) for _ in range(2)
            )
        self.config = config

    def __call__(self, index, x, angles, attend, carry, live, numerics):
        """Runs layer `index` on every column; `carry` goes through `attend`."""
        c = self.config
        qkv = self.qkv(self.attention_norm(x))
        if c.qk_norm:
            q, k, v = jnp.split(qkv, [c.group_size, c.group_size + 1], axis=1)
            qkv = jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=1)
        y, carry = attend(index, qkv, angles, carry)
        x = x + self.out(y.reshape(-1, x.shape[1]).astype(x.dtype))
        normed = self.mlp_norm(x)
        if self.is_mixture:
            y, routing = self.mixture(normed, live, numerics)
            return x + y, carry, routing
        return x + self.down(self._hidden(normed)), carry, None

    def _hidden(self, x: Float[Array, "hidden rows"]) -> Float[Array, "mlp rows"]:
        """What lies between the MLP's projections."""
        if devices.current().platform != "cpu" or x.shape[1] < MANY:
            return activate(self.config, self.up(x))
        return activate(self.config, jnp.moveaxis(self.up.by_rows(x), 1, 0)).T


def _make_mlp(config: ModelConfig, size: int, make) -> tuple[Linear, Linear]:
    """The projections of an MLP: up (the gate first), and down."""
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


def activate(config: ModelConfig, hidden) -> Array:
    """What lies between the projections of an MLP: of gate and up, or of up alone."""
    active = _ACTIVATIONS[config.activation](hidden[0])
    return active * hidden[1] if config.gated else active


def _out_std(config: ModelConfig) -> float:
    """The usual 1/sqrt(2 layers) keeps the residual stream's variance near one."""
    return 0.02 / (2 * config.num_layers) ** 0.5


def _column(scale, ndim):
    return (
        scale.reshape(-1, 1) if ndim == 2 else scale.reshape(*(1,) * (ndim - 2), -1, 1)
    )


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
