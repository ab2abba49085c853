"""Other parameters for an engine: checked, and converted to the form of its own."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from jaxkv.arrays import ArrayOrShape
from jaxkv.models import (
    Forward,
    ModelConfig,
    adapted_products,
    add_transposed_weights,
    drop_adapters,
    drop_transposed_weights,
    has_transposed_weights,
    is_stacked,
    join_adapters,
    quantize_params,
    unstack_layers,
    weight_format,
)
from jaxkv.parallel import stack_sharded_layers
from jaxkv.speculation import MTPConfig, TargetAndDraftParams

type _Arrays = PyTree[Array | np.ndarray]

_add_transposed_weights = jax.jit(add_transposed_weights)


def convert_params(
    old: _Arrays, new: _Arrays, forward: Forward, mesh: Mesh | None
) -> _Arrays:
    """Converts parameters of a model to the form of an engine's.

    Parameters of the model's type are quantized if those of the engine are.

    Args:
      old: parameters of the engine.
      new: parameters of the same model, as `load_model` returns them, or in the form of
        `old`.
      forward: forward pass of the engine.
      mesh: devices of the engine.

    Returns:
      The parameters in the form of `old`.

    Raises:
      ValueError: a parameter is missing, or differs in shape, type or sharding.
    """
    weights = weight_format(old)
    if weights != "model" and weight_format(new) == "model":
        if mesh is not None:
            raise ValueError(f"params must be quantized on a mesh, with {weights=}")
        new = quantize_params(new, weights)
    if _is_alike(old, new):
        return _place(old, new)
    if not isinstance(old, TargetAndDraftParams):
        return _convert(old, new, getattr(forward, "config", None), mesh)
    draft = old.draft
    config = getattr(getattr(forward, "target", None), "config", None)
    if isinstance(getattr(forward, "config", None), MTPConfig):
        ahead = new.get("ahead") if isinstance(new, dict) else None
        if not isinstance(new, dict) or ahead is None:
            raise ValueError("params['ahead'] must have the modules that draft")
        new = {name: new[name] for name in new if name != "ahead"}
        draft = _convert_modules(old.draft, ahead)
    return TargetAndDraftParams(_convert(old.target, new, config, mesh), draft)


def _convert(
    old: _Arrays, new: _Arrays, config: ModelConfig | None, mesh: Mesh | None
) -> _Arrays:
    """Converts parameters of one model, without those of a drafter."""
    if _is_alike(old, new) or not isinstance(config, ModelConfig):
        return _place(old, new)

    stacked = is_stacked(old)
    with_copies = has_transposed_weights(old)
    loaded = drop_transposed_weights(old)
    if stacked:
        loaded = jax.eval_shape(functools.partial(unstack_layers, config), loaded)
    has_other_form = jax.tree.structure(new) != jax.tree.structure(loaded)
    if adapted_products(loaded) and has_other_form:
        _check(drop_adapters(loaded), new)
        new = join_adapters(new, unstack_layers(config, old))
    _check(loaded, new)
    if stacked:
        new = stack_sharded_layers(config, new, mesh)
    if with_copies:
        new = _add_transposed_weights(new)
    return _place(old, new)


def _convert_modules(old: _Arrays, new: _Arrays) -> _Arrays:
    """Converts the modules of multi-token prediction."""
    if not _is_alike(old, new):
        _check(drop_transposed_weights(old), new)
        # The modules have the form of a model's layers.
        layers = {index: new[index]["layer"] for index in new}
        copied = _add_transposed_weights({"layers": layers})["layers"]
        new = {index: {**new[index], "layer": copied[index]} for index in new}
    return _place(old, new)


def _is_alike(old: PyTree[ArrayOrShape], new: PyTree[ArrayOrShape]) -> bool:
    """True if two trees have the same form; one layer may be stacked or not."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        return False
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all(np.shape(a) == np.shape(b) for a, b in pairs)


def _check(old: PyTree[ArrayOrShape], new: PyTree[ArrayOrShape]) -> None:
    """Compares the names, shapes and types of two trees.

    Raises:
      ValueError: they differ; the message has the first difference.
    """
    if _is_alike(old, new) and all(
        a.dtype == getattr(b, "dtype", None)
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    ):
        return
    wanted, given = (
        {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        for leaves, _ in map(jax.tree_util.tree_flatten_with_path, (old, new))
    )
    for name in sorted(wanted.keys() ^ given.keys()):
        verb = "is missing" if name in wanted else "is not a parameter of this engine"
        raise ValueError(f"params{name} {verb}")
    for name, leaf in wanted.items():
        shape = _describe(given[name])
        if shape != _describe(leaf):
            raise ValueError(f"params{name}={shape} must be {_describe(leaf)}")
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError("params must have the containers of this engine's parameters")


def _describe(leaf: ArrayOrShape) -> str:
    shape = getattr(leaf, "shape", None)
    if shape is None:
        return type(leaf).__name__
    return f"{leaf.dtype}{list(shape)}"


def _place(old: _Arrays, new: _Arrays) -> _Arrays:
    """Returns the new parameters, those of NumPy on the devices of the old ones.

    Raises:
      ValueError: a parameter differs in shape, type or sharding.
    """
    _check(old, new)

    def one(old: Array, new: Array | np.ndarray) -> Array | np.ndarray:
        if not isinstance(old, jax.Array):
            return new
        if not isinstance(new, jax.Array):
            return jax.device_put(new, old.sharding, may_alias=False)
        if not new.sharding.is_equivalent_to(old.sharding, new.ndim):
            raise ValueError(
                f"params with {new.sharding} must have {old.sharding}, as this "
                "engine's parameters"
            )
        return new

    return jax.tree.map(one, old, new)
