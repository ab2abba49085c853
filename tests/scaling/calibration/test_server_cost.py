"""The cost of a server's step, against a loop over its sequences."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.simulation import Cost, Work, make_work
from scaling import shapes
from scaling.calibration import (
    PRIOR,
    ServerCoefficients,
    ServerCost,
    draw_coefficients,
    make_server_cost,
)
from scaling.costs import find_device

H100 = find_device("h100")


class Row(NamedTuple):
    """The tokens that a sequence feeds in a step, and those before them."""

    new: int
    past: int
    samples: bool

    @property
    def decodes(self) -> bool:
        return self.new == 1 and self.samples


def work_of(rows: list[Row]) -> Work:
    prompts = [x for x in rows if not x.decodes]
    return make_work(
        num_decodes=sum(x.decodes for x in rows),
        num_prompts=len(prompts),
        num_prompt_rows=sum(x.new for x in prompts),
        decode_context=sum(x.past + 1 for x in rows if x.decodes),
        prompt_context=sum(x.past + x.new for x in prompts),
        prompt_squares=float(sum((x.past + x.new) ** 2 - x.past**2 for x in prompts)),
        num_drawn=sum(x.samples for x in rows),
    )


class Sizes(NamedTuple):
    """Sizes of a model, typed from its config.json."""

    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    mlp: int
    vocab: int
    experts: int = 1
    top_k: int = 1


SIZES = {
    "llama-2-7b": Sizes(4096, 32, 32, 32, 11008, 32000),
    "codellama-34b": Sizes(8192, 48, 64, 8, 22016, 32000),
    "mixtral-8x7b": Sizes(4096, 32, 32, 8, 14336, 32000, experts=8, top_k=2),
}
PEAK = 989.4e12
BANDWIDTH = 3350e9
LINK = 450e9
HEAD_DIM = 128


def loop_seconds(s: Sizes, devices: int, rows: list[Row], f: Any) -> float:
    """The time of a step by loops over its sequences and tokens."""
    attention = HEAD_DIM * s.hidden * (2 * s.q_heads + 2 * s.kv_heads)
    expert = 3 * s.hidden * s.mlp
    router = s.hidden * s.experts if s.experts > 1 else 0
    flops = link = prompt_s = decode_pairs_s = decode_kv_s = 0.0
    missed = 1.0
    num_samples = 0
    for row in rows:
        pairs = 0
        for token in range(row.new):
            missed *= 1 - s.top_k / s.experts
            flops += 2 * s.layers * (attention + router + s.top_k * expert)
            pairs += row.past + token + 1
            numbers = (2 * s.layers + 1) * s.hidden
            link += 2 * (devices - 1) / devices * 2 * numbers
        if row.samples:
            num_samples += 1
            flops += 2 * s.hidden * s.vocab
            link += (devices - 1) / devices * 4 * s.vocab
        pairs_s = 4 * s.layers * s.q_heads * HEAD_DIM * pairs / PEAK / f.attention_share
        # K and V of all tokens are read, and those of new tokens written.
        numbers = s.layers * 2 * s.kv_heads * HEAD_DIM * (row.past + 2 * row.new)
        kv_s = 2 * numbers / BANDWIDTH
        if row.decodes:
            decode_pairs_s += pairs_s
            decode_kv_s += kv_s / f.weight_share / f.decode_kv_ratio
        else:
            prompt_s += pairs_s + kv_s / f.prompt_kv_share
    weights = s.layers * (attention + router) + s.hidden * s.vocab
    weights += s.layers * s.experts * expert * (1 - missed if s.experts > 1 else 1)
    compute_s = flops / PEAK / f.product_share / devices
    read_s = 2 * weights / BANDWIDTH / f.weight_share / devices
    seconds = (compute_s**f.overlap + read_s**f.overlap) ** (1 / f.overlap)
    seconds += (prompt_s + max(decode_pairs_s, decode_kv_s)) / devices
    seconds += link / LINK / f.link_share
    if devices > 1:
        reduce_s = f.reduce_s * (devices - 1) ** f.reduce_power
        seconds += (2 * s.layers + 1) * reduce_s
    seconds += s.layers * f.layer_s + f.step_s + num_samples * f.sequence_s
    return seconds + (s.layers * f.mixture_layer_s if s.experts > 1 else 0.0)


STEPS = {
    "decodes": [Row(1, 700 + x, True) for x in range(20)],
    "a long prompt": [Row(1024, 512, False)],
    "mixed": [Row(1, 90, True), Row(300, 0, True), Row(64, 1000, False)],
}


def make_cost(name: str, devices: int, coefficients: ServerCoefficients) -> ServerCost:
    model = shapes.describe(name)
    return make_server_cost(model, H100, coefficients, tensor_parallel=devices)


call = jax.jit(lambda cost, work: cost(work))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("name", "devices"),
    [("llama-2-7b", 1), ("codellama-34b", 4), ("mixtral-8x7b", 2)],
)
def test_a_step_costs_the_sum_over_its_sequences(
    name: str, devices: int, step: str
) -> None:
    deviations = np.random.default_rng(3).normal(size=len(PRIOR))
    coefficients = draw_coefficients(deviations)
    seconds = call(make_cost(name, devices, coefficients), work_of(STEPS[step]))
    exact = {x: float(y) for x, y in coefficients._asdict().items()}
    expected = loop_seconds(SIZES[name], devices, STEPS[step], SimpleNamespace(**exact))
    # The norms' weights, 0.02 % of the rest, are not in the loop.
    assert float(seconds) == pytest.approx(expected, rel=3e-4)


def test_recurrent_layers_read_and_write_states_and_no_context() -> None:
    """OLMo Hybrid: 8 layers of 32 have K and V, 24 have 30 states of 96 x 192."""
    model = shapes.describe("olmo-hybrid-7b")
    assert model.recurrent is not None
    f = draw_coefficients(np.zeros(len(PRIOR)))
    cost = make_cost(model.name, 1, f)
    seconds = [
        float(call(cost, work_of([Row(1, past, True)] * num)))
        for past, num in ((2000, 8), (6000, 8))
    ]
    assert isinstance(model.attention, shapes.HeadAttention)
    kv_bytes = 8 * 2 * 2 * model.attention.num_kv_heads * model.attention.head_dim
    rate = BANDWIDTH * float(f.weight_share * f.decode_kv_ratio)
    grown_s = 8 * 4000 * kv_bytes / rate
    assert seconds[1] - seconds[0] == pytest.approx(grown_s, rel=1e-2)
    stateless = cost._replace(counts=cost.counts._replace(state_bytes=jnp.float32(0)))
    r = model.recurrent
    num_bytes = 24 * (4 * r.state_numbers + 2 * r.conv_numbers)
    states_s = seconds[0] - float(call(stateless, work_of([Row(1, 2000, True)] * 8)))
    assert states_s == pytest.approx(2 * 8 * num_bytes / rate, rel=1e-2)


def test_keys_and_values_are_copied_if_devices_outnumber_their_heads() -> None:
    median = draw_coefficients(np.zeros(len(PRIOR)))
    assert float(make_cost("mixtral-8x7b", 8, median).kv_copies) == 1
    assert float(make_cost("mixtral-8x7b", 16, median).kv_copies) == 2


def test_more_work_takes_longer_and_an_idle_step_no_time() -> None:
    cost = make_cost("mixtral-8x7b", 2, draw_coefficients(np.zeros(len(PRIOR))))
    work = work_of(STEPS["mixed"])
    base = float(call(cost, work))
    for field in ("num_decodes", "decode_context", "prompt_context", "num_drawn"):
        more = work._replace(**{field: getattr(work, field) + 40})
        assert float(call(cost, more)) > base, field
    more = work._replace(prompt_squares=work.prompt_squares + 1e6)
    assert float(call(cost, more)) > base
    assert float(call(cost, work_of([]))) == 0
    assert isinstance(cost, Cost)


def test_every_coefficient_of_a_step_changes_its_time() -> None:
    """Shares shorten it, overheads and latencies lengthen it; delays do not count."""
    # Four devices: with two, any power of p - 1 is 1.
    deviations = np.vstack([np.zeros(len(PRIOR)), np.eye(len(PRIOR))])
    cost = make_cost("mixtral-8x7b", 4, draw_coefficients(deviations))
    axes = jax.tree.map(jnp.ndim, cost)._replace(counts=None)
    axes = jax.tree.map(lambda ndim: 0 if ndim else None, axes)
    traces = []

    def traced(cost: ServerCost, work: Work) -> jax.Array:
        traces.append(work)
        return cost(work)

    mapped = jax.jit(jax.vmap(traced, in_axes=(axes, None)))
    seconds = mapped(cost, work_of(STEPS["mixed"]))
    for i, name in enumerate(PRIOR):
        sign = np.sign(float(seconds[1 + i] - seconds[0]))
        is_faster = name.endswith(("_share", "_ratio")) or name == "overlap"
        is_delay = list(PRIOR).index(name) >= list(PRIOR).index("ingest_s")
        assert sign == (0 if is_delay else -1 if is_faster else 1), name
    # A mapped cost has the times of single costs, and compiles once.
    for i in (0, 4, 9):
        single = make_cost("mixtral-8x7b", 4, draw_coefficients(deviations[i]))
        time_s = float(call(single, work_of(STEPS["mixed"])))
        assert time_s == pytest.approx(float(seconds[i]), rel=1e-6)
    mapped(cost, work_of(STEPS["decodes"]))
    assert len(traces) == 1


def test_windows_and_sizes_are_refused() -> None:
    median = draw_coefficients(np.zeros(len(PRIOR)))
    mistral = shapes.describe("mistral-7b")
    make_server_cost(mistral, H100, median, max_length=4096)
    with pytest.raises(ValueError, match="max_length=8192 must be at most 4096"):
        make_server_cost(mistral, H100, median, max_length=8192)
    with pytest.raises(ValueError, match="tensor_parallel=0 must be at least 1"):
        make_cost("llama-2-7b", 0, median)
    with pytest.raises(ValueError, match="must have 17 columns"):
        draw_coefficients(np.zeros(3))
