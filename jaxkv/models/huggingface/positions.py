"""Reads and writes the position keys of a Hugging Face `config.json`.

These keys set the rotary frequencies and the sliding window.
"""

from collections.abc import Mapping
from typing import Any

from jaxkv.models.config import AttentionKind, ModelConfig
from jaxkv.models.huggingface.family import Family
from jaxkv.models.huggingface.rope_scaling import (
    GROWTH,
    ORIGINAL,
    agreed,
    read_scaling,
    write_scaling,
)
from jaxkv.models.huggingface.values import (
    parse_positive_number,
    parse_size,
    shorten,
)
from jaxkv.models.huggingface.windows import (
    FEED_FORWARD,
    FULL,
    RECURRENT,
    SLIDING,
    FeedForward,
    read_feed_forward_layers,
    read_recurrent_layers,
    read_rotary_layers,
    read_windows,
)

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
_MODEL_FIELDS = "window", "positions", "rope_theta", "rope_scaling"
"""Fields of the first kind of attention, which are those of the model."""


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
            settings[key] = agreed({alias: value, key: settings.get(key)})
    if "rotary_dim" in family.position_keys and "rotary_dim" in settings:
        size = parse_size("rotary_dim", settings["rotary_dim"])
        settings.setdefault("partial_rotary_factor", size / fields["head_dim"])
    windows = read_windows(family, raw, fields["num_layers"])
    has_rope = read_rotary_layers(family, settings, fields["num_layers"])
    recurrent = read_recurrent_layers(family, raw, fields["num_layers"])
    branches = read_feed_forward_layers(family, raw, fields["num_layers"])
    layers = [*zip(branches, recurrent, windows, has_rope, strict=True)]
    by_type = _split_rope(family, settings)
    kinds: dict[tuple[FeedForward | None, bool, int | None, bool], AttentionKind] = {}
    shares = set()
    growth = set()
    for layer in layers:
        branch, is_recurrent, window, rotary = layer
        if layer in kinds:
            continue
        if branch is not None:
            kinds[layer] = AttentionKind(positions="none", feed_forward=branch)
            continue
        if is_recurrent:
            places = family.recurrent_norm_places
            kinds[layer] = AttentionKind(
                positions="none", norm_places=places, is_recurrent=True
            )
            continue
        kind = SLIDING if window is not None and SLIDING in by_type else FULL
        rope = by_type[kind]
        kinds[layer] = AttentionKind(
            window=window,
            positions="rope" if rotary else "none",
            rope_theta=parse_positive_number("rope_theta", rope["rope_theta"]),
            rope_scaling=read_scaling(family, settings, rope),
        )
        shares.add(_read_share(family, rope, fields["head_dim"]))
        growth.add(rope.get(GROWTH))
    if len(shares) > 1 or len(growth) > 1:
        raise ValueError("rope_parameters must not differ in the rotary part of a head")
    # Kind 0 has attention, and all tokens and positions, if a layer has.
    order = sorted(
        kinds, key=lambda key: (key[0] or "", key[1], key[2] is not None, not key[3])
    )
    numbers = tuple(order.index(layer) for layer in layers)
    first, *others = (kinds[key] for key in order)
    [share] = shares
    [beta] = growth
    size = int(fields["head_dim"] * share)
    return {
        **{name: getattr(first, name) for name in _MODEL_FIELDS},
        "other_attention": tuple(others),
        "attention_pattern": _period_of(numbers),
        "rotary_size": None if size == fields["head_dim"] else size,
        "score_growth": None if beta is None else parse_positive_number(GROWTH, beta),
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
    rope = agreed(rope_objects)
    if rope is not None and not isinstance(rope, Mapping):
        raise ValueError(
            f"{next(iter(rope_objects))}={shorten(rope)} must be an object"
        )
    if family.rope and not rope and "rope_theta" in settings:
        raise ValueError(
            f"rope_theta={shorten(settings['rope_theta'])} is not supported without "
            "rope_parameters: versions of transformers differ in its scaling"
        )
    rope = rope or family.rope or {}
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
        theta = agreed(sources)
        if theta is None:
            theta = family.rope_theta if name == FULL else local["rope_theta"]
        if "partial_rotary_factor" in settings:
            key = "partial_rotary_factor"
            share = agreed({f"{key} of {place}": keys.get(key), key: settings[key]})
            keys[key] = share
        if len(parts) > 1 and keys.get("truncate") is False:
            # transformers reads it outside of the layer types only.
            raise ValueError(f"truncate=False is not supported in {name}, only true")
        result[name] = {**keys, "rope_theta": theta}
    return result


def _read_share(family: Family, rope: Mapping[str, Any], head_dim: int) -> float:
    """Returns the rotary part of a head."""
    if rope.get("rope_type") == "proportional":  # pairs that do not turn
        return 1.0
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
            FULL: _write_rope(family, kinds[0], config),
            SLIDING: _write_rope(family, local[0], config),
        }
    elif family.implied.get("positions") == "none":
        pass
    elif config.score_growth is not None or len(config.rotary_kinds) < len(kinds):
        kind = (config.rotary_kinds or kinds)[0]
        raw["rope_parameters"] = _write_rope(family, kind, config)
    else:
        rope = _write_rope(family, kinds[0], config)
        raw["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        raw["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        if family.rope and raw["rope_scaling"] is None:  # not the family's scaling
            raw["rope_parameters"] = _write_rope(family, kinds[0], config)
        if family.rope_kinds[-1] == "longrope" and raw["rope_scaling"]:
            raw[ORIGINAL] = rope[ORIGINAL]
    layers = range(config.num_layers)
    if "no_rope_layers" in family.position_keys:
        rotary = [kinds[config.kind_of(x)].positions == "rope" for x in layers]
        raw["no_rope_layers"] = [int(x) for x in rotary]
    if family.has_recurrence:
        names = {branch: name for name, branch in FEED_FORWARD.items()}
        raw[family.layer_types_key] = [
            RECURRENT if kind.is_recurrent else names.get(kind.feed_forward, FULL)
            for kind in (kinds[config.kind_of(x)] for x in layers)
        ]
        return raw
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


def _write_rope(
    family: Family, kind: AttentionKind, config: ModelConfig
) -> dict[str, object]:
    """Returns the rotary keys of layers of a kind."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": kind.rope_theta}
    size = config.rotary_size or config.head_dim
    if size != config.head_dim or family.rope_share != 1:
        rope["partial_rotary_factor"] = size / config.head_dim
    if config.score_growth is not None:
        rope[GROWTH] = config.score_growth
    if kind.rope_scaling is not None:
        rope |= write_scaling(kind.rope_scaling)
    return rope
