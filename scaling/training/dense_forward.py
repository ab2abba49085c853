"""A dense transformer over whole sequences with activations as rows: for training.

The same function of the same parameters as `transformer.outputs`, whose activations are
columns, as suits decoding. In training the gradient of a weight is a product of two
activations, and processors make it faster of rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from jaxkv.models import ModelConfig, Params, layers, partition, rotary
from jaxkv.models.partition import TENSOR
from jaxkv.parallel import sequence
from pallas_kernels.flash_attention import tiled
from scaling.costs.parallelism import Layout

ONE = Layout()
"""A single device."""


def logits(
    params: Params,
    tokens: Int[Array, "batch seq"],
    *,
    config: ModelConfig,
    layout: Layout = ONE,
) -> Float[Array, "batch seq vocab"]:
    """Runs a model without experts over sequences, each from its beginning.

    Parameters are as `transformer.init_params` returns them. Under a `layout` this is
    what one device of a mesh does, inside `jax.shard_map`, with its part of parameters
    and tokens, which `sequence.order` says; its words' logits are what it returns.

    Returns:
      Next-token logits, at least float32.

    Raises:
      ValueError: the model has experts, or fewer learned positions than `seq`.
    """
    if config.experts is not None:
        raise ValueError(f"{config.experts=} must be None")
    c, (batch, seq) = config, tokens.shape
    c.check_length(seq * layout.context, "seq")
    x = embed(params, tokens, c, layout)
    turn = turns(c, seq, x.dtype, layout)
    for index in range(c.num_layers):
        x = run_layer(params["layers"][index], x, turn, (batch, seq), c, layout)
    return unembed(params, x, (batch, seq), c, layout)


def embed(
    params: Params,
    tokens: Int[Array, "batch seq"],
    config: ModelConfig,
    layout: Layout = ONE,
) -> Float[Array, "rows hidden"]:
    """What goes into the first layer, of this device's rows."""
    table, every = params["embed"]["weight"], tokens.reshape(-1)
    if layout.sequence:
        x = lax.psum_scatter(partition.look_up_own(table, every), TENSOR, tiled=True)
    else:
        x = partition.look_up(table, every, config.vocab_size)
    if config.positions != "learned":
        return x
    position = _positions(tokens.shape[1], layout) + config.position_offset
    more = params["embed_positions"]["weight"][position]
    return x + _own_rows(jnp.tile(more, (tokens.shape[0], 1)), layout)


def turns(
    config: ModelConfig, seq: int, dtype: DTypeLike, layout: Layout = ONE
) -> tuple[Float[Array, "{seq} half"], Float[Array, "{seq} half"]] | None:
    """Cosines and sines of this device's positions; None where those are learned."""
    if config.positions == "learned":
        return None
    wide = np.promote_types(dtype, np.float32)
    pace = rotary.frequencies(config, wide)
    angles = _positions(seq, layout).astype(wide)[:, None] * pace[None]
    return jnp.cos(angles), jnp.sin(angles)


def _positions(seq: int, layout: Layout) -> Int32[Array, " {seq}"]:
    """Those of this device's tokens, `seq` of each sequence."""
    return sequence.positions(
        seq * layout.context, ring=layout.ring, ulysses=layout.ulysses
    )


def run_layer(
    layer: Params,
    x: Float[Array, "rows hidden"],
    turn: tuple[Array, Array] | None,
    shape: tuple[int, int],
    config: ModelConfig,
    layout: Layout = ONE,
) -> Float[Array, "rows hidden"]:
    """Runs one layer on rows, `shape` of them; `turn` are its rotary positions."""
    c = config
    normed = norm(x, layer["attention_norm"], c.norm_eps)
    y = _attend(_columns(normed, layer["qkv"], layout), layer, turn, shape, c, layout)
    whole = c.num_q_heads * c.head_dim
    x = x + _rows(y.astype(x.dtype), layer["out"], whole, layout)
    hidden = _columns(norm(x, layer["mlp_norm"], c.norm_eps), layer["up"], layout)
    parts = jnp.split(hidden, 1 + c.gated, axis=-1)
    return x + _rows(layers.activate(c, parts), layer["down"], c.mlp_size, layout)


