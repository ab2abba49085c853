"""Models, GPUs, lengths and objectives of Sarathi-Serve's experiments.

Source: Agrawal et al. 2024, arXiv:2403.02310, sections 5 and 5.1, tables 1 to 3.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.harness import cost_models
from jaxkv.scheduling.chunked_prefill import reading
from jaxkv.simulation import Apart, Capacity, Members, costs
from jaxkv.workloads import arrivals, lengths
from scaling.costs import devices, parameters, serving
from scaling.shapes import huggingface, published

PAGE_SIZE = 16
MAX_SLOTS = 128
"""Sequences at once at most: the largest batch of section 5.2."""
DEVICE = "a100-80gb"
MEMORY_SHARE = 0.9
"""Of the GPUs' memory, weights and pages together: vLLM's default."""
BANDWIDTH_SHARE, OVERHEAD_S = 0.8, 3e-3
"""What is reached of the data sheet's bandwidth, and what every step costs besides. Our
choice: a decode step of 32 sequences of 4,096 tokens then takes 34 and 22 ms, where the
paper's objectives, 5 such steps, are 0.2 and 0.1 s. Of the products' rate, the share
that was measured of the GPU is reached, see `devices`."""

_YI_34B = {
    "model_type": "llama",
    "hidden_size": 7168,
    "num_hidden_layers": 60,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "intermediate_size": 20480,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
}
"""01.AI 2024, arXiv:2403.04652, table 1."""
# Every layer attends to everything: sums over a batch do not tell the window's part.
_MISTRAL_7B = published.CONFIGS["mistral-7b"] | {"sliding_window": None}


class Model(NamedTuple):
    """What is served, on how many GPUs, with what promise.

    Attributes:
      name: as the paper has it.
      config: the model's shape.
      num_devices: GPUs that share every layer.
      strict_s: objective for the time between tokens, of which 99 % keep it.
      relaxed_s: the same where users are patient.
    """

    name: str
    config: Mapping[str, object]
    num_devices: int
    strict_s: float
    relaxed_s: float

    @property
    def description(self) -> parameters.Description:
        """Its shape."""
        return huggingface.describe(dict(self.config), name=self.name)

    @property
    def num_pages(self) -> int:
        """Pages that fit beside the weights.

        Yi-34B: (0.9 * 160 GB - 68.8 GB) / 245,760 bytes a token = 306,000 tokens.
        """
        return serving.max_batch(
            self.description,
            devices.find(DEVICE),
            context=PAGE_SIZE,
            num_devices=self.num_devices,
            memory_share=MEMORY_SHARE,
        )

    @property
    def cost(self) -> cost_models.Roofline:
        """How long its steps take."""
        return _cost(self.name)

    @property
    def limits_s(self) -> dict[str, float]:
        """Its objectives by name."""
        return {"strict": self.strict_s, "relaxed": self.relaxed_s}


MODELS: Mapping[str, Model] = {
    "Yi-34B": Model("Yi-34B", _YI_34B, 2, 0.2, 1.0),
    "Mistral-7B": Model("Mistral-7B", _MISTRAL_7B, 1, 0.1, 0.5),
}


@functools.cache
def _cost(name: str) -> cost_models.Roofline:
    model = MODELS[name]
    device = devices.find(DEVICE)
    found = cost_models.roofline(
        model.description,
        device,
        num_devices=model.num_devices,
        compute_share=device.measured_products / device.rate("bfloat16"),
        bandwidth_share=BANDWIDTH_SHARE,
        overhead_s=OVERHEAD_S,
    ).cost
    assert isinstance(found, cost_models.Roofline)
    return found


class Data(NamedTuple):
    """Requests.

    Attributes:
      name: as the paper has it.
      law: their lengths.
      max_length: tokens; longer ones were left out.
    """

    name: str
    law: lengths.Pair
    max_length: int


def _log_normal(median: float, sigma: float) -> lengths.LogNormal:
    return lengths.LogNormal(mean=median * math.exp(sigma**2 / 2), sigma=sigma)


_NORMAL_P90 = 1.2816


def _data(
    name: str, prompt: tuple[int, int], output: int, sigma: float, max_length: int
) -> Data:
    """Log-normal lengths: of prompts by median and 90 %, of outputs by their median."""
    spread = math.log(prompt[1] / prompt[0]) / _NORMAL_P90
    law = lengths.Pair(
        prompt=_log_normal(prompt[0], spread),
        output=_log_normal(output, sigma),
        max_prompt=max_length - 1,
        max_length=max_length,
    )
    return Data(name, law, max_length)


DATA: Mapping[str, Data] = {
    "openchat": _data("openchat", (1730, 5696), 415, 0.55, 8192),
    "arxiv": _data("arxiv", (7059, 12985), 208, 0.45, 16384),
}
"""The outputs' spread is our choice."""


class System(NamedTuple):
    """A way to read prompts.

    Attributes:
      name: what it is called.
      whole: as for `scheduling.chunked_prefill.reading`, like the next.
      first: see there.
      apart: whether chunks are read in steps of their own.
      budget: tokens that a step feeds; None where prompts are whole, see `budget_of`.
      many: whether all prompts that wait may be read in one step.
      reserves: whether every slot reserves the longest sequence, so that there are few.
    """

    name: str
    whole: bool = False
    first: bool = False
    apart: bool = False
    budget: int | None = None
    many: bool = False
    reserves: bool = False

    def budget_of(self, data: Data) -> int:
        """Tokens of a step: one long prompt or several short ones, and who decodes."""
        if self.budget is not None:
            return self.budget
        return (MAX_SLOTS if self.many else 1) * data.max_length + MAX_SLOTS

    def member(self, model: Model, data: Data, workload: arrivals.Workload) -> Members:
        """The machine that serves a workload this way."""
        most = None
        if self.reserves:
            most = max(1, model.num_pages * PAGE_SIZE // data.max_length)
        policy = reading(whole=self.whole, first=self.first, max_running=most)
        capacity = Capacity.of(
            num_pages=model.num_pages,
            page_size=PAGE_SIZE,
            max_length=data.max_length,
            token_budget=self.budget_of(data),
        )
        cost = Apart(model.cost, jnp.asarray(self.apart))
        return Members(workload, capacity, policy, cost)


def both(budget: int) -> System:
    """Chunks, mixed, under a budget: Sarathi."""
    return System(f"Sarathi ({budget:,})", budget=budget)


VLLM = System("vLLM", whole=True, first=True)
ORCA = System("Orca", whole=True, many=True, reserves=True)
SYSTEMS = (ORCA, VLLM, both(512), both(2048))
ABLATION_BUDGET = 1024
WAYS = (
    System("prompts first", whole=True, first=True),
    System("mixed only", whole=True),
    System("chunks only", apart=True, budget=ABLATION_BUDGET),
    System("both", budget=ABLATION_BUDGET),
)
"""Table 4's, and what it is held against."""


def prompt_s(model: Model, tokens: float, budget: float | None = None) -> float:
    """How long a prompt takes to be read alone, in chunks of `budget`."""
    size = tokens if budget is None else budget
    edges = [*np.arange(0, tokens, size).tolist(), tokens]
    steps = [
        costs.work(
            num_prompt_rows=after - before,
            prompt_context=after,
            prompt_squares=after**2 - before**2,
            num_drawn=after == tokens,
        )
        for before, after in itertools.pairwise(edges)
    ]
    return sum(float(model.cost(step)) for step in steps)
