"""Models, GPUs, lengths and latency objectives of Sarathi-Serve's experiments.

Source: Agrawal et al. 2024, arXiv:2403.02310, sections 5 and 5.1, tables 1 to 3.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments import lab
from jaxkv.scheduling import chunked_prefill
from jaxkv.simulation import Capacity, SerializedPhases, SimulationMember, make_work
from jaxkv.workloads import LogNormal, Pair, Workload
from scaling.calibration import ServerCost, make_calibrated_cost
from scaling.costs import (
    PAGE_SIZE,
    RooflineCost,
    find_device,
    make_roofline_cost,
    max_kv_pages,
)
from scaling.shapes import CONFIGS, ModelShape, describe_huggingface

MAX_SLOTS = 128
"""Largest batch, that of section 5.2."""
DEVICE = "a100-80gb"
BANDWIDTH_SHARE = 0.8
OVERHEAD_S = 3e-3
"""Fraction of the data sheet's bandwidth that is reached, and fixed time of a step,
both chosen here: a decode step of 32 sequences of 4,096 tokens then takes 34 and 22 ms,
where the paper's objectives of 5 such steps are 0.2 and 0.1 s. The fraction of the peak
FLOP/s is the one measured on the GPU, see `devices`."""

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
# Every layer attends to all tokens: the cost model's sums over a batch do not separate
# sliding windows.
_MISTRAL_7B = CONFIGS["mistral-7b"] | {"sliding_window": None}


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A served model, its GPUs and its latency objectives."""

    name: str
    """Name in the paper."""
    config: Mapping[str, object]
    """Hugging Face config of the shape."""
    num_devices: int
    """Tensor-parallel degree."""
    limits_s: Mapping[str, float]
    """Objectives for the P99 time between tokens in s, "strict" and "relaxed"."""
    is_calibrated: bool = False
    """True for the step times of vLLM servers on H100s, transferred to this GPU by its
    data sheet; False for a roofline."""

    @property
    def description(self) -> ModelShape:
        """Parsed shape."""
        return describe_huggingface(dict(self.config), name=self.name)

    @property
    def num_pages(self) -> int:
        """Number of pages that fit next to the weights.

        Yi-34B: (0.9 * 160 GB - 68.8 GB) / 245,760 bytes per token = 306,000 tokens.
        """
        return max_kv_pages(self.description, DEVICE, self.num_devices)

    @functools.cached_property
    def cost(self) -> RooflineCost | ServerCost:
        """Cost model of a step."""
        device = find_device(DEVICE)
        if self.is_calibrated:
            return make_calibrated_cost(
                self.description, device, num_devices=self.num_devices
            ).cost
        return make_roofline_cost(
            self.description,
            device,
            num_devices=self.num_devices,
            compute_share=device.measured_products / device.rate("bfloat16"),
            bandwidth_share=BANDWIDTH_SHARE,
            overhead_s=OVERHEAD_S,
        ).cost


MODELS: dict[str, ServedModel] = {
    "Yi-34B": ServedModel("Yi-34B", _YI_34B, 2, {"strict": 0.2, "relaxed": 1.0}),
    "Mistral-7B": ServedModel(
        "Mistral-7B", _MISTRAL_7B, 1, {"strict": 0.1, "relaxed": 0.5}
    ),
}
CALIBRATED = " (calibrated)"
"""Ending of the names of models whose step times are calibrated."""
MODELS = MODELS | {
    name + CALIBRATED: dataclasses.replace(model, is_calibrated=True)
    for name, model in MODELS.items()
}

_NORMAL_P90 = 1.2816


def _log_normal(median: float, sigma: float) -> LogNormal:
    return LogNormal(mean=median * math.exp(sigma**2 / 2), sigma=sigma)


def _law(prompt: tuple[int, int], output: int, sigma: float, max_length: int) -> Pair:
    """Returns log-normal lengths, from prompt median and P90 and output median."""
    spread = math.log(prompt[1] / prompt[0]) / _NORMAL_P90
    return Pair(
        prompt=_log_normal(prompt[0], spread),
        output=_log_normal(output, sigma),
        max_prompt=max_length - 1,
        max_length=max_length,
    )


DATASETS: Mapping[str, Pair] = {
    "openchat": _law((1730, 5696), 415, 0.55, 8192),
    "arxiv": _law((7059, 12985), 208, 0.45, 16384),
}
"""Lengths truncated as in the paper; the spread of outputs is chosen here."""


