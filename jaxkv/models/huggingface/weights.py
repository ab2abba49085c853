"""Reads and writes the safetensors of a Hugging Face folder.

The name, type and shape of every tensor are checked before use. Files are never
unpickled.

Weights in 4 bits with a scale for each 32 of them (MXFP4) are those of gpt-oss. Source:
OCP Microscaling Formats, version 1.0, sections 5.3.3 and 6.3; the order of the numbers
in a byte is that of gpt-oss's published weights.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

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

type Place = Callable[[tuple[str | int, ...], np.ndarray], Array]
"""Puts a parameter on devices, given its keys from the root of the tree."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Safetensors' names of the supported element types.
STORED_TYPES = ("F32", "BF16", "F16", "F64")
SCALE_SUFFIX = "_scale_inv"
"""Suffix of the scales of a tensor in 8 bits."""
BLOCKS_SUFFIX = "_blocks"
SCALES_SUFFIX = "_scales"
"""Suffixes of the two tensors of a packed one."""
PACKED_BLOCK = 32
"""Numbers of a block, which have one scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.asarray([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)


def load_params(
    folder: Path, config: ModelConfig, dtype: np.dtype, place: Place | None = None
) -> Params:
    """Reads all parameters after checking every tensor's name, type and shape.

    The folder has `model.safetensors`, or an index and its files; `dtype` is a result
    of `checked_dtype`. Parameters are read and placed one after another.

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
    expected |= {
        name + SCALE_SUFFIX: tuple(-(-size // FP8_BLOCK) for size in shape)
        for name, shape in expected.items()
        if name + SCALE_SUFFIX in file_names
    }
    packed = [name for name in expected if name + BLOCKS_SUFFIX in file_names]
    suffixes = BLOCKS_SUFFIX, SCALES_SUFFIX
    for name in packed:
        shapes = packed_shapes(expected.pop(name))
        expected |= {f"{name}{end}": x for end, x in zip(suffixes, shapes, strict=True)}
    _check_tensors(folder, expected, tensors, file_names)

    def read(name: str, dtype: np.dtype) -> np.ndarray:
        if name in packed:
            names = [file_names[name + end] for end in suffixes]
            return _read_packed(tensors, names, dtype)
        scales = file_names.get(name + SCALE_SUFFIX)
        return _read(tensors, file_names[name], dtype, scales)

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
    for leaf in leaves:
        leaf_dtype = leaf.dtype_in(dtype)
        parts = []
        for name in leaf.names:
            tensor = read(stored_name(name), leaf_dtype)
            rows = packed_rows(config, name)
            parts.append(tensor if rows is None else tensor[rows])
        arrays.append(put(leaf.path, join_tensors(leaf, parts)))
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
    expected = {name: leaf.shape for name, leaf in _named(shapes).items()}
    _check_tensors(folder, expected, tensors, {name: name for name in tensors})
    arrays = [jnp.asarray(_read(tensors, name, dtype)) for name in expected]
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


def _read(
    tensors: dict[str, tuple[Path, safetensors.safe_open]],
    name: str,
    dtype: np.dtype,
    scales: str | None = None,
) -> np.ndarray:
    """Reads a tensor; raises an error unless all numbers are finite.

    With the name of `scales`, each block of the tensor is multiplied by its scale.
    """
    path, file = tensors[name]
    with reporting_errors(path, safetensors.SafetensorError):
        if scales is None:
            array = file.get_tensor(name)
        else:
            shape = tuple(file.get_slice(name).get_shape())
            factors = _read(tensors, scales, np.dtype(np.float32))
            for axis, size in enumerate(shape):
                factors = np.repeat(factors, FP8_BLOCK, axis).take(range(size), axis)
            array = _read_fp8(path, name).reshape(shape).astype(np.float32) * factors
        array = _cast(array, dtype, name)
        if not _is_finite(array):
            raise ValueError(f"{name} holds NaN or infinite values")
        return array


def _read_packed(
    tensors: dict[str, tuple[Path, safetensors.safe_open]],
    names: Sequence[str],
    dtype: np.dtype,
) -> np.ndarray:
    """Reads weights in 4 bits from their blocks and scales."""
    parts = [tensors[name][1].get_tensor(name) for name in names]
    array = _cast(dequantize_mxfp4(*parts), dtype, names[0])
    if not _is_finite(array):
        raise ValueError(f"{tensors[names[0]][0]}: {names[1]} holds infinite scales")
    return array


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of blocks and scales of a tensor `[experts, in, out]`.

    Raises:
      ValueError: the inputs are not a multiple of `PACKED_BLOCK`.
    """
    num_experts, inputs, outputs = shape
    if inputs % PACKED_BLOCK:
        raise ValueError(f"{inputs=} of packed weights must be a multiple of 32")
    scales = num_experts, outputs, inputs // PACKED_BLOCK
    return (*scales, PACKED_BLOCK // 2), scales


def dequantize_mxfp4(
    blocks: UInt8[np.ndarray, "experts outputs blocks half"],
    scales: UInt8[np.ndarray, "experts outputs blocks"],
) -> Float[np.ndarray, "experts inputs outputs"]:
    """Returns the numbers of packed weights in float32.

    A byte has two numbers, the first one in its lower half: a sign, two bits of an
    exponent and one of a mantissa. A scale is a power of two with a bias of 127.
    """
    numbers = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1)
    numbers = numbers.reshape(*scales.shape, PACKED_BLOCK)
    powers = scales.astype(np.int32) - 127
    rows = np.ldexp(numbers, powers[..., None]).reshape(*scales.shape[:2], -1)
    return rows.swapaxes(1, 2)


def _read_fp8(path: Path, name: str) -> np.ndarray:
    """Reads the numbers of a tensor in 8 bits, a type that safetensors' NumPy lacks.

    safetensors has checked the header of the file.
    """
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(num_bytes))[name]["data_offsets"]
        file.seek(8 + num_bytes + start)
        return np.fromfile(file, np.dtype(jnp.float8_e4m3fn), end - start)


def _check_tensors(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, tuple[Path, safetensors.safe_open]],
    tensor_names: Mapping[str, str],
) -> None:
    """Checks names, shapes and types before a tensor is read.

    Args:
      folder: the folder.
      expected: shapes by the names of a full model.
      tensors: result of `_open_tensors`.
      tensor_names: names in the folder, by the names of a full model.
    """
    for problem, names in (
        ("missing", expected.keys() - tensor_names.keys()),
        ("unexpected", tensor_names.keys() - expected.keys()),
    ):
        if names:
            first = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            raise ValueError(f"{folder}: {len(names)} tensors {problem}: {first}")
    for full_name, shape in expected.items():
        name = tensor_names[full_name]
        path, file = tensors[name]
        view = file.get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise ValueError(
                f"{path}: {name} has shape {tuple(view.get_shape())}, "
                f"config.json asks for {shape}"
            )
        types = ("F8_E4M3",) if full_name + SCALE_SUFFIX in expected else STORED_TYPES
        if full_name.endswith((BLOCKS_SUFFIX, SCALES_SUFFIX)):
            types = ("U8",)
        if view.get_dtype() not in types:
            raise ValueError(
                f"{path}: {name} is of type {view.get_dtype()}, "
                f"supported are {', '.join(types)}"
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
      ValueError: the tree or a shape differs from that of the configuration.
    """
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
