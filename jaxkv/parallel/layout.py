"""How an engine's state lies on a mesh: the heads of its pages divided, the rest whole.

Specs are `PartitionSpec`s; a tree of them may be a prefix of that of the arrays.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxkv.engine import EngineState
from jaxkv.memory import Pages, Staging
from jaxkv.models import Params
from jaxkv.models.partition import TENSOR

WHOLE = PartitionSpec()
"""Of what every device has."""
_HEADS = PartitionSpec(None, None, TENSOR)
"""Of a leaf of K or V, `[layers, pages, kv_heads, ...]`, and of its scales."""


def degree_of(mesh: Mesh) -> int:
    """Devices over which matrices are divided."""
    return mesh.shape.get(TENSOR, 1)


def mapped(function: Callable, mesh: Mesh, given: Any, made: Any) -> Callable:
    """A function that every device runs on its parts, as the specs divide them.

    What is said to be whole must come out the same everywhere, which is not checked.
    """

    def anew(x: Any) -> Any:
        return x if x.size else jnp.zeros(x.shape, x.dtype)

    def run(*args: Any) -> Any:
        # XLA's partitioner (jax 0.11.2) dies of an empty array that is handed through.
        return jax.tree.map(anew, function(*jax.tree.map(anew, args)))

    return jax.shard_map(
        run, mesh=mesh, in_specs=given, out_specs=made, check_vma=False
    )


def shardings(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Where arrays belong; `specs` may be a prefix of their tree."""
    full = jax.tree.broadcast(specs, tree, is_leaf=_is_spec)
    return jax.tree.map(lambda x: NamedSharding(mesh, x), full, is_leaf=_is_spec)


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Puts arrays where they belong; `specs` may be a prefix of their tree."""
    return jax.device_put(tree, shardings(tree, specs, mesh))


def specs_on(params: Params, mesh: Mesh) -> Params:
    """How parameters were divided over a mesh.

    Raises:
      ValueError: names one that is elsewhere.
    """

    def spec(path: Any, array: Array) -> PartitionSpec:
        found = getattr(array, "sharding", None)
        if not isinstance(found, NamedSharding) or found.mesh != mesh:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} must be on {mesh=}: "
                "parallel.tensor.place_params puts it there"
            )
        return found.spec

    return jax.tree_util.tree_map_with_path(spec, params)


def pages_specs(pages: Pages) -> Pages:
    """How pages are divided: K and V by heads; every device has all features."""
    beside = None if pages.beside is None else pages_specs(pages.beside)
    return Pages(k=_HEADS, v=_HEADS, beside=beside, features=WHOLE)  # ty: ignore[invalid-argument-type]


def state_specs(state: EngineState) -> Any:
    """How an engine's state is divided, as a prefix of it: its pages alone are."""
    specs: Any = EngineState(*(WHOLE for _ in state))  # ty: ignore[invalid-argument-type]
    specs = specs._replace(pages=pages_specs(state.pages))
    if (staging := state.staging) is not None:
        own: Any = Staging(*(WHOLE for _ in staging))  # ty: ignore[invalid-argument-type]
        specs = specs._replace(staging=own._replace(pages=pages_specs(staging.pages)))
    return specs


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
