"""Stacked LSTM and GRU language models, as baselines: config, forward pass, costs.

A layer's input products do not depend on its state, so they are computed for all tokens
at once; only the state's product is sequential. The gradient is computed in the same
way: weights get theirs in one product after the loop, where differentiating the loop
would add to them token by token.

Sources: Hochreiter and Schmidhuber 1997 with the forget gate of Gers et al. 2000, as
Zaremba et al. 2014 (arXiv:1409.2329, section 3) write it; Cho et al. 2014
(arXiv:1406.1078, section 2.3), with the reset gate applied after the product as in
cuDNN and PyTorch.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from jaxkv import models
from jaxkv.models import ModelConfig, Params
from jaxkv.validation import ConfigRecord, PositiveInt
from scaling.costs import ParameterCounts, Place, Weight, count_weights

NUM_GATES = {"lstm": 4, "gru": 3}
"""Numbers of gates: input, forget, cell, output; reset, update, candidate (the order of
PyTorch)."""


class RecurrentConfig(ConfigRecord):
    """Shape of a recurrent language model; hashable, so a static argument."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    """Size of embeddings and of states."""
    num_layers: PositiveInt
    max_positions: PositiveInt
    """Longest intended sequence; the model does not depend on it."""
    kind: Literal["lstm", "gru"] = "lstm"
    norm: Literal["none", "layer"] = "layer"
    """Layer norm of every layer's input and of the head's input."""
    norm_eps: float = 1e-5
    residual: bool = True
    """True if a layer's output is added to its input, as in a transformer."""
    tie_embeddings: bool = True


type Architecture = ModelConfig | RecurrentConfig
"""Model config, a hashable static argument; each has `vocab_size`, `hidden_size`,
`num_layers` and `max_positions`."""


def init_recurrent_params(config: RecurrentConfig, key: Array) -> Params:
    """Returns random float32 parameters, nested dicts as of `transformer.init_params`.

    Embeddings are normal with standard deviation 0.02, a layer's products uniform in
    +-1/sqrt(hidden) as in PyTorch. Biases are zero, except 1 in the LSTM's forget
    gate, which must start open (Jozefowicz et al. 2015, section 2.2).
    """
    c = config
    embed, head, *layers = jax.random.split(key, 2 + c.num_layers)
    params: dict[str, PyTree[Array]] = {"embed": {"weight": _table(c, embed)}}
    params["layers"] = [_init_layer(c, layer) for layer in layers]
    if c.norm == "layer":
        params["final_norm"] = _init_norm(c)
    if not c.tie_embeddings:
        params["head"] = {"weight": _table(c, head)}
    return params


def _table(config: RecurrentConfig, key: Array) -> Float[Array, "vocab hidden"]:
    shape = (config.vocab_size, config.hidden_size)
    return jnp.float32(0.02) * jax.random.normal(key, shape, jnp.float32)


def _init_layer(config: RecurrentConfig, key: Array) -> Params:
    gates = NUM_GATES[config.kind]
    h = config.hidden_size
    bound = 1 / math.sqrt(h)
    keys = jax.random.split(key)

    def product(key: Array) -> Float[Array, "gates hidden hidden"]:
        return jax.random.uniform(key, (gates, h, h), jnp.float32, -bound, bound)

    bias = jnp.zeros((gates, h), jnp.float32)
    if config.kind == "lstm":
        bias = bias.at[1].set(jnp.float32(1))
    layer: dict[str, dict[str, Array]] = {
        "inputs": {"weight": product(keys[0]), "bias": bias},
        "state": {"weight": product(keys[1])},
    }
    if config.kind == "gru":
        # Bias of the candidate's product with the state, inside the reset gate.
        layer["state"]["bias"] = jnp.zeros((h,), jnp.float32)
    if config.norm == "layer":
        layer["norm"] = _init_norm(config)
    return layer


def _init_norm(config: RecurrentConfig) -> Params:
    size = (config.hidden_size,)
    return {"scale": jnp.ones(size, jnp.float32), "bias": jnp.zeros(size, jnp.float32)}


def recurrent_logits(
    params: Params, tokens: Int[Array, "batch seq"], *, config: RecurrentConfig
) -> Float[Array, "batch seq vocab"]:
    """Runs whole sequences from a state of zeros.

    Parameters are those of `init_recurrent_params`, in any floating type.

    Returns:
      Next-token logits, in at least float32.
    """
    norm = functools.partial(models.norm, kind="layer", eps=config.norm_eps)
    # Time is the first axis, so that the loop reads and writes whole rows.
    x = params["embed"]["weight"][tokens.T]
    for layer in params["layers"]:
        inputs = norm(x, **layer["norm"]) if config.norm == "layer" else x
        weights = layer["inputs"]
        state = layer["state"]
        bias = weights["bias"].reshape(-1)[None, None]
        projections = jnp.einsum("sbh,gh->sbg", inputs, _flat(weights["weight"])) + bias
        start = jnp.zeros(inputs.shape[1:], inputs.dtype)
        if config.kind == "lstm":
            y, _ = _scan(_lstm, _flat(state["weight"]), (), projections, (start, start))
        else:
            of_state = (state["bias"],)
            (y,) = _scan(_gru, _flat(state["weight"]), of_state, projections, (start,))
        x = x + y if config.residual else y
    if config.norm == "layer":
        x = norm(x, **params["final_norm"])
    table = params["embed" if config.tie_embeddings else "head"]["weight"]
    wide = np.promote_types(x.dtype, np.float32)
    out = jnp.einsum("sbh,vh->sbv", x, table, preferred_element_type=wide)
    return out.swapaxes(0, 1)


