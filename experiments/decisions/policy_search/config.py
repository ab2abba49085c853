"""Configs of the search."""

from typing import Annotated

from experiments import lab
from experiments.decisions.policy_search.loads import TRAFFICS
from jaxkv import validation

RIVALS = ("vLLM", "shortest remaining", "ageing", "earliest deadline", "fair share")
"""Policies of the library that know no more than a server; with LRU."""


class Config(lab.ConfigRecord):
    """Traffic, server, objective and budget."""

    traffics: tuple[str, ...] = tuple(TRAFFICS)
    """Traffics of sessions, names of `loads.TRAFFICS`."""
    jobs_per_s: lab.PositiveFloats = (0.8, 0.32, 0.32, 1.8)
    """Rate of each traffic in sessions per second."""
    num_jobs: lab.PositiveInt = 32
    """Sessions of an hour: its length is that of their arrivals and answers."""
    recorded: tuple[str, ...] = ("azure_conv", "azure_code")
    """Recorded traces in the folder JAXKV_DATA; absent ones are skipped."""
    recorded_per_s: lab.PositiveFloats = (1.4, 1.1)
    """Rate of each recorded trace in requests per second."""
    num_requests: lab.PositiveInt = 512
    """Requests of a recorded hour."""
    hours: lab.PositiveInts = (3, 2, 4)
    """Hours of each traffic of sessions for training, validation and test."""
    recorded_hours: lab.PositiveInts = (8, 3, 6)
    """Hours of each recorded trace for training, validation and test."""
    transfer: lab.PositiveFloat = 0.85
    """Rate of the second test, relative to that of the search."""
    model: str = "meta-llama/Llama-3.1-70B"
    """Served model."""
    device: str = "h100"
    """Device."""
    tensor_parallel: lab.PositiveInt = 4
    """Devices that divide the model."""
    max_num_seqs: lab.PositiveInt = 16
    """Slots."""
    num_pages: lab.PositiveInt = 6000
    """Pages of the pool, of 16 tokens: some nine mean sessions."""
    token_budget: lab.PositiveInt = 2048
    """Largest number of tokens fed in a step."""
    head: lab.PositiveInt = 32
    """Waiting requests that a policy sees."""
    population: lab.PositiveInt = 12
    """Policies of a generation."""
    generations: lab.PositiveInt = 44
    """Generations of CMA-ES, and of random search; each serves all train hours."""
    sigma: lab.PositiveFloat = 0.4
    """First standard deviation of the weights, and that of random search."""
    goodput_weight: lab.NonNegativeFloat = 0.2
    """Weight of the loss of attainment in the objective."""
    fairness_weight: lab.NonNegativeFloat = 0.1
    """Weight of the logarithm of the longest job's time in the objective."""
    first_token_s: lab.PositiveFloat = 2.0
    """Objective of the time to first token."""
    per_token_s: lab.PositiveFloat = 0.05
    """Objective of the time per output token."""
    rivals: Annotated[tuple[str, ...], lab.Choices(RIVALS)] = RIVALS
    """Policies of the library, in addition to `FCFS + LRU` and the oracle."""
    verified_loads: lab.PositiveInt = 3
    """Random loads on which the engine serves the winner."""
    seed: lab.NonNegativeInt = 0
    """Seed of both searches."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        for name, names, rates in (
            ("traffics", self.traffics, self.jobs_per_s),
            ("recorded", self.recorded, self.recorded_per_s),
        ):
            if len(rates) < len(names):
                raise ValueError(f"{name}={names} must have a rate each, not {rates}")
        for traffic in self.traffics:
            validation.choice("traffics", traffic, tuple(TRAFFICS))
        if not self.traffics:
            raise ValueError("traffics=() must have at least one traffic")
        for name, hours in (
            ("hours", self.hours),
            ("recorded_hours", self.recorded_hours),
        ):
            if len(hours) != 3:
                raise ValueError(f"{name}={hours} must be three numbers")


CONFIGS = {
    "smoke": Config(
        traffics=("short",),
        recorded=(),
        num_jobs=4,
        hours=(1, 1, 1),
        population=4,
        generations=2,
        rivals=("vLLM",),
        verified_loads=1,
    ),
    "cpu": Config(),
    "quick": Config(
        num_requests=128,
        hours=(1, 1, 2),
        recorded_hours=(1, 1, 2),
        generations=12,
        verified_loads=2,
    ),
}
