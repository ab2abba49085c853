"""The part of a Hugging Face `config.json` that tells of experts, in and out."""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.huggingface import values
from jaxkv.models.huggingface.families import Family


def read(family: Family, given: Mapping[str, Any], num_layers: int) -> Experts | None:
    """Reads the experts of a parsed `config.json`; None of a dense family.

    Raises:
      ValueError: names the key, its value and what is supported instead.
    """
    if not family.expert_keys:
        return None
    ours = {
        field: value
        for field, value in family.expert_defaults.items()
        if field not in family.expert_keys
    }
    for key, field in family.expert_keys.items():
        value = given.get(key, family.expert_defaults.get(key))
        ours[field] = _checked(key, field, value, num_layers)
    return Experts(**ours)


def write(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that `read` reads; reading them back shows what has no place."""
    if not family.expert_keys or (experts := config.experts) is None:
        return {}
    raw = {key: getattr(experts, field) for key, field in family.expert_keys.items()}
    if "mlp_only_layers" in raw:
        raw["mlp_only_layers"] = list(range(experts.num_dense_layers))
    return raw


def _checked(key: str, field: str, value: Any, num_layers: int) -> Any:
    """Returns a value that has the type its field needs."""
    if field == "balance_weight" and type(value) in (int, float) and value == 0:
        return 0.0
    if field == "num_dense_layers":
        return _num_dense_layers(key, value, num_layers)
    return values.of_field(key, field, value)


def _num_dense_layers(key: str, value: Any, num_layers: int) -> int:
    """Counts the layers without experts, which must be the first, in any order."""
    if isinstance(value, list) and all(type(layer) is int for layer in value):
        layers = set(value)
        if layers == set(range(len(layers))) and len(layers) < num_layers:
            return len(layers)
    raise ValueError(
        f"{key}={values.shown(value)} is not supported, only the first layers and "
        "not all"
    )
