"""Cost models: published formulas, roofline formulas, and fits to measured runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness import named_costs
from jaxkv.simulation import Work
from scaling import shapes
from scaling.calibration import ServerCost, draw_coefficients, load_posterior
from scaling.costs import (
    RooflineCost,
    figure_12_cost,
    find_device,
    make_roofline_cost,
    steps,
)
from tests.support.folders import RECORDS


def work(**counts: float) -> Work:
    zero = Work(*(jnp.int32(0) for _ in Work._fields))
    zero = zero._replace(prompt_squares=jnp.float32(0))
    return zero._replace(**{k: jnp.int32(v) for k, v in counts.items()})


DISTSERVE = "distserve:opt-13b:1"
FIGURE_12 = "opt-13b-a100-40gb"
# Prompts of 300 and 400 tokens; sequences that decode at 500; both at once.
READ = work(num_prompt_rows=700, prompt_context=700)._replace(
    prompt_squares=jnp.float32(300**2 + 400**2)
)
FEW = work(num_decodes=94, decode_context=94 * 500)
MANY = work(num_decodes=95, decode_context=95 * 500)
MIXED = work(
    num_decodes=30, decode_context=13_740, num_prompt_rows=161, prompt_context=161
)


@pytest.mark.parametrize(
    ("name", "step", "milliseconds"),
    [
        (DISTSERVE, READ, 22.05 + 0.1405 * 700 + 8.08e-6 * 250_000),
        (DISTSERVE, FEW, 23.48 + 5.93e-4 * 47_000 + 0.0607 * 94),
        (DISTSERVE, MANY, 20.21 + 4.91e-4 * 47_500 + 0.120 * 95),
        (DISTSERVE, work(), 0),
        # A mixed step pays the constant once.
        (
            FIGURE_12,
            MIXED,
            1.31 * (23.475 + 5.93e-4 * 13_901 + 0.0607 * 30 + 0.1405 * 161),
        ),
    ],
)
def test_published_fits_give_the_printed_step_times(
    name: str, step: Work, milliseconds: float
) -> None:
    price_s = float(named_costs.find_cost_model(name).cost(step))
    np.testing.assert_allclose(price_s, milliseconds * 1e-3, rtol=1e-6)


@pytest.mark.parametrize("model", ["opt-13b", "mixtral-8x7b"])
def test_the_roofline_of_a_step_equals_that_of_its_slots(model: str) -> None:
    """A prefill chunk after 50 tokens, and two decodes."""
    new = jnp.array([70, 1, 1])
    past = jnp.array([50, 400, 9])
    roofline = make_roofline_cost(
        shapes.describe(model),
        find_device("a100-80gb"),
        num_devices=2,
        compute_share=0.5,
        overhead_s=0.002,
    )
    step = work(
        num_decodes=2,
        num_prompt_rows=70,
        decode_context=401 + 10,
        prompt_context=120,
        prompt_squares=120**2 - 50**2,
        num_drawn=3,
    )
    assert isinstance(roofline.cost, RooflineCost)
    apart = steps.step_work(roofline.cost.step, new, past, jnp.int32(3))
    np.testing.assert_allclose(roofline.cost(step), apart.time_s, rtol=1e-6)
    moves = step._replace(num_copied=jnp.int32(1), num_swapped=jnp.int32(2))
    cost = roofline.cost._replace(copy_s=jnp.float32(0.25), swap_s=jnp.float32(0.5))
    np.testing.assert_allclose(cost(moves), apart.time_s + 1.25, rtol=1e-6)


def test_the_calibrated_cost_is_transferred_by_the_data_sheet() -> None:
    """Reads and products scale with the sheet; overheads are those of the fit."""
    coefficients = draw_coefficients(load_posterior().mode)
    step = work(num_decodes=32, decode_context=32 * 512, num_drawn=32)
    times = {}
    for device in ("h100", "a100-80gb"):
        cost = named_costs.find_cost_model(f"calibrated:opt-13b:{device}").cost
        assert isinstance(cost, ServerCost)
        times[device] = float(cost(step))
        sheet = cost.counts._replace(
            bytes_per_s=jnp.float32(1e30), flops_per_s=jnp.float32(1e30)
        )
        overhead = float(cost._replace(counts=sheet)(step))
        times[device] -= overhead
        assert overhead == pytest.approx(
            float(coefficients.step_s)
            + 40 * float(coefficients.layer_s)
            + 32 * float(coefficients.sequence_s),
            rel=1e-4,
        )
    sheets = [find_device(x).bandwidth for x in times]
    ratio = times["a100-80gb"] / times["h100"]
    assert ratio == pytest.approx(sheets[0] / sheets[1], rel=0.05)


def test_a_fit_to_a_run_reproduces_its_times() -> None:
    folder = RECORDS / "bench_decode_xeon"
    cost_model = named_costs.fit_measured_steps(folder)
    assert cost_model.error is not None
    assert 0 < cost_model.error < 0.15
    assert "Intel(R) Xeon(R)" in cost_model.source
    step = work(num_decodes=8, decode_context=8 * 192)
    np.testing.assert_allclose(
        cost_model.cost(step), 0.065541, rtol=cost_model.error + 1e-6
    )
    # A prompt of 2,048 tokens in four steps, at 616 tokens a second.
    prompt_work = work(num_prompt_rows=2048)._replace(
        prompt_squares=jnp.float32(2048**2)
    )
    seconds = cost_model.cost(prompt_work) + 3 * cost_model.cost.prefill[0]
    np.testing.assert_allclose(seconds, 2048 / 616, rtol=cost_model.error + 0.01)
    with pytest.raises(ValueError, match="no rows of unknown"):
        named_costs.fit_measured_steps(folder, implementation="unknown")


def test_cost_models_can_be_vmapped() -> None:
    scales = [figure_12_cost(scale=x).cost for x in (1.0, 2.0)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *scales)
    prices = jax.vmap(lambda cost: cost(work(num_decodes=3)))(stacked)
    np.testing.assert_allclose(prices[1], 2 * prices[0])


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("roofline:opt-13b:abacus", "unknown device 'abacus'"),
        ("roofline:opt-13b:h100:0", "at least 1"),
        ("roofline:gpt-5:h100", "unknown model 'gpt-5'"),
        ("calibrated:gpt-5:h100", "unknown model 'gpt-5'"),
        ("calibrated:llama-2-7b:h100:64", "64"),
        ("distserve:opt-30b:1", "distserve:opt-13b:1"),
        ("guess", "unknown cost model 'guess'"),
    ],
)
def test_unknown_cost_models_are_rejected_in_one_line(name: str, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        named_costs.find_cost_model(name)
