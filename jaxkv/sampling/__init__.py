"""From logits to tokens: penalties, truncation, keyed draws, beam search."""

from jaxkv.sampling.sampler import Sampling

__all__ = [
    "Sampling",
    "beam_search",
    "random_keys",
    "sampler",
]
