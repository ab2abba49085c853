"""The one door to every language model that can be trained: transformers and rivals.

Training, scoring and counting go through here, so an experiment that compares two
architectures differs in a config and in nothing else.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv import models
from scaling import costs, costs_flops, describing, recurrent, recurrent_costs

type Architecture = models.ModelConfig | recurrent.RecurrentConfig
"""Hashable, a static argument; each has `vocab_size`, `hidden_size`, `num_layers` and
`max_positions`."""


class Output(NamedTuple):
    """What a forward pass gives.

    Attributes:
      logits: of the token after each.
      auxiliary: nats that training adds to the mean loss, weighted already; zero for
        models that ask for nothing.
    """

    logits: Float[Array, "batch seq vocab"]
    auxiliary: Float[Array, ""]


def servable(config: Architecture) -> models.ModelConfig:
    """Returns the config of a model that can be saved and served.

    Raises:
      ValueError: it is one of the rivals, which can only be trained.
    """
    if not isinstance(config, models.ModelConfig):
        raise ValueError(f"{type(config).__name__} can be trained, not saved or served")
    return config


def init_params(config: Architecture, key: Array) -> models.Params:
    """Random parameters, float32, as nested dicts."""
    if isinstance(config, recurrent.RecurrentConfig):
        return recurrent.init_params(config, key)
    return models.init_params(config, key)


def param_shapes(config: Architecture) -> models.Params:
    """The same tree holding `jax.ShapeDtypeStruct`s; allocates nothing."""
    return jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))


def forward(
    params: models.Params, tokens: Int[Array, "batch seq"], *, config: Architecture
) -> Output:
    """Runs a model over whole sequences, each from its beginning."""
    if isinstance(config, recurrent.RecurrentConfig):
        logits = recurrent.logits(params, tokens, config=config)
    else:
        logits = models.logits(params, tokens, config=config)
    return Output(logits, jnp.zeros((), logits.dtype))


def parameters(config: Architecture) -> costs.Parameters:
    """Counts parameters by every convention."""
    if isinstance(config, recurrent.RecurrentConfig):
        return recurrent_costs.parameters(config)
    return costs.parameters(describing.describe(config))


def training_flops(
    config: Architecture,
    *,
    batch: int = 1,
    sequence: int,
    attention: costs_flops.Attention = "causal",
) -> int:
    """Counts the operations of one training step, forward and backward.

    Args:
      config: the model.
      batch: sequences, at least 1.
      sequence: predictions of each, at least 1.
      attention: how a transformer's pairs of query and key are counted.

    Raises:
      ValueError: a size out of range.
    """
    costs_flops.check(batch=batch, sequence=sequence)
    if isinstance(config, recurrent.RecurrentConfig):
        return 3 * recurrent_costs.forward_flops(config, tokens=batch * sequence)
    shape = describing.describe(config)
    return costs_flops.training(
        shape, batch=batch, sequence=sequence, attention=attention
    ).model
