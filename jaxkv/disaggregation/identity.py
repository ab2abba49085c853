"""Identity of a served model: hashes of its files, and the layout of its pages.

Pages of two workers may be exchanged only if every field is equal. Contents are hashed,
not names or sizes, since two trainings of one shape differ.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxkv.engine import EngineConfig
from jaxkv.memory import Pages

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
REMEMBERED_BYTES = 1 << 26
"""Folders with fewer bytes of weights are hashed at every load, in under 0.1 s."""


def engine_identity(
    config: EngineConfig, pages: Pages, *, dtype: str
) -> dict[str, str]:
    """Returns the fields of an identity that depend on the engine.

    Args:
      config: the engine's bounds.
      pages: its page arrays, or their shapes.
      dtype: type of the weights.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(pages)
    shapes = [
        f"{jax.tree_util.keystr(path)}: {x.dtype}{[x.shape[0], *x.shape[2:]]}"
        for path, x in leaves
    ]
    both = pages, pages.draft_pages
    return {
        "dtype": dtype,
        "page_size": str(config.page_size),
        # The width of values that are a part of the keys is in no shape.
        "value_width": ", ".join(str(x.layout.value_width) for x in both if x),
        "layout": "; ".join(shapes),
        "numerics": config.numerics,
    }


def folder_identity(folder: Path) -> dict[str, str]:
    """Returns SHA-256 digests of a model folder's weights, config and tokenizer.

    Digests of large files are stored in `.NAME.sha256.json` next to the folder NAME,
    and reused while size, modification time and change time of a file are unchanged. A
    failure to write that file is ignored.

    Raises:
      ValueError: the folder has no config.json.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"folder={str(folder)!r} must be a folder with config.json")
    weights = sorted(folder.glob("*.safetensors"))
    files = [
        *weights,
        folder / "config.json",
        *(folder / name for name in TOKENIZER_FILES),
    ]
    memory = folder.parent / f".{folder.name}.sha256.json"
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    found, num_bytes = {}, 0
    for path in filter(Path.is_file, files):
        status = path.stat()
        num_bytes += status.st_size
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        old = known.get(path.name)
        if isinstance(old, list) and old[:-1] == stamp:
            found[path.name] = old
        else:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.name] = [*stamp, digest]
    if num_bytes >= REMEMBERED_BYTES and found != known:
        draft = memory.with_name(f"{memory.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(found))
            draft.replace(memory)
        except OSError:
            draft.unlink(missing_ok=True)
    digests = {name: str(entry[-1]) for name, entry in found.items()}
    return {
        "weights": _hash_lines(digests, (path.name for path in weights)),
        "config": digests["config.json"],
        "tokenizer": _hash_lines(digests, (n for n in TOKENIZER_FILES if n in digests)),
    }


def describe_difference(other: Any, own: dict[str, str]) -> str | None:
    """Describes the first field in which identities differ; None if they are equal."""
    if not isinstance(other, dict):
        return f"identity={other!r} must be an object"
    for name in sorted({*own, *other}):
        if other.get(name) != own.get(name):
            return f"{name}={other.get(name)!r} must be {own.get(name)!r}"
    return None


def _hash_lines(digests: dict[str, str], names: Iterable[str]) -> str:
    lines = "\n".join(f"{name} {digests[name]}" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()
