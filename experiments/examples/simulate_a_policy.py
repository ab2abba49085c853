"""A custom policy, simulated for several parameters and request rates at once.

The cost of a step is a function of its work; a warning lists requests that can never be
served. Prints seconds per token, with a row per `limit` and a column per request rate.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.simulation import Capacity, read_outcomes, simulate_workload
from jaxkv.workloads import ALPACA, normalised_latency_s, open_loop


class ConcurrencyLimit(NamedTuple):
    """First come, first served, with at most `limit` running requests."""

    limit: jax.Array  # a parameter is an array: `vmap` sweeps it
    holds_finished = False

    def plan(self, counts: jaxkv.Counts) -> jaxkv.Plan:
        """Hides waiting requests beyond the limit from first come, first served."""
        room = self.limit - jnp.sum(counts.running, dtype=jnp.int32)
        rank = jnp.arange(counts.waiting.shape[0], dtype=jnp.int32)
        counts = counts._replace(waiting=counts.waiting & (rank < room))
        return jaxkv.fcfs().plan(counts)


machine = Capacity.of(num_pages=100, max_length=2048, token_budget=256)


def step_seconds(work):
    """Returns the seconds of a step: weights, K and V are read, and tokens computed."""
    work = jax.tree.map(jnp.float32, work)
    tokens = work.num_decodes + work.num_prompt_rows
    return 0.02 + 1e-4 * tokens + 1e-6 * (work.decode_context + work.prompt_context)


def run(load, limit):
    """Simulates a workload to its end."""
    return simulate_workload(
        load, machine, ConcurrencyLimit(limit), step_seconds, max_slots=32
    )


def main() -> np.ndarray:
    """Sweeps three limits and three rates, and returns the median seconds per token."""
    rates = (1.0, 4.0, 16.0)
    limits = jnp.asarray([2, 8, 32], jnp.int32)
    loads = [
        open_loop(np.random.default_rng(0), ALPACA, rate=rate, num=200)
        for rate in rates
    ]
    loads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *loads)
    each_rate = jax.vmap(run, in_axes=(0, None))
    ends = jax.jit(jax.vmap(each_rate, in_axes=(None, 0)))(loads, limits)
    # Warns about requests that were not served.
    outcomes = read_outcomes(ends, loads)
    output = np.asarray(loads.output)
    latency = normalised_latency_s(outcomes.arrival_s, outcomes.finish_s, output)
    print(latency.round(3))
    return latency


if __name__ == "__main__":
    main()
