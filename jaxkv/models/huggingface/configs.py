"""Converts Hugging Face's `config.json` to a `ModelConfig` and back.

Keys that ask for arithmetic outside of `models/transformer.py` are refused by name: a
model that loads computes the same as the original.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv import validation
from jaxkv.models.config import (
    Experts,
    LatentConfig,
    ModelConfig,
    RecurrenceConfig,
)
from jaxkv.models.huggingface import harmless, positions, values, windows
from jaxkv.models.huggingface.families import FAMILIES
from jaxkv.models.huggingface.family import Family, KeyForm
from jaxkv.models.huggingface.values import shorten

# Activation -> Hugging Face's names of it; the first one is written.
ACTIVATION_NAMES = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"),
    "relu": ("relu",),
    "relu_squared": ("relu2",),
}


_FIELD_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "same": lambda x: x,
    "inverse": lambda x: 1 / x,
    "inverse_root": lambda x: x**-0.5,
    "parallel": lambda x: "parallel" if x else "serial",
    # Early folders say "gelu", and mean its approximation.
    "approximate": lambda x: "gelu_tanh" if x == "gelu" else x,
    "doubled": lambda x: 2.0 if x else 1.0,
}
_KEY_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "same": lambda x: x,
    "inverse": lambda x: round(1 / x, 9),
    "inverse_root": lambda x: _whole(round(x**-2, 9)),
    "parallel": lambda x: x == "parallel",
    "approximate": lambda x: x,
    "doubled": lambda x: x == 2,
}
"""From values of keys to fields, and back, by `Key.form`."""


_NUM_EXPERTS = "experts.num_experts"


def _whole(x: float) -> int | float:
    return int(x) if x == int(x) else x


def from_hf(raw: Mapping[str, object]) -> ModelConfig:
    """Converts a parsed `config.json`.

    Args:
      raw: the file, as written by transformers 4 or 5.

    Returns:
      The configuration of a model that computes the same.

    Raises:
      ValueError: a key is not supported; the message has the key, its value and the
        supported values.
    """
    raw = text_part(raw)
    name = _family_of(raw)
    family = FAMILIES[name]
    raw = without_aliases(family, raw)
    settings = {key: value for key, value in raw.items() if value is not None}
    is_rotary = family.implied.get("positions") != "learned"
    # Keys and values that ask for other arithmetic are refused.
    read = frozenset()
    if is_rotary:
        read = positions.ROPE_KEYS | {*family.position_keys, *family.rope_aliases}
        has_switch = family.windows in ("flagged", "off", "listed")
        if has_switch or settings.get("use_sliding_window") is False:
            read |= windows.WINDOW_KEYS
    quantization = settings.get("quantization_config")
    if _is_supported(quantization, has_mxfp4=bool(family.interleaved)):
        read |= {"quantization_config"}
    harmless.refuse_unknown(family, settings, read)
    refuse_other_values(family, settings, {**harmless.ONLY, **family.only_served})
    fields = read_fields(family, raw)
    fields["family"] = name
    if is_rotary:
        width = fields["rope_dim"] if "kv_rank" in fields else fields["head_dim"]
        fields |= positions.read_positions(family, raw, {**fields, "head_dim": width})
    if "kv_rank" in fields:
        latent = {
            field.name: fields.pop(field.name)
            for field in dataclasses.fields(LatentConfig)
            if field.name in fields
        }
        fields["latent"] = LatentConfig(**latent)
        fields["num_kv_heads"] = fields["num_q_heads"]
        fields["head_dim"] = latent["nope_dim"] + latent["rope_dim"]
    recurrence = fields.pop("recurrence", None)
    kinds = fields.get("other_attention", ())
    if any(kind.is_recurrent for kind in kinds):
        fields["recurrence"] = RecurrenceConfig(**recurrence)
    experts = fields.pop("experts", None)
    if family.has_optional_experts and experts["num_experts"] == 0:
        experts = None
    if family.has_single_branches:
        names = [kind.feed_forward for kind in kinds]
        experts = experts if "experts" in names else None
    if experts:
        if "topk_method" in family.keys:
            experts |= _read_groups(raw.get("topk_method"))
        if (num_shared := experts.pop("num_shared", None)) is not None:
            experts["shared_size"] = num_shared * experts["size"]
        if (dense := experts.pop("dense_layers", None)) is not None:
            # Layers without experts must be the first ones, listed in any order.
            is_whole = all(type(layer) is int for layer in dense)
            dense_layers = {*dense} if is_whole else set()
            num = len(dense_layers)
            if (
                not is_whole
                or dense_layers != {*range(num)}
                or num >= fields["num_layers"]
            ):
                raise ValueError(
                    f"mlp_only_layers={shorten(dense)} is not supported, only the "
                    "first layers and not all"
                )
            experts["num_dense_layers"] = num
        is_dense = experts.get("num_dense_layers", 0) >= fields["num_layers"]
        experts = None if is_dense and family.skips_ahead else Experts(**experts)
    config = ModelConfig(**fields, experts=experts)
    return config if family.adapt is None else family.adapt(config, raw)


@validation.checks_numbers(high=validation.SIZES)
def read_fields(
    family: Family, raw: Mapping[str, object], high: int = values.MAX_CONFIG_SIZE
) -> dict[str, Any]:
    """Reads the fields that the keys of a family set, and fields derived from them.

    Args:
      family: entry of the family, or one with fewer keys to read fewer fields.
      raw: a `config.json` without aliases.
      high: largest allowed size.

    Returns:
      Fields with the names of an entry; those of experts and of a recurrence are in
      nested dicts.

    Raises:
      ValueError: a key is missing or invalid; the message has the key and its value.
    """
    result: dict[str, Any] = dict(family.implied)
    for key, (names, default, form) in family.keys.items():
        value = raw.get(key)
        # A null means "derived" if the field can be derived, else the default.
        if value is None and (key not in raw or names[0] not in family.derived):
            value = default
        may_be_zero = family.has_optional_experts and names[0] == _NUM_EXPERTS
        if form == "range":
            result |= dict(zip(names, values.parse_range(key, value), strict=True))
        elif may_be_zero and value == 0 and value is not False:
            result[names[0]] = 0
        elif value is not None:
            checked = _checked(key, names[0], value, high)
            result |= dict.fromkeys(names, _FIELD_VALUES[form](checked))
        elif names[0] not in result and names[0] not in family.derived:
            raise ValueError(f"{key} is missing")
    hidden = result["hidden_size"]
    heads = result["num_q_heads"]
    result.setdefault("mlp_size", 4 * hidden)
    if "embed_scale" in family.derived:
        result.setdefault("embed_scale", hidden**0.5)
    if "kv_rank" in result:  # latent attention: every head has its own key
        result.setdefault("q_rank", None)
    else:
        result.setdefault("num_kv_heads", heads)
        if "head_dim" not in result and hidden % heads:
            raise ValueError(
                f"hidden_size={hidden} must be a multiple of num_q_heads={heads}"
            )
        result.setdefault("head_dim", hidden // heads)
    for part in ("experts", "recurrence"):
        if names := [field for field in result if field.startswith(f"{part}.")]:
            result[part] = {
                field.removeprefix(f"{part}."): result.pop(field) for field in names
            }
    return result


def to_hf(config: ModelConfig) -> dict[str, object]:
    """Converts a configuration to a `config.json` that transformers 4 and 5 read.

    Raises:
      ValueError: the family cannot express a field; the message names the field.
    """
    family = FAMILIES[config.family]
    written: dict[str, object] = {}
    if config.activation in ACTIVATION_NAMES:
        written["activation"] = ACTIVATION_NAMES[config.activation][0]
    if config.recurrence is not None:
        name = config.recurrence.activation
        written["recurrence.activation"] = ACTIVATION_NAMES[name][0]
    if (experts := config.experts) is not None:
        is_grouped = experts.num_groups > 1
        written |= {
            "experts.dense_layers": [*range(experts.num_dense_layers)],
            "experts.num_shared": experts.shared_size // experts.size or None,
        }
        if "topk_method" in family.keys:
            method = "group_limited_greedy" if is_grouped else "greedy"
            written["experts.gate_bias"] = method
    if "kv_lora_rank" in family.keys:
        for name in ("latent", "experts"):
            if getattr(config, name) is None:
                raise ValueError(
                    f"{name}=None has no place in the config.json of "
                    f"family={config.family!r}"
                )
        written |= vars(config.latent)
    raw = {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{
            key: written[fields[0]]
            if fields[0] in written
            else _write_key(config, fields, form)
            for key, (fields, _, form) in family.keys.items()
            if (config.experts or not fields[0].startswith("experts."))
            and (config.recurrence or not fields[0].startswith("recurrence."))
        },
        **family.only_served,
        **family.only,
    }
    if family.has_optional_experts and config.experts is None:
        names = {x.fields[0]: key for key, x in family.keys.items()}
        raw[names[_NUM_EXPERTS]] = 0
    raw |= {key: raw[other] for key, other in family.equal.items()}
    if family.implied.get("positions") != "learned":
        raw |= positions.write_positions(family, config)
    if family.further_keys is not None:
        raw |= family.further_keys(config)
    # Reading it back verifies that the family can express every field.
    back = from_hf(raw)
    for name, value in vars(config).items():
        if getattr(back, name) != value:
            raise ValueError(
                f"{name}={value!r} has no place in the config.json of "
                f"family={config.family!r}, which means {getattr(back, name)!r}"
            )
    return raw


def _write_key(config: ModelConfig, fields: tuple[str, ...], form: KeyForm) -> object:
    """Returns the value of a key from the fields that it sets."""
    if form != "range":
        return _KEY_VALUES[form](operator.attrgetter(fields[0])(config))
    low, high = operator.attrgetter(*fields)(config)
    return [low, {"__float__": "Infinity"} if high is None else high]


_QUANTIZER_KEYS = {
    "config_groups",
    "global_compression_ratio",
    "ignore",
    "producer",
    "quant_algo",
    "quant_method",
    "quantization_status",
    "version",
}
"""Keys of quantizers whose content the tensors' names, shapes and types show."""
_QUANTIZERS = {
    "modelopt": ("quant_algo", ("FP8", "NVFP4")),
    "compressed-tensors": (
        "format",
        (
            "float-quantized",
            "int-quantized",
            "naive-quantized",
            "nvfp4-pack-quantized",
        ),
    ),
}
"""Key of the format, and the supported formats, by `quant_method`."""


