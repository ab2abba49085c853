"""Snapshots: saves the state of an engine in a folder, and loads it bit for bit.

A snapshot can be loaded by another process, and any number of times, for example to
rewind an engine or to compare policies from the same state. A snapshot is a folder:

  snapshot.json   the configuration, name, type and shape of each array, and the SHA-256
                  of each file in arrays/
  arrays/         the arrays, in Orbax's format

A snapshot has the `EngineState` only. It has neither the model's parameters nor the
host's data about requests (texts, stop strings).

The state of a mesh is saved as the state of one device. `parallel.layout.place_state`
distributes a loaded state over a mesh of any size that divides its pages. If the mesh
had replicated KV heads, the pages keep the replicated heads.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxkv import validation
from jaxkv.arrays import ArrayOrShape
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
from jaxkv.memory import Pages, to_host

SNAPSHOT_FILE = "snapshot.json"
ARRAYS = "arrays"
"""Names in the folder."""

ABSENT = "absent"
"""Value of a missing field or array in an error message."""


@validation.suggests_keywords
def save_state(
    folder: str | os.PathLike[str],
    state: EngineState,
    config: EngineConfig,
    *,
    overwrite: bool = False,
) -> Path:
    """Saves a snapshot, to be loaded by `load_state`.

    The folder is written under a temporary name and then renamed, so an interrupted
    call leaves the old snapshot. All arrays are copied through host memory.

    Args:
      folder: folder of the snapshot; missing parents are made.
      state: the engine, on one device or on a mesh of this process; not changed.
      config: its configuration.
      overwrite: True to replace an existing snapshot.

    Returns:
      The folder.

    Raises:
      ValueError: the folder exists and is not a snapshot, or `overwrite` is False; the
        state does not have the configuration; pages are swapped to host memory or are
        on devices of another process; or the disk is full.
    """
    folder = validation.path("folder", folder).absolute()
    leaves = jax.tree.leaves(state)
    if not all(getattr(x, "is_fully_addressable", True) for x in leaves):
        raise ValueError(
            "parts of the state are on devices of other processes; only an engine of "
            "one process can be saved"
        )
    check_replaceable(folder, SNAPSHOT_FILE, "snapshot", overwrite)
    shapes = _described(_like(config, state.pages, state.memory))
    if different := _differences(_described(state), shapes, "in the state", "needed"):
        raise ValueError(f"the state must match the configuration: {different}")
    if state.staging is not None and np.any(np.asarray(state.staging.on_host)):
        raise ValueError(
            "pages of swapped requests are in host memory, which a snapshot does not "
            "include; save the state after these requests are swapped in"
        )
    import orbax.checkpoint as ocp  # here, since it takes 0.3 s

    with replace_folder(folder, ValueError) as new:
        with silencing_orbax(), ocp.StandardCheckpointer() as writer:
            # Orbax refuses empty arrays; their shapes are in the header.
            full = {name: x for name, x in _by_name(state).items() if x.size}
            check_disk_space(new, sum(x.size * x.dtype.itemsize for x in full.values()))
            writer.save(new / ARRAYS, to_host(full))
        header = {
            "config": dataclasses.asdict(config),
            "arrays": shapes,
            "files": _digests(new / ARRAYS),
        }
        (new / SNAPSHOT_FILE).write_text(
            json.dumps(header, indent=2) + "\n", encoding="utf-8"
        )
    return folder


@validation.suggests_keywords
def load_state(
    folder: str | os.PathLike[str],
    config: EngineConfig,
    pages: Pages,
    memory: PyTree[ArrayOrShape] = None,
) -> EngineState:
    """Loads a snapshot into new arrays.

    Args:
      folder: folder written by `save_state`.
      config: configuration, equal to that of the saved engine in every field.
      pages: KV cache of the model, for types and shapes only, for example
        `jax.eval_shape(lambda: paged.make_model_pages(model, config))`.
      memory: result of the drafter's `init`, if there is one, for types and shapes.

    Returns:
      The state on the default device, bit-identical to the saved one. With the same
      parameters, policy, and device or mesh, it produces the same tokens.

    Raises:
      ValueError: the snapshot is missing, damaged, or of another configuration or
        model; the message names the folder and the fault.
    """
    folder = validation.path("folder", folder).absolute()
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such snapshot")
    saved = read_json(folder / SNAPSHOT_FILE)
    for part in ("config", "arrays", "files"):
        if not isinstance(saved.get(part), dict):
            raise ValueError(f"{folder / SNAPSHOT_FILE}: {part} must be a JSON object")
    config_fields = json.loads(json.dumps(dataclasses.asdict(config)))
    if different := _differences(saved["config"], config_fields):
        raise ValueError(f"{folder}: is of another configuration: {different}")
    like = _like(config, pages, memory)
    if different := _differences(saved["arrays"], _described(like)):
        raise ValueError(f"{folder}: holds other arrays: {different}")
    # Orbax detects missing and truncated files, but not a changed byte of a large
    # array.
    check_digests(folder / ARRAYS, saved["files"], SNAPSHOT_FILE)
    shapes = {
        # NumPy templates make Orbax read into NumPy; a broadcast zero takes no memory.
        name: np.broadcast_to(np.zeros((), x.dtype), x.shape)
        for name, x in _by_name(like).items()
    }
    full = {name: x for name, x in shapes.items() if x.size}
    import orbax.checkpoint as ocp

    with (
        reporting_errors(folder, KeyError, TypeError),
        silencing_orbax(),
        ocp.StandardCheckpointer() as reader,
    ):
        arrays = shapes | reader.restore(folder / ARRAYS, full)
    # From NumPy, as in `state.init`: the arrays are committed to no device, so the same
    # compiled programs run on both. Popped, so that no array is in memory twice.
    leaves = [jnp.array(arrays.pop(name)) for name in shapes]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _like(
    config: EngineConfig, pages: Pages, memory: PyTree[ArrayOrShape]
) -> EngineState:
    """Returns types and shapes of a state."""
    return jax.eval_shape(functools.partial(init, config), pages, memory)


def _by_name(state: EngineState) -> dict[str, ArrayOrShape]:
    """Returns the arrays of a state by names such as `pool.ref`, in tree order."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in leaves}


def _described(state: EngineState) -> dict[str, str]:
    """Returns type and shape of each array."""
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in _by_name(state).items()}


def _differences(
    first: Mapping[str, object],
    second: Mapping[str, object],
    first_place: str = "in the snapshot",
    second_place: str = "asked",
) -> str:
    """Describes entries that differ, with both values; empty if all are equal."""
    names = [*first, *(name for name in second if name not in first)]
    rows = [(n, first.get(n, ABSENT), second.get(n, ABSENT)) for n in names]
    return "; ".join(
        f"{n} is {x} {first_place}, {y} {second_place}" for n, x, y in rows if x != y
    )
