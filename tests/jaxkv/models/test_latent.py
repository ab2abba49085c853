"""Latent attention: absorbed over pages, unabsorbed over sequences, and in NumPy."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxkv.engine import EngineConfig
from jaxkv.models import (
    ModelConfig,
    add_transposed_weights,
    make_model_pages,
    param_shapes,
    rotary,
)
from jaxkv.models.config import RopeScaling
from scaling.costs import count_parameters, kv_bytes_per_token
from scaling.shapes import describe_config
from scaling.training import transformer_rows
from tests.support import engines, latent_models
from tests.support.latent_models import LATENT, YARN
from tests.support.paged_models import (
    check_paged_equals_contiguous,
    feed_as_served,
    feed_fast_to_compile,
)
from tests.support.trees import ints

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 37)).astype(np.int32)


@pytest.mark.parametrize("config", [LATENT, YARN], ids=["plain", "yarn"])
def test_whole_sequences_equal_the_oracle(config: ModelConfig) -> None:
    """Covers columns and rows of activations."""
    weights = latent_models.params(config)
    wanted = latent_models.oracle_logits(weights, TOKENS, config)
    assert np.abs(wanted).max() > 1
    our_logits = engines.full_logits(weights, TOKENS, config=config)
    np.testing.assert_allclose(our_logits, wanted, rtol=0, atol=1e-4)
    by_rows = jax.jit(transformer_rows.run_transformer, static_argnames="config")
    our_logits = by_rows(weights, TOKENS, config=config).logits
    np.testing.assert_allclose(our_logits, wanted, rtol=0, atol=1e-4)


def test_pages_equal_whole_sequences() -> None:
    weights = latent_models.params()
    check_paged_equals_contiguous(
        dataclasses.replace(LATENT, max_positions=40),
        weights,
        feed=feed_fast_to_compile,
        page_size=4,
        seed=0,
        decode_share=0.0,
    )


@pytest.mark.parametrize(
    ("page_size", "numerics"),
    [
        pytest.param(2, "fast", marks=pytest.mark.thorough),
        pytest.param(16, "reproducible", marks=pytest.mark.thorough),
        pytest.param(2, "reproducible", marks=pytest.mark.slow),
        pytest.param(16, "fast", marks=pytest.mark.slow),
    ],
)
def test_pages_of_all_sizes(page_size: int, numerics: Any) -> None:
    check_paged_equals_contiguous(
        YARN,
        latent_models.params(YARN),
        feed=feed_as_served,
        page_size=page_size,
        numerics=numerics,
        seed=page_size,
        decode_share=0.5,
    )


@pytest.mark.parametrize("config", [LATENT, YARN], ids=["compressed", "plain"])
def test_costs_are_those_of_the_arrays(config: ModelConfig) -> None:
    shape = describe_config(config)
    weights = jax.tree.leaves(param_shapes(config))
    assert count_parameters(shape).total == sum(x.size for x in weights)
    engine = EngineConfig(num_pages=3, page_size=4, max_length=8)
    pages = jax.eval_shape(lambda: make_model_pages(config, engine))
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    assert num_bytes == 12 * kv_bytes_per_token(shape, kv_bytes=4)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_weights_stored_twice_give_the_same_logits(num_rows: int) -> None:
    weights = latent_models.params()
    twice = add_transposed_weights(weights)
    tokens = TOKENS[:1, :num_rows]
    our_logits, wanted = (
        engines.full_logits(x, tokens, config=LATENT) for x in (twice, weights)
    )
    np.testing.assert_allclose(our_logits, wanted, rtol=0, atol=1e-4)


FREQUENCIES = {
    (64, 10_000.0, 40.0, 4096, True): (
        1.0, 0.316227764, 0.100000001, 0.0268793609, 0.00550000044, 0.000790569407,
        2.49999994e-05, 7.90569447e-06,
    ),
    (16, 5000.0, 4.0, 64, False): (
        1.0, 0.226211801, 0.0370970368, 0.0102524171, 0.00353553402, 0.00121922465,
        0.000420448196, 0.000144991063,
    ),
    (6, 100.0, 4.0, 16, True): (1.0, 0.0538608618, 0.011603971),
    (16, 10_000.0, 2.0, 8, True): (
        1.0, 0.158113882, 0.0500000007, 0.0158113893, 0.00499999989, 0.00158113893,
        0.000500000024, 0.000158113893,
    ),
}  # fmt: skip
"""Rotary size, theta, factor, original positions and truncation; and the frequencies of
transformers 5.24 with 32 and 1 rotations, every fourth one of 64."""


@pytest.mark.parametrize("case", FREQUENCIES)
def test_yarn_frequencies(case: tuple[Any, ...]) -> None:
    size, theta, factor, positions, truncate = case
    scaling = RopeScaling(
        kind="yarn",
        factor=factor,
        high_frequency_factor=32.0,
        original_max_positions=positions,
        truncate=truncate,
        magnitude=1.25,
    )
    config = dataclasses.replace(
        engines.MODEL, head_dim=size, rope_theta=theta, rope_scaling=scaling
    )
    frequencies = rotary.frequencies(config, "float32")
    wanted = FREQUENCIES[case]
    np.testing.assert_allclose(
        frequencies[:: len(frequencies) // len(wanted)], wanted, rtol=3e-6
    )
    angles = rotary.angles(config, ints(0, 7), "float32")
    assert angles is not None
    cos, sin, _ = angles
    np.testing.assert_allclose(
        cos, 1.25 * np.cos(np.outer(frequencies, [0, 7])), atol=1e-6
    )
    np.testing.assert_allclose(
        sin, 1.25 * np.sin(np.outer(frequencies, [0, 7])), atol=1e-6
    )
