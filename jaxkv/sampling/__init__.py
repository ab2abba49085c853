"""Sampling, from logits to tokens: penalties, truncation, draws, beam search."""

from jaxkv.sampling.params import Params, Sampling, greedy_params, make_params

__all__ = [
    "Params",
    "Sampling",
    "beam_search",
    "fixed_point",
    "greedy_params",
    "make_params",
    "random_keys",
    "sampler",
    "top_k",
]
