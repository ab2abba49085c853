"""Reads and writes the position keys of a Hugging Face `config.json`.

These keys set the rotary frequencies and the sliding window.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import ModelConfig, RopeScaling
from jaxkv.models.huggingface.families import Family
from jaxkv.models.huggingface.values import (
    parse_flag,
    parse_positive_number,
    parse_size,
    shorten,
)

ORIGINAL = "original_max_position_embeddings"
ROPE_KEYS = frozenset(
    (
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "partial_rotary_factor",
        ORIGINAL,
        "layer_types",
        "sliding_window",
        "use_sliding_window",
    )
)
"""Keys that are read for families with rotary positions."""
WINDOW_KEYS = frozenset(("sliding_window", "max_window_layers"))
"""Keys without effect if there is no window."""

# Keys of `rope_scaling` and `rope_parameters`, by the kind.
_OF_ALL_ROPE = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_ROPE = {
    "default": _OF_ALL_ROPE,
    "linear": _OF_ALL_ROPE | {"factor"},
    "llama3": _OF_ALL_ROPE
    | {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL},
    "yarn": _OF_ALL_ROPE
    | {"factor", "beta_fast", "beta_slow", ORIGINAL}
    | {"mscale", "mscale_all_dim", "attention_factor", "truncate"},
}


def read_positions(
    family: Family, raw: Mapping[str, object], num_layers: int
) -> Mapping[str, RopeScaling | float | int | None]:
    """Reads rotary positions and the sliding window of a parsed `config.json`.

    Returns:
      Fields of `ModelConfig`.

    Raises:
      ValueError: a key is not supported; the message has the key, its value and the
        supported values.
    """
    settings = {key: value for key, value in raw.items() if value is not None}
    # In `rope_scaling` (old) or `rope_parameters` (transformers 5).
    rope_objects = {
        key: settings[key]
        for key in ("rope_scaling", "rope_parameters")
        if settings.get(key)
    }
    rope = _agreed(rope_objects)
    if rope is not None and not isinstance(rope, Mapping):
        raise ValueError(
            f"{next(iter(rope_objects))}={shorten(rope)} must be an object"
        )
    rope = {key: value for key, value in (rope or {}).items() if value is not None}
    kind = _agreed({"rope_type": rope.get("rope_type"), "type": rope.get("type")})
    kind = "default" if kind is None else kind
    if any(isinstance(value, Mapping) for value in rope.values()):
        kind = "one for each layer type"
    # Implementations of other families differ in the factor on scores.
    kinds = [name for name in _ROPE if name != "yarn" or "kv_lora_rank" in family.keys]
    if not isinstance(kind, str) or kind not in kinds:
        supported = ", ".join(kinds)
        raise ValueError(
            f"rope_type={shorten(kind)} is not supported, only {supported}"
        )
    given_original = {ORIGINAL: settings[ORIGINAL]} if ORIGINAL in settings else {}
    for key, value in (rope | given_original).items():
        if key not in _ROPE[kind]:
            raise ValueError(
                f"{key}={shorten(value)} has no effect with rope_type={kind!r}"
            )

    def from_either(key: str) -> object:
        # The value in the rotary object, in the file, or in both if they agree.
        rope_fields = {f"{key} of the rotary object": rope.get(key)}
        return _agreed(rope_fields | {key: settings.get(key)})

    part = from_either("partial_rotary_factor")
    if part not in (None, 1):
        raise ValueError(
            f"partial_rotary_factor={shorten(part)} is not supported, only 1.0"
        )
    theta = from_either("rope_theta")
    theta = parse_positive_number(
        "rope_theta", family.rope_theta if theta is None else theta
    )
    scaling = None
    if kind != "default":
        factor = parse_positive_number("factor", rope.get("factor"))
    if kind == "linear":
        scaling = RopeScaling(kind="linear", factor=factor)
    elif kind == "yarn":
        scaling = _read_yarn(rope, factor, from_either(ORIGINAL))
    elif kind == "llama3":
        original = from_either(ORIGINAL)
        if original is None:
            original = settings.get("max_position_embeddings")
        low, high = (
            parse_positive_number(key, rope.get(key))
            for key in ("low_freq_factor", "high_freq_factor")
        )
        if low >= high:
            raise ValueError(
                f"low_freq_factor={low} must be below high_freq_factor={high}"
            )
        scaling = RopeScaling(
            factor=factor,
            low_frequency_factor=low,
            high_frequency_factor=high,
            original_max_positions=parse_size(ORIGINAL, original),
        )
    window = _read_window(family, raw, num_layers)
    return {"rope_theta": theta, "rope_scaling": scaling, "window": window}


def write_positions(family: Family, config: ModelConfig) -> dict[str, object]:
    """Writes the keys that `read_positions` reads, with rotary keys in the older form.

    Both versions of transformers read that form. `to_hf` reads the keys back, which
    finds fields that they cannot express.
    """
    raw: dict[str, object] = {"rope_theta": config.rope_theta}
    raw["rope_scaling"] = None
    if (scaling := config.rope_scaling) is not None:
        raw["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "yarn":
            raw["rope_scaling"] |= _write_yarn(scaling)
        elif scaling.kind != "linear":
            raw["rope_scaling"] |= {
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                ORIGINAL: scaling.original_max_positions,
            }
    if family.windows == "always":
        raw["sliding_window"] = config.window
    elif family.windows == "flagged" and config.window is not None:
        raw |= {"use_sliding_window": True, "sliding_window": config.window}
        raw["max_window_layers"] = 0
    return raw


def _magnitude(factor: float, weight: float = 1.0) -> float:
    """Returns yarn's factor on queries and on keys.

    Source: Peng et al. 2023, arXiv:2309.00071, equation 22. The weight is DeepSeek's:
    `mscale` for the rotary features, relative to `mscale_all_dim` for all features.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


