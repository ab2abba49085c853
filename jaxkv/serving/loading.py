"""Builds the parts of an engine from a folder: model, drafter, pages.

Free memory is checked before arrays are made. On many machines a pool that is too large
would end the process without a message: Linux grants memory that it does not have, and
kills the process that writes to it.
"""

import dataclasses
import functools
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxkv import files, parallel, validation
from jaxkv.arrays import ArrayOrShape
from jaxkv.engine import EngineConfig, EngineFields, EngineParts, Speculation, init
from jaxkv.memory import KVLayout, Pages, change_layout
from jaxkv.models import (
    EndTokens,
    LoadedModel,
    Params,
    WeightFormat,
    adapted_products,
    join_adapters,
    load_adapters,
    load_model,
    param_axes,
    read_config,
)
from jaxkv.parallel import (
    check_pages,
    degree_of,
    experts_of,
    fit_config,
    make_placer,
    num_page_parts_of,
    pages_specs,
    place_heads,
    place_params,
    stack_sharded_layers,
)
from jaxkv.speculation import (
    MAX_ADAPTIVE_DRAFTS,
    MAX_DRAFTS,
    NUM_DRAFT_BUCKETS,
    ModelWeights,
    SpeculationConfig,
    build_speculative,
    load_heads,
)

_MEMINFO = Path("/proc/meminfo")
_CGROUP_FOLDER = Path("/sys/fs/cgroup")


class Origin(NamedTuple):
    """Source of an engine: the parts that its arrays and programs do not show."""

    folder: Path
    draft_folder: Path | None
    """Folder of the draft model or of the heads, if there are any."""
    dtype: str
    """Type of the weights."""
    weights: WeightFormat
    """Format of the layers' weights."""
    scan_layers: bool
    mesh: Mesh | None
    adapters: Mapping[str, Path] = MappingProxyType({})
    """Folders of the adapters by their names."""


def check_adapters(
    adapters: Mapping[str, str | os.PathLike[str]] | None, bounds: EngineFields
) -> dict[str, Path]:
    """Returns the folders of adapters by their names, and sets `num_adapters`.

    Raises:
      ValueError: the argument is not a mapping of names to paths, or `num_adapters` is
        another number.
    """
    folders = {} if adapters is None else adapters
    validation.instance("adapters", folders, Mapping)
    if not all(isinstance(name, str) and name for name in folders):
        raise ValueError(f"adapters={[*folders]} must have names that are not empty")
    num = bounds.setdefault("num_adapters", len(folders))
    if num != len(folders):
        raise ValueError(f"num_adapters={num} must be {len(folders)}, as in adapters")
    return {x: validation.path(f"adapters[{x!r}]", folders[x]) for x in folders}


def make_engine_config(
    fields: EngineFields, speculation: SpeculationConfig | None
) -> EngineConfig:
    """Makes an `EngineConfig`, with a default draft length for a speculation method.

    Raises:
      ValueError: a field is unknown or out of its range.
    """
    if speculation is not None and speculation.adaptive:
        max_drafts = MAX_ADAPTIVE_DRAFTS
        fields = {
            "max_drafts": max_drafts,
            "num_draft_buckets": NUM_DRAFT_BUCKETS,
            **fields,
        }
    elif speculation is not None:
        fields = {"max_drafts": MAX_DRAFTS, **fields}
    return EngineConfig(**fields)


def find_model_folder(name: str, folder: str | os.PathLike[str]) -> Path:
    """Finds the folder of a model by its path or the name of a bundled model.

    Raises:
      ValueError: there is none; the message calls the argument `name`.
    """
    validation.path(name, folder)
    return files.model_folder(folder)


def read_model_folder(
    folder: str | os.PathLike[str],
    *,
    dtype: str,
    weights: WeightFormat = "model",
    mesh: Mesh | None = None,
    end_tokens: EndTokens = "union",
) -> LoadedModel:
    """Reads a model as `load_model`, on a mesh sharded in the shape of `fit_config`.

    Raises:
      ValueError: the folder cannot be used, or the mesh does not divide the model.
    """
    if mesh is None:
        return load_model(folder, dtype=dtype, weights=weights, end_tokens=end_tokens)
    loaded = load_model(
        folder,
        dtype=dtype,
        weights=weights,
        place=functools.partial(make_placer, mesh=mesh),
        end_tokens=end_tokens,
    )
    config = fit_config(loaded.config, degree_of(mesh), num_expert=experts_of(mesh))
    return loaded._replace(config=config)


def find_draft_folder(speculation: SpeculationConfig | None) -> Path | None:
    """Finds the folder of the draft model or of the heads; None if there are none.

    Raises:
      ValueError: there is no such folder.
    """
    if speculation is None:
        return None
    if speculation.draft_folder is not None:
        return find_model_folder("draft_folder", speculation.draft_folder)
    if speculation.heads_folder is not None:
        return validation.path("heads_folder", speculation.heads_folder)
    return None


