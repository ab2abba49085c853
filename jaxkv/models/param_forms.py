"""Forms of parameters: one entry per layer, stacked layers, or transposed copies.

Every function of this package that takes parameters accepts all forms.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxkv import validation
from jaxkv.models.config import ModelConfig
from jaxkv.models.interface import Params
from jaxkv.models.layers import (
    QuantizedWeight,
    WeightFormat,
    inputs_axis,
    quantize_weight,
)


def is_selection_bias(path: Sequence[object]) -> bool:
    """Returns True for the selection bias of a mixture, given a path of JAX's trees.

    It is float32 or wider for any weights, and no gradient trains it.
    """
    keys = [getattr(key, "key", None) for key in path[-2:]]
    return keys == ["router", "bias"]


class LayerForm(NamedTuple):
    """What the program of a layer depends on; layers of one form are one function."""

    attention: int
    """Number of its kind of attention."""
    is_mixture: bool
    """True if it has experts in place of an MLP."""


def layer_form(config: ModelConfig, layer: int) -> LayerForm:
    """Returns the form of a layer."""
    return LayerForm(config.kind_of(layer), config.is_mixture(layer))


def layer_runs(config: ModelConfig) -> list[range]:
    """Returns the longest ranges of consecutive layers of one form."""
    forms = [layer_form(config, layer) for layer in range(config.num_layers)]
    starts = [i for i in range(len(forms)) if not i or forms[i] != forms[i - 1]]
    return list(map(range, starts, [*starts[1:], len(forms)]))


@validation.checks_numbers(index=0)
def index_leaves(
    tree: PyTree[Array | np.ndarray], index: int
) -> PyTree[Array | np.ndarray]:
    """Returns entry `index` of the leading axis of every array."""
    return jax.tree.map(lambda x: x[index], tree)


def is_stacked(params: Params) -> bool:
    """Returns True if parameters have the form of `stack_layers`."""
    return _first_product(params)["weight"].ndim == 3


def _first_product(params: Params) -> Params:
    """Returns a product of the first layer, whose weight is a matrix."""
    layer = params["layers"][0]
    if "out" in layer:
        return layer["out"]
    return layer["down"] if "down" in layer else layer["mixture"]["router"]


ADAPTER_FACTORS = "lora_a", "lora_b"
"""Parameters of adapters, see `layers.Linear.add_adapters`."""


def adapted_products(params: Params) -> dict[int, tuple[str, ...]]:
    """Returns the names of the products with adapters in each entry of the layers."""
    return {
        index: names
        for index, layer in params["layers"].items()
        if (names := tuple(x for x in layer if ADAPTER_FACTORS[0] in layer[x]))
    }


def join_adapters(params: Params, adapters: Params) -> Params:
    """Adds the factors of adapters to parameters whose layers have the same entries.

    Args:
      params: parameters of a model.
      adapters: for each entry of the layers and each product with adapters the factors,
        as `adapters.load_adapters` returns them, or parameters that have them.

    Returns:
      The tree with the factors next to the weights. Every forward pass accepts it.
    """
    layers = dict(params["layers"])
    for index, names in adapted_products(adapters).items():
        parts = {
            name: layers[index][name]
            | {x: adapters["layers"][index][name][x] for x in ADAPTER_FACTORS}
            for name in names
        }
        layers[index] = layers[index] | parts
    return {**params, "layers": layers}


def stack_layers(config: ModelConfig, params: Params) -> Params:
    """Stacks the parameters of equal layers, for a scan over the layers.

    A program then contains one layer of each kind, so it compiles in a fraction of the
    time. It runs more slowly: on a CPU because products with slices of stacked weights
    are slower; on a GPU because loops over such slices stay outside of CUDA graphs, so
    the host is involved in every step.

    Args:
      config: architecture of the model.
      params: as returned by `init_params` or `checkpoints.load_model`. They are not
        freed: memory is needed twice while the caller keeps them.

    Returns:
      The same tree with one entry in "layers" for each run of layers of one form,
      whose arrays have a leading axis of layers.
    """
    if is_stacked(params):
        return params
    stacked = {}
    for number, kind in enumerate(layer_runs(config)):
        layers = [params["layers"][index] for index in kind]
        stacked[number] = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    return {**params, "layers": stacked}


def unstack_layers(config: ModelConfig, params: Params) -> Params:
    """Inverts `stack_layers`: "layers" has an entry for every layer."""
    if not is_stacked(params):
        return params
    layers = {
        index: index_leaves(params["layers"][number], place)
        for number, kind in enumerate(layer_runs(config))
        for place, index in enumerate(kind)
    }
    return {**params, "layers": layers}


def weight_format(params: Params) -> WeightFormat:
    """Returns the format of the layers' weights."""
    weights = (
        leaf
        for leaf in jax.tree.leaves(params, is_leaf=_is_quantized)
        if _is_quantized(leaf)
    )
    first = next(weights, None)
    return "model" if first is None else first.format


