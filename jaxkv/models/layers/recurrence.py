"""Recurrences over tokens, with a state of fixed size in place of K and V.

`RecurrenceConfig` describes them. With state S of a value head, decay a, strength b,
and the query q, key k and value v of a token:

  gated delta rule (GDN)   S <- a S;  S <- S + k (b (v - S^T k))^T;  y = S^T q
  KDA                      as GDN, with a decay for each feature of the key
  Mamba 2                  S <- a S + k v^T;  y = S^T q + skip v
  short convolution        y is the output of the convolution, and S is missing

`run_tokens` runs these lines token by token. `run_chunk` runs up to `CHUNK` tokens as
products of matrices; it equals `run_tokens` up to rounding. Rows are first in all
arrays of this module, and the state is float32 at least.

Source: `models.config.RecurrenceConfig`; chunks: Yang et al. 2024, arXiv:2412.06464,
section 3.3, for decays of features Kimi Linear, arXiv:2510.26692, section 3.2.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxkv import validation
from jaxkv.models import nonlinear
from jaxkv.models.config import RecurrenceConfig
from pallas_kernels import devices

CHUNK = 32
"""Largest number of tokens of `run_chunk`. On a CPU 16 and 64 take about as long."""

_EPSILON = 1e-6
"""Added to the sum of squares of a query or key, which is then scaled to length one."""


class RecurrentState(NamedTuple):
    """State of one layer after some tokens of a sequence."""

    inputs: Float[Array, "*batch taps channels"]
    """The latest inputs of the convolution."""
    matrix: Float[Array, "*batch value_heads key_dim value_dim"] | None
    """None for a short convolution, as the decays below."""


class RecurrentWeights(NamedTuple):
    """Weights of a layer that are applied token by token."""

    kernel: Float[Array, "channels kernel_size"]
    """Kernel of the convolution; its last column is that of the current token."""
    kernel_bias: Float[Array, " channels"] | None
    decay_rate: Float[Array, " value_heads"] | None
    """Logarithm of the decay's rate (A_log)."""
    decay_bias: Float[Array, " decays"] | None
    skip: Float[Array, " value_heads"] | None


class RecurrentRows(NamedTuple):
    """Projections of rows; an `Orientation` arranges rows and features."""

    mixed: Float[Array, "rows channels"]
    """Queries, keys and values of all heads before the convolution."""
    decay: Float[Array, "rows decays"] | None
    """Decays before bias and softplus."""
    strength: Float[Array, "rows value_heads"] | None
    """Strength of the delta rule before the sigmoid; None without that rule."""


class RecurrentProjection(NamedTuple):
    """What the recurrence of a layer takes in place of Q, K and V."""

    config: RecurrenceConfig
    rows: RecurrentRows
    weights: RecurrentWeights


class _Token(NamedTuple):
    """Inputs of the recurrence; each has a leading axis of rows, or is of one row."""

    q: Float[Array, "*rows value_heads key_dim"]
    k: Float[Array, "*rows value_heads key_dim"]
    v: Float[Array, "*rows value_heads value_dim"]
    log_decay: Float[Array, "*rows value_heads features"]
    """One feature, or `key_dim`."""
    strength: Float[Array, "*rows value_heads"] | None
    skipped: Float[Array, "*rows value_heads value_dim"] | None


def zero_state(
    config: RecurrenceConfig, shape: tuple[int, ...], dtype: DTypeLike
) -> RecurrentState:
    """Returns the state before the first token, with leading axes `shape`.

    `dtype` is that of the activations.
    """
    c = config
    inputs = jnp.zeros((*shape, c.kernel_size - 1, c.num_channels), dtype)
    if c.kind == "conv":
        return RecurrentState(inputs, None)
    matrix = *shape, c.num_value_heads, c.key_dim, c.value_dim
    return RecurrentState(
        inputs, jnp.zeros(matrix, np.promote_types(dtype, np.float32))
    )


