"""Decoder-only transformers, dense and mixtures: parameters and one forward pass.

With `layers`, the only door to flax. Activations are columns, `[features, rows]`, and
every row is one token; which sequence it belongs to is known to `attend` alone, so the
same layers serve training (whole sequences) and the engine (packed rows over pages).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32

from jaxkv.models import drawing, moe, rotary
from jaxkv.models.config import ModelConfig
from jaxkv.models.interface import Params
from jaxkv.models.layers import Layer, Linear, Norm, Numerics
from pallas_kernels.flash_attention import tiled

type Attend[C] = Callable[
    [
        int,
        Float[Array, "kv_heads group head_dim rows"],
        Float[Array, "kv_heads head_dim rows"],
        Float[Array, "kv_heads head_dim rows"],
        C,
    ],
    tuple[Float[Array, "kv_heads group head_dim rows"], C],
]
"""`attend(layer, q, k, v, carry) -> (out, carry)`: the only place where rows meet."""


class Transformer(nnx.Module):
    """Embeddings, layers, final norm and output head of a `ModelConfig`."""

    def __init__(self, config: ModelConfig, *, rngs: Any, dtype=jnp.float32):
        c = config
        table = functools.partial(Linear, rngs=rngs, dtype=dtype)
        self.embed = table(c.vocab_size, c.hidden_size, axes=("vocab", "hidden"))
        if c.positions == "learned":
            self.embed_positions = table(
                *(c.max_positions + c.position_offset, c.hidden_size),
                axes=(None, "hidden"),
            )
        self.layers = nnx.List(
            [Layer(c, index, rngs=rngs, dtype=dtype) for index in range(c.num_layers)]
        )
        self.final_norm = Norm(c.hidden_size, c, kind=c.norm, dtype=dtype)
        if not c.tie_embeddings:
            self.head = table(c.vocab_size, c.hidden_size, axes=("vocab", "hidden"))
        self.config = config

    def hidden(
        self,
        tokens: Int[Array, " rows"],
        positions: Int[Array, " rows"],
        attend: Attend,
        carry: Any,
        *,
        live: Bool[Array, " rows"] | None = None,
        numerics: Numerics = "fast",
    ) -> tuple[Float[Array, "hidden rows"], Any, list[moe.Routing]]:
        """The normed last hidden state of every row, and each mixture's routing.

        Rows that are not live, None for all, are sent to no expert.
        """
        c = self.config
        x = self.embed.weight[...][tokens].T
        rope = None
        if c.positions == "learned":
            # Not a number past the table: what is clamped to it would look like one.
            found = self.embed_positions.weight[...].at[positions + c.position_offset]
            x = x + found.get(mode="fill", fill_value=jnp.nan).T
        else:
            wide = np.promote_types(x.dtype, np.float32)
            angles = (
                rotary.frequencies(c, wide)[:, None] * positions.astype(wide)[None, :]
            )
            rope = jnp.cos(angles), jnp.sin(angles)
        routings = []
        for index, layer in enumerate(self.layers):
            x, carry, routing = layer(index, x, rope, attend, carry, live, numerics)
            routings += [] if routing is None else [routing]
        return self.final_norm(x), carry, routings

    def logits(self, hidden: Float[Array, "hidden rows"]) -> Float[Array, "rows vocab"]:
        """Next-token logits in float32 (float64 if the weights are)."""
        table = (self.embed if self.config.tie_embeddings else self.head).weight[...]
        wide = np.promote_types(hidden.dtype, np.float32)
        columns = jnp.matmul(table, hidden, preferred_element_type=wide)
        # Else XLA turns the product round, and CPUs read the table half as fast.
        return jax.lax.optimization_barrier(columns).T


def _split(
    config: ModelConfig, dtype: DTypeLike, rngs: drawing.Recorder | None = None
) -> tuple[Any, Any]:
    """The graph of a model, and the shapes of its parameters."""
    rngs = drawing.Recorder() if rngs is None else rngs
    build = functools.partial(Transformer, config, rngs=rngs, dtype=dtype)
    return nnx.split(nnx.eval_shape(build), nnx.Param)


def merge(config: ModelConfig, params: Params) -> Transformer:
    """The model with these parameters."""
    graph, _ = _split(config, jnp.float32)
    return nnx.merge(graph, nnx.State(params))


def init_params(config: ModelConfig, key: Array, *, dtype: DTypeLike = "float32"):
    """Random parameters, normal with standard deviation 0.02, as nested dicts.

    Compiled as one program for a `config`; the bits are those of drawing array by array
    with `nnx.Rngs(key)`.
    """
    recorder = drawing.Recorder()
    _split(config, jnp.dtype(dtype), recorder)
    index = [np.int32(place) for place in range(len(recorder.shapes))]
    return _init_params(key, index, config, tuple(recorder.shapes), jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames=("config", "shapes", "dtype"))
def _init_params(
    key: Array,
    index: list[Int32[Array, ""]],
    config: ModelConfig,
    shapes: tuple[drawing.Shape, ...],
    dtype: np.dtype,
) -> Params:
    normals = drawing.Normals(key, shapes, dtype, index)
    model = Transformer(config, rngs=normals, dtype=dtype)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def param_shapes(config: ModelConfig, *, dtype: DTypeLike = "float32") -> Params:
    """The same tree holding `jax.ShapeDtypeStruct`s; allocates nothing."""
    shapes = nnx.to_pure_dict(_split(config, jnp.dtype(dtype))[1])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)


def param_axes(config: ModelConfig) -> Params:
    """The same tree holding each parameter's logical axis names, for meshes."""
    _, state = _split(config, jnp.float32)
    is_param = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    axes = jax.tree.map(lambda p: p.get_metadata("axes"), state, is_leaf=is_param)
    return nnx.to_pure_dict(axes)


