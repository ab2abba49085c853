"""A dense transformer over whole sequences with activations as rows: for training.

The same function of the same parameters as `transformer.outputs`, whose activations are
columns, as suits decoding. In training the gradient of a weight is a product of two
activations, and processors make it faster of rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.models import ModelConfig, Params, layers, rotary
from pallas_kernels.flash_attention import tiled


def logits(
    params: Params, tokens: Int[Array, "batch seq"], *, config: ModelConfig
) -> Float[Array, "batch seq vocab"]:
    """Runs a model without experts over sequences, each from its beginning.

    Parameters are as `transformer.init_params` returns them.

    Returns:
      Next-token logits, at least float32.

    Raises:
      ValueError: the model has experts, or fewer learned positions than `seq`.
    """
    if config.experts is not None:
        raise ValueError(f"{config.experts=} must be None")
    c, (batch, seq) = config, tokens.shape
    c.check_length(seq, "seq")
    x = params["embed"]["weight"][tokens]
    position = jnp.arange(seq, dtype=jnp.int32)
    turn = None
    if c.positions == "learned":
        table = params["embed_positions"]["weight"]
        x = x + table[position + c.position_offset][None]
    else:
        wide = np.promote_types(x.dtype, np.float32)
        pace = rotary.frequencies(c, wide)
        angles = position.astype(wide)[:, None] * pace[None]
        turn = jnp.cos(angles), jnp.sin(angles)
    x = x.reshape(batch * seq, -1)
    for index in range(c.num_layers):
        layer = params["layers"][index]
        normed = norm(x, layer["attention_norm"], c.norm_eps)
        y = _attend(_linear(normed, layer["qkv"]), layer, turn, (batch, seq), c)
        x = x + _linear(y.astype(x.dtype), layer["out"])
        hidden = _linear(norm(x, layer["mlp_norm"], c.norm_eps), layer["up"])
        parts = jnp.split(hidden, 1 + c.gated, axis=-1)
        x = x + _linear(layers.activate(c, parts), layer["down"])
    x = norm(x, params["final_norm"], c.norm_eps)
    table = params["embed" if c.tie_embeddings else "head"]["weight"]
    wide = np.promote_types(x.dtype, np.float32)
    found = jnp.matmul(x, table.T, preferred_element_type=wide)
    return found.reshape(batch, seq, -1)


def _attend(
    qkv: Float[Array, "rows features"],
    layer: Params,
    turn: tuple[Array, Array] | None,
    shape: tuple[int, int],
    config: ModelConfig,
) -> Float[Array, "rows heads_head_dim"]:
    """Attends within each sequence."""
    c = config
    qkv = qkv.reshape(*shape, c.num_kv_heads, c.group_size + 2, c.head_dim)
    q, k, v = qkv[..., :-2, :], qkv[..., -2:-1, :], qkv[..., -1:, :]
    if c.qk_norm:
        q = norm(q, layer["q_norm"], c.norm_eps)
        k = norm(k, layer["k_norm"], c.norm_eps)
    if turn is not None:
        q, k = _rotate(q, *turn), _rotate(k, *turn)
    heads = [x.reshape(*shape, -1, c.head_dim) for x in (q, k, v)]
    out, _ = tiled.flash_attention(*heads, window=c.window)
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
    y = x @ params["weight"].reshape(-1, x.shape[1]).T
    bias = params.get("bias")
    return y if bias is None else y + bias.reshape(1, -1)


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
