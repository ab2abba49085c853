"""Builds the parts of an engine from a folder: model, drafter, pages."""

import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxkv import files, parallel, validation
from jaxkv.engine import EngineConfig, EngineFields, init
from jaxkv.memory import Pages
from jaxkv.models import EndTokens, LoadedModel, load_model, read_config
from jaxkv.parallel import (
    check_pages,
    degree_of,
    experts_of,
    fit_config,
    make_placer,
    pages_specs,
    place_heads,
    stack_sharded_layers,
)
from jaxkv.serving import device_memory
from jaxkv.speculation import (
    MAX_ADAPTIVE_DRAFTS,
    MAX_DRAFTS,
    NUM_DRAFT_BUCKETS,
    EngineParts,
    ModelWeights,
    SpeculationConfig,
    build_speculative,
    load_heads,
)


class Origin(NamedTuple):
    """Source of an engine: the parts that its arrays and programs do not show."""

    folder: Path
    draft_folder: Path | None
    """Folder of the draft model or of the heads, if there are any."""
    dtype: str
    """Type of the weights."""
    scan_layers: bool
    mesh: Mesh | None


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


def find_model_folder(name: str, folder: Any) -> Path:
    """Finds the folder of a model by its path or the name of a bundled model.

    Raises:
      ValueError: there is none; the message calls the argument `name`.
    """
    validation.path(name, folder)
    return files.model_folder(folder)


def read_model_folder(
    folder: Any,
    *,
    dtype: str,
    mesh: Mesh | None = None,
    end_tokens: EndTokens = "union",
) -> LoadedModel:
    """Reads a model as `load_model`, on a mesh sharded in the shape of `fit_config`.

    Raises:
      ValueError: the folder cannot be used, or the mesh does not divide the model.
    """
    if mesh is None:
        return load_model(folder, dtype=dtype, end_tokens=end_tokens)
    place = functools.partial(make_placer, mesh=mesh)
    loaded = load_model(folder, dtype=dtype, place=place, end_tokens=end_tokens)
    config = fit_config(loaded.config, degree_of(mesh), num_expert=experts_of(mesh))
    return loaded._replace(config=config)


def build_engine_parts(
    folder: Any,
    loaded: LoadedModel,
    config: EngineConfig,
    speculation: SpeculationConfig | None = None,
    *,
    dtype: str,
    scan_layers: bool = False,
    mesh: Mesh | None = None,
) -> EngineParts:
    """Builds the parts of an engine from the result of `read_model_folder`.

    Arguments are those of `Engine.load`. Pages are allocated with their sharding.

    Raises:
      ValueError: a speculation method or folder is not usable, or memory is
        insufficient.
    """
    params = loaded.params
    if mesh is not None:
        sizes = {"page_size": config.page_size, "window": loaded.config.window}
        check_pages(mesh, **sizes)
    if scan_layers:
        params = stack_sharded_layers(loaded.config, params, mesh)
    draft = heads = None
    draft_folder: Path | None = None
    if speculation is not None and speculation.draft_folder is not None:
        draft_folder = find_model_folder("draft_folder", speculation.draft_folder)
        small = read_model_folder(draft_folder, dtype=dtype, mesh=mesh)
        draft = ModelWeights(small.config, small.params)
    if speculation is not None and speculation.heads_folder is not None:
        draft_folder = validation.path("heads_folder", speculation.heads_folder)
        shape = read_config(folder)
        heads = load_heads(draft_folder, shape, dtype=dtype)
        heads = heads if mesh is None else place_heads(heads, mesh)
    engine_parts: list[EngineParts] = []

    def pages() -> Pages:
        served = build_speculative(
            ModelWeights(loaded.config, params),
            config,
            speculation,
            dtype=dtype,
            draft=draft,
            heads=heads,
        )
        engine_parts.append(dataclasses.replace(served, draft_folder=draft_folder))
        return served.pages

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # repeated when the pages are made
        shapes = jax.eval_shape(pages)
    device_memory.check_free_memory(
        jax.eval_shape(functools.partial(init, config), shapes),
        f"{config.num_pages=}, {config.max_sequences=}, {config.max_length=}",
    )
    if mesh is None:
        pages()
        return engine_parts[-1]
    divided = parallel.shardings(shapes, pages_specs(shapes), mesh)
    zero_pages = jax.jit(pages, out_shardings=divided)()
    return dataclasses.replace(engine_parts[-1], pages=zero_pages)
