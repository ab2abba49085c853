"""Reads and writes Hugging Face folders: `config.json`, safetensors, tokenizer.

The content of a folder is not trusted: the name, type and shape of every tensor and the
file names in an index are checked before use. An error is one line that names the file.
Files are never unpickled. A folder is written completely or not at all.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, get_args

from jax.typing import DTypeLike

from jaxkv import validation
from jaxkv.files import (
    check_replaceable,
    model_folder,
    read_json,
    read_text,
    replace_folder,
    reporting_errors,
    verify_listed,
    write_checksums,
)
from jaxkv.models.config import ModelConfig
from jaxkv.models.huggingface import (
    Place,
    checked_dtype,
    checked_params,
    from_hf,
    load_params,
    read_tree,
    save_params,
    text_part,
    to_hf,
    write_tree,
)
from jaxkv.models.interface import EndTokens, Params
from jaxkv.models.layers import WeightFormat
from jaxkv.text import MAX_BYTE_VOCAB, NUM_BYTES, ByteTokenizer, Tokenizer

# Files of tokenizers that are not supported; a folder with one has no byte vocabulary.
UNSUPPORTED_TOKENIZER_FILES = (
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)


class LoadedModel(NamedTuple):
    """Content of a model folder."""

    config: ModelConfig
    """Architecture of the model."""
    params: Params
    """Parameters in the form of `transformer.init_params`."""
    tokenizer: Tokenizer | ByteTokenizer | None
    """The tokenizer; None if the folder has no supported one, in which case the model
    reads and writes token ids only."""
    eos_ids: tuple[int, ...]
    """Tokens that end a text, in [0, vocab_size); may be empty."""


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Reads the configuration of a model from its folder or from its `config.json`.

    Raises:
      ValueError: the file is missing or broken, or the model is not supported.
    """
    path = validation.path("path", path)
    path = path / "config.json" if path.is_dir() else path
    verify_listed(path.parent, path.name)
    with reporting_errors(path):
        return from_hf(read_json(path))


