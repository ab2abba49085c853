"""Tensor parallelism: heads, MLP columns and vocabulary divided over devices.

Column-parallel matrices (queries, keys and values; gate and up) give each device its
heads and its MLP columns; row-parallel matrices (out; down) give a term of a sum: two
all-reduces per layer. Embeddings and head are divided by vocabulary. K and V of a head
are on the device of the head; if there are fewer KV heads than devices, each head is
copied to the devices that share its queries. With latent attention every device has the
latents, and its heads' projections of them. Tables, queues and draws are equal on all
devices, since every device runs the whole step.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from jaxkv import validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.models import (
    EXPERT,
    TENSOR,
    ModelConfig,
    Params,
    QuantizedWeight,
    adapted_products,
    param_axes,
    stack_layers,
)
from jaxkv.parallel import layout
from jaxkv.speculation import EagleConfig, LoadedHeads

type Path = tuple[str | int, ...]

SHARDED_AXES = frozenset({"heads", "kv_heads", "mlp", "vocab"})
"""Logical axes of parameters that tensor parallelism divides."""


@validation.checks_numbers()
def fit_config(config: ModelConfig, degree: int, *, num_expert: int = 1) -> ModelConfig:
    """Returns the model for tensor parallelism: at least one KV head per device.

    Args:
      config: the model.
      degree: number of devices that divide its matrices.
      num_expert: number of devices or groups that divide its experts.

    Raises:
      ValueError: the heads, MLP or experts cannot be divided.
    """
    c = config
    for name, number in (("tensor", degree), ("expert", num_expert)):
        if number > 1 and c.recurrence is not None:
            raise ValueError(
                f"{name}={number} must be 1: recurrent layers are not divided"
            )
        if number > 1 and c.has_special_layers:
            raise ValueError(
                f"{name}={number} must be 1: layers with sizes or inputs of their own, "
                "or shared K and V, are not divided"
            )
    sizes = {"num_q_heads": config.num_q_heads}
    layers = range(c.num_layers)
    if any(c.has_feed_forward(x) and not c.is_mixture(x) for x in layers):
        sizes["mlp_size"] = c.mlp_size
    if c.experts is not None:
        sizes["experts.size"] = c.experts.size
        sizes["experts.shared_size"] = c.experts.shared_size
    for name, size in sizes.items():
        if size % degree:
            raise ValueError(
                f"{name}={size} must be a multiple of the tensor-parallel degree "
                f"{degree}"
            )
    if num_expert > 1 and c.experts is None:
        raise ValueError(f"expert={num_expert} divides experts, and the model has none")
    if c.experts is not None and c.experts.num_experts % num_expert:
        raise ValueError(
            f"experts.num_experts={c.experts.num_experts} must be a multiple of "
            f"expert={num_expert}"
        )
    if (num := c.num_kv_heads) % degree and degree % num:
        raise ValueError(
            f"num_kv_heads={num} must be a multiple or a divisor of the "
            f"tensor-parallel degree {degree}"
        )
    if degree > num and c.qk_norm and c.qk_norm_over == "layer":
        raise ValueError(
            f"num_kv_heads={num} must be a multiple of the tensor-parallel degree "
            f"{degree}, with norms over all heads"
        )
    return dataclasses.replace(c, num_kv_heads=max(c.num_kv_heads, degree))


def fit_array(
    path: Path, array: np.ndarray, config: ModelConfig, degree: int
) -> np.ndarray:
    """Converts a parameter to the form of `fit_config` with equal parts per device.

    KV heads are copied, the vocabulary is padded with zeros, and the columns of
    experts, gate and up, are reordered so that those of a device are contiguous.

    Args:
      path: keys from the root of the parameter tree, layers not stacked.
      array: the parameter of `config`.
      config: the model before `fit_config`.
      degree: number of devices that divide it.
    """
    module = tuple(key for key in path if isinstance(key, str))[-2:]
    if path[-1] == "lora_a":  # it has no outputs
        return array
    if module[0] == "qkv" and (copies := degree // config.num_kv_heads) > 1:
        kv_heads, group_and_2, *tail_shape = array.shape
        group = group_and_2 - 2
        q = array[:, :group].reshape(kv_heads * copies, group // copies, *tail_shape)
        k_and_v = np.repeat(array[:, group:], copies, axis=0)
        return np.concatenate([q, k_and_v], axis=1)
    if path[0] in ("embed", "head") and (more := -array.shape[0] % degree):
        return np.pad(array, ((0, more), (0, 0)))
    if path[-3:-1] == ("mixture", "up"):
        halves = 2 if config.gated else 1
        parts = array.reshape(*array.shape[:-1], halves, degree, -1)
        return parts.swapaxes(-3, -2).reshape(array.shape)
    return array


def unfit_array(
    path: Path, array: np.ndarray, config: ModelConfig, degree: int
) -> np.ndarray:
    """Inverts `fit_array`; KV heads must not have been copied."""
    if path[0] in ("embed", "head"):
        return array[: config.vocab_size]
    if path[-3:-1] == ("mixture", "up"):
        halves = 2 if config.gated else 1
        parts = array.reshape(*array.shape[:-1], degree, halves, -1)
        return parts.swapaxes(-3, -2).reshape(array.shape)
    return array


@validation.checks_numbers()
def fit_params(config: ModelConfig, params: Params, degree: int) -> Params:
    """Applies `fit_array` to all parameters, layers not stacked."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: fit_array(_keys(path), np.asarray(x), config, degree), params
    )