def build_engine_parts(
    origin: Origin,
    loaded: LoadedModel,
    config: EngineConfig,
    speculation_config: SpeculationConfig | None = None,
    layout: KVLayout | None = None,
) -> tuple[EngineParts, Speculation | None]:
    """Builds the parts of an engine from the result of `read_model_folder`.

    Pages are allocated with their sharding, in the layout if there is one.

    Returns:
      The parts, and the drafter with its verifier; None without a method.

    Raises:
      ValueError: a speculation method, a folder or the layout is not usable, or memory
        is insufficient.
    """
    params = loaded.params
    mesh = origin.mesh
    if mesh is not None:
        if loaded.config.recurrence is not None:
            raise ValueError(
                "mesh must be None for a model with recurrent layers, whose states are "
                "not divided over devices"
            )
        if config.evict is not None:
            raise ValueError(f"evict={config.evict!r} must be None on a mesh")
        if config.release_window_pages:
            raise ValueError("release_window_pages=True must be False on a mesh")
        if loaded.config.has_special_layers:
            raise ValueError(
                "mesh must be None for a model whose layers have sizes or inputs of "
                "their own, or share K and V"
            )
        for window in {*loaded.config.windows}:
            check_pages(mesh, page_size=config.page_size, window=window)
        if loaded.config.sinks and num_page_parts_of(mesh) > 1:
            raise ValueError("sinks need pages that are not divided over devices")
    if origin.adapters:
        params = _add_adapters(origin, loaded)
    if origin.scan_layers:
        params = stack_sharded_layers(loaded.config, params, mesh)
    draft = heads = None
    if speculation_config is not None and origin.draft_folder is not None:
        if speculation_config.draft_folder is not None:
            small = read_model_folder(
                origin.draft_folder,
                dtype=origin.dtype,
                weights=origin.weights,
                mesh=mesh,
            )
            draft = ModelWeights(small.config, small.params)
        else:
            shape = read_config(origin.folder)
            heads = load_heads(origin.draft_folder, shape, dtype=origin.dtype)
            heads = heads if mesh is None else place_heads(heads, mesh)
    builds: list[tuple[EngineParts, Speculation | None]] = []

    def pages() -> Pages:
        model = ModelWeights(loaded.config, params)
        builds.append(
            build_speculative(
                model,
                config,
                speculation_config,
                dtype=origin.dtype,
                draft=draft,
                heads=heads,
            )
        )
        model_pages = builds[-1][0].pages
        if layout is None:
            return model_pages
        return change_layout(model_pages, layout, origin.dtype)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # repeated when the pages are made
        shapes = jax.eval_shape(pages)
    check_free_memory(
        jax.eval_shape(functools.partial(init, config), shapes),
        f"{config.num_pages=}, {config.max_sequences=}, {config.max_length=}",
    )
    if mesh is None:
        zero_pages = pages()
    else:
        divided = parallel.shardings(shapes, pages_specs(shapes), mesh)
        zero_pages = jax.jit(pages, out_shardings=divided)()
    parts, speculation = builds[-1]
    parts = dataclasses.replace(
        parts,
        pages=zero_pages,
        tokenizer=loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        vocab_size=loaded.config.vocab_size,
        mesh=mesh,
        adapters=tuple(origin.adapters),
    )
    return parts, speculation


def _add_adapters(origin: Origin, loaded: LoadedModel) -> Params:
    """Returns the parameters with the adapters, on the devices of the model."""
    config = read_config(origin.folder)
    adapters = load_adapters(origin.adapters, config, dtype=origin.dtype)
    check_free_memory(adapters, f"adapters={[*origin.adapters]}")
    if origin.mesh is None:
        return join_adapters(loaded.params, jax.device_put(adapters))
    axes = param_axes(config, adapted=adapted_products(adapters))
    return join_adapters(
        loaded.params, place_params(config, adapters, origin.mesh, axes)
    )


def num_bytes(tree: PyTree[ArrayOrShape]) -> int:
    """Returns the bytes of a tree of arrays, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def free_bytes() -> int | None:
    """Returns the free bytes of the default device; None if unknown."""
    device = jax.config.jax_default_device or jax.local_devices()[0]
    stats = device.memory_stats() if isinstance(device, jax.Device) else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    readings = [x for x in (_free_on_host(), _free_in_group()) if x is not None]
    return min(readings, default=None)


def check_free_memory(tree: PyTree[ArrayOrShape], name: str) -> None:
    """Raises an error if arrays do not fit into the free memory.

    Args:
      tree: shapes of the arrays.
      name: their name in the error message, with the settings that shrink them.

    Raises:
      ValueError: the arrays need more memory than is free.
    """
    needed = num_bytes(tree)
    free = free_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"{needed:,} bytes are needed and {free:,} are free for {name}"
        )


def _free_on_host() -> int | None:
    """Returns the bytes that Linux can provide without swapping."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    available_kib = [
        line.split()[1] for line in lines if line.startswith("MemAvailable:")
    ]
    return int(available_kib[0]) * 1024 if available_kib else None


def _free_in_group() -> int | None:
    """Returns the bytes left in a container's control group, cached files excluded."""
    try:
        limit = (_CGROUP_FOLDER / "memory.max").read_text().strip()
        used = int((_CGROUP_FOLDER / "memory.current").read_text())
        stat = (_CGROUP_FOLDER / "memory.stat").read_text().splitlines()
        cached = sum(int(x.split()[1]) for x in stat if x.startswith("inactive_file "))
        return int(limit) - used + cached
    except (OSError, ValueError):  # no group, or "max"
        return None
