"""Requests made of real text: prompts from files that no model was trained on."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jaxkv import validation
from jaxkv.engine import EngineConfig
from jaxkv.sampling import Sampling
from scaling.corpora import corpora


class PromptRequest(NamedTuple):
    """A prompt, and how its answer is drawn."""

    text: str
    tokens: list[int]
    sampling: Sampling


def draw_ragged_lengths(
    rng: np.random.Generator, bounds: tuple[int, int], sigma: float, num: int
) -> list[int]:
    """Draws lengths from a log-normal law around the geometric middle of its bounds.

    Draws beyond are set to the bounds; `sigma` is the logarithm's standard deviation.
    """
    low, high = bounds
    drawn = rng.lognormal(0.5 * np.log(low * high), sigma, num)
    return np.clip(drawn.round(), low, high).astype(int).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedConfig:
    """Requests of ragged lengths, all there at once, and the engine they share."""

    model: str = "stdlib-bytes"
    """A folder, or a bundled model."""
    num_requests: int = 48
    """Requests, all there when the clock starts."""
    prompt_tokens: tuple[int, int] = (16, 192)
    """Shortest and longest prompt."""
    output_tokens: tuple[int, int] = (16, 256)
    """Shortest and longest limit of an answer; where the model may, it ends earlier."""
    sigma: float = 0.9
    """Raggedness: standard deviation of the logarithm of both lengths."""
    temperature: float = 0.7
    """Of the draws."""
    top_p: float = 0.95
    """Of the draws."""
    max_slots: int = 8
    """Sequences that run at once."""
    page_size: int = 16
    """Token places in a page."""
    token_budget: int = 64
    """Rows that a step feeds at most."""
    steps_per_call: int = 16
    """Steps between two looks of the host."""
    seed: int = 0
    """Of lengths, prompts and draws."""

    def __post_init__(self) -> None:
        """Refuses what cannot be served."""
        validation.at_least(self, "num_requests", "max_slots", "page_size")
        validation.at_least(self, "steps_per_call")
        validation.at_least(self, "sigma", "seed", low=0)
        for name in ("prompt_tokens", "output_tokens"):
            validation.ascending(self, name, low=1, strictly=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest answer."""
        return self.prompt_tokens[1] + self.output_tokens[1]

    def requests(
        self, tokenizer: Any, rng: np.random.Generator, *, ignore_eos: bool = False
    ) -> list[PromptRequest]:
        """Cuts held-out prompts; each answer has the seed behind that of the last."""
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
        """The engine's, with room for all requests in its queue."""
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
      tokenizer: of the model that will answer.
      sizes: tokens of each prompt; a file that is shorter gives what it has.
      samplings: how each answer is drawn.
      rng: picks the files, and the line at which each prompt begins.
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
        requests.append(PromptRequest(tokenizer.decode(tokens), tokens, sampling))
    return requests
