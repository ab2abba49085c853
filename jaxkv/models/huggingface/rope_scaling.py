"""Reads and writes the scaling of rotary frequencies of a `config.json`."""

import math
from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import RopeScaling
from jaxkv.models.huggingface.family import Family
from jaxkv.models.huggingface.values import (
    parse_flag,
    parse_positive_number,
    parse_size,
    shorten,
)

ORIGINAL = "original_max_position_embeddings"
GROWTH = "llama_4_scaling_beta"
"""Keys of the length that is scaled, and of `ModelConfig.score_growth`."""

# Keys of `rope_scaling` and `rope_parameters`, by the kind.
_OF_ALL_ROPE = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_ROPE = {
    "default": _OF_ALL_ROPE,
    "linear": _OF_ALL_ROPE | {"factor"},
    "llama3": _OF_ALL_ROPE
    | {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL}
    | {"llama_4_scaling_beta"},
    "yarn": _OF_ALL_ROPE
    | {"factor", "beta_fast", "beta_slow", ORIGINAL}
    | {"mscale", "mscale_all_dim", "attention_factor", "truncate"}
    | {"llama_4_scaling_beta", "max_position_embeddings"},
    "proportional": _OF_ALL_ROPE | {"factor"},
    "longrope": _OF_ALL_ROPE
    | {"factor", "short_factor", "long_factor", "attention_factor", ORIGINAL},
}


def read_scaling(
    family: Family, settings: Mapping[str, object], rope: Mapping[str, Any]
) -> RopeScaling | None:
    """Returns the scaling of a type of layers."""
    kind = agreed({"rope_type": rope.get("rope_type"), "type": rope.get("type")})
    kind = "default" if kind is None else kind
    if kind in ("su", "yarn") and "longrope" in family.rope_kinds:
        kind = "longrope"
    if not isinstance(kind, str) or kind not in family.rope_kinds:
        supported = ", ".join(family.rope_kinds)
        raise ValueError(
            f"rope_type={shorten(kind)} is not supported, only {supported}"
        )
    for key, value in rope.items():
        if key not in _ROPE[kind] and key not in family.ignored_rope:
            raise ValueError(
                f"{key}={shorten(value)} has no effect with rope_type={kind!r}"
            )
    if kind == "default":
        is_read = ORIGINAL not in settings or "longrope" in family.rope_kinds
        if not is_read:
            raise ValueError(
                f"{ORIGINAL}={shorten(settings[ORIGINAL])} has no effect with "
                "rope_type='default'"
            )
        return None
    original = agreed(
        {f"{ORIGINAL} of the rotary object": rope.get(ORIGINAL)}
        | {ORIGINAL: settings.get(ORIGINAL)}
    )
    if kind == "longrope":
        return _read_longrope(settings, rope, original)
    if kind == "proportional":
        head_dim = parse_size("global_head_dim", settings["global_head_dim"])
        share = rope.get("partial_rotary_factor", 1.0)
        share = parse_positive_number("partial_rotary_factor", share)
        if share > 1:
            raise ValueError(f"partial_rotary_factor={share} must be at most 1")
        return RopeScaling(
            kind="proportional",
            factor=parse_positive_number("factor", rope.get("factor", 1.0)),
            num_pairs=int(share * head_dim // 2),
        )
    factor = rope.get("factor")
    positions = settings.get("max_position_embeddings")
    if kind == "yarn" and factor is None and original is not None:
        length = parse_size("max_position_embeddings", positions)
        factor = length / parse_size(ORIGINAL, original)
    factor = parse_positive_number("factor", factor)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        has_latent = "kv_lora_rank" in family.keys
        if original is None and not has_latent:
            original = positions
        return _read_yarn(rope, factor, original, has_latent=has_latent)
    original = positions if original is None else original
    low, high = (
        parse_positive_number(key, rope.get(key))
        for key in ("low_freq_factor", "high_freq_factor")
    )
    if low >= high:
        raise ValueError(f"low_freq_factor={low} must be below high_freq_factor={high}")
    return RopeScaling(
        factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_max_positions=parse_size(ORIGINAL, original),
    )


def _read_longrope(
    settings: Mapping[str, object], rope: Mapping[str, Any], original: object
) -> RopeScaling:
    """Reads the factors of sequences up to the original length, or the long ones.

    Source: Ding et al. 2024, arXiv:2402.13753; the magnitude, Phi-3's `config.json`
    and transformers.
    """
    positions = parse_size(
        "max_position_embeddings", settings.get("max_position_embeddings")
    )
    original = parse_size(ORIGINAL, 4096 if original is None else original, low=2)
    factors = {}
    for name in ("long_factor", "short_factor"):
        values = rope.get(name)
        if name in rope and (not isinstance(values, list) or not values):
            raise ValueError(f"{name}={shorten(values)} must be a list of numbers")
        factors[name] = tuple(parse_positive_number(name, x) for x in values or ())
    if not any(factors.values()):
        raise ValueError("long_factor is missing")
    is_short = bool(factors["short_factor"])
    factor = rope.get("factor", positions / original)
    factor = parse_positive_number("factor", factor)
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        growth = math.log(factor) / math.log(original)
        magnitude = math.sqrt(1 + growth) if factor > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_positions=original,
        magnitude=parse_positive_number("attention_factor", magnitude),
        factors=factors["short_factor"] if is_short else factors["long_factor"],
        long_factors=factors["long_factor"] if is_short else (),
        max_positions=original if is_short else None,
    )


def _read_yarn(
    rope: Mapping[str, object], factor: float, original: object, *, has_latent: bool
) -> RopeScaling:
    """Reads yarn's keys; `mscale_all_dim` scales scores of latent attention only.

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
        score_magnitude = score_magnitude if has_latent else 1.0
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


def write_scaling(scaling: RopeScaling) -> dict[str, object]:
    """Returns the keys that `read_scaling` reads."""
    rope: dict[str, object] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "yarn":
        rope |= _write_yarn(scaling)
    elif scaling.kind == "longrope":
        if scaling.max_positions:
            rope["short_factor"] = [*scaling.factors]
        rope |= {
            "long_factor": [*(scaling.long_factors or scaling.factors)],
            ORIGINAL: scaling.original_max_positions,
            "attention_factor": scaling.magnitude,
        }
    elif scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            ORIGINAL: scaling.original_max_positions,
        }
    return rope


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
        if s.magnitude == 1 and s.factor > 1:
            return raw | {"mscale": 1.0, "mscale_all_dim": 1.0}
        is_default = s.magnitude == _magnitude(s.factor)
        return raw if is_default else raw | {"attention_factor": s.magnitude}
    unit = _magnitude(s.factor) - 1 or math.inf
    # Rounded, so that 0.707 is 0.707 again; `to_hf` finds a value that this changes.
    return raw | {
        "mscale": round((s.magnitude * s.score_magnitude - 1) / unit, 12),
        "mscale_all_dim": round((s.score_magnitude - 1) / unit, 12),
    }


def _magnitude(factor: float, weight: float = 1.0) -> float:
    """Returns yarn's factor on queries and on keys.

    Source: Peng et al. 2023, arXiv:2309.00071, equation 22. The weight is DeepSeek's:
    `mscale` for the rotary features, relative to `mscale_all_dim` for all features.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


def agreed(values: Mapping[str, object]) -> object:
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
