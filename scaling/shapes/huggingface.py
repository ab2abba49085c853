"""Shapes from the `config.json` of Hugging Face models.

Families are those of `jaxkv.models.huggingface.families`. Only shapes are read: keys
that change the arithmetic but no count (activations, rotary scaling, soft caps) are
ignored. A missing key has the default of transformers.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv import files, validation
from jaxkv.models import (
    FAMILIES,
    Family,
    parse_size,
    read_fields,
    read_windows,
    refuse_other_values,
    text_part,
    without_aliases,
)
from scaling.shapes.description import (
    HeadAttention,
    LatentAttention,
    LayerSort,
    MixtureShape,
    ModelShape,
    RecurrentShape,
    describe_fields,
    field_names,
)

MAX_SIZE = 2**40

# Fields that affect a count; the last three become fields of `MixtureShape`.
_COUNTED_FIELDS = {
    *(
        field_names(ModelShape)
        + field_names(HeadAttention)
        + field_names(LatentAttention)
    ),
    *(f"experts.{name}" for name in field_names(MixtureShape)),
    *(f"recurrence.{name}" for name in field_names(RecurrentShape)),
    *("experts.dense_layers", "experts.num_dense_layers", "experts.num_shared"),
}


def load_shape(path: str | os.PathLike[str]) -> ModelShape:
    """Reads a `config.json`, or the one in a folder.

    Raises:
      ValueError: the file cannot be read, is not JSON, or describes no known model; the
        message has the file, the key and its allowed values.
    """
    path = validation.path("path", path)
    file = path / "config.json" if path.is_dir() else path
    raw = files.read_json(file)
    name = file.stem if file.name != "config.json" else file.resolve().parent.name
    try:
        return describe_huggingface(raw, name=name)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def describe_huggingface(raw: Mapping[str, object], *, name: str = "") -> ModelShape:
    """Returns the shape of the model of a parsed `config.json`.

    Args:
      raw: content of the file.
      name: name in tables; the model's family by default.

    Raises:
      ValueError: a value is not supported; the message has the key, its value and the
        allowed values.
    """
    raw = text_part(raw)
    kind = family_of(raw)
    family = FAMILIES[kind]
    if family.adapt is not None:
        raise ValueError(
            f"model_type={kind!r} is not counted: its layers have sizes of their own"
        )
    raw = without_aliases(family, raw)
    refuse_other_values(family, raw)
    keys = {key: x for key, x in family.keys.items() if x.fields[0] in _COUNTED_FIELDS}
    counted = family._replace(
        keys=keys, implied={"max_positions": family.default_positions, **family.implied}
    )
    fields = read_fields(counted, raw, MAX_SIZE)
    num_layers = fields["num_layers"]
    if family.has_optional_experts and fields["experts"]["num_experts"] == 0:
        del fields["experts"]
    if family.has_single_branches:
        fields["branches"] = _branches(raw, num_layers)
        if "mixture" not in fields["branches"]:
            del fields["experts"]
    if experts := fields.get("experts"):
        fields["mixture_layers"] = _mixture_layers(family, raw, experts, num_layers)
        shared_size = experts.get("num_shared", 0) * experts["size"]
        experts.setdefault("shared_size", shared_size)
    fields["windows"] = _windows(family, raw, num_layers)
    if family.has_recurrence:
        fields["recurrent"] = fields["recurrence"]
    if family.has_recurrence and not family.has_single_branches:
        fields["recurrent_layers"] = _recurrent_layers(raw, num_layers)
    return describe_fields({**fields, "name": name or kind})


def _mixture_layers(
    family: Family,
    raw: Mapping[str, object],
    experts: Mapping[str, Any],
    num_layers: int,
) -> tuple[bool, ...]:
    """Returns the mask of the layers with experts."""
    dense = experts.get("dense_layers", range(experts.get("num_dense_layers", 0)))
    stride = 1
    offset = 0
    if family.mixture_stride is not None:
        key, offset = family.mixture_stride
        stride = _size(raw, key, 1)
    return tuple(
        layer not in dense and (layer + offset) % stride == 0
        for layer in range(num_layers)
    )


def _windows(
    family: Family, raw: Mapping[str, object], num_layers: int
) -> tuple[int | None, ...]:
    """Returns the window of every layer, None without one.

    Keys that only serving refuses are counted.
    """
    if family.windows == "never":
        return (None,)
    if family.windows in ("off", "listed"):
        family = family._replace(windows="flagged")
    return tuple(read_windows(family, raw, num_layers))


_BRANCH_BY_TYPE: Mapping[str, LayerSort] = {
    "full_attention": "attention",
    "linear_attention": "recurrent",
    "mlp": "dense",
    "moe": "mixture",
}
"""Hugging Face's name of a layer with one branch -> the branch."""


def _branches(raw: Mapping[str, object], num_layers: int) -> tuple[LayerSort, ...]:
    """Returns the only branch of each layer."""
    kinds = _layer_types(raw, num_layers, [*_BRANCH_BY_TYPE])
    return tuple(_BRANCH_BY_TYPE[kind] for kind in kinds)


def _recurrent_layers(raw: Mapping[str, object], num_layers: int) -> tuple[bool, ...]:
    """Returns the mask of the recurrent layers."""
    names = ["full_attention", "linear_attention"]
    return tuple(kind == names[1] for kind in _layer_types(raw, num_layers, names))


def _layer_types(
    raw: Mapping[str, object], num_layers: int, names: Sequence[str]
) -> list[str]:
    """Returns the checked types of the layers."""
    kinds = raw.get("layer_types")
    if not isinstance(kinds, list) or any(kind not in names for kind in kinds):
        raise ValueError(
            f"layer_types={validation.format_value(kinds)} must be a list of "
            f"{' and '.join(names)}"
        )
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries, not {num_layers}")
    return kinds


def _size(raw: Mapping[str, object], key: str, default: int, low: int = 1) -> int:
    """Reads a size; null counts as a missing key."""
    value = raw.get(key)
    value = default if value is None else value
    return parse_size(key, value, low=low, high=MAX_SIZE)


def family_of(raw: Mapping[str, object]) -> str:
    """Returns the family, by `model_type`, or else by `architectures`.

    Raises:
      ValueError: the family is unknown, or the two keys contradict each other.
    """
    kind = raw.get("model_type")
    classes = raw.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else classes
    by_class = {family.architecture.lower(): name for name, family in FAMILIES.items()}
    built = by_class.get(first.lower()) if isinstance(first, str) else None
    if isinstance(kind, str) and kind in FAMILIES:
        if built not in (None, kind):
            raise ValueError(f"model_type={kind!r} contradicts architecture {first!r}")
        return kind
    if built is not None:
        return built
    message = f"model_type={kind!r}" if kind is not None or not first else f"{first!r}"
    raise ValueError(f"{message} is not counted, only {', '.join(FAMILIES)}")
