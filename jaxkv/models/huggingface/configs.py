"""Hugging Face's `config.json` to our `ModelConfig` and back.

What the arithmetic of `models/transformer.py` does not cover is refused by name: a
model that loads is a model that computes the same.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import ModelConfig
from jaxkv.models.huggingface import harmless, mixtures, positions, values
from jaxkv.models.huggingface.families import FAMILIES, Family
from jaxkv.models.huggingface.values import shown

# Our activation -> Hugging Face's names of it, the one we write first.
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"),
    "relu": ("relu",),
}


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Translates a parsed `config.json`.

    Args:
      raw: the file, as transformers 4 or 5 writes it.

    Returns:
      The configuration of a model that computes the same.

    Raises:
      ValueError: names the key, its value and what is supported instead.
    """
    name = _family_of(raw)
    family = FAMILIES[name]
    raw = _without_aliases(family, raw)
    given = {key: value for key, value in raw.items() if value is not None}
    is_rotary = family.implied.get("positions") != "learned"
    _refuse_unsupported(name, given, is_rotary)
    ours: dict[str, Any] = {**family.implied, "family": name}
    for key, fields in family.keys.items():
        # A null is no default where something else tells.
        is_null = key in raw and raw[key] is None and fields[0] in family.derived
        default = None if is_null else family.defaults.get(key)
        if (value := given.get(key, default)) is not None:
            ours |= dict.fromkeys(fields, _checked(key, fields[0], value))
    for key, fields in family.keys.items():
        if fields[0] not in ours and fields[0] not in family.derived:
            raise ValueError(f"{key} is missing")
    _derive(ours)
    if is_rotary:
        ours |= positions.read(family, raw, ours["num_layers"])
    experts = mixtures.read(family, given, ours["num_layers"])
    return ModelConfig(**ours, experts=experts)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Translates a configuration to a `config.json` that transformers 4 and 5 read.

    Raises:
      ValueError: if the family cannot express the configuration, naming the field.
    """
    family = FAMILIES[config.family]
    raw = {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{key: getattr(config, fields[0]) for key, fields in family.keys.items()},
        **family.only,
    }
    raw |= mixtures.write(family, config)
    for key, fields in family.keys.items():
        if fields == ("activation",):
            raw[key] = ACTIVATIONS[config.activation][0]
    if config.family == "opt":
        raw["word_embed_proj_dim"] = config.hidden_size
    elif config.family != "gpt2":
        raw |= positions.write(family, config)
    # Reading it back is the proof that the family has a place for every field.
    back = from_hf(raw)
    for name, value in vars(config).items():
        if getattr(back, name) != value:
            raise ValueError(
                f"{name}={value!r} has no place in the config.json of "
                f"family={config.family!r}, which means {getattr(back, name)!r}"
            )
    return raw


def _family_of(raw: Mapping[str, Any]) -> str:
    """Finds the family by architecture and model type, which must agree."""
    names = {family.architecture: name for name, family in FAMILIES.items()}
    found = raw.get("architectures") or None
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    kind = raw.get("model_type")
    if found is None:
        found, names = kind, {name: name for name in FAMILIES}
    if not isinstance(found, str) or found not in names:
        raise ValueError(
            f"architecture {shown(found)} is not supported, only "
            + ", ".join(family.architecture for family in FAMILIES.values())
        )
    if kind not in (None, names[found]):
        raise ValueError(f"model_type={shown(kind)} contradicts architecture {found!r}")
    return names[found]


def _without_aliases(family: Family, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Writes every key by one name; two names must not say different things."""
    raw = dict(raw)
    for alias, key in family.aliases.items():
        if (value := raw.pop(alias, None)) is None:
            continue
        if raw.get(key) not in (None, value):
            raise ValueError(
                f"{alias}={shown(value)} contradicts {key}={shown(raw[key])}"
            )
        raw[key] = value
    return raw


def _refuse_unsupported(name: str, given: Mapping[str, Any], is_rotary: bool) -> None:
    """Refuses keys, and values of keys, that ask for other arithmetic than ours."""
    family, read = FAMILIES[name], frozenset()
    if is_rotary:
        read = positions.KEYS
        if family.windows in ("flagged", "off") or (
            given.get("use_sliding_window") is False
        ):
            read |= positions.WINDOW_KEYS
    only = {**harmless.ONLY, **family.only}
    if name == "opt":
        read |= {"word_embed_proj_dim"}
        only["word_embed_proj_dim"] = given.get("hidden_size")
    harmless.refuse_unknown(family, given, read)
    for key, supported in only.items():
        value = given.get(key, supported)
        if value != supported or type(value) is not type(supported):
            raise ValueError(
                f"{key}={shown(value)} is not supported, only {shown(supported)}"
            )


def _checked(key: str, field: str, value: Any) -> Any:
    """Returns a value that has the type its field needs."""
    if field != "activation":
        return values.of_field(key, field, value)
    for ours, theirs in ACTIVATIONS.items():
        if value in theirs:
            return ours
    names = ", ".join(name for names in ACTIVATIONS.values() for name in names)
    raise ValueError(f"{key}={shown(value)} is not supported, only {names}")


def _derive(ours: dict[str, Any]) -> None:
    """Fills in the sizes that follow from others."""
    hidden, heads = ours["hidden_size"], ours["num_q_heads"]
    ours.setdefault("num_kv_heads", heads)
    ours.setdefault("mlp_size", 4 * hidden)
    if "head_dim" not in ours:
        if hidden % heads:
            raise ValueError(f"hidden size {hidden} must be a multiple of {heads=}")
        ours["head_dim"] = hidden // heads
