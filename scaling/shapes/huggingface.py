"""A Hugging Face `config.json` of any family that the cost formulas count.

Only shapes are read: what changes the arithmetic but no count (activations, rotary
scaling, soft caps) is passed over. A key that is left out means what transformers takes
it to mean.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv import files
from scaling.shapes.description import Description
from scaling.shapes.families import FAMILIES
from scaling.shapes.huggingface_keys import Raw


def load(path: Path) -> Description:
    """Reads a `config.json`, or the one in a folder.

    Raises:
      ValueError: it cannot be read, is not JSON, or describes no model that is counted;
        the line names the file, and the key with what it should be.
    """
    file = path / "config.json" if path.is_dir() else path
    raw = files.read_json(file)
    name = (
        path.stem if path.is_file() and path.stem != "config" else path.resolve().name
    )
    try:
        return describe(raw, name=name)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def describe(raw: Mapping[str, Any], *, name: str = "") -> Description:
    """Describes the model of a parsed `config.json`.

    Args:
      raw: the file.
      name: what tables call it; its family by default.

    Raises:
      ValueError: names the key, its value and what it should be.
    """
    kind = family_of(raw)
    family = FAMILIES[kind]
    fields = family.read(Raw(raw).without_aliases(family.aliases))
    return Description(name=name or kind, **fields)


def family_of(raw: Mapping[str, Any]) -> str:
    """Finds the family by `model_type`, or by `architectures` if that does not tell.

    Raises:
      ValueError: it is none of those that are counted, or one by each.
    """
    kind, classes = raw.get("model_type"), raw.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else classes
    by_class = {each.architecture.lower(): name for name, each in FAMILIES.items()}
    built = by_class.get(first.lower()) if isinstance(first, str) else None
    if isinstance(kind, str) and kind in FAMILIES:
        if built not in (None, kind):
            raise ValueError(f"model_type={kind!r} contradicts architecture {first!r}")
        return kind
    if built is not None:
        return built
    said = f"model_type={kind!r}" if kind is not None or not first else f"{first!r}"
    raise ValueError(f"{said} is not counted, only {', '.join(FAMILIES)}")
