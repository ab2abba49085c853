"""The fit of a server's coefficients, and the steady state that it starts from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scaling.calibration import (
    DISCREPANCY,
    EXTRAPOLATION,
    PRIOR,
    STAGE_NOISE,
    LatencySummary,
    LoadSizes,
    MeasuredStage,
    RequestNoise,
    ServerPosterior,
    StageLatencies,
    draw_coefficients,
    find_outside_sizes,
    fit_posterior,
    leave_out,
    load_posterior,
    posterior,
    predict_stage,
    read_measured_stages,
    simulate_stage,
)
from tests.support.folders import GOLDEN
from tests.support.mutation import replace

FIRST = read_measured_stages(GOLDEN / "vllm_stages.csv")[0]
MODELS = {
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", 1),
    "codellama-34b": ("codellama/CodeLlama-34b-Instruct-hf", 2),
}


def stages_with(
    deviations: np.ndarray, rates: tuple[float, ...] = (4.0, 8.0, 12.0)
) -> list[MeasuredStage]:
    """Stages whose latencies are those of the steady state with known coefficients."""
    stages = [
        dataclasses.replace(
            FIRST,
            run=name,
            stage=i,
            model=checkpoint,
            tensor_parallel=degree,
            rate_per_s=rate,
            prompt_tokens=590.0,
            max_prompt_tokens=600,
            answer_tokens=247,
        )
        for name, (checkpoint, degree) in MODELS.items()
        for i, rate in enumerate(rates)
    ]
    values = np.exp(posterior.make_surrogate(stages)(jnp.float32(deviations)))
    return [
        dataclasses.replace(
            stage,
            end_to_end_s=LatencySummary(total_s, total_s, total_s),
            first_token_s=LatencySummary(first, first, first),
        )
        for stage, (total_s, first) in zip(stages, values.tolist(), strict=True)
    ]


@pytest.mark.slow
def test_the_steady_state_is_near_the_simulation() -> None:
    deviations = np.zeros((1, len(PRIOR)))
    for stage in stages_with(deviations[0], rates=(5.0,))[:1]:
        latencies = simulate_stage(stage, draw_coefficients(deviations))
        assert stage.end_to_end_s is not None
        assert stage.first_token_s is not None
        end_to_end = stage.end_to_end_s.mean
        first = stage.first_token_s.median
        assert latencies.end_to_end_s.mean[0] == pytest.approx(end_to_end, rel=0.01)
        assert latencies.first_token_s.median[0] == pytest.approx(first, rel=0.04)


@pytest.mark.thorough
def test_the_fit_recovers_the_times_of_known_coefficients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the steady state in place of the simulation, which takes longer."""
    truth = np.random.default_rng(5).normal(size=len(PRIOR)) * 0.7
    stages = stages_with(truth)

    surrogate = jax.jit(posterior.make_surrogate(stages))

    def steady(
        stage: MeasuredStage, deviations: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        at = stages.index(stage)
        times = np.exp([surrogate(jnp.float32(x))[at] for x in deviations])
        return times, np.zeros(2)

    monkeypatch.setattr(posterior, "_simulate_targets", steady)
    monkeypatch.setattr(posterior, "FIT_ROUNDS", 1)
    monkeypatch.setattr(posterior, "_DRAWS_PER_ROUND", 2)
    fit = fit_posterior(stages, num_draws=400)
    np.testing.assert_allclose(fit.corrections, 0, atol=1e-5)
    assert fit.num_effective > 300
    assert fit.num_stages == dict.fromkeys(MODELS, 3)
    # The posterior of each coefficient covers the truth and is not wider than the
    # prior. Data on two models determine the bandwidth for K and V.
    mean = fit.deviations.mean(axis=0)
    spread = fit.deviations.std(axis=0)
    assert (np.abs(truth - mean) < 3.5 * spread).all()
    assert (spread < 1.2).all()
    assert spread[list(PRIOR).index("decode_kv_ratio")] < 0.8
    # The prior moves the mode, by less than the noise of a stage.
    errors = surrogate(jnp.float32(fit.mode)) - surrogate(jnp.float32(truth))
    assert (np.abs(errors) < STAGE_NOISE).all()


def test_overloaded_stages_are_left_out() -> None:
    stages = [dataclasses.replace(FIRST, failures=3)]
    with pytest.raises(ValueError, match="at least one that is not overloaded"):
        fit_posterior(stages)
    with pytest.raises(ValueError, match="num_draws=1 must be"):
        fit_posterior([FIRST], num_draws=1)
    with pytest.raises(ValueError, match="made-up-7b/0 has no latencies"):
        fit_posterior([dataclasses.replace(FIRST, end_to_end_s=None)])


def test_intervals_include_the_discrepancy_of_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is as wide as assumed for a new model, and known for a fitted one."""
    draws = np.zeros((64, len(PRIOR)))
    shift = np.broadcast_to([0.10, -0.2], (64, 2))
    fitted = ServerPosterior(
        deviations=draws,
        residuals={"llama-2-7b": shift},
        num_stages={"llama-2-7b": 400},
        stages=("a/0",),
        mode=draws[0],
        corrections=np.zeros((1, 2)),
        num_effective=64.0,
        devices=("h100",),
    )
    second = LatencySummary(np.ones(64), np.ones(64), np.ones(64))
    plain = StageLatencies(second, second, second)
    replace(monkeypatch, posterior, "simulate_stage", lambda *_: plain)
    new = predict_stage(FIRST, fitted._replace(residuals={}))
    fitted_prediction = predict_stage(FIRST, fitted)
    # Noise of requests moves percentiles, and nothing else.
    noise = RequestNoise(np.array([0.02, 0.04]), np.array([0.5, 0.5]))
    noisy = predict_stage(FIRST, fitted._replace(noise=noise))
    np.testing.assert_array_equal(
        noisy.end_to_end_s.mean, fitted_prediction.end_to_end_s.mean
    )
    ratio = noisy.first_token_s.p99 / fitted_prediction.first_token_s.p99
    assert np.log(np.median(ratio)) == pytest.approx(0.04 * 3.747, rel=0.02)
    pairs = (("end_to_end_s", "mean"), ("first_token_s", "median"))
    for i, (latency, statistic) in enumerate(pairs):
        before, after = (
            np.log(getattr(getattr(x, latency), statistic))
            for x in (new, fitted_prediction)
        )
        total = (DISCREPANCY[i] ** 2 + STAGE_NOISE[i] ** 2) ** 0.5
        assert np.std(before) == pytest.approx(total, rel=0.3)
        assert np.std(after) == pytest.approx(STAGE_NOISE[i], rel=0.3)
        assert np.mean(before) == pytest.approx(0, abs=4 * total / 8)
        assert np.mean(after) == pytest.approx(shift[0, i], abs=STAGE_NOISE[i])


def test_loads_outside_the_fitted_ones_have_wider_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers of 4 times the longest fitted ones, and all other sizes in between."""
    draws = np.zeros((64, len(PRIOR)))
    low = LoadSizes(100.0, 20.0, 1.0)
    high = LoadSizes(300.0, 41.0, 50.0)
    fitted = ServerPosterior(
        deviations=draws,
        residuals={},
        num_stages={},
        stages=("a/0",),
        mode=draws[0],
        corrections=np.zeros((1, 2)),
        num_effective=64.0,
        devices=("h100",),
        fitted_sizes=(low, high),
    )
    second = LatencySummary(np.ones(64), np.ones(64), np.ones(64))
    plain = StageLatencies(second, second, second)
    replace(monkeypatch, posterior, "simulate_stage", lambda *_: plain)
    assert FIRST.answer_tokens == 41
    inside = predict_stage(FIRST, fitted)
    long = dataclasses.replace(FIRST, answer_tokens=164)
    outside = predict_stage(long, fitted)
    sizes = LoadSizes.of_stage(long, 1.0)
    assert find_outside_sizes(fitted.fitted_sizes, LoadSizes.of_stage(FIRST, 1.0)) == {}
    assert find_outside_sizes(fitted.fitted_sizes, sizes) == {
        "answer_tokens": (164, 20.0, 41.0)
    }
    assert find_outside_sizes(fitted.fitted_sizes, sizes)["answer_tokens"].octaves == 2
    near = LoadSizes(96.0, 42.0, 52.0)
    assert find_outside_sizes(fitted.fitted_sizes, near) == {}
    # Short answers are outside, and few requests are not.
    few = find_outside_sizes(fitted.fitted_sizes, LoadSizes(100.0, 10.0, 0.25))
    assert {name: x.octaves for name, x in few.items()} == {"answer_tokens": 1}
    outside_sizes = find_outside_sizes(
        fitted.fitted_sizes, LoadSizes(100.0, 20.0, 200.0)
    )
    assert {name: x.octaves for name, x in outside_sizes.items()} == {"batch": 2}
    pairs = (("end_to_end_s", "mean"), ("first_token_s", "median"))
    for i, (latency, statistic) in enumerate(pairs):
        before, after = (
            np.log(getattr(getattr(x, latency), statistic)) for x in (inside, outside)
        )
        plain_sd = (DISCREPANCY[i] ** 2 + STAGE_NOISE[i] ** 2) ** 0.5
        assert np.std(before) == pytest.approx(plain_sd, rel=0.3)
        wide_sd = (plain_sd**2 + (2 * EXTRAPOLATION[i]) ** 2) ** 0.5
        assert np.std(after) == pytest.approx(wide_sd, rel=0.3)
    assert find_outside_sizes(None, sizes) == {}


def test_models_and_loads_are_left_out_one_at_a_time() -> None:
    other = {"model": "codellama/CodeLlama-34b-hf", "run": "b"}
    changes = ({}, {"stage": 1}, other, {**other, "stage": 1, "failures": 2})
    stages = [dataclasses.replace(FIRST, **x) for x in changes]
    a, b, c, _ = stages
    assert list(leave_out(stages, "model")) == [([c], [a, b]), ([a, b], [c])]
    expected = [([b, c], [a]), ([a, c], [b]), ([a, b], [c])]
    assert list(leave_out(stages, "load")) == expected


@pytest.mark.thorough
def test_intervals_of_unseen_models_are_neither_narrow_nor_useless() -> None:
    """By the steady state at the published draws, with the discrepancy of a model."""
    checkpoints = {
        "meta-llama/Llama-3.1-8B": 1,
        "Qwen/Qwen2.5-14B-Instruct": 2,
        "meta-llama/Llama-3.1-70B": 4,
        "mistralai/Mixtral-8x22B-v0.1": 4,
        "Qwen/Qwen3-30B-A3B": 1,
    }
    (base,) = stages_with(np.zeros(len(PRIOR)), rates=(8.0,))[:1]
    stages = [
        dataclasses.replace(base, model=name, tensor_parallel=degree)
        for name, degree in checkpoints.items()
    ]
    draws = jnp.float32(load_posterior().deviations)
    surrogate = jax.jit(jax.vmap(posterior.make_surrogate(stages)))
    spread = np.std(np.asarray(surrogate(draws)), axis=0)
    spread = np.sqrt(spread**2 + DISCREPANCY**2 + STAGE_NOISE**2)
    widths = 2 * 1.645 * spread
    assert (widths > [0.15, 0.25]).all()
    assert (widths < [0.65, 0.75]).all()
