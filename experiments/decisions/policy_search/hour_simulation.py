"""Simulations of hours under many policies and rules of eviction."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from experiments import lab
from experiments.decisions.policy_search.config import Config
from experiments.decisions.policy_search.loads import Hour
from jaxkv import simulation
from jaxkv.memory import Eviction
from jaxkv.scheduling import Policy
from jaxkv.simulation import Capacity, SimulationMember, pad_workload
from jaxkv.workloads import Objectives, Workload, attainment, find_jobs
from scaling import shapes
from scaling.calibration import PRIOR, ServerSetup, draw_coefficients
from scaling.costs import find_device

MAX_LENGTH = 131072
"""Longest sequence of the server, in tokens."""


class HourMetrics(NamedTuple):
    """Metrics of policies on an hour."""

    job_p90_s: Float[np.ndarray, " policies"]
    job_max_s: Float[np.ndarray, " policies"]
    attained_share: Float[np.ndarray, " policies"]


type Rules = tuple[Policy, Eviction]
"""A policy and a rule of eviction."""


class Simulator:
    """Simulates rules on hours, in calls of equal size that share a program."""

    def __init__(self, config: Config, progress: lab.Progress) -> None:
        """Resolves the server."""
        self.config = config
        self._progress = progress
        setup = ServerSetup(
            model=shapes.describe_checkpoint(config.model),
            device=find_device(config.device),
            tensor_parallel=config.tensor_parallel,
            max_model_len=MAX_LENGTH,
            max_num_batched_tokens=config.token_budget,
            max_num_seqs=config.max_num_seqs,
        )
        self._cost = setup.cost(draw_coefficients(np.zeros(len(PRIOR))))
        self._capacity = Capacity.of(
            num_pages=config.num_pages,
            max_length=MAX_LENGTH,
            token_budget=config.token_budget,
        )
        self.simulated_s = 0.0

    def run(
        self, rules: Sequence[Rules], hours: Sequence[Hour], *, is_oracle: bool = False
    ) -> list[HourMetrics]:
        """Returns the metrics of all rules on each hour."""
        config = self.config
        members = [
            SimulationMember(
                workload=_padded(hour.with_oracle() if is_oracle else hour.workload),
                capacity=self._capacity,
                policy=policy,
                cost=self._cost,
                eviction=eviction,
            )
            for hour in hours
            for policy, eviction in rules
        ]
        num = len(members)
        # Hours of one traffic take similar numbers of steps.
        size = min(2 * config.population, num)
        members += members[-1:] * (-num % size)  # the last call repeats its last one
        calls = [
            simulation.simulate(
                simulation.stack(members[i : i + size]),
                max_slots=config.max_num_seqs,
                head=config.head,
                steps_per_call=256,
                progress=self._progress,
            )
            for i in range(0, num, size)
        ]
        objectives = Objectives(config.first_token_s, config.per_token_s)
        end_s = np.concatenate([x.end_s for x in calls])[:num]
        self.simulated_s += float(end_s.sum())
        results = []
        for at, hour in enumerate(hours):
            rows = range(at * len(rules), (at + 1) * len(rules))
            times = [calls[row // size].arrival_s[row % size] for row in rows]
            first = [calls[row // size].first_s[row % size] for row in rows]
            finish = [calls[row // size].finish_s[row % size] for row in rows]
            arrival_s, first_s, finish_s = (
                np.array([x[: hour.job.size] for x in column])
                for column in (times, first, finish)
            )
            latency_s = find_jobs(arrival_s, finish_s, hour.job).latency_s
            output = np.asarray(hour.workload.output)
            results.append(
                HourMetrics(
                    np.percentile(latency_s, 90, axis=1),
                    latency_s.max(axis=1),
                    attainment(arrival_s, first_s, finish_s, output, objectives),
                )
            )
        return results


def _padded(workload: Workload) -> Workload:
    """Pads a workload to powers of 2, so that hours share programs."""
    d = workload.dependencies
    chains = workload.chains
    assert d is not None
    assert chains is not None
    num, lanes, num_chains = (
        max(low, 1 << (x.shape[0] - 1).bit_length())
        for x, low in ((workload.prompt, 128), (d.lane_start, 32), (chains.first, 32))
    )
    return pad_workload(workload, num, (1, 1, lanes), num_chains)
