"""Requests with real text: prompts from files that no model was trained on."""

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple

import numpy as np

from jaxkv.engine import EngineConfig
from jaxkv.sampling import Sampling
from jaxkv.validation import (
    Ascending,
    ConfigRecord,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)
from scaling.corpora import STANDARD_LIBRARY, load_documents


class PromptRequest(NamedTuple):
    """A prompt with the sampling parameters of its answer."""

    text: str
    tokens: list[int]
    sampling: Sampling


def draw_ragged_lengths(
    rng: np.random.Generator, bounds: tuple[int, int], sigma: float, num: int
) -> list[int]:
    """Draws log-normal lengths around the geometric mean of their bounds.

    Args:
      rng: random generator.
      bounds: smallest and largest length; draws are clipped to them.
      sigma: standard deviation of the logarithm.
      num: number of lengths.
    """
    low, high = bounds
    lengths = rng.lognormal(0.5 * np.log(low * high), sigma, num)
    return np.clip(lengths.round(), low, high).astype(int).tolist()


class RaggedConfig(ConfigRecord):
    """Requests of ragged lengths that arrive together, and their engine."""

    model: str = "stdlib-bytes"
    """Folder, or name of a bundled model."""
    num_requests: PositiveInt = 48
    """Requests, all submitted at the start."""
    prompt_tokens: Annotated[tuple[int, int], Ascending(1, strictly=False)] = (16, 192)
    """Shortest and longest prompt, in tokens."""
    output_tokens: Annotated[tuple[int, int], Ascending(1, strictly=False)] = (16, 256)
    """Smallest and largest limit on the tokens of an answer; it may end earlier."""
    sigma: NonNegativeFloat = 0.9
    """Standard deviation of the logarithm of both lengths."""
    temperature: float = 0.7
    """Sampling temperature."""
    top_p: float = 0.95
    """Probability mass of nucleus sampling."""
    max_slots: PositiveInt = 8
    """Sequences that run concurrently."""
    page_size: PositiveInt = 16
    """Tokens per page."""
    token_budget: int = 64
    """Largest number of tokens in a step."""
    steps_per_call: PositiveInt = 16
    """Steps per call to the device."""
    seed: NonNegativeInt = 0
    """Seed of lengths, prompts and sampling."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt plus the longest answer."""
        return self.prompt_tokens[1] + self.output_tokens[1]

    def requests(
        self, tokenizer: Any, rng: np.random.Generator, *, ignore_eos: bool = False
    ) -> list[PromptRequest]:
        """Cuts held-out prompts; each answer's seed is the previous seed plus 1."""
        lengths = (self.prompt_tokens, self.output_tokens)
        sizes, limits = (
            draw_ragged_lengths(rng, bounds, self.sigma, self.num_requests)
            for bounds in lengths
        )
        ask = Sampling(
            temperature=self.temperature, top_p=self.top_p, ignore_eos=ignore_eos
        )
        asks = [
            dataclasses.replace(ask, seed=self.seed + i, max_tokens=limit)
            for i, limit in enumerate(limits)
        ]
        return cut_held_out_prompts(tokenizer, sizes, asks, rng)

    def engine_config(
        self, num_pages: int, max_length: int, **more: Any
    ) -> EngineConfig:
        """Returns an engine config whose queue has a place for every request."""
        return EngineConfig(
            num_pages=num_pages,
            page_size=self.page_size,
            max_slots=self.max_slots,
            max_length=max_length,
            max_sequences=self.num_requests,
            queue_capacity=self.num_requests,
            submit_width=self.num_requests,
            token_budget=self.token_budget,
            steps_per_call=self.steps_per_call,
            **more,
        )


def cut_held_out_prompts(
    tokenizer: Any,
    sizes: list[int],
    samplings: list[Sampling],
    rng: np.random.Generator,
) -> list[PromptRequest]:
    """Cuts prompts from the held-out files of Python's standard library.

    Args:
      tokenizer: tokenizer of the model that answers.
      sizes: tokens of each prompt; a shorter file gives a shorter prompt.
      samplings: sampling parameters of each answer.
      rng: random generator for the files and the first line of each prompt.
    """
    texts = _held_out_texts()
    requests = []
    for size, sampling in zip(sizes, samplings, strict=True):
        text = texts[rng.integers(len(texts))]
        lines = [0, *(place + 1 for place, char in enumerate(text) if char == "\n")]
        starts = [place for place in lines if place + size < len(text)] or [0]
        start = starts[rng.integers(len(starts))]
        # A token rarely has more than a few characters.
        tokens = tokenizer.encode(text[start : start + 16 * size])[:size]
        requests.append(PromptRequest(tokenizer.decode(tokens), tokens, sampling))
    return requests


@functools.cache
def _held_out_texts() -> list[str]:
    """Returns the held-out files, which are the same for all calls of a process."""
    documents = load_documents(STANDARD_LIBRARY).held_out
    return [document.text.decode() for document in documents]
