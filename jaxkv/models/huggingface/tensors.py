"""Maps parameters to the tensors of a Hugging Face folder.

Parameters are fused (query, key and value by KV head; gate and up; experts); tensors of
a folder mostly are not. `list_leaves` lists the tensors of every parameter;
`join_tensors` and `split_parameter` convert the arrays.
"""

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from jaxkv.models import transformer
from jaxkv.models.config import ModelConfig
from jaxkv.models.huggingface.families import FAMILIES
from jaxkv.models.huggingface.family import Family

# Buffers that older versions of transformers saved: constants, not weights.
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$")

# Part of a tensor in a name of `Leaf`.
_PART = re.compile(r":(\w+)")

# Modules with one matrix per expert.
EXPERT_MODULES = (".mixture.up", ".mixture.down")


type ExpertForm = Literal["none", "apart", "stacked", "in_out", "alternating"]


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
    head_order: tuple[int, ...] | None = None
    """Stored row of each row of a head, if the order of rotary pairs differs; all heads
    are alike, and values keep their order."""
    experts: ExpertForm = "none"
    """Tensors of experts: one `[out, in]` for each; one `[experts, out, in]`; one
    `[experts, in, out]` or of biases `[experts, out]`; or such a one whose outputs
    alternate between gate and up."""
    is_by_head: bool = False
    """True if query, key and value of each head follow each other in one tensor."""
    copies: tuple[str, ...] = ()
    """Names of further tensors equal to the only one; a folder may omit them."""

    def dtype_in(self, dtype: np.dtype) -> np.dtype:
        """Returns the parameter's dtype in a model of a dtype."""
        is_wide = self.path[-2:] == ("router", "bias")
        return np.promote_types(dtype, np.float32) if is_wide else dtype


STACKED_EXPERTS: Mapping[str, tuple[str, ...]] = {
    ".mixture.router": (".mlp.gate",),
    ".mixture.up.weight": (".mlp.experts.gate_up_proj",),
    ".mixture.down.weight": (".mlp.experts.down_proj",),
}
"""Names of folders in the layout of transformers 5: one tensor for all experts."""


def list_leaves(config: ModelConfig, *, is_stacked: bool = False) -> list[Leaf]:
    """Lists every parameter of a model, with its tensors in folders of the family.

    If `is_stacked`, the folder has the names of `STACKED_EXPERTS`.
    """
    family = FAMILIES[config.family]
    modules = dict(family.modules)
    if is_stacked and ".mixture.up.weight" not in modules:
        modules |= STACKED_EXPERTS
        if ".block_sparse_moe.e_score_correction_bias" in sum(modules.values(), ()):
            modules[".mixture.router.bias"] = (".mlp.e_score_correction_bias",)
    recurrent_modules = modules | {**family.recurrent_modules}
    recurrent_layers = {*config.recurrent_layers}
    single_layers = layers_of_keys(config)
    result = []
    for keys, spec in jax.tree_util.tree_leaves_with_path(
        transformer.param_shapes(config)
    ):
        path = tuple(key.key for key in keys)
        prefix = ""
        module = _module(path)
        places = modules
        kind = path[-1]
        if in_layer := module.startswith("."):
            # Layers for multi-token prediction follow those of the model.
            first = config.num_layers if path[0] == "ahead" else 0
            prefix = family.layer.format(first + path[1])
            if path[:1] == ("layers",) and path[1] in recurrent_layers:
                places = recurrent_modules
        if (whole := f"{module}.{kind}") in places:
            names = tuple(f"{prefix}{name}" for name in places[whole])
        elif module in places:
            suffix = "bias" if kind == "bias" else "weight"
            names = tuple(f"{prefix}{name}.{suffix}" for name in places[module])
        else:
            raise ValueError(f"family={config.family!r} has no place for {module}")
        if module == ".qkv" and path[1] in single_layers:
            names = names[:2]
        # Shapes `[out, ...]` of the tensors.
        *lead, width = spec.shape
        shapes = [(math.prod(lead), width) if lead else (width,)]
        experts: ExpertForm = "none"
        if module in EXPERT_MODULES:
            names, shapes, experts = _expert_tensors(family, module, names, spec.shape)
        elif module in (".qkv", ".up", ".mixture.shared_up"):
            if module == ".qkv":
                kv_heads, group_and_kv, head_dim, *tail_shape = spec.shape
                num_kv = 1 if len(names) == 2 else 2
                row_counts = [kv_heads * (group_and_kv - num_kv) * head_dim]
                row_counts += num_kv * [kv_heads * head_dim]
            else:
                gate_and_up, mlp_size, *tail_shape = spec.shape
                row_counts = gate_and_up * [mlp_size]
            if len(names) == 1:
                row_counts = [sum(row_counts)]
            shapes = [(count, *tail_shape) for count in row_counts]
        elif module in (".q_norm", ".k_norm") or (module == ".q" and kind == "bias"):
            shapes = [(math.prod(spec.shape),)]
        elif module == ".mixer.mixed" and len(names) > 1:
            shapes = [(size, width) for size in _channel_counts(config)]
        elif module == ".mixer" and kind == "kernel":
            sizes = _channel_counts(config) if len(names) > 1 else [lead[0]]
            shapes = [(size, 1, width) for size in sizes]
        elif module == ".mixer" and kind == "decay_rate" and _is_kda(config):
            shapes = [(1, 1, width, 1)]
        is_transposed = family.is_conv1d and in_layer
        if is_transposed:
            shapes = [shape[::-1] for shape in shapes]
        result.append(
            Leaf(
                path,
                spec.shape,
                names,
                tuple(shapes),
                is_transposed,
                _head_order(config, family, module, shapes),
                experts,
                module == ".qkv" and family.is_fused_by_head,
                _list_copies(config, module),
            )
        )
    return result


