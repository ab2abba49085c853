"""Hugging Face's `config.json` to our `ModelConfig` and back.

What the arithmetic of `models/transformer.py` does not cover is refused by name: a
model that loads is a model that computes the same.
"""

import operator
from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.huggingface import harmless, positions, values
from jaxkv.models.huggingface.families import FAMILIES, Family
from jaxkv.models.huggingface.values import quote

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
    raw = without_aliases(family, raw)
    given = {key: value for key, value in raw.items() if value is not None}
    is_rotary = family.implied.get("positions") != "learned"
    # Keys, and values of keys, that ask for other arithmetic than ours are refused.
    read = frozenset()
    if is_rotary:
        read = positions.KEYS
        has_switch = family.windows in ("flagged", "off")
        if has_switch or given.get("use_sliding_window") is False:
            read |= positions.WINDOW_KEYS
    harmless.refuse_unknown(family, given, read)
    refuse_other_values(family, given, {**harmless.ONLY, **family.only_served})
    ours = read_fields(family, raw)
    ours["family"] = name
    if is_rotary:
        ours |= positions.read_positions(family, raw, ours["num_layers"])
    if experts := ours.pop("experts", None):
        if (dense := experts.pop("dense_layers", None)) is not None:
            # Layers without experts are the first, in any order.
            is_whole = all(type(layer) is int for layer in dense)
            found = {*dense} if is_whole else set()
            num = len(found)
            if not is_whole or found != {*range(num)} or num >= ours["num_layers"]:
                raise ValueError(
                    f"mlp_only_layers={quote(dense)} is not supported, only the first "
                    "layers and not all"
                )
            experts["num_dense_layers"] = num
        experts = Experts(**experts)
    return ModelConfig(**ours, experts=experts)


def read_fields(
    family: Family, raw: Mapping[str, Any], most: int = values.MAX_SIZE
) -> dict[str, Any]:
    """Reads the fields that the keys of a family set, and those that follow from them.

    Args:
      family: its entry, or one with fewer keys to read fewer fields.
      raw: a `config.json` without aliases.
      most: the largest size.

    Returns:
      Fields as an entry names them; those of experts in a dict of their own.

    Raises:
      ValueError: names the key, its value and what it should be.
    """
    ours: dict[str, Any] = dict(family.implied)
    for key, (fields, default) in family.keys.items():
        value = raw.get(key)
        # A null is no default where the field follows from others.
        if value is None and (key not in raw or fields[0] not in family.derived):
            value = default
        if value is not None:
            ours |= dict.fromkeys(fields, _checked(key, fields[0], value, most))
        elif fields[0] not in ours and fields[0] not in family.derived:
            raise ValueError(f"{key} is missing")
    hidden, heads = ours["hidden_size"], ours["num_q_heads"]
    ours.setdefault("mlp_size", 4 * hidden)
    if "kv_rank" in ours:  # latent attention: every head has a key of its own
        ours.setdefault("q_rank", None)
    else:
        ours.setdefault("num_kv_heads", heads)
        if "head_dim" not in ours and hidden % heads:
            raise ValueError(
                f"hidden_size={hidden} must be a multiple of num_q_heads={heads}"
            )
        ours.setdefault("head_dim", hidden // heads)
    prefix = "experts."
    if mixture := [field for field in ours if field.startswith(prefix)]:
        ours["experts"] = {
            field.removeprefix(prefix): ours.pop(field) for field in mixture
        }
    return ours


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Translates a configuration to a `config.json` that transformers 4 and 5 read.

    Raises:
      ValueError: if the family cannot express the configuration, naming the field.
    """
    family = FAMILIES[config.family]
    num_dense = config.experts.num_dense_layers if config.experts else 0
    written = {
        "activation": ACTIVATIONS[config.activation][0],
        "experts.dense_layers": [*range(num_dense)],
    }
    raw = {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{
            key: written[fields[0]]
            if fields[0] in written
            else operator.attrgetter(fields[0])(config)
            for key, (fields, _) in family.keys.items()
            if config.experts or not fields[0].startswith("experts.")
        },
        **family.only_served,
        **family.only,
    }
    raw |= {key: raw[other] for key, other in family.equal.items()}
    if family.implied.get("positions") != "learned":
        raw |= positions.write_positions(family, config)
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
    served = {name: family for name, family in FAMILIES.items() if family.servable}
    names = {family.architecture: name for name, family in served.items()}
    found = raw.get("architectures") or None
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    kind = raw.get("model_type")
    if found is None:
        found, names = kind, {name: name for name in served}
    if not isinstance(found, str) or found not in names:
        raise ValueError(
            f"architecture {quote(found)} is not supported, only "
            + ", ".join(family.architecture for family in served.values())
        )
    if kind not in (None, names[found]):
        raise ValueError(f"model_type={quote(kind)} contradicts architecture {found!r}")
    return names[found]


def without_aliases(family: Family, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Writes every key by one name.

    Raises:
      ValueError: two names of one key have different values.
    """
    raw = dict(raw)
    for alias, key in family.aliases.items():
        if (value := raw.pop(alias, None)) is None:
            continue
        if raw.get(key) not in (None, value):
            raise ValueError(
                f"{alias}={quote(value)} contradicts {key}={quote(raw[key])}"
            )
        raw[key] = value
    return raw


def refuse_other_values(
    family: Family, raw: Mapping[str, Any], more: Mapping[str, Any] | None = None
) -> None:
    """Refuses values of keys of which one value is supported.

    Args:
      family: its `only` and `equal` are checked.
      raw: a `config.json` without aliases.
      more: further keys, with the value that is supported.

    Raises:
      ValueError: names the key, its value and what is supported instead.
    """
    equal = {key: raw.get(other) for key, other in family.equal.items()}
    for key, supported in {**(more or {}), **family.only, **equal}.items():
        value = raw.get(key)
        if value is not None and (
            value != supported or type(value) is not type(supported)
        ):
            raise ValueError(
                f"{key}={quote(value)} is not supported, only {quote(supported)}"
            )


def _checked(key: str, field: str, value: Any, most: int) -> Any:
    """Returns a value that has the type its field needs."""
    if field == "experts.gate_bias":
        return value == "noaux_tc"
    if field != "activation":
        return values.parse_field(key, field, value, most)
    for ours, theirs in ACTIVATIONS.items():
        if value in theirs:
            return ours
    names = ", ".join(name for names in ACTIVATIONS.values() for name in names)
    raise ValueError(f"{key}={quote(value)} is not supported, only {names}")
