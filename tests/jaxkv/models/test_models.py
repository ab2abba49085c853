"""Every family: paged forward passes in random pieces against one plain pass."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv import models
from jaxkv.models import (
    BY_COLUMNS,
    Transformer,
    add_transposed_weights,
    init_params,
    layers,
    load_model,
    nonlinear,
    param_axes,
    param_shapes,
    read_config,
    stack_layers,
)
from jaxkv.models.config import Experts, ModelConfig
from jaxkv.models.huggingface import weights
from scaling.training import transformer_rows
from tests.support import engines
from tests.support.folders import GOLDEN
from tests.support.marks import one_quick
from tests.support.paged_models import (
    check_paged_equals_contiguous,
    feed_as_served,
    feed_fast_to_compile,
)

pytestmark = pytest.mark.usefixtures("full_optimization")

PAGE_SIZES = {
    "llama": 4,
    "llama3": 16,
    "qwen2": 24,
    "qwen3": 64,
    "mistral": 1,
    "gpt2": 5,
    "opt": 128,
    "qwen2_moe": 4,
}
"""Page size per family."""
BOTH_PROGRAMS = ("llama3", "qwen3", "mistral", "qwen2_moe")
"""Families whose passes with one row per slot are compiled separately as well."""
OTHERS = ("bfloat16", "sharded", "tokenized", "mixtral", "qwen3_moe")


def test_few_rows_are_padded() -> None:
    """Padding of a column does not affect its numbers."""
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(24, 16)), "float32")
    num_columns = (1, 2, 3, 4, 5, 8, 11, 16, 17, 24, 25, 31, 33)
    columns = [jnp.asarray(rng.normal(size=(16, n)), "float32") for n in num_columns]

    @jax.jit
    def multiplied(columns: list[jax.Array]) -> list[jax.Array]:
        return [layers.multiply(weight, x) for x in columns]

    for x, got in zip(columns, multiplied(columns), strict=True):
        assert got.shape == (24, x.shape[1])
        np.testing.assert_allclose(got, weight @ x, rtol=1e-5, atol=1e-5)
    program = multiplied.lower(columns).as_text()
    widths = [int(n) for n in re.findall(r"dot_general.*-> tensor<24x(\d+)x", program)]
    assert widths == [1, 2, 4, 4, 8, 8, 16, 16, 17, 24, 32, 32, 33]


@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_are_multiplied_rows_first(bias: bool) -> None:
    config = dataclasses.replace(engines.MODEL, mlp_bias=bias)
    layer = layers.Layer(config, 0, rngs=nnx.Rngs(0), dtype=jnp.float32)
    rng = np.random.default_rng(0)
    if layer.up.bias is not None:
        layer.up.bias[...] = jnp.asarray(
            rng.normal(size=layer.up.bias.shape), "float32"
        )
    x = rng.normal(size=(config.hidden_size, layers.MIN_CAST_ROWS)).astype(np.float32)
    first = [True, False]
    for num_rows, rows_first in zip(
        (layers.MIN_CAST_ROWS, layers.MIN_CAST_ROWS - 1), first, strict=True
    ):
        inputs = x[:, :num_rows]
        activate = functools.partial(nonlinear.activate, config)
        hidden = functools.partial(BY_COLUMNS.expand, layer.up, then=activate)
        traced = jax.jit(hidden).trace(inputs)
        wanted = activate(layer.up(jnp.asarray(inputs), BY_COLUMNS), -2)
        hidden_states = traced.lower().compile()(inputs)
        assert hidden_states.shape == wanted.shape
        np.testing.assert_allclose(hidden_states, wanted, rtol=2e-5, atol=1e-7)
        shape = re.findall(r"f32\[(\d+),\d+\] = dot_general", str(traced.jaxpr))
        assert (shape == [str(num_rows)]) == rows_first


PAGE_SIZE_MARKS = {
    "qwen2_moe": (),
    **dict.fromkeys(("llama3", "mistral", "gpt2"), pytest.mark.thorough),
}


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        pytest.param(*case, marks=PAGE_SIZE_MARKS.get(case[0], pytest.mark.slow))
        for case in PAGE_SIZES.items()
    ],
)
def test_paged_equals_contiguous(name: str, page_size: int) -> None:
    loaded = load_model(GOLDEN / name)
    check_paged_equals_contiguous(
        loaded.config,
        loaded.params,
        feed=feed_fast_to_compile,
        page_size=page_size,
        seed=page_size,
        decode_share=0.4 if name in BOTH_PROGRAMS else 0.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
@pytest.mark.parametrize("page_size", sorted({*PAGE_SIZES.values()}))
@pytest.mark.parametrize("name", [*PAGE_SIZES, *OTHERS])
def test_paged_equals_contiguous_everywhere(
    name: str, page_size: int, numerics: str
) -> None:
    loaded = load_model(GOLDEN / name)
    for seed in range(3):
        check_paged_equals_contiguous(
            loaded.config,
            loaded.params,
            feed=feed_as_served,
            page_size=page_size,
            numerics=numerics,
            seed=seed,
            decode_share=0.4,
        )


TINY = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    num_layers=1,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_size=8,
    max_positions=16,
)


EXPERTS = Experts(num_experts=3, top_k=2, size=8, shared_size=8)


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
@pytest.mark.parametrize("experts", [None, EXPERTS], ids=["dense", "mixture"])
def test_shapes_and_axes_match_the_parameters(experts: Any, stacked: bool) -> None:
    config = dataclasses.replace(TINY, num_layers=3, experts=experts)
    assert hash(config) == hash(ModelConfig(**vars(config)))
    params = init_params(config, jax.random.key(0))
    if stacked:
        params = stack_layers(config, params)
    shapes = param_shapes(config, stacked=stacked)
    assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(
        lambda x: x.shape, shapes
    )
    axes = param_axes(config, stacked=stacked)
    flat = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), names in zip(leaves, flat, strict=True):
        assert len(names) == leaf.ndim
        assert (names[0] == "layers") == (stacked and path[0].key == "layers")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "fields",
    [
        dict(num_layers=3),
        dict(vocab_size=150, hidden_size=96, positions="learned"),
        dict(experts=EXPERTS),
    ],
)
def test_parameters_equal_single_draws(fields: dict, dtype: str) -> None:
    config = ModelConfig(**vars(TINY) | fields)
    key = jax.random.key(5)
    alone = Transformer(config, rngs=nnx.Rngs(key), dtype=jnp.dtype(dtype))
    expected = nnx.to_pure_dict(nnx.state(alone, nnx.Param))
    for params in (
        init_params(config, key, dtype=dtype),
        jax.jit(lambda key: init_params(config, key, dtype=dtype))(key),
    ):
        jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_half_precision_weights_give_float32_logits() -> None:
    params = engines.params(TINY, "bfloat16")
    tokens = np.arange(8, dtype=np.int32)[None]
    logits = engines.full_logits(params, tokens, config=TINY)
    assert logits.dtype == jnp.float32
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    expected = engines.full_logits(wide, tokens, config=TINY)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=0.1)


@pytest.mark.thorough
def test_transposed_weights_give_equal_results() -> None:
    """2 to 4 rows use the transposed weights only; also for stacked layers."""
    config = engines.MODEL
    params = engines.params()
    twice = add_transposed_weights(params)
    again = weights.checked_params(config, twice)
    assert len(again) == len(jax.tree.leaves(params)) < len(jax.tree.leaves(twice))
    stacked = stack_layers(config, params)
    jax.tree.map(
        np.testing.assert_array_equal,
        add_transposed_weights(stacked),
        stack_layers(config, twice),
    )
    layer, other = (models.merge(config, x).layers[1] for x in (params, twice))
    rng = np.random.default_rng(0)
    for number in (1, 2, 4, 5):
        for name in ("qkv", "out", "up", "down"):
            once = getattr(layer, name)
            again = getattr(other, name)
            x = jnp.asarray(rng.normal(size=(once.num_inputs, number)), "float32")
            columns = BY_COLUMNS
            products = again(x, columns)
            wanted = once(x, columns)
            np.testing.assert_allclose(products, wanted, rtol=1e-5, atol=1e-6)
            again.weight[...] = jnp.zeros_like(again.weight[...])
            by_second = bool(np.any(again(x, columns)))
            assert by_second == (1 < number < 5)
            again.weight[...] = once.weight[...]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama3", pytest.param("qwen2_moe", marks=pytest.mark.slow)]
)
def test_scanned_layers_equal_unrolled_layers(name: str) -> None:
    """The engine's tokens and log-probabilities are equal bit for bit."""
    ask = jaxkv.Sampling(temperature=0.9, top_k=20, max_tokens=12, seed=3, logprobs=0)
    answers = []
    for scan in (False, True):
        engine = jaxkv.Engine.load(
            GOLDEN / name, scan_layers=scan, num_pages=32, max_slots=3, max_length=64
        )
        answers.append(engine.generate([[5, 9, 2], [7] * 20, [1, 3]], ask))
    for unrolled, scanned in zip(*answers, strict=True):
        np.testing.assert_array_equal(scanned.tokens, unrolled.tokens)
        np.testing.assert_array_equal(scanned.logprobs, unrolled.logprobs)


