"""Folders of trained drafting heads: `config.json` and safetensors.

`config.json` contains the kind of the heads, the sizes of their target model, and the
acceptance rates from which draft trees are built. All fields are validated; an error is
one line.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax.typing import DTypeLike

from jaxkv import validation
from jaxkv.files import (
    check_replaceable,
    read_json,
    replace_folder,
    reporting_errors,
    verify_listed,
    write_checksums,
)
from jaxkv.models import ModelConfig, Params, load_tree, save_tree
from jaxkv.speculation.eagle import EagleConfig
from jaxkv.speculation.medusa import MedusaConfig

type HeadsConfig = MedusaConfig | EagleConfig
type Kind = Literal["medusa", "eagle"]

_HEAD_CONFIGS: dict[Kind, tuple[Any, tuple[str, ...]]] = {
    "medusa": (MedusaConfig, ("num_heads", "num_blocks")),
    "eagle": (EagleConfig, ("taps",)),
}
HEAD_KINDS = tuple(_HEAD_CONFIGS)
"""Values of `model_type` in `config.json`."""

_TRUNK_SIZES = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
}
"""Sizes of the target: key in `config.json` -> field of `ModelConfig`."""


class LoadedHeads(NamedTuple):
    """Content of a folder."""

    config: HeadsConfig
    """Shape of the heads."""
    params: Params
    """Parameters of the heads."""
    acceptance: tuple[tuple[float, ...], ...]
    """Probability that each guess is right: by depth, then by rank."""


def heads_kind(config: HeadsConfig) -> Kind:
    """Returns the kind of heads, one of `HEAD_KINDS`."""
    return next(
        name
        for name, (config_type, _) in _HEAD_CONFIGS.items()
        if type(config) is config_type
    )


def load_heads(
    folder: str | os.PathLike[str], target: ModelConfig, *, dtype: DTypeLike = "float32"
) -> LoadedHeads:
    """Reads heads for a model.

    Args:
      folder: written by `save_heads`.
      target: shape of the served model.
      dtype: type of the parameters, as for `checkpoints.load_model`.

    Raises:
      ValueError: the folder is missing, is damaged, has no heads, or those of another
        model; the message contains the folder.
    """
    folder = validation.path("folder", folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    verify_listed(folder)
    path = folder / "config.json"
    raw = read_json(path)
    with reporting_errors(path, KeyError, TypeError):
        kind = validation.choice("model_type", raw.get("model_type"), HEAD_KINDS)
        for name, field in _TRUNK_SIZES.items():
            if (size := raw.get(name)) != getattr(target, field):
                raise ValueError(
                    f"heads of a model with {name}={size!r}, the model served has "
                    f"{getattr(target, field)}"
                )
        make, names = _HEAD_CONFIGS[kind]
        config = make(
            target=target, **{name: _check_integers(name, raw[name]) for name in names}
        )
        acceptance = _check_acceptance(raw["acceptance"])
    params = load_tree(folder, config.param_shapes(), dtype=dtype)
    return LoadedHeads(config, params, acceptance)


def _check_integers(name: str, value: object) -> int | tuple[int, ...]:
    """Checks an integer, or a list of them."""
    if isinstance(value, list):
        return tuple(validation.integer(name, x) for x in value)
    return validation.integer(name, value)


def _check_acceptance(raw: Iterable[Iterable[object]]) -> tuple[tuple[float, ...], ...]:
    """Checks that values are in [0, 1], with equally many ranks at each depth."""
    shares = tuple(
        tuple(
            validation.number("acceptance", x, low=0.0, high=1.0, hint="in [0, 1]")
            for x in depth
        )
        for depth in raw
    )
    if not shares or {len(depth) for depth in shares} != {len(shares[0]) or 1}:
        raise ValueError("acceptance must have as many ranks at each depth")
    return shares


def save_heads(
    folder: str | os.PathLike[str],
    config: HeadsConfig,
    params: Params,
    *,
    acceptance: Sequence[Sequence[float]],
    model_card: str,
    dtype: DTypeLike = "bfloat16",
    overwrite: bool = False,
) -> Path:
    """Writes a folder that `load_heads` reads, atomically, with digests.

    Args:
      folder: target folder.
      config: shape of the heads.
      params: parameters of the heads.
      acceptance: probability that each guess is right, by depth and rank.
      model_card: text of the folder's README.md.
      dtype: type in which parameters are stored.
      overwrite: True to replace existing heads.

    Returns:
      The folder.

    Raises:
      ValueError: the folder contains something else, or a value is too large for
        `dtype`.
    """
    folder = validation.path("folder", folder).absolute()
    check_replaceable(folder, "config.json", "heads", overwrite)
    kind = heads_kind(config)
    raw: dict[str, object] = {"model_type": kind}
    raw |= {name: getattr(config.target, field) for name, field in _TRUNK_SIZES.items()}
    raw |= {name: getattr(config, name) for name in _HEAD_CONFIGS[kind][1]}
    raw["acceptance"] = [[round(float(x), 4) for x in depth] for depth in acceptance]
    with replace_folder(folder) as new:
        save_tree(new, params, dtype=dtype)
        text = json.dumps(raw, indent=2) + "\n"
        (new / "config.json").write_text(text, encoding="utf-8")
        (new / "README.md").write_text(model_card, encoding="utf-8")
        write_checksums(new, ignored=["README.md"])
    return folder