def _is_supported(settings: object, *, has_mxfp4: bool) -> bool:
    """Returns True if `weights` reads weights of a `quantization_config`.

    Scales of activations have no effect: products take activations of the model's type.

    Args:
      settings: the value.
      has_mxfp4: True if the family has experts in MXFP4.

    Raises:
      ValueError: the method packs weights in another form.
    """
    if not isinstance(settings, Mapping):
        return False
    method = settings.get("quant_method")
    if method in ("gptq", "awq"):
        raise ValueError(
            f"quant_method={method!r} is not supported, only fp8 in blocks of 128 x "
            "128, mxfp4 of gpt-oss, modelopt and compressed-tensors"
        )
    if isinstance(method, str) and method in _QUANTIZERS:
        key, formats = _QUANTIZERS[method]
        used = {name for name, value in settings.items() if value not in (None, {}, [])}
        return settings.get(key) in formats and used <= _QUANTIZER_KEYS | {key}
    return _is_fp8(settings) or (has_mxfp4 and _is_mxfp4(settings))


def _is_fp8(settings: object) -> bool:
    """Returns True for weights in 8 bits with a scale for each block of 128 x 128.

    `weights` loads them as numbers of the model's dtype. `activation_scheme` concerns
    kernels that multiply in 8 bits.
    """
    needed = {"quant_method": "fp8", "weight_block_size": [values.FP8_BLOCK] * 2}
    supported_settings = {**needed, "fmt": "e4m3", "activation_scheme": "dynamic"}
    without_effect = {"modules_to_not_convert", "scale_fmt"}
    return (
        isinstance(settings, Mapping)
        and needed.keys() <= settings.keys()
        and all(
            key in without_effect
            or (key in supported_settings and settings[key] == supported_settings[key])
            for key in settings
        )
    )


