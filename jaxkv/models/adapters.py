"""Reads LoRA adapters from folders in the form of peft, as factors of products.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Every setting is
read, listed as without effect, or refused by name; the name and shape of every tensor
are checked. Products of this package may join several modules of a folder (query, key
and value; gate and up): the factors of the modules are then concatenated along the
ranks, and those of the outputs have zeros elsewhere, so a product of three modules has
the sum of their ranks.

Source of the form: peft's `LoraConfig` and `LoraLayer`, version 0.21.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxkv import validation
from jaxkv.files import read_json, reporting_errors
from jaxkv.models.config import ModelConfig
from jaxkv.models.huggingface import (
    Leaf,
    canonical_names,
    checked_dtype,
    join_tensors,
    list_leaves,
    read_tensors,
)
from jaxkv.models.interface import Params
from jaxkv.models.param_forms import layer_form

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_PRODUCTS = {"qkv", "q", "out", "up", "down", "gate"} | {
    *("q_down", "q_up", "kv_down", "input_gate", "input_up"),
}
"""Products of a layer that take adapters."""
_SETTINGS = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules"),
    *("exclude_modules", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
}
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout"),
    *("peft_version", "revision", "task_type"),
    # peft sets it by the type of a module; it matters when weights are merged.
    "fan_in_fan_out",
    # Settings of an initialization, of QALoRA or of Megatron, which other keys enable.
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size"),
}
_PLAIN_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the model's weights as they are."""


class _Factors(NamedTuple):
    """Factors of an adapter for one product."""

    a: Float[np.ndarray, "ranks inputs"]
    b: Float[np.ndarray, "*outputs ranks"]
    """Scaled by alpha / rank."""


def load_adapters(
    folders: Mapping[str, str | os.PathLike[str]],
    config: ModelConfig,
    *,
    dtype: DTypeLike = "float32",
) -> Params:
    """Reads the adapters of a model, to be used together.

    Adapter i of a row, from 1 on, is the i-th of the folders. Smaller ranks are padded
    with zeros to the largest one of a product, as are layers and products that an
    adapter lacks.

    Args:
      folders: folder of each adapter by its name.
      config: architecture of the model.
      dtype: dtype of the factors.

    Returns:
      A tree for `param_forms.join_adapters`, of NumPy arrays.

    Raises:
      ValueError: a folder cannot be used; the message names it, and the setting or
        tensor that is not supported.
    """
    dtype = checked_dtype(dtype)
    adapters = [_load(validation.path(x, folders[x]), config) for x in folders]
    layers: Params = {}
    by_form: dict[tuple[Any, str], list[Leaf]] = {}
    for leaf in _adaptable_leaves(config):
        form = layer_form(config, int(leaf.path[1])), str(leaf.path[2])
        by_form.setdefault(form, []).append(leaf)
    for leaves in by_form.values():
        # Layers of one form are calls of one function.
        entries = [[x.get(leaf.path) for x in adapters] for leaf in leaves]
        ranks = max((len(x.a) for row in entries for x in row if x), default=0)
        if not ranks:
            continue
        for leaf, row in zip(leaves, entries, strict=True):
            *outputs, inputs = leaf.shape
            a = np.zeros((len(row), ranks, inputs), np.float32)
            b = np.zeros((*outputs, len(row), ranks), np.float32)
            for i, factors in enumerate(row):
                if factors is not None:
                    num = len(factors.a)
                    a[i, :num] = factors.a
                    b[..., i, :num] = factors.b
            _, index, name, _ = leaf.path
            part = {"lora_a": a.astype(dtype), "lora_b": b.astype(dtype)}
            layers.setdefault(index, {})[name] = part
    return {"layers": layers}


def _adaptable_leaves(config: ModelConfig) -> list[Leaf]:
    """Returns the weights of products that take adapters."""
    return [
        leaf
        for leaf in list_leaves(config)
        if leaf.path[0] == "layers"
        and leaf.path[-1] == "weight"
        and len(leaf.path) == 4
        and leaf.path[2] in _PRODUCTS
    ]


