"""Alternatives to the transformer: their equations, gradients, and costs."""

import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import Experts, ModelConfig
from scaling.training import architectures, objectives, optimizers
from scaling.training.recipes import OptimizerConfig
from scaling.training.recurrent import NUM_GATES, RecurrentConfig
from scaling.training.step import init_train_state
from tests.support.folders import GOLDEN
from tests.support.shapes import SMALL

LSTM = RecurrentConfig(vocab_size=19, hidden_size=8, num_layers=2, max_positions=12)
TRANSFORMER = dataclasses.replace(
    SMALL, vocab_size=19, hidden_size=8, head_dim=4, mlp_size=12, max_positions=12
)
CONFIGS: dict[str, architectures.Architecture] = {
    "transformer": TRANSFORMER,
    "lstm": LSTM,
    "plain-gru": dataclasses.replace(
        LSTM, kind="gru", norm="none", residual=False, tie_embeddings=False
    ),
}


def param_shapes(config: architectures.Architecture) -> Any:
    key = jax.random.key(0)
    return jax.eval_shape(lambda: architectures.init_model_params(config, key))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted_exactly(name: str) -> None:
    config = CONFIGS[name]
    held = param_shapes(config)
    counts = architectures.count_model_parameters(config)
    assert counts.total == sum(x.size for x in jax.tree.leaves(held))
    tables = sum(
        held[part]["weight"].size for part in ("embed", "head") if part in held
    )
    assert counts.non_embedding == counts.total - tables


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONFIGS)
def test_no_token_is_seen_before_its_time(name: str) -> None:
    config = CONFIGS[name]
    params = architectures.init_model_params(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 19, jnp.int32)
    forward = jax.jit(architectures.forward, static_argnames="config")
    before = forward(params, tokens, config=config).logits
    changed = tokens.at[:, 7].set((tokens[:, 7] + 1) % 19)
    after = forward(params, changed, config=config).logits
    assert bool((before[:, :7] == after[:, :7]).all())
    assert bool((before[:, 7:] != after[:, 7:]).any(-1).all())


def torch_params(kind: str) -> Any:
    """The weights of golden/make_recurrent.py, in its order."""
    vocab = 7
    hidden = 5
    gates = NUM_GATES[kind]
    num_tensors = 0

    def wave(*shape: int) -> jax.Array:
        nonlocal num_tensors
        num_tensors += 1
        places = np.arange(math.prod(shape))
        return jnp.asarray(
            0.5 * np.sin(1.7 * places + num_tensors), jnp.float32
        ).reshape(shape)

    params: dict[str, Any] = {"embed": {"weight": wave(vocab, hidden)}, "layers": []}
    for _ in range(2):
        inputs = wave(gates, hidden, hidden)
        state = wave(gates, hidden, hidden)
        layer = {"inputs": {"weight": inputs, "bias": wave(gates, hidden)}}
        layer["state"] = {"weight": state}
        if kind == "gru":
            layer["state"]["bias"] = wave(hidden)
        params["layers"].append(layer)
    return params | {"head": {"weight": wave(vocab, hidden)}}


@pytest.mark.parametrize("kind", NUM_GATES)
def test_the_equations_and_gradients_are_those_of_pytorch(kind: Any) -> None:
    golden = GOLDEN / "recurrent.json"
    expected = json.loads(golden.read_text())[kind]
    config = RecurrentConfig(
        vocab_size=7,
        hidden_size=5,
        num_layers=2,
        max_positions=6,
        kind=kind,
        norm="none",
        residual=False,
        tie_embeddings=False,
    )
    tokens = jnp.arange(12, dtype=jnp.int32) ** 2 % 7
    params = torch_params(kind)
    tokens = tokens.reshape(2, 6)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    model_outputs = architectures.forward(params, tokens, config=config)
    close(model_outputs.logits, expected["logits"])
    assert float(model_outputs.auxiliary) == 0
    gradient = jax.grad(lambda p: objectives.mean_loss(p, tokens, model=config)[0])
    first = gradient(params)["layers"][0]
    close(first["state"]["weight"], expected["state_weight_gradient"])
    close(first["inputs"]["bias"], expected["bias_gradient"])
    if kind == "gru":
        close(first["state"]["bias"], expected["state_bias_gradient"])


