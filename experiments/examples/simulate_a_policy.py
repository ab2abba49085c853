"""A policy of one's own, simulated for every parameter and every load at once.

What a step takes is a function of its work; requests that nobody could ever serve are
named in a warning. Prints seconds per token, a row for each `most`, a column for each
rate of arrival.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.simulation import Capacity, outcomes
from jaxkv.simulation import step as simulation
from jaxkv.workloads import arrivals, lengths, metrics


class AtMost(NamedTuple):
    """First come, first served, but never more than `most` requests at once."""

    most: jax.Array  # a parameter is an array: `vmap` sweeps it
    holds_finished = False

    def plan(self, counts: jaxkv.Counts) -> jaxkv.Plan:
        """Hides from first-come-first-served who has no place."""
        room = self.most - jnp.sum(counts.running, dtype=jnp.int32)
        rank = jnp.arange(counts.waiting.shape[0], dtype=jnp.int32)
        counts = counts._replace(waiting=counts.waiting & (rank < room))
        return jaxkv.fcfs().plan(counts)


machine = Capacity.of(num_pages=100, max_length=2048, token_budget=256)


def seconds(work):
    """A step reads the weights, then K and V; each token costs operations."""
    work = jax.tree.map(jnp.float32, work)
    tokens = work.num_decodes + work.num_prompt_rows
    return 0.02 + 1e-4 * tokens + 1e-6 * (work.decode_context + work.prompt_context)


def run(load, most):
    """Serves a load to its end."""
    return simulation.run(load, machine, AtMost(most), seconds, max_slots=32)


def main() -> np.ndarray:
    """Sweeps three limits and three loads, and returns the median seconds per token."""
    rates, most = (1.0, 4.0, 16.0), jnp.asarray([2, 8, 32], jnp.int32)
    loads = [
        arrivals.open_loop(np.random.default_rng(0), lengths.ALPACA, rate=rate, num=200)
        for rate in rates
    ]
    loads = jax.tree.map(lambda *each: jnp.stack(each), *loads)
    each_rate = jax.vmap(run, in_axes=(0, None))
    ends = jax.jit(jax.vmap(each_rate, in_axes=(None, 0)))(loads, most)
    # Warns of requests that nobody can serve.
    found = outcomes.read_outcomes(ends, loads)
    output = np.asarray(loads.output)
    latency = metrics.normalised_latency_s(found.arrival_s, found.finish_s, output)
    print(latency.round(3))
    return latency


if __name__ == "__main__":
    main()
