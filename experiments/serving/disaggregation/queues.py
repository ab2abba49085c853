"""Reading prompts as a queue: the simulator beside formulas of M/D/1.

Prompts of one length come at random and are read one a step. One machine takes D
seconds for each. Two that share every layer take D / K. Two pipeline stages take D / 2
each, one behind the other; the second never keeps anybody waiting, since what comes
from the first comes at intervals of D / 2 at least.
"""

from typing import Any

import numpy as np

from experiments.framework import Record, column, table
from experiments.harness import cost_models
from experiments.serving.disaggregation.settings import Config
from jaxkv.progress import QUIET, Progress
from jaxkv.scheduling import fcfs
from jaxkv.simulation import Capacity, SimulationMember, driver
from jaxkv.workloads import metrics
from jaxkv.workloads.arrivals import make, poisson

PROMPT = 512
SERVICE_S = 0.1
"""D: nearly what DistServe's fit gives for 512 tokens of OPT-13B, 96 ms."""
SPEED_UP = 1.5
"""K, of a tensor-parallel degree of two; the paper draws 1.3 to 1.9."""
MACHINES = ("one", "two tensor ways", "two pipeline stages")
STEPS_PER_CALL = 4096
MEMBERS_PER_CALL = 512
WARM_UP = 1 / 16
"""Of the requests: those who come first find emptier machines than others."""


class Queues(Record):
    """Machines under loads: all but the rate is `[machines, loads]`."""

    rate: np.ndarray = column("requests a second: [loads]")
    formula_s: np.ndarray = column("mean time to the first token")
    simulated_s: np.ndarray = column("the same, simulated")
    waiting_s: np.ndarray = column("how much of the formula's is waiting")
    error_s: np.ndarray = column("standard error of what was simulated, over seeds")

    @property
    def off(self) -> np.ndarray:
        """What was simulated beyond the formula, over the waiting."""
        return (self.simulated_s - self.formula_s) / self.waiting_s

    def rows(self) -> list[dict[str, Any]]:
        """A row for each machine and load."""
        rate, *values = table.parts(self).values()
        machines, rates = np.repeat(MACHINES, len(rate)), np.tile(rate, len(MACHINES))
        names = ("machine", "rate_per_s", *[*self.columns()][1:])
        columns = (machines, rates, *(x.ravel() for x in values))
        return table.by_row(dict(zip(names, columns, strict=True)))


def formula_s(machine: str, rate: float) -> float:
    """Mean time to the first token.

    One machine of 0.1 s at 5 requests/s: 0.1 + 5 * 0.01 / (2 * 0.5) = 0.15 s.

    Args:
      machine: one of `MACHINES`.
      rate: requests a second.

    Source: Zhong et al. 2024, arXiv:2401.09670, section 3.1, equations 1 to 3.
    """
    d, k, r = SERVICE_S, SPEED_UP, rate
    if machine == "two tensor ways":
        return d / k + r * d**2 / (2 * k * (k - r * d))
    if machine == "two pipeline stages":
        return d + r * d**2 / (4 * (2 - r * d))
    return d + metrics.waiting_s(r, d)


def measure(config: Config, progress: Progress = QUIET) -> Queues:
    """Simulates every machine under every load."""
    loads, num = config.queue_loads, config.queue_requests
    came = np.stack(
        [
            poisson(
                np.random.default_rng((config.seed, i, round(1e6 * load))),
                rate=load / SERVICE_S,
                num=num,
            )
            for load in loads
            for i in range(config.queue_seeds)
        ]
    )
    stage_s = SERVICE_S / 2
    one = _serve(came, SERVICE_S, progress)
    tensor = _serve(came, SERVICE_S / SPEED_UP, progress)
    stages = _serve(_serve(came, stage_s, progress), stage_s, progress)
    first = round(WARM_UP * num)
    means = [np.mean((x - came)[:, first:], axis=1) for x in (one, tensor, stages)]
    each = np.stack(means).reshape(len(MACHINES), len(loads), config.queue_seeds)
    rates = np.array(loads) / SERVICE_S
    formulas = np.array([[formula_s(x, r) for r in rates] for x in MACHINES])
    shortest = np.array([SERVICE_S, SERVICE_S / SPEED_UP, SERVICE_S])
    return Queues(
        rate=rates,
        formula_s=formulas,
        simulated_s=each.mean(axis=2),
        waiting_s=formulas - shortest[:, None],
        error_s=each.std(axis=2, ddof=1) / np.sqrt(config.queue_seeds),
    )


def _serve(came: np.ndarray, service_s: float, progress: Progress) -> np.ndarray:
    """When every request of every member was done, its prompt being read."""
    one = np.ones(came.shape[1], np.int32)
    members = [
        SimulationMember(
            workload=make(arrival_s, PROMPT * one, one),
            capacity=Capacity.of(
                num_pages=PROMPT, max_length=PROMPT + 1, token_budget=PROMPT
            ),
            policy=fcfs.fcfs(),
            cost=cost_models.linear((service_s, 0.0, 0.0), (0.0,) * 3, scale=1.0),
        )
        for arrival_s in came
    ]
    parts = [
        driver.simulate(
            driver.stack(members[i : i + MEMBERS_PER_CALL]),
            max_slots=1,
            steps_per_call=STEPS_PER_CALL,
            progress=progress,
        ).finish_s
        for i in range(0, len(members), MEMBERS_PER_CALL)
    ]
    return np.concatenate(parts)
