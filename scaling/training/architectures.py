"""Language models that can be trained: transformers and recurrent models.

Training, scoring and counting use these functions, so an experiment that compares two
architectures differs only in a config.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv import validation
from jaxkv.models import ModelConfig, Params, init_params
from scaling.costs import (
    Layout,
    ParameterCounts,
    count_parameters,
    training_step_flops,
)
from scaling.shapes import describe_config
from scaling.training import recurrent, transformer_rows
from scaling.training.recurrent import Architecture
from scaling.training.transformer_rows import ONE, ForwardOutput


@validation.checks_numbers()
def transformer(
    width: int,
    *,
    num_heads: int,
    num_layers: int,
    mlp_size: int,
    vocab_size: int,
    seq_len: int,
) -> ModelConfig:
    """Returns the config of a transformer with multi-head attention.

    Its width must be a multiple of `num_heads`.
    """
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_layers=num_layers,
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=width // num_heads,
        mlp_size=mlp_size,
        max_positions=seq_len,
    )


def serving_config(config: Architecture) -> ModelConfig:
    """Returns the config if the model can be saved and served.

    Raises:
      ValueError: the model is recurrent, and can only be trained.
    """
    if not isinstance(config, ModelConfig):
        raise ValueError(f"{type(config).__name__} can be trained, not saved or served")
    return config


def init_model_params(config: Architecture, key: Array) -> Params:
    """Returns random float32 parameters, as nested dicts."""
    if isinstance(config, recurrent.RecurrentConfig):
        return recurrent.init_recurrent_params(config, key)
    return init_params(config, key)


def forward(
    params: Params,
    tokens: Int[Array, "batch seq"],
    *,
    config: Architecture,
    layout: Layout = ONE,
) -> ForwardOutput:
    """Runs a model over whole sequences, each from its beginning.

    With a `layout` (data parallelism only for recurrent models), this is the
    computation of one device of a mesh, see `transformer_rows`.
    """
    if isinstance(config, recurrent.RecurrentConfig):
        logits = recurrent.recurrent_logits(params, tokens, config=config)
        return ForwardOutput(logits, jnp.zeros((), logits.dtype))
    return transformer_rows.run_transformer(
        params, tokens, config=config, layout=layout
    )


def count_model_parameters(config: Architecture) -> ParameterCounts:
    """Counts parameters by every convention."""
    if isinstance(config, recurrent.RecurrentConfig):
        return recurrent.count_recurrent_parameters(config)
    return count_parameters(describe_config(config))


@validation.checks_numbers(batch=validation.SIZES, sequence=validation.SIZES)
def training_flops(
    config: Architecture,
    *,
    batch: int = 1,
    sequence: int,
) -> int:
    """Counts the operations of one training step, forward and backward.

    `batch` sequences of `sequence` predictions, each at least 1; for transformers with
    causal pairs of query and key.

    Raises:
      ValueError: a size is out of range.
    """
    if isinstance(config, recurrent.RecurrentConfig):
        return 3 * recurrent.recurrent_forward_flops(config, tokens=batch * sequence)
    shape = describe_config(config)
    return training_step_flops(
        shape, batch=batch, sequence=sequence, attention="causal"
    ).model


@validation.checks_numbers(num_params=(1, 2**48))
def resize_model[A: (ModelConfig, recurrent.RecurrentConfig)](
    base: A, num_params: int
) -> A:
    """Finds the shape nearest to a number of parameters without embeddings.

    A recurrent model varies its hidden size. A transformer keeps the layers, head_dim
    and KV head groups of `base`; for every hidden size that its heads divide, the MLP
    width is set to match the count, and the one whose ratio of MLP width to hidden size
    is nearest to `base`'s is returned.

    Args:
      base: config of all other fields.
      num_params: target, as `ParameterCounts.non_embedding` counts.

    Raises:
      ValueError: no shape is within 5 %, or `base` has experts, which have no single
        width, or latent attention, recurrent layers or layers of different sizes,
        which have several.
    """
    if isinstance(base, ModelConfig):
        if base.experts is not None:
            raise ValueError("mixtures of experts are not sized by one dial")
        if base.latent is not None:
            raise ValueError("latent attention is not sized by one dial")
        if base.residual == "single":
            raise ValueError("layers with one branch are not sized by one dial")
        if base.recurrence is not None:
            raise ValueError("recurrent layers are not sized by one dial")
        if base.has_special_layers:
            raise ValueError("layers of different sizes are not sized by one dial")
        nearest_shape: Any = _wide(base, num_params)
    else:
        # A GRU, the smaller of both kinds, has more than 4 h^2 parameters a layer.
        size_limit = 2 + math.isqrt(max(num_params, 0) // (4 * base.num_layers))
        shapes = (
            dataclasses.replace(base, hidden_size=h) for h in range(1, size_limit)
        )
        nearest_shape = min(shapes, key=lambda shape: abs(_outside(shape) - num_params))
    if abs(_outside(nearest_shape) - num_params) > 0.05 * num_params:
        raise ValueError(
            f"{num_params=} is not met within 5 % by any shape with "
            f"{base.num_layers=}; the nearest has {_outside(nearest_shape)}"
        )
    return nearest_shape


def _wide(base: ModelConfig, num_params: int):
    """Returns the shape whose MLP ratio is nearest to that of `base`."""
    ratio = base.mlp_size / base.hidden_size
    step = base.group_size * base.head_dim
    best = dataclasses.replace(base, mlp_size=1)
    min_error = math.inf
    for kv_heads in range(1, 1 + math.isqrt(max(num_params, 1)) // step + 1):
        q_heads = kv_heads * base.group_size
        narrow = dataclasses.replace(
            base,
            hidden_size=q_heads * base.head_dim,
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            mlp_size=1,
        )
        wider = dataclasses.replace(narrow, mlp_size=2)
        unit_params = _outside(wider) - _outside(narrow)
        size = 1 + round((num_params - _outside(narrow)) / unit_params)
        if size < 1:
            break
        off = abs(math.log(size / narrow.hidden_size / ratio))
        if off < min_error:
            best = dataclasses.replace(narrow, mlp_size=size)
            min_error = off
    return best


def _outside(config: Architecture) -> int:
    return count_model_parameters(config).non_embedding