@validation.checks_numbers()
def unfit_params(config: ModelConfig, params: Params, degree: int) -> Params:
    """Applies `unfit_array` to all parameters, layers not stacked."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: unfit_array(_keys(path), x, config, degree), params
    )


def param_specs(
    axes: PyTree[tuple[str | None, ...]],
    mesh: Mesh,
    more_axes: Mapping[str, str] | None = None,
) -> Params:
    """Returns the partitioning of parameters over the axes that a mesh has.

    Routers of mixtures are replicated.

    Args:
      axes: logical axes of the parameters, a tree as in `transformer.param_axes`.
      mesh: the devices.
      more_axes: further logical axes -> mesh axes that divide them.
    """
    over = (
        dict.fromkeys(SHARDED_AXES, TENSOR)
        | {"experts": EXPERT}
        | dict(more_axes or {})
    )
    over = {name: axis for name, axis in over.items() if axis in mesh.shape}

    def spec(
        path: jax.tree_util.KeyPath, names: tuple[str | None, ...]
    ) -> PartitionSpec:
        axis_by_name = over
        if "router" in _keys(path):
            axis_by_name = {name: over[name] for name in over if name != "experts"}
        return PartitionSpec(*(axis_by_name.get(str(name)) for name in names))

    is_axes = lambda x: type(x) is tuple  # noqa: E731
    return jax.tree_util.tree_map_with_path(spec, axes, is_leaf=is_axes)


def part_specs(weight: QuantizedWeight, spec: PartitionSpec) -> QuantizedWeight:
    """Returns the specs of codes and scales, with which they are divided as the weight.

    A scale of all inputs is replicated over devices that divide the inputs.
    """

    def fit(part: ArrayOrShape) -> PartitionSpec:
        if part.shape[weight.axis] > 1:
            return spec
        names = [*spec]
        names[weight.axis] = None
        return PartitionSpec(*names)

    return jax.tree.map(fit, weight)


def fit_specs(params: Params, specs: Params) -> Params:
    """Returns specs with those of codes and scales for quantized parameters."""
    return jax.tree.map(
        lambda x, spec: part_specs(x, spec) if isinstance(x, QuantizedWeight) else spec,
        params,
        specs,
        is_leaf=lambda x: isinstance(x, QuantizedWeight),
    )


def _keys(path: jax.tree_util.KeyPath) -> Path:
    return tuple(key.key for key in path)


def make_placer(
    config: ModelConfig, mesh: Mesh, axes: PyTree[tuple[str | None, ...]] = None
) -> Callable[[Path, np.ndarray | Array | QuantizedWeight], Array | QuantizedWeight]:
    """Returns a function that puts one parameter on the devices, each with its part.

    Args:
      config: architecture of the model.
      mesh: the devices.
      axes: logical axes of the parameters; None means those of `config`.

    Returns:
      A function of the parameter's path, layers not stacked, and its array.

    Raises:
      ValueError: as in `fit_config`.
    """
    degree = layout.degree_of(mesh)
    fit_config(config, degree, num_expert=layout.experts_of(mesh))
    axes = param_axes(config) if axes is None else axes
    specs = param_specs(axes, mesh)

    def place(
        path: Path, array: np.ndarray | Array | QuantizedWeight
    ) -> Array | QuantizedWeight:
        spec = specs
        for key in path:
            spec = spec[key]
        if isinstance(array, QuantizedWeight):
            divided = spec[array.axis] is not None
            num_blocks = (
                1 if array.block_scale is None else array.block_scale.shape[array.axis]
            )
            if divided and num_blocks > 1 and num_blocks % degree:
                raise ValueError(
                    f"tensor={degree} must divide the {num_blocks} blocks of inputs of "
                    f"{'.'.join(map(str, path))} with weights={array.format!r}"
                )
            return jax.tree.map(
                lambda part, spec: layout.put_array(
                    fit_array(path, np.asarray(part), config, degree), spec, mesh
                ),
                array,
                part_specs(array, spec),
            )
        fitted = fit_array(path, np.asarray(array), config, degree)
        return layout.put_array(fitted, spec, mesh)

    return place


def place_params(
    config: ModelConfig,
    params: Params,
    mesh: Mesh,
    axes: PyTree[tuple[str | None, ...]] = None,
) -> Params:
    """Divides parameters, layers not stacked; the result has the form of `fit_config`.

    Raises:
      ValueError: as in `fit_config`.
    """
    put = make_placer(config, mesh, axes)
    return jax.tree_util.tree_map_with_path(lambda path, x: put(_keys(path), x), params)


def stack_sharded_layers(
    config: ModelConfig, params: Params, mesh: Mesh | None
) -> Params:
    """Stacks the layers of divided parameters; `config` is a result of `fit_config`."""
    stacked = stack_layers(config, params)
    if mesh is None:
        return stacked
    adapted = adapted_products(stacked)
    specs = param_specs(param_axes(config, stacked=True, adapted=adapted), mesh)
    return layout.place_tree(stacked, fit_specs(stacked, specs), mesh)


def place_heads(heads: LoadedHeads, mesh: Mesh) -> LoadedHeads:
    """Divides drafting heads: EAGLE's layer as the target's; Medusa's are replicated.

    Raises:
      ValueError: as in `fit_config`.
    """
    config = heads.config
    degree = layout.degree_of(mesh)
    axes = jax.tree.map(lambda x: (None,) * x.ndim, heads.params)
    if isinstance(config, EagleConfig):
        axes |= {"layers": param_axes(config.layer)["layers"]}
    params = place_params(config.target, heads.params, mesh, axes)
    fitted: Any = dataclasses.replace(config, target=fit_config(config.target, degree))
    return heads._replace(config=fitted, params=params)
