"""Models that ship with the project, and their draft heads."""

from pathlib import Path

from jaxkv import files

FOLDER = Path(__file__).parents[1] / "models"


def bundled_names() -> list[str]:
    """Returns the names of the bundled models, without draft heads."""
    return sorted(files.bundled_models())


def find_bundled_folder(model: str) -> Path:
    """Returns the folder of a model, see `jaxkv.files.model_folder`.

    Raises:
      ValueError: there is no model with this path or name.
    """
    return files.model_folder(model)


def find_heads_folder(model: str, kind: str) -> Path:
    """Returns the folder of the bundled draft heads of a kind for a model.

    Raises:
      ValueError: the project ships no such heads.
    """
    folder = FOLDER / f"{model}-{kind}"
    if model not in bundled_names() or not folder.is_dir():
        raise ValueError(f"{model}: no {kind} heads ship with it; name their folder")
    return folder
