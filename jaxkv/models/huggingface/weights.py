"""Reads and writes the safetensors of a Hugging Face folder.

The name, type and shape of every tensor are checked before use. Files are never
unpickled.

Weights in 8 and 4 bits are those of DeepSeek-V3 (`weight_scale_inv` for blocks of
128 x 128), gpt-oss (`_blocks` and `_scales`), NVIDIA's Model Optimizer (`weight_scale`
and `weight_scale_2`) and compressed-tensors (`weight_scale`, and in 4 bits
`weight_packed` and `weight_global_scale`). Source of the order of the numbers in a
byte: the published weights of gpt-oss; of the two last forms: vLLM's `modelopt.py` and
its schemes for compressed-tensors.
"""

import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import safetensors
import safetensors.numpy
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxkv import validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.files import read_json, reporting_errors
from jaxkv.models import param_forms, transformer
from jaxkv.models.config import ModelConfig
from jaxkv.models.huggingface import tensors as huggingface_tensors
from jaxkv.models.huggingface.families import FAMILIES
from jaxkv.models.huggingface.tensors import (
    Leaf,
    canonical_names,
    embed_and_head,
    fit_equal_parts,
    join_tensors,
    pack_parts,
    packed_rows,
    split_parameter,
    stored_name,
    use_other_names,
)
from jaxkv.models.huggingface.values import FP8_BLOCK
from jaxkv.models.interface import Params
from jaxkv.models.layers import (
    BLOCK_SIZES,
    QuantizedWeight,
    WeightFormat,
    inputs_axis,
    move_inputs,
    quantize_weight,
)

type Place = Callable[
    [tuple[str | int, ...], np.ndarray | QuantizedWeight], Array | QuantizedWeight
]
"""Puts a parameter on devices, given its keys from the root of the tree."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Safetensors' names of the supported element types.
STORED_TYPES = ("F32", "BF16", "F16", "F64")
_ACTIVATION_SCALES = ("input_scale", "input_global_scale")
"""Tensors next to a quantized weight that concern activations in 8 or 4 bits."""


class _Part(NamedTuple):
    """A tensor of a quantized weight in a folder."""

    name: str
    """Name in a full model."""
    shapes: tuple[tuple[int, ...], ...]
    """Supported shapes."""
    types: tuple[str, ...]
    """Safetensors' names of the supported element types."""


class _StoredForm(NamedTuple):
    """Tensors of a quantized weight in a folder."""

    format: WeightFormat | None
    """The format; None for 8 bits, where the type of `codes` decides."""
    codes: _Part
    scale: _Part
    """Scale of each block or of each output."""
    factor: _Part | None = None
    """Scale of the tensor."""
    divides: bool = False
    """True if the scale of the tensor is a divisor."""

    @property
    def parts(self) -> list[_Part]:
        """All tensors."""
        parts = self.codes, self.scale, self.factor
        return [part for part in parts if part is not None]