@validation.suggests_keywords
def load_model(
    folder: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "float32",
    weights: WeightFormat = "model",
    place: Callable[[ModelConfig], Place] | None = None,
    end_tokens: EndTokens = "union",
) -> LoadedModel:
    """Reads a model with its parameters and its tokenizer.

    Args:
      folder: a Hugging Face folder with safetensors, single or sharded; or the name of
        a bundled model, such as "stdlib-bytes".
      dtype: dtype of the parameters: float32, bfloat16, float16, or float64 if JAX has
        it enabled. It may differ from the dtype of the file. Selection biases of
        experts are at least float32.
      weights: format of the weights of the layers' products. "model" is `dtype`;
        weights in 8 and 4 bits are multiplied by their scales. With "int8", "fp8",
        "mxfp4" or "nvfp4" a folder that has weights in this format is read as it is;
        others are quantized, one weight after another: see
        `param_forms.quantize_params`.
      place: function of the configuration that returns a function to put each parameter
        on devices, one after another; None puts all on the default device.
      end_tokens: tokens that end a text. "union" takes `eos_token_id` of
        generation_config.json, or else of config.json, and the tokenizer's `eos_token`,
        as vLLM does; "generation_config" takes the tokenizer's only if both files name
        none, as transformers does.

    Returns:
      The model, with the numbers of the file.

    Raises:
      ValueError: a file is missing, truncated, not supported or differs from its digest
        (see `save_model`), or a tensor is missing, unexpected, of another shape or not
        finite; the message names the file.
    """
    validation.path("folder", folder)
    validation.choice("end_tokens", end_tokens, get_args(EndTokens))
    folder = model_folder(folder)
    dtype = checked_dtype(dtype)
    validation.choice("weights", weights, get_args(WeightFormat.__value__))
    verify_listed(folder)
    config = read_config(folder)
    put = None if place is None else place(config)
    params = load_params(folder, config, dtype, put, weights)
    return LoadedModel(config, params, *_load_tokenizer(folder, config, end_tokens))


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

    The folder is written under a temporary name and renamed, so an interrupted call
    keeps an existing folder. Its `SHA256SUMS` lists the digests of all files but
    README.md, which `load_model` checks in up to 3 s for each GB. A folder that is
    changed on purpose loads once that file is deleted.

    Args:
      folder: path of the folder; a missing parent is made.
      config: architecture of the model.
      params: parameters of the model.
      tokenizer: tokenizer to write with the model.
      eos_ids: tokens that end a text; by default those of the tokenizer. `load_model`
        adds the `eos_token` of the tokenizer.
      model_card: text of the folder's README.md, in Markdown.
      dtype: dtype to store; by default that of the parameters.
      max_shard_bytes: largest size of the tensors in one file, at least 1; a larger
        parameter has a file of its own.
      overwrite: True replaces an existing model with all its files.

    Returns:
      The folder.

    Raises:
      ValueError: the path is in use by something else, the parameters do not fit the
        configuration or have weights in 8 or 4 bits, or the family cannot express a
        field.
    """
    folder = validation.path("folder", folder).absolute()
    validation.integer("max_shard_bytes", max_shard_bytes, low=1, below=2**63)
    check_replaceable(folder, "config.json", "model", overwrite)
    stored = None if dtype is None else checked_dtype(dtype)
    arrays = checked_params(config, params)
    stored = stored or arrays[0].dtype
    if eos_ids is None:
        eos_ids = () if tokenizer is None else tokenizer.eos_ids
    checked_ids = validation.token_ids(
        "eos_ids", list(eos_ids), vocab_size=config.vocab_size
    )
    eos_ids = checked_ids.tolist()
    raw = to_hf(config) | {
        "dtype": stored.name,
        "bos_token_id": None,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": None,
    }
    texts = {"config.json": json.dumps(raw, indent=2) + "\n"}
    texts |= {} if tokenizer is None else tokenizer.files()
    texts |= {} if model_card is None else {"README.md": model_card}
    with replace_folder(folder) as new:
        texts |= save_params(new, config, arrays, stored, max_shard_bytes)
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        write_checksums(new, ignored=["README.md"])
    return folder


def load_tree(
    folder: str | os.PathLike[str], shapes: Params, *, dtype: DTypeLike = "float32"
) -> Params:
    """Reads the arrays that `save_tree` wrote.

    Args:
      folder: the folder.
      shapes: nested dicts of `jax.ShapeDtypeStruct`s; only the shapes are used.
      dtype: dtype of the arrays.

    Raises:
      ValueError: as `load_model`.
    """
    folder = validation.path("folder", folder)
    return read_tree(folder, shapes, checked_dtype(dtype))


def save_tree(
    folder: str | os.PathLike[str], tree: Params, *, dtype: DTypeLike
) -> None:
    """Writes nested dicts of arrays that are not a model into an existing folder.

    Raises:
      ValueError: a number is too large for the dtype.
    """
    write_tree(Path(folder), tree, checked_dtype(dtype))


def load_tokenizer(
    folder: str | os.PathLike[str],
) -> Tokenizer | ByteTokenizer | None:
    """Reads the tokenizer of a model; None if the folder has no supported one.

    Raises:
      ValueError: the folder cannot be read.
    """
    folder = validation.path("folder", folder)
    verify_listed(folder, "tokenizer.json", "tokenizer_config.json")
    return _load_tokenizer(folder, read_config(folder))[0]


def _load_tokenizer(
    folder: Path, config: ModelConfig, end_tokens: EndTokens = "union"
) -> tuple[Tokenizer | ByteTokenizer | None, tuple[int, ...]]:
    """Reads the tokenizer, and the tokens that end a text."""
    settings = _read_if_there(folder / "tokenizer_config.json") or {}
    settings |= _chat_templates(folder)
    eos_ids = _configured_eos_ids(folder)
    tokenizer = None
    if (path := folder / "tokenizer.json").exists():
        special_map = _read_if_there(folder / "special_tokens_map.json")
        added_tokens = _read_if_there(folder / "added_tokens.json")
        with reporting_errors(path):
            tokenizer = Tokenizer.from_json(
                read_text(path),
                settings=settings,
                special_map=special_map,
                added_tokens=added_tokens,
            )
        if eos_ids is None or end_tokens == "union":
            eos_ids = [*(eos_ids or ()), *tokenizer.special_ids("eos_token")]
    elif NUM_BYTES <= config.vocab_size <= MAX_BYTE_VOCAB and not any(
        (folder / name).exists() for name in UNSUPPORTED_TOKENIZER_FILES
    ):
        tokenizer = ByteTokenizer(config.vocab_size, eos_ids=eos_ids)
        eos_ids = tokenizer.eos_ids
    # Some files name tokens beyond the vocabulary, which the model cannot return.
    unique = dict.fromkeys(eos_ids or ())
    valid_ids = tuple(token for token in unique if 0 <= token < config.vocab_size)
    if tokenizer is not None:
        tokenizer.eos_ids = valid_ids
    return tokenizer, valid_ids


def _read_if_there(path: Path) -> dict[str, object] | None:
    return read_json(path) if path.exists() else None


def _chat_templates(folder: Path) -> dict[str, object]:
    """Returns the setting of chat templates with files of their own; may be empty."""
    paths = {"default": folder / "chat_template.jinja"}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        paths[path.stem] = path
    templates = {name: read_text(path) for name, path in paths.items() if path.exists()}
    if not templates:
        return {}
    if [*templates] == ["default"]:
        return {"chat_template": templates["default"]}
    named = [{"name": name, "template": text} for name, text in templates.items()]
    return {"chat_template": named}


def _configured_eos_ids(folder: Path) -> list[int] | None:
    """Returns the end tokens in the configurations; None if they name none."""
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).exists():
            continue
        value = text_part(read_json(folder / name)).get("eos_token_id")
        if value is None:
            continue
        ids: list[Any] = value if isinstance(value, list) else [value]
        if any(type(token) is not int for token in ids):
            raise ValueError(
                f"{folder / name}: eos_token_id={value!r} must be integers"
            )
        return ids
    return None
