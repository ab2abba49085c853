"""Models, requests and latency objectives of DistServe's experiments.

Source: Zhong et al. 2024, arXiv:2401.09670, sections 2, 3.1 and 6.1, table 1, figure 1.
"""

from typing import Annotated, NamedTuple

from experiments import lab
from jaxkv.simulation import Capacity, Replica
from jaxkv.workloads import Fixed, Gamma, Objectives, Pair
from scaling import shapes
from scaling.costs import (
    PAGE_SIZE,
    LinearCost,
    distserve_cost,
    find_device,
    kv_bytes_per_token,
    max_kv_pages,
)

DEVICE = "a100-80gb"
MAX_SLOTS = 256
"""Largest batch, vLLM's default."""
MAX_LENGTH = 2048
"""Longest sequence of OPT in tokens."""
TOKEN_BUDGET = 2560
"""Prompt tokens of a step, vLLM's default."""
LINK = find_device(DEVICE).link
"""Bandwidth of NVLink between 2 GPUs in bytes/s."""
MAX_INSTANCES = 4
"""Largest number of replicas of a phase in a placement."""


class Instance(NamedTuple):
    """GPUs that hold one copy of a model.

    Attributes:
      model: name among the published fits, `opt-13b` or `opt-66b`.
      ways: tensor-parallel degree.
    """

    model: str
    ways: int

    @property
    def cost(self) -> LinearCost:
        """Cost model of a step."""
        return distserve_cost(f"distserve:{self.model}:{self.ways}").cost

    @property
    def num_pages(self) -> int:
        """Number of pages that fit next to the weights."""
        description = shapes.describe(self.model)
        return max_kv_pages(description, DEVICE, self.ways)

    @property
    def replica(self) -> Replica:
        """Simulated replica; a sequence that is sent to decode is a token longer."""
        capacity = Capacity.of(
            num_pages=self.num_pages,
            page_size=PAGE_SIZE,
            max_length=MAX_LENGTH + 1,
            token_budget=TOKEN_BUDGET,
        )
        return Replica(self.cost, capacity, self.ways, kv_bytes(self.model))


def kv_bytes(model: str) -> int:
    """Returns bytes of K and V per token; OPT-66B: 2 * 64 * 9216 * 2 = 2,359,296."""
    return int(kv_bytes_per_token(shapes.describe(model)))


class Application(NamedTuple):
    """Requests of an application and its latency objectives.

    Attributes:
      model: name of the model.
      law: distribution of lengths.
      objectives: objectives for the first and the following tokens.
      colocated_gpus: GPUs of one copy that runs both phases.
      ways: tensor-parallel degrees to choose from for each phase.
      ratio: published goodput over vLLM's, lowest and highest.
      where: place in the paper.
    """

    model: str
    law: Pair
    objectives: Objectives
    colocated_gpus: int
    ways: tuple[int, ...]
    ratio: tuple[float, float]
    where: str


def _law(mean: tuple[float, float], shape: tuple[float, float]) -> Pair:
    """Returns gamma distributions of prompts and answers."""
    return Pair(
        prompt=Gamma(mean=mean[0], shape=shape[0]),
        output=Gamma(mean=mean[1], shape=shape[1]),
        max_prompt=MAX_LENGTH - 1,
        max_length=MAX_LENGTH,
        keeps_means=True,
    )


CHAT = _law((755.5, 200.3), (4.0, 1.3))
"""ShareGPT as DistServe truncates it. Here and below, means are those of figure 7, and
shapes are chosen here. One GPU prefills 1,400 tokens of OPT-13B in 0.25 s, which 90 %
of its requests meet in the paper, so the shape of prompts is at least 2.5.
"""
CODE = _law((171.3, 98.2), (6.0, 2.0))
"""HumanEval."""
SUMMARIES = _law((1738.3, 90.7), (40.0, 2.0))
"""LongBench; nearly all prompts have OPT's longest length."""

_CHAT_SOURCE = "section 6.2: chat, over all models"
_CODE_SOURCE = "section 6.2: code completion"
_SUMMARIES_SOURCE = "section 6.2: summaries"

APPLICATIONS: dict[str, Application] = {
    "chat, 13B": Application(
        "opt-13b", CHAT, Objectives(0.25, 0.1), 1, (1, 2, 4), (2.0, 4.6), _CHAT_SOURCE
    ),
    "chat, 66B": Application(
        "opt-66b", CHAT, Objectives(2.5, 0.15), 4, (4, 8), (2.0, 4.6), _CHAT_SOURCE
    ),
    "code, 66B": Application(
        "opt-66b", CODE, Objectives(0.125, 0.2), 4, (4, 8), (5.7, 5.7), _CODE_SOURCE
    ),
    "summaries, 66B": Application(
        "opt-66b",
        SUMMARIES,
        Objectives(15.0, 0.15),
        4,
        (4, 8),
        (4.3, 4.3),
        _SUMMARIES_SOURCE,
    ),
}
EXAMPLE = "example, 13B"
"""Example of figure 1."""
KNOWN = APPLICATIONS | {
    EXAMPLE: Application(
        "opt-13b",
        Pair(prompt=Fixed(tokens=512), output=Fixed(tokens=64)),
        Objectives(first_s=0.4, per_token_s=0.04),
        colocated_gpus=1,
        ways=(1,),
        ratio=(2.1, 2.1),
        where="section 2",
    )
}


Loads = Annotated[lab.PositiveFloats, lab.Ascending(minimum=2)]


class Config(lab.ConfigRecord):
    """Extent of the simulation."""

    applications: Annotated[tuple[str, ...], lab.Choices(APPLICATIONS)] = tuple(
        APPLICATIONS
    )
    """Names in `APPLICATIONS`."""
    shares: Loads = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1)
    """Rates of the goodput search, as shares of `search_limits`; ascending."""
    links: lab.PositiveFloats = (2e9, 4e9, 6e9, 8e9, 12e9, 25e9)
    """Link bandwidths to simulate in bytes/s from GPU to GPU."""
    seconds: lab.PositiveFloat = 300.0
    """Simulated seconds of each load."""
    queue_loads: Annotated[
        tuple[float, ...], lab.Ascending(strictly=False), lab.Range(0, 1, "()")
    ] = (0.2, 0.4, 0.6, 0.75)
    """Utilisations of the queue study, below 1."""
    queue_requests: Annotated[int, lab.Range(2)] = 16000
    """Requests of each seed."""
    queue_seeds: Annotated[int, lab.Range(2)] = 384
    """Seeds of each load."""
    seed: lab.NonNegativeInt = 0
    """Seed of lengths and arrivals."""
