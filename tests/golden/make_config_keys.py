"""Writes `hf_config_keys.json`: keys and defaults of transformers' config classes.

Read by `test_config_keys`. To be run by hand; needs torch and transformers:

    python tests/golden/make_config_keys.py
"""

import dataclasses
import json
from pathlib import Path

import transformers

FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gpt2",
    "opt",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5_text",
    "olmo_hybrid",
    "kimi_linear",
    "granitemoehybrid",
    "nemotron_h",
    "lfm2",
    "lfm2_moe",
)


def defaults(family: str) -> dict[str, object]:
    """Returns the default of every key of a family, aliases included."""
    config = transformers.AutoConfig.for_model(family)
    keys = {field.name for field in dataclasses.fields(config)}
    keys |= config.to_dict().keys() | config.attribute_map.keys()
    values = config.to_dict()
    key_values = {key: values.get(key, getattr(config, key)) for key in sorted(keys)}
    # `layer_types` has one entry per layer and follows from the other keys.
    return key_values | ({"layer_types": None} if "layer_types" in key_values else {})


if __name__ == "__main__":
    document = {
        "transformers": transformers.__version__,
        "defaults": {family: defaults(family) for family in FAMILIES},
    }
    path = Path(__file__).with_name("hf_config_keys.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
