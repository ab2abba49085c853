"""A transformer over whole sequences with activations as rows: for training.

The same function of the same parameters as `transformer.outputs`, whose activations are
columns, as suits decoding. In training the gradient of a weight is a product of two
activations, and processors make it faster of rows.

Under a `Layout` each function does what one device of a mesh does, inside
`jax.shard_map`, with its part of parameters and tokens.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from jaxkv.models import ModelConfig, Params, layers, moe, partition, rotary
from jaxkv.models.partition import TENSOR
from jaxkv.parallel import experts, sequence
from pallas_kernels.flash_attention import tiled
from pallas_kernels.grouped_matmul import grouped_matmul
from scaling.costs.parallelism import Layout
from scaling.training import meshes

ONE = Layout()
"""A single device."""


class Output(NamedTuple):
    """What a forward pass gives."""

    logits: Float[Array, "batch seq vocab"]
    """Of the token after each, at least float32."""
    auxiliary: Float[Array, ""]
    """Nats that training adds to the mean loss, weighted already; zero for models that
    ask for nothing."""


def outputs(
    params: Params,
    tokens: Int[Array, "batch seq"],
    *,
    config: ModelConfig,
    layout: Layout = ONE,
) -> Output:
    """Runs a model over sequences, each from its beginning.

    Parameters are as `transformer.init_params` returns them. Under a `layout` the
    tokens are those of this device, which `sequence.order` says, and the logits those
    of its words.

    Raises:
      ValueError: the model has fewer learned positions than `seq`.
    """
    c, (batch, seq) = config, tokens.shape
    c.check_length(seq * layout.context, "seq")
    x = embed(params, tokens, c, layout)
    turn, auxiliary = turns(c, seq, x.dtype, layout), []
    for index in range(c.num_layers):
        layer = params["layers"][index]
        x, balance = run_layer(layer, x, turn, (batch, seq), c, layout)
        auxiliary.append(balance)
    found = unembed(params, x, (batch, seq), c, layout)
    return Output(found, weighted(auxiliary, c, found.dtype))


def weighted(
    balance: Sequence[Array | None], config: ModelConfig, dtype: DTypeLike
) -> Float[Array, ""]:
    """What layers add to the mean loss: their mean over all mixtures, weighted."""
    found = [each for each in balance if each is not None]
    if config.experts is None or not found:
        return jnp.zeros((), dtype)
    num_mixtures = config.num_layers - config.experts.num_dense_layers
    total = functools.reduce(jnp.add, found)
    return (total * (config.experts.balance_weight / num_mixtures)).astype(dtype)


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
    rows = params["embed_positions"]["weight"]
    if (
        layout.sequence
    ):  # or gradients would be added up for each sequence, not each row
        rows = lax.pcast(rows, TENSOR, to="varying")
    more = rows[position]
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
) -> tuple[Float[Array, "rows hidden"], Float[Array, ""] | None]:
    """Runs one layer on rows.

    Args:
      layer: its parameters.
      x: the rows.
      turn: cosines and sines of their positions.
      shape: sequences, and the tokens of each.
      config: the model.
      layout: how it is divided.

    Returns:
      The rows, and a mixture's loss of balance.
    """
    c = config
    normed = norm(x, layer["attention_norm"], c.norm_eps)
    y = _attend(_columns(normed, layer["qkv"], layout), layer, turn, shape, c, layout)
    whole = c.num_q_heads * c.head_dim
    x = x + _rows(y.astype(x.dtype), layer["out"], whole, layout)
    normed = norm(x, layer["mlp_norm"], c.norm_eps)
    if "mixture" in layer:
        y, balance = _mix(normed, layer["mixture"], c, layout)
        return x + y, balance
    parts = jnp.split(_columns(normed, layer["up"], layout), 1 + c.gated, axis=-1)
    return x + _rows(layers.activate(c, parts), layer["down"], c.mlp_size, layout), None


def _mix(
    x: Float[Array, "rows hidden"], params: Params, config: ModelConfig, layout: Layout
) -> tuple[Float[Array, "rows hidden"], Float[Array, ""]]:
    """Has each row answered by the experts that it chooses, and by the shared ones."""
    c, every = config, config.experts
    assert every is not None  # only models with experts have such layers
    if layout.sequence:
        x = lax.all_gather(x, TENSOR, tiled=True)
    # In 32 bits whatever the weights: two experts may be nearly as probable.
    wide = np.promote_types(x.dtype, np.float32)
    scores = jnp.matmul(
        x.astype(wide),
        params["router"]["weight"].T.astype(wide),
        precision=lax.Precision.HIGHEST,
    )
    routing = moe.route(scores, top_k=every.top_k, renormalise=every.renormalise)
    loads, copies = moe.load(routing), meshes.copies(layout)
    balance = moe.balance_loss(
        routing, lax.stop_gradient(lax.pmean(loads, copies) if copies else loads)
    )
    if layout.sequence:  # every device has said the same
        balance = lax.pmean(balance, TENSOR)
    gate = None
    if every.shared_gate:
        gate = jax.nn.sigmoid(_linear(x, params["shared_gate"]))
    if layout.tensor > 1 and not layout.sequence:
        x = lax.pcast(x, TENSOR, to="varying")  # once, for all who read it
    y = _experts(x, routing, params, c, layout)
    if every.shared_size:
        hidden = _linear(x, params["shared_up"])
        parts = jnp.split(hidden, 1 + c.gated, axis=-1)
        shared = _product(layers.activate(c, parts), params["shared_down"])
        y = y + (shared if gate is None else shared * gate)
    if layout.sequence:
        return lax.psum_scatter(y, TENSOR, tiled=True), balance
    part = params["down"]["weight"].shape[1]
    return partition.add_up(y, part=part, whole=every.size), balance


def _experts(
    x: Float[Array, "rows hidden"],
    routing: moe.Routing,
    params: Params,
    config: ModelConfig,
    layout: Layout,
) -> Float[Array, "rows hidden"]:
    """What the experts answer, each device's its own."""
    c, every = config, config.experts
    assert every is not None
    up, down = params["up"]["weight"], params["down"]["weight"]

    def one_after_another(rows: Array, sizes: Array) -> Array:
        hidden = grouped_matmul(rows.astype(up.dtype), up, sizes)
        active = layers.activate(c, jnp.split(hidden, 1 + c.gated, axis=-1))
        return grouped_matmul(active, down, sizes)

    def side_by_side(rows: Array) -> Array:
        hidden = jnp.einsum("erh,ehw->erw", rows.astype(up.dtype), up)
        active = layers.activate(c, jnp.split(hidden, 1 + c.gated, axis=-1))
        return jnp.einsum("erw,ewh->erh", active, down)

    if layout.expert == 1:
        return moe.mix(x, routing, one_after_another)
    if layout.capacity is None:
        return experts.gather(x, routing, one_after_another, num_own=len(up))
    capacity = layout.places(len(x), top_k=every.top_k, num_experts=every.num_experts)
    return experts.exchange(x, routing, side_by_side, capacity=capacity)


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
