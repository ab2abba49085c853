"""Models, GPUs, lengths and objectives of Sarathi-Serve's experiments.

Source: Agrawal et al. 2024, arXiv:2403.02310, sections 5 and 5.1, tables 1 to 3.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.harness import cost_models
from experiments.harness.cost_models import PAGE_SIZE
from jaxkv import validation
from jaxkv.scheduling.chunked_prefill import chunked_prefill
from jaxkv.simulation import Capacity, SerializedPhases, SimulationMember, costs
from jaxkv.workloads import arrivals, lengths
from scaling.costs import devices, parameters
from scaling.shapes import huggingface, published

MAX_SLOTS = 128
"""Sequences at once at most: the largest batch of section 5.2."""
DEVICE = "a100-80gb"
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


@dataclasses.dataclass(frozen=True)
class Model:
    """What is served, on how many GPUs, with what promise."""

    name: str
    """As the paper has it."""
    config: Mapping[str, object]
    """Its shape."""
    num_devices: int
    """GPUs that share every layer."""
    limits_s: Mapping[str, float]
    """Objectives for the time between tokens, of which 99 % keep it, by name: strict,
    and relaxed, where users are patient."""

    @property
    def description(self) -> parameters.Description:
        """Its shape, read."""
        return huggingface.describe(dict(self.config), name=self.name)

    @property
    def num_pages(self) -> int:
        """Pages that fit.

        Yi-34B: (0.9 * 160 GB - 68.8 GB) / 245,760 bytes a token = 306,000 tokens.
        """
        return cost_models.num_pages(self.description, DEVICE, self.num_devices)

    @functools.cached_property
    def cost(self) -> cost_models.Roofline:
        """How long its steps take."""
        device = devices.find(DEVICE)
        return cost_models.roofline(
            self.description,
            device,
            num_devices=self.num_devices,
            compute_share=device.measured_products / device.rate("bfloat16"),
            bandwidth_share=BANDWIDTH_SHARE,
            overhead_s=OVERHEAD_S,
        ).cost


MODELS: Mapping[str, Model] = {
    "Yi-34B": Model("Yi-34B", _YI_34B, 2, {"strict": 0.2, "relaxed": 1.0}),
    "Mistral-7B": Model("Mistral-7B", _MISTRAL_7B, 1, {"strict": 0.1, "relaxed": 0.5}),
}

_NORMAL_P90 = 1.2816


def _log_normal(median: float, sigma: float) -> lengths.LogNormal:
    return lengths.LogNormal(mean=median * math.exp(sigma**2 / 2), sigma=sigma)


def _law(
    prompt: tuple[int, int], output: int, sigma: float, max_length: int
) -> lengths.Pair:
    """Log-normal lengths: of prompts by median and 90 %, of outputs by their median."""
    spread = math.log(prompt[1] / prompt[0]) / _NORMAL_P90
    return lengths.Pair(
        prompt=_log_normal(prompt[0], spread),
        output=_log_normal(output, sigma),
        max_prompt=max_length - 1,
        max_length=max_length,
    )


DATA: Mapping[str, lengths.Pair] = {
    "openchat": _law((1730, 5696), 415, 0.55, 8192),
    "arxiv": _law((7059, 12985), 208, 0.45, 16384),
}
"""Lengths as the paper cuts them; the outputs' spread is our choice."""


class System(NamedTuple):
    """A way to read prompts.

    Attributes:
      name: what it is called.
      whole: as for `scheduling.chunked_prefill`, like the next.
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

    def budget_of(self, law: lengths.Pair) -> int:
        """Tokens of a step: one long prompt or several short ones, and who decodes."""
        if self.budget is not None:
            return self.budget
        return (MAX_SLOTS if self.many else 1) * law.max_length + MAX_SLOTS

    def member(
        self, model: Model, law: lengths.Pair, workload: arrivals.Workload
    ) -> SimulationMember:
        """The machine that serves a workload this way."""
        most = None
        if self.reserves:
            most = max(1, model.num_pages * PAGE_SIZE // law.max_length)
        policy = chunked_prefill(whole=self.whole, first=self.first, max_running=most)
        capacity = Capacity.of(
            num_pages=model.num_pages,
            page_size=PAGE_SIZE,
            max_length=law.max_length,
            token_budget=self.budget_of(law),
        )
        cost = SerializedPhases(model.cost, jnp.asarray(self.apart))
        return SimulationMember(workload, capacity, policy, cost)


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
        costs.make_work(
            num_prompt_rows=after - before,
            prompt_context=after,
            prompt_squares=after**2 - before**2,
            num_drawn=after == tokens,
        )
        for before, after in itertools.pairwise(edges)
    ]
    return sum(float(model.cost(step)) for step in steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How much is simulated."""

    models: tuple[str, ...] = ("Yi-34B", "Mistral-7B")
    """Names in `MODELS`; the first is looked at closely."""
    data: tuple[str, ...] = ("openchat", "arxiv")
    """Names in `DATA`; the first is looked at closely."""
    shares: tuple[float, ...] = (0.04, 0.09, 0.15, 0.22, 0.3, 0.4, 0.5, 0.65, 0.8, 0.95)
    """Rates at which capacities are looked for, as shares of that at which reading
    prompts alone fills the machine; ascending."""
    budgets: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    """Tokens of a step at which chunks are compared; ascending."""
    share: float = 0.4
    """Rate of that comparison, and of the four ways."""
    seconds: float = 600.0
    """Simulated, of each."""
    seed: int = 0
    """Of lengths and arrivals."""

    def __post_init__(self) -> None:
        """Refuses what is not known, or leaves nothing to compare."""
        validation.among(self, "models", known=MODELS, least=1)
        validation.among(self, "data", known=DATA, least=1)
        validation.ascending(self, "shares", "budgets", least=2)
        validation.above(self, "shares", "share", "seconds")
        # A token for each sequence that decodes.
        validation.at_least(self, "budgets", low=MAX_SLOTS)
        validation.at_least(self, "seed", low=0)
