"""Tensors that `jax.vjp` keeps for the models of this package.

`activations` lists the tensors that good kernels keep; this list is the actual one. JAX
keeps the inputs of each operation's derivative rule: of a norm its input in float32,
the normalized numbers and the inverse deviation; of an activation function its partial
products; cosines and sines once per use. Under `jit` XLA may recompute some of them and
choose other layouts, so the buffers of a compiled step differ.
"""

from typing import NamedTuple

from jaxkv import validation
from jaxkv.models import ModelConfig


class Residual(NamedTuple):
    """A tensor that is kept for the backward pass.

    Attributes:
      part: part of the model: ends, norms, rope, attention, mlp.
      name: description of the tensor.
      bytes: bytes per token, over the whole model.
    """

    part: str
    name: str
    bytes: int


_KEPT_OF_ACTIVATION = {"silu": 4, "gelu": 4, "gelu_tanh": 5, "relu": 2}
"""Tensors of the FFN's width that an activation function and the next product need: its
input, factors of its derivative rule, and its output."""


@validation.checks_numbers()
def list_residuals(
    config: ModelConfig, *, number_bytes: int = 4
) -> tuple[Residual, ...]:
    """Lists the tensors that the forward pass up to the logits keeps per token.

    Attention is `flash_attention`, which keeps no weights. Reshaped copies of weights
    do not grow with the batch, and are not listed.

    Args:
      config: the model.
      number_bytes: bytes of an activation: 4 in float32, 2 in bfloat16.

    Raises:
      ValueError: the model has experts, latent attention, recurrent layers or layers
        of different sizes.
    """
    if config.recurrence is not None:
        raise ValueError("residuals of recurrent layers are not listed")
    if config.has_special_layers:
        raise ValueError("residuals of layers of different sizes are not listed")
    if config.latent is not None:
        raise ValueError("residuals of latent attention are not listed")
    if config.residual == "single":
        raise ValueError("residuals of layers with one branch are not listed")
    if config.experts is not None:
        raise ValueError("residuals of mixtures of experts are not listed")
    c = config
    e = number_bytes
    heads = c.num_q_heads * c.head_dim
    kv_heads = c.num_kv_heads * c.head_dim
    residuals = [Residual("ends", "token", 4)]
    if c.positions == "learned":
        residuals.append(Residual("ends", "position", 4))

    def norm(name: str, size: int, count: int, *, output: bool) -> None:
        widths = {"input in float32": 4 * size, "normed": e * size, "deviation": 8}
        if output:
            widths["output"] = e * size
        for what, width in widths.items():
            residuals.append(Residual("norms", f"{name}: {what}", width * count))

    layers = c.num_layers
    norm("block norms", c.hidden_size, 2 * layers, output=True)
    norm("final norm", c.hidden_size, 1, output=True)
    if c.qk_norm:  # their outputs are rotated, and not kept themselves
        num_heads = (c.num_q_heads + c.num_kv_heads) * layers
        norm("query and key norms", c.head_dim, num_heads, output=False)
    if c.positions == "rope":
        # Cosine and sine of half a head, in the shape of queries and in that of keys.
        residuals.append(Residual("rope", "angles", 4 * 4 * (c.head_dim // 2) * layers))

    def add(part: str, name: str, width: int) -> None:
        residuals.append(Residual(part, name, width * layers))

    add("attention", "queries", e * heads)
    add("attention", "keys and values", e * 2 * kv_heads)
    add("attention", "output, by sequence and by row", e * 2 * heads)
    add("attention", "log-sum-exp", 4 * c.num_q_heads)
    num_tensors = _KEPT_OF_ACTIVATION[c.activation]
    add("mlp", "activation", e * num_tensors * c.mlp_size)
    if c.activation == "relu":
        add("mlp", "which are above 0, a byte each", c.mlp_size)
    if c.gated:
        add("mlp", "up and the product", e * 2 * c.mlp_size)
    return tuple(residuals)


@validation.checks_numbers(tokens=(0, 2**63))
def total_residual_bytes(residuals: tuple[Residual, ...], tokens: int) -> int:
    """Returns the bytes of residuals over the tokens of a batch."""
    return tokens * sum(residual.bytes for residual in residuals)