def _read_yarn(
    rope: Mapping[str, object], factor: float, original: object
) -> RopeScaling:
    """Reads yarn's keys.

    Raises:
      ValueError: a value is invalid, or one for which DeepSeek's implementation and
        transformers differ.
    """
    fast, slow = (
        parse_positive_number(key, rope.get(key, default))
        for key, default in (("beta_fast", 32), ("beta_slow", 1))
    )
    if slow >= fast:
        raise ValueError(f"beta_slow={slow} must be below beta_fast={fast}")
    weights = {
        key: rope[key]
        for key in ("mscale", "mscale_all_dim")
        if rope.get(key) or (key == "mscale" and key in rope)
    }
    if len(weights) == 1:
        [(key, value)] = weights.items()
        raise ValueError(
            f"{key}={shorten(value)} is not supported without the other one of mscale "
            "and mscale_all_dim"
        )
    magnitude = rope.get("attention_factor")
    score_magnitude = 1.0
    if weights:
        if magnitude is not None:
            raise ValueError(
                f"attention_factor={shorten(magnitude)} contradicts "
                f"mscale={shorten(weights['mscale'])}"
            )
        score_scale, score_magnitude = (
            _magnitude(factor, parse_positive_number(key, value))
            for key, value in weights.items()
        )
        magnitude = score_scale / score_magnitude
    elif magnitude is None:
        magnitude = _magnitude(factor)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        low_frequency_factor=slow,
        high_frequency_factor=fast,
        original_max_positions=parse_size(ORIGINAL, original),
        magnitude=parse_positive_number("attention_factor", magnitude),
        truncate=parse_flag("truncate", rope.get("truncate", True)),
        score_magnitude=score_magnitude,
    )


def _write_yarn(scaling: RopeScaling) -> dict[str, float]:
    """Returns the keys that `_read_yarn` reads."""
    s = scaling
    raw = {
        "beta_fast": s.high_frequency_factor,
        "beta_slow": s.low_frequency_factor,
        ORIGINAL: s.original_max_positions,
    }
    if not s.truncate:
        raw["truncate"] = False
    if s.score_magnitude == 1:
        is_default = s.magnitude == _magnitude(s.factor)
        return raw if is_default else raw | {"attention_factor": s.magnitude}
    unit = _magnitude(s.factor) - 1 or math.inf
    # Rounded, so that 0.707 is 0.707 again; `to_hf` finds a value that this changes.
    return raw | {
        "mscale": round((s.magnitude * s.score_magnitude - 1) / unit, 12),
        "mscale_all_dim": round((s.score_magnitude - 1) / unit, 12),
    }


def _agreed(values: Mapping[str, object]) -> object:
    """Returns the value that several names have, None if there is none.

    Raises:
      ValueError: two names have different values.
    """
    settings = {name: value for name, value in values.items() if value is not None}
    if len(settings) == 2:
        (a, first), (b, second) = settings.items()
        if first != second:
            raise ValueError(f"{a}={shorten(first)} contradicts {b}={shorten(second)}")
    return next(iter(settings.values()), None)


def _read_window(
    family: Family, raw: Mapping[str, object], num_layers: int
) -> int | None:
    """Returns the sliding window if all layers have it, None if no layer has it.

    Raises:
      ValueError: only some layers have a window, or keys contradict each other.
    """
    window = raw.get("sliding_window", family.default_window)  # a null is no window
    wanted = raw.get("use_sliding_window")
    wanted = None if wanted is None else parse_flag("use_sliding_window", wanted)
    if family.windows in ("never", "off"):
        if wanted:
            raise ValueError("use_sliding_window=True is not supported, only False")
        if window is not None and wanted is None and family.windows == "never":
            raise ValueError(
                f"sliding_window={shorten(window)} is not supported, only null"
            )
        window = None
    elif family.windows == "flagged":
        window = window if wanted else None
    elif wanted is not None and wanted != (window is not None):
        raise ValueError(
            f"use_sliding_window={wanted} contradicts sliding_window={shorten(window)}"
        )
    num_sliding = _num_sliding(family, raw, num_layers, window is not None)
    if window is None or num_sliding == 0:
        return None
    if num_sliding != num_layers:
        raise ValueError(
            f"a sliding window in {num_sliding} of {num_layers} layers is not "
            "supported, only in all of them or in none"
        )
    return parse_size("sliding_window", window)


def _num_sliding(
    family: Family, raw: Mapping[str, Any], num_layers: int, has_window: bool
) -> int:
    """Returns the number of layers with a sliding window, if there is a window."""
    first = raw.get("max_window_layers", 28) if family.windows == "flagged" else 0
    if has_window and (type(first) is not int or first < 0):
        raise ValueError(f"max_window_layers={shorten(first)} must be a whole number")
    kinds = raw.get("layer_types")
    if kinds is None:
        return max(num_layers - first, 0) if has_window else 0
    names = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in names for kind in kinds):
        raise ValueError(
            f"layer_types={shorten(kinds)} must be a list of {' and '.join(names)}"
        )
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {num_layers}")
    num_sliding = kinds.count("sliding_attention")
    if not has_window and num_sliding:
        raise ValueError(
            f"layer_types names {num_sliding} layers of sliding_attention, but there "
            "is no sliding window"
        )
    if has_window and family.windows == "always" and num_sliding != num_layers:
        raise ValueError(
            f"layer_types names {num_sliding} layers of sliding_attention, but "
            f"{family.architecture} has a sliding window in all {num_layers}"
        )
    return num_sliding
