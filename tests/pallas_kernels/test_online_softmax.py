"""The scales of values, and attention sinks, of the softmax that all kernels share."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import online_softmax
from pallas_kernels.online_softmax import SoftmaxState


def test_masked_values_may_have_any_scale() -> None:
    weights = jnp.asarray([0.0, 0.5, 2.0])
    scales = jnp.asarray([jnp.nan, 2.0, 0.25])
    scaled = online_softmax.scale_weights(weights, scales)
    np.testing.assert_array_equal(scaled, [0.0, 1.0, 0.5])


def test_a_sink_takes_its_share() -> None:
    """Sinks above and below the scores; a query without keys has no output."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 5))
    values = rng.normal(size=(3, 5, 4))
    sinks = np.asarray([-3.0, 4.0, 1.0])
    weights = np.exp(scores)
    weights[2] = 0
    top = scores.max(1)
    decay = np.exp(-top)
    state = SoftmaxState(
        jnp.asarray(top, jnp.float32),
        jnp.asarray(weights.sum(1) * decay, jnp.float32),
        jnp.asarray(
            np.einsum("qk,qkd->qd", weights, values) * decay[:, None], jnp.float32
        ),
    )
    out, lse = online_softmax.normalize_softmax(
        state, jnp.asarray(sinks, jnp.float32), jnp.float32
    )
    total = weights.sum(1) + np.exp(sinks)
    expected = np.einsum("qk,qkd->qd", weights, values) / total[:, None]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[:2], np.log(total[:2]), rtol=1e-5)
    assert lse[2] == -np.inf
