"""Outside of `jit`: functions accept NumPy arrays, and states can be donated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import decoding, models, scheduling, simulation
from jaxkv.engine import EngineConfig, Requests
from jaxkv.models import PagedForward, make_model_pages
from jaxkv.sampling import Sampling, make_beams
from jaxkv.serving import make_requests
from jaxkv.simulation import Capacity, Simulation, step
from jaxkv.simulation.state import init_simulation
from jaxkv.workloads import make_workload
from tests.support import engines
from tests.support.engines import MODEL

pytestmark = pytest.mark.usefixtures("full_optimization")

CONFIG = EngineConfig(
    num_pages=16,
    page_size=4,
    max_slots=3,
    max_length=32,
    max_sequences=6,
    queue_capacity=4,
    token_budget=8,
    submit_width=4,
    max_beams=2,
    max_swap_pages=4,
    prefix_cache=True,
)
TWO = np.arange(2)
LOAD = make_workload(TWO * 0.5, TWO + 3, TWO + 2)
BOUNDS = Capacity(*(jnp.int32(x) for x in (16, 4, 32, 8, 4)))
FORWARD = PagedForward(MODEL)


def on_host(tree: Any) -> Any:
    """Converts the leaves to NumPy arrays."""
    return jax.tree.map(np.asarray, tree)


def cache() -> decoding.Cache:
    pages = make_model_pages(MODEL, CONFIG)
    return decoding.init_cache(pages, max_slots=3, max_length=32)


def requests() -> Requests:
    asks = [Sampling(seed=1), Sampling(n=2)]
    return make_requests([[1, 2, 3], [4]], asks, config=CONFIG, width=4)


def simulated(**fields: Any) -> Simulation:
    policy = fields.pop("policy", scheduling.fcfs())
    return init_simulation(LOAD, BOUNDS, policy, max_slots=3, **fields)


def cost(work: step.Work) -> jax.Array:
    return jnp.float32(0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
def test_requests_can_be_submitted_without_jit() -> None:
    state = engines.start(CONFIG)
    submission = jaxkv.submit(state, requests(), config=CONFIG)
    expected = engines.submit(engines.start(CONFIG), requests(), config=CONFIG)
    jax.tree.map(np.testing.assert_array_equal, submission, expected)
    name = on_host(jnp.zeros(1, jnp.int32))
    assert submission[1].tolist() == [True, True, True, False]
    left = jaxkv.cancel(submission[0], name, name - 1)
    assert int(left.ledger.num_waiting) == 1


@functools.cache
def calls() -> dict[str, Any]:
    """Returns calls of public functions with NumPy arrays only."""
    params = on_host(engines.params())
    state = on_host(engines.start(CONFIG))
    served: Any = {
        "config": CONFIG,
        "forward": FORWARD,
        "policy": on_host(scheduling.fcfs()),
    }
    three = on_host(jnp.arange(3))
    bounds: Any = {
        "capacity": on_host(BOUNDS),
        "policy": scheduling.fcfs(),
        "cost": cost,
    }
    machine, load, empty = on_host((simulated(), LOAD, cache()))
    return {
        "submit": lambda: jaxkv.submit(state, requests(), config=CONFIG),
        "cancel": lambda: jaxkv.cancel(state, three, three),
        "drain": lambda: jaxkv.drain(state),
        "step": lambda: jaxkv.step(params, state, **served),
        "run_steps": lambda: jaxkv.run_steps(params, state, three[:2], **served),
        "prefill": lambda: decoding.prefill(
            params, empty, three[:, None], three, forward=FORWARD
        ),
        "decode_step": lambda: decoding.decode_step(
            params, empty, three, forward=FORWARD, active=three > 0
        ),
        "logits": lambda: models.logits(params, three[None], config=MODEL),
        "simulation.init": lambda: init_simulation(
            load, on_host(BOUNDS), scheduling.fcfs(), max_slots=3
        ),
        "simulation.step": lambda: step.simulate_step(machine, load, **bounds),
        "simulation.run_steps": lambda: step.simulate_steps(
            machine, load, **bounds, num_steps=2
        ),
    }


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    "name",
    [
        "submit",
        "cancel",
        "drain",
        "step",
        "run_steps",
        "prefill",
        "decode_step",
        "logits",
        "simulation.init",
        "simulation.step",
        "simulation.run_steps",
    ],
)
def test_public_functions_take_numpy_arrays(name: str) -> None:
    # Traced only: compiled code is equal, and arrays that are not arguments stay
    # NumPy's.
    jax.eval_shape(calls()[name])


STATES = {
    "engine": lambda: engines.start(CONFIG),
    "cache": cache,
    "beams": lambda: make_beams(2),
    "simulation": simulated,
    "samples": lambda: simulated(max_samples=2),
    "static": lambda: simulated(policy=scheduling.static()),
    "contiguous": lambda: simulated(
        reservation=simulation.reservation("max", num_leaves=16, leaves_per_region=8)
    ),
    "workload": lambda: LOAD,
    "policy": lambda: scheduling.fcfs(stackable=True),
}


@pytest.mark.parametrize("name", STATES)
def test_donated_states_have_distinct_buffers(name: str) -> None:
    leaves = [x for x in jax.tree.leaves(STATES[name]()) if x.size]
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves) > 1


def test_a_simulation_can_be_donated() -> None:
    donate = jax.jit(lambda state: jax.tree.map(lambda x: x, state), donate_argnums=0)
    machine = simulated(max_samples=2)
    before = jax.tree.map(np.array, machine)  # a view would keep the buffers
    jax.tree.map(np.testing.assert_array_equal, donate(machine), before)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(machine.ledger.queue)
