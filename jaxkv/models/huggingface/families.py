"""The model families, by their `model_type` in a Hugging Face folder."""

from jaxkv import validation
from jaxkv.models.huggingface.dense_families import DENSE_FAMILIES
from jaxkv.models.huggingface.family import Family
from jaxkv.models.huggingface.gemma4 import GEMMA4
from jaxkv.models.huggingface.hybrid_families import HYBRID_FAMILIES
from jaxkv.models.huggingface.mixture_families import MIXTURE_FAMILIES

FAMILIES: dict[str, Family] = {
    **DENSE_FAMILIES,
    **MIXTURE_FAMILIES,
    **HYBRID_FAMILIES,
    "gemma4_text": GEMMA4,
}
"""Families that are read, written or counted; `register_family` adds to them."""


def register_family(name: str, family: Family) -> None:
    """Adds a family, whose folders are then loaded, served, trained and counted.

    Args:
      name: its `model_type`.
      family: its keys and tensors, mostly an entry of `FAMILIES` with some fields
        replaced.

    Raises:
      ValueError: another family has this name or architecture.
    """
    validation.instance("family", family, Family)
    architectures = {other.architecture: key for key, other in FAMILIES.items()}
    for taken, what in ((FAMILIES, name), (architectures, family.architecture)):
        if what in taken:
            raise ValueError(f"{what!r} is registered already")
    FAMILIES[name] = family