def _is_mxfp4(settings: object) -> bool:
    """Returns True for weights in 4 bits, which `weights` loads as other numbers."""
    without_effect = {"quant_method", "modules_to_not_convert", "dequantize"}
    return (
        isinstance(settings, Mapping)
        and settings.get("quant_method") == "mxfp4"
        and settings.keys() <= without_effect
    )


def _read_groups(method: object) -> dict[str, int]:
    """Returns the groups of DeepSeek-V2's methods, where they differ from their keys.

    Raises:
      ValueError: the method is not supported.
    """
    if method in (None, "greedy"):
        return {"num_groups": 1, "top_groups": 1}
    if method != "group_limited_greedy":
        raise ValueError(
            f"topk_method={shorten(method)} is not supported, only greedy, "
            "group_limited_greedy"
        )
    return {}


def _family_of(raw: Mapping[str, object]) -> str:
    """Returns the family by architecture and model type, which must agree."""
    served = {name: family for name, family in FAMILIES.items() if family.servable}
    names = {family.architecture: name for name, family in served.items()}
    architectures = raw.get("architectures") or None
    if isinstance(architectures, list) and len(architectures) == 1:
        architectures = architectures[0]
    kind = raw.get("model_type")
    if architectures is None:
        architectures = kind
        names = {name: name for name in served}
    if not isinstance(architectures, str) or architectures not in names:
        raise ValueError(
            f"architecture {shorten(architectures)} is not supported, only those of "
            + ", ".join(served)
        )
    if kind not in (None, names[architectures]):
        raise ValueError(
            f"model_type={shorten(kind)} contradicts architecture {architectures!r}"
        )
    return names[architectures]


