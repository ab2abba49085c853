"""The part of a Hugging Face `config.json` that tells of experts, in and out."""

from collections.abc import Mapping
from typing import Any

from jaxkv.hf_families import Family
from jaxkv.model_configs import Experts, ModelConfig

# Other names of a key: transformers 5 writes Qwen3's number of experts as Mixtral's.
_OTHER_NAMES = {"num_experts": "num_local_experts"}


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
        value = given.get(key, given.get(_OTHER_NAMES.get(key, key)))
        value = family.expert_defaults.get(key) if value is None else value
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


def checked_size(key: str, value: Any) -> int:
    """Returns a whole number that is at least 1.

    Raises:
      ValueError: it is none.
    """
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={value!r} must be a whole number, at least 1")
    return value


def _checked(key: str, field: str, value: Any, num_layers: int) -> Any:
    """Returns a value that has the type its field needs."""
    if field == "renormalise":
        if type(value) is not bool:
            raise ValueError(f"{key}={value!r} must be true or false")
        return value
    if field == "balance_weight":
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise ValueError(f"{key}={value!r} must be a number, at least 0")
        return float(value)
    if field == "num_dense_layers":
        first = list(range(len(value))) if isinstance(value, list) else None
        if value != first or len(value) >= num_layers:
            raise ValueError(
                f"{key}={value!r} is not supported, only the first layers and not all"
            )
        return len(value)
    return checked_size(key, value)