class System(NamedTuple):
    """A schedule of prefill.

    Attributes:
      name: name in tables.
      whole_prompts: see `scheduling.chunked_prefill`.
      first: see `scheduling.chunked_prefill`.
      is_serialized: True if prefill and decode take separate steps.
      budget: token budget of a step; None for whole prompts, see `budget_of`.
      reads_all_waiting: True if a step may prefill all waiting prompts.
      reserves_longest: True if every slot reserves the longest sequence, which limits
        the number of slots.
    """

    name: str
    whole_prompts: bool = False
    first: bool = False
    is_serialized: bool = False
    budget: int | None = None
    reads_all_waiting: bool = False
    reserves_longest: bool = False

    def budget_of(self, law: Pair) -> int:
        """Returns the token budget: prompt tokens, and one for each decoding slot."""
        if self.budget is not None:
            return self.budget
        return (MAX_SLOTS if self.reads_all_waiting else 1) * law.max_length + MAX_SLOTS

    def member(
        self, model: ServedModel, law: Pair, workload: Workload
    ) -> SimulationMember:
        """Returns the simulated machine for a workload."""
        max_running = None
        if self.reserves_longest:
            max_running = max(1, model.num_pages * PAGE_SIZE // law.max_length)
        policy = chunked_prefill(
            whole_prompts=self.whole_prompts, first=self.first, max_running=max_running
        )
        capacity = Capacity.of(
            num_pages=model.num_pages,
            page_size=PAGE_SIZE,
            max_length=law.max_length,
            token_budget=self.budget_of(law),
        )
        cost = SerializedPhases(model.cost, jnp.asarray(self.is_serialized))
        return SimulationMember(workload, capacity, policy, cost)


def chunked_and_mixed(budget: int) -> System:
    """Returns Sarathi's schedule: mixed chunks under a token budget."""
    return System(f"Sarathi ({budget:,})", budget=budget)


VLLM = System("vLLM", whole_prompts=True, first=True)
ORCA_SYSTEM = System(
    "Orca", whole_prompts=True, reads_all_waiting=True, reserves_longest=True
)
SYSTEMS = (ORCA_SYSTEM, VLLM, chunked_and_mixed(512), chunked_and_mixed(2048))
ABLATION_BUDGET = 1024
SCHEDULES = (
    System("prompts first", whole_prompts=True, first=True),
    System("mixed only", whole_prompts=True),
    System("chunks only", is_serialized=True, budget=ABLATION_BUDGET),
    System("both", budget=ABLATION_BUDGET),
)
"""Schedules of table 4, and the prefill-first baseline."""


def prompt_s(model: ServedModel, tokens: float, budget: float | None = None) -> float:
    """Returns the prefill time of one prompt, in chunks of `budget` tokens."""
    size = tokens if budget is None else budget
    edges = [*np.arange(0, tokens, size).tolist(), tokens]
    steps = [
        make_work(
            num_prompts=1,
            num_prompt_rows=after - before,
            prompt_context=after,
            prompt_squares=after**2 - before**2,
            num_drawn=after == tokens,
        )
        for before, after in itertools.pairwise(edges)
    ]
    return sum(float(model.cost(step)) for step in steps)


Loads = Annotated[lab.PositiveFloats, lab.Ascending(minimum=2)]
Budgets = Annotated[tuple[int, ...], lab.Ascending(minimum=2), lab.Range(MAX_SLOTS)]


class Config(lab.ConfigRecord):
    """Extent of the simulation."""

    models: Annotated[tuple[str, ...], lab.Choices(MODELS, minimum=1)] = (
        "Yi-34B",
        "Mistral-7B",
    )
    """Names in `MODELS`; the first also runs the schedule comparison."""
    data: Annotated[tuple[str, ...], lab.Choices(DATASETS, minimum=1)] = (
        "openchat",
        "arxiv",
    )
    """Names in `DATASETS`; the first also runs the budget comparison."""
    shares: Loads = (0.04, 0.09, 0.15, 0.22, 0.3, 0.4, 0.5, 0.65, 0.8, 0.95)
    """Rates of the capacity search, as shares of the rate at which prefill takes up
    all time; ascending."""
    budgets: Budgets = (128, 256, 512, 1024, 2048, 4096, 8192)
    """Token budgets to compare, ascending."""
    share: lab.PositiveFloat = 0.4
    """Rate of the budget and schedule comparisons, as a share."""
    seconds: lab.PositiveFloat = 600.0
    """Simulated seconds of each load."""
    seed: lab.NonNegativeInt = 0
    """Seed of lengths and arrivals."""
