"""Mixtures of experts: routing, layers, folders, and the engine."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models, scheduling
from jaxkv.models import (
    Experts,
    Routing,
    balance_loss,
    expert_load,
    load_as_gradient,
    load_model,
    param_shapes,
    read_config,
)
from jaxkv.models.huggingface import configs
from scaling.costs import count_parameters
from scaling.shapes import describe_config, describe_huggingface
from tests.support import batches, engines
from tests.support.engines import Ask
from tests.support.folders import GOLDEN

pytestmark = pytest.mark.usefixtures("full_optimization")

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")

EXPERTS = Experts(
    num_experts=5,
    top_k=2,
    size=12,
    shared_size=8,
    shared_gate=True,
    num_dense_layers=1,
)
MODEL = dataclasses.replace(engines.MODEL, experts=EXPERTS)
ONE_LAYER = dataclasses.replace(
    MODEL, num_layers=1, experts=dataclasses.replace(EXPERTS, num_dense_layers=0)
)
TOKENS: Any = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 20), np.int32)

outputs: Any = jax.jit(
    models.outputs, static_argnames="config", compiler_options=engines.FAST_COMPILE
)


def softmax(scores: np.ndarray) -> np.ndarray:
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def test_routing_worked_by_hand() -> None:
    scores = jnp.asarray([[0.0, 2.0, 1.0], [1.0, 1.0, 1.0]], jnp.float32)
    rules = Experts(num_experts=3, top_k=2, size=1)
    routing = models.route(scores, rules)
    assert routing.expert.tolist() == [[1, 2], [0, 1]]  # among equals, the lower number
    np.testing.assert_allclose(routing.share, [[0.7311, 0.2689], [0.5, 0.5]], atol=5e-5)
    plain = models.route(scores, dataclasses.replace(rules, renormalise=False))
    np.testing.assert_allclose(plain.share[0], [0.6652, 0.2447], atol=5e-5)


def routed(
    logits: np.ndarray, rules: Experts, bias: np.ndarray | None = None
) -> tuple[list[list[int]], np.ndarray]:
    """Returns experts and shares, row by row in float64 and by Python's sort."""
    chosen = []
    shares = []
    for row in logits.astype(np.float64):
        scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        if rules.scoring == "sigmoid":
            scores = 1 / (1 + np.exp(-row))
        selection = scores if bias is None else scores + bias
        size = rules.num_experts // rules.num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(rules.num_groups)]
        counted = 1 if bias is None else 2
        worth = [sum(sorted(selection[list(g)])[-counted:]) for g in groups]
        # Python's sort is stable: among equals the lower number is first.
        order = sorted(range(rules.num_groups), key=lambda g: -worth[g])
        allowed = [e for g in sorted(order[: rules.top_groups]) for e in groups[g]]
        best = sorted(allowed, key=lambda e: -selection[e])[: rules.top_k]
        share = scores[best]
        share = share / share.sum() if rules.renormalise else share
        chosen.append(best)
        shares.append(rules.scale * share)
    return chosen, np.array(shares)


# Eighths, so that sums are exact and many are equal.
LOGITS = np.random.default_rng(5).integers(-9, 9, (40, 8)) / 8
BIAS = np.random.default_rng(6).integers(-6, 6, 8) / 8


@pytest.mark.parametrize(
    ("changes", "bias"),
    [
        ({}, None),
        ({"renormalise": False, "scale": 2.5}, None),
        ({"num_groups": 4, "top_groups": 2, "renormalise": False, "scale": 16.0}, None),
        ({"scoring": "sigmoid", "scale": 2.5}, None),
        ({"scoring": "sigmoid", "gate_bias": True}, BIAS),
        (
            {"scoring": "sigmoid", "gate_bias": True, "renormalise": False},
            BIAS,
        ),
        (
            {
                "scoring": "sigmoid",
                "gate_bias": True,
                "num_groups": 4,
                "top_groups": 2,
                "scale": 2.5,
            },
            BIAS - 2,  # with a mask of zeros, other groups would be chosen
        ),
        ({"gate_bias": True, "num_groups": 2, "top_groups": 1}, BIAS),
    ],
)
def test_every_routing_rule_equals_its_twin(changes: Any, bias: Any) -> None:
    rules = Experts(num_experts=8, top_k=3, size=1, **changes)
    bias_array = None if bias is None else jnp.asarray(bias, jnp.float32)
    routing = models.route(jnp.asarray(LOGITS, jnp.float32), rules, bias_array)
    experts, shares = routed(LOGITS, rules, bias)
    assert routing.expert.tolist() == experts
    np.testing.assert_allclose(routing.share, shares, rtol=2e-6)
    np.testing.assert_allclose(routing.probs.sum(axis=1), 1, rtol=1e-6)


