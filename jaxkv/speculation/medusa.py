"""Medusa: heads that each guess one token further ahead, from one hidden state.

The model's own output says which token follows the last one fed; head k, from 1 on,
says which follows k places further, without having seen those between. A head is some
residual blocks on the last hidden state, and then the model's own output matrix, so
that its weights are those of the blocks alone. All heads are asked at once: drafting
costs as much as one small product, and a tree of their best guesses is the same in
every step.

Source: Cai et al. 2024, arXiv:2401.10774, section 2.1 (heads), 2.1.2 (trees).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxkv import validation
from jaxkv.models import ModelConfig, Params, transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The shape of the heads."""

    target: ModelConfig
    """The model that they draft for."""
    num_heads: int = 4
    """Tokens that are guessed beyond the model's own."""
    num_blocks: int = 1
    """Residual blocks of a head."""

    def __post_init__(self) -> None:
        """Refuses counts below 1.

        Raises:
          ValueError: shows the field.
        """
        for name in ("num_heads", "num_blocks"):
            validation.integer(f"self.{name}", getattr(self, name), low=1)

    @property
    def taps(self) -> tuple[int, ...]:
        """What they read of the target, as `PagedForward` takes it."""
        return (self.target.num_layers,)

    def param_shapes(self, dtype: DTypeLike = "float32") -> Params:
        """The tree of the parameters, of `jax.ShapeDtypeStruct`s."""
        size = self.target.hidden_size
        lead, dtype = (self.num_heads, self.num_blocks), jnp.dtype(dtype)
        weight = jax.ShapeDtypeStruct((*lead, size, size), dtype)
        bias = jax.ShapeDtypeStruct((*lead, size), dtype)
        return {"layers": {"bias": bias, "weight": weight}}

    def init_params(self, key: Array) -> Params:
        """Zeros, by which every head says what the model itself says; no key is used.

        Source: section 2.1.1 there.
        """
        shapes = self.param_shapes()
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def logits(
    params: Params,
    target: Params,
    states: Float[Array, "rows hidden"],
    *,
    config: MedusaConfig,
) -> Float[Array, "heads rows vocab"]:
    """What every head says of every row.

    Args:
      params: of the heads.
      target: of the model.
      states: the model's last hidden states, normed.
      config: shape of the heads.

    Returns:
      Logits of the token k + 1 places behind each row's token, k from 1 on.
    """
    blocks = params["layers"]

    def head(block: Any) -> Array:
        x = states.T
        for index in range(config.num_blocks):
            grown = block["weight"][index] @ x + block["bias"][index][:, None]
            x = x + jax.nn.silu(grown)
        return x

    found = jax.vmap(head)(blocks)  # [heads, hidden, rows]
    model = transformer.merge(config.target, target)
    columns = found.transpose(1, 0, 2).reshape(found.shape[1], -1)
    return model.logits(columns).reshape(found.shape[0], states.shape[0], -1)
