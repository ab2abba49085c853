"""The benchmark's model in PyTorch, trained and timed, for `peer_main`.

A question `{"file", "num_heads", "eps", "learning_rate", "betas", "weight_decay",
"trial_s"}` names an .npz of starting weights (`layers.0.qkv.weight`, ...) and of
`windows` [steps, batch, seq + 1]. The peer trains one step on each batch and answers
`{"losses", "compile_s", "optimizer"}` with the fastest implementation of AdamW on this
machine. A question `{"seconds"}` continues the training and is answered with
`{"tokens_per_s"}`.
"""

import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional

OPTIMIZERS = ("fused", "foreach")


class TorchLayer(nn.Module):
    """Causal attention and a tanh GELU MLP, each after a layer norm."""

    def __init__(self, size, mlp_size, num_heads, eps):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(size, eps=eps)
        self.mlp_norm = nn.LayerNorm(size, eps=eps)
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.up = nn.Linear(size, mlp_size)
        self.down = nn.Linear(mlp_size, size)

    def forward(self, x):
        """Returns the output: `[batch, seq, size]`."""
        batch, seq, size = x.shape
        q, k, v = (
            part.view(batch, seq, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).split(size, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, size))
        hidden = functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down(hidden)


class TorchModel(nn.Module):
    """Learned positions, layers, tied embeddings; starts from given weights.

    Args:
      arrays: weights.
      num_heads: attention heads.
      eps: epsilon of layer norms.
    """

    def __init__(self, arrays, num_heads, eps):
        super().__init__()
        vocab, size = arrays["embed.weight"].shape
        mlp_size = arrays["layers.0.up.bias"].size
        num_layers = sum(name.endswith("qkv.bias") for name in arrays)
        self.embed = nn.Embedding(vocab, size)
        self.embed_positions = nn.Embedding(len(arrays["embed_positions.weight"]), size)
        self.layers = nn.ModuleList(
            TorchLayer(size, mlp_size, num_heads, eps) for _ in range(num_layers)
        )
        self.final_norm = nn.LayerNorm(size, eps=eps)
        for name, parameter in self.named_parameters():
            array = arrays[name.replace("norm.weight", "norm.scale")]
            if ".qkv." in name:
                # Grouped by head in the file; by queries, keys and values in PyTorch.
                array = array.reshape(num_heads, 3, -1, *array.shape[3:])
                array = array.swapaxes(0, 1)
            parameter.data.copy_(torch.tensor(array).reshape(parameter.shape))

    def forward(self, windows):
        """Returns the mean loss of windows, `[batch, seq + 1]`."""
        tokens = windows[:, :-1]
        targets = windows[:, 1:]
        x = self.embed(tokens) + self.embed_positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.final_norm(x) @ self.embed.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class EagerTrainer:
    """A model with its optimizer and text, in eager mode."""

    is_compiled = False
    version = f"torch {torch.__version__}"

    def __init__(self, num_threads):
        torch.set_num_threads(int(num_threads))

    def answer(self, question):
        """Starts with a model, or continues the training."""
        if "file" in question:
            return self._begin(question)
        return {"tokens_per_s": self.rate(question["seconds"])}

    def _begin(self, question):
        with np.load(question["file"]) as file:
            arrays = dict(file)
        self._windows = torch.tensor(arrays.pop("windows").astype("int64"))
        self._asked = question
        self._plain = TorchModel(arrays, question["num_heads"], question["eps"])
        self._first = {k: v.clone() for k, v in self._plain.state_dict().items()}
        torch._dynamo.reset()
        self._model = torch.compile(self._plain) if self.is_compiled else self._plain
        start = time.perf_counter()
        rates = {}
        for name in OPTIMIZERS:
            self._build(name)
            for _ in range(3):
                self._step(self._windows[0])
            rates[name] = self.rate(question["trial_s"])
        taken_s = time.perf_counter() - start
        fastest = max(rates, key=lambda name: rates[name])
        self._build(fastest)
        return {
            "losses": [float(self._step(batch)) for batch in self._windows],
            "compile_s": max(0.0, taken_s - len(rates) * question["trial_s"]),
            "optimizer": fastest,
        }

    def _build(self, optimizer):
        """Restores the starting weights, and makes a new optimizer."""
        self._plain.load_state_dict(self._first)
        matrices = ("qkv.weight", "out.weight", "up.weight", "down.weight")
        decayed = []
        undecayed = []
        for name, parameter in self._plain.named_parameters():
            (decayed if name.endswith(matrices) else undecayed).append(parameter)
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self._asked["weight_decay"]},
                {"params": undecayed, "weight_decay": 0.0},
            ],
            lr=self._asked["learning_rate"],
            betas=tuple(self._asked["betas"]),
            **{optimizer: True},
        )

    def _step(self, windows):
        loss = self._model(windows)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def rate(self, seconds):
        """Returns the tokens per second of continued training."""
        text = self._windows.flatten()
        batch, width = self._windows.shape[1:]
        places = torch.arange(width)
        start = time.perf_counter()
        num = 0
        while (taken := time.perf_counter() - start) < seconds or not num:
            first = torch.randint(0, len(text) - width + 1, (batch, 1))
            self._step(text[first + places])
            num += 1
        return num * batch * (width - 1) / taken


class CompiledTrainer(EagerTrainer):
    """The same trainer with torch.compile."""

    is_compiled = True
