"""Writes gradients of transformers as folders, in the layout of the weights.

    python tests/golden/make_gradients.py OUT FOLDER... [--scale 0.5]

Each FOLDER is a golden one. The loss is the mean cross-entropy of the next tokens of
the sequences `ids` of its `expected.npz`, in float32 on a CPU. OUT/weights has folders
of the same names with the weights, of which matrices are multiplied by `--scale`:
smaller ones round less. The "weights" of the folders in OUT/gradients are the
derivatives of the loss, and OUT/loss.json has the losses.

Needs torch and transformers. `test_peer_gradients.py` runs this script, which also made
the file `gradient.safetensors` of one golden folder.
"""

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers


def write_gradient(source: pathlib.Path, out: pathlib.Path, scale: float) -> float:
    """Writes the folders of weights and of their gradient; returns the loss."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.ndim > 1 else 1.0)
    model.save_pretrained(out / "weights" / source.name)
    ids = torch.tensor(np.load(source / "expected.npz")["ids"], dtype=torch.int64)
    logits = model(ids, use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    model.save_pretrained(out / "gradients" / source.name)
    return loss.item()


def main() -> None:
    """Writes the gradients of all folders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("folders", type=pathlib.Path, nargs="+")
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    losses = {x.name: write_gradient(x, args.out, args.scale) for x in args.folders}
    (args.out / "loss.json").write_text(json.dumps(losses) + "\n")


if __name__ == "__main__":
    main()
