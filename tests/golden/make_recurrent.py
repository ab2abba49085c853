"""Writes `recurrent.json`: logits and gradients of PyTorch's LSTM and GRU.

To be run by hand with torch: `python tests/golden/make_recurrent.py`. Weights are sine
waves that the test recomputes in the order of this file. All numbers are float64.
"""

import json
import math
from pathlib import Path

import torch

VOCAB = 7
HIDDEN = 5
LAYERS = 2
BATCH = 2
SEQ = 6
GATES = {"lstm": 4, "gru": 3}


def main() -> None:
    """Writes `recurrent.json` to the folder of this script."""
    torch.set_default_dtype(torch.float64)
    by_kind = {kind: compute(kind) for kind in GATES}
    document = {"torch": torch.__version__, **by_kind}
    path = Path(__file__).parent / "recurrent.json"
    path.write_text(json.dumps(round_floats(document)) + "\n", "utf-8")


def compute(kind: str) -> dict:
    """Returns the loss, logits and gradients of one network."""
    num_tensors = 0

    def wave(*shape: int) -> torch.Tensor:
        nonlocal num_tensors
        num_tensors += 1
        places = torch.arange(math.prod(shape))
        return (0.5 * torch.sin(1.7 * places + num_tensors)).reshape(shape)

    net = getattr(torch.nn, kind.upper())(HIDDEN, HIDDEN, LAYERS, batch_first=True)
    rows = GATES[kind] * HIDDEN
    table = wave(VOCAB, HIDDEN)
    with torch.no_grad():
        for layer in range(LAYERS):
            for name in ("weight_ih", "weight_hh"):
                getattr(net, f"{name}_l{layer}").copy_(wave(rows, HIDDEN))
            getattr(net, f"bias_ih_l{layer}").copy_(wave(rows))
            second = torch.zeros(rows)
            if kind == "gru":  # the LSTM's second bias is zero: the two are added
                second[2 * HIDDEN :] = wave(HIDDEN)
            getattr(net, f"bias_hh_l{layer}").copy_(second)
    head = wave(VOCAB, HIDDEN)
    tokens = (torch.arange(BATCH * SEQ) ** 2 % VOCAB).reshape(BATCH, SEQ)
    logits = net(table[tokens])[0] @ head.T
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1)
    )
    loss.backward()
    square = (GATES[kind], HIDDEN, HIDDEN)
    return {
        "loss": loss.item(),
        "logits": logits.tolist(),
        "state_weight_gradient": net.weight_hh_l0.grad.reshape(square).tolist(),
        "bias_gradient": net.bias_ih_l0.grad.reshape(square[:2]).tolist(),
        "state_bias_gradient": net.bias_hh_l0.grad[-HIDDEN:].tolist(),
    }


def round_floats(value):
    """Rounds all floats of a document to nine decimals."""
    if isinstance(value, dict):
        return {key: round_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [round_floats(item) for item in value]
    return round(value, 9) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