# Longer than the model's positions


def golden(name: str) -> ModelConfig:
    return read_config(GOLDEN / name)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_exceeded_learned_positions_are_refused(name: str) -> None:
    config = golden(name)
    assert config.max_positions == 96
    line = "=97 must be at most 96, the model's learned positions"
    shapes = param_shapes(config)
    longest = jax.ShapeDtypeStruct((1, 96), jnp.int32)
    logits = functools.partial(models.logits, config=config)
    assert jax.eval_shape(logits, shapes, longest).shape == (1, 96, 128)
    too_long = jax.ShapeDtypeStruct((1, 97), jnp.int32)
    for forward in (
        logits,
        functools.partial(transformer_rows.run_transformer, config=config),
    ):
        with pytest.raises(ValueError, match=f"seq{line}"):
            jax.eval_shape(forward, shapes, too_long)
    with pytest.raises(ValueError, match=f"max_length{line}"):
        jaxkv.Engine.load(GOLDEN / name, num_pages=8, max_length=97)
    assert jaxkv.Engine.load(GOLDEN / name, num_pages=8, max_length=96)


@pytest.mark.parametrize("name", one_quick(["opt", "gpt2"]))
def test_rows_beyond_learned_positions_are_nan(name: str) -> None:
    config, params, _, _ = load_model(GOLDEN / name)
    model = Transformer(config, rngs=nnx.Rngs(0))
    nnx.update(model, nnx.State(params))
    positions = jnp.array([0, 95, 96, 1000], jnp.int32)

    def attend(layer: Any, qkv: Any, angles: Any, carry: Any) -> tuple[Any, Any]:
        return qkv[:, :-2], carry

    hidden = model.hidden(jnp.zeros_like(positions), positions, attend, ()).last
    is_nan = np.isnan(np.asarray(hidden))
    np.testing.assert_array_equal(is_nan.all(0), [False, False, True, True])
    np.testing.assert_array_equal(is_nan.any(0), [False, False, True, True])


def test_exceeded_rotary_positions_warn_once() -> None:
    config = golden("llama")
    shapes = param_shapes(config)
    tokens = jax.ShapeDtypeStruct((1, 129), jnp.int32)
    line = "=129 is past 128, the positions that the model supports; the quality"
    with pytest.warns(UserWarning, match=f"^max_length{line}") as said:
        jaxkv.Engine.load(GOLDEN / "llama", num_pages=8, max_length=129)
    assert len(said) == 1
    for forward in (models.logits, transformer_rows.run_transformer):
        with pytest.warns(UserWarning, match=f"^seq{line}") as said:
            jax.eval_shape(functools.partial(forward, config=config), shapes, tokens)
        assert len(said) == 1
