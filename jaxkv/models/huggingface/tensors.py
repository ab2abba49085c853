"""Maps parameters to the tensors of a Hugging Face folder.

Parameters are fused (query, key and value by KV head; gate and up; experts); tensors of
a folder mostly are not. `list_leaves` lists the tensors of every parameter;
`join_tensors` and `split_parameter` convert the arrays.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxkv.models import transformer
from jaxkv.models.config import ModelConfig
from jaxkv.models.huggingface.families import FAMILIES

# Buffers that older versions of transformers saved: constants, not weights.
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$")

# Modules with one matrix per expert.
EXPERT_MODULES = (".mixture.up", ".mixture.down")


class Leaf(NamedTuple):
    """One parameter and its tensors in a folder."""

    path: tuple[str | int, ...]
    """Keys from the root of the parameter tree."""
    shape: tuple[int, ...]
    """Shape of the parameter."""
    names: tuple[str, ...]
    """Names of the tensors, in the order in which they are joined."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the stored tensors."""
    is_transposed: bool
    """True if the tensors are stored `[in, out]`."""
    interleaved: tuple[int, int] | None = None
    """Rows of a head, and how many of them, the last ones, are rotary and interleaved
    in the folder: see `_half_split`."""
    copies: tuple[str, ...] = ()
    """Names of further tensors equal to the only one; a folder may omit them."""

    @property
    def is_of_experts(self) -> bool:
        """True for `[experts, in, out]`, joined from the experts' `[out, in]`."""
        return _module(self.path) in EXPERT_MODULES

    def dtype_in(self, dtype: np.dtype) -> np.dtype:
        """Returns the parameter's dtype in a model of a dtype."""
        is_wide = self.path[-2:] == ("router", "bias")
        return np.promote_types(dtype, np.float32) if is_wide else dtype


