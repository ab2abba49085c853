"""Reads and writes the position keys of a Hugging Face `config.json`.

These keys set the rotary frequencies and the sliding window.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import AttentionKind, ModelConfig, RopeScaling
from jaxkv.models.huggingface.family import Family
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
        "sliding_window_pattern",
        "_sliding_window_pattern",
    )
)
"""Keys that are read for families with rotary positions."""
WINDOW_KEYS = frozenset(("sliding_window", "max_window_layers"))
"""Keys without effect if there is no window."""
FULL = "full_attention"
SLIDING = "sliding_attention"
"""Hugging Face's names of layers, without and with a window."""

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
    "longrope": _OF_ALL_ROPE
    | {"factor", "short_factor", "long_factor", "attention_factor", ORIGINAL},
}
_GROWTH = "llama_4_scaling_beta"


def read_positions(
    family: Family, raw: Mapping[str, object], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads rotary positions and the sliding windows of a parsed `config.json`.

    Args:
      family: entry of the family.
      raw: the file, without aliases.
      fields: fields that the other keys set.

    Returns:
      Fields of `ModelConfig`.

    Raises:
      ValueError: a key is not supported; the message has the key, its value and the
        supported values.
    """
    settings = {key: value for key, value in raw.items() if value is not None}
    for alias, key in family.rope_aliases.items():
        if (value := settings.pop(alias, None)) is not None:
            settings[key] = _agreed({alias: value, key: settings.get(key)})
    if "rotary_dim" in family.position_keys and "rotary_dim" in settings:
        size = parse_size("rotary_dim", settings["rotary_dim"])
        settings.setdefault("partial_rotary_factor", size / fields["head_dim"])
    windows = read_windows(family, raw, fields["num_layers"])
    has_rope = _read_rotary_layers(family, settings, fields["num_layers"])
    layers = [*zip(windows, has_rope, strict=True)]
    by_type = _split_rope(family, settings)
    kinds: dict[tuple[int | None, bool], AttentionKind] = {}
    shares = set()
    growth = set()
    for window, rotary in layers:
        if (window, rotary) in kinds:
            continue
        kind = SLIDING if window is not None and SLIDING in by_type else FULL
        rope = by_type[kind]
        kinds[window, rotary] = AttentionKind(
            window=window,
            positions="rope" if rotary else "none",
            rope_theta=parse_positive_number("rope_theta", rope["rope_theta"]),
            rope_scaling=_read_scaling(family, settings, rope),
        )
        shares.add(_read_share(family, rope, fields["head_dim"]))
        growth.add(rope.get(_GROWTH))
    if len(shares) > 1 or len(growth) > 1:
        raise ValueError("rope_parameters must not differ in the rotary part of a head")
    # Kind 0 has all tokens and positions, if a layer has.
    order = sorted(kinds, key=lambda key: (key[0] is not None, not key[1]))
    numbers = tuple(order.index(layer) for layer in layers)
    first, *others = (kinds[key] for key in order)
    [share] = shares
    [beta] = growth
    size = int(fields["head_dim"] * share)
    return {
        **vars(first),
        "other_attention": tuple(others),
        "attention_pattern": _period_of(numbers),
        "rotary_size": None if size == fields["head_dim"] else size,
        "score_growth": None if beta is None else parse_positive_number(_GROWTH, beta),
    }


def _period_of(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shortest pattern whose repetition begins with these numbers."""
    size = len(numbers)
    for period in range(1, size):
        if all(numbers[i] == numbers[i % period] for i in range(size)):
            return numbers[:period]
    return numbers


def _split_rope(
    family: Family, settings: Mapping[str, object]
) -> dict[str, dict[str, Any]]:
    """Returns the rotary keys of each type of layers, with their theta.

    They are in `rope_scaling` (old) or `rope_parameters` (transformers 5), or in the
    file.
    """
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
    rope = rope or (None if "rope_theta" in settings else family.rope) or {}
    local = {"rope_theta": settings.get("rope_local_base_freq", family.local_theta)}
    names = {FULL, SLIDING} if family.local_theta else set()
    if nested := {*rope} & names:
        if {*rope} - names:
            raise ValueError(
                f"{shorten(min({*rope} - names))} is not supported in rope_parameters "
                f"with {min(nested)}"
            )
        parts = {name: rope.get(name) or {} for name in names}
    elif family.local_theta:
        # Scaling concerns layers without a window.
        if "rope_parameters" in rope_objects:
            raise ValueError(
                f"rope_parameters={shorten(rope)} must have {FULL} and {SLIDING}"
            )
        parts = {FULL: rope, SLIDING: {}}
    else:
        parts = {FULL: rope}
    result = {}
    for name, part in parts.items():
        if not isinstance(part, Mapping) or any(
            isinstance(value, Mapping) for value in part.values()
        ):
            raise ValueError(
                f"rope_parameters={shorten(rope)}: rotary keys of each layer type are "
                f"not supported for {family.architecture}"
            )
        keys = {key: value for key, value in part.items() if value is not None}
        place = name if len(parts) > 1 else "the rotary object"
        sources = {f"rope_theta of {place}": keys.get("rope_theta")}
        if name == FULL:
            sources["rope_theta"] = settings.get("rope_theta")
        theta = _agreed(sources)
        if theta is None:
            theta = family.rope_theta if name == FULL else local["rope_theta"]
        if "partial_rotary_factor" in settings:
            key = "partial_rotary_factor"
            share = _agreed({f"{key} of {place}": keys.get(key), key: settings[key]})
            keys[key] = share
        if len(parts) > 1 and keys.get("truncate") is False:
            # transformers reads it outside of the layer types only.
            raise ValueError(f"truncate=False is not supported in {name}, only true")
        result[name] = {**keys, "rope_theta": theta}
    return result


def _read_share(family: Family, rope: Mapping[str, Any], head_dim: int) -> float:
    """Returns the rotary part of a head."""
    share = rope.get("partial_rotary_factor", family.rope_share)
    share = parse_positive_number("partial_rotary_factor", share)
    if share != 1 and not family.has_partial_rope:
        raise ValueError(
            f"partial_rotary_factor={shorten(share)} is not supported, only 1.0"
        )
    if share > 1 or int(head_dim * share) < 1:
        raise ValueError(
            f"partial_rotary_factor={share} must be at most 1, and at least "
            f"1 / head_dim = {1 / head_dim:.3g}"
        )
    return share


def _read_scaling(
    family: Family, settings: Mapping[str, object], rope: Mapping[str, Any]
) -> RopeScaling | None:
    """Returns the scaling of a type of layers."""
    kind = _agreed({"rope_type": rope.get("rope_type"), "type": rope.get("type")})
    kind = "default" if kind is None else kind
    if kind in ("su", "yarn") and "longrope" in family.rope_kinds:
        kind = "longrope"
    if not isinstance(kind, str) or kind not in family.rope_kinds:
        supported = ", ".join(family.rope_kinds)
        raise ValueError(
            f"rope_type={shorten(kind)} is not supported, only {supported}"
        )
    for key, value in rope.items():
        if key not in _ROPE[kind]:
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
    original = _agreed(
        {f"{ORIGINAL} of the rotary object": rope.get(ORIGINAL)}
        | {ORIGINAL: settings.get(ORIGINAL)}
    )
    if kind == "longrope":
        return _read_longrope(settings, rope, original)
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


def _read_rotary_layers(
    family: Family, settings: Mapping[str, Any], num_layers: int
) -> list[bool]:
    """Returns the mask of the layers with rotary positions."""
    if "no_rope_layers" not in family.position_keys:
        return [True] * num_layers
    period = parse_size(
        "no_rope_layer_interval", settings.get("no_rope_layer_interval", 4)
    )
    mask = settings.get("no_rope_layers")
    if mask is None:
        return [bool((layer + 1) % period) for layer in range(num_layers)]
    if not isinstance(mask, list) or any(x not in (0, 1) for x in mask):
        raise ValueError(f"no_rope_layers={shorten(mask)} must be a list of 0 and 1")
    if len(mask) != num_layers:
        raise ValueError(f"no_rope_layers has {len(mask)} entries, not {num_layers}")
    return [bool(x) for x in mask]


def write_positions(family: Family, config: ModelConfig) -> dict[str, object]:
    """Writes the keys that `read_positions` reads.

    Rotary keys have the older form, which both versions of transformers read, unless
    types of layers have keys of their own. `to_hf` reads the keys back, which finds
    fields that they cannot express.
    """
    raw: dict[str, object] = {}
    kinds = config.attention_kinds
    if family.local_theta:
        local = [kind for kind in kinds if kind.window is not None] or kinds
        raw["rope_parameters"] = {
            FULL: _write_rope(kinds[0], config),
            SLIDING: _write_rope(local[0], config),
        }
    elif config.score_growth is not None or len(config.rotary_kinds) < len(kinds):
        raw["rope_parameters"] = _write_rope(config.rotary_kinds[0], config)
    else:
        rope = _write_rope(kinds[0], config)
        raw["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        raw["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        if family.rope_kinds[-1] == "longrope" and raw["rope_scaling"]:
            raw[ORIGINAL] = rope[ORIGINAL]
    layers = range(config.num_layers)
    if "no_rope_layers" in family.position_keys:
        rotary = [kinds[config.kind_of(x)].positions == "rope" for x in layers]
        raw["no_rope_layers"] = [int(x) for x in rotary]
    windows = config.windows
    sizes = {window for window in windows if window is not None}
    has_types = family.windows in ("even", "pattern", "listed")
    if has_types or len({*windows}) > 1:
        raw["layer_types"] = [FULL if x is None else SLIDING for x in windows]
    if family.windows in ("always", "even", "pattern"):
        raw["sliding_window"] = min(sizes, default=None)
    elif sizes and family.windows in ("flagged", "listed", "nope"):
        raw |= {"use_sliding_window": True, "sliding_window": min(sizes)}
        if family.windows == "flagged":
            raw["max_window_layers"] = windows.index(min(sizes))
    return raw


def _write_rope(kind: AttentionKind, config: ModelConfig) -> dict[str, object]:
    """Returns the rotary keys of layers of a kind."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": kind.rope_theta}
    if config.rotary_size is not None:
        rope["partial_rotary_factor"] = config.rotary_size / config.head_dim
    if config.score_growth is not None:
        rope[_GROWTH] = config.score_growth
    if (scaling := kind.rope_scaling) is None:
        return rope
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
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
    elif scaling.kind != "linear":
        rope |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            ORIGINAL: scaling.original_max_positions,
        }
    return rope


def _magnitude(factor: float, weight: float = 1.0) -> float:
    """Returns yarn's factor on queries and on keys.

    Source: Peng et al. 2023, arXiv:2309.00071, equation 22. The weight is DeepSeek's:
    `mscale` for the rotary features, relative to `mscale_all_dim` for all features.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


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


def read_windows(
    family: Family, raw: Mapping[str, Any], num_layers: int
) -> list[int | None]:
    """Returns the sliding window of every layer, None for all tokens.

    Raises:
      ValueError: keys contradict each other, or the family has no window.
    """
    window = raw.get("sliding_window", family.default_window)  # a null is no window
    wanted = raw.get("use_sliding_window")
    wanted = None if wanted is None else parse_flag("use_sliding_window", wanted)
    rule = family.windows
    is_listed = rule == "listed" and raw.get("layer_types") is not None
    if rule in ("never", "off", "listed") and not (is_listed and wanted):
        if wanted:
            raise ValueError("use_sliding_window=True is not supported, only False")
        if window is not None and wanted is None and rule == "never":
            raise ValueError(
                f"sliding_window={shorten(window)} is not supported, only null"
            )
        window = None
    elif rule in ("flagged", "nope", "listed"):
        window = window if wanted else None
    elif wanted is not None and wanted != (window is not None):
        raise ValueError(
            f"use_sliding_window={wanted} contradicts sliding_window={shorten(window)}"
        )
    slides = _read_sliding_layers(family, raw, num_layers, window is not None)
    if window is None or not any(slides):
        return [None] * num_layers
    window = parse_size("sliding_window", window)
    return [window if mask else None for mask in slides]


def _read_sliding_layers(
    family: Family, raw: Mapping[str, Any], num_layers: int, has_window: bool
) -> list[bool]:
    """Returns the mask of the layers with a sliding window, if there is a window."""
    rule = family.windows
    first = raw.get("max_window_layers", 28) if rule == "flagged" else 0
    if has_window and (type(first) is not int or first < 0):
        raise ValueError(f"max_window_layers={shorten(first)} must be a whole number")
    kinds = raw.get("layer_types")
    layers = range(num_layers)
    if kinds is None:
        if not has_window:
            return [False] * num_layers
        if rule == "nope":
            return [not mask for mask in _read_rotary_layers(family, raw, num_layers)]
        period = family.window_period
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            if rule == "pattern" and raw.get(key) is not None:
                period = parse_size(key, raw[key])
        period = {"pattern": period, "even": 2}.get(rule)
        return [x >= first and (period is None or (x + 1) % period > 0) for x in layers]
    names = (FULL, SLIDING)
    if not isinstance(kinds, list) or any(kind not in names for kind in kinds):
        raise ValueError(
            f"layer_types={shorten(kinds)} must be a list of {' and '.join(names)}"
        )
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers of {num_layers}")
    num_sliding = kinds.count(SLIDING)
    if not has_window and num_sliding:
        raise ValueError(
            f"layer_types names {num_sliding} layers of {SLIDING}, but there "
            "is no sliding window"
        )
    if has_window and rule == "always" and num_sliding != num_layers:
        raise ValueError(
            f"layer_types names {num_sliding} layers of {SLIDING}, but "
            f"{family.architecture} has a sliding window in all {num_layers}"
        )
    return [kind == SLIDING for kind in kinds]
