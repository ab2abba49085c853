"""Lists the keys that transformers' config classes have, for `test_config_keys`.

Needs torch and transformers, which the project does not; run once by hand:

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
)


def defaults(family: str) -> dict[str, object]:
    """Every key of a family, other names included, with its value by default."""
    config = transformers.AutoConfig.for_model(family)
    keys = {field.name for field in dataclasses.fields(config)}
    keys |= config.to_dict().keys() | config.attribute_map.keys()
    said = config.to_dict()
    found = {key: said.get(key, getattr(config, key)) for key in sorted(keys)}
    # One word a layer, and nothing that the other keys do not say.
    return found | ({"layer_types": None} if "layer_types" in found else {})


if __name__ == "__main__":
    document = {
        "transformers": transformers.__version__,
        "defaults": {family: defaults(family) for family in FAMILIES},
    }
    path = Path(__file__).with_name("hf_config_keys.json")
    path.write_text(json.dumps(document, indent=1) + "\n")