def _find_form(
    name: str, shape: tuple[int, ...], file_names: Mapping[str, str]
) -> _StoredForm | None:
    """Returns the form in which a folder has a weight; None for an array.

    Args:
      name: tensor in a full model.
      shape: its shape.
      file_names: names in the folder, by those in a full model.

    Raises:
      ValueError: blocks of weights in 4 bits do not divide the inputs.
    """
    if f"{name}_blocks" in file_names:
        blocks, scales = packed_shapes(shape)
        return _StoredForm(
            "mxfp4",
            _Part(f"{name}_blocks", (blocks,), ("U8",)),
            _Part(f"{name}_scales", (scales,), ("U8",)),
        )
    prefix = name.removesuffix(".weight")
    packed = f"{prefix}.weight_packed"
    if packed in file_names or f"{name}_scale_2" in file_names:
        *outputs, inputs = shape
        size = BLOCK_SIZES["nvfp4"]
        if inputs % size:
            raise ValueError(
                f"{inputs=} of packed weights must be a multiple of {size}"
            )
        is_other = packed in file_names
        scalar = f"{prefix}.weight_global_scale" if is_other else f"{name}_scale_2"
        return _StoredForm(
            "nvfp4",
            _Part(packed if is_other else name, ((*outputs, inputs // 2),), ("U8",)),
            _Part(f"{name}_scale", ((*outputs, inputs // size),), ("F8_E4M3",)),
            _Part(scalar, ((), (1,)), ("F32",)),
            divides=is_other,
        )
    if len(shape) != 2:
        return None
    blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
    if f"{name}_scale_inv" in file_names:
        codes = _Part(name, (shape,), ("F8_E4M3",))
        return _StoredForm(
            None, codes, _Part(f"{name}_scale_inv", (blocks,), STORED_TYPES)
        )
    if f"{name}_scale" in file_names:
        rows = shape[:1]
        shapes = (*rows, 1), rows, (1,), (), blocks
        codes = _Part(name, (shape,), ("F8_E4M3", "I8"))
        return _StoredForm(None, codes, _Part(f"{name}_scale", shapes, STORED_TYPES))
    return None


def load_params(
    folder: Path,
    config: ModelConfig,
    dtype: np.dtype,
    place: Place | None = None,
    weights: WeightFormat = "model",
) -> Params:
    """Reads all parameters after checking every tensor's name, type and shape.

    The folder has `model.safetensors`, or an index and its files; `dtype` is a result
    of `checked_dtype`. Parameters are read, quantized and placed one after another. If
    the folder has weights in the format of `weights`, these keep their bits, and no
    others are quantized.

    Raises:
      ValueError: a tensor is missing, unexpected, of another shape, not floating, not
        finite, or too large for `dtype`; the message names the file or folder and the
        tensor.
    """
    tensors = _open_tensors(folder)
    # Avoids making a tree of millions of parameters that cannot match.
    num_experts = config.experts.num_experts if config.experts else 0
    for unit, num in (("layers", config.num_layers), ("experts", num_experts)):
        if num > len(tensors):
            raise ValueError(
                f"{folder}: {num} {unit} in config.json, but only {len(tensors)} "
                "tensors"
            )
    is_stacked = any(".mlp.experts.gate_up_proj" in name for name in tensors)
    leaves = huggingface_tensors.list_leaves(config, is_stacked=is_stacked)
    file_names = canonical_names(config, tensors)
    use_other_names(
        config, [stored_name(x) for leaf in leaves for x in leaf.names], file_names
    )
    stored = {
        name: tuple(tensors[place][1].get_slice(place).get_shape())
        for name, place in file_names.items()
        if name.endswith("conv1d.weight")
    }
    leaves = [fit_equal_parts(leaf, stored) for leaf in leaves]
    if config.num_ahead_layers:
        prefix = FAMILIES[config.family].layer.format(config.num_layers) + "."
        if not any(name.startswith(prefix) for name in file_names):
            raise ValueError(
                f"{folder}: num_nextn_predict_layers={config.num_ahead_layers} in "
                f"config.json (or by default), but no tensor of {prefix[:-1]}; set it "
                "to 0 to load the model without multi-token prediction"
            )
    expected: dict[str, tuple[int, ...]] = {}
    for leaf in leaves:
        for name, shape in zip(leaf.names, leaf.shapes, strict=True):
            num_rows, *tail = shape
            if ":" in name:  # the sum over its parts
                num_rows += expected.get(stored_name(name), (0,))[0]
            expected[stored_name(name)] = num_rows, *tail
    copies = {
        copy: leaf.names[0]
        for leaf in leaves
        for copy in leaf.copies
        if copy in file_names
    }
    expected |= {copy: expected[name] for copy, name in copies.items()}
    forms = {
        name: form
        for name, shape in expected.items()
        if len(shape) > 1 and (form := _find_form(name, shape, file_names)) is not None
    }
    tensor_parts = {
        name: _Part(name, (shape,), STORED_TYPES) for name, shape in expected.items()
    }
    for name, form in forms.items():
        del tensor_parts[name]
        tensor_parts |= {part.name: part for part in form.parts}
        for end in _ACTIVATION_SCALES:
            file_names.pop(f"{name.removesuffix('.weight')}.{end}", None)
    _check_tensors(folder, tensor_parts.values(), tensors, file_names)

    def read(name: str, dtype: np.dtype) -> np.ndarray:
        if name in forms:
            return _cast(np.asarray(read_quantized(name).dequantize()), dtype, name)
        return _read(tensors, file_names[name], dtype)

    def read_quantized(name: str) -> QuantizedWeight:
        return _read_quantized(tensors, forms[name], expected[name], file_names)

    def bits(name: str) -> np.ndarray:  # for an exact comparison, also of NaN
        return np.ascontiguousarray(read(name, dtype)).view(np.uint8)

    for copy, name in copies.items():
        if np.array_equal(bits(copy), bits(name)):
            continue
        line = f"{folder}: {file_names[copy]} differs from {file_names[name]}"
        if config.tie_embeddings and copy == embed_and_head(config)[1]:
            raise ValueError(
                f"{line}, but config.json has tie_word_embeddings=true; with false the "
                "first is used"
            )
        raise ValueError(f"{line}, which layers for multi-token prediction share")
    # Not `jnp.asarray`, which compiles a program for each shape.
    put = place or (lambda path, array: jax.device_put(array, may_alias=False))
    arrays = []
    formats = {
        name: form.format or _format_in_8_bits(tensors, file_names[name])
        for name, form in forms.items()
    }
    is_published = weights in formats.values()
    for leaf in leaves:
        leaf_dtype = leaf.dtype_in(dtype)
        axis = None if weights == "model" else inputs_axis(leaf.path)
        names = [stored_name(name) for name in leaf.names]
        is_stored = {formats.get(name) for name in names} == {weights}
        row_lists = [packed_rows(config, name) for name in leaf.names]
        if axis is not None and is_stored and not leaf.is_transposed:
            stored = [read_quantized(name) for name in names]
            kinds = {jax.tree.structure(x) for x in stored}
            if len(kinds) == 1:
                chosen = [
                    x if rows is None else x.map_parts(operator.itemgetter(rows))
                    for x, rows in zip(stored, row_lists, strict=True)
                ]
                joined = _join_quantized(leaf, chosen, axis)
                arrays.append(put(leaf.path, replace(joined, dtype=leaf_dtype)))
                continue
        parts = []
        for name, rows in zip(names, row_lists, strict=True):
            tensor = read(name, leaf_dtype)
            parts.append(tensor if rows is None else tensor[rows])
        array = join_tensors(leaf, parts)
        if axis is not None and (is_stored or not is_published):
            array = quantize_weight(array, weights, axis=axis, dtype=leaf_dtype)
        arrays.append(put(leaf.path, array))
    return jax.tree.unflatten(
        jax.tree.structure(transformer.param_shapes(config)), arrays
    )


def read_tree(folder: Path, shapes: Params, dtype: np.dtype) -> Params:
    """Reads nested dicts of arrays; a tensor is named by its keys, joined by dots.

    Args:
      folder: as in `load_params`.
      shapes: the expected tree of `jax.ShapeDtypeStruct`s.
      dtype: a result of `checked_dtype`.

    Raises:
      ValueError: as `load_params`.
    """
    tensors = _open_tensors(folder)
    expected = {
        name: _Part(name, (leaf.shape,), STORED_TYPES)
        for name, leaf in _named(shapes).items()
    }
    names = {name: name for name in tensors}
    _check_tensors(folder, expected.values(), tensors, names)
    arrays = [jax.device_put(_read(tensors, name, dtype)) for name in expected]
    return jax.tree.unflatten(jax.tree.structure(shapes), arrays)


def read_tensors(path: Path, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Reads all tensors of a safetensors file by their names, of any shapes.

    Raises:
      ValueError: the file is broken, or a tensor is not floating or not finite.
    """
    with reporting_errors(path, safetensors.SafetensorError):
        file = safetensors.safe_open(path, framework="np")
        names = list(file.keys())
        for name in names:
            if (kind := file.get_slice(name).get_dtype()) not in STORED_TYPES:
                supported = ", ".join(STORED_TYPES)
                raise ValueError(f"{name} is of type {kind}, supported are {supported}")
        tensors = {name: (path, file) for name in names}
        return {name: _read(tensors, name, dtype) for name in names}


def write_tree(folder: Path, tree: Params, dtype: np.dtype) -> None:
    """Writes the safetensors that `read_tree` reads.

    Raises:
      ValueError: a value is too large for `dtype`.
    """
    tensors = {
        name: np.ascontiguousarray(_cast(np.asarray(leaf), dtype, name))
        for name, leaf in _named(tree).items()
    }
    _save_file(tensors, folder / WEIGHTS)


def _named(tree: Params) -> dict[str, ArrayOrShape]:
    """Returns the leaves of nested dicts, in order, by their keys joined by dots."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def _join_quantized(
    leaf: Leaf, parts: Sequence[QuantizedWeight], axis: int
) -> QuantizedWeight:
    """Joins the tensors of one parameter; `axis` is that of its inputs."""

    def join(*parts: np.ndarray) -> np.ndarray:
        shape = [*leaf.shape]
        shape[axis] = parts[0].shape[parts_axis]
        return join_tensors(leaf._replace(shape=tuple(shape)), parts)

    parts_axis = parts[0].axis
    return replace(jax.tree.map(join, *parts), axis=axis)


def _read(
    tensors: dict[str, tuple[Path, safetensors.safe_open]], name: str, dtype: np.dtype
) -> np.ndarray:
    """Reads a tensor; raises an error unless all numbers are finite."""
    path, file = tensors[name]
    with reporting_errors(path, safetensors.SafetensorError):
        array = _cast(file.get_tensor(name), dtype, name)
        if not _is_finite(array):
            raise ValueError(f"{name} holds NaN or infinite values")
        return array


def _read_quantized(
    tensors: dict[str, tuple[Path, safetensors.safe_open]],
    form: _StoredForm,
    shape: tuple[int, ...],
    file_names: Mapping[str, str],
) -> QuantizedWeight:
    """Reads a quantized weight with the shape of the full model's tensor."""
    codes_name = file_names[form.codes.name]
    scale_name = file_names[form.scale.name]
    path, _ = tensors[codes_name]
    codes = _read_bits(tensors, codes_name)
    row_scale = None
    weight_format = form.format or _format_in_8_bits(tensors, codes_name)
    if form.format == "mxfp4":
        scale = _read_bits(tensors, scale_name)
        if (scale == 255).any():
            raise ValueError(f"{path}: {scale_name} holds infinite scales")
        codes = codes.reshape(*codes.shape[:-2], -1)
    elif form.format == "nvfp4":
        assert form.factor is not None
        scale = _read_bits(tensors, scale_name)
        factor = _read(tensors, file_names[form.factor.name], np.dtype(np.float32))
        factor = 1 / factor if form.divides else factor
        row_scale = np.full((*codes.shape[:-1], 1), factor, np.float32)
    else:
        scale = _read(tensors, scale_name, np.dtype(np.float32))
        blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
        by_block = form.scale.name.endswith("_inv") or scale.shape == blocks
        if not by_block or scale.size == 1:
            row_scale = np.broadcast_to(scale.reshape(-1, 1), (shape[0], 1))
            row_scale = np.ascontiguousarray(row_scale)
            scale = None
        else:
            # Blocks that divide the inputs, for each output.
            size = math.gcd(FP8_BLOCK, shape[1])
            scale = np.repeat(scale, FP8_BLOCK, 0)[: shape[0]]
            scale = np.repeat(scale, FP8_BLOCK // size, 1)[:, : shape[1] // size]
    floats = {"fp8": codes, "nvfp4": scale}.get(weight_format)
    if floats is not None and ((floats & 127) == 127).any():
        raise ValueError(f"{path}: {codes_name} holds NaN or infinite values")
    result = QuantizedWeight(
        codes=codes,
        block_scale=scale,
        row_scale=row_scale,
        format=weight_format,
        axis=-1,
        dtype=np.dtype(np.float32),
    )
    # `_blocks` are `[experts, out, ...]` of a tensor `[experts, in, out]`.
    return move_inputs(result, -2) if form.format == "mxfp4" else result


def _format_in_8_bits(
    tensors: dict[str, tuple[Path, safetensors.safe_open]], name: str
) -> WeightFormat:
    """Returns the format of a weight in 8 bits by its type."""
    path, file = tensors[name]
    with reporting_errors(path, safetensors.SafetensorError):
        return "int8" if file.get_slice(name).get_dtype() == "I8" else "fp8"


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of blocks and scales of a tensor `[experts, in, out]`.

    Raises:
      ValueError: the inputs are not a multiple of 32.
    """
    num_experts, inputs, outputs = shape
    size = BLOCK_SIZES["mxfp4"]
    if inputs % size:
        raise ValueError(f"{inputs=} of packed weights must be a multiple of {size}")
    scales = num_experts, outputs, inputs // size
    return (*scales, size // 2), scales


def _read_bits(
    tensors: dict[str, tuple[Path, safetensors.safe_open]], name: str
) -> np.ndarray:
    """Reads the numbers of a tensor of 8 bits; floats as bits, in uint8.

    safetensors' NumPy lacks these floats. It has checked the header of the file.
    """
    path, file = tensors[name]
    with reporting_errors(path, safetensors.SafetensorError):
        shape = file.get_slice(name).get_shape()
        if file.get_slice(name).get_dtype() != "F8_E4M3":
            return file.get_tensor(name)
    with path.open("rb") as raw:
        num_bytes = int.from_bytes(raw.read(8), "little")
        start, end = json.loads(raw.read(num_bytes))[name]["data_offsets"]
        raw.seek(8 + num_bytes + start)
        return np.fromfile(raw, np.uint8, end - start).reshape(shape)


def _check_tensors(
    folder: Path,
    parts: Iterable[_Part],
    tensors: dict[str, tuple[Path, safetensors.safe_open]],
    tensor_names: Mapping[str, str],
) -> None:
    """Checks names, shapes and types before a tensor is read.

    Args:
      folder: the folder.
      parts: the expected tensors.
      tensors: result of `_open_tensors`.
      tensor_names: names in the folder, by the names of a full model.
    """
    expected = {part.name: part for part in parts}
    for problem, names in (
        ("missing", expected.keys() - tensor_names.keys()),
        ("unexpected", tensor_names.keys() - expected.keys()),
    ):
        if names:
            first = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            raise ValueError(f"{folder}: {len(names)} tensors {problem}: {first}")
    for part in expected.values():
        name = tensor_names[part.name]
        path, file = tensors[name]
        view = file.get_slice(name)
        if tuple(view.get_shape()) not in part.shapes:
            raise ValueError(
                f"{path}: {name} has shape {tuple(view.get_shape())}, "
                f"config.json asks for {part.shapes[0]}"
            )
        if view.get_dtype() not in part.types:
            raise ValueError(
                f"{path}: {name} is of type {view.get_dtype()}, "
                f"supported are {', '.join(part.types)}"
            )


def _open_tensors(folder: Path) -> dict[str, tuple[Path, safetensors.safe_open]]:
    """Opens the folder's safetensors; returns by tensor its path and open file."""
    tensors: dict[str, tuple[Path, safetensors.safe_open]] = {}
    for path in weight_files(folder):
        with reporting_errors(path, safetensors.SafetensorError):
            file = safetensors.safe_open(path, framework="np")
            names = list(file.keys())
        for name in names:
            if name in tensors:
                raise ValueError(f"{path}: {name} is in {tensors[name][0].name} too")
            tensors[name] = path, file
    return tensors


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns the safetensors files that are read, all of which exist.

    Raises:
      ValueError: a file is missing, or the index is not usable.
    """
    folder = validation.path("folder", folder)
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
        if pickled:
            raise ValueError(
                f"{pickled[0]}: pickled weights are never opened, convert them to "
                "safetensors"
            )
        raise ValueError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index}: weight_map must name a file for every tensor")
    for name in places.values():
        # A name, not a path, so that an index cannot refer to files outside of its
        # folder.
        plain = isinstance(name, str) and name == Path(name).name
        if not plain or not name.endswith(".safetensors"):
            raise ValueError(f"{index}: {name!r} is not the name of a safetensors file")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: missing, {INDEX} names it")
    return [folder / name for name in sorted(set(places.values()))]


def checked_params(config: ModelConfig, params: Params) -> list[jax.Array | np.ndarray]:
    """Returns the parameters as a list, in the order of `tensors.list_leaves`.

    Their layers may be stacked, and have transposed copies of weights.

    Raises:
      ValueError: weights are quantized, or the tree or a shape differs from that of the
        configuration.
    """
    weights = param_forms.weight_format(params)
    if weights != "model":
        raise ValueError(
            f"weights={weights!r} cannot be saved; save the parameters before "
            f"quantize_params, and load the folder with {weights=}"
        )
    params = param_forms.drop_transposed_weights(params)
    expected = transformer.param_shapes(config, stacked=True)
    matches = jax.tree.structure(params) == jax.tree.structure(expected)
    if not (matches and param_forms.is_stacked(params)):
        expected = transformer.param_shapes(config)
    if jax.tree.structure(params) != jax.tree.structure(expected):
        raise ValueError("params is not the tree of this config's parameters")
    for (path, spec), array in zip(
        jax.tree_util.tree_leaves_with_path(expected),
        jax.tree.leaves(params),
        strict=True,
    ):
        if array.shape != spec.shape:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has shape {array.shape}, "
                f"config asks for {spec.shape}"
            )
    return jax.tree.leaves(param_forms.unstack_layers(config, params))


def save_params(
    folder: Path,
    config: ModelConfig,
    arrays: Sequence[jax.Array | np.ndarray],
    dtype: np.dtype,
    max_shard_bytes: int,
) -> dict[str, str]:
    """Writes the safetensors of parameters, as returned by `checked_params`.

    The folder is empty; a file holds at most `max_shard_bytes` of tensors, at least 1.

    Returns:
      Name and text of the index, if there are several files.

    Raises:
      ValueError: a value is too large for `dtype`.
    """
    # Leaves with parts of one tensor are in one file.
    units: dict[str, list[tuple[Leaf, jax.Array | np.ndarray]]] = {}
    for leaf, array in zip(
        huggingface_tensors.list_leaves(config), arrays, strict=True
    ):
        packed = [stored_name(name) for name in leaf.names if ":" in name]
        units.setdefault([*packed, leaf.names[0]][0], []).append((leaf, array))
    shards: list[list[tuple[Leaf, jax.Array | np.ndarray]]] = []
    room = 0
    for unit in units.values():
        num_bytes = sum(
            array.size * leaf.dtype_in(dtype).itemsize * (1 + len(leaf.copies))
            for leaf, array in unit
        )
        if num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1] += unit
        room -= num_bytes
    places = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        name = WEIGHTS if len(shards) == 1 else name
        parts = {
            part_name: np.ascontiguousarray(
                _cast(part, leaf.dtype_in(dtype), part_name)
            )
            for leaf, array in shard
            for part_name, part in zip(
                leaf.names, split_parameter(leaf, np.asarray(array)), strict=True
            )
        }
        tensors = pack_parts(config, parts)
        # DeepSeek's layers for multi-token prediction have copies of the tables.
        _, head = embed_and_head(config)
        tensors |= {
            copy: tensors[leaf.names[0]]
            for leaf, _ in shard
            for copy in leaf.copies
            if copy != head
        }
        _save_file(tensors, folder / name)
        places |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) == 1:
        return {}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return {INDEX: json.dumps(index, indent=2) + "\n"}


def _save_file(tensors: dict[str, np.ndarray], path: Path) -> None:
    try:
        safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    except safetensors.SafetensorError as error:  # such as a full disk
        raise OSError(str(error)) from None
    path.chmod(0o644)


def checked_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns a floating dtype that JAX can hold.

    Raises:
      ValueError: the dtype is not floating, or float64 while JAX has it disabled.
    """
    try:
        result = validation.floating("dtype", dtype)
    except ValueError:
        result = None
    if result is None or jax.dtypes.canonicalize_dtype(result) != result:
        raise ValueError(
            f"dtype={validation.format_value(dtype)} must be "
            "float32, bfloat16 or float16"
        )
    return result


def _cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Converts the dtype; raises an error for numbers that overflow."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    # The numbers are counted only if one of them is not finite.
    if not _is_finite(result) and np.isinf(result).sum() > np.isinf(array).sum():
        raise ValueError(f"{name} has values too large for {dtype.name}")
    return result


def _is_finite(array: np.ndarray) -> bool:
    """Returns True if a floating array has neither NaN nor infinity.

    Compares bits as integers, in which infinities and NaN are the largest values of
    each sign: several times faster than `np.isfinite`, above all for bfloat16, and
    without a copy.
    """
    if not array.size:
        return True
    size = array.dtype.itemsize
    plus, minus = np.array([np.inf, -np.inf], array.dtype).view(f"u{size}").tolist()
    bits = np.ascontiguousarray(array).reshape(-1)
    return bool(
        bits.view(f"i{size}").max() < plus and bits.view(f"u{size}").max() < minus
    )