def run_tokens(
    projection: RecurrentProjection, state: RecurrentState
) -> tuple[RecurrentState, Float[Array, "rows outputs"]]:
    """Runs tokens of one sequence one by one; rows are first.

    Returns:
      The states after each row, with a leading axis of rows, and the outputs.
    """

    def one(
        state: RecurrentState, row: RecurrentRows
    ) -> tuple[RecurrentState, tuple[RecurrentState, Array]]:
        rows = jax.tree.map(lambda x: x[None], row)
        window = jnp.concatenate([state.inputs, rows.mixed])
        convolved = _convolve(window, projection.weights)
        if state.matrix is None:
            state = RecurrentState(window[1:], None)
            return state, (state, convolved[0])
        token = _prepare(projection._replace(rows=rows), convolved)
        matrix, y = _advance(state.matrix, jax.tree.map(lambda x: x[0], token))
        state = RecurrentState(window[1:], matrix)
        return state, (state, y.reshape(-1).astype(row.mixed.dtype))

    return jax.lax.scan(one, state, projection.rows)[1]


def run_chunk(
    projection: RecurrentProjection,
    state: RecurrentState,
    num: Int[Array, ""] | int,
) -> tuple[RecurrentState, Float[Array, "rows outputs"]]:
    """Runs the first `num` rows, tokens of one sequence, as one chunk; rows are first.

    Returns:
      The state after these rows, and the outputs, undefined from row `num` on.
    """
    mixed = projection.rows.mixed
    window = jnp.concatenate([state.inputs, mixed])
    convolved = _convolve(window, projection.weights)
    latest = functools.partial(
        jax.lax.dynamic_slice_in_dim, window, num, state.inputs.shape[0]
    )
    if state.matrix is None:
        return RecurrentState(latest(), None), convolved
    token = _prepare(projection, convolved)
    is_row = jnp.arange(len(mixed), dtype=jnp.int32)[:, None, None] < num
    # Other rows neither decay the state nor write to it.
    token = token._replace(
        k=jnp.where(is_row, token.k, 0),
        log_decay=jnp.where(is_row, token.log_decay, 0),
    )
    by_head = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), token)
    matrix, y = jax.vmap(_run_head)(state.matrix, by_head)
    y = jnp.moveaxis(y, 0, 1)
    if token.skipped is not None:
        y = y + token.skipped
    inputs = latest()
    y = y.reshape(len(mixed), -1).astype(mixed.dtype)
    return RecurrentState(inputs, matrix), y


