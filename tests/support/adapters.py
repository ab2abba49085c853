"""Adapters in the form of peft, and models with an adapter merged in NumPy."""

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def save_adapter(
    folder: Path,
    model: Path,
    targets: Sequence[str],
    *,
    rank: int = 2,
    seed: int = 0,
    std: float = 0.3,
    **settings: Any,
) -> Path:
    """Writes a random adapter of the modules of a model whose names end so."""
    rng = np.random.default_rng(seed)
    factors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(targets)):
            outputs, inputs = weight.shape
            shapes = {"A": (rank, inputs), "B": (outputs, rank)}
            for half, shape in shapes.items():
                draw = rng.normal(0, std, shape).astype(np.float32)
                factors[f"{PREFIX}{module}.lora_{half}.weight"] = draw
    folder.mkdir(parents=True, exist_ok=True)
    save_file(factors, folder / WEIGHTS)
    fields: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    fields |= {"target_modules": [*targets], **settings}
    (folder / CONFIG).write_text(json.dumps(fields))
    return folder


def merge(adapter: Path, model: Path, target: Path) -> Path:
    """Writes the model with `weight + alpha / rank * B A`, module by module."""
    settings = json.loads((adapter / CONFIG).read_text())
    tensors = load_file(model / "model.safetensors")
    factors = load_file(adapter / WEIGHTS)
    model_type = json.loads((model / "config.json").read_text())["model_type"]
    is_conv1d = model_type == "gpt2"  # stored as [in, out]
    for name in factors:
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        # Folders of the bare transformer omit the first part.
        [key] = [x for x in tensors if f"{module}.weight".endswith(x)]
        a = factors[name]
        b = factors[name.replace("lora_A", "lora_B")]
        alpha = _setting(settings, "alpha_pattern", module, settings["lora_alpha"])
        root = math.sqrt(len(a)) if settings.get("use_rslora") else len(a)
        delta = b @ a * np.float32(alpha / root)
        tensors[key] = tensors[key] + (delta.T if is_conv1d else delta)
    shutil.copytree(model, target)
    (target / "SHA256SUMS").unlink(missing_ok=True)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def _setting(
    settings: Mapping[str, Any], name: str, module: str, default: float
) -> float:
    patterns = settings.get(name) or {}
    hits = [patterns[x] for x in patterns if re.search(rf"(^|\.)({x})$", module)]
    return hits[0] if hits else default
