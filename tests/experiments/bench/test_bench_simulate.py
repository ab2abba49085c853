"""The simulator benchmark: equal decisions of both schedulers, and its report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench.simulate import plain_scheduler, scheduler_steps
from jaxkv import clock, scheduling
from jaxkv.ledger import EVENTS
from jaxkv.simulation import Capacity, Simulation
from jaxkv.simulation.step import init_simulation, simulate_steps
from jaxkv.workloads import Workload
from scaling.costs import linear_cost
from tests.support import smoke

NUM = 40
COST = linear_cost((8.0, 0.25, 0.0), (8.0, 0.0, 0.5))


def test_python_scheduler_equals_the_simulator() -> None:
    """Chunked prefill, preemptions, prompts of one token; exact to the microsecond."""
    rng = np.random.default_rng(3)
    w = Workload(
        arrival=jnp.asarray(clock.from_seconds(np.cumsum(rng.exponential(0.02, NUM)))),
        prompt=jnp.asarray(rng.integers(1, 30, NUM), jnp.int32),
        output=jnp.asarray(rng.integers(1, 30, NUM), jnp.int32),
        samples=jnp.ones(NUM, jnp.int32),
        clients=jnp.int32(2**30),
    )
    capacity = Capacity(*(jnp.int32(x) for x in (22, 4, 60, 24, 0)))
    policy = scheduling.fcfs()

    @jax.jit
    def start() -> Simulation:
        return init_simulation(w, capacity, policy, max_slots=8)

    run = jax.jit(
        simulate_steps,
        static_argnames=("num_steps", "head"),
    )
    state, info = run(
        start(),
        w,
        capacity=capacity,
        policy=policy,
        cost=COST,
        num_steps=800,
        head=5,
    )
    steps: list[plain_scheduler.SchedulerStep] = []
    served = plain_scheduler.run_scheduler(
        scheduler_steps.to_requests(w),
        plain_scheduler.SchedulerLimits(22, 4, 24, 8, 5),
        scheduler_steps.to_price(COST),
        steps.append,
    )
    assert int(state.num_done) == NUM
    assert served.num_preempted > 5
    busy = np.asarray(info.micros) > 0
    start_us = np.asarray(info.start, np.int64) @ [clock.MICROS_PER_SECOND, 1]
    ours = {
        "start_us": start_us,
        "micros": info.micros,
        "num_decodes": info.work.num_decodes,
        "num_prompt_rows": info.work.num_prompt_rows,
        "decode_context": info.work.decode_context,
        "prompt_context": info.work.prompt_context,
        "num_running": info.num_running,
        "num_preempted": info.num_preempted,
        "used_pages": info.used_pages,
        "tokens": info.split.tokens,
        "reserved": info.split.reserved,
    }
    assert served.num_steps == busy.sum()
    for name, values in ours.items():
        peer_rows = [getattr(step, name) for step in steps]
        assert np.asarray(values)[busy].tolist() == peer_rows, name
    noted = EVENTS.unpack(np.asarray(state.ledger.events, np.int64))
    for name in ("first", "finish"):
        ours_us = (getattr(noted, f"{name}_s") - 1) * clock.MICROS_PER_SECOND
        ours_us = ours_us + getattr(noted, f"{name}_us")
        assert ours_us.tolist() == getattr(served, f"{name}_us")


@pytest.mark.slow
def test_every_system_has_a_rate() -> None:
    metrics = smoke.run("bench_simulate").metrics
    assert all(metrics[name] > 0 for name in scheduler_steps.SPEED_KEYS)
