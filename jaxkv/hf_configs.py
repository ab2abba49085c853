"""Hugging Face's `config.json` to our `ModelConfig` and back.

What the arithmetic of `models.py` does not cover is refused by name: a model that loads
is a model that computes the same.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv import hf_mixtures
from jaxkv.hf_families import FAMILIES
from jaxkv.model_configs import ModelConfig, RopeScaling

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
    given = {key: value for key, value in raw.items() if value is not None}
    for key in ("quantization_config", "compression_config"):
        if key in given:
            raise ValueError(f"{key} is not supported, only f32, bf16 and f16 weights")
    only = dict(family.only)
    if name == "opt":
        only["word_embed_proj_dim"] = given.get("hidden_size")
    for key, supported in only.items():
        if given.get(key, supported) != supported:
            raise ValueError(
                f"{key}={given[key]!r} is not supported, only {supported!r}"
            )
    ours: dict[str, Any] = {**family.implied, "family": name}
    for key, fields in family.keys.items():
        if (value := given.get(key, family.defaults.get(key))) is not None:
            ours |= dict.fromkeys(fields, _checked(key, fields[0], value))
    for key, fields in family.keys.items():
        if fields[0] not in ours and fields[0] not in family.derived:
            raise ValueError(f"{key} is missing")
    _derive(ours)
    if ours.get("positions") != "learned":
        ours |= _read_rope(given, family.rope_theta)
        ours["window"] = _read_window(name, raw, ours["num_layers"])
    experts = hf_mixtures.read(family, given, ours["num_layers"])
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
    raw |= hf_mixtures.write(family, config)
    for key, fields in family.keys.items():
        if fields == ("activation",):
            raw[key] = ACTIVATIONS[config.activation][0]
    if config.family == "opt":
        raw["word_embed_proj_dim"] = config.hidden_size
    elif config.family != "gpt2":
        raw |= _write_rope(config) | _write_window(config)
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
    """Finds the family by architecture; by model type only where there is none."""
    names = {family.architecture: name for name, family in FAMILIES.items()}
    supported = ", ".join(names)
    found = raw.get("architectures") or None
    if isinstance(found, list):
        found = found[0]
    elif found is None:
        found = raw.get("model_type")
        names = {name: name for name in FAMILIES}
    if not isinstance(found, str) or found not in names:
        raise ValueError(f"architecture {found!r} is not supported, only {supported}")
    return names[found]


def _checked(key: str, field: str, value: Any) -> Any:
    """Returns a value that has the type its field needs."""
    if field in ("tie_embeddings", "qkv_bias", "mlp_bias"):
        if type(value) is not bool:
            raise ValueError(f"{key}={value!r} must be true or false")
        return value
    if field == "activation":
        for ours, theirs in ACTIVATIONS.items():
            if value in theirs:
                return ours
        names = ", ".join(name for names in ACTIVATIONS.values() for name in names)
        raise ValueError(f"{key}={value!r} is not supported, only {names}")
    if field == "norm_eps":
        return _number(key, value)
    return hf_mixtures.checked_size(key, value)


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{key}={value!r} must be a number above 0")
    return float(value)


def _derive(ours: dict[str, Any]) -> None:
    """Fills in the sizes that follow from others."""
    hidden, heads = ours["hidden_size"], ours["num_q_heads"]
    ours.setdefault("num_kv_heads", heads)
    ours.setdefault("mlp_size", 4 * hidden)
    if "head_dim" not in ours:
        if hidden % heads:
            raise ValueError(f"hidden size {hidden} must be a multiple of {heads=}")
        ours["head_dim"] = hidden // heads


def _read_rope(given: Mapping[str, Any], base: float) -> dict[str, Any]:
    """Rotary positions: `rope_scaling` (old) or `rope_parameters` (transformers 5)."""
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters={rope!r} must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        kind = "one for each layer type"
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type={kind!r} is not supported, only default, llama3")
    part = rope.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
    if part != 1.0:
        raise ValueError(f"partial_rotary_factor={part!r} is not supported, only 1.0")
    theta = rope.get("rope_theta", given.get("rope_theta", base))
    if kind == "default":
        return {"rope_theta": _number("rope_theta", theta)}
    original = "original_max_position_embeddings"
    scaling = RopeScaling(
        factor=_number("factor", rope.get("factor")),
        low_frequency_factor=_number("low_freq_factor", rope.get("low_freq_factor")),
        high_frequency_factor=_number("high_freq_factor", rope.get("high_freq_factor")),
        original_max_positions=hf_mixtures.checked_size(
            original, rope.get(original, given.get("max_position_embeddings"))
        ),
    )
    if scaling.low_frequency_factor >= scaling.high_frequency_factor:
        raise ValueError(
            f"low_freq_factor={scaling.low_frequency_factor} must be below "
            f"high_freq_factor={scaling.high_frequency_factor}"
        )
    return {"rope_theta": _number("rope_theta", theta), "rope_scaling": scaling}


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    """The older of the two forms, which both versions read."""
    scaling = config.rope_scaling
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        },
    }


def _read_window(name: str, raw: Mapping[str, Any], num_layers: int) -> int | None:
    """The sliding window, if all layers have it; some but not all are refused."""
    window, first = raw.get("sliding_window"), 0
    if name == "mistral":
        window = raw.get("sliding_window", 4096)  # a null is no window
    elif name != "mixtral" and not raw.get("use_sliding_window"):
        window = None
    elif name != "mixtral":
        first = raw.get("max_window_layers", 28)
    if window is None:
        return None
    if type(first) is not int or first < 0:
        raise ValueError(f"max_window_layers={first!r} must be a whole number")
    num_sliding = max(num_layers - first, 0)
    if isinstance(kinds := raw.get("layer_types"), list):
        num_sliding = kinds.count("sliding_attention")
    if num_sliding == 0:
        return None
    if num_sliding != num_layers:
        raise ValueError(
            f"a sliding window in {num_sliding} of {num_layers} layers is not "
            "supported, only in all of them or in none"
        )
    return hf_mixtures.checked_size("sliding_window", window)


def _write_window(config: ModelConfig) -> dict[str, Any]:
    if config.family in ("mistral", "mixtral"):
        return {"sliding_window": config.window}
    if config.family == "llama" or config.window is None:
        return {}
    return {
        "use_sliding_window": True,
        "sliding_window": config.window,
        "max_window_layers": 0,
    }
