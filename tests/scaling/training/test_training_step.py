"""One training step: the gradient is correct with all settings and layouts."""

import dataclasses
import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv.models import Experts, is_selection_bias
from jaxkv.parallel import find_collectives
from scaling.corpora import corpora
from scaling.costs import parse_layout, training_traffic
from scaling.shapes import describe_config
from scaling.training import architectures, gather_tree, objectives, parallel
from scaling.training import step as training_step
from scaling.training.recipes import (
    LearningRateSchedule,
    OptimizerConfig,
    StepConfig,
    TrainConfig,
)
from scaling.training.recurrent import RecurrentConfig
from scaling.training.step import TrainState, init_train_state
from tests.support import mutation
from tests.support.meshes import MODEL
from tests.support.mutation import Bug, replace
from tests.support.shapes import SMALL

DIVISIBLE = dataclasses.replace(MODEL, vocab_size=257, max_positions=16)
TRANSFORMER = dataclasses.replace(SMALL, max_positions=16)
LSTM = RecurrentConfig(vocab_size=257, hidden_size=16, num_layers=1, max_positions=16)
MODELS: dict[str, architectures.Architecture] = {
    "transformer": TRANSFORMER,
    "lstm": LSTM,
    "gru": dataclasses.replace(LSTM, kind="gru"),
}
SGD = OptimizerConfig(kind="sgd", max_grad_norm=math.inf)
TEXT = np.random.default_rng(0).integers(65, 91, 5_000).astype(np.uint16)


def train(
    optimizer: OptimizerConfig, how: StepConfig, rate: float, num_steps: int
) -> tuple[TrainState, float]:
    """Trains some steps on random letters; returns the last loss."""
    seed = jnp.int32(0)
    schedule = LearningRateSchedule.constant(rate)
    state = init_train_state(TRANSFORMER, optimizer, seed)
    call = training_step.compiled_steps(TRANSFORMER, optimizer, 4, 16, how)
    for num in (num_steps - 1, 1):
        state, info = call(state, jnp.asarray(TEXT), schedule, seed, jnp.int32(num))
    return state, float(info.loss)


EXPERTS = Experts(
    num_experts=8,
    top_k=2,
    size=8,
    scoring="sigmoid",
    gate_bias=True,
    bias_rate=0.125,
    num_dense_layers=1,
    balance_weight=0,
)
BIASED = dataclasses.replace(TRANSFORMER, num_layers=2, experts=EXPERTS)


def biases(params: Any) -> Any:
    return params["layers"][1]["mixture"]["router"]["bias"]


def test_biases_move_by_the_signs_of_the_loads() -> None:
    names = ("weight", "bias")
    params: Any = {
        "layers": {0: {"router": dict.fromkeys(names, jnp.zeros(4, jnp.float32))}}
    }
    loads = jnp.asarray([1.0, 0.0, 0.5, 0.5], jnp.float32)
    grads: Any = {"layers": {0: {"router": dict.fromkeys(names, loads)}}}
    new_params = training_step.balance_experts(params, grads, 0.25)
    router = new_params["layers"][0]["router"]
    assert router["bias"].tolist() == [-0.25, 0.25, 0.0, 0.0]
    assert not router["weight"].any()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(StepConfig(), marks=pytest.mark.slow),
        StepConfig(accumulation=2, dtype="bfloat16"),
        pytest.param(
            StepConfig(layout=parse_layout("dp=4", zero=1)), marks=pytest.mark.slow
        ),
    ],
)
def test_experts_are_balanced_without_a_loss(how: StepConfig) -> None:
    """The biases move by the signs of the loads, and only so: no gradient, no decay."""
    optimizer = OptimizerConfig(kind="adamw", weight_decay=1.0)
    seed = jnp.int32(0)
    schedule = LearningRateSchedule.constant(0.0)
    state = init_train_state(BIASED, optimizer, seed)
    all_params = state.params
    state = training_step.divide_train_state(state, BIASED, how.layout)
    call = training_step.compiled_steps(BIASED, optimizer, 4, 16, how)
    bias = np.zeros(8)
    for step in range(3):
        new, info = call(state, jnp.asarray(TEXT), schedule, seed, jnp.int32(1))
        loads = np.asarray(info.loads, np.float64)
        assert loads.shape == (1, 8)
        assert loads.sum() == pytest.approx(2)
        # The loads are those of all windows of the step, by another implementation.
        if how.dtype == "float32":
            windows = corpora.draw_windows(
                *(jnp.asarray(TEXT), seed, jnp.int32(step)),
                **{"batch_size": 4, "seq_len": 16, "aligned": False},
            )
            layers = all_params["layers"][1]["mixture"]["router"]
            layers["bias"] = jnp.asarray(bias, jnp.float32)
            wanted = jax.jit(models.outputs, static_argnames="config")(
                all_params, windows[:, :-1], config=BIASED
            ).loads
            np.testing.assert_allclose(loads, wanted, rtol=1e-6)
        bias += 0.125 * np.sign(loads[0].mean() - loads[0])
        np.testing.assert_array_equal(biases(new.params), bias)
        assert biases(new.params).dtype == jnp.float32
        state = new
    assert len(np.unique(bias)) > 1
    for moment in jax.tree_util.tree_leaves_with_path(state.moments):
        if is_selection_bias(moment[0]):
            assert not np.any(moment[1])


