"""The rivals of the transformer: their equations, their gradients, what they cost."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxkv import models
from scaling import architectures
from scaling.recurrent import RecurrentConfig

pytestmark = pytest.mark.usefixtures("fast_compile")

LSTM = RecurrentConfig(vocab_size=19, hidden_size=8, num_layers=2, max_positions=12)
TRANSFORMER = models.ModelConfig(
    vocab_size=19,
    hidden_size=8,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_size=12,
    max_positions=12,
)
CONFIGS: dict[str, architectures.Architecture] = {
    "transformer": TRANSFORMER,
    "lstm": LSTM,
    "plain-gru": dataclasses.replace(
        LSTM, kind="gru", norm="none", residual=False, tie_embeddings=False
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted_exactly(name: str) -> None:
    config = CONFIGS[name]
    held = architectures.param_shapes(config)
    found = architectures.parameters(config)
    assert found.total == sum(x.size for x in jax.tree.leaves(held))
    tables = sum(
        held[part]["weight"].size for part in ("embed", "head") if part in held
    )
    assert found.non_embedding == found.total - tables


@pytest.mark.parametrize("name", CONFIGS)
def test_no_token_is_seen_before_its_time(name: str) -> None:
    config = CONFIGS[name]
    params = architectures.init_params(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 19, jnp.int32)
    forward = jax.jit(architectures.forward, static_argnames="config")
    before = forward(params, tokens, config=config).logits
    changed = tokens.at[:, 7].set((tokens[:, 7] + 1) % 19)
    after = forward(params, changed, config=config).logits
    assert bool((before[:, :7] == after[:, :7]).all())
    assert bool((before[:, 7:] != after[:, 7:]).any(-1).all())
