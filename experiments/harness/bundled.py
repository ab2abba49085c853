"""The models that ship with the project, and the heads that draft for them."""

from pathlib import Path

from jaxkv import files

FOLDER = Path(__file__).parents[1] / "models"


def bundled_names() -> list[str]:
    """Lists the models that ship with the project, without heads that draft for one."""
    return sorted(files.bundled_models())


def find_model_folder(model: str) -> Path:
    """Finds a model, see `jaxkv.files.model_folder`.

    Raises:
      ValueError: there is none of this path or name.
    """
    return files.model_folder(model)


def find_heads_folder(model: str, kind: str) -> Path:
    """Finds the heads of a kind that ship with the project and draft for a model.

    Raises:
      ValueError: there are none.
    """
    folder = FOLDER / f"{model}-{kind}"
    if model not in bundled_names() or not folder.is_dir():
        raise ValueError(f"{model}: no {kind} heads ship with it; name their folder")
    return folder