@pytest.mark.slow
def test_biases_balance_an_uneven_router() -> None:
    """Imbalance after 40 steps falls; with the rate 0 it stays."""
    variations = {}
    for rate in (0.0, 0.02):
        experts = dataclasses.replace(EXPERTS, bias_rate=rate)
        model = dataclasses.replace(BIASED, experts=experts)
        seed = jnp.int32(0)
        schedule = LearningRateSchedule.constant(1e-3)
        state = init_train_state(model, SGD, seed)
        call = training_step.compiled_steps(model, SGD, 4, 16)
        for num in (40, 10):
            state, info = call(state, jnp.asarray(TEXT), schedule, seed, jnp.int32(num))
        variations[rate] = float(models.imbalance(info.loads).variation[0])
    assert variations[0.02] < 0.4 * variations[0.0]


@pytest.mark.parametrize("name", ["transformer", "lstm"])
def test_a_new_model_guesses_evenly(name: str) -> None:
    model: Any = dataclasses.replace(MODELS[name], hidden_size=64)
    windows = jax.random.randint(jax.random.key(1), (8, 17), 0, 257, jnp.int32)

    @jax.jit
    def start(key: jax.Array) -> jax.Array:
        params = architectures.init_model_params(model, key)
        return objectives.mean_loss(params, windows, model=model)[1]

    loss = start(jax.random.key(0))
    assert float(loss) == pytest.approx(math.log(257), rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_finite_differences(name: str) -> None:
    model: Any = dataclasses.replace(MODELS[name], vocab_size=19)
    rng = np.random.default_rng(1)
    distance = 1e-4
    with jax.enable_x64(True):
        params = architectures.init_model_params(model, jax.random.key(0))
        # Far from the start, where no gradient is small by chance.
        params = jax.tree.map(
            lambda p: jnp.asarray(np.asarray(p) + 0.3 * rng.normal(size=p.shape)),
            params,
        )
        windows = jnp.asarray(rng.integers(0, 19, (2, 9)), jnp.int32)
        loss = jax.jit(
            lambda p: objectives.token_losses(p, windows, model=model).mean()
        )
        grads = jax.jit(jax.grad(loss))(params)
        leaves, tree = jax.tree.flatten(params)
        for index, (leaf, grad) in enumerate(
            zip(leaves, jax.tree.leaves(grads), strict=True)
        ):
            assert grad.dtype == jnp.float64
            towards = jnp.asarray(rng.normal(size=leaf.shape))
            ends = []
            for sign in (1, -1):
                moved = leaf + sign * distance * towards
                changed = [*leaves[:index], moved, *leaves[index + 1 :]]
                ends.append(float(loss(jax.tree.unflatten(tree, changed))))
            slope = (ends[0] - ends[1]) / (2 * distance)
            actual = float((grad * towards).sum())
            assert slope == pytest.approx(actual, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", ["transformer", "gru"])
def test_no_loss_depends_on_a_later_token(name: str) -> None:
    model = MODELS[name]
    params = architectures.init_model_params(model, jax.random.key(0))
    losses = jax.jit(functools.partial(objectives.token_losses, model=model))
    windows = jnp.asarray(TEXT[: 2 * 17].astype(np.int32).reshape(2, 17))
    before, after = (losses(params, x) for x in (windows, windows.at[:, 9].add(1)))
    # The loss of token 9 is the ninth.
    assert bool((before[:, :8] == after[:, :8]).all())
    assert bool((before[:, 8:] != after[:, 8:]).any(1).all())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "rate"), [("sgd", 0.3), ("adafactor", 0.01), ("lion", 0.003)]
)
def test_each_optimizer_learns_the_letters(kind: Any, rate: float) -> None:
    """The tests of whole runs cover the default and AdamW."""
    _, loss = train(OptimizerConfig(kind=kind), StepConfig(), rate, 60)
    # 26 of 257 tokens occur: log 26 is 3.26; the initial loss is log 257, 5.55.
    assert loss < 3.7


