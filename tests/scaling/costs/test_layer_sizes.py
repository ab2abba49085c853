"""Counts of Gemma 4, whose layers differ, against its arrays and slow loops."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models import ModelConfig, make_model_pages, param_shapes, read_config
from jaxkv.simulation import make_work
from scaling.costs import (
    count_parameters,
    decode_terms,
    decode_work,
    find_device,
    forward_terms,
    kv_bytes_per_token,
    pool_kv_bytes,
    roofline,
    sequence_kv_bytes,
    total_flops,
    training_memory,
)
from scaling.costs.steps import step_cost, step_work
from scaling.shapes import describe_config
from tests.support import engines
from tests.support.folders import GOLDEN

MIXED = read_config(GOLDEN / "gemma4")
PLAIN = dataclasses.replace(MIXED, experts=None, tie_embeddings=True)
NARROW = dataclasses.replace(PLAIN, layer_input_size=0, layer_scale=False)
MODELS = pytest.mark.parametrize("config", [MIXED, PLAIN, NARROW])


def paths(config: ModelConfig) -> dict[str, Any]:
    """Returns the shapes of the arrays by their paths."""
    leaves = jax.tree.leaves_with_path(param_shapes(config))
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def layer_sizes(config: ModelConfig) -> list[tuple[int, int, int | None, bool]]:
    """Returns head size, KV heads, window, and whether K and V are shared, by layer."""
    sizes = []
    for layer in range(config.num_layers):
        kind = config.attention_kinds[config.kind_of(layer)]
        like = config.of_kind(kind)
        sizes.append((like.head_dim, like.num_kv_heads, kind.window, kind.shares_kv))
    return sizes


@MODELS
def test_parameters_are_those_of_the_arrays(config: ModelConfig) -> None:
    counts = count_parameters(describe_config(config))
    assert counts.total == sum(x.size for x in paths(config).values())


@MODELS
def test_products_are_those_of_the_matrices(config: ModelConfig) -> None:
    """Token by token and layer by layer."""
    shape = describe_config(config)
    numbers = config.vocab_size * config.hidden_size  # the head, also if it is tied
    for name, x in paths(config).items():
        if "weight" not in name or len(x.shape) < 2 or "embed" in name:
            continue
        if "head" in name:
            continue
        share = 1
        if x.shape[0] == 6 and "mixture" in name and "router" not in name:
            share = 3  # two of six experts
        numbers += x.size // share
    pairs = 0
    for head_dim, _, window, _ in layer_sizes(config):
        for query in range(9):  # earlier keys and half of the query's own
            twice = min(2 * query + 1, 2 * window if window else 18)
            pairs += config.num_q_heads * head_dim * twice
    causal = forward_terms(shape, sequence=6, attention="causal")
    causal += forward_terms(shape, sequence=3, past=6, attention="causal")
    products = sum(x.flops for x in causal if x.growth == "s")
    assert products == 2 * 9 * numbers
    assert sum(x.flops for x in causal if x.growth == "s^2") == 2 * pairs
    step = decode_terms(shape, context=20)
    scores = sum(
        4 * config.num_q_heads * head_dim * min(20, window or 20)
        for head_dim, _, window, _ in layer_sizes(config)
    )
    assert total_flops(step) == 2 * numbers + scores


def test_shared_keys_are_stored_once_and_read_by_each_layer() -> None:
    shape = describe_config(MIXED)
    pages = jax.tree.leaves(
        jax.eval_shape(lambda: make_model_pages(MIXED, engines.TIGHT))
    )
    num_tokens = engines.TIGHT.num_pages * engines.TIGHT.page_size
    stored = sum(x.size for x in pages) * 4
    sizes = {"num_pages": engines.TIGHT.num_pages, "page_size": 4, "kv_bytes": 4}
    assert pool_kv_bytes(shape, **sizes) == stored
    assert kv_bytes_per_token(shape, kv_bytes=4) == stored / num_tokens
    held = 0
    read = 0
    for head_dim, heads, window, is_shared in layer_sizes(MIXED):
        kv_bytes = 2 * 2 * heads * head_dim * min(50, window or 50)
        read += kv_bytes
        held += 0 if is_shared else kv_bytes
    assert sequence_kv_bytes(shape, 50) == held
    work = decode_work(shape, batch=3, context=50)
    assert work.kv_bytes == 3 * (read + kv_bytes_per_token(shape))
    # Of the two tables of embeddings a step reads the rows of its tokens.
    tables = MIXED.hidden_size + MIXED.num_layers * MIXED.layer_input_size
    more = decode_work(shape, batch=10_001, context=50).weight_bytes
    less = decode_work(shape, batch=10_000, context=50).weight_bytes
    assert more - less == 2 * tables


@MODELS
def test_a_simulated_step_is_the_counted_one(config: ModelConfig) -> None:
    shape = describe_config(config)
    device = find_device("h100")
    cost = step_cost(shape, device)
    one = jnp.ones(1, jnp.int32)
    step = step_work(cost, one, 49 * one, jnp.int32(1))
    counted = decode_work(shape, batch=1, context=50)
    np.testing.assert_allclose(step.flops, counted.flops, rtol=1e-6)
    np.testing.assert_allclose(step.bytes, counted.bytes, rtol=1e-6)
    # By sums of a batch below every window, as `jaxkv simulate` counts.
    time_s = cost(make_work(num_decodes=1, decode_context=5, num_drawn=1))
    counted = roofline(decode_work(shape, batch=1, context=5), device)
    np.testing.assert_allclose(time_s, counted.time_s, rtol=1e-6)


def test_what_layers_of_different_sizes_lack_is_refused() -> None:
    shape = describe_config(MIXED)
    with pytest.raises(ValueError, match="activations of layers with sizes of their"):
        training_memory(shape, sequence=8)
    with pytest.raises(ValueError, match="3 layer_sizes for num_layers=4"):
        dataclasses.replace(shape, layer_sizes=shape.layer_sizes[1:])
    with pytest.raises(ValueError, match=r"experts\.beside_mlp=True needs layer_sizes"):
        dataclasses.replace(shape, layer_sizes=())