@pytest.mark.parametrize("kind", NUM_GATES)
def test_operations_are_those_that_xla_counts(kind: Any, monkeypatch) -> None:
    # XLA counts the body of a loop once, so there is no loop here.
    unrolled = functools.partial(jax.lax.scan, unroll=True)
    monkeypatch.setattr(jax.lax, "scan", unrolled)
    config = RecurrentConfig(
        vocab_size=256, hidden_size=512, num_layers=1, max_positions=8, kind=kind
    )
    # XLA also counts gates, norms and the softmax (1 % at this width), and leaves out
    # the gradient of the first state (2 % of so short a sequence).
    batch = 16
    sequence = 8
    step = jax.value_and_grad(
        functools.partial(objectives.mean_loss, model=config), has_aux=True
    )
    windows = jax.ShapeDtypeStruct((batch, sequence + 1), jnp.int32)
    program = jax.jit(step).lower(param_shapes(config), windows).compile()
    counted: Any = program.cost_analysis()
    actual = architectures.training_flops(config, batch=batch, sequence=sequence)
    assert actual == pytest.approx(counted["flops"], rel=0.02)


@pytest.mark.parametrize("num_layers", [1, 2, 4, 6])
def test_shapes_of_equal_size_are_found(num_layers: int) -> None:
    changes: dict[str, Any] = {"num_layers": num_layers, "mlp_size": 21}
    bases: list[Any] = [
        dataclasses.replace(TRANSFORMER, **changes),
        dataclasses.replace(TRANSFORMER, **changes, positions="learned", gated=False),
        *(
            dataclasses.replace(LSTM, num_layers=num_layers, kind=kind)
            for kind in NUM_GATES
        ),
    ]
    for base in bases:
        small_model = architectures.resize_model(base, 60_000)
        outside = architectures.count_model_parameters(small_model).non_embedding
        if isinstance(small_model, ModelConfig):
            assert outside == pytest.approx(60_000, rel=0.01)
            assert 0.6 < small_model.mlp_size / small_model.hidden_size / (21 / 8) < 1.6
            assert (
                small_model.hidden_size
                == small_model.num_q_heads * small_model.head_dim
            )
            assert small_model.group_size == base.group_size
        else:
            # The next size on either side is no nearer.
            for h in (small_model.hidden_size - 1, small_model.hidden_size + 1):
                other = dataclasses.replace(small_model, hidden_size=h)
                other = architectures.count_model_parameters(other).non_embedding
                assert abs(other - 60_000) >= abs(outside - 60_000)
        with pytest.raises(ValueError, match="within 5 %"):
            architectures.resize_model(base, 5)


def test_sgd_is_momentum_and_decoupled_decay() -> None:
    settings = OptimizerConfig(
        kind="sgd", momentum=0.9, weight_decay=0.5, max_grad_norm=100.0
    )
    state = init_train_state(LSTM, settings, jnp.int32(0))
    update = optimizers.make_optimizer(settings).update
    grads = jax.tree.map(jnp.ones_like, state.params)
    _, moments = update(grads, state.moments, state.params)
    second: Any = update(grads, moments, state.params)[0]
    weights = state.params["layers"][0]["state"]["weight"]
    np.testing.assert_allclose(
        second["layers"][0]["state"]["weight"], -(1.9 + 0.5 * weights), rtol=1e-6
    )
    np.testing.assert_allclose(second["embed"]["weight"], -1.9, rtol=1e-6)


def test_rivals_are_not_served_and_impossible_shapes_refused() -> None:
    assert architectures.serving_config(TRANSFORMER) is TRANSFORMER
    with pytest.raises(ValueError, match="RecurrentConfig can be trained"):
        architectures.serving_config(LSTM)
    with pytest.raises(ValueError, match="hidden_size=0 must be at least 1"):
        dataclasses.replace(LSTM, hidden_size=0)
    mixture = dataclasses.replace(
        TRANSFORMER, experts=Experts(num_experts=4, top_k=2, size=8)
    )
    with pytest.raises(ValueError, match="not sized"):
        architectures.resize_model(mixture, 60_000)
    with pytest.raises(ValueError, match="sequence=0 must be at least 1"):
        architectures.training_flops(LSTM, sequence=0)