def list_leaves(config: ModelConfig) -> list[Leaf]:
    """Lists every parameter of a model, with its tensors in folders of the family."""
    family = FAMILIES[config.family]
    result = []
    for keys, spec in jax.tree_util.tree_leaves_with_path(
        transformer.param_shapes(config)
    ):
        path = tuple(key.key for key in keys)
        prefix = ""
        module = _module(path)
        kind = path[-1]
        if in_layer := module.startswith("."):
            # Layers for multi-token prediction follow those of the model.
            first = config.num_layers if path[0] == "ahead" else 0
            prefix = family.layer.format(first + path[1])
        if module not in family.modules:
            raise ValueError(f"family={config.family!r} has no place for {module}")
        suffix = "bias" if kind == "bias" else "weight"
        if path[-2:] == ("router", "bias"):
            suffix = "e_score_correction_bias"
        names = tuple(f"{prefix}{name}.{suffix}" for name in family.modules[module])
        # Shapes `[out, ...]` of the tensors.
        *lead, width = spec.shape
        shapes = [(math.prod(lead), width) if lead else (width,)]
        if module in EXPERT_MODULES:
            num_experts, width, columns = spec.shape
            shapes = [(columns // len(names), width)] * len(names) * num_experts
            every = range(num_experts)
            names = tuple(name.format(x) for x in every for name in names)
        elif module in (".qkv", ".up", ".mixture.shared_up"):
            if module == ".qkv":
                kv_heads, group_and_kv, head_dim, *tail_shape = spec.shape
                row_counts = [kv_heads * (group_and_kv - 2) * head_dim]
                row_counts += 2 * [kv_heads * head_dim]
            else:
                gate_and_up, mlp_size, *tail_shape = spec.shape
                row_counts = gate_and_up * [mlp_size]
            if len(names) == 1:
                row_counts = [sum(row_counts)]
            shapes = [(count, *tail_shape) for count in row_counts]
        is_transposed = family.is_conv1d and in_layer
        if is_transposed:
            shapes = [shape[::-1] for shape in shapes]
        interleaved = None
        if config.latent is not None and module in (".q", ".q_up", ".kv_down"):
            rows = shapes[0][0] if module == ".kv_down" else config.head_dim
            interleaved = rows, config.latent.rope_dim
        copies = _list_copies(config, module)
        result.append(
            Leaf(
                path,
                spec.shape,
                names,
                tuple(shapes),
                is_transposed,
                interleaved,
                copies,
            )
        )
    return result


def _module(path: tuple[str | int, ...]) -> str:
    """Returns the module of a parameter; modules of a layer start with a dot."""
    if path[0] == "layers":  # then the layer's number
        path = ("", *path[2:])
    elif path[0] == "ahead":  # then a number, and perhaps "layer"
        path = ("", *path[3 if path[2] == "layer" else 2 :])
    return ".".join(map(str, path[:-1]))


def _list_copies(config: ModelConfig, module: str) -> tuple[str, ...]:
    """Returns the tensors that may repeat the embeddings or the head."""
    family = FAMILIES[config.family]
    repeated = {"embed": ["embed"], "head": ["head"]}.get(module, [])
    if module == "embed" and config.tie_embeddings:
        repeated.append("head")
    layers = [
        family.layer.format(config.num_layers + index)
        for index in range(config.num_ahead_layers)
    ]
    names = [
        f"{layer}{name}"
        for layer in layers
        for suffix in repeated
        for name in family.modules[f".{suffix}"]
    ]
    if "head" in repeated[1:]:
        names += family.modules["head"]
    return tuple(f"{name}.weight" for name in names)


def join_tensors(leaf: Leaf, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Joins the tensors of one parameter, whose shapes must be `leaf.shapes`."""
    if leaf.is_of_experts:
        num_experts, width, columns = leaf.shape
        matrix = np.stack(parts).reshape(num_experts, columns, width)
        return np.ascontiguousarray(matrix.swapaxes(1, 2))
    rows = np.concatenate([part.T if leaf.is_transposed else part for part in parts])
    if leaf.interleaved is not None:
        rows = rows[_half_split(leaf)]
    if leaf.path[-2] != "qkv":
        return rows.reshape(leaf.shape)
    kv_heads, _, head_dim, *tail_shape = leaf.shape
    num_k = kv_heads * head_dim
    q, k, v = np.split(rows, [len(rows) - 2 * num_k, len(rows) - num_k])
    heads = [part.reshape(kv_heads, -1, head_dim, *tail_shape) for part in (q, k, v)]
    return np.concatenate(heads, axis=1)


def split_parameter(leaf: Leaf, array: np.ndarray) -> list[np.ndarray]:
    """Splits a parameter into its tensors; inverts `join_tensors`."""
    if leaf.is_of_experts:
        width = leaf.shape[1]
        rows = array.swapaxes(1, 2).reshape(len(leaf.names), -1, width)
        return list(rows)
    rows = array
    if leaf.path[-2] == "qkv":
        tail_shape = leaf.shape[3:]
        q, k, v = np.split(array, [leaf.shape[1] - 2, leaf.shape[1] - 1], axis=1)
        rows = np.concatenate([part.reshape(-1, *tail_shape) for part in (q, k, v)])
    plain = [shape[::-1] if leaf.is_transposed else shape for shape in leaf.shapes]
    ends = np.cumsum([shape[0] for shape in plain])
    rows = rows.reshape(-1, *plain[0][1:])
    if leaf.interleaved is not None:
        stored = np.empty_like(rows)
        stored[_half_split(leaf)] = rows
        rows = stored
    parts = np.split(rows, ends[:-1])
    return [part.T if leaf.is_transposed else part for part in parts]


def _half_split(leaf: Leaf) -> np.ndarray:
    """Returns the stored row of each row of a parameter with rotary rows.

    DeepSeek's folders have the two features of a rotary pair next to each other; this
    package has all first features of the pairs, then all second ones. Both orders give
    the same scores, since queries and keys share them.
    """
    assert leaf.interleaved is not None
    head, rotary = leaf.interleaved
    order = np.arange(head)
    order[head - rotary :] = head - rotary + np.arange(rotary).reshape(-1, 2).T.ravel()
    first = np.arange(0, leaf.shapes[0][0], head)
    return (first[:, None] + order[None, :]).ravel()


def canonical_names(config: ModelConfig, names: Iterable[str]) -> dict[str, str]:
    """Maps the tensor names of a full model to the names in the folder.

    A folder saved from the bare transformer omits the first part of every name, and a
    folder of a model with a tied head may store the embeddings under the head's name.
    Buffers that are not weights are dropped.
    """
    family = FAMILIES[config.family]
    names = list(names)
    embed, head = embed_and_head(config)
    bare = not any(name.startswith(family.base) for name in names)
    tensor_by_name = {
        family.base + name if bare and name != head else name: name
        for name in names
        if not _BUFFERS.search(name)
    }
    if config.tie_embeddings and head in tensor_by_name and embed not in tensor_by_name:
        tensor_by_name[embed] = tensor_by_name.pop(head)
    return tensor_by_name


def embed_and_head(config: ModelConfig) -> tuple[str, str]:
    """Returns the names of the embedding and head tensors."""
    modules = FAMILIES[config.family].modules
    return f"{modules['embed'][0]}.weight", f"{modules['head'][0]}.weight"