def text_part(raw: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the file of the language model in that of a model with images.

    Raises:
      ValueError: the two disagree about the output head.
    """
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        return raw
    for name, family in FAMILIES.items():
        if family.wrapper is None or raw.get("model_type") != family.wrapper:
            continue
        is_tied = raw.get("tie_word_embeddings", False)
        if text.get("tie_word_embeddings", is_tied) != is_tied:
            raise ValueError(
                f"tie_word_embeddings={shorten(is_tied)} contradicts that of "
                "text_config"
            )
        outer = {"architectures": [family.architecture], "tie_word_embeddings": is_tied}
        if "quantization_config" in raw:
            outer["quantization_config"] = raw["quantization_config"]
        return {"model_type": name, **text, **outer}
    return raw


def without_aliases(family: Family, raw: Mapping[str, object]) -> dict[str, object]:
    """Replaces aliases of keys, and other forms of keys, by the keys.

    Raises:
      ValueError: two names of one key have different values, or a key in another form
        is not supported.
    """
    raw = dict(raw)
    for alias, key in family.aliases.items():
        if (value := raw.pop(alias, None)) is None:
            continue
        if raw.get(key) not in (None, value):
            raise ValueError(
                f"{alias}={shorten(value)} contradicts {key}={shorten(raw[key])}"
            )
        raw[key] = value
    return raw if family.rewrite is None else family.rewrite(raw)


def refuse_other_values(
    family: Family, raw: Mapping[str, object], more: Mapping[str, object] | None = None
) -> None:
    """Checks keys of which only one value is supported.

    Args:
      family: its `only` and `equal` are checked.
      raw: a `config.json` without aliases.
      more: further keys, with the supported value.

    Raises:
      ValueError: a key has another value; the message has both values.
    """
    equal = {key: raw.get(other) for key, other in family.equal.items()}
    for key, supported in {**(more or {}), **family.only, **equal}.items():
        value = raw.get(key)
        if value is not None and (
            value != supported or type(value) is not type(supported)
        ):
            raise ValueError(
                f"{key}={shorten(value)} is not supported, only {shorten(supported)}"
            )


def _checked(key: str, field: str, value: object, high: int) -> object:
    """Returns a value converted to the type of its field."""
    if key == "topk_method":
        return value == "noaux_tc"
    if field not in ("activation", "recurrence.activation"):
        return values.parse_field(key, field, value, high)
    for activation, aliases in ACTIVATION_NAMES.items():
        if value in aliases:
            return activation
    names = ", ".join(name for names in ACTIVATION_NAMES.values() for name in names)
    raise ValueError(f"{key}={shorten(value)} is not supported, only {names}")
