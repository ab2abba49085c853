"""What `jax.vjp` keeps of our own models, tensor by tensor.

The kernels' list of `activations` is what could be kept; this is what is. JAX
keeps what each operation's derivative rule asks for: of a norm its input widened to
float32, the normed numbers and the inverse deviation; of an activation function its
partial products; cosines and sines once per use. Under `jit` XLA may compute some of it
again and lay out the rest as it likes, so a compiled step's buffers are another number.
"""

from typing import NamedTuple

from jaxkv.models import ModelConfig


class Residual(NamedTuple):
    """A tensor that is kept for the backward pass.

    Attributes:
      part: where it comes from: ends, norms, rope, attention, mlp.
      name: what it is.
      bytes: per token, over the whole model.
    """

    part: str
    name: str
    bytes: int


_KEPT_OF_ACTIVATION = {"silu": 4, "gelu": 4, "gelu_tanh": 5, "relu": 2}
"""Tensors of the FFN's width that an activation function and the product after it need:
its input, what its rule multiplies with, and its output."""


def list_residuals(
    config: ModelConfig, *, number_bytes: int = 4
) -> tuple[Residual, ...]:
    """Lists what the forward pass up to the logits keeps per token.

    Attention is `flash_attention`: no weights. Copies of weights that are reshaped for
    a product do not grow with the batch, and are left out.

    Args:
      config: the model.
      number_bytes: of an activation: 4 in float32, 2 in bfloat16.

    Raises:
      ValueError: the model is a mixture.
    """
    if config.experts is not None:
        raise ValueError("what a mixture keeps is not listed, only dense models")
    c, e = config, number_bytes
    heads, kv_heads = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    found = [Residual("ends", "token", 4)]
    if c.positions == "learned":
        found.append(Residual("ends", "position", 4))

    def norm(name: str, size: int, count: int, *, output: bool) -> None:
        each = {"input in float32": 4 * size, "normed": e * size, "deviation": 8}
        if output:
            each["output"] = e * size
        for what, width in each.items():
            found.append(Residual("norms", f"{name}: {what}", width * count))

    layers = c.num_layers
    norm("block norms", c.hidden_size, 2 * layers, output=True)
    norm("final norm", c.hidden_size, 1, output=True)
    if c.qk_norm:  # what they give is rotated, and not kept itself
        num_heads = (c.num_q_heads + c.num_kv_heads) * layers
        norm("query and key norms", c.head_dim, num_heads, output=False)
    if c.positions == "rope":
        # Cosine and sine of half a head, in the shape of queries and in that of keys.
        found.append(Residual("rope", "angles", 4 * 4 * (c.head_dim // 2) * layers))

    def add(part: str, name: str, width: int) -> None:
        found.append(Residual(part, name, width * layers))

    add("attention", "queries", e * heads)
    add("attention", "keys and values", e * 2 * kv_heads)
    add("attention", "output, by sequence and by row", e * 2 * heads)
    add("attention", "log-sum-exp", 4 * c.num_q_heads)
    kept = _KEPT_OF_ACTIVATION[c.activation]
    add("mlp", "activation", e * kept * c.mlp_size)
    if c.activation == "relu":
        add("mlp", "which are above 0, a byte each", c.mlp_size)
    if c.gated:
        add("mlp", "up and the product", e * 2 * c.mlp_size)
    return tuple(found)


def total_residual_bytes(found: tuple[Residual, ...], tokens: int) -> int:
    """Adds residuals up over the tokens of a batch."""
    return tokens * sum(residual.bytes for residual in found)
