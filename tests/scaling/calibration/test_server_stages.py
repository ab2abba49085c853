"""Simulated load stages of servers."""

import dataclasses

import jax
import numpy as np
import pytest

from scaling import shapes
from scaling.calibration import (
    PRIOR,
    MeasuredStage,
    ServerCoefficients,
    StageLatencies,
    compare_stage,
    draw_coefficients,
    make_stage_load,
    num_kv_blocks,
    read_measured_stages,
    simulate_stage,
)
from scaling.costs import find_device, kv_bytes_per_token, sequence_state_bytes
from tests.support.folders import GOLDEN

FIRST = read_measured_stages(GOLDEN / "vllm_stages.csv")[0]
H100 = find_device("h100")


def constant_steps(**delays: float) -> ServerCoefficients:
    """Steps of 10 ms, for any work, and delays of requests."""
    values = dict.fromkeys(PRIOR, 1e9) | {"overlap": 1.0, "reduce_power": 1.0}
    overheads = [x for x in PRIOR if x.endswith("_s") or x == "delivery_lag"]
    values |= dict.fromkeys(overheads, 0.0) | {"step_s": 0.01} | delays
    return ServerCoefficients(*(np.array([values[x]], np.float32) for x in PRIOR))


def simulated(stage: MeasuredStage, coefficients: ServerCoefficients) -> StageLatencies:
    return simulate_stage(stage, coefficients, warm_up_s=2.0, window_s=3.0)


def test_latencies_of_a_lone_request_are_sums_of_steps_and_delays() -> None:
    # A request each second; each takes 41 steps of 10 ms.
    stage = dataclasses.replace(FIRST, rate_per_s=1.0)
    delays = {"ingest_s": 0.004, "first_token_s": 0.003, "stream_s": 0.002}
    latencies = simulated(stage, constant_steps(**delays, delivery_lag=0.5))
    first = 0.01 + 0.004 + 0.003 + 0.005
    last = 0.41 + 0.004 + 0.002 + 0.005
    assert latencies.first_token_s.mean == pytest.approx(first, abs=2e-6)
    assert latencies.end_to_end_s.p99 == pytest.approx(last, abs=2e-6)
    assert latencies.inter_token_s.median == pytest.approx(
        (last - first) / 40, abs=2e-6
    )


@pytest.mark.thorough
def test_draws_are_independent_and_slots_do_not_change_them() -> None:
    # The second draw is 8 times slower than the first one, and has the largest batches.
    draws = jax.tree.map(lambda x: np.repeat(x, 2), constant_steps(sequence_s=1e-4))
    draws = draws._replace(step_s=np.array([0.01, 0.08], np.float32))
    stage = dataclasses.replace(FIRST, max_num_seqs=24)
    both = simulate_stage(stage, draws, warm_up_s=2.0, window_s=3.0, num_slots=12)
    for i in range(2):
        single = jax.tree.map(lambda x, i=i: x[i : i + 1], draws)
        alone = simulate_stage(
            stage, single, warm_up_s=2.0, window_s=3.0, num_slots=24, seed=i
        )
        pair = jax.tree.map(lambda x, i=i: x[i : i + 1], both)
        # Sums over requests may differ in their last bit.
        for x, y in zip(jax.tree.leaves(pair), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12)
    assert both.end_to_end_s.mean[1] > 5 * both.end_to_end_s.mean[0]


def test_each_draw_has_arrivals_of_its_own() -> None:
    """Equal coefficients give the latencies of the draw's seed, alone or together."""
    poisson = dataclasses.replace(FIRST, arrivals="poisson")
    draws = jax.tree.map(lambda x: np.repeat(x, 3), constant_steps(sequence_s=1e-3))
    both = simulated(poisson, draws).end_to_end_s.p99
    assert len({*both.tolist()}) == 3
    alone = simulate_stage(
        poisson, constant_steps(sequence_s=1e-3), warm_up_s=2.0, window_s=3.0, seed=1
    )
    assert alone.end_to_end_s.p99 == pytest.approx(both[1], rel=1e-6)


def test_prompts_are_cached_after_their_first_use() -> None:
    stage = dataclasses.replace(FIRST, prompt_tokens=190.0, max_prompt_tokens=190)
    load = make_stage_load(stage, warm_up_s=2.0, window_s=3.0)
    w = load.workload
    prompt = np.asarray(w.prompt)
    context = np.asarray(w.context)
    assert (prompt + context == 190).all()
    # 3 prefixes of 64 tokens, 12 prompts, blocks of 16: 176 is the last full block.
    assert context[:3].tolist() == [0, 0, 0]
    assert set(context[3:12]) == {64}
    assert set(context[12:]) == {176}
    # Blocks of 12 prompts of 11 full ones, of which 4 are shared by 4 prompts each.
    assert load.resident_blocks == 12 * 11 - 9 * 4
    later = dataclasses.replace(stage, stage=1)
    warm = make_stage_load(later, warm_up_s=2.0, window_s=3.0)
    assert set(np.asarray(warm.workload.context)) == {176}
    without = dataclasses.replace(stage, prefix_caching=False)
    cold = make_stage_load(without, warm_up_s=2.0, window_s=3.0)
    assert set(np.asarray(cold.workload.context)) == {0}
    assert cold.resident_blocks == 0
    arrival_s = np.asarray(w.arrival) @ np.array([1, 1e-6])
    assert load.is_measured.sum() == 15
    np.testing.assert_allclose(arrival_s, np.arange(arrival_s.size) / 5, atol=5e-3)


