"""Tiled attention against plain softmax in float64, with its gradient."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench
from pallas_kernels.bench import in_float64
from pallas_kernels.flash_attention import QUERY_TILE
from pallas_kernels.flash_attention.tiled import flash_attention
from tests.support.flash_cases import draw, total

pytestmark = pytest.mark.usefixtures("full_optimization")

SLOW = pytest.mark.slow
CASES = [
    # queries, keys, q_heads, kv_heads, head_dim, causal, window
    (1, 1, 1, 1, 8, True, None),
    pytest.param((7, 7, 2, 2, 8, True, None), marks=SLOW),
    pytest.param((16, 16, 4, 2, 16, True, None), marks=SLOW),
    (33, 33, 4, 1, 8, True, None),
    (40, 40, 2, 1, 8, True, 5),
    pytest.param((40, 40, 2, 1, 8, True, 16), marks=SLOW),
    pytest.param((40, 40, 2, 1, 8, True, 99), marks=SLOW),
    (5, 45, 4, 2, 8, True, None),
    pytest.param((5, 45, 2, 2, 8, True, 12), marks=SLOW),
    pytest.param((1, 50, 2, 1, 8, True, None), marks=SLOW),
    (20, 37, 4, 2, 8, False, None),
    (37, 5, 2, 1, 8, False, None),
]


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_plain_softmax(case) -> None:
    check_case(case)


def test_the_last_tiles_may_be_partial() -> None:
    arrays = draw(20, 37, 2, 1, 8, "float32")
    expected = in_float64(partial(bench.attention, causal=False), *arrays)
    outputs = jax.jit(partial(flash_attention, causal=False, tile=16))(*arrays)
    for output, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output, wanted, atol=3e-6, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("value_width", [5, 20])
def test_values_of_another_width(value_width: int) -> None:
    check_case((33, 33, 4, 2, 12, True, None), value_width=value_width)


def check_case(case: tuple[Any, ...], value_width: int | None = None) -> None:
    """Checks outputs and gradients, with one tile and with several."""
    *sizes, causal, window = case
    arrays = draw(*sizes, "float32", value_width)

    def both(attend: Any) -> Any:
        """The outputs, and the gradient of a number that depends on all of them."""
        grad = jax.grad(partial(total, attend), argnums=(0, 1, 2))
        return jax.jit(lambda *arrays: (attend(*arrays), grad(*arrays)))

    formula = partial(bench.attention, causal=causal, window=window)
    expected = in_float64(both(formula), *arrays)
    # Several tiles, and a single one.
    for tile in (16, 128):
        error = partial(flash_attention, causal=causal, window=window, tile=tile)
        outputs, gradients = both(error)(*arrays)
        for a, b in zip(outputs, expected[0], strict=True):
            np.testing.assert_allclose(a, b, atol=3e-6, rtol=1e-5)
        for a, b in zip(gradients, expected[1], strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_error_is_that_of_the_type(dtype: str) -> None:
    arrays = draw(70, 70, 4, 2, 32, dtype)
    expected = in_float64(bench.attention, *arrays)
    same = jax.jit(bench.attention)(*arrays)
    outputs = jax.jit(partial(flash_attention, tile=16))(*arrays)
    assert outputs[0].dtype == dtype
    assert outputs[1].dtype == jnp.float32
    for a, b, c in zip(outputs, same, expected, strict=True):
        exact = np.asarray(c)
        error = np.abs(np.asarray(a, np.float64) - exact)
        plain_error = np.abs(np.asarray(b, np.float64) - exact)
        assert error.max() <= 2 * plain_error.max() + 1e-5
        assert error.mean() <= 1.5 * plain_error.mean() + 1e-5


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    def temporary(length: int) -> int:
        shape = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        grad = jax.grad(partial(total, flash_attention), argnums=(0, 1, 2))
        compiled: Any = jax.jit(grad).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short = temporary(1024)
    long = temporary(4096)
    assert long < 4.5 * short
    assert long < 4096**2 * 4  # one head's scores


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(window=0), "window=0 must be at least 1"),
        (dict(window=3, causal=False), "needs causal=True"),
        (dict(tile=0), "tile=0 must be at least 1"),
        (dict(implementation="cudnn"), "the device is a cpu, not a GPU; 'refer"),
    ],
)
def test_calls_that_cannot_be_served(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(*draw(4, 4, 2, 1, 8, "float32"), **fields)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="q_heads=3 must be a multiple of kv_heads=2"):
        flash_attention(*draw(4, 4, 3, 2, 8, "float32"))
    with pytest.raises(ValueError, match=r"must be at most k.shape\[1\]=4 if causal"):
        flash_attention(*draw(5, 4, 2, 1, 8, "float32"))
    assert QUERY_TILE == 128


@pytest.mark.parametrize("tile", [4, 64])
def test_bounded_scores_and_sinks_equal_plain_softmax(tile: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, 9, heads, 6)), jnp.float32)
        for heads in (4, 2, 2)
    )
    sinks = jnp.asarray(rng.normal(size=4), jnp.float32)
    place = np.arange(9)
    back = place[:, None] - place[None, :]
    mask = jnp.asarray((back >= 0) & (back < 5))

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        keys, values = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = 1.5 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, keys) * 0.7 / 1.5)
        scores = jnp.where(mask[None, None], scores, -jnp.inf)
        column = jnp.broadcast_to(sinks[None, :, None, None], (2, 4, 9, 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights[..., :-1], values)

    def tiled(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        options: Any = {"window": 5, "scale": 0.7, "softcap": 1.5, "tile": tile}
        return flash_attention(q, k, v, sinks=sinks, **options)[0]

    operands = q, k, v, sinks
    np.testing.assert_allclose(tiled(*operands), plain(*operands), rtol=1e-5, atol=1e-6)
    weight = jnp.asarray(rng.normal(size=(2, 9, 4, 6)), jnp.float32)
    for actual, expected in zip(
        *(
            jax.grad(lambda *x, f=f: jnp.sum(weight * f(*x)), (0, 1, 2, 3))(*operands)
            for f in (tiled, plain)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
