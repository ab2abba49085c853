"""A Hugging Face `config.json` of any family that the cost formulas count.

Only shapes are read: what changes the arithmetic but no count (activations, rotary
scaling, soft caps) is passed over. A key that is left out means what transformers takes
it to mean.
"""

import json
from pathlib import Path

from jaxkv import hf_files
from scaling import hf_shapes
from scaling.descriptions import Description
from scaling.hf_keys import Raw


def load(path: Path) -> Description:
    """Reads a `config.json`, or the one in a folder.

    Raises:
      ValueError: it cannot be read, is not JSON, or describes no model that is counted;
        the line names the file, and the key with what it should be.
    """
    file = path / "config.json" if path.is_dir() else path
    text = hf_files.read_text(file)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: holds {type(raw).__name__}, not an object")
    name = (
        path.stem if path.is_file() and path.stem != "config" else path.resolve().name
    )
    try:
        return describe(raw, name=name)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def describe(raw: Raw, *, name: str = "") -> Description:
    """Describes the model of a parsed `config.json`.

    Args:
      raw: the file.
      name: what tables call it; its family by default.

    Raises:
      ValueError: names the key, its value and what it should be.
    """
    family = family_of(raw)
    return Description(name=name or family, **hf_shapes.READERS[family](raw))


def family_of(raw: Raw) -> str:
    """Finds the family by `model_type`, or by `architectures` if that does not tell.

    Raises:
      ValueError: it is none of those that are counted.
    """
    kind, classes = raw.get("model_type"), raw.get("architectures")
    if isinstance(kind, str) and kind in hf_shapes.READERS:
        return kind
    first = classes[0] if isinstance(classes, list) and classes else classes
    for family, architecture in _ARCHITECTURES.items():
        if isinstance(first, str) and first.lower() == architecture.lower():
            return family
    said = f"model_type={kind!r}" if kind is not None or not first else f"{first!r}"
    known = ", ".join(hf_shapes.READERS)
    raise ValueError(f"{said} is not counted, only {known}")


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