def test_ties_go_to_lower_groups_and_experts() -> None:
    rules = Experts(
        num_experts=6,
        top_k=2,
        size=1,
        scoring="sigmoid",
        gate_bias=True,
        num_groups=3,
        top_groups=1,
    )
    logits = jnp.asarray([[0.0] * 6, [0, 0, 0, 1, 1, 0], [-200.0] * 6], jnp.float32)
    bias = jnp.asarray([0.0, 0.0, 0.5, 0.25, 0.25, 0.5], jnp.float32)
    routing = models.route(logits, rules, bias)
    # Sums of the two largest: 1, 1.75, 1.75; then 1, 1.98, 1.98; then 0, 0.75, 0.75.
    assert routing.expert.tolist() == [[2, 3], [2, 3], [2, 3]]
    np.testing.assert_allclose(routing.share[0], [0.5, 0.5])
    assert routing.share[2].tolist() == [0.0, 0.0]  # not NaN, with scores of zero


def test_selection_bias_has_the_load_as_gradient() -> None:
    rules = Experts(
        num_experts=8, top_k=3, size=1, scoring="sigmoid", gate_bias=True, bias_rate=0.1
    )

    def loss(bias: Any) -> Any:
        routing = models.route(jnp.asarray(LOGITS, jnp.float32), rules, bias)
        loads = expert_load(routing)
        return load_as_gradient(routing, loads) + routing.share.std(), loads

    bias = jnp.asarray(BIAS, jnp.float32)
    (value, loads), grad = jax.value_and_grad(loss, has_aux=True)(bias)
    np.testing.assert_array_equal(grad, loads)
    assert (
        value == models.route(jnp.asarray(LOGITS, jnp.float32), rules, bias).share.std()
    )
    assert np.unique(loads).size > 3


@pytest.mark.parametrize("crowded", [False, True])
def test_mix_equals_reference(crowded: bool) -> None:
    """All rows may choose the same two of six experts: none is dropped or padded."""
    rng = np.random.default_rng(1)
    sizes_seen = []
    x = rng.normal(size=(24, 4)).astype(np.float32)
    scores = rng.normal(size=(24, 6)) + (np.array([9, 0, 0, 8, 0, 0]) * crowded)
    w = rng.normal(size=(6, 4, 3)).astype(np.float32)
    live = rng.random(24) < 0.7
    x[~live] = np.nan  # rows that are not live may have any content
    rules = Experts(num_experts=6, top_k=2, size=1)
    routing = models.route(jnp.asarray(scores, jnp.float32), rules)

    def answer(rows: Any, sizes: Any) -> Any:
        sizes_seen.append(np.asarray(sizes))
        expert = np.repeat(np.arange(6), sizes)
        assert np.isfinite(rows[: len(expert)]).all()
        out = np.zeros((len(rows), 3), np.float32)
        for row, number in enumerate(expert):
            out[row] = np.asarray(rows)[row] @ w[number]
        return jnp.asarray(out)

    mixture = models.mix(jnp.asarray(x), routing, answer, live=jnp.asarray(live))
    p = softmax(scores)
    for row in np.flatnonzero(live):
        first, second = np.argsort(-p[row])[:2]
        both = [p[row, i] * (x[row] @ w[i]) for i in (first, second)]
        wanted = sum(both) / (p[row, first] + p[row, second])
        np.testing.assert_allclose(mixture[row], wanted, rtol=1e-4, atol=1e-5)
    assert sizes_seen[0].sum() == 2 * live.sum()
    if crowded:
        assert sizes_seen[0].tolist() == [live.sum(), 0, 0, live.sum(), 0, 0]


