"""Folders of models: bundled ones, and the cache of compiled programs."""

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

BUNDLED = Path(__file__).parents[1] / "bundled_models"
"""Folder of the models and draft heads that ship with the project."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the user's folder for compiled programs, which may be deleted any time.

    It is `jaxkv` in `$XDG_CACHE_HOME`, or in `~/.cache`.

    Args:
      environ: the environment variables.
    """
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jaxkv")


def bundled_models() -> dict[str, Path]:
    """Returns the folders of the models that ship with the project, by name.

    Draft heads, which have no architecture of their own, are left out.
    """
    return {
        name: folder
        for name, folder in _bundled_folders().items()
        if "architectures" in json.loads((folder / "config.json").read_text("utf-8"))
    }


def bundled_model(name: str = "stdlib-bytes") -> Path:
    """Returns the folder of a model, or of draft heads, that ship with the project.

    The default is a byte-level Llama of 1.36 million parameters; its draft heads are
    `stdlib-bytes-eagle` and `stdlib-bytes-medusa`. A checkout of the repository also
    has `stdlib-bytes-deepseek`, a small model in the form of DeepSeek-V3.

    Args:
      name: name of the folder.

    Raises:
      ValueError: no such model is installed.
    """
    folders = _bundled_folders()
    if name not in folders:
        raise ValueError(
            f"name={name!r} must be one of: {', '.join(folders) or '(none)'}"
        )
    return folders[name]


def _bundled_folders() -> dict[str, Path]:
    """Returns all folders of models and of draft heads, by name."""
    return {
        path.parent.name: path.parent for path in sorted(BUNDLED.glob("*/config.json"))
    }


def find_heads_folder(model: str, kind: str) -> Path:
    """Returns the folder of the bundled draft heads of a kind for a bundled model.

    Raises:
      ValueError: the project ships no such heads.
    """
    folder = BUNDLED / f"{model}-{kind}"
    if model not in bundled_models() or not folder.is_dir():
        raise ValueError(f"{model}: no {kind} heads ship with it; name their folder")
    return folder


def model_folder(model: str | os.PathLike[str]) -> Path:
    """Returns the folder of a model.

    Args:
      model: the path of a Hugging Face folder, or the name of a bundled model. If both
        exist, the path has precedence.

    Raises:
      ValueError: neither exists. The message has the closest names, or the command that
        downloads a model from the Hugging Face Hub.
    """
    path = Path(model)
    models = bundled_models()
    if os.fspath(model) and path.is_dir():
        return path
    if not isinstance(model, str) or path.is_absolute():
        raise ValueError(f"{path}: no such folder")
    if model in models:
        return models[model]
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        raise ValueError(
            f"{model}: no such folder; if it is a model of the Hugging Face Hub, run "
            f"`hf download {model} --local-dir {path.name}` and give {path.name!r}"
        )
    near = difflib.get_close_matches(model, models, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(near)}?" if near else f"one of: {', '.join(models)}"
    )
    raise ValueError(f"unknown model {model!r}; {hint} (or the path of a folder)")
