"""Prefill as a queue: the simulator against M/D/1 formulas.

Prompts of one length arrive as a Poisson process, and a step prefills one prompt. A
single machine takes D seconds per prompt. Tensor parallelism over 2 devices takes D /
K. A pipeline of 2 stages takes D / 2 per stage; its second stage never queues, because
prompts leave the first at intervals of at least D / 2.
"""

import numpy as np

from experiments import lab
from experiments.serving.disaggregation.settings import Config
from jaxkv import scheduling, simulation
from jaxkv.simulation import Capacity, SimulationMember
from jaxkv.workloads import make_workload, md1_waiting_s, poisson
from scaling.costs import linear_cost

PROMPT_LENGTH = 512
SERVICE_S = 0.1
"""D, close to the 96 ms of DistServe's fit for 512 tokens of OPT-13B."""
SPEED_UP = 1.5
"""K for a tensor-parallel degree of 2; the paper plots 1.3 to 1.9."""
MACHINE_NAMES = ("one", "two tensor ways", "two pipeline stages")
STEPS_PER_CALL = 4096
MEMBERS_PER_CALL = 512
WARM_UP = 1 / 16
"""Share of the requests at the start that are discarded."""


class QueueTimes(lab.ResultRecord):
    """Time to first token by machine and load; `rate` is `[loads]`."""

    rate: np.ndarray = lab.column("requests/s: [loads]")
    formula_s: np.ndarray = lab.column("mean time to first token by formula")
    simulated_s: np.ndarray = lab.column("mean time to first token, simulated")
    waiting_s: np.ndarray = lab.column("waiting time within formula_s")
    error_s: np.ndarray = lab.column("standard error of simulated_s over seeds")

    @property
    def off(self) -> np.ndarray:
        """Simulated less formula, over the waiting time."""
        return (self.simulated_s - self.formula_s) / self.waiting_s

    def rows(self) -> list[lab.Row]:
        """Returns a row per machine and load."""
        rate, *values = lab.field_values(self).values()
        machines = np.repeat(MACHINE_NAMES, len(rate))
        rates = np.tile(rate, len(MACHINE_NAMES))
        names = ("machine", "rate_per_s", *[*self.columns()][1:])
        columns = (machines, rates, *(x.ravel() for x in values))
        return lab.to_rows(dict(zip(names, columns, strict=True)))


def formula_s(machine: str, rate: float) -> float:
    """Returns the mean time to first token.

    A single machine with D = 0.1 s at 5 requests/s: 0.1 + 5 * 0.01 / (2 * 0.5) = 0.15
    s.

    Args:
      machine: one of `MACHINE_NAMES`.
      rate: requests/s.

    Source: Zhong et al. 2024, arXiv:2401.09670, section 3.1, equations 1 to 3.
    """
    d = SERVICE_S
    k = SPEED_UP
    r = rate
    if machine == "two tensor ways":
        return d / k + r * d**2 / (2 * k * (k - r * d))
    if machine == "two pipeline stages":
        return d + r * d**2 / (4 * (2 - r * d))
    return d + md1_waiting_s(r, d)


def simulate_queues(config: Config, progress: lab.Progress = lab.QUIET) -> QueueTimes:
    """Simulates every machine under every load."""
    loads = config.queue_loads
    num = config.queue_requests
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
    waits = np.stack(means).reshape(len(MACHINE_NAMES), len(loads), config.queue_seeds)
    rates = np.array(loads) / SERVICE_S
    formulas = np.array([[formula_s(x, r) for r in rates] for x in MACHINE_NAMES])
    shortest = np.array([SERVICE_S, SERVICE_S / SPEED_UP, SERVICE_S])
    return QueueTimes(
        rate=rates,
        formula_s=formulas,
        simulated_s=waits.mean(axis=2),
        waiting_s=formulas - shortest[:, None],
        error_s=waits.std(axis=2, ddof=1) / np.sqrt(config.queue_seeds),
    )


def _serve(came: np.ndarray, service_s: float, progress: lab.Progress) -> np.ndarray:
    """Returns the end of prefill of every request of every member."""
    one = np.ones(came.shape[1], np.int32)
    members = [
        SimulationMember(
            workload=make_workload(arrival_s, PROMPT_LENGTH * one, one),
            capacity=Capacity.of(
                num_pages=PROMPT_LENGTH,
                max_length=PROMPT_LENGTH + 1,
                token_budget=PROMPT_LENGTH,
            ),
            policy=scheduling.fcfs(),
            cost=linear_cost((service_s, 0.0, 0.0), (0.0,) * 3, scale=1.0),
        )
        for arrival_s in came
    ]
    parts = [
        simulation.simulate(
            simulation.stack(members[i : i + MEMBERS_PER_CALL]),
            max_slots=1,
            steps_per_call=STEPS_PER_CALL,
            progress=progress,
        ).finish_s
        for i in range(0, len(members), MEMBERS_PER_CALL)
    ]
    return np.concatenate(parts)
