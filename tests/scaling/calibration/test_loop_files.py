"""Files of fits of tables, and their use in simulations."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.simulation import make_work
from scaling.calibration import (
    LOOP_DISCREPANCY,
    PRIOR,
    LoadSizes,
    LoopCalibration,
    LoopFit,
    PowerShares,
    TokenTail,
    draw_coefficients,
    draw_loop_posterior,
    format_loops,
    load_loops,
    make_server_cost,
    predict_servers,
    rank_rows,
)
from scaling.calibration.closed_loops.loop_files import fold_pace
from scaling.calibration.closed_loops.pooled_fit import count_parameters_of
from scaling.shapes import describe
from tests.support.measured_servers import make_server

GROUPS: dict[str, tuple[str, ...]] = {
    "engine": ("vllm",),
    "device": ("h100",),
    "statistic": ("time per token",),
    "sweep": ("qwen3-8b/h100/vllm/bf16",),
}
NUM = count_parameters_of(GROUPS)
SERVER = make_server(token_s=None)


def make_calibration() -> LoopCalibration:
    rng = np.random.default_rng(0)
    sizes = (LoadSizes(100.0, 100.0, 1.0), LoadSizes(1000.0, 1000.0, 64.0))
    fit = LoopFit(
        mode=0.1 * rng.normal(size=NUM),
        covariance=1e-4 * np.eye(NUM),
        groups=GROUPS,
        models=("qwen3-8b",),
        num_rows=9,
        sizes=sizes,
    )
    tail = TokenTail(1.2, 5e-3, {"h100": 0.1, "": 0.2})
    return LoopCalibration(fit, None, PowerShares(0.5, 0.2, 1.0), tail)


@pytest.mark.thorough
def test_a_written_fit_predicts_as_before(tmp_path: Path) -> None:
    calibration = make_calibration()
    path = tmp_path / "fit.json"
    path.write_text(format_loops(calibration))
    loaded = load_loops(path)
    assert loaded.power == calibration.power
    assert loaded.tail == calibration.tail
    assert loaded.dense is not None
    assert loaded.dense.groups == GROUPS
    before, after = (predict_servers([SERVER], x) for x in (calibration, loaded))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_file_has_the_numbers_of_its_fit(tmp_path: Path) -> None:
    calibration = make_calibration()
    path = tmp_path / "fit.json"
    path.write_text(format_loops(calibration))
    loaded = load_loops(path)
    assert loaded.dense is not None
    assert calibration.dense is not None
    assert loaded.mixture is None
    np.testing.assert_allclose(loaded.dense.mode, calibration.dense.mode, rtol=1e-7)
    assert loaded.dense[2:] == calibration.dense[2:]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loop_version", 7, "loop_version=7 must be 3"),
        ("dense", None, "neither a dense fit"),
        ("dense", {}, "no fit of servers: 'groups'"),
        ("power", {"idle": 1.0}, "no fit of servers"),
        (
            "tail",
            {"prompt": 1.0, "prompt_step_s": 0.0, "noise": {"": 0.1}},
            "tail must be above 0",
        ),
    ],
)
def test_another_fit_is_refused(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    path = tmp_path / "fit.json"
    path.write_text(
        json.dumps(json.loads(format_loops(make_calibration())) | {field: value})
    )
    with pytest.raises(ValueError, match=message) as error:
        load_loops(path)
    assert "\n" not in str(error.value)


def test_the_pace_is_a_factor_of_every_step() -> None:
    coefficients = jax.tree.map(jnp.float32, draw_coefficients(np.zeros(len(PRIOR))))
    work = make_work(
        num_decodes=3,
        decode_context=900,
        num_prompt_rows=512,
        prompt_context=512,
        prompt_squares=512.0**2,
        num_drawn=4,
    )
    model = describe("llama-3.1-70b")
    plain, slow = (
        make_server_cost(model, SERVER.device, x, tensor_parallel=4)(work)
        for x in (coefficients, fold_pace(coefficients, 1.3))
    )
    assert float(slow / plain) == pytest.approx(1.3, rel=1e-5)


def test_draws_have_the_mode_of_the_fit_and_the_discrepancy_of_tables() -> None:
    posterior = draw_loop_posterior(SERVER, make_calibration(), num=8)
    assert posterior.deviations.shape == (8, len(PRIOR))
    assert posterior.deviations.std(axis=0).max() < 0.2
    np.testing.assert_array_equal(posterior.discrepancy, LOOP_DISCREPANCY[False])
    moe = dataclasses.replace(SERVER, model=describe("qwen3-30b-a3b"))
    with pytest.raises(ValueError, match="for dense models in 16 bits"):
        draw_loop_posterior(moe, make_calibration(), num=8)


@pytest.mark.thorough
def test_loads_outside_the_fitted_ones_are_wider() -> None:
    """Four times the longest fitted prompt."""
    long = dataclasses.replace(SERVER, prompt_tokens=4000.0)
    predicted = predict_servers([SERVER, long], make_calibration())
    inside, outside = np.log(predicted.high_s / predicted.median_s)[:, 0] / 1.645
    assert inside == pytest.approx(LOOP_DISCREPANCY[False][0], rel=0.05)
    assert outside**2 - inside**2 == pytest.approx(0.1**2, rel=0.2)


@pytest.mark.thorough
def test_a_row_of_the_same_server_narrows_its_interval() -> None:
    """The noise of a row is left of the discrepancy of the model."""
    gains = rank_rows(SERVER, [SERVER, SERVER], make_calibration())
    noise, discrepancy = 0.08**2, 0.15**2
    width = (noise / (noise + discrepancy)) ** 0.5
    assert gains[0].widths[0] == pytest.approx(width, rel=0.05)
    assert gains[0].widths[0] < 0.5
