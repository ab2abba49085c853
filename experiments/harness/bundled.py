"""Where models lie: folders on disk, and the small ones that ship with the project."""

import json
from pathlib import Path

from experiments.framework import config_json

FOLDER = Path(__file__).parents[1] / "models"


def names() -> list[str]:
    """Lists the models that ship with the project, without heads that draft for one."""
    return sorted(
        path.parent.name
        for path in FOLDER.glob("*/config.json")
        if "architectures" in json.loads(path.read_text("utf-8"))
    )


def folder_of(model: str) -> Path:
    """Finds a model.

    Args:
      model: the path of a Hugging Face folder, or the name of a bundled model. Where
        both exist, the path wins.

    Raises:
      ValueError: there is neither; the line gives the nearest names.
    """
    if model and Path(model).is_dir():
        return Path(model)
    if model not in names():
        line = config_json.unknown("model", model, names())
        raise ValueError(f"{line} (or the path of a folder)")
    return FOLDER / model


def heads_of(model: str, kind: str) -> Path:
    """Finds the heads of a kind that ship with the project and draft for a model.

    Raises:
      ValueError: there are none.
    """
    folder = FOLDER / f"{model}-{kind}"
    if model not in names() or not folder.is_dir():
        raise ValueError(f"{model}: no {kind} heads ship with it; name their folder")
    return folder