@functools.cache
def plain() -> tuple[TrainState, float]:
    return train(SGD, StepConfig(), 0.3, 3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "error"),
    [
        (StepConfig(accumulation=2), 1e-6),
        pytest.param(StepConfig(remat=True), 1e-6, marks=pytest.mark.slow),
        pytest.param(StepConfig(dtype="bfloat16"), 3e-3, marks=pytest.mark.slow),
        (StepConfig(accumulation=4, remat=True, dtype="bfloat16"), 3e-3),
    ],
)
def test_step_settings_change_only_rounding(how: StepConfig, error: float) -> None:
    (state, loss), (expected, expected_loss) = train(SGD, how, 0.3, 3), plain()
    assert loss == pytest.approx(expected_loss, rel=error)
    for state_leaf, leaf in zip(
        jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
    ):
        assert state_leaf.dtype == leaf.dtype
        np.testing.assert_allclose(state_leaf, leaf, rtol=error, atol=error)
    moved = jax.tree.leaves(state.params)[0] - jax.tree.leaves(expected.params)[0]
    # The 8-bit numbers were really used.
    assert (how.dtype == "float32") or bool(jnp.abs(moved).max() > 1e-7)


@pytest.mark.parametrize(
    ("layout", "zero", "accumulation"),
    [
        pytest.param("dp=2", 1, 2, marks=pytest.mark.slow),
        pytest.param("pp=2,tp=2,dp=2", 1, 2, marks=pytest.mark.thorough),
        pytest.param("tp=2,sp,dp=4", 1, 1, marks=pytest.mark.slow),
        pytest.param("ring=2,ulysses=2,dp=2", 0, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "kind", ["adamw", pytest.param("muon", marks=pytest.mark.slow)]
)
def test_a_mesh_trains_as_one_device(
    layout: str, zero: int, accumulation: int, kind: Any
) -> None:
    """Three steps; the divided state is gathered afterwards, and was divided before."""
    optimizer = OptimizerConfig(kind=kind)
    model = DIVISIBLE
    divided = parse_layout(layout, zero=zero)
    step_outputs = []
    for how in (StepConfig(), StepConfig(layout=divided, accumulation=accumulation)):
        seed = jnp.int32(0)
        schedule = LearningRateSchedule.constant(1e-3)
        state = init_train_state(model, optimizer, seed)
        state = training_step.divide_train_state(state, model, how.layout)
        call = training_step.compiled_steps(model, optimizer, 8, 16, how)
        new, info = call(state, jnp.asarray(TEXT), schedule, seed, jnp.int32(3))
        for before, after in zip(
            jax.tree.leaves(state), jax.tree.leaves(new), strict=True
        ):
            assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
        step_outputs.append((info.loss, gather_tree(model, how.layout, new), new))
    (loss, expected, _), (one, gathered_params, parts) = step_outputs
    assert float(one) == pytest.approx(float(loss), rel=1e-5)
    assert jax.tree.structure(gathered_params) == jax.tree.structure(expected)
    for a, b in zip(
        jax.tree.leaves(gathered_params), jax.tree.leaves(expected), strict=True
    ):
        # AdamW divides by a number that may be almost zero.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)
    if zero:
        held = 0.0
        fair = 0.0
        for path, x in jax.tree.leaves_with_path(parts.moments):
            held += x.addressable_shards[0].data.size
            # All stages have the tables.
            stages = 1 if "layers" in jax.tree_util.keystr(path) else divided.pipeline
            fair += x.size * stages / divided.num_devices
        assert fair <= held < 1.1 * fair


@pytest.mark.thorough
def test_divided_moments_cost_the_bytes_of_the_formula() -> None:
    """With AdamW, exactly; Muon needs whole matrices, so it sends more."""
    model = dataclasses.replace(MODEL, max_positions=16)
    layout = parse_layout("dp=4", zero=1)
    optimizer = OptimizerConfig(kind="adamw")
    seed = jnp.int32(0)
    state = training_step.divide_train_state(
        init_train_state(model, optimizer, seed), model, layout
    )
    call = training_step.compiled_steps(
        model, optimizer, 4, 16, StepConfig(layout=layout)
    )
    operands = (
        state,
        jnp.asarray(TEXT),
        LearningRateSchedule.constant(1e-3),
        seed,
        jnp.int32(1),
    )
    exchanges = find_collectives(str(call.lower(*operands).compile().as_text()))
    formula = training_traffic(
        describe_config(model),
        layout,
        batch=1,
        sequence=16,
        number_bytes=4,
        gradient_bytes=4,
    )
    expected = sum(term.forward + term.backward for term in formula)
    # (The loop over steps has a trip count that is data: its body counts once.)
    assert (
        sum(exchange._replace(trips=1).sent(rank=1) for exchange in exchanges)
        == expected
    )


def test_batches_that_cannot_be_divided_are_refused() -> None:
    how = StepConfig(accumulation=2, layout=parse_layout("dp=2"))
    with pytest.raises(ValueError, match="batch_size=6 must be a multiple of"):
        how.check(6)
    with pytest.raises(ValueError, match="accumulation=0 must be at least 1"):
        StepConfig(accumulation=0)


@pytest.mark.slow
def test_four_rows_are_memorized(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(3).integers(0, 256, (4, 33), np.int32)
    rows[:, 0] = 10, 20, 30, 40
    replace(
        monkeypatch, corpora, "draw_windows", lambda *args, **kwargs: jnp.asarray(rows)
    )
    model = dataclasses.replace(
        TRANSFORMER, hidden_size=64, mlp_size=256, num_layers=2, max_positions=32
    )
    optimizer = OptimizerConfig(kind="adamw")
    seed = jnp.int32(0)
    state = init_train_state(model, optimizer, seed)
    steps = inspect.unwrap(training_step.compiled_steps)(model, optimizer, 4, 32)
    schedule = LearningRateSchedule.constant(3e-3)._replace(warmup=jnp.int32(20))
    run = functools.partial(steps, stream=jnp.asarray(TEXT), seed=seed)
    state, _ = run(state, schedule=schedule, num_steps=jnp.int32(300))
    _, loss = run(state, schedule=schedule, num_steps=jnp.int32(1))
    assert float(loss) < 0.01


def rates(**changes: Any) -> list[float]:
    config = TrainConfig(
        model=TRANSFORMER,
        seq_len=16,
        num_steps=12,
        warmup_steps=3,
        cooldown_steps=4,
        learning_rate=1.0,
    )
    config = dataclasses.replace(config, **changes)
    schedule = LearningRateSchedule.of(config)
    return [float(schedule.at(jnp.int32(step))) for step in range(12)]


def test_schedules_rise_stay_and_fall() -> None:
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    rise = [1 / 3, 2 / 3]
    stay = [1.0] * 6
    close(rates(), [*rise, *stay, 1, 0.75, 0.5, 0.25])
    close(rates(final_share=0.2), [*rise, *stay, 1, 0.8, 0.6, 0.4])
    close(rates(warmup_steps=0, cooldown_steps=0), [1.0] * 12)
    # Half a period over the nine steps after the warm-up, its first at the peak.
    half = [(1 + math.cos(math.pi * i / 9)) / 2 for i in range(9)]
    close(rates(schedule="cosine"), [*rise, 1, *half])
    end = [0.2 + 0.8 * x for x in half]
    close(rates(schedule="cosine", final_share=0.2), [*rise, 1, *end])


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
def test_compiler_options_change_only_rounding(activation: str) -> None:
    # oneDNN takes products from some size on. It may add biases, but not apply GELU,
    # whose input the gradient needs.
    model = dataclasses.replace(
        architectures.transformer(
            64, num_heads=4, num_layers=1, mlp_size=256, vocab_size=257, seq_len=64
        ),
        activation=activation,
        gated=False,
        mlp_bias=True,
    )
    params = init_train_state(model, SGD, jnp.int32(0)).params
    params = jax.tree.map(lambda x: x + jnp.float32(0.1), params)
    windows = jnp.asarray(TEXT[: 16 * 65].reshape(16, 65), jnp.int32)
    gradient = parallel.divided_gradient(model, StepConfig(), objectives.NEXT_TOKEN)
    exact = jax.jit(gradient)(params, windows)
    options = training_step._compiler_options(model)
    compiled = jax.jit(gradient, compiler_options=options).lower(params, windows)
    compiled = compiled.compile()
    assert "GELU" not in (compiled.as_text() or "")
    actual = compiled(params, windows)
    largest = max(float(abs(x).max()) for x in jax.tree.leaves(exact))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("removed", "added"),
    [
        # Every piece with the weight of a whole batch, or only the last piece.
        ("x / np.float32(how.accumulation)", "x"),
        ("jax.tree.map(jnp.add, total, (nats, grads))", "(nats, grads)"),
    ],
)
def test_wrong_weights_of_pieces_are_detected(
    removed: str, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(
        monkeypatch,
        training_step,
        "compiled_steps",
        inspect.unwrap(training_step.compiled_steps),
    )
    check = test_step_settings_change_only_rounding
    arguments = StepConfig(accumulation=2), 1e-6
    bug = Bug(parallel, "_mean", removed, added, check, arguments)
    mutation.assert_noticed(monkeypatch, bug)