def unembed(
    params: Params,
    x: Float[Array, "rows hidden"],
    shape: tuple[int, int],
    config: ModelConfig,
    layout: Layout = ONE,
) -> Float[Array, "batch seq vocab"]:
    """Norms the last states and gives their logits, of this device's words."""
    x = norm(x, params["final_norm"], config.norm_eps)
    if layout.sequence:
        x = lax.all_gather(x, TENSOR, tiled=True)
    table = params["embed" if config.tie_embeddings else "head"]["weight"]
    wide = np.promote_types(x.dtype, np.float32)
    found = jnp.matmul(x, table.T, preferred_element_type=wide)
    return found.reshape(*shape, -1)


def _own_rows(x: Float[Array, "rows hidden"], layout: Layout) -> Array:
    """Of rows that all tensor-parallel devices have, those that this one keeps."""
    if not layout.sequence:
        return x
    part = x.shape[0] // layout.tensor
    start = lax.axis_index(TENSOR).astype(jnp.int32) * part
    return lax.dynamic_slice_in_dim(x, start, part)


def _columns(x: Float[Array, "rows inputs"], params: Params, layout: Layout) -> Array:
    """A product that gives this device's features of all rows.

    Rows that are kept in parts are gathered, and once more for the weights' gradient
    rather than kept (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
    """
    if not layout.sequence:
        return _linear(x, params)

    def gathered(x: Array, params: Params) -> Array:
        return _linear(lax.all_gather(x, TENSOR, tiled=True), params)

    return jax.checkpoint(gathered)(x, params)


def _rows(
    x: Float[Array, "rows inputs"], params: Params, whole: int, layout: Layout
) -> Array:
    """A product of this device's features, of `whole` in all: added up over devices."""
    if not layout.sequence:
        y = partition.add_up(_product(x, params), part=x.shape[1], whole=whole)
    else:
        y = lax.psum_scatter(_product(x, params), TENSOR, tiled=True)
    bias = params.get("bias")
    return y if bias is None else y + bias.reshape(1, -1)


def _attend(
    qkv: Float[Array, "rows features"],
    layer: Params,
    turn: tuple[Array, Array] | None,
    shape: tuple[int, int],
    config: ModelConfig,
    layout: Layout,
) -> Float[Array, "rows heads_head_dim"]:
    """Attends within each sequence."""
    c = config
    qkv = qkv.reshape(*shape, -1, c.group_size + 2, c.head_dim)
    q, k, v = qkv[..., :-2, :], qkv[..., -2:-1, :], qkv[..., -1:, :]
    if c.qk_norm:
        q = norm(q, layer["q_norm"], c.norm_eps)
        k = norm(k, layer["k_norm"], c.norm_eps)
    if turn is not None:
        q, k = _rotate(q, *turn), _rotate(k, *turn)
    heads = [x.reshape(*shape, -1, c.head_dim) for x in (q, k, v)]
    if layout.ring > 1:
        attend = functools.partial(sequence.in_a_ring, degree=layout.ring)
    else:

        def attend(q: Array, k: Array, v: Array) -> Array:
            return tiled.flash_attention(q, k, v, window=c.window)[0]

    out = sequence.by_heads(*heads, attend, degree=layout.ulysses)
    return out.reshape(shape[0] * shape[1], -1)


def _rotate(
    x: Float[Array, "batch seq kv_heads heads head_dim"],
    cos: Float[Array, "seq half"],
    sin: Float[Array, "seq half"],
) -> Float[Array, "batch seq kv_heads heads head_dim"]:
    """As `rotary.rotate`, of rows."""
    low, high = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    cos, sin = (a[None, :, None, None] for a in (cos, sin))
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _linear(x: Float[Array, "rows inputs"], params: Params) -> Array:
    """Multiplies every row; what the weight makes of it lies side by side."""
    y, bias = _product(x, params), params.get("bias")
    return y if bias is None else y + bias.reshape(1, -1)


def _product(x: Float[Array, "rows inputs"], params: Params) -> Array:
    return x @ params["weight"].reshape(-1, x.shape[1]).T


def norm(x: Float[Array, "*lead size"], params: Params, eps: float) -> Array:
    """RMS norm, or layer norm where there is a bias, over the last axis."""
    y = x.astype(np.promote_types(x.dtype, np.float32))
    bias = params.get("bias")
    if bias is not None:
        y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + eps)
    along = functools.partial(jnp.reshape, shape=(1,) * (x.ndim - 1) + (-1,))
    y = y.astype(x.dtype) * along(params["scale"])
    return y if bias is None else y + along(bias)
