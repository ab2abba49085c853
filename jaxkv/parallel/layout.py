"""Layout of an engine's state on a mesh: its pages are divided, the rest is replicated.

Specs are `PartitionSpec`s; a tree of specs may be a prefix of the tree of arrays.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxkv import validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine import EngineState
from jaxkv.memory import CONTEXT, Pages, Staging, check_window
from jaxkv.models import EXPERT, TENSOR, Params

REPLICATED = PartitionSpec()
"""Spec of an array that every device has."""


def check_mesh(mesh: object) -> None:
    """Checks that the argument is a mesh with the axes of `make_mesh`, or None.

    Raises:
      ValueError: the argument is not a mesh, or has another axis.
    """
    validation.instance("mesh", mesh, Mesh, type(None))
    axis_names = (TENSOR, CONTEXT, EXPERT)
    if isinstance(mesh, Mesh) and not {*mesh.axis_names} <= {*axis_names}:
        raise ValueError(
            f"mesh.axis_names={mesh.axis_names} must be of {axis_names}, see "
            "parallel.make_mesh"
        )


def degree_of(mesh: Mesh) -> int:
    """Returns the number of devices over which matrices are divided."""
    return mesh.shape.get(TENSOR, 1)


def experts_of(mesh: Mesh) -> int:
    """Returns the number of devices, or tensor-parallel groups, that divide experts."""
    return mesh.shape.get(EXPERT, 1)


def num_page_parts_of(mesh: Mesh) -> int:
    """Returns the number of devices that divide pages."""
    return mesh.shape.get(CONTEXT, 1)


@validation.checks_numbers()
def check_pages(mesh: Mesh, *, page_size: int, window: int | None = None) -> None:
    """Checks that a mesh can divide pages.

    Raises:
      ValueError: the page size, or the model's window, is not a multiple.
    """
    num = num_page_parts_of(mesh)
    if page_size % num:
        raise ValueError(
            f"{page_size=} must be a multiple of the {num} devices that divide pages"
        )
    if num > 1:
        check_window(window, page_size=page_size)


def map_over_mesh(
    function: Callable,
    mesh: Mesh,
    in_specs: PyTree[PartitionSpec],
    out_specs: PyTree[PartitionSpec],
) -> Callable:
    """Returns a function that every device runs on its parts, as the specs divide them.

    Results with a replicated spec must be equal on all devices, which is not checked.
    """

    def copy_if_empty(x: Array) -> Array:
        return x if x.size else jnp.zeros(x.shape, x.dtype)

    def run(*args: PyTree[Array]) -> PyTree[Array]:
        # XLA's partitioner (jax 0.11.2) aborts on an empty array passed through.
        return jax.tree.map(copy_if_empty, function(*jax.tree.map(copy_if_empty, args)))

    in_specs, out_specs = (_on(mesh, specs) for specs in (in_specs, out_specs))
    return jax.shard_map(
        run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def shardings(
    tree: PyTree[ArrayOrShape], specs: PyTree[PartitionSpec], mesh: Mesh
) -> PyTree[NamedSharding]:
    """Returns the sharding of each array; `specs` may be a prefix of the tree."""
    full = jax.tree.broadcast(_on(mesh, specs), tree, is_leaf=_is_spec)
    return jax.tree.map(lambda x: NamedSharding(mesh, x), full, is_leaf=_is_spec)


def place_tree(
    tree: PyTree[ArrayOrShape], specs: PyTree[PartitionSpec], mesh: Mesh
) -> PyTree[Array]:
    """Puts arrays on the devices of their specs, which may be a prefix of the tree."""
    return jax.device_put(tree, shardings(tree, specs, mesh))


def put_array(array: np.ndarray, spec: PartitionSpec, mesh: Mesh) -> Array:
    """Puts an array that every process has on the devices, each with its part."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def specs_on(params: Params, mesh: Mesh) -> Params:
    """Returns the specs with which parameters are divided over a mesh.

    Raises:
      ValueError: a parameter is elsewhere; the message names it.
    """

    def spec(path: jax.tree_util.KeyPath, array: Array) -> PartitionSpec:
        sharding = getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} must be on {mesh=}: "
                "parallel.tensor.place_params puts it there"
            )
        return sharding.spec

    return jax.tree_util.tree_map_with_path(spec, params)


def pages_specs(pages: Pages) -> PyTree[PartitionSpec]:
    """Returns the specs of pages: those of their layout; features by places."""
    specs = pages.layout.specs(pages._replace(routes=None), heads=TENSOR)
    second = None if pages.draft_pages is None else pages_specs(pages.draft_pages)
    features = PartitionSpec(None, None, None, CONTEXT)
    routes = None if pages.routes is None else features
    return specs._replace(draft_pages=second, features=features, routes=routes)


def state_specs(state: EngineState) -> PyTree[PartitionSpec]:
    """Returns the specs of an engine's state, in which only pages are divided."""
    specs: Any = EngineState(*(REPLICATED for _ in state))  # ty: ignore[invalid-argument-type]
    specs = specs._replace(pages=pages_specs(state.pages))
    if (staging := state.staging) is not None:
        staging_specs: Any = Staging(*(REPLICATED for _ in staging))  # ty: ignore[invalid-argument-type]
        specs = specs._replace(
            staging=staging_specs._replace(pages=pages_specs(staging.pages))
        )
    return specs


def place_state(state: EngineState, mesh: Mesh) -> EngineState:
    """Puts an engine's state on a mesh, as its programs on the mesh take it.

    The pages have as many KV heads as the model of `tensor.fit_config`.

    Raises:
      ValueError: the mesh cannot divide the pages.
    """
    check_pages(mesh, page_size=state.pages.page_size)
    specs = state_specs(state)
    by_heads = any(TENSOR in x for x in jax.tree.leaves(specs.pages, is_leaf=_is_spec))
    heads = state.pages.num_kv_heads
    num = degree_of(mesh)
    if by_heads and heads % num:
        raise ValueError(
            f"pages of {heads} KV heads cannot be divided over {num} devices"
        )
    return place_tree(state, specs, mesh)


def _on(mesh: Mesh, specs: PyTree[PartitionSpec]) -> PyTree[PartitionSpec]:
    """Returns the specs without axes that the mesh does not have."""

    def one(spec: PartitionSpec) -> PartitionSpec:
        absent = {x for x in spec if isinstance(x, str)} - set(mesh.shape)
        return PartitionSpec(*(None if name in absent else name for name in spec))

    return jax.tree.map(one, specs, is_leaf=_is_spec)


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)
