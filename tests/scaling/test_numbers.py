"""Public functions of `scaling` check their numbers, found by their annotations.

Every number of every public function is replaced by values that are no number, or out
of every range: the call raises one line with the name and the value, or returns finite
numbers of the types that it has otherwise.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scaling
from scaling import (
    calibration,
    corpora,
    costs,
    curves,
    fits,
    forecasts,
    frontiers,
    laws,
    logs,
    plan,
    policy,
    shapes,
    sweeps,
    training,
)
from tests.support.folders import GOLDEN
from tests.support.measured_servers import make_server
from tests.support.number_arguments import (
    NO_NUMBERS,
    NO_RANGE,
    NumericFunction,
    find_faults,
    numeric_functions,
)
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("no_type_checks")

FUNCTIONS = {x.name.removeprefix("scaling."): x for x in numeric_functions(scaling)}

MODEL = shapes.describe("llama-2-7b")
HYBRID = shapes.describe("olmo-hybrid-7b")
SMALL = sweeps.family_shape(8, 1, 32)
DEVICE = costs.find_device("h100")
SERVED = {"model": MODEL, "device": DEVICE}
LAYOUT = {"model": MODEL, "layout": costs.Layout()}
POWERS = plan.law_two_powers(laws.CHINCHILLA, laws.CONSTANTS["lecture"])
BUDGET = {"powers": POWERS, "flops": 1e21, "inference_tokens": 1e9}
TARGET = {"powers": POWERS, "target": 2.5, "inference_tokens": 1e9}
FAMILY = plan.DesignFamily()
LADDER = plan.closed_form_ladder(np.geomspace(1e8, 1e10, 5), 1e9, 1e-18)
SPENT = {"flop_cost": 1e-18, "budget": 1e4}
TOKENS = np.zeros(200, np.uint16)
COLUMN = np.geomspace(1.0, 2.0, 5)
CURVE = logs.TrainingCurve(1.0, "a", laws.RateSchedule(COLUMN, 1 / COLUMN), COLUMN)
CURVE_FIT = curves.CurveFit(
    laws.CURVE_LAWS["multi-power"],
    {1.0: laws.MULTI_POWER_CONSTANTS["25M"]},
    {},
    0.0,
    (1, 1),
    {},
    {1.0: [1e-3]},
    {},
    [],
)
RUN_SIZE = logs.RunSize(1e9, 2e10)
TUNED = logs.TunedCell(RUN_SIZE, COLUMN, COLUMN, COLUMN, False)
POWER = forecasts.PowerPair(1.0, 0.1, 0.1)
SURFACE = forecasts.RateBatchFit(
    POWER,
    POWER,
    forecasts.Valley(0.1, 0.0, 0.1, 0.0),
    {RUN_SIZE: 2.0},
    ((POWER, POWER),) * 5,
    (0.1, 0.1),
    1e-3,
    5,
    [],
)
PAIR = {"rate": 1.0, "batch": 1.0}
TASK_FORECASTS = forecasts.TaskForecasts({}, (), 0.1, 0.1, 5, 1e20, [])
OFFERS = [plan.parse_offer("a100:4:312"), plan.parse_offer("v100:2.5:125")]
STAGE = calibration.read_measured_stages(GOLDEN / "vllm_stages.csv")[0]
COEFFICIENTS = calibration.draw_coefficients(np.zeros((1, len(calibration.PRIOR))))


@functools.cache
def fitted() -> dict[str, Any]:
    data = laws.simulate_isoflop_runs(20)
    result = fits.fit(laws.CHINCHILLA, data)
    problem = fits.FitProblem(
        laws.CHINCHILLA, fits.make_observations(laws.CHINCHILLA, data)
    )
    starts = result.coordinates[None]
    groups = frontiers.find_run_groups(
        data["num_params"],
        data["num_tokens"],
        fits.run_flops(laws.CHINCHILLA, data),
        data["loss"],
    )
    return {
        "data": data,
        "result": result,
        "problem": problem,
        "starts": starts,
        "groups": groups,
    }


def make_arguments() -> dict[str, dict[str, Any]]:
    """Returns arguments of a right call by name of the function."""
    fit = fitted()
    data = fit["data"]
    result = fit["result"]
    runs = dict(data, flops=fits.run_flops(laws.CHINCHILLA, data))
    sizes = {"batch": 1, "context": 64}
    rng = np.random.default_rng(0)
    return {
        "calibration.choose_warm_up_s": {"end_to_end_s": 3.0},
        "calibration.draw_arrivals": {
            "rng": rng,
            "kind": "constant",
            "rate_per_s": 2.0,
            "num": 5,
        },
        "calibration.make_replica": {
            **SERVED,
            "num_devices": 1,
            "prompt_tokens": 64.0,
            "answer_tokens": 8.0,
        },
        "calibration.predict_training_watts": {"device": DEVICE, "mfu": 0.4},
        "calibration.make_calibrated_cost": {**SERVED, "num_devices": 1},
        "calibration.draw_loop_posterior": {
            "server": make_server(),
            "calibration": calibration.load_loops(),
            "num": 2,
            "seed": 0,
        },
        "calibration.draw_noise_scales": {
            "posterior": calibration.load_posterior(),
            "seed": 0,
        },
        "calibration.noise_quantile": {"level": 0.9},
        "calibration.tail_factor": {
            "values": np.full(2, 1.2),
            "median": np.ones(2),
            "level": 0.99,
            "scale": 0.02,
        },
        "calibration.load_duration_s": {
            "warm_up_s": 1.0,
            "window_s": 2.0,
            "answer_tokens": 100,
        },
        "calibration.make_server_cost": {
            **SERVED,
            "coefficients": COEFFICIENTS,
            "tensor_parallel": 1,
            "max_length": 64,
        },
        "calibration.make_server_load": {
            "arrival_s": np.arange(4.0),
            "prompt": np.full(4, 20),
            "answer": np.full(4, 5),
            "prefix_tokens": np.zeros(4, int),
            "block_size": 16,
            "warm_up_s": 0.0,
            "window_s": 5.0,
            "resident_blocks": 0,
        },
        "calibration.make_stage_load": {
            "stage": STAGE,
            "warm_up_s": 1.0,
            "window_s": 2.0,
            "seed": 0,
        },
        "calibration.num_kv_blocks": {
            **SERVED,
            "tensor_parallel": 1,
            "block_size": 16,
            "memory_share": 0.9,
            "reserved_bytes": 2e9,
            "num_sequences": 0,
        },
        "calibration.take_draws": {"posterior": calibration.load_posterior(), "num": 2},
        "corpora.check_lengths": {
            "corpus": corpora.open_corpus(
                corpora.LanguageConfig(kind="markov", num_tokens=2000, num_held_out=500)
            ),
            "seq_len": 8,
        },
        "corpora.draw_windows": {
            "stream": TOKENS,
            "seed": np.int32(0),
            "step": np.int32(0),
            "batch_size": 2,
            "seq_len": 8,
        },
        "corpora.windows_per_epoch": {"num_tokens": 100, "seq_len": 8},
        "corpora.zipf_probabilities": {"vocab_size": 5, "exponent": 1.0},
        "costs.check_layout": {**LAYOUT, "sequence": 64},
        "costs.check_sizes": {"sizes": 5},
        "costs.decode_terms": {"model": MODEL, **sizes, "steps": 2},
        "costs.decode_traffic": {**LAYOUT, "batch": 2, "number_bytes": 2},
        "costs.decode_work": {
            "model": MODEL,
            **sizes,
            "weight_bytes": 2,
            "kv_bytes": 2,
        },
        "costs.figure_12_cost": {"scale": 1.31},
        "costs.linear_cost": {
            "prefill": (1.0, 0.1, 0.0),
            "decode": (1.0, 0.1, 0.0),
            "scale": 1e-3,
        },
        "costs.make_roofline_cost": {**SERVED, "num_devices": 1},
        "costs.max_kv_pages": {"model": MODEL, "device": "h100", "num_devices": 1},
        "costs.find_compute_bound_size": {
            "is_compute_bound": lambda size: size > 100,
            "max_size": 1000,
        },
        "costs.forward_terms": {"model": MODEL, "batch": 1, "sequence": 8, "past": 4},
        "costs.kv_bytes_per_token": {"model": MODEL, "kv_bytes": 2},
        "costs.list_residuals": {"config": SMALL, "number_bytes": 4},
        "costs.max_batch": {
            **SERVED,
            "context": 64,
            "num_devices": 1,
            "weight_bytes": 2,
            "kv_bytes": 2,
            "memory_share": 0.9,
        },
        "costs.parse_layout": {"text": "tp=2", "zero": 0},
        "costs.pool_kv_bytes": {
            "model": MODEL,
            "num_pages": 8,
            "page_size": 4,
            "num_window_pages": 2,
            "kv_bytes": 2,
        },
        "costs.prefill_traffic": {
            **LAYOUT,
            "rows": 8,
            "logit_rows": 2,
            "num_taps": 0,
            "number_bytes": 2,
        },
        "costs.prefill_work": {
            "model": MODEL,
            "batch": 1,
            "prompt": 8,
            "past": 4,
            "weight_bytes": 2,
            "kv_bytes": 2,
        },
        "costs.roofline": {
            "work": costs.ServingWork(1e12, 1e9, 1e9),
            "device": DEVICE,
            "num_devices": 1,
        },
        "costs.sequence_kv_bytes": {"model": MODEL, "tokens": 64, "kv_bytes": 2},
        "costs.sequence_state_bytes": {"model": HYBRID, "kv_bytes": 2},
        "costs.step_cost": {
            **SERVED,
            "num_devices": 1,
            "weight_bytes": 2,
            "kv_bytes": 2,
            "compute_share": 0.5,
            "bandwidth_share": 0.5,
            "overhead_s": 0.0,
        },
        "costs.stored_tensors": {"model": MODEL, "sequence": 64, "number_bytes": 2},
        "costs.total_residual_bytes": {
            "residuals": costs.list_residuals(SMALL),
            "tokens": 64,
        },
        "costs.training_memory": {
            "model": MODEL,
            "batch": 1,
            "sequence": 64,
            "micro_batches": 1,
        },
        "costs.training_step_flops": {"model": MODEL, "batch": 1, "sequence": 64},
        "costs.training_traffic": {
            **LAYOUT,
            "batch": 1,
            "sequence": 64,
            "number_bytes": 2,
            "dispatch_bytes": 2,
            "gradient_bytes": 2,
            "micro_batches": 1,
        },
        "costs.twice_pairs": {
            "sequence": 8,
            "past": 4,
            "window": 4,
            "attention": "full",
        },
        "fits.compare": {
            "first": result,
            "second": result,
            "num_losses": 5,
            "level": 0.9,
        },
        "fits.compiled_minimize": {
            "law": laws.CHINCHILLA,
            "space": "log",
            "num_lanes": 64,
        },
        "curves.constant_baseline": {"curves": [CURVE], "size": 1.0, "step": COLUMN},
        "fits.describe_thinning": {"num_rows": 5000},
        "fits.f_test_p_value": {"ratio": 2.0, "freedom": 4, "freedom_below": 20},
        "fits.bootstrap": {
            "result": result,
            "data": data,
            "num_resamples": 2,
            "seed": 0,
        },
        "fits.fit": {
            "law": laws.CHINCHILLA,
            "data": data,
            "level": 0.9,
        },
        "fits.join_groups": {"law": laws.CHINCHILLA, "num_groups": 2},
        "fits.make_observations": {
            "law": laws.CHINCHILLA,
            "data": data,
            "num_given": 0,
        },
        "fits.percentile_intervals": {
            "estimate": np.ones(1),
            "samples": np.ones((4, 1)),
            "level": 0.9,
            "loss": "mse",
            "num_points": 20,
            "k": 5,
        },
        "fits.predict": {
            "result": result,
            "data": data,
            "interval": "prediction",
            "level": 0.9,
        },
        "forecasts.choose_pairs": {
            "fit": SURFACE,
            "cells": [TUNED],
            "size": RUN_SIZE,
            "batch_tokens": 2048.0,
        },
        "forecasts.lost_by_miss": {"fit": SURFACE, "size": RUN_SIZE} | PAIR,
        "forecasts.nearest_run": {"cell": TUNED} | PAIR,
        "forecasts.predict_rate_batch": {
            "fit": SURFACE,
            "size": RUN_SIZE,
            "level": 0.9,
        },
        "forecasts.score_pair": {"cell": TUNED} | PAIR,
        "forecasts.predict_tasks": {
            "forecasts": TASK_FORECASTS,
            "num_params": COLUMN,
            "num_tokens": COLUMN,
            "level": 0.9,
        },
        "curves.predict_curve": {
            "fit": CURVE_FIT,
            "size": 1.0,
            "schedule": CURVE.schedule,
            "level": 0.9,
        },
        "fits.solve_weightings": {
            "problem": fit["problem"],
            "weights": np.ones((1, 20)),
            "starts": fit["starts"],
            "tolerance": 1e-10,
        },
        "fits.student_t": {"level": 0.9, "freedom": 20},
        "frontiers.bootstrap_frontier": {
            "method": "parabola",
            "find": frontiers.by_parabola(fit["groups"]),
            "flops": fit["groups"].flops,
            "strata": fit["groups"].strata,
            "resamples": 2,
            "seed": 0,
            "level": 0.9,
        },
        "frontiers.by_parabola": {"groups": fit["groups"], "window": 3},
        "frontiers.find_run_groups": {**runs, "tolerance": 0.1},
        "frontiers.resample_fits": {
            "flops": runs["flops"],
            "loss": runs["loss"],
            "trunk": np.arange(20)[:, None],
            "count": 2,
            "seed": 0,
        },
        "frontiers.vertex_shift": {
            "alpha": 0.34,
            "beta": 0.28,
            "half_width": 1.0,
            "num_points": 9,
        },
        "laws.compute_optimum": {
            "law": laws.CHINCHILLA,
            "coefficients": laws.CONSTANTS["lecture"],
            "flops": 1e21,
        },
        "laws.divide_budget": {"powers": POWERS, "flops": 1e21},
        "laws.simulate_isoflop_runs": {"num": 20, "seed": 0},
        "laws.simulate_runs": {"kind": "sound", "num": 20, "seed": 0},
        "laws.surface_loss": {"params": 1e9, "tokens": 1e10},
        "plan.allocate_budget": BUDGET,
        "plan.best_design": {
            "family": FAMILY,
            "loss": lambda n, d: 1 / n + 1 / d,
            "flops": 1e20,
            "inference_tokens": 1e9,
        },
        "plan.best_offer": {"offers": OFFERS, "mfu": 0.4},
        "plan.budget_loss": {"powers": POWERS, "num_params": 1e9, "num_tokens": 1e10},
        "plan.cheapest_model": TARGET,
        "sweeps.train_in_sequence": {
            "config": scaling.sweeps.SWEEPS["smoke"],
            "out": Path("log"),
            "choose": lambda candidates, remaining: None,
            "budget": 1.0,
        },
        "plan.choose_next_runs": {
            "answer": np.array([0.0, 1.0, 3.0]),
            "log_losses": np.array([[0.0], [1.0], [2.0]]),
            "noise_variance": np.ones(1),
            "flops": np.ones(1),
            "budget": 2.0,
        },
        "plan.evidence_variance": {
            "noise": 1e-4,
            "flops": np.ones(1),
            "target": 2.0,
        },
        "plan.closed_form_ladder": {
            "num_params": LADDER.num_params,
            "inference_tokens": 1e9,
            "flop_cost": 1e-18,
        },
        "plan.design_ladder": {"family": FAMILY, "largest": 1e9, "num_sizes": 3},
        "plan.ladder_cost": {"ladder": LADDER, "num_params": 1e9},
        "plan.tokens_for_loss": {
            "powers": POWERS,
            "num_params": np.array([1e9]),
            "target_loss": 2.5,
        },
        "plan.total_cost": {"powers": POWERS, "ladder": LADDER, **SPENT},
        "plan.total_cost_spread": {
            "powers": [POWERS],
            "ladders": [LADDER, LADDER],
            **SPENT,
            "level": 0.9,
        },
        "plan.lifetime_flops": {
            "num_params": 1e9,
            "num_tokens": 1e10,
            "inference_tokens": 1e9,
        },
        "plan.max_vocab_size": {"family": FAMILY, "num_params": 1e9},
        "plan.nearest_design": {"family": FAMILY, "num_params": 1e9},
        "plan.needed_budget": TARGET,
        "plan.search_params": BUDGET,
        "curves.wsd_schedule": {
            "frame": curves.ScheduleFrame(1000.0, 100.0, 1e-3, 1e-4),
            "decay_share": 0.2,
        },
        "plan.tokens_left": {"flops": 1e21, "num_params": 1e9, "inference_tokens": 1e9},
        "sweeps.count_cost": {"model": SMALL, "seq_len": 32},
        "sweeps.extrapolate": {
            "rows": [
                {
                    "num_tokens": 100,
                    "loss": 1.0,
                    "hidden_size": 8,
                    "seed": 0,
                    "learning_rate": 1e-3,
                    "cell": "a",
                }
            ],
            "width": 16,
            "num_tokens": 100,
        },
        "sweeps.family_shape": {"width": 8, "num_layers": 1, "seq_len": 32},
        "sweeps.fit_powers": {
            "width": COLUMN,
            "num_tokens": COLUMN**2 * [1, 2, 1, 2, 1],
            "rate": COLUMN**-1,
            "level": 0.9,
        },
        "sweeps.nearest_shape": {"num_params": 1e4, "num_layers": 1, "seq_len": 32},
        "policy.pass_at_k": {"num_right": np.array([1]), "num_samples": 5, "k": 2},
        "training.check_trainable": {
            "model": SMALL,
            "layout": costs.Layout(),
            "sequence_length": 32,
        },
        "training.init_train_state": {
            "model": SMALL,
            "optimizer": training.OptimizerConfig(),
            "seed": jnp.int32(0),
            "hidden_rate": 0.5,
        },
        "training.make_optimizer": {
            "config": training.OptimizerConfig(),
            "hidden_rate": 0.5,
        },
        "training.make_pipeline_schedule": {"num_stages": 2, "num_micro": 4},
        "training.make_records": {
            "trajectories": [
                (np.zeros(4, np.uint16), np.arange(8, dtype=np.uint16).reshape(2, 4))
            ],
            "text": TOKENS,
            "num_guesses": 1,
            "text_tokens": 4,
            "seed": 0,
        },
        "training.resize_model": {"base": SMALL, "num_params": 2000},
        "training.stream_windows": {"held_out": TOKENS, "seq_len": 8, "num_windows": 4},
        "training.training_flops": {"config": SMALL, "batch": 1, "sequence": 32},
        "training.transformer": {
            "width": 8,
            "num_heads": 1,
            "num_layers": 1,
            "mlp_size": 8,
            "vocab_size": 257,
            "seq_len": 32,
        },
    }


def make_costly_arguments() -> dict[str, dict[str, Any]]:
    """Returns the same for functions that train, simulate or compile."""
    draws = {"coefficients": COEFFICIENTS}
    heads: Any = None
    scored = {"params": {}, "model": SMALL, "seq_len": 8}
    return {
        "cli.serve_designs": {
            "designs": [plan.nearest_design(FAMILY, 1e9)],
            "offers": OFFERS,
            "lengths": (64.0, 8.0),
            "limits": calibration.LatencyLimits(),
            "calibration": calibration.load_loops(),
            "num_draws": 0,
        },
        "calibration.find_goodput": {
            "servers": [make_server()],
            "limits": calibration.LatencyLimits(),
            "calibration": calibration.load_loops(),
            "num_draws": 0,
            "seed": 0,
        },
        "calibration.fit_posterior": {"stages": [STAGE], "num_draws": 2, "seed": 0},
        "calibration.fit_request_log": {
            "log": calibration.RequestLog(*np.ones((6, 3))),
            "setup": calibration.make_stage_setup(STAGE),
            "num_fitted": None,
            "num_draws": 2,
            "seed": 0,
        },
        "calibration.predict_stage": {
            "stage": STAGE,
            "posterior": calibration.load_posterior(),
            "seed": 0,
        },
        "calibration.simulate_server": {
            "setup": calibration.make_stage_setup(STAGE),
            "loads": [],
            **draws,
            "num_slots": 8,
        },
        "calibration.simulate_stage": {
            "stage": STAGE,
            **draws,
            "warm_up_s": 1.0,
            "window_s": 2.0,
            "seed": 0,
            "num_slots": 8,
        },
        "frontiers.find_frontiers": {
            "log": None,
            "tolerance": 0.1,
            "smoothing": 0.1,
            "resamples": 0,
            "level": 0.9,
            "seed": 0,
        },
        "policy.pretrain": {
            "seed": 0,
            "num_steps": 1,
            "batch_size": 4,
            "error_rate": 0.5,
            "learning_rate": 1e-3,
        },
        "policy.roll_out": {
            "params": {},
            "prompts": policy.TASKS["sums"].draw(jax.random.key(0), 1),
            "key": np.zeros(2, np.uint32),
            "model": SMALL,
            "group_size": 2,
            "temperature": 1.0,
        },
        "policy.run_policy": {
            "state": None,
            "config": policy.PolicyConfig(),
            "num_updates": 1,
        },
        "policy.start_policy": {"params": {}, "seed": 0},
        "training.acceptance_rates": {
            "params": {},
            "target": {},
            "windows": np.zeros((1, 8), int),
            "heads": heads,
            "depth": 1,
            "num_ranks": 1,
            "start": 1,
            "batch_size": 1,
        },
        "training.compiled_steps": {
            "model": SMALL,
            "optimizer": training.OptimizerConfig(),
            "batch_size": 2,
            "seq_len": 8,
        },
        "training.score_documents": {
            **scored,
            "documents": [corpora.Document("a", Path("a"), b"text")],
            "batch_size": 1,
        },
        "training.score_stream": {
            **scored,
            "held_out": TOKENS,
            "num_windows": 2,
            "carry": 0,
            "batch_size": 1,
        },
    }


def test_every_public_function_with_numbers_is_tested() -> None:
    assert {*make_arguments(), *make_costly_arguments()} == {*FUNCTIONS}


@pytest.mark.parametrize("package", sorted({x.partition(".")[0] for x in FUNCTIONS}))
def test_public_functions_check_their_numbers(package: str) -> None:
    faults = []
    for is_costly, table in (
        (False, make_arguments()),
        (True, make_costly_arguments()),
    ):
        for name, arguments in table.items():
            if name.partition(".")[0] == package:
                faults += find_faults(FUNCTIONS[name], arguments, is_costly=is_costly)
    assert faults == []


def test_the_search_detects_every_kind_of_fault() -> None:
    def faulty(x: float) -> Any:
        if x == -1:
            return (-1.0) ** 0.5
        return 5.0 / x

    function = NumericFunction("faulty", faulty, {"x": False})
    faults = "\n".join(find_faults(function, {"x": 1.0}))
    for text in ("complex", "not finite", "ZeroDivisionError", "TypeError", "accepted"):
        assert text in faults


@pytest.mark.parametrize("value", [*NO_NUMBERS, *NO_RANGE, None, 0, -1])
def test_limits_of_data_check_their_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="unique_tokens="):
        plan.DataLimit(value)
    with pytest.raises(ValueError, match="params="):
        plan.DataLimit(1e9, plan.HalfLives(5.0, value))


def test_arrays_are_checked_entry_by_entry_and_tracers_pass() -> None:
    flops = np.array([1e20, 1e21])
    array_budgets = laws.divide_budget(POWERS, flops)
    for i, one in enumerate(flops):
        loss = laws.divide_budget(POWERS, float(one)).loss
        assert array_budgets.loss[i] == pytest.approx(loss, rel=1e-12)
    for bad in (-1.0, np.nan, np.inf, 0.0):
        with refused("flops=", "must be in [1e-100, 1e100]"):
            laws.divide_budget(POWERS, np.array([1e20, bad]))
    with refused("flops=array(['a', 'b']"):
        laws.divide_budget(POWERS, np.array(["a", "b"]))

    def loss_of(flops: jax.Array) -> jax.Array:
        budget = laws.divide_budget(POWERS, flops)
        return plan.budget_loss(POWERS, budget.num_params, budget.num_tokens)

    mapped = jax.jit(jax.vmap(loss_of))(jnp.asarray(flops, jnp.float32))
    np.testing.assert_allclose(mapped, array_budgets.loss, rtol=1e-5)
    assert jax.grad(loss_of)(jnp.float32(1e21)) < 0


def test_budgets_beyond_int32_are_counted() -> None:
    terms = costs.forward_terms(MODEL, batch=2**40, sequence=1)
    once = costs.forward_terms(MODEL, batch=1, sequence=1)
    assert costs.total_flops(terms) == 2**40 * costs.total_flops(once)