def logits(
    params: Params, tokens: Int[Array, "batch seq"], *, config: ModelConfig
) -> Float[Array, "batch seq vocab"]:
    """Plain causal forward pass over whole sequences: training, and the paged twin.

    As `outputs`, without what mixtures report.
    """
    return outputs(params, tokens, config=config).logits


class Outputs(NamedTuple):
    """What a forward pass over whole sequences gives."""

    logits: Float[Array, "batch seq vocab"]
    """Next-token logits, at least float32."""
    auxiliary: Float[Array, ""]
    """What training adds to the loss: `balance_weight` times the load-balancing loss,
    mean over the mixtures; 0 of a dense model."""
    loads: Float[Array, "mixtures experts"] | None
    """Share of the tokens that each expert of each mixture, first layer first, was
    chosen by, see `moe.imbalance`; None of a dense model."""


def outputs(
    params: Params, tokens: Int[Array, "batch seq"], *, config: ModelConfig
) -> Outputs:
    """Plain causal forward pass over whole sequences, with what mixtures report.

    Warns, when it is compiled, where they are past a model's rotary positions.

    Raises:
      ValueError: they are past a model's learned positions.
    """
    batch, seq = tokens.shape
    config.check_length(seq, "seq")
    model = merge(config, params)
    position = jnp.arange(seq, dtype=jnp.int32)

    def attend(layer, q, k, v, carry):
        # To [batch, seq, heads, head_dim] and back.
        q, k, v = (
            x.reshape(-1, config.head_dim, batch, seq).transpose(2, 3, 0, 1)
            for x in (q, k, v)
        )
        y, _ = tiled.flash_attention(q, k, v, window=config.window)
        y = y.transpose(2, 3, 0, 1)
        return y.reshape(config.num_kv_heads, -1, config.head_dim, batch * seq), carry

    hidden, _, routings = model.hidden(
        tokens.reshape(-1), jnp.tile(position, batch), attend, ()
    )
    logits = model.logits(hidden).reshape(batch, seq, -1)
    if config.experts is None:
        return Outputs(logits, jnp.zeros((), logits.dtype), None)
    balance = jnp.mean(jnp.stack([moe.balance_loss(x) for x in routings]))
    loads = jnp.stack([moe.load(x) for x in routings])
    return Outputs(logits, config.experts.balance_weight * balance, loads)