def _flat(weight: Float[Array, "gates hidden inputs"]) -> Float[Array, "rows inputs"]:
    return weight.reshape(-1, weight.shape[-1])


def _lstm(bias, projection, product, state):
    """Computes the gates of both products; the state is the output and the cell."""
    del bias
    i, f, g, o = jnp.split(projection + product, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def _gru(bias, projection, product, state):
    """Moves the state towards the candidate by the update gate."""
    r, z, n = jnp.split(projection, 3, axis=-1)
    r_, z_, n_ = jnp.split(product, 3, axis=-1)
    candidate = jnp.tanh(n + jax.nn.sigmoid(r + r_) * (n_ + bias[0][None]))
    update = jax.nn.sigmoid(z + z_)
    return ((1 - update) * candidate + update * state[0],)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(cell, weight, bias, projections, start):
    """Scans `cell(bias, projections[t], weight @ state[0], state)`; returns all states.

    Args:
      cell: elementwise function of rows of a batch.
      weight: weight of the state's product, `[rows, hidden]`.
      bias: further parameters of the cell.
      projections: products of the inputs for the gates, `[seq, batch, rows]`.
      start: state before the first token, each part `[batch, hidden]`.

    Returns:
      Each part of the state, `[seq, batch, hidden]`.
    """
    return _scan_forward(cell, weight, bias, projections, start)[0]


def _scan_forward(cell, weight, bias, projections, start):
    def step(state, projection):
        product = jnp.einsum("bh,gh->bg", state[0], weight)
        state = cell(bias, projection, product, state)
        return state, (state, product)

    _, (states, products) = jax.lax.scan(step, start, projections)
    return states, (weight, bias, projections, start, states, products)


def _scan_backward(cell, residuals, grads):
    weight, bias, projections, start, states, products = residuals
    before = jax.tree.map(
        lambda first, all_: jnp.concatenate([first[None], all_[:-1]]), start, states
    )

    def step(carry, token):
        later, bias_grad = carry
        projection, product, state, grad = token
        pull = jax.vjp(cell, bias, projection, product, state)[1]
        more, made_grad, product_grad, state_grad = pull(
            jax.tree.map(jnp.add, later, grad)
        )
        through = jnp.einsum("bg,gh->bh", product_grad, weight)
        earlier = (state_grad[0] + through, *state_grad[1:])
        bias_grad = jax.tree.map(jnp.add, bias_grad, more)
        return (earlier, bias_grad), (made_grad, product_grad)

    nothing = jax.tree.map(jnp.zeros_like, (start, bias))
    (start_grad, bias_grad), (made_grad, product_grad) = jax.lax.scan(
        step, nothing, (projections, products, before, grads), reverse=True
    )
    weight_grad = jnp.einsum("sbg,sbh->gh", product_grad, before[0])
    return weight_grad, bias_grad, made_grad, start_grad


_scan.defvjp(_scan_forward, _scan_backward)


def list_recurrent_weights(config: RecurrentConfig) -> tuple[Weight, ...]:
    """Lists every weight of a recurrent model, once per place.

    In the formulas v is the vocabulary, h the hidden size and g the gates: 4 of an
    LSTM, 3 of a GRU.
    """
    h = config.hidden_size
    v = config.vocab_size
    gates = NUM_GATES[config.kind]
    square = gates * h * h
    head = int(not config.tie_embeddings)
    norms = 2 * h * (config.norm == "layer")
    listed = [
        Weight("embedding", "tokens", "v h", v * h, "first"),
        Weight("cell", "inputs", "g h h", square, "every", applied=1),
        Weight("cell", "state", "g h h", square, "every", applied=1),
        Weight("cell", "bias", "g h", gates * h, "every"),
        Weight("norms", "layer norm", "2 h", norms, "every"),
        Weight("norms", "final norm", "2 h", norms, "last"),
        Weight("head", "head", "v h", v * h, "last", head, head, 1),
    ]
    if config.kind == "gru":
        listed.append(Weight("cell", "candidate bias", "h", h, "every"))
    return tuple(weight for weight in listed if weight.size)


def count_recurrent_parameters(config: RecurrentConfig) -> ParameterCounts:
    """Counts parameters by every convention.

    An LSTM of two layers of 256 over 257 tokens, tied: 1,118,720 in total, 1,052,928
    of them outside the embedding.
    """
    every = config.num_layers
    places: dict[Place, int] = {"first": 1, "every": every, "last": 1}
    return count_weights(list_recurrent_weights(config), places)


def recurrent_forward_flops(config: RecurrentConfig, *, tokens: int) -> int:
    """Counts the products of a forward pass, two operations per multiply-add.

    Unlike a transformer's, the cost of a token does not grow with its position.
    """
    return 2 * count_recurrent_parameters(config).matmul * tokens