def run_sequence(projection: RecurrentProjection) -> Float[Array, "rows outputs"]:
    """Runs all tokens of one sequence from its first, in chunks; rows are first."""
    mixed = projection.rows.mixed
    num_rows = len(mixed)
    size = min(CHUNK, num_rows)
    count = -(-num_rows // size)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, count * size - num_rows), (0, 0)))
        return padded.reshape(count, size, -1)

    def step(
        state: RecurrentState, rows: RecurrentRows
    ) -> tuple[RecurrentState, Array]:
        return run_chunk(projection._replace(rows=rows), state, size)

    state = zero_state(projection.config, (), mixed.dtype)
    state = jax.tree.map(lambda x: devices.varying_like(x, mixed), state)
    _, y = jax.lax.scan(step, state, jax.tree.map(split, projection.rows))
    return y.reshape(count * size, -1)[:num_rows]


@validation.checks_numbers(axis=-2)
def run_batch(
    projection: RecurrentProjection, shape: tuple[int, ...], *, axis: int
) -> Float[Array, "..."]:
    """Runs whole sequences; rows are those of all sequences, one after another.

    Args:
      projection: projections of all rows.
      shape: number of sequences, and of tokens of each.
      axis: axis of the features, -1 or -2, in the projections and in the result.
    """

    def split(x: Array) -> Array:
        return (x if axis == -1 else x.T).reshape(*shape, -1)

    y = jax.vmap(lambda rows: run_sequence(projection._replace(rows=rows)))(
        jax.tree.map(split, projection.rows)
    )
    y = y.reshape(-1, y.shape[-1])
    return y if axis == -1 else y.T


def _convolve(
    window: Float[Array, "rows_and_taps channels"], weights: RecurrentWeights
) -> Float[Array, "rows channels"]:
    """Applies the causal convolution, a sum over taps, and its bias."""
    kernel = weights.kernel
    size = kernel.shape[1]
    rows = len(window) - size + 1
    y = window[:rows] * kernel[None, :, 0]
    for tap in range(1, size):
        y = y + window[tap : tap + rows] * kernel[None, :, tap]
    return y if weights.kernel_bias is None else y + weights.kernel_bias[None]


def _prepare(
    projection: RecurrentProjection, convolved: Float[Array, "rows channels"]
) -> _Token:
    """Returns the inputs of the recurrence of every row."""
    c, rows, weights = projection
    wide = np.promote_types(convolved.dtype, np.float32)
    active = nonlinear.ACTIVATIONS[c.activation](convolved).astype(wide)
    width = c.num_key_heads * c.key_dim
    q, k, v = jnp.split(active, [width, 2 * width], axis=-1)
    q, k = (x.reshape(*x.shape[:-1], c.num_key_heads, c.key_dim) for x in (q, k))
    v = v.reshape(*v.shape[:-1], c.num_value_heads, c.value_dim)
    if c.kind != "mamba2":
        q, k = (
            x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + _EPSILON)
            for x in (q, k)
        )
        q = q * c.key_dim**-0.5
    q, k = (jnp.repeat(x, c.num_value_heads // c.num_key_heads, -2) for x in (q, k))
    assert rows.decay is not None
    assert weights.decay_bias is not None
    assert weights.decay_rate is not None
    step = rows.decay.astype(wide) + weights.decay_bias.astype(wide)[None]
    step = jax.nn.softplus(step).reshape(*step.shape[:-1], c.num_value_heads, -1)
    skipped = None
    if c.kind == "mamba2":
        step = jnp.clip(step, c.min_step, c.max_step)
        assert weights.skip is not None
        skipped = v * weights.skip.astype(wide)[None, :, None]
        v = v * step
    strength = rows.strength
    if strength is not None:
        strength = jax.nn.sigmoid(strength.astype(wide)) * c.write_scale
    rate = jnp.exp(weights.decay_rate.astype(wide))[None, :, None]
    return _Token(q, k, v, -rate * step, strength, skipped)


def _advance(
    matrix: Float[Array, "value_heads key_dim value_dim"], token: _Token
) -> tuple[Array, Float[Array, "value_heads value_dim"]]:
    """Runs one token; returns the new state and the output."""
    matrix = matrix * jnp.exp(token.log_decay)[..., None]
    v = token.v
    if token.strength is not None:
        v = (v - jnp.sum(matrix * token.k[..., None], 1)) * token.strength[:, None]
    matrix = matrix + token.k[..., None] * v[:, None]
    y = jnp.sum(matrix * token.q[..., None], 1)
    return matrix, y if token.skipped is None else y + token.skipped


def _run_head(
    matrix: Float[Array, "key_dim value_dim"], token: _Token
) -> tuple[Array, Float[Array, "rows value_dim"]]:
    """Runs the rows of one head as products.

    With G the sums of log decays up to a row, a row writes u = b (v - S^T k), where S
    holds the rows before it: (I + A) U = b (V - (K exp(G)) S_0), with A the products of
    keys of different rows, decayed from the earlier row to the later one.
    """
    q, k, v, log_decay, strength, _ = token
    # Logarithm of the decay from row j to row i, a sum of its own for every j: of the
    # difference of two sums, strong decays of earlier rows would leave few digits.
    later = jnp.tri(len(q), dtype=bool)[..., None]
    after = jnp.tri(len(q), k=-1, dtype=bool)[..., None]
    logs = jnp.cumsum(jnp.where(after, log_decay[:, None], 0), axis=0)
    decays = jnp.where(later, jnp.exp(logs), 0)
    left = decays[-1]
    if decays.shape[2] == 1:
        decays = decays[..., 0]
        scores = (q @ k.T) * decays
        kinship = (k @ k.T) * decays
    else:
        scores = jnp.einsum("id,jd,ijd->ij", q, k, decays)
        kinship = jnp.einsum("id,jd,ijd->ij", k, k, decays)
    reach = jnp.exp(jnp.cumsum(log_decay, axis=0))
    if strength is not None:
        v = (v - (k * reach) @ matrix) * strength[:, None]
        lower = jnp.tril(kinship * strength[:, None], -1)
        v = jax.scipy.linalg.solve_triangular(
            lower + jnp.eye(len(q), dtype=v.dtype), v, lower=True, unit_diagonal=True
        )
    y = (q * reach) @ matrix + scores @ v
    return matrix * reach[-1][:, None] + (k * left).T @ v, y