def _load(folder: Path, config: ModelConfig) -> dict[tuple[str | int, ...], _Factors]:
    """Reads one adapter; returns its factors by the path of a parameter."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ValueError(
            f"{folder}: has no {ADAPTER_CONFIG}, as a folder of an adapter has"
        )
    with reporting_errors(path):
        settings = _check_settings(read_json(path))
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise ValueError(
            f"{folder}: has no {ADAPTER_WEIGHTS}; pickled weights are never opened"
        )
    with reporting_errors(path, re.error):
        pairs = _pair_factors(read_tensors(path, np.dtype(np.float32)))
        places = canonical_names(config, (f"{module}.weight" for module in pairs))
        modules = {
            name.removesuffix(".weight"): place.removesuffix(".weight")
            for name, place in places.items()
        }
        leaves = _adaptable_leaves(config)
        usable = {x.removesuffix(".weight") for leaf in leaves for x in leaf.names}
        unusable = {*pairs} - {modules[name] for name in modules if name in usable}
        if unusable:
            raise ValueError(
                f"{min(unusable)} is not a product of attention or of an MLP of this "
                "model; embeddings, heads, experts, routers and recurrences take no "
                "adapter"
            )
        for name in sorted(usable):
            if _is_target(settings, name) != (name in modules):
                verb = "misses" if name not in modules else "has"
                raise ValueError(f"{verb} {name}, which target_modules contradicts")
        result = {}
        for leaf in leaves:
            names = [x.removesuffix(".weight") for x in leaf.names]
            present = {x: pairs[modules[x]] for x in names if x in modules}
            if present:
                result[leaf.path] = _join(leaf, names, present, settings)
    return result


def _check_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of an adapter.

    Raises:
      ValueError: a setting is missing, has another type or is not supported.
    """
    validation.choice("peft_type", raw.get("peft_type"), ("LORA",))
    for name, value in raw.items():
        if name not in _SETTINGS | _HARMLESS and value:
            text = validation.format_value(value)
            raise ValueError(f"{name}={text} is not supported for adapters")
    validation.choice("bias", raw.get("bias", "none"), ("none",))
    start = raw.get("init_lora_weights")
    if start not in _PLAIN_INITIALIZATIONS:
        raise ValueError(
            f"init_lora_weights={start!r} changes the model's weights, which is not "
            "supported"
        )
    targets = raw.get("target_modules")
    if not targets or not isinstance(targets, str | list):
        text = validation.format_value(targets)
        raise ValueError(f"target_modules={text} must be a list of names or a pattern")
    _check_rank("r", raw.get("r"))
    _check_alpha("lora_alpha", raw.get("lora_alpha"))
    checks = {"rank_pattern": _check_rank, "alpha_pattern": _check_alpha}
    for key, check in checks.items():
        pattern = raw.get(key) or {}
        validation.instance(key, pattern, dict)
        for name, value in pattern.items():
            check(f"{key}[{name!r}]", value)
    validation.boolean("use_rslora", raw.get("use_rslora") or False)
    return raw


def _check_rank(name: str, value: object) -> int:
    return validation.integer(name, value, low=1)


def _check_alpha(name: str, value: object) -> float:
    return validation.number(name, value, low=-1e9, high=1e9, hint="finite")


def _is_target(settings: Mapping[str, Any], module: str) -> bool:
    """Returns True if an adapter has factors for a module of its model.

    Source: peft's `check_target_module_exists`.
    """

    def matches(targets: str | list[str] | None) -> bool:
        if not targets:
            return False
        if isinstance(targets, str):
            return re.fullmatch(targets, module) is not None
        return any(module == x or module.endswith(f".{x}") for x in targets)

    if matches(settings.get("exclude_modules")):
        return False
    targets = settings["target_modules"]
    return targets == "all-linear" or matches(targets)


def _pair_factors(
    tensors: Mapping[str, np.ndarray],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns both factors by the name of their module in the model."""
    halves: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", name)
        if match is None or not name.startswith(_PREFIX) or tensor.ndim != 2:
            raise ValueError(
                f"{name} {list(tensor.shape)} is not a factor of a product"
            )
        halves.setdefault(match[1].removeprefix(_PREFIX), {})[match[2]] = tensor
    for module, both in halves.items():
        if len(both) != 2:
            raise ValueError(f"{module} must have lora_A and lora_B")
    return {module: (both["A"], both["B"]) for module, both in halves.items()}


def _join(
    leaf: Leaf,
    names: Iterable[str],
    present: Mapping[str, tuple[np.ndarray, np.ndarray]],
    settings: Mapping[str, Any],
) -> _Factors:
    """Joins the factors of the modules of one product."""
    total = sum(len(a) for a, _ in present.values())
    first = 0
    parts = []
    for name, shape in zip(names, leaf.shapes, strict=True):
        outputs, inputs = shape[::-1] if leaf.is_transposed else shape
        part = np.zeros((outputs, total), np.float32)
        if name in present:
            a, b = present[name]
            rank = _setting(settings, "rank_pattern", name, settings["r"])
            if a.shape != (rank, inputs) or b.shape != (outputs, rank):
                raise ValueError(
                    f"{name} has factors {list(a.shape)} and {list(b.shape)}, must "
                    f"have {[rank, inputs]} and {[outputs, rank]}"
                )
            alpha = _setting(settings, "alpha_pattern", name, settings["lora_alpha"])
            divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
            part[:, first : first + rank] = b * np.float32(alpha / divisor)
            first += rank
        parts.append(part.T if leaf.is_transposed else part)
    b = join_tensors(leaf._replace(shape=(*leaf.shape[:-1], total)), parts)
    a = np.concatenate([present[name][0] for name in names if name in present])
    return _Factors(a, b)


def _setting(
    settings: Mapping[str, Any], pattern: str, module: str, default: int | float
) -> Any:
    """Returns the value of the first pattern that matches the end of a module's name.

    Source: peft's `get_pattern_key`.
    """
    for key, value in (settings.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
