"""Sharding of a training state: parameters by a `Layout`, moments like them.

A state is stored and returned whole, as on one device; it is divided for training and
gathered again. So a run can continue with another layout.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from jaxkv import validation
from jaxkv.models import EXPERT, TENSOR, ModelConfig, Params, index_leaves, param_axes
from jaxkv.parallel import (
    RING,
    ULYSSES,
    check_all_used,
    fit_params,
    param_specs,
    put_array,
    unfit_params,
    zigzag_order,
)
from scaling.costs import Layout, check_layout
from scaling.shapes import describe_config
from scaling.training.recurrent import Architecture

type Leaf = Array | np.ndarray | jax.ShapeDtypeStruct
"""Leaf of a training state."""
DATA_AXIS = "data"
PIPELINE = "pipeline"
"""Mesh axes that divide a batch, and the layers."""


@validation.checks_numbers()
def check_trainable(
    model: Architecture, layout: Layout, *, sequence_length: int
) -> None:
    """Checks that a model can be trained with a layout.

    Raises:
      ValueError: a degree does not divide its size, or a combination is not
        implemented.
    """
    if layout.pages > 1:
        raise ValueError(
            f"{layout.pages=} (cp) divides the pages of an engine: ring or ulysses "
            "divide a sequence in training"
        )
    if layout.zero > 1:
        raise ValueError(f"{layout.zero=} must be 0 or 1")
    if not isinstance(model, ModelConfig):
        if layout != Layout(data=layout.data, zero=layout.zero):
            raise ValueError(
                f"{layout=} must divide only the data for a {type(model).__name__}"
            )
        return
    if layout.pipeline > 1 and layout.context > 1:
        raise ValueError(f"{layout=} must have pipeline or ring and ulysses, not both")
    if layout.pipeline > 1 and (mixed := model.experts) and mixed.num_dense_layers:
        raise ValueError(f"{mixed.num_dense_layers=} must be 0 with pipeline stages")
    if layout.pipeline > 1 and model.num_ahead_layers:
        raise ValueError(f"{model.num_ahead_layers=} must be 0 with pipeline stages")
    if model.num_kv_heads % layout.tensor:
        # Replicated KV heads would be trained separately.
        raise ValueError(
            f"{model.num_kv_heads=} must be a multiple of tensor={layout.tensor}"
        )
    if layout.ring > 1 and model.window is not None:
        raise ValueError(f"{model.window=} must be None in a ring")
    if layout.expert > 1:
        if layout.data % layout.expert:
            raise ValueError(f"expert={layout.expert} must divide data={layout.data}")
        if layout.tensor > 1:
            raise ValueError(f"{layout=} must have expert or tensor, not both")
        if layout.capacity is None and not layout.gather:
            raise ValueError(
                f"expert={layout.expert} needs gather, or a capacity such as 1.25: "
                "the number of rows sent to an expert must be fixed"
            )
    check_layout(describe_config(model), layout, sequence=sequence_length)
    zigzag_order(sequence_length, ring=layout.ring)


def make_training_mesh(layout: Layout) -> Mesh:
    """Returns a mesh of the first devices; the tensor axis varies fastest.

    Raises:
      ValueError: there are fewer devices than the layout needs.
    """
    axes = {
        DATA_AXIS: layout.data // layout.expert,
        EXPERT: layout.expert,
        PIPELINE: layout.pipeline,
        RING: layout.ring,
        ULYSSES: layout.ulysses,
        TENSOR: layout.tensor,
    }
    axes = {name: size for name, size in axes.items() if size > 1} or {DATA_AXIS: 1}
    if layout.num_devices > (num_devices := len(jax.devices())):
        raise ValueError(
            f"{layout} asks for {layout.num_devices} devices, {num_devices} are there"
        )
    check_all_used(layout.num_devices)
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[: layout.num_devices],
    )


def batch_axes(layout: Layout) -> tuple[str, ...]:
    """Returns the axes whose devices have different tokens, those of a batch first."""
    degrees = {
        DATA_AXIS: layout.data // layout.expert,
        EXPERT: layout.expert,
        RING: layout.ring,
        ULYSSES: layout.ulysses,
    }
    return tuple(name for name, degree in degrees.items() if degree > 1)


def training_param_specs(
    model: Architecture, mesh: Mesh, params: Params
) -> PyTree[PartitionSpec]:
    """Returns the partition specs of a tree of the model's parameters."""
    if not isinstance(model, ModelConfig):
        return jax.tree.map(lambda _: PartitionSpec(), params)
    axes = param_axes(model, stacked=PIPELINE in mesh.shape)
    every = param_specs(axes, mesh, {"layers": PIPELINE})

    def find_spec(path: tuple[jax.tree_util.DictKey, ...], _: object) -> PartitionSpec:
        node = every
        for key in path:
            node = node[key.key]
        return node

    # Moments may lack parameters: Muon has none for embeddings.
    return jax.tree_util.tree_map_with_path(find_spec, params)


