"""Workloads for the simulation, and what a step costs there."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import clock
from jaxkv.engine.state import EngineConfig
from jaxkv.scheduling import interface
from jaxkv.simulation import state, step
from jaxkv.workloads import arrivals
from tests.support.engines import FAST_COMPILE


class Cost(NamedTuple):
    """Seconds of a step, and what its work adds."""

    base: jax.Array

    def __call__(self, work: step.Work) -> jax.Array:
        rows = work.num_prompt_rows + work.num_swapped
        return self.base * (1.0 + 0.01 * rows.astype(jnp.float32))


COST = Cost(jnp.float32(0.01))


run_simulation = jax.jit(
    step.run_steps,
    static_argnames=("num_steps", "max_samples", "head"),
    compiler_options=FAST_COMPILE,
)


def workload(
    seed: int, num: int, *, max_samples: int = 1, rate: float = 200.0, longest: int = 30
) -> arrivals.Workload:
    """Requests of up to `longest` tokens each way, some of which come at once."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, num))
    arrival[:3] = 0

    def draw(most: int) -> jax.Array:
        return jnp.asarray(rng.integers(1, most + 1, num), jnp.int32)

    return arrivals.Workload(
        arrival=jnp.asarray(clock.from_seconds(arrival)),
        prompt=draw(longest),
        output=draw(longest),
        samples=draw(max_samples),
        clients=jnp.int32(interface.NO_LIMIT),
    )


def capacity(config: EngineConfig) -> state.Capacity:
    return state.Capacity(
        *(jnp.int32(getattr(config, name)) for name in state.Capacity._fields)
    )
