"""From folders to what an engine serves: model, drafter, pages, where they belong."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxkv import files, validation
from jaxkv.engine import EngineConfig
from jaxkv.engine.state import init
from jaxkv.memory import Pages
from jaxkv.models import checkpoints
from jaxkv.parallel import layout, tensor
from jaxkv.serving import device_memory
from jaxkv.speculation import head_folders, methods


def bounds(fields: dict[str, Any], *, speculate: str | None, adaptive: bool) -> Any:
    """The `EngineConfig` of some fields, with room for drafts where there are any.

    Raises:
      ValueError: a field cannot be used.
    """
    if adaptive:
        most = methods.MAX_ADAPTIVE_DRAFTS
        fields = {"max_drafts": most, "num_lengths": methods.NUM_LENGTHS} | fields
    if speculate is not None:
        fields = {"max_drafts": methods.MAX_DRAFTS} | fields
    return EngineConfig(**fields)


def folder_of(name: str, folder: Any) -> Path:
    """Finds the folder of a model by path or by the name of a bundled one.

    Raises:
      ValueError: there is none; the message calls the argument `name`.
    """
    validation.path(name, folder)
    return files.model_folder(folder)


def read(folder: Any, *, dtype: str, mesh: Mesh | None = None) -> checkpoints.Loaded:
    """Reads a model; on a mesh it is divided, and its shape is `tensor.fit`'s.

    Raises:
      ValueError: the folder cannot be used, or the mesh does not divide the model.
    """
    if mesh is None:
        return checkpoints.load_model(folder, dtype=dtype)
    place = functools.partial(tensor.placer, mesh=mesh)
    loaded = checkpoints.load_model(folder, dtype=dtype, place=place)
    config = tensor.fit(
        loaded.config, layout.degree_of(mesh), num_expert=layout.experts_of(mesh)
    )
    return loaded._replace(config=config)


def serve(
    folder: Any,
    loaded: checkpoints.Loaded,
    config: EngineConfig,
    *,
    dtype: str,
    scan_layers: bool = False,
    speculate: str | None = None,
    draft_folder: Any = None,
    draft_layers: int | tuple[int, ...] | None = None,
    heads_folder: Any = None,
    adaptive: bool = False,
    mesh: Mesh | None = None,
) -> methods.Served:
    """Makes what serves the model that `read` found in a folder.

    Arguments are those of `Engine.load`.

    Raises:
      ValueError: a method, a folder or the memory will not do.
    """
    params = loaded.params
    if mesh is not None:
        sizes = {"page_size": config.page_size, "window": loaded.config.window}
        layout.check_pages(mesh, **sizes)
    if scan_layers:
        params = tensor.stack_layers(loaded.config, params, mesh)
    draft = None
    if draft_folder is not None:
        draft_folder = folder_of("draft_folder", draft_folder)
        small = read(draft_folder, dtype=dtype, mesh=mesh)
        draft = methods.Model(small.config, small.params)
    heads = None
    if heads_folder is not None:
        heads_folder = validation.path("heads_folder", heads_folder)
        shape = checkpoints.read_config(folder)
        heads = head_folders.load(heads_folder, shape, dtype=dtype)
        heads = heads if mesh is None else tensor.place_heads(heads, mesh)
    make = functools.partial(
        methods.serve,
        methods.Model(loaded.config, params),
        config,
        dtype=dtype,
        method=speculate,
        draft=draft,
        layers=draft_layers,
        heads=heads,
        adaptive=adaptive,
    )
    return _with_pages(make, config, mesh)


def _with_pages(
    make: Callable[[], methods.Served], config: EngineConfig, mesh: Mesh | None
) -> methods.Served:
    """Has the pages made where they belong.

    Raises:
      ValueError: there is no room for them, or as `make` does.
    """
    found: list[methods.Served] = []

    def pages() -> Pages:
        found.append(make())
        return found[-1].pages

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said once, when they are made
        shapes = jax.eval_shape(pages)
    _check_room(shapes, config)
    if mesh is None:
        return make()
    divided = layout.shardings(shapes, layout.pages_specs(shapes), mesh)
    made = jax.jit(pages, out_shardings=divided)()
    return dataclasses.replace(found[-1], pages=made)


def _check_room(pages: Pages, config: EngineConfig) -> None:
    """Refuses bounds whose state, pool and all, is larger than the memory."""
    device_memory.check_room(
        jax.eval_shape(functools.partial(init, config), pages),
        f"{config.num_pages=}, {config.max_sequences=}, {config.max_length=}",
    )