def tree_specs(
    model: Architecture, layout: Layout, mesh: Mesh, tree: PyTree[Leaf]
) -> PyTree[PartitionSpec]:
    """Returns the partition specs of a tree that contains parameters or moments.

    With `layout.zero` every leaf is also divided over devices that replicate it, along
    its first axis that their number divides.
    """

    def of_params(params: Params) -> PyTree[PartitionSpec]:
        specs = training_param_specs(model, mesh, params)
        return jax.tree.map(divide, specs, params) if layout.zero else specs

    def divide(spec: PartitionSpec, x: Leaf) -> PartitionSpec:
        used = {name for name in spec if name}
        over = tuple(name for name in batch_axes(layout) if name not in used)
        num = int(np.prod([mesh.shape[name] for name in over], dtype=int))
        names = [*spec, *(None,) * (x.ndim - len(spec))]
        for axis, size in enumerate(x.shape):
            if over and names[axis] is None and size % num == 0:
                names[axis] = over
                break
        return PartitionSpec(*names)

    def of_any(x: PyTree[Leaf]) -> PyTree[PartitionSpec]:
        return of_params(x) if _is_params(x) else PartitionSpec()

    return jax.tree.map(of_any, tree, is_leaf=_is_params)


def place_training_tree(
    model: Architecture, layout: Layout, tree: PyTree[Array | np.ndarray]
) -> PyTree[Array | np.ndarray]:
    """Divides a tree that contains parameters or moments, by `tree_specs`.

    A vocabulary that does not divide is padded with zeros; layers are stacked if stages
    divide them.
    """
    if layout.num_devices == 1:
        return tree
    mesh = make_training_mesh(layout)

    def fit(model: ModelConfig, params: Params) -> Params:
        fitted = fit_params(model, params, layout.tensor)
        if layout.pipeline > 1:
            every = [fitted["layers"][index] for index in range(model.num_layers)]
            fitted["layers"] = {0: jax.tree.map(lambda *x: np.stack(x), *every)}
        return fitted

    fitted = _over_params(fit, model, tree)
    return jax.tree.map(
        lambda x, spec: put_array(np.asarray(x), spec, mesh),
        fitted,
        tree_specs(model, layout, mesh, fitted),
    )


def gather_tree(
    model: Architecture, layout: Layout, tree: PyTree[Array]
) -> PyTree[Array]:
    """Gathers a tree that `place_training_tree` divided, on every process."""
    if layout.num_devices == 1:
        return tree
    full_sharding = NamedSharding(make_training_mesh(layout), PartitionSpec())
    tree = jax.tree.map(np.asarray, jax.device_put(tree, full_sharding))

    def undo(model: ModelConfig, params: Params) -> Params:
        if layout.pipeline > 1:
            (stacked,) = params["layers"].values()
            every = range(model.num_layers)
            layers = {index: index_leaves(stacked, index) for index in every}
            params = {**params, "layers": layers}
        return unfit_params(model, params, layout.tensor)

    return jax.tree.map(jnp.asarray, _over_params(undo, model, tree))


def zero_like(x: Int[Array, "..."]) -> Float[Array, ""]:
    """Returns a zero that varies over the same mesh axes as `x`."""
    return x.reshape(-1)[0].astype(jnp.float32) * 0


def _over_params[T: PyTree[Array | np.ndarray]](
    change: Callable[[ModelConfig, Params], Params], model: Architecture, tree: T
) -> T:
    """Applies a function to all parameter trees, or trees like them, in a tree."""
    if not isinstance(model, ModelConfig):
        return tree
    return jax.tree.map(
        lambda x: change(model, x) if _is_params(x) else x, tree, is_leaf=_is_params
    )


def _is_params(x: object) -> bool:
    return isinstance(x, dict) and "layers" in x
