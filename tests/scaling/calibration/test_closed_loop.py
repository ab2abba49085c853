"""Servers under a constant number of requests: counts, latencies, fits and power."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.simulation import Work, make_work
from scaling.calibration import (
    LOOP_PRIOR,
    PRIOR,
    LoopCoefficients,
    LoopFit,
    LoopPrediction,
    MeasuredServer,
    PowerShares,
    ServerCoefficients,
    calibrate_loops,
    count_server,
    find_loop_latency,
    find_size_range,
    find_used_shares,
    fit_loops,
    fit_power,
    make_loop_cost,
    make_server_cost,
    num_kv_blocks,
    predict_loops,
    predict_roofline,
    predict_servers,
    predict_watts,
    sizes_of_server,
)
from scaling.costs import find_device
from scaling.shapes import describe
from tests.support.measured_servers import make_server

MEDIANS = {name: jnp.float32(x) for name, (x, _) in {**PRIOR, **LOOP_PRIOR}.items()}


def make_coefficients(**changes: float) -> LoopCoefficients:
    values = MEDIANS | {name: jnp.float32(x) for name, x in changes.items()}
    server = ServerCoefficients(
        **{x: values.pop(x) for x in ServerCoefficients._fields}
    )
    return LoopCoefficients(server=server, **values)


def test_a_dense_server_on_one_device_has_the_cost_of_its_stages() -> None:
    """The cost model of load stages is the twin: 16 bits, no exchange."""
    coefficients = make_coefficients()
    cost = make_loop_cost(count_server(make_server()), coefficients)
    twin = make_server_cost(
        describe("qwen3-8b"), find_device("h100"), coefficients.server
    )
    for work in (
        make_work(num_decodes=16, decode_context=9000, num_drawn=16),
        make_work(
            num_decodes=3,
            decode_context=900,
            num_prompt_rows=512,
            prompt_context=512,
            prompt_squares=512.0**2,
            num_drawn=4,
        ),
        make_work(),
    ):
        np.testing.assert_allclose(cost(work), twin(work), rtol=1e-5)


def test_formats_and_ranks_change_the_bytes_of_a_step() -> None:
    def weight_bytes(model: str, **changes: object) -> tuple[float, float]:
        counts = count_server(make_server(model, **changes)).counts
        return float(counts.weight_bytes), float(counts.expert_bytes)

    plain, _ = weight_bytes("qwen3-8b")
    head = 2 * 151936 * 4096
    eighth, _ = weight_bytes("qwen3-8b", weight_format="fp8")
    assert eighth - head == pytest.approx((plain - head) / 2, rel=1e-3)
    # Of a mixture in 4 bits only the routed experts have 4 bits.
    dense, experts = weight_bytes("gpt-oss-20b")
    dense_4, experts_4 = weight_bytes("gpt-oss-20b", weight_format="mxfp4")
    assert dense_4 == dense
    assert experts_4 == pytest.approx(experts * (0.5 + 1 / 32) / 2)
    # Every rank of attention has all weights of attention.
    ranks, _ = weight_bytes("qwen3-8b", num_devices=4, data_parallel=4)
    attention = 36 * 2 * (4096 * 128 * (32 + 2 * 8) + 32 * 128 * 4096 + 256)
    assert ranks - plain == pytest.approx(3 * attention, rel=1e-6)


def test_products_run_at_the_rate_of_their_format() -> None:
    def flops(device: str, weight_format: str) -> float:
        server = make_server(device=find_device(device), weight_format=weight_format)
        return float(count_server(server).counts.flops_per_token)

    plain = flops("b200", "bf16")
    assert flops("b200", "fp8") == pytest.approx(plain / 2)
    assert flops("b200", "fp4") == pytest.approx(plain / 4)
    # A device without 4-bit products computes in 16 bits.
    assert flops("h100", "fp4") == pytest.approx(flops("h100", "bf16"))


def test_windows_states_and_latents_have_their_share_of_the_cache() -> None:
    oss = count_server(make_server("gpt-oss-20b", prompt_tokens=1984.0))
    # Half of the layers see 128 of 2,048 tokens.
    assert float(oss.counts.kv_bytes) == 2 * 8 * 64 * 2 * (1 + 128 / 2048) / 2
    hybrid = count_server(make_server("qwen3.5-397b-a17b", num_devices=8))
    state = 45 * 64 * 128 * 128 * 4
    copies = 8 / 2
    token = 15 * 2 * 2 * 256 * 2 * copies
    assert float(hybrid.state_tokens) == pytest.approx(state / token)
    latent = count_server(make_server("deepseek-v3", num_devices=8))
    assert float(latent.kv_copies) == 8
    assert float(latent.prefill_pairs) == pytest.approx((192 + 128) / (576 + 512))
    capacity = count_server(make_server()).kv_capacity
    blocks = num_kv_blocks(describe("qwen3-8b"), find_device("h100"))
    assert float(capacity) == pytest.approx(16 * blocks, rel=0.02)


def simulate_loop(
    server: MeasuredServer,
    cost: Callable[[Work], jax.Array],
    num_slots: int,
    host_token_s: float = 0.0,
    poll_steps: int = 1,
) -> tuple[float, float]:
    """Runs a closed loop step by step; returns mean time per token and first token.

    Each step decodes one token of each running request, and feeds one whole prompt if a
    request waits and a slot is free; new requests are seen every `poll_steps` steps.
    One process streams all tokens in their order. A request whose last token is
    streamed is replaced at once.
    """
    prompt, answer = int(server.prompt_tokens), int(server.answer_tokens)
    waiting = [0.0] * int(server.concurrency)
    running: list[list[float]] = []  # tokens, arrival, first token
    ends: list[tuple[float, float]] = []
    now = 0.0
    streamed = 0.0
    cache: dict[tuple[int, int, bool], float] = {}
    num_requests = 12 * len(waiting)
    step = 0
    num_seen = 0
    while len(ends) < num_requests:
        if not running:
            now = max(now, waiting[0])
        if step % poll_steps == 0 or not running:
            num_seen = sum(x <= now for x in waiting)
        step += 1
        feeds = num_seen > 0 and len(running) < num_slots
        num_seen -= feeds
        context = int(sum(prompt + x[0] for x in running))
        key = (len(running), context // 256, feeds)
        if key not in cache:
            work = make_work(
                num_decodes=len(running),
                decode_context=context,
                num_drawn=len(running) + feeds,
            )
            if feeds:
                work = work._replace(
                    num_prompt_rows=jnp.int32(prompt),
                    prompt_context=jnp.int32(prompt),
                    prompt_squares=jnp.float32(prompt**2),
                )
            cache[key] = float(cost(work))
        now += cache[key]
        for request in running:
            request[0] += 1
        streamed = max(now, streamed)
        if feeds:
            streamed += host_token_s
            running.append([1, waiting.pop(0), streamed])
        for request in [*running]:
            streamed += host_token_s
            if request[0] >= answer:
                running.remove(request)
                token_s = (streamed - request[2]) / (answer - 1)
                ends.append((token_s, request[2] - request[1]))
                waiting.append(streamed)
    late = np.array(ends[len(ends) // 2 :])
    return float(late[:, 0].mean()), float(late[:, 1].mean())


@pytest.mark.parametrize("concurrency", [4, 16])
def test_the_time_per_token_is_that_of_a_simulated_loop(concurrency: int) -> None:
    server = make_server(
        concurrency=float(concurrency), prompt_tokens=2048.0, answer_tokens=64.0
    )
    coefficients = make_coefficients(interference=1.0)
    work = count_server(server)
    cost = jax.jit(make_loop_cost(work, coefficients).__call__)
    token_s, _ = simulate_loop(server, cost, concurrency)
    predicted = find_loop_latency(work, coefficients)
    assert float(predicted.token_s) == pytest.approx(token_s, rel=0.06)


def test_requests_wait_for_memory_as_in_a_simulated_loop() -> None:
    server = make_server(concurrency=24.0, prompt_tokens=256.0, answer_tokens=128.0)
    slots = 8
    limit = jnp.float32(slots * (256 + 64))
    work = count_server(server)._replace(kv_capacity=limit)
    coefficients = make_coefficients(interference=1.0)
    cost = jax.jit(make_loop_cost(work, coefficients).__call__)
    token_s, first_s = simulate_loop(server, cost, slots)
    predicted = find_loop_latency(work, coefficients)
    assert float(predicted.num_running) == pytest.approx(slots)
    assert float(predicted.token_s) == pytest.approx(token_s, rel=0.06)
    assert float(predicted.first_token_s) == pytest.approx(first_s, rel=0.1)


def test_first_tokens_wait_until_an_engine_looks_for_requests() -> None:
    """Answers end anywhere in an interval of 40 steps, and wait for half of it."""
    coefficients = make_coefficients(
        interference=1.0,
        ingest_s=1e-9,
        host_token_s=0.0,
        first_wave=0.0,
        prompt_steps=1.0,
    )
    first_s = np.zeros(2)
    for answer_tokens in (125.0, 135.0, 145.0, 155.0):
        server = make_server(
            concurrency=8.0,
            prompt_tokens=64.0,
            answer_tokens=answer_tokens,
            poll_steps=40.0,
        )
        work = count_server(server)
        cost = jax.jit(make_loop_cost(work, coefficients).__call__)
        _, simulated_s = simulate_loop(server, cost, 8, poll_steps=40)
        predicted_s = float(find_loop_latency(work, coefficients).first_token_s)
        first_s += np.array([predicted_s, simulated_s]) / 4
    assert first_s[1] > 0.1
    assert first_s[0] == pytest.approx(first_s[1], rel=0.2)


@pytest.mark.parametrize("host_token_s", [0.0, 2e-3])
def test_first_tokens_wait_for_the_stream_of_others(host_token_s: float) -> None:
    """A process that streams 500 tokens a second has a backlog in a loop of 16."""
    server = make_server(prompt_tokens=64.0, answer_tokens=64.0)
    coefficients = make_coefficients(
        interference=1.0,
        ingest_s=1e-9,
        host_token_s=host_token_s,
        first_wave=0.0,
        prompt_steps=1.0,
    )
    work = count_server(server)
    cost = jax.jit(make_loop_cost(work, coefficients).__call__)
    _, first_s = simulate_loop(server, cost, 16, host_token_s)
    predicted = float(find_loop_latency(work, coefficients).first_token_s)
    assert (first_s > 0.5) == (host_token_s > 0)
    assert predicted == pytest.approx(first_s, rel=0.25)


def test_prompts_of_mixtures_are_launched_weight_by_weight() -> None:
    """Of 48 layers of Maverick 24 have experts; dense layers are not launched."""
    assert float(count_server(make_server()).num_launches) == 0
    mixture = make_server("gpt-oss-20b")
    # Q, K, V, O, sinks and biases, router, three matrices of experts, norms.
    per_layer = float(count_server(mixture).num_launches) / 24
    assert 8 <= per_layer <= 20
    work = count_server(mixture)
    slow, fast = (
        find_loop_latency(work, make_coefficients(launch_s=x, prompt_steps=2.0))
        for x in (1e-3, 1e-9)
    )
    delay_s = float(slow.first_token_s - fast.first_token_s)
    assert delay_s == pytest.approx(2e-3 * float(work.num_launches), rel=0.02)
    assert float(slow.token_s) == float(fast.token_s)


def test_a_roofline_is_faster_than_the_prior() -> None:
    """Without overheads, host and waits; a mixture has no launches."""
    for server in (make_server(), make_server("gpt-oss-20b", concurrency=512.0)):
        real = find_loop_latency(count_server(server), make_coefficients())
        token_s, first_s = predict_roofline([server])[0]
        assert 0 < token_s < float(real.token_s)
        assert 0 < first_s < float(real.first_token_s)


def test_power_is_idle_plus_used_shares() -> None:
    """A step that reads the weights of Qwen3-8B at half of the bandwidth."""
    server = make_server(
        concurrency=1.0, answer_tokens=1e6, prompt_tokens=1.0, watts=500.0
    )
    counts = count_server(server).counts
    state = count_server(server)
    kv_bytes = float(counts.kv_bytes * state.num_layers) * (1 + 5e5)
    step_s = (float(counts.weight_bytes) + kv_bytes) / 3350e9 / 0.5
    empty = np.zeros((1, 2))
    load = LoopPrediction(empty, empty, np.ones(1), np.array([step_s]))
    used = find_used_shares([server], load)
    assert used[0, :2] == pytest.approx([1.0, 0.5], rel=1e-4)
    shares = PowerShares(idle=0.4, memory=0.3, products=0.0)
    assert predict_watts([server], load, shares) == pytest.approx([700 * 0.55])
    full = shares._replace(idle=2.0)
    assert predict_watts([server], load, full) == [700.0]
    servers = [server, dataclasses.replace(server, watts=400.0)]
    two = load._replace(
        mean_token_s=np.array([step_s, 2 * step_s]), num_running=np.ones(2)
    )
    fitted = fit_power(servers, two)
    assert predict_watts(servers, two, fitted) == pytest.approx([500, 400], rel=1e-3)


NUM_SHARED = len(PRIOR) + len(LOOP_PRIOR) - 4
SIZES = {
    "engine": ("sglang", "vllm"),
    "device": ("h100",),
    "statistic": ("x",),
    "sweep": ("x",),
}
NUM_PARAMETERS = NUM_SHARED + 7 * 3 + 2 + 2 + 2


def make_rows(**changes: object) -> list[MeasuredServer]:
    return [
        make_server(
            model,
            engine=engine,
            concurrency=float(concurrency),
            prompt_tokens=float(prompt),
            num_devices=num,
            name=f"{model}-{engine}-{concurrency}-{prompt}-{num}",
            **changes,
        )
        for model in ("qwen3-8b", "qwen3-14b", "llama-3.1-8b")
        for engine in ("vllm", "sglang")
        for concurrency in (4, 32, 128)
        for prompt in (128, 2048)
        for num in (1, 4)
    ]


@pytest.mark.thorough
def test_a_fit_recovers_rows_of_known_coefficients() -> None:
    """With an effect of the engine, and 5 % of the rows tenfold too slow."""
    rng = np.random.default_rng(0)
    deviations = 0.3 * rng.normal(size=NUM_PARAMETERS)
    rows = make_rows()
    range_of_rows = find_size_range(map(sizes_of_server, rows))
    truth = LoopFit(deviations, np.eye(NUM_PARAMETERS), SIZES, (), 0, range_of_rows)
    latencies = predict_loops(rows, truth).median_s
    factor = np.where(np.arange(len(rows)) % 20 == 0, 10.0, 1.0)
    rows = [
        dataclasses.replace(row, token_s=float(t * x), first_token_s=float(first))
        for row, (t, first), x in zip(rows, latencies, factor, strict=True)
    ]
    fit = fit_loops(rows)
    error = predict_loops(rows, fit).median_s / latencies - 1
    assert np.median(np.abs(error[:, 0])) < 0.02
    assert np.median(np.abs(error[:, 1])) < 0.05
    assert fit.groups["engine"] == ("sglang", "vllm")
    # A row of an engine that no row has is less certain.
    other = [dataclasses.replace(rows[0], engine="trtllm")]
    spread = predict_loops([rows[0], *other], fit).log_spread
    assert spread[1, 0] > spread[0, 0] + 0.05
    held_out = [x for x in rows if x.model.name != "qwen3-14b"]
    unseen = [i for i, x in enumerate(rows) if x.model.name == "qwen3-14b"]
    calibration = calibrate_loops(held_out)
    predicted = predict_servers([rows[i] for i in unseen], calibration)
    error = predicted.median_s[:, 0] / latencies[unseen, 0] - 1
    assert np.median(np.abs(error)) < 0.05
    inside = (predicted.low_s < latencies[unseen]) & (
        latencies[unseen] < predicted.high_s
    )
    assert inside.mean() > 0.9
    assert np.isnan(predicted.watts).all()


@pytest.mark.thorough
def test_repeated_rows_count_once_and_dense_first_tokens_inform_dense_fits() -> None:
    rng = np.random.default_rng(1)
    rows = [
        dataclasses.replace(
            row, token_s=float(rng.lognormal(-4, 0.3)), first_token_s=float(first)
        )
        for row, first in zip(make_rows(), rng.lognormal(-1, 0.5, 72), strict=True)
    ]
    fit = fit_loops(rows)
    again = [dataclasses.replace(x, name=f"{x.name}-again") for x in rows]
    np.testing.assert_allclose(fit_loops(rows + again).mode, fit.mode, atol=1e-3)
    changed = [dataclasses.replace(x, first_token_s=1.0) for x in rows]
    assert np.abs(fit_loops(changed).mode - fit.mode).max() > 0.1
    mixture = dataclasses.replace(make_server("gpt-oss-20b"), first_token_s=0.1)
    with_dense, with_changed = (fit_loops([*x, mixture]) for x in (rows, changed))
    np.testing.assert_allclose(with_dense.mode, with_changed.mode, atol=1e-6)


def test_a_fit_needs_a_measured_row() -> None:
    with pytest.raises(ValueError, match="at least one with a time per token"):
        calibrate_loops([make_server(token_s=None)])
