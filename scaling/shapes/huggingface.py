"""A Hugging Face `config.json` of any family that the cost formulas count.

Only shapes are read: what changes the arithmetic but no count (activations, rotary
scaling, soft caps) is passed over. A key that is left out means what transformers takes
it to mean.
"""

from pathlib import Path

from jaxkv import files
from scaling.shapes import families, huggingface_keys
from scaling.shapes.description import Description
from scaling.shapes.huggingface_keys import Raw


def load(path: Path) -> Description:
    """Reads a `config.json`, or the one in a folder.

    Raises:
      ValueError: it cannot be read, is not JSON, or describes no model that is counted;
        the line names the file, and the key with what it should be.
    """
    file = path / "config.json" if path.is_dir() else path
    raw = files.read_json(file)
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
    raw = huggingface_keys.without_aliases(raw, _ALIASES.get(family, {}))
    return Description(name=name or family, **families.READERS[family](raw))


def family_of(raw: Raw) -> str:
    """Finds the family by `model_type`, or by `architectures` if that does not tell.

    Raises:
      ValueError: it is none of those that are counted, or one by each.
    """
    kind, classes = raw.get("model_type"), raw.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else classes
    built = None
    for family, architecture in _ARCHITECTURES.items():
        if isinstance(first, str) and first.lower() == architecture.lower():
            built = family
    if isinstance(kind, str) and kind in families.READERS:
        if built not in (None, kind):
            raise ValueError(f"model_type={kind!r} contradicts architecture {first!r}")
        return kind
    if built is not None:
        return built
    said = f"model_type={kind!r}" if kind is not None or not first else f"{first!r}"
    known = ", ".join(families.READERS)
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

# Other names of keys, as transformers has them.
_ALIASES = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