def test_balance_and_imbalance_worked_by_hand() -> None:
    probs = jnp.asarray([[0.5, 0.3, 0.2, 0.0], [0.4, 0.1, 0.3, 0.2]], jnp.float32)
    routing = Routing(probs, jnp.asarray([[0, 1], [0, 2]]), probs[:, :2])
    np.testing.assert_allclose(expert_load(routing), [1.0, 0.5, 0.5, 0.0])
    # 4 (1 * 0.45 + 0.5 * 0.2 + 0.5 * 0.25)
    assert float(balance_loss(routing)) == pytest.approx(2.7)
    even = jnp.full((4,), 0.5, jnp.float32)
    load_imbalance = models.imbalance(jnp.stack([even, expert_load(routing)]))
    np.testing.assert_allclose(load_imbalance.busiest, [1.0, 2.0])
    np.testing.assert_allclose(load_imbalance.variation, [0.0, 0.5**0.5], rtol=1e-6)
    np.testing.assert_allclose(load_imbalance.idle, [0.0, 0.25])


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_balance_loss_equals_transformers(name: str) -> None:
    config, params, *_ = load_model(GOLDEN / name)
    assert config.experts is not None
    expected = np.load(GOLDEN / name / "expected.npz")
    model_outputs = outputs(params, expected["ids"], config=config)
    wanted = config.experts.balance_weight * expected["balance"].mean()
    np.testing.assert_allclose(model_outputs.auxiliary, wanted, rtol=1e-5)
    assert model_outputs.loads.shape == (
        len(expected["balance"]),
        config.experts.num_experts,
    )
    np.testing.assert_allclose(
        model_outputs.loads.sum(axis=1), config.experts.top_k, rtol=1e-6
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_parameter_count_equals_the_folder(name: str) -> None:
    config = read_config(GOLDEN / name)
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    model = describe_config(config)
    counts = count_parameters(model)
    assert counts == count_parameters(describe_huggingface(raw))
    held = jax.tree.leaves(param_shapes(config))
    assert counts.total == sum(x.size for x in held)
    assert counts.active < counts.total


@pytest.mark.thorough
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_equal_experts_are_a_dense_model(activation: Any) -> None:
    gated = activation == "silu"
    dense = dataclasses.replace(MODEL, experts=None, gated=gated, activation=activation)
    experts = Experts(num_experts=4, top_k=3, size=dense.mlp_size)
    mixed = dataclasses.replace(dense, experts=experts)
    plain = engines.params(dense)
    params = dict(plain) | {"layers": {}}
    for number, layer in plain["layers"].items():
        up, down = (layer[name]["weight"] for name in ("up", "down"))
        mixture = {
            "up": {"weight": jnp.stack([up.reshape(-1, up.shape[-1]).T] * 4)},
            "down": {"weight": jnp.stack([down.T] * 4)},
            "router": engines.params(mixed)["layers"][number]["mixture"]["router"],
        }
        other_weights = {k: v for k, v in layer.items() if k not in ("up", "down")}
        params["layers"][number] = other_weights | {"mixture": mixture}
    mixed_outputs = outputs(params, TOKENS, config=mixed)
    assert np.unique(mixed_outputs.loads).size > 3  # the router does choose
    wanted = outputs(plain, TOKENS, config=dense)
    np.testing.assert_allclose(mixed_outputs.logits, wanted.logits, rtol=0, atol=2e-5)
    assert wanted.auxiliary == 0
    assert wanted.loads is None


@pytest.mark.thorough
def test_gradients_equal_finite_differences() -> None:
    """The loss with its load-balancing term, over all parameters, in float64."""
    with jax.enable_x64(True):
        config = dataclasses.replace(
            ONE_LAYER,
            experts=dataclasses.replace(
                EXPERTS, num_dense_layers=0, balance_weight=0.3
            ),
        )
        params = engines.params(config, "float64")
        rng = np.random.default_rng(3)
        towards = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)

        compiled: Any = functools.partial(
            jax.jit, compiler_options=engines.FAST_COMPILE
        )

        def loss(step: Any) -> Any:
            moved = jax.tree.map(lambda x, t: x + step * t, params, towards)
            out = models.outputs(moved, jnp.asarray(TOKENS), config=config)
            return jnp.mean(jax.nn.logsumexp(out.logits, axis=2)) + out.auxiliary, out

        grad, at = compiled(jax.grad(loss, has_aux=True))(jnp.float64(0))
        at_step = compiled(loss)
        (above, up), (below, down) = (at_step(jnp.float64(x)) for x in (1e-6, -1e-6))
        # No choice is near a tie.
        assert (up.loads == at.loads).all()
        assert (down.loads == at.loads).all()
        assert abs(at.auxiliary) > 0.1
        assert float(above - below) / 2e-6 == pytest.approx(float(grad), rel=1e-6)


