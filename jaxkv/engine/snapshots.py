"""Snapshots: the whole state of an engine in a folder, and back, bit for bit.

An engine is a value, so it can be put away, taken up by another process, and taken up
several times: rewound, or branched into several policies. A snapshot is a folder:

  snapshot.json   the configuration, each array's name, type and shape, and the SHA-256
                  of each file below
  arrays/         the arrays, as Orbax writes them

It holds neither the model's parameters nor what the host knows of requests (texts, stop
strings): only what the next step's tokens depend on beside the parameters.

A state on a mesh is written whole, as one device has it, and read so;
`parallel.layout.place_state` divides it again, over a mesh of any size that divides the
same pages. Where KV heads were copied, the pages are those of so many heads.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxkv import validation
from jaxkv.engine.state import EngineConfig, EngineState, init
from jaxkv.files import (
    check_digests,
    check_disk_space,
    check_replaceable,
    read_json,
    replace_folder,
    reporting_errors,
    silencing_orbax,
)
from jaxkv.files import digests as _digests
from jaxkv.memory import Pages, kv_pages

HEADER, ARRAYS = "snapshot.json", "arrays"
"""What stands in the folder."""

ABSENT = "absent"
"""What a message says of a field or an array that one side does not have."""


@validation.suggests_keywords
def save_state(
    folder: str | os.PathLike[str],
    state: EngineState,
    config: EngineConfig,
    *,
    overwrite: bool = False,
) -> Path:
    """Writes a snapshot; `load_state` reads it.

    The folder is written beside its place and then renamed, so an interrupted call
    leaves what was there before. All arrays pass through the memory of the host.

    Args:
      folder: where to; its parent is made where it is missing.
      state: the engine, which stays as it is; on one device or on a mesh, all of whose
        devices are of this process.
      config: its bounds.
      overwrite: whether to replace a snapshot that is there.

    Returns:
      The folder.

    Raises:
      ValueError: if something else is in the folder's place, if the state is not one
        of the configuration, if pages of it are in the memory of the host or on devices
        of another process, or if there is no room for it.
    """
    folder = validation.path("folder", folder).absolute()
    leaves = jax.tree.leaves(state)
    if not all(getattr(x, "is_fully_addressable", True) for x in leaves):
        raise ValueError(
            "parts of the state are on devices of other processes; only an engine of "
            "one process can be saved"
        )
    check_replaceable(folder, HEADER, "snapshot", overwrite)
    shapes = _described(_like(config, state.pages, state.memory))
    if different := _differences(_described(state), shapes, "in the state", "needed"):
        raise ValueError(f"the state is not one of the configuration: {different}")
    if state.staging is not None and np.any(np.asarray(state.staging.on_host)):
        raise ValueError(
            "pages of swapped requests are in the memory of the host, which a snapshot "
            "does not hold; save a state without a host, or with them back"
        )
    with replace_folder(folder, ValueError) as new:
        with silencing_orbax(), ocp.StandardCheckpointer() as writer:
            # Orbax refuses arrays that hold nothing; their shapes say all of them.
            full = {name: x for name, x in _by_name(state).items() if x.size}
            check_disk_space(new, sum(x.nbytes for x in full.values()))
            writer.save(new / ARRAYS, kv_pages.to_host(full))
        header = {
            "config": dataclasses.asdict(config),
            "arrays": shapes,
            "files": _digests(new / ARRAYS),
        }
        (new / HEADER).write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
    return folder


@validation.suggests_keywords
def load_state(
    folder: str | os.PathLike[str],
    config: EngineConfig,
    pages: Pages,
    memory: Any = None,
) -> EngineState:
    """Reads a snapshot, each time into fresh arrays.

    Args:
      folder: as `save_state` wrote it.
      config: the bounds of the engine that takes it up, in every field those of the one
        that was saved.
      pages: K and V arrays of its model, for their types and shapes alone: those of
        `jax.eval_shape(lambda: models.make_pages(model, config))` will do.
      memory: what the drafter's `init` returns, if there is one, for the same.

    Returns:
      The state, on the default device, bit for bit the one that was saved. With the
      same parameters, policy and device, or mesh, it goes on as that one did.

    Raises:
      ValueError: names the folder and what is wrong with it: missing, damaged, of
        another configuration or of another model's pages.
    """
    folder = validation.path("folder", folder).absolute()
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such snapshot")
    saved = read_json(folder / HEADER)
    for part in ("config", "arrays", "files"):
        if not isinstance(saved.get(part), dict):
            raise ValueError(f"{folder / HEADER}: {part} must be a JSON object")
    asked = json.loads(json.dumps(dataclasses.asdict(config)))
    if different := _differences(saved["config"], asked):
        raise ValueError(f"{folder}: is of another configuration: {different}")
    like = _like(config, pages, memory)
    if different := _differences(saved["arrays"], _described(like)):
        raise ValueError(f"{folder}: holds other arrays: {different}")
    # Orbax finds a file gone or cut off, but believes a changed byte of a large array.
    check_digests(folder / ARRAYS, saved["files"], HEADER)
    shapes = {
        # Orbax reads into NumPy if it is shown NumPy; this takes no memory.
        name: np.broadcast_to(np.zeros((), x.dtype), x.shape)
        for name, x in _by_name(like).items()
    }
    full = {name: x for name, x in shapes.items() if x.size}
    with (
        reporting_errors(folder, KeyError, TypeError),
        silencing_orbax(),
        ocp.StandardCheckpointer() as reader,
    ):
        arrays = shapes | reader.restore(folder / ARRAYS, full)
    # From NumPy, as `state.init` would: bound to no device, so that programs that are
    # compiled for the one serve the other. Popped, so that no array is twice in memory.
    leaves = [jnp.array(arrays.pop(name)) for name in shapes]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _like(config: EngineConfig, pages: Pages, memory: Any) -> EngineState:
    """The types and shapes of every state of an engine."""
    return jax.eval_shape(functools.partial(init, config), pages, memory)


def _by_name(state: EngineState) -> dict[str, Any]:
    """The arrays of a state by names such as `pool.ref`, in the order of the tree."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in leaves}


def _described(state: EngineState) -> dict[str, str]:
    """Type and shape of each array."""
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in _by_name(state).items()}


def _differences(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    here: str = "in the snapshot",
    there: str = "asked",
) -> str:
    """What differs, with both values; empty if nothing does."""
    return "; ".join(
        f"{name} is {ours.get(name, ABSENT)} {here}, {theirs.get(name, ABSENT)} {there}"
        for name in [*ours, *(name for name in theirs if name not in ours)]
        if ours.get(name, ABSENT) != theirs.get(name, ABSENT)
    )
