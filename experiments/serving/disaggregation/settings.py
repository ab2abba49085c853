"""Models, requests and objectives of DistServe's experiments.

Source: Zhong et al. 2024, arXiv:2401.09670, sections 2, 3.1 and 6.1, table 1, figure 1.
"""

import dataclasses
from typing import NamedTuple

from experiments.harness import cost_models
from experiments.harness.cost_models import PAGE_SIZE
from jaxkv import validation
from jaxkv.simulation import Capacity
from jaxkv.simulation.disaggregated import Replica
from jaxkv.workloads import Objectives, lengths
from scaling.costs import devices, serving
from scaling.shapes import published

DEVICE = "a100-80gb"
MAX_SLOTS = 256
"""Sequences at once at most: vLLM's default."""
MAX_LENGTH = 2048
"""Tokens of OPT's longest sequence."""
TOKEN_BUDGET = 2560
"""Prompt tokens of a step: vLLM's default."""
LINK = devices.find(DEVICE).link
"""Bytes a second that one GPU sends to another, over NVLink."""
MAX_INSTANCES = 4
"""Of a phase, in a placement."""


class Instance(NamedTuple):
    """GPUs that hold one copy of a model.

    Attributes:
      model: its name among the published fits, `opt-13b` or `opt-66b`.
      ways: the tensor-parallel degree: GPUs, each with a share of every layer.
    """

    model: str
    ways: int

    @property
    def cost(self) -> cost_models.Linear:
        """How long its steps take."""
        return cost_models.distserve(f"distserve:{self.model}:{self.ways}").cost

    @property
    def num_pages(self) -> int:
        """Pages that fit beside the weights."""
        description = published.describe(self.model)
        return cost_models.num_pages(description, DEVICE, self.ways)

    @property
    def replica(self) -> Replica:
        """What is simulated; a sequence that comes to decode is a token longer."""
        capacity = Capacity.of(
            num_pages=self.num_pages,
            page_size=PAGE_SIZE,
            max_length=MAX_LENGTH + 1,
            token_budget=TOKEN_BUDGET,
        )
        return Replica(self.cost, capacity, self.ways, kv_bytes(self.model))


def kv_bytes(model: str) -> int:
    """Bytes of K and V of one token: of OPT-66B 2 * 64 * 9216 * 2 = 2,359,296."""
    return int(serving.kv_bytes_per_token(published.describe(model)))


class Application(NamedTuple):
    """What is asked of a model, and what users were promised.

    Attributes:
      model: its name.
      law: the distribution of lengths.
      objectives: for the first token and for the others.
      colocated_gpus: GPUs of one copy that runs both phases.
      ways: tensor-parallel degrees among which each phase may choose alone.
      ratio: published goodput over that of vLLM, lowest and highest.
      where: in the paper.
    """

    model: str
    law: lengths.Pair
    objectives: Objectives
    colocated_gpus: int
    ways: tuple[int, ...]
    ratio: tuple[float, float]
    where: str


def _law(mean: tuple[float, float], shape: tuple[float, float]) -> lengths.Pair:
    """Gamma distributions of prompts and of answers."""
    return lengths.Pair(
        prompt=lengths.Gamma(mean=mean[0], shape=shape[0]),
        output=lengths.Gamma(mean=mean[1], shape=shape[1]),
        max_prompt=MAX_LENGTH - 1,
        max_length=MAX_LENGTH,
        keeps_means=True,
    )


CHAT = _law((755.5, 200.3), (4.0, 1.3))
"""ShareGPT as they cut it. Here and below the means are theirs, set down from memory,
and the shapes are our choice. One GPU reads 1,400 tokens for OPT-13B within 0.25 s,
which 90 % of its requests keep in the paper: so of prompts the shape is 2.5 at least.
"""
CODE = _law((171.3, 98.2), (6.0, 2.0))
"""HumanEval."""
SUMMARIES = _law((1738.3, 90.7), (40.0, 2.0))
"""LongBench; nearly all prompts are as long as OPT lets them be."""

_CHAT, _CODE = "section 6.2: chat, over all models", "section 6.2: code completion"
_SUMMARIES = "section 6.2: summaries"

APPLICATIONS: dict[str, Application] = {
    "chat, 13B": Application(
        "opt-13b", CHAT, Objectives(0.25, 0.1), 1, (1, 2, 4), (2.0, 4.6), _CHAT
    ),
    "chat, 66B": Application(
        "opt-66b", CHAT, Objectives(2.5, 0.15), 4, (4, 8), (2.0, 4.6), _CHAT
    ),
    "code, 66B": Application(
        "opt-66b", CODE, Objectives(0.125, 0.2), 4, (4, 8), (5.7, 5.7), _CODE
    ),
    "summaries, 66B": Application(
        "opt-66b", SUMMARIES, Objectives(15.0, 0.15), 4, (4, 8), (4.3, 4.3), _SUMMARIES
    ),
}
EXAMPLE = "example, 13B"
"""Of figure 1."""
KNOWN = APPLICATIONS | {
    EXAMPLE: Application(
        "opt-13b",
        lengths.Pair(prompt=lengths.Fixed(tokens=512), output=lengths.Fixed(tokens=64)),
        Objectives(first_s=0.4, per_token_s=0.04),
        colocated_gpus=1,
        ways=(1,),
        ratio=(2.1, 2.1),
        where="section 2",
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How much is simulated."""

    applications: tuple[str, ...] = tuple(APPLICATIONS)
    """Names in `APPLICATIONS`."""
    shares: tuple[float, ...] = (0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1)
    """Rates at which goodput is looked for, as shares of one that is hardly sustained;
    ascending."""
    links: tuple[float, ...] = (2e9, 4e9, 6e9, 8e9, 12e9, 25e9)
    """Slower ways for keys and values, bytes a second from GPU to GPU."""
    seconds: float = 300.0
    """Simulated, of each."""
    queue_loads: tuple[float, ...] = (0.2, 0.4, 0.6, 0.75)
    """What a replica's time is taken up by, where it is a queue; below 1."""
    queue_requests: int = 16000
    """Of each seed."""
    queue_seeds: int = 384
    """Seeds of each load."""
    seed: int = 0
    """Of lengths and arrivals."""

    def __post_init__(self) -> None:
        """Refuses what is not known, or leaves nothing to compare."""
        validation.among(self, "applications", known=APPLICATIONS)
        validation.above(self, "shares", "links", "seconds")
        validation.ascending(self, "shares", least=2)
        validation.ascending(self, "queue_loads", strictly=False)
        validation.within(self, "queue_loads", low=0, high=1, ends="()")
        validation.at_least(self, "queue_requests", "queue_seeds", low=2)
        validation.at_least(self, "seed", low=0)
