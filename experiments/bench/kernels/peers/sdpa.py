"""torch's scaled_dot_product_attention, on contiguous keys and values."""

import functools

import torch
import torch.nn.attention.bias
from torch.nn.attention import SDPBackend

from experiments.bench.kernels.peers.torch_peer import Peer, Turn


class Sdpa(Peer):
    """With whichever of its own backends is the fastest."""

    def backends(self):
        """The backends to try, each alone."""
        if self.device == "cpu":
            return {"": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]}
        names = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
        return {name: [getattr(SDPBackend, name)] for name in names}

    def draw(self, shape):
        """Draws a turn."""
        length = max(shape.lengths)
        size = (shape.batch, shape.kv_heads, length, shape.head_dim)
        k, v = shape.random(*size), shape.random(*size)
        return Turn(shape.queries(), lambda i: (k[i, 0], v[i, 0]), k, v)

    def ways(self, shape, turns):
        """Yields a way for each backend."""
        length, options = max(shape.lengths), {}
        if not shape.is_equal or shape.is_tree:
            options["attn_mask"] = shape.seen(length)[:, None]
        elif shape.rows > 1 and shape.contexts[0] == 0:
            options["is_causal"] = True
        elif shape.rows > 1:
            # Rows stand at the end: the fast backends know this one.
            lower_right = torch.nn.attention.bias.causal_lower_right
            options["attn_mask"] = lower_right(shape.rows, length)
        for name, backend in self.backends().items():
            yield name.lower(), functools.partial(self._call, backend, options), None

    def _call(self, backend, options, turn):
        attend = torch.nn.functional.scaled_dot_product_attention
        with torch.nn.attention.sdpa_kernel(backend):
            return attend(turn.q, *turn.rest, enable_gqa=True, **options)


class CuDnn(Sdpa):
    """With cuDNN's backend and no other.

    Raises:
      ValueError: there is no GPU.
    """

    def __init__(self, num_threads):
        super().__init__(num_threads)
        if self.device == "cpu":
            raise ValueError("it needs a GPU")

    def backends(self):
        """The one backend."""
        return {"": [SDPBackend.CUDNN_ATTENTION]}
