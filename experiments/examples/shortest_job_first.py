"""Shortest job first as a custom policy, compared with first come, first served.

The policy wraps `jaxkv.fcfs()` and changes the order of the queue. The length of an
answer is unknown, so the job with the fewest tokens to feed counts as the shortest. A
long job can wait for as long as shorter ones arrive. Prints the mean seconds per token
and the longest wait of both policies in the simulator.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from experiments.examples.simulate_a_policy import machine, step_seconds
from jaxkv import simulation
from jaxkv.simulation import SimulationMember
from jaxkv.workloads import make_workload, normalised_latency_s


class ShortestJobFirst(NamedTuple):
    """Admits the waiting request with the fewest tokens to feed first."""

    inner: jaxkv.Policy
    holds_finished = False

    def plan(self, counts: jaxkv.Counts) -> jaxkv.Plan:
        """Sorts the queue by tokens to feed, with preempted requests first."""
        tokens = counts.waiting_tokens - counts.waiting_cached
        key = jnp.where(counts.waiting_preempted, -1, tokens)
        order = jnp.argsort(key, stable=True).astype(jnp.int32)
        return jaxkv.plan_in_order(self.inner, counts, order)


class DeviceCost(NamedTuple):
    """Cost model of a step on a device with a given speed."""

    speed: jax.Array

    def __call__(self, work) -> jax.Array:
        """Returns the seconds of a step."""
        return step_seconds(work) / self.speed


def main() -> dict[str, float]:
    """Serves a burst of long and short jobs with both policies, in simulated time."""
    rng = np.random.default_rng(0)
    num = 64
    is_long = rng.random(num) < 0.25
    load = make_workload(
        np.sort(rng.uniform(0.0, 2.0, num)),
        np.where(is_long, 400, 20),
        np.where(is_long, 200, 10),
    )
    latency = {}
    cost = DeviceCost(jnp.float32(1.0))
    for name, policy in (
        ("first come", jaxkv.fcfs()),
        ("shortest job", ShortestJobFirst(jaxkv.fcfs())),
    ):
        members = simulation.stack([SimulationMember(load, machine, policy, cost)])
        outcome = simulation.simulate(members, max_slots=8)
        output = np.asarray(load.output)
        latency_s = normalised_latency_s(outcome.arrival_s, outcome.finish_s, output)
        longest = (outcome.finish_s - outcome.arrival_s).max()
        print(f"{name}: {latency_s[0]:.3f} s per token, longest {longest:.1f} s")
        latency[name] = float(latency_s[0])
    return latency


if __name__ == "__main__":
    main()
