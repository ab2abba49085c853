"""Hugging Face folders in and out: `config.json`, safetensors, tokenizer.

A folder comes from elsewhere, so everything in it is checked before it is believed:
every tensor's name, type and shape, every file name in an index. What is wrong is told
in one line that names the file. Nothing is ever unpickled. A folder that is written
appears whole or not at all.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from jaxkv import validation
from jaxkv.files import aside, blaming, check_replaceable, read_json, read_text
from jaxkv.models.config import ModelConfig
from jaxkv.models.huggingface import configs, weights
from jaxkv.models.interface import Params
from jaxkv.text import MAX_BYTE_VOCAB, NUM_BYTES, ByteTokenizer, Tokenizer

# Of a tokenizer that we do not read: the vocabulary is then not made of bytes.
UNSUPPORTED_TOKENIZER_FILES = (
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)


class LoadedModel(NamedTuple):
    """What a folder holds."""

    config: ModelConfig
    """The model's shape."""
    params: Params
    """Its parameters, as `transformer.init_params` would return them."""
    tokenizer: Tokenizer | ByteTokenizer | None
    """Its tokenizer; None if the folder has none that we can read: no text then."""
    eos_ids: tuple[int, ...]
    """Tokens that end a text, in [0, vocab_size); may be empty."""


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Reads the shape of a model, from a folder with a `config.json`, or that file.

    Raises:
      ValueError: if the file is missing, broken, or of a model that is not supported.
    """
    path = validation.path("path", path)
    path = path / "config.json" if path.is_dir() else path
    with blaming(path):
        return configs.from_hf(read_json(path))


@validation.suggests_keywords
def load_model(
    folder: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "float32",
    place: Callable[[ModelConfig], weights.Place] | None = None,
) -> LoadedModel:
    """Reads a model with its parameters and its tokenizer.

    Args:
      folder: a Hugging Face folder with safetensors, single or sharded.
      dtype: type of the parameters: float32, bfloat16, float16, or float64 where JAX
        has it switched on. The file's may be another.
      place: makes of the model's shape what puts each parameter on devices, one after
        the other; None puts all on the default one.

    Returns:
      The model. Its numbers are those of the file.

    Raises:
      ValueError: names the file and what is wrong with it: missing, truncated, not
        supported, a tensor missing, unexpected, of another shape or not finite.
    """
    folder, dtype = validation.path("folder", folder), weights.checked_dtype(dtype)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    config = read_config(folder)
    put = None if place is None else place(config)
    params = weights.load_params(folder, config, dtype, put)
    return LoadedModel(config, params, *_load_tokenizer(folder, config))


@validation.suggests_keywords
def save_model(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    params: Params,
    *,
    tokenizer: Tokenizer | ByteTokenizer | None = None,
    eos_ids: Iterable[int] | None = None,
    model_card: str | None = None,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> Path:
    """Writes a folder that `load_model` and transformers read.

    The folder is written beside its place and then renamed, so an interrupted call
    leaves what was there before.

    Args:
      folder: where to; its parent is made where it is missing.
      config: the model's shape.
      params: its parameters.
      tokenizer: written along.
      eos_ids: tokens that end a text; by default the tokenizer's.
      model_card: text of the folder's README.md, in Markdown.
      dtype: type to store; by default the parameters' own.
      max_shard_bytes: bytes of tensors in one file, at least 1, exceeded only by a
        parameter that is larger alone.
      overwrite: whether to replace a model that is there, all of its files.

    Returns:
      The folder.

    Raises:
      ValueError: if something else is in the folder's place, if the parameters are not
        the configuration's, or if its family has no place for a field.
    """
    folder = validation.path("folder", folder).absolute()
    validation.integer("max_shard_bytes", max_shard_bytes, low=1, below=2**63)
    check_replaceable(folder, "config.json", "model", overwrite)
    stored = None if dtype is None else weights.checked_dtype(dtype)
    arrays = weights.checked_params(config, params)
    stored = stored or arrays[0].dtype
    if eos_ids is None:
        eos_ids = () if tokenizer is None else tokenizer.eos_ids
    known = validation.token_ids("eos_ids", list(eos_ids), vocab_size=config.vocab_size)
    eos_ids = known.tolist()
    raw = configs.to_hf(config) | {
        "dtype": stored.name,
        "bos_token_id": None,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": None,
    }
    texts = {"config.json": json.dumps(raw, indent=2) + "\n"}
    texts |= {} if tokenizer is None else tokenizer.files()
    texts |= {} if model_card is None else {"README.md": model_card}
    with aside(folder) as new:
        texts |= weights.save_params(new, config, arrays, stored, max_shard_bytes)
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
    return folder


def load_tree(
    folder: str | os.PathLike[str], shapes: Params, *, dtype: DTypeLike = "float32"
) -> Params:
    """Reads the arrays that `save_tree` wrote.

    Args:
      folder: where they are.
      shapes: nested dicts of `jax.ShapeDtypeStruct`s; of these only the shapes matter.
      dtype: type of the arrays.

    Raises:
      ValueError: as `load_model` does.
    """
    folder = validation.path("folder", folder)
    return weights.read_tree(folder, shapes, weights.checked_dtype(dtype))


def save_tree(
    folder: str | os.PathLike[str], tree: Params, *, dtype: DTypeLike
) -> None:
    """Writes nested dicts of arrays, no model's, into a folder that is there.

    Raises:
      ValueError: a number is too large for the type.
    """
    weights.write_tree(Path(folder), tree, weights.checked_dtype(dtype))


def load_tokenizer(folder: Path) -> Tokenizer | ByteTokenizer | None:
    """Reads the tokenizer of a model; None if the folder has none that is supported.

    Raises:
      ValueError: the folder cannot be used.
    """
    return _load_tokenizer(folder, read_config(folder))[0]


def _load_tokenizer(
    folder: Path, config: ModelConfig
) -> tuple[Tokenizer | ByteTokenizer | None, tuple[int, ...]]:
    """Reads the tokenizer, and the tokens that end a text."""
    settings = _read_if_there(folder / "tokenizer_config.json") or {}
    settings |= _chat_templates(folder)
    eos_ids = _configured_eos_ids(folder)
    tokenizer = None
    if (path := folder / "tokenizer.json").exists():
        special_map = _read_if_there(folder / "special_tokens_map.json")
        added_tokens = _read_if_there(folder / "added_tokens.json")
        with blaming(path):
            tokenizer = Tokenizer.from_json(
                read_text(path),
                settings=settings,
                special_map=special_map,
                added_tokens=added_tokens,
            )
        if eos_ids is None:
            eos_ids = tokenizer.special_ids("eos_token")
    elif NUM_BYTES <= config.vocab_size <= MAX_BYTE_VOCAB and not any(
        (folder / name).exists() for name in UNSUPPORTED_TOKENIZER_FILES
    ):
        tokenizer = ByteTokenizer(config.vocab_size, eos_ids=eos_ids)
        eos_ids = tokenizer.eos_ids
    # Some files name tokens past the vocabulary: no model ever says those.
    known = tuple(token for token in eos_ids or () if 0 <= token < config.vocab_size)
    if tokenizer is not None:
        tokenizer.eos_ids = known
    return tokenizer, known


def _read_if_there(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def _chat_templates(folder: Path) -> dict[str, Any]:
    """The setting of the chat templates that have files of their own; may be empty."""
    paths = {"default": folder / "chat_template.jinja"}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        paths[path.stem] = path
    found = {name: read_text(path) for name, path in paths.items() if path.exists()}
    if not found:
        return {}
    if [*found] == ["default"]:
        return {"chat_template": found["default"]}
    named = [{"name": name, "template": text} for name, text in found.items()]
    return {"chat_template": named}


def _configured_eos_ids(folder: Path) -> list[int] | None:
    """What the configurations name as end tokens; None if neither names any."""
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).exists():
            continue
        value = read_json(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids: list[Any] = value if isinstance(value, list) else [value]
        if any(type(token) is not int for token in ids):
            raise ValueError(
                f"{folder / name}: eos_token_id={value!r} must be integers"
            )
        return ids
    return None
