"""Requests made of real text: prompts from files that no model was trained on."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jaxkv.sampling import Sampling
from scaling.corpora import corpora


class Request(NamedTuple):
    """A prompt, and how its answer is drawn."""

    text: str
    tokens: list[int]
    sampling: Sampling


def ragged(
    rng: np.random.Generator, bounds: tuple[int, int], sigma: float, num: int
) -> list[int]:
    """Draws lengths from a log-normal law around the geometric middle of its bounds.

    Args:
      rng: where the draws come from.
      bounds: the shortest and the longest; draws beyond are set to them.
      sigma: standard deviation of the logarithm, at least 0.
      num: how many.
    """
    low, high = bounds
    drawn = rng.lognormal(0.5 * np.log(low * high), sigma, num)
    return np.clip(drawn.round(), low, high).astype(int).tolist()


def ragged_requests(
    tokenizer: Any,
    rng: np.random.Generator,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    *,
    sigma: float,
    num: int,
    ask: Sampling,
    seed: int,
) -> list[Request]:
    """Cuts held-out prompts of ragged lengths, with answers of ragged limits.

    Args:
      tokenizer: of the model that will answer.
      rng: where the draws come from.
      prompt_tokens: the shortest and the longest prompt.
      output_tokens: the lowest and the highest limit of an answer.
      sigma: standard deviation of the logarithm of both.
      num: how many.
      ask: how answers are drawn.
      seed: of the first answer; each has the seed behind that of the last.
    """
    sizes = ragged(rng, prompt_tokens, sigma, num)
    limits = ragged(rng, output_tokens, sigma, num)
    asks = [
        dataclasses.replace(ask, seed=seed + i, max_tokens=limit)
        for i, limit in enumerate(limits)
    ]
    return held_out(tokenizer, sizes, asks, rng)


def held_out(
    tokenizer: Any,
    sizes: list[int],
    samplings: list[Sampling],
    rng: np.random.Generator,
) -> list[Request]:
    """Cuts prompts from the held-out files of Python's standard library.

    Args:
      tokenizer: of the model that will answer.
      sizes: tokens of each prompt; a file that is shorter gives what it has.
      samplings: how each answer is drawn.
      rng: picks the files, and the line at which each prompt begins.

    Returns:
      The requests.
    """
    documents = corpora.load(corpora.STANDARD_LIBRARY).held_out
    requests = []
    for size, sampling in zip(sizes, samplings, strict=True):
        text = documents[rng.integers(len(documents))].text.decode()
        lines = [0, *(place + 1 for place, char in enumerate(text) if char == "\n")]
        starts = [place for place in lines if place + size < len(text)] or [0]
        start = starts[rng.integers(len(starts))]
        # A token is seldom more than a few characters.
        tokens = tokenizer.encode(text[start : start + 16 * size])[:size]
        requests.append(Request(tokenizer.decode(tokens), tokens, sampling))
    return requests
