"""Rates of DistServe's first figure, with fitted or with drawn step times."""

from typing import Any

import numpy as np

from experiments import lab
from experiments.serving.disaggregation import runs, settings
from experiments.serving.latency_vs_rate import drawings
from jaxkv.simulation import (
    Job,
    ReplicaRole,
    drop_late_arrivals,
    sample_requests,
    select_requests,
    simulate_jobs,
)
from jaxkv.workloads import goodput
from scaling.costs import LinearCost

PRINTED = {"prefill": 5.6, "decode": 10.0, "both": 1.6, "split": 3.3}
"""Requests/s of one GPU for a phase, for both, and for each of three that are split."""
LABELS = {"prefill": "prefill only", "decode": "decode only", "both": "both phases"}
"""Labels in figures, as in `disaggregation`."""
_OBJECTIVES = {"prefill": ["attained_first"], "decode": ["attained_gap"]}


def drawn_cost(cost: LinearCost) -> LinearCost:
    """Returns step times of decode that the drawn latencies at low load imply."""
    rates, latency = drawings.drawn_example("decode")
    low = latency <= drawings.LOW_LOAD * latency.min()
    law = settings.KNOWN[settings.EXAMPLE].law
    context = law.prompt.mean + law.output.mean / 2
    load = drawings.LowLoad(
        rates[low], latency[low], 0.0, law.output.mean, context, 0.0
    )
    return drawings.fit_steps(load, cost)._replace(prefill=cost.prefill)


class Example:
    """One GPU of the example under loads."""

    def __init__(self, seconds: float, seed: int, progress: lab.Progress):
        """Takes seconds of each load, seed of the requests, receiver of progress."""
        self._seconds = seconds
        self._seed = seed
        self._progress = progress
        self._instance = settings.Instance("opt-13b", 1)
        self._example = settings.KNOWN[settings.EXAMPLE]
        self.cost = self._instance.cost

    def rate(self, role: ReplicaRole, cost: LinearCost) -> float:
        """Returns the requests/s at which 90 % keep the objectives of a role."""
        limit = runs.search_limits(self._example, self._instance)[role]
        rates = np.linspace(0.1, 1.0, 19) * limit
        jobs = []
        for rate in rates:
            requests = sample_requests(
                self._example.law, rate, self._seconds, self._seed
            )
            if role == "decode":
                requests = select_requests(requests, requests.tokens.output > 1)
            jobs.append(Job(self._instance.replica._replace(cost=cost), role, requests))
        served = simulate_jobs(
            jobs, self._seconds, max_slots=settings.MAX_SLOTS, progress=self._progress
        )
        placement: Any = (role, 1, 1, 1, 0, 0.0)
        loads = runs.PlacementLoads.of(
            runs.judge_load(
                settings.EXAMPLE,
                drop_late_arrivals(answers, self._seconds),
                self._example.objectives,
                placement,
                rate,
            )
            for answers, rate in zip(served, rates, strict=True)
        )
        return min(
            goodput(rates, getattr(loads, name), share=runs.ATTAINED_SHARE)
            for name in _OBJECTIVES.get(role, ["attained_first", "attained_gap"])
        )

    def fit_prefill(self, num_halvings: int = 6) -> float:
        """Returns the factor on prefill times that gives the printed rate of prefill.

        Args:
          num_halvings: steps of the search between 1 and 4.
        """
        low = 1.0
        high = 4.0
        for _ in range(num_halvings):
            middle = (low + high) / 2
            cost = self.cost._replace(prefill=middle * self.cost.prefill)
            is_faster = self.rate("prefill", cost) > PRINTED["prefill"]
            low = middle if is_faster else low
            high = high if is_faster else middle
        return (low + high) / 2

    def rates(self, cost: LinearCost) -> dict[str, float]:
        """Returns the simulated rates of `PRINTED`."""
        roles: tuple[ReplicaRole, ...] = ("prefill", "decode", "both")
        rates: dict[str, float] = {role: self.rate(role, cost) for role in roles}
        return rates | {"split": min(2 * rates["prefill"], rates["decode"]) / 3}
