"""scaled_dot_product_attention of torch, on contiguous keys and values."""

import functools

import torch
import torch.nn.attention.bias
from torch.nn.attention import SDPBackend

from experiments.bench.kernels.peers.torch_peer import TorchPeer


class Sdpa(TorchPeer):
    """The fastest of its own backends."""

    def backends(self):
        """Returns the backends to try, one at a time."""
        if self.device == "cpu":
            return {"": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]}
        names = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
        return {name: [getattr(SDPBackend, name)] for name in names}

    def draw(self, shape):
        """Draws a turn."""
        size = (shape.batch, shape.kv_heads, max(shape.lengths), shape.head_dim)
        k = shape.random(*size)
        v = shape.random(*size)
        return shape.queries(), lambda i: (k[i, 0], v[i, 0]), k, v

    def ways(self, shape, turns):
        """Yields a variant for each backend."""
        length = max(shape.lengths)
        options = {}
        if not shape.is_equal or shape.is_tree:
            masks = [shape.attention_mask(i, length) for i in range(shape.batch)]
            options["attn_mask"] = torch.stack(masks)[:, None]
        elif shape.rows > 1 and shape.contexts[0] == 0:
            options["is_causal"] = True
        elif shape.rows > 1:
            # Rows are at the end of the sequence; fast backends support this mask.
            lower_right = torch.nn.attention.bias.causal_lower_right
            options["attn_mask"] = lower_right(shape.rows, length)
        for name, backend in self.backends().items():
            attend = functools.partial(_attend, backend, options)
            calls = [functools.partial(attend, q, k, v) for q, _, k, v in turns]
            yield name.lower(), calls, None


class CuDnn(Sdpa):
    """The cuDNN backend."""

    needs_gpu = True

    def backends(self):
        """Returns the cuDNN backend."""
        return {"": [SDPBackend.CUDNN_ATTENTION]}


def _attend(backend, options, q, k, v):
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(backend):
        return attend(q, k, v, enable_gqa=True, **options)
