"""Writes gradients of transformers as folders, in the layout of the weights.

    python tests/golden/make_gradients.py OUT FOLDER...

Each FOLDER is a golden one. The loss is the mean cross-entropy of the next tokens of
the sequences `ids` of its `expected.npz`, in float32 on a CPU. OUT has a folder of the
same name, whose "weights" are the derivatives of the loss; `loss.json` has the losses.
Needs torch and transformers. `test_peer_gradients.py` runs this script; it also made
the file `gradient.safetensors` of one golden folder.
"""

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers


def write_gradient(source: pathlib.Path, out: pathlib.Path) -> float:
    """Writes the folder of a gradient; returns the loss."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
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
    model.save_pretrained(out)
    return loss.item()


def main() -> None:
    """Writes the gradients of all folders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("folders", type=pathlib.Path, nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    losses = {x.name: write_gradient(x, args.out / x.name) for x in args.folders}
    (args.out / "loss.json").write_text(json.dumps(losses) + "\n")


if __name__ == "__main__":
    main()
