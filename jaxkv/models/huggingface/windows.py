"""Reads the keys of a Hugging Face `config.json` that differ by layer.

They are sliding windows, and layers without positions.
"""

from collections.abc import Mapping
from typing import Any, Literal

from jaxkv import validation
from jaxkv.models.huggingface.family import Family
from jaxkv.models.huggingface.values import (
    MAX_LAYERS,
    parse_flag,
    parse_size,
    shorten,
)

WINDOW_KEYS = frozenset(("sliding_window", "max_window_layers"))
"""Keys without effect if there is no window."""
FULL = "full_attention"
SLIDING = "sliding_attention"
"""Hugging Face's names of layers, without and with a window."""
type FeedForward = Literal["mlp", "experts"]
RECURRENT = "linear_attention"
"""Hugging Face's name of recurrent layers."""
FEED_FORWARD: Mapping[str, FeedForward] = {"mlp": "mlp", "moe": "experts"}
"""Hugging Face's name of layers without attention -> `AttentionKind.feed_forward`."""


@validation.checks_numbers(num_layers=(1, MAX_LAYERS + 1))
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
            return [not mask for mask in read_rotary_layers(family, raw, num_layers)]
        period = family.window_period
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            if rule == "pattern" and raw.get(key) is not None:
                period = parse_size(key, raw[key])
        period = {"pattern": period, "even": 2}.get(rule)
        return [x >= first and (period is None or (x + 1) % period > 0) for x in layers]
    names = [FULL, RECURRENT if family.has_recurrence else SLIDING]
    if family.has_single_branches:
        names += FEED_FORWARD
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


def read_recurrent_layers(
    family: Family, raw: Mapping[str, Any], num_layers: int
) -> list[bool]:
    """Returns the mask of the recurrent layers; `read_windows` checks their list.

    Raises:
      ValueError: all layers are recurrent, or the list is missing.
    """
    if not family.has_recurrence:
        return [False] * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        raise ValueError("layer_types is missing")
    if FULL not in kinds:
        raise ValueError(f"layer_types={shorten(kinds)} must have a layer of {FULL}")
    return [kind == RECURRENT for kind in kinds]


def read_feed_forward_layers(
    family: Family, raw: Mapping[str, Any], num_layers: int
) -> list[FeedForward | None]:
    """Returns `AttentionKind.feed_forward` of each layer; as the function above."""
    if not family.has_single_branches:
        return [None] * num_layers
    return [FEED_FORWARD.get(kind) for kind in raw["layer_types"]]


def read_rotary_layers(
    family: Family, settings: Mapping[str, Any], num_layers: int
) -> list[bool]:
    """Returns the mask of the layers with rotary positions."""
    if family.implied.get("positions") == "none":
        return [False] * num_layers
    if "position_embedding_type" in family.position_keys:
        kind = settings.get("position_embedding_type")
        return [kind == "rope"] * num_layers
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