def quantize_params(params: Params, weights: WeightFormat) -> Params:
    """Quantizes the weights of the layers one after another, on the host.

    Args:
      params: parameters of a model on one device, stacked or not, without transposed
        copies. They are not freed.
      weights: format of the weights of the layers' products; "model" changes nothing.

    Returns:
      The same tree with a `QuantizedWeight` in place of each such weight. Every forward
      pass accepts it.

    Raises:
      ValueError: the format has 4 bits, and a layer an odd number of inputs.
    """
    if weights == "model":
        return params

    def quantize(path: jax.tree_util.KeyPath, array: Array) -> Array | QuantizedWeight:
        axis = inputs_axis(tuple(key.key for key in path))
        if axis is None:
            return array
        host = np.asarray(array)
        quantized = quantize_weight(host, weights, axis=axis, dtype=array.dtype)
        return quantized.map_parts(lambda x: jax.device_put(x, may_alias=False))

    return jax.tree_util.tree_map_with_path(quantize, params)


def _is_quantized(leaf: object) -> TypeGuard[QuantizedWeight]:
    return isinstance(leaf, QuantizedWeight)


def has_transposed_weights(params: Params) -> bool:
    """Returns True if parameters have the form of `add_transposed_weights`."""
    return "transposed" in _first_product(params)


def add_transposed_weights(params: Params) -> Params:
    """Adds transposed copies `[in, out]` of the layers' weights, for 2 to 4 rows.

    On a CPU 2 to 4 rows take 0.5 to 0.9 of the time with these, if the weights fit its
    caches; other numbers of rows use `[out, in]`.

    Args:
      params: parameters of a model without mixtures, stacked or not. They are not
        freed. Quantized weights stay without copies.

    Returns:
      The same tree with "transposed" next to "weight" for each product in a layer.
      Every forward pass accepts it, and checkpoints omit the copies.
    """
    if weight_format(params) != "model":
        return params

    def both(part: Params) -> Params:
        if "weight" not in part:
            return part
        weight = part["weight"]
        return {**part, "transposed": weight.reshape(-1, weight.shape[-1]).T}

    add = jax.vmap(both) if is_stacked(params) else both
    layers = {
        index: {name: add(part) for name, part in layer.items()}
        for index, layer in params["layers"].items()
    }
    changed = {"layers": layers}
    if "ahead" in params:  # never stacked
        changed["ahead"] = {
            index: {
                **module,
                "layer": {name: both(part) for name, part in module["layer"].items()},
            }
            for index, module in params["ahead"].items()
        }
    return {**params, **changed}


def drop_transposed_weights(params: Params) -> Params:
    """Inverts `add_transposed_weights`; returns other parameters unchanged."""
    return _without(params, ("transposed",))


def drop_adapters(params: Params) -> Params:
    """Inverts `join_adapters`; returns other parameters unchanged."""
    return _without(params, ADAPTER_FACTORS)


def _without(params: Params, dropped: Sequence[str]) -> Params:
    """Returns the tree without the entries of some names."""
    if not isinstance(params, dict):
        return params
    names = [name for name in params if name not in dropped]
    return {name: _without(params[name], dropped) for name in names}