def layers_of_keys(config: ModelConfig) -> set[int]:
    """Returns the layers whose keys are also their values."""
    kinds = config.attention_kinds
    layers = config.attention_layers
    return {
        x for x in layers if config.of_kind(kinds[config.kind_of(x)]).keys_are_values
    }


def _channel_counts(config: ModelConfig) -> list[int]:
    """Returns the numbers of channels of queries, keys and values of a recurrence."""
    r = config.recurrence
    assert r is not None
    keys = r.num_key_heads * r.key_dim
    return [keys, keys, r.num_outputs]


def _is_kda(config: ModelConfig) -> bool:
    return config.recurrence is not None and config.recurrence.kind == "kda"


def _expert_tensors(
    family: Family, module: str, names: tuple[str, ...], shape: tuple[int, ...]
) -> tuple[tuple[str, ...], list[tuple[int, ...]], ExpertForm]:
    """Returns names and shapes of the tensors of all experts, and their form."""
    if "{}" in names[0]:
        num_experts, width, columns = shape
        every = range(num_experts)
        names = tuple(name.format(x) for x in every for name in names)
        return (
            names,
            [(columns * num_experts // len(names), width)] * len(names),
            "apart",
        )
    if module in family.interleaved:
        return names, [shape], "alternating"
    if family.interleaved or len(shape) == 2:
        return names, [shape], "in_out"
    return names, [(shape[0], shape[2], shape[1])], "stacked"


def _head_order(
    config: ModelConfig,
    family: Family,
    module: str,
    shapes: Sequence[tuple[int, ...]],
) -> tuple[int, ...] | None:
    """Returns the stored row of each row of a head, None for the same order.

    Rotary pairs are features i and i + n of this package's heads, of 2 n features; the
    pairs that turn are first. Any order gives the same scores, since queries and keys
    share it.
    """
    if not config.rotary_kinds:
        return None
    if config.latent is not None:
        if module not in (".q", ".q_up", ".kv_down"):
            return None
        rows = shapes[0][0] if module == ".kv_down" else config.head_dim
        size = config.latent.rope_dim
        first = range(rows - size)
        pairs = range(rows - size, rows)
        return (*first, *pairs[::2], *pairs[1::2])
    if module not in (".qkv", ".q_norm", ".k_norm"):
        return None
    num = -(-(config.rotary_size or config.head_dim) // 2)
    rest = [*range(2 * num, config.head_dim)]
    pairs = [*range(2 * num)]
    if family.rope_order == "pairs":
        low = pairs[::2]
        high = pairs[1::2]
    else:
        low = pairs[:num]
        high = pairs[num:]
    if family.rope_order == "swapped":
        low, high = high, low
    half = len(rest) // 2
    order = (*low, *rest[:half], *high, *rest[half:])
    return None if order == (*range(config.head_dim),) else order


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
    if leaf.experts == "apart":
        num_experts, width, columns = leaf.shape
        matrix = np.stack(parts).reshape(num_experts, columns, width)
        return np.ascontiguousarray(matrix.swapaxes(1, 2))
    if leaf.experts != "none":
        [array] = parts
        if leaf.experts == "stacked":
            array = array.swapaxes(1, 2)
        if leaf.experts == "alternating":
            array = np.concatenate([array[..., ::2], array[..., 1::2]], -1)
        return np.ascontiguousarray(array)
    rows = np.concatenate([part.T if leaf.is_transposed else part for part in parts])
    if leaf.path[-2] != "qkv":
        return _reorder(rows, leaf.head_order).reshape(leaf.shape)
    kv_heads, group_and_kv, head_dim, *tail_shape = leaf.shape
    if leaf.is_by_head:
        qk, v = np.split(rows.reshape(leaf.shape), [group_and_kv - 1], axis=1)
    else:
        num_k = kv_heads * head_dim
        # Without values if they are the keys.
        num_kv = 1 if len(leaf.names) == 2 else 2
        ends = [len(rows) - num * num_k for num in range(num_kv, 0, -1)]
        q, k, *values = (
            part.reshape(kv_heads, -1, head_dim, *tail_shape)
            for part in np.split(rows, ends)
        )
        qk = np.concatenate([q, k], axis=1)
        v = values[0] if values else qk[:, :0]
    qk = _reorder(qk.reshape(-1, *tail_shape), leaf.head_order)
    qk = qk.reshape(kv_heads, -1, head_dim, *tail_shape)
    return np.concatenate([qk, v], axis=1)


def split_parameter(leaf: Leaf, array: np.ndarray) -> list[np.ndarray]:
    """Splits a parameter into its tensors; inverts `join_tensors`."""
    if leaf.experts == "apart":
        width = leaf.shape[1]
        rows = array.swapaxes(1, 2).reshape(len(leaf.names), -1, width)
        return list(rows)
    if leaf.experts == "stacked":
        return [array.swapaxes(1, 2)]
    if leaf.experts == "alternating":
        return [np.stack(np.split(array, 2, -1), -1).reshape(array.shape)]
    if leaf.experts == "in_out":
        return [array]
    plain = [shape[::-1] if leaf.is_transposed else shape for shape in leaf.shapes]
    order = leaf.head_order
    order = None if order is None else tuple(np.argsort(order).tolist())
    if leaf.path[-2] == "qkv":
        tail_shape = leaf.shape[3:]
        has_values = len(leaf.names) != 2
        qk, v = np.split(array, [leaf.shape[1] - has_values], axis=1)
        qk = _reorder(qk.reshape(-1, *tail_shape), order)
        qk = qk.reshape(leaf.shape[0], -1, leaf.shape[2], *tail_shape)
        heads = [np.concatenate([qk, v], axis=1)]
        if not leaf.is_by_head:
            heads = [qk[:, :-1], qk[:, -1:], *([v] if has_values else [])]
        rows = np.concatenate([part.reshape(-1, *tail_shape) for part in heads])
    else:
        rows = _reorder(array.reshape(-1, *plain[0][1:]), order)
    ends = np.cumsum([shape[0] for shape in plain])
    parts = np.split(rows, ends[:-1])
    return [part.T if leaf.is_transposed else part for part in parts]


def stored_name(name: str) -> str:
    """Returns the tensor that has a name of `Leaf`, or a part of it: `module:part`."""
    return _PART.sub("", name)


def packed_rows(config: ModelConfig, name: str) -> list[int] | None:
    """Returns the rows of the stored tensor that a name of `Leaf` has; None for all."""
    if (part := _PART.search(name)) is None:
        return None
    family = FAMILIES[config.family]
    before = name[: part.start()]
    [rows_of] = [
        rows for module, rows in family.packed.items() if before.endswith(module)
    ]
    return [*rows_of(config)[part[1]]]


def pack_parts(
    config: ModelConfig, parts: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns stored tensors, given all parts of each."""
    result: dict[str, np.ndarray] = {}
    sizes: dict[str, int] = {}
    for name, part in parts.items():
        stored = stored_name(name)
        sizes[stored] = sizes.get(stored, 0) + len(part)
    for name, part in parts.items():
        if (rows := packed_rows(config, name)) is None:
            result[name] = part
            continue
        stored = stored_name(name)
        if stored not in result:
            result[stored] = np.empty((sizes[stored], *part.shape[1:]), part.dtype)
        result[stored][rows] = part
    return result


def fit_equal_parts(leaf: Leaf, stored: Mapping[str, tuple[int, ...]]) -> Leaf:
    """Returns the leaf of a kernel of a convolution with the shapes of equal parts.

    transformers 5 saves the kernel of queries, keys and values as three tensors of
    equal sizes, in place of the sizes of the three.

    Args:
      leaf: any leaf.
      stored: shapes of the tensors of a folder.
    """
    if leaf.path[-1] != "kernel" or len(leaf.names) == 1:
        return leaf
    channels, *tail = leaf.shape
    size = -(-channels // len(leaf.names))
    starts = range(0, channels, size)
    shapes = tuple((min(size, channels - x), 1, *tail) for x in starts)
    is_equal = all(map(operator.eq, map(stored.get, leaf.names), shapes))
    return leaf._replace(shapes=shapes) if is_equal else leaf


def _reorder(rows: np.ndarray, order: tuple[int, ...] | None) -> np.ndarray:
    """Takes the rows of each head in another order; None for the same."""
    if order is None:
        return rows
    heads = rows.reshape(-1, len(order), *rows.shape[1:])
    return heads[:, list(order)].reshape(rows.shape)


def canonical_names(config: ModelConfig, names: Iterable[str]) -> dict[str, str]:
    """Maps the tensor names of a full model to the names in the folder.

    A folder saved from the bare transformer omits the first part of every name, and a
    folder of a model with a tied head may store the embeddings under the head's name.
    Buffers that are not weights are dropped.
    """
    family = FAMILIES[config.family]
    names = [name for name in names if not name.startswith(family.ignored)]
    if (prefix := family.text_prefix) and any(x.startswith(prefix) for x in names):
        plain = {name.replace(prefix, family.base, 1): name for name in names}
        places = canonical_names(config, plain)
        return {name: plain[place] for name, place in places.items()}
    embed, head = embed_and_head(config)
    unused = [
        f"{family.layer.format(layer)}{module}."
        for layer in range(config.num_layers)
        if config.attention_kinds[config.kind_of(layer)].shares_kv
        for module in (*family.modules[".qkv"][1:], *family.modules[".k_norm"])
    ]
    names = [name for name in names if not name.startswith(tuple(unused))]
    if family.skips_ahead:
        prefix, _, _ = family.layer.partition("{}")
        is_later = lambda name: (  # noqa: E731
            name.startswith(prefix)
            and int(name.removeprefix(prefix).partition(".")[0]) >= config.num_layers
        )
        names = [name for name in names if not is_later(name)]
    bare = not any(name.startswith(family.base) for name in names)
    tensor_by_name = {
        family.base + name if bare and name != head else name: name
        for name in names
        if not _BUFFERS.search(name)
    }
    if config.tie_embeddings and head in tensor_by_name and embed not in tensor_by_name:
        tensor_by_name[embed] = tensor_by_name.pop(head)
    return tensor_by_name


def use_other_names(
    config: ModelConfig, expected: Iterable[str], file_names: dict[str, str]
) -> None:
    """Replaces other names of missing tensors in a result of `canonical_names`."""
    expected = {*expected}
    for name in expected - file_names.keys():
        module, _, suffix = name.rpartition(".")
        for usual, other in FAMILIES[config.family].other_names.items():
            alternative = f"{module.removesuffix(usual)}{other}.{suffix}"
            if module.endswith(usual) and alternative in file_names.keys() - expected:
                file_names[name] = file_names.pop(alternative)


def embed_and_head(config: ModelConfig) -> tuple[str, str]:
    """Returns the names of the embedding and head tensors."""
    modules = FAMILIES[config.family].modules
    return f"{modules['embed'][0]}.weight", f"{modules['head'][0]}.weight"
