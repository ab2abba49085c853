"""The cost model of a step, for one size and for arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.scheduling import fcfs
from jaxkv.simulation import Capacity, make_work, stack
from jaxkv.workloads import make_workload
from scaling import shapes
from scaling.costs import decode_work, find_device, prefill_work, roofline, steps
from scaling.costs.steps import StepCost, step_cost, step_work

A100 = find_device("a100-40gb")
MODELS = ["llama-2-7b", "gemma-2-2b", "mixtral-8x7b", "olmo-hybrid-7b"]


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_decoding(name: str) -> None:
    model = shapes.describe(name)
    cost = step_cost(model, A100, num_devices=2)
    work = step_work(cost, ints(1, 1, 1, 0), ints(5999, 5999, 5999, 70), jnp.int32(3))
    exact = decode_work(model, batch=3, context=6000)
    assert work.flops == pytest.approx(exact.flops, rel=1e-5)
    # An embedding row counts as part of the weights: a few kB.
    assert work.bytes == pytest.approx(exact.bytes, rel=1e-5)
    time_s = roofline(exact, A100, num_devices=2).time_s
    assert work.time_s == pytest.approx(time_s, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_cost_is_a_cost_model_of_the_simulator(name: str) -> None:
    """Sums over equal sequences give the time of `step_work`, with windows or not."""
    model = shapes.describe(name)
    cost = step_cost(model, A100, num_devices=2, overhead_s=1e-3)
    for past in (999, 5999):
        decode = make_work(num_decodes=3, decode_context=3 * (past + 1), num_drawn=3)
        exact = step_work(cost, ints(1, 1, 1), ints(past, past, past), jnp.int32(3))
        assert float(cost(decode)) == pytest.approx(float(exact.time_s), rel=1e-3)
    prompt = make_work(
        num_prompts=1,
        num_prompt_rows=512,
        prompt_context=512,
        prompt_squares=512**2,
        num_drawn=1,
    )
    exact = step_work(cost, ints(512), ints(0), jnp.int32(1))
    assert float(cost(prompt)) == pytest.approx(float(exact.time_s), rel=1e-3)
    assert cost(make_work()) == 0
    workload = make_workload(np.zeros(1), np.array([8]), np.array([2]))
    capacity = Capacity.of(num_pages=9)
    assert isinstance(stack([(workload, capacity, fcfs(), cost)]).cost, StepCost)


def test_a_prompt_read_in_chunks() -> None:
    model = dataclasses.replace(shapes.describe("llama-2-7b"), windows=(100,))
    cost = step_cost(model, A100)
    prompt_flops = float(step_work(cost, ints(300), ints(0), jnp.int32(1)).flops)
    chunks = [
        float(step_work(cost, ints(100), ints(past), jnp.int32(past == 200)).flops)
        for past in (0, 100, 200)
    ]
    assert sum(chunks) == pytest.approx(prompt_flops, rel=1e-6)
    exact = prefill_work(model, batch=1, prompt=300)
    # `causal` leaves out the diagonal, half a key for each query.
    assert prompt_flops == pytest.approx(exact.flops, rel=1e-3)


def test_an_idle_step_takes_no_time_and_others_their_overhead() -> None:
    model = shapes.describe("smollm2-135m")
    cost = step_cost(model, A100, overhead_s=0.5, bandwidth_share=0.5)
    idle = step_work(cost, ints(0, 0), ints(7, 9), jnp.int32(0))
    assert (float(idle.time_s), float(idle.bytes)) == (0, 0)
    work = step_work(cost, ints(1, 0), ints(7, 9), jnp.int32(1))
    exact = roofline(decode_work(model, batch=1, context=8), A100)
    assert work.time_s == pytest.approx(0.5 + 2 * exact.time_s, rel=1e-5)


def test_coefficients_are_swept_by_vmap() -> None:
    model = shapes.describe("llama-3.1-8b")
    shares = [0.25, 0.5, 1.0]
    costs = [step_cost(model, A100, bandwidth_share=x) for x in shares]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *costs)
    run = jax.jit(jax.vmap(step_work, in_axes=(0, None, None, None)))
    times = run(stacked, ints(1, 1), ints(10, 20), jnp.int32(2)).time_s.tolist()
    assert times == pytest.approx([4 * times[2], 2 * times[2], times[2]])


def test_shares_out_of_range_are_refused() -> None:
    model = shapes.describe("gpt2")
    with pytest.raises(ValueError, match=r"compute_share=1.5 must be in \(0, 1\]"):
        step_cost(model, A100, compute_share=1.5)
    with pytest.raises(ValueError, match=r"overhead_s=-1\.0"):
        step_cost(model, A100, overhead_s=-1.0)
    assert steps._ALL == jnp.float32(steps._ALL)
