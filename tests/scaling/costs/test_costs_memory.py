"""Training memory: published numbers, and the residuals of `jax.vjp`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxkv import models
from jaxkv.models import ModelConfig, layers, param_shapes
from scaling import shapes
from scaling.costs import (
    check_layout,
    layer_bytes,
    list_residuals,
    parse_layout,
    stored_tensors,
    total_residual_bytes,
)
from scaling.costs.memory import MIXED_WIDE, SINGLE, device_params, training_memory
from scaling.costs.parallelism import Layout
from tests.support.refusals import refused
from tests.support.shapes import BIASED, GROUPED

LLAMA = shapes.describe("llama-2-7b")
GPT = shapes.describe("gpt3-175b")


def test_sixteen_bytes_per_parameter() -> None:
    assert training_memory(LLAMA, sequence=1).model_state == 16 * 6_738_415_616
    wide = training_memory(LLAMA, sequence=1, bytes_per_param=MIXED_WIDE)
    assert wide.model_state == 18 * 6_738_415_616
    single = training_memory(LLAMA, sequence=1, bytes_per_param=SINGLE)
    assert single.model_state == 16 * 6_738_415_616


@pytest.mark.parametrize(
    ("zero", "gigabytes"), [(0, 107.815), (1, 28.217), (2, 14.951), (3, 1.685)]
)
def test_zero_divides_the_model_state(zero: int, gigabytes: float) -> None:
    layout = Layout(data=64, zero=zero)
    state_bytes = training_memory(LLAMA, sequence=1, layout=layout).model_state
    assert state_bytes / 1e9 == pytest.approx(gigabytes, abs=5e-4)


DIVIDED = Layout(tensor=8, sequence=True)


# Korthikanti et al. 2022, section 5: s b h (34 + 5 a s / h), and 70.2 % less if the
# attention weights are recomputed.
@pytest.mark.parametrize(
    ("checkpointing", "layout", "num_bytes"),
    [
        ("none", Layout(), 34 * 2048 * 12288 + 5 * 96 * 2048 * 2048),
        ("none", Layout(), 2_868_903_936),
        ("none", Layout(tensor=8), 578_813_952),
        ("none", DIVIDED, 358_612_992),
        ("selective", DIVIDED, 106_954_752),
        ("full", DIVIDED, 50_331_648),
    ],
)
def test_a_gpt_layer_with_dropout(
    checkpointing: Any, layout: Layout, num_bytes: int
) -> None:
    how: dict[str, Any] = {"checkpointing": checkpointing, "layout": layout}
    memory = training_memory(GPT, sequence=2048, flash=False, dropout=True, **how)
    assert memory.activations / 96 == num_bytes


def test_a_llama_layer_in_tiles() -> None:
    tensors = stored_tensors(LLAMA, sequence=4096)
    [dense] = layer_bytes(tensors, LLAMA, [0])
    assert dense == 131_584 + 128
    # With stored attention weights: two more bytes per head and pair, no log-sum-exp.
    tensors = stored_tensors(LLAMA, sequence=4096, flash=False)
    [dense] = layer_bytes(tensors, LLAMA, [0])
    assert dense == 131_584 + 2 * 32 * 4096


@pytest.mark.parametrize("sequence", [2048, 4096])
def test_checkpoints_at_layer_boundaries(sequence: int) -> None:
    memory = training_memory(LLAMA, sequence=sequence, checkpointing="boundary")
    assert memory.activations == sequence / 4096 * 2**30
    assert memory.recomputed == sequence * (131_584 + 128)
    assert memory.logits == memory.logits_gradient == 4 * sequence * 32_000
    full = training_memory(LLAMA, sequence=sequence, checkpointing="full")
    assert full == memory._replace(recomputed=0.0)


def test_a_pipelines_first_stage_keeps_most_batches() -> None:
    layout = Layout(pipeline=4)
    memory = training_memory(LLAMA, sequence=128, layout=layout)
    # Four batches of a quarter of the layers, as many as one device would keep.
    assert memory.activations == training_memory(LLAMA, sequence=128).activations
    few = training_memory(LLAMA, sequence=128, layout=layout, micro_batches=2)
    assert few.activations == memory.activations / 2


def test_parameters_of_a_device_add_up() -> None:
    mixtral = shapes.describe("mixtral-8x7b")
    layout = Layout(pipeline=4, expert=4, data=4)
    stages = [device_params(mixtral, layout, stage=stage) for stage in range(4)]
    experts = 32 * 8 * 3 * 4096 * 14336
    assert sum(stage.experts for stage in stages) * 4 == experts
    # Every stage has both tables, tokens and head, and the last norm.
    tables = (2 * 32_000 + 1) * 4096
    layer_params = 46_702_792_704 - experts - tables
    assert sum(stage.shared for stage in stages) == layer_params + 4 * tables
    # Heads, FFN and vocabulary are divided by eight, the norms are not.
    shared = device_params(LLAMA, Layout(tensor=8)).shared
    norms = 65 * 4096
    assert shared == (6_738_415_616 - norms) // 8 + norms
    # A tied table once on each, with positions and the last norm of 2 h.
    tied = [device_params(GPT, Layout(pipeline=2), stage=x).shared for x in (0, 1)]
    assert sum(tied) == 174_604_259_328 + (50257 + 2048 + 2) * 12288
    # Eight KV heads over sixteen devices: each has a whole one.
    llama3 = shapes.describe("llama-3.1-8b")
    kv = 32 * 2 * 4096 * 8 * 128
    fewer = (
        device_params(llama3, Layout(tensor=8)).shared
        - device_params(llama3, Layout(tensor=16)).shared
    )
    layer_params = 8_030_261_248 - norms - kv
    assert fewer == layer_params // 8 - layer_params // 16


CONFIG = dataclasses.replace(GROUPED, num_layers=2)
SEQ = 130
"""More than a tile: for shorter sequences attention weights are stored, too."""


def traced_bytes(config: ModelConfig, batch: int, seq: int, dtype: Any) -> int:
    """Returns the traced bytes of all residuals of the vjp, parameters included."""
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)

    def pull(params: Any, tokens: Any) -> Any:
        return jax.vjp(lambda p: models.logits(p, tokens, config=config), params)[1]

    held = jax.eval_shape(pull, param_shapes(config, dtype=dtype), tokens)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({}, "bfloat16"),
        ({}, "float32"),
        ({"qk_norm": True, "head_dim": 16, "num_layers": 1}, "bfloat16"),
        ({"activation": "gelu_tanh", "num_kv_heads": 6, **BIASED}, "bfloat16"),
        ({"activation": "relu", "num_kv_heads": 6, **BIASED}, "float32"),
        ({"activation": "gelu"}, "bfloat16"),
    ],
    ids=["llama", "llama-float32", "qwen3", "gpt2", "opt", "gelu"],
)
def test_residuals_equal_those_of_vjp(change: dict[str, Any], dtype: str) -> None:
    config = dataclasses.replace(CONFIG, **change)
    # The difference of two batches: both have the weights, and reshaped copies.
    more = traced_bytes(config, 3, SEQ, dtype)
    less = traced_bytes(config, 1, SEQ, dtype)
    number_bytes = jnp.dtype(dtype).itemsize
    listed = list_residuals(config, number_bytes=number_bytes)
    assert more - less == total_residual_bytes(listed, 2 * SEQ)


def test_residuals_of_checkpointed_layers_equal_those_of_vjp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = layers.Layer.__call__

    def again(self: Any, index: int, kind: Any, x: Any, *more: Any) -> Any:
        run = lambda x: plain(self, index, kind, x, *more)[0]  # noqa: E731
        _, _, carry, *_ = more
        return jax.checkpoint(run)(x), carry, None

    def boundary(config: ModelConfig) -> int:
        return traced_bytes(config, 3, 10, "bfloat16") - traced_bytes(
            config, 1, 10, "bfloat16"
        )

    monkeypatch.setattr(layers.Layer, "__call__", again)
    four, two = (dataclasses.replace(CONFIG, num_layers=x) for x in (4, 2))
    # Two more layers keep the 2 b s h of the formula each.
    assert boundary(four) - boundary(two) == 2 * (2 * 20 * CONFIG.hidden_size)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tp=3", "tensor=3 must divide the 32 query heads"),
        ("pp=5", "pipeline=5 must divide the 32 layers"),
        ("ulysses=64", "ulysses=64 must divide the 32 query heads"),
        ("ring=3", "ring=3 must divide the 4096 tokens"),
        ("ep=2", "expert=2 needs a mixture"),
        ("tp=0", "'tp=0' in 'tp=0' needs a degree"),
        ("tp=two", "needs a degree of at least 1"),
        ("tp=2,tensor=2", "tensor is given twice"),
        ("xp=2", "unknown parallelism 'xp'"),
        ("ep=3,dp=2", "expert=3 must divide"),
    ],
)
def test_layouts_that_cannot_be(text: str, line: str) -> None:
    with refused(line):
        check_layout(LLAMA, parse_layout(text), sequence=4096)


def test_layouts_are_read() -> None:
    layout = parse_layout("tp=8,sp,pp=2, dp=4", zero=1)
    assert layout == Layout(tensor=8, sequence=True, pipeline=2, data=4, zero=1)
    assert layout.num_devices == 64
    assert parse_layout("ep=8").num_devices == 8
    assert parse_layout("") == Layout()
    assert 6 == parse_layout("ring=2,ulysses=3").num_devices
