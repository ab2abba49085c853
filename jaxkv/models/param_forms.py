"""Forms of the same parameters: a layer each, stacked for a loop, twice for few rows.

Every function of this package that takes parameters takes any of them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.models.config import ModelConfig
from jaxkv.models.interface import Params


def layer_kinds(config: ModelConfig) -> list[range]:
    """Layers of equal shapes, which stand side by side: dense ones, then mixtures."""
    dense = config.experts.num_dense_layers if config.experts else config.num_layers
    both = range(dense), range(dense, config.num_layers)
    return [kind for kind in both if kind]


def index_leaves(tree: Any, index: int) -> Any:
    """What stands at `index` of the leading axis of every array."""
    return jax.tree.map(lambda x: x[index], tree)


def is_stacked(params: Params) -> bool:
    """Whether the parameters are as `stack_layers` returns them."""
    return params["layers"][0]["attention_norm"]["scale"].ndim == 2


def stack_layers(config: ModelConfig, params: Params) -> Params:
    """Puts the parameters of equal layers side by side, for a scan over the layers.

    A program then has one layer of a kind, however many there are: it compiles in a
    fraction of the time. It runs more slowly: on a CPU because products with slices of
    stacked weights do; on a GPU because loops around such slices stay out of CUDA
    graphs, so that the host is asked in every step.

    Args:
      config: the model's shape.
      params: as `init_params` or `checkpoints.load_model` return them. They stay, so
        that twice the memory is taken while somebody holds them.

    Returns:
      The same tree with one entry in "layers" for each kind of layer, the dense ones
      and the mixtures, whose arrays lead with an axis of layers. Every function of this
      package takes either.
    """
    if is_stacked(params):
        return params
    stacked = {}
    for number, kind in enumerate(layer_kinds(config)):
        layers = [params["layers"][index] for index in kind]
        stacked[number] = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    return {**params, "layers": stacked}


def unstack_layers(config: ModelConfig, params: Params) -> Params:
    """The inverse of `stack_layers`: an entry in "layers" for every layer."""
    if not is_stacked(params):
        return params
    layers = {
        index: index_leaves(params["layers"][number], place)
        for number, kind in enumerate(layer_kinds(config))
        for place, index in enumerate(kind)
    }
    return {**params, "layers": layers}


def has_transposed_weights(params: Params) -> bool:
    """Whether the parameters are as `add_transposed_weights` returns them."""
    return "transposed" in params["layers"][0]["qkv"]


def add_transposed_weights(params: Params) -> Params:
    """Adds the layers' weights a second time, as `[in, out]`, for products of few rows.

    On a CPU 2 to 4 rows take 0.5 to 0.9 of the time that way, as far as weights lie in
    its caches; one row, and more of them, are multiplied by `[out, in]`.

    Args:
      params: of a model without mixtures, stacked or not. They stay.

    Returns:
      The same tree with "transposed" beside "weight" of each product in a layer. Every
      forward pass takes either, and checkpoints have them once.
    """

    def both(part: Params) -> Params:
        if "weight" not in part:
            return part
        weight = part["weight"]
        return {**part, "transposed": weight.reshape(-1, weight.shape[-1]).T}

    each = jax.vmap(both) if is_stacked(params) else both
    layers = {
        index: {name: each(part) for name, part in layer.items()}
        for index, layer in params["layers"].items()
    }
    return {**params, "layers": layers}


def drop_transposed_weights(params: Params) -> Params:
    """The inverse of `add_transposed_weights`; other parameters as they are."""
    if not isinstance(params, dict):
        return params
    kept = [name for name in params if name != "transposed"]
    return {name: drop_transposed_weights(params[name]) for name in kept}
