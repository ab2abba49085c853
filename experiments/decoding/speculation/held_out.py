"""Decodes held-out code with several methods in alternating rounds."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from experiments import lab
from experiments.decoding.speculation import serving
from experiments.decoding.speculation.serving import DECODING_METHODS, PLAIN_DECODING
from experiments.harness import Server, cut_held_out_prompts, measure_in_turns
from jaxkv.engine import EngineConfig
from jaxkv.models import LoadedModel
from jaxkv.sampling import Sampling
from jaxkv.speculation import NUM_DRAFT_BUCKETS

type Setting = tuple[int, float]
"""Batch size and temperature."""
type Requests = tuple[list[list[int]], list[Sampling]]
"""Prompts and their sampling."""


class TextConfig(lab.ConfigRecord):
    """Held-out code to continue, and rounds of all methods."""

    model: str = "stdlib-bytes"
    """Model folder or bundled model."""
    num_prompts: lab.PositiveInt = 8
    """Texts that are continued one at a time."""
    prompt_tokens: lab.PositiveInt = 128
    """Tokens of each prompt."""
    output_tokens: int = 320
    """Tokens of each answer; end tokens are ignored."""
    rounds: lab.PositiveInt = 3
    """Rounds of each method."""
    steps_per_call: lab.PositiveInt = 8
    """Steps per call of the engine."""
    seed: lab.NonNegativeInt = 0
    """Seed of prompts and sampling."""

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.prompt_tokens + self.output_tokens

    def check_answer_length(self, most_drafts: int, min_tokens: int = 0) -> None:
        """Checks that answers are long enough to time.

        A call prefills the prompt, and another one must not end the answer.

        Raises:
          ValueError: `output_tokens` is too small.
        """
        min_tokens = max(min_tokens, 2 * self.steps_per_call * (1 + most_drafts))
        if self.output_tokens <= min_tokens:
            raise ValueError(
                f"output_tokens={self.output_tokens!r} must be more than {min_tokens}"
            )

    def bounds(self, method: str, batch: int, num_drafts: int) -> EngineConfig:
        """Returns the engine config of a method."""
        num_draft_buckets = (
            NUM_DRAFT_BUCKETS if DECODING_METHODS[method].adaptive else 1
        )
        return serving.drafting_engine_config(
            batch, num_drafts, self.max_length, self.steps_per_call, num_draft_buckets
        )

    def requests(self, tokenizer: Any, setting: Setting) -> Requests:
        """Returns the requests of whole batches: `num_prompts`, or one larger batch."""
        batch, temperature = setting
        num = batch * -(-self.num_prompts // batch)
        return self.cut(tokenizer, num, temperature, self.output_tokens)

    def cut(
        self, tokenizer: Any, num: int, temperature: float, max_tokens: int
    ) -> Requests:
        """Cuts prompts; end tokens of answers are ignored."""
        ask = Sampling(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
        asks = [dataclasses.replace(ask, seed=self.seed + i) for i in range(num)]
        rng = np.random.default_rng(self.seed)
        sizes = [self.prompt_tokens] * num
        requests = cut_held_out_prompts(tokenizer, sizes, asks, rng)
        return [request.tokens for request in requests], asks


def decode_in_turns(
    config: TextConfig,
    model: LoadedModel,
    settings: Iterable[Setting],
    ways: Callable[[Setting], Iterable[tuple[str, int]]],
    progress: lab.Progress,
    *,
    rounds: int | None = None,
    serve: Callable[[str, EngineConfig], Server] | None = None,
) -> Iterator[tuple[object, ...]]:
    """Serves the same requests in turns, plainly and with every method.

    Args:
      config: the requests.
      model: served model.
      settings: batch sizes and temperatures.
      ways: returns methods and draft lengths of a setting.
      progress: receives progress.
      rounds: rounds of each method; None means `config.rounds`.
      serve: builds the server of a method; None means from the model only.

    Yields:
      A row of `DecodingRuns` for each setting and method.
    """
    batches = []
    make = serve or functools.partial(serving.make_server, model)

    def requests(setting: Setting) -> Requests:
        return config.requests(model.tokenizer, setting)

    def begin(setting: Setting) -> list[Server]:
        # Too many programs at once exceed the limit of memory mappings of a process.
        if batches and batches[-1] != setting[0]:
            jax.clear_caches()
        batches.append(setting[0])
        texts, asks = requests(setting)
        servers = []
        for method, num_drafts in ((PLAIN_DECODING, 0), *ways(setting)):
            server = make(method, config.bounds(method, setting[0], num_drafts))
            # An adaptive draft length is measured after it has adapted.
            num = len(texts) if DECODING_METHODS[method].adaptive else setting[0]
            serving.decode_batches(server, texts[:num], asks[:num])  # compiles
            servers.append(server)
        return servers

    def measure(
        setting: Setting, server: Server
    ) -> tuple[list[list[int]], serving.DecodeCounts]:
        return serving.decode_batches(server, *requests(setting))

    def step_s(
        rounds: list[tuple[list[list[int]], serving.DecodeCounts]],
    ) -> np.ndarray:
        return np.array(
            [x.call_s / x.call_steps if x.call_steps else math.nan for _, x in rounds]
        )

    for setting, servers, runs_by_server in measure_in_turns(
        settings,
        rounds or config.rounds,
        begin,
        measure,
        progress=progress,
        bar_label="decoding",
        case_name="batch and temperature",
    ):
        plain = runs_by_server[servers[0].name]
        for server, case in zip(servers[1:], ways(setting), strict=True):
            subset = runs_by_server[server.name]
            # Counts differ between rounds only for methods that adapt.
            counts = [*zip(*(counts for _, counts in subset), strict=True)][:4]
            answers = subset[0][0]
            reference = plain[0][0]
            pairs = [
                zip(a, b, strict=True) for a, b in zip(answers, reference, strict=True)
            ]
            yield (
                *(*case, *setting),
                *(round(np.mean(count)) for count in counts),
                *(step_s(subset), step_s(plain)),
                sum(map(len, answers)),
                sum(a != b for pair in pairs for a, b in pair),
            )
