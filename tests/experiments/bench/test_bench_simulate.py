"""The race of schedulers: both take the same decisions, and the race is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench.simulate import experiment, plain_scheduler
from experiments.harness import cost_models
from jaxkv import clock
from jaxkv.ledger import Events
from jaxkv.scheduling import fcfs
from jaxkv.simulation.state import Capacity, Simulation
from jaxkv.simulation.step import init_simulation, run_steps
from jaxkv.workloads.arrivals import Workload
from tests.support import smoke

NUM = 40
COST = cost_models.linear((8.0, 0.25, 0.0), (8.0, 0.0, 0.5))


def test_plain_python_takes_the_same_decisions_and_keeps_the_same_accounts() -> None:
    """Chunks by the budget, preemptions, prompts of one token; to the microsecond."""
    rng = np.random.default_rng(3)
    w = Workload(
        arrival=jnp.asarray(clock.from_seconds(np.cumsum(rng.exponential(0.02, NUM)))),
        prompt=jnp.asarray(rng.integers(1, 30, NUM), jnp.int32),
        output=jnp.asarray(rng.integers(1, 30, NUM), jnp.int32),
        samples=jnp.ones(NUM, jnp.int32),
        clients=jnp.int32(2**30),
    )
    capacity = Capacity(*(jnp.int32(x) for x in (22, 4, 60, 24, 0)))
    policy = fcfs.fcfs()

    @jax.jit
    def start() -> Simulation:
        return init_simulation(w, capacity, policy, max_slots=8)

    run = jax.jit(
        run_steps,
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
    steps: list[plain_scheduler.Step] = []
    served = plain_scheduler.serve(
        experiment.requests(w),
        plain_scheduler.Bounds(22, 4, 24, 8, 5),
        experiment.price(COST),
        steps.append,
    )
    assert int(state.num_done) == NUM
    assert served.num_preempted > 5
    busy = np.asarray(info.micros) > 0
    start_us = np.asarray(info.start, np.int64) @ [clock.SECOND, 1]
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
        theirs = [getattr(step, name) for step in steps]
        assert np.asarray(values)[busy].tolist() == theirs, name
    noted = Events(*np.asarray(state.ledger.events, np.int64).T)
    for name in ("first", "finish"):
        ours_us = (getattr(noted, f"{name}_s") - 1) * clock.SECOND
        ours_us = ours_us + getattr(noted, f"{name}_us")
        assert ours_us.tolist() == getattr(served, f"{name}_us")


@pytest.mark.slow
def test_the_race_has_a_rate_for_everyone() -> None:
    found = smoke.run("bench_simulate").metrics
    assert all(found[name] > 0 for name in experiment.KEYS)
