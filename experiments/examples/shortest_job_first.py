"""Shortest job first, as a policy of one's own, against first come, first served.

A policy wraps `jaxkv.fcfs()` and changes what it sees of the queue: here the order. The
length of an answer is not known, so the job with the fewest tokens to feed counts as
the shortest. A long job waits as long as shorter ones keep coming. Prints the mean
seconds per token of both policies in the simulator, and the longest wait.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from experiments.examples.simulate_a_policy import machine, seconds
from jaxkv.simulation import SimulationMember, driver
from jaxkv.workloads import arrivals, metrics


class ShortestJobFirst(NamedTuple):
    """Admits the waiting request with the fewest tokens to feed first."""

    inner: jaxkv.Policy
    holds_finished = False

    def plan(self, counts: jaxkv.Counts) -> jaxkv.Plan:
        """Sorts the queue by tokens to feed, requests that were preempted first."""
        tokens = counts.waiting_tokens - counts.waiting_cached
        key = jnp.where(counts.waiting_preempted, -1, tokens)
        order = jnp.argsort(key, stable=True).astype(jnp.int32)
        return jaxkv.plan_in_order(self.inner, counts, order)


class Cost(NamedTuple):
    """What a step takes, on a device of some speed."""

    speed: jax.Array

    def __call__(self, work) -> jax.Array:
        """Seconds of a step that does this work."""
        return seconds(work) / self.speed


def main() -> dict[str, float]:
    """Serves a burst of long and short jobs by both policies, in simulated time."""
    rng, num = np.random.default_rng(0), 64
    is_long = rng.random(num) < 0.25
    load = arrivals.make(
        np.sort(rng.uniform(0.0, 2.0, num)),
        np.where(is_long, 400, 20),
        np.where(is_long, 200, 10),
    )
    latency, cost = {}, Cost(jnp.float32(1.0))
    for name, policy in (
        ("first come", jaxkv.fcfs()),
        ("shortest job", ShortestJobFirst(jaxkv.fcfs())),
    ):
        members = driver.stack([SimulationMember(load, machine, policy, cost)])
        found = driver.simulate(members, max_slots=8)
        output = np.asarray(load.output)
        each = metrics.normalised_latency_s(found.arrival_s, found.finish_s, output)
        longest = (found.finish_s - found.arrival_s).max()
        print(f"{name}: {each[0]:.3f} s per token, longest {longest:.1f} s")
        latency[name] = float(each[0])
    return latency


if __name__ == "__main__":
    main()