def serve(asks: Sequence[Ask], name: str, as_served: bool) -> engines.Run:
    return engines.serve(
        asks,
        batches.config_of(batches.SETTINGS[name]),
        scheduling.fcfs(chunk_size=8, hold_new=False),
        model=ONE_LAYER,
        as_served=as_served,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "setting", "as_served"),
    [
        (range(1), "8 slots", False),
        pytest.param(range(1, 30), "large pool", True, marks=pytest.mark.slow),
    ],
)
def test_engine_is_batch_invariant_with_experts(
    seeds: range, setting: str, as_served: bool
) -> None:
    """Compares all requests at once, with too few pages, with single requests."""
    config = batches.config_of(batches.SETTINGS["8 slots"])
    num_preempted = 0
    for seed in seeds:
        asks = batches.workload(seed)
        crowd = serve(asks, "8 slots", as_served)
        num_preempted += int(crowd.info.num_preempted.sum())
        expected = engines.plain(asks, config, model=ONE_LAYER)
        got = {
            name: (outcome.tokens, outcome.reason)
            for name, outcome in crowd.outcomes.items()
        }
        assert got == expected
        for ask in asks:
            single = serve([ask], setting, as_served).outcomes[ask.request_id]
            batches.assert_same_bits(crowd.outcomes[ask.request_id], single)
    assert num_preempted >= len(seeds)


def test_a_folder_with_fewer_tensors_than_experts(tmp_path: Path) -> None:
    raw = json.loads((GOLDEN / "mixtral" / "config.json").read_text())
    text = json.dumps(raw | {"num_local_experts": 10**9})
    (tmp_path / "config.json").write_text(text)
    name = "model.safetensors"
    (tmp_path / name).write_bytes((GOLDEN / "mixtral" / name).read_bytes())
    with pytest.raises(ValueError, match="1000000000 experts in"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "line"),
    [
        ("llama", {}, "experts=.* has no place"),
        ("mixtral", {"num_dense_layers": 0}, "has no place"),
        ("qwen3_moe", {}, "has no place"),
    ],
)
def test_mixture_that_its_family_cannot_express_is_refused(
    family: Any, changes: Any, line: str
) -> None:
    experts = dataclasses.replace(EXPERTS, **changes)
    config = dataclasses.replace(MODEL, family=family, experts=experts)
    with pytest.raises(ValueError, match=line):
        configs.to_hf(config)


@pytest.mark.thorough
def test_half_precision_weights_are_routed_in_float32() -> None:
    params = engines.params(MODEL, "bfloat16")
    half_outputs = outputs(params, TOKENS, config=MODEL)
    assert half_outputs.logits.dtype == half_outputs.auxiliary.dtype == jnp.float32
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    expected = outputs(wide, TOKENS, config=MODEL)
    assert np.abs(half_outputs.loads - expected.loads).max() <= 0.1
    near = np.isclose(half_outputs.logits, expected.logits, rtol=0, atol=0.3)
    assert near.mean() > 0.9