def test_poisson_arrivals_have_the_rate() -> None:
    stage = dataclasses.replace(FIRST, arrivals="poisson", rate_per_s=50.0)
    load = make_stage_load(stage, warm_up_s=0.0, window_s=40.0)
    assert load.is_measured.sum() == pytest.approx(2000, abs=5 * 2000**0.5)


@pytest.mark.slow
def test_the_warm_up_is_longer_than_an_answer() -> None:
    """Fewer requests run in the first seconds of a load with long answers."""
    stage = dataclasses.replace(FIRST, answer_tokens=1500, rate_per_s=1.0)
    medians = draw_coefficients(np.zeros((1, len(PRIOR))))
    short, full, chosen = (
        simulate_stage(stage, medians, warm_up_s=x, window_s=4.0).end_to_end_s.mean[0]
        for x in (1.0, 30.0, None)
    )
    assert short < 0.95 * full
    assert chosen == pytest.approx(full, rel=0.02)


@pytest.mark.parametrize(
    ("name", "degree", "blocks"),
    [
        ("llama-2-7b", 1, 7463),
        ("llama-3.1-70b", 4, 30425),
        ("mistral-nemo", 2, 48009),
        ("mistral-nemo", 1, 19251),
    ],
)
def test_blocks_are_those_that_vllm_reports(
    name: str, degree: int, blocks: int
) -> None:
    """Reports of vLLM 0.15 on H100s with 0.9 of the memory; they were fitted."""
    num_blocks = num_kv_blocks(
        shapes.describe_checkpoint(name), H100, tensor_parallel=degree
    )
    assert num_blocks == pytest.approx(blocks, rel=0.003)


def test_blocks_that_fit_into_memory() -> None:
    llama = shapes.describe("llama-2-7b")
    memory = 0.9 * 81559 * 2**20
    left = memory - 2 * 6_738_415_616 - 2e9
    assert num_kv_blocks(llama, H100, reserved_bytes=2e9) == int(left // (16 * 524_288))
    hybrid = shapes.describe("olmo-hybrid-7b")
    fewer = num_kv_blocks(hybrid, H100) - num_kv_blocks(hybrid, H100, num_sequences=64)
    state_bytes = 64 * sequence_state_bytes(hybrid) / (16 * kv_bytes_per_token(hybrid))
    assert fewer == pytest.approx(state_bytes, abs=1)
    # One KV head on each of 8 devices; 16 devices have 2 copies of each.
    large = shapes.describe("llama-3.1-70b")
    eight, sixteen = (
        num_kv_blocks(large, H100, tensor_parallel=x, reserved_bytes=0) for x in (8, 16)
    )
    block_bytes = 16 * 80 * 2 * 128 * 2
    weights = 2 * 70_553_706_496
    assert eight == int((memory - weights / 8) // block_bytes)
    assert sixteen == int((memory - weights / 16) // block_bytes)
    # 141 GB of weights fit on two H100s, with room for 27,840 tokens.
    assert num_kv_blocks(large, H100, tensor_parallel=2) == 1740
    with pytest.raises(ValueError, match=r"memory_share=1\.5 must be in \(0, 1\]"):
        num_kv_blocks(llama, H100, memory_share=1.5)


@pytest.mark.parametrize(
    ("name", "device", "degree", "share", "remedy"),
    [
        ("llama-3.1-70b", "h100", 1, 0.9, "a tensor-parallel degree of 2 is enough"),
        (
            "llama-3.1-70b",
            "h100",
            2,
            0.8,
            "degree of 4 or a memory utilization of 0.85",
        ),
        ("llama-2-7b", "a10", 1, 0.5, "degree of 2 or a memory utilization of 0.6 is"),
    ],
)
def test_a_model_that_does_not_fit_names_a_way_out(
    name: str, device: str, degree: int, share: float, remedy: str
) -> None:
    """The message is one line, and the way that it names fits."""
    model = shapes.describe(name)
    with pytest.raises(
        ValueError, match=f"{name} does not fit into {degree} "
    ) as error:
        num_kv_blocks(
            model, find_device(device), tensor_parallel=degree, memory_share=share
        )
    text = str(error.value)
    assert remedy in text, text
    assert "\n" not in text
    assert "GB of 16-bit weights each" in text


def test_what_does_not_fit_is_refused() -> None:
    median = draw_coefficients(np.zeros((1, len(PRIOR))))
    with pytest.raises(ValueError, match=r"^made-up-7b/0: .*and there are 20$"):
        simulated(dataclasses.replace(FIRST, num_blocks=20), median)
    with pytest.raises(ValueError, match="one leading axis, of draws"):
        simulated(FIRST, draw_coefficients(np.zeros(len(PRIOR))))
    with pytest.raises(ValueError, match=r"window_s=0\.01 must be longer"):
        make_stage_load(FIRST, window_s=0.01, warm_up_s=2.1)


def test_a_comparison_shows_each_statistic_and_its_error() -> None:
    assert FIRST.end_to_end_s is not None
    latencies = StageLatencies(
        *(
            type(FIRST.end_to_end_s)(*(np.array([1.1 * x]) for x in summary))
            for summary in (
                FIRST.end_to_end_s,
                FIRST.first_token_s,
                FIRST.inter_token_s,
            )
            if summary is not None
        )
    )
    title, *lines = compare_stage(FIRST, latencies).splitlines()
    assert title == "made-up-7b/0  5 requests/s"
    assert len(lines) == 9
    assert all(line.endswith("+10.0 %") for line in lines)
    words = "end-to-end mean 550.00 ms measured 500.00 ms +10.0 %"
    assert lines[0].split() == words.split()
