"""Writes LoRA adapters of some golden models with peft, and their logits.

`adapters/NAME` has the adapter as written by `save_pretrained`, for the golden model
`NAME` before the first dash, and `expected.npz`: `ids` [2, 8] and their `logits` of
transformers and peft in float32 on a CPU. To be run by hand; needs torch, transformers
and peft:

    python tests/golden/make_adapters.py
"""

import pathlib

import numpy as np
import peft
import torch
import transformers

HERE = pathlib.Path(__file__).parent
SETTINGS = {
    "llama-lists": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    "llama-patterns": dict(
        r=3,
        lora_alpha=6,
        use_rslora=True,
        target_modules="all-linear",
        rank_pattern={"q_proj": 5, "layers.0.mlp.up_proj": 2},
        alpha_pattern={"layers.1.mlp.down_proj": 20},
    ),
    "gpt2-fused": dict(
        r=4, lora_alpha=8, target_modules=["c_attn", "attn.c_proj", "c_fc"]
    ),
    "phi3-fused": dict(r=4, lora_alpha=8, target_modules="all-linear"),
    "mixtral-attention": dict(
        r=4, lora_alpha=8, target_modules=r".*\.self_attn\.[qko]_proj"
    ),
}


def main() -> None:
    """Writes all folders."""
    for seed, (name, fields) in enumerate(SETTINGS.items()):
        rng = np.random.default_rng(seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            HERE / name.split("-")[0], attn_implementation="eager"
        )
        model = peft.get_peft_model(model, peft.LoraConfig(**fields))
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if "lora_" in key:
                    random = rng.normal(0, 0.15, tuple(weight.shape))
                    weight.copy_(torch.tensor(random, dtype=weight.dtype))
        folder = HERE / "adapters" / name
        model.peft_config["default"].base_model_name_or_path = name.split("-")[0]
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        (folder / "adapter_model.safetensors").chmod(0o644)
        ids = rng.integers(0, model.config.vocab_size, (2, 8))
        with torch.no_grad():
            logits = model(torch.tensor(ids)).logits.numpy()
        np.savez_compressed(folder / "expected.npz", ids=ids, logits=logits)


if __name__ == "__main__":
    main()
