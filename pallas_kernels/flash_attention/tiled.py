"""Flash attention over contiguous keys and values, with its gradient.

For training, and for prompts that are not in pages. Scores exist for one tile of
queries and one tile of keys at a time, and the gradient recomputes them from the
log-sum-exp, so memory is linear in the length. For decoding see `api.paged_attention`.

Source: Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4; the loop over keys inside
that over queries: Dao 2023, arXiv:2307.08691, section 3.1.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, Float

from pallas_kernels import devices, online_softmax
from pallas_kernels.flash_attention import single_tile
from pallas_kernels.online_softmax import SoftmaxState

type FlashImplementation = Literal["reference", "cudnn"]
"""Names of implementations; `None` means the best one for platform and type."""

QUERY_TILE = 128
"""Queries of a tile, and keys of a tile."""


class _Sizes(NamedTuple):
    """Static arguments of a function with a custom gradient; hashable."""

    num_queries: int
    num_keys: int
    causal: bool
    window: int | None
    scale: float
    softcap: float | None
    rows: int
    """Queries of a tile."""
    tile: int
    """Keys of a tile."""


type _CudnnResiduals = tuple[
    Callable[..., tuple[Array, Array, Array]], Array, Array, Array
]
"""Pullback of cuDNN, queries, keys and values."""


def flash_attention(
    q: Float[Array, "batch queries q_heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads value_width"],
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    tile: int = QUERY_TILE,
    implementation: FlashImplementation | None = None,
) -> tuple[
    Float[Array, "batch queries q_heads value_width"],
    Float[Array, "batch queries q_heads"],
]:
    """Attends from every query to its keys.

    Args:
      q: queries. Query head h reads KV head `h // (q_heads // kv_heads)`.
      k: keys.
      v: values, of any width.
      causal: True if a query attends to no later keys. The last query is aligned with
        the last key, so fewer queries than keys are the end of a sequence.
      window: number of latest keys of a query, its own included, at least 1; None
        means all. Needs `causal`.
      scale: factor on the scores; None means head_dim ** -0.5.
      softcap: bound c of the scaled scores s, as c tanh(s / c); None means no bound.
      sinks: score of one more key with value 0 for each query head; None means none.
      tile: keys of a tile, and at most as many queries, at least 1; used by the
        reference only.
      implementation: None, or the name of a required one. "cudnn" needs a GPU,
        bfloat16 or float16, values as wide as keys, and either `causal` with equal
        numbers of queries and keys, or no `causal`.

    Returns:
      The output in the type of q, and the natural log-sum-exp of the scores in float32
      (float64 if q is), -inf for a query without keys. Both have gradients; that of the
      log-sum-exp is always the reference's.

    Raises:
      ValueError: shapes, types or bounds do not match, or the requested implementation
        does not support the call.
    """
    q_heads = q.shape[2]
    kv_heads = k.shape[2]
    head_dim = q.shape[3]
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads=} must be a multiple of {kv_heads=}")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"{window=} must be at least 1, and needs causal=True")
    if tile < 1:
        raise ValueError(f"{tile=} must be at least 1")
    if causal and q.shape[1] > k.shape[1]:
        raise ValueError(f"{q.shape[1]=} must be at most {k.shape[1]=} if causal")
    sizes = _Sizes(
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        causal=causal,
        window=window,
        scale=head_dim**-0.5 if scale is None else scale,
        softcap=softcap,
        rows=min(tile, max(q.shape[1], 1)),
        tile=tile,
    )
    reason = _not_cudnn(q, v, sizes)
    if implementation not in (None, "reference", "cudnn"):
        raise ValueError(f"{implementation=} must be None, 'reference' or 'cudnn'")
    if implementation == "cudnn" and reason:
        raise ValueError(f"implementation='cudnn': {reason}; 'reference' takes it")
    is_cudnn = implementation == "cudnn" or (implementation is None and not reason)
    run = _attend_cudnn if is_cudnn else _attend_tiles
    out, lse = run(q, k, v, sizes)
    if sinks is None:
        return out, lse
    sinks = sinks.astype(lse.dtype)[None, None, :]
    share = jax.nn.sigmoid(lse - sinks)[..., None]
    return out * share.astype(out.dtype), jnp.logaddexp(lse, sinks)


def _attend_tiles(q: Array, k: Array, v: Array, sizes: _Sizes) -> tuple[Array, Array]:
    """Attends tile by tile; arrays are laid out as for `flash_attention`."""
    (batch, _, q_heads, head_dim), kv_heads = q.shape, k.shape[2]
    group = q_heads // kv_heads
    # Heads first: a tile's products are then one matrix product a KV head.
    q = q.reshape(*q.shape[:2], kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    is_small = max(sizes.num_queries, sizes.num_keys) <= sizes.tile
    if is_small and sizes.softcap is None:
        query = jnp.arange(sizes.num_queries, dtype=jnp.int32)[:, None]
        key = jnp.arange(sizes.num_keys, dtype=jnp.int32)[None, :]
        out, lse = single_tile.attend_single_tile(
            q, k, v, _visible_pairs(query, key, sizes), sizes.scale
        )
    else:
        out, lse = _attend(q, k, v, sizes)
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, -1, q_heads, v.shape[3])
    return out, lse.transpose(0, 3, 1, 2).reshape(batch, -1, q_heads)


def _cudnn(q: Array, k: Array, v: Array, sizes: _Sizes) -> tuple[Array, Array]:
    """Attends with cuDNN; only the output has a gradient."""
    window = sizes.window
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=sizes.scale,
        is_causal=sizes.causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
        return_residual=True,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend_cudnn(q: Array, k: Array, v: Array, sizes: _Sizes) -> tuple[Array, Array]:
    """Attends with cuDNN, with gradients of both results."""
    return _cudnn(q, k, v, sizes)


def _forward_cudnn(
    q: CustomVJPPrimal, k: CustomVJPPrimal, v: CustomVJPPrimal, sizes: _Sizes
) -> tuple[tuple[Array, Array], _CudnnResiduals]:
    operands = q.value, k.value, v.value
    results, pull = jax.vjp(functools.partial(_cudnn, sizes=sizes), *operands)
    return results, (pull, *operands)


def _backward_cudnn(
    sizes: _Sizes,
    saved: _CudnnResiduals,
    grads: tuple[Array | SymbolicZero, Array | SymbolicZero],
) -> tuple[Array, Array, Array]:
    pull, *operands = saved
    full = tuple(
        jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x for x in grads
    )
    if isinstance(grads[1], SymbolicZero):
        return pull(full)
    # cuDNN would drop the gradient of the log-sum-exp silently.
    _, pull = jax.vjp(functools.partial(_attend_tiles, sizes=sizes), *operands)
    return pull(full)


_attend_cudnn.defvjp(_forward_cudnn, _backward_cudnn, symbolic_zeros=True)


def _not_cudnn(q: Array, v: Array, sizes: _Sizes) -> str:
    """Returns why cuDNN does not support a call, or an empty string if it does."""
    target = devices.current_target()
    if sizes.softcap is not None:
        return "the scores have a bound"
    if target.platform != "gpu":
        return f"the device is a {target.platform}, not a GPU"
    if target.capability and float(target.capability) < 8:
        return f"the GPU has compute capability {target.capability}, not 8.0 or more"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the type is {q.dtype}, not bfloat16 or float16"
    if sizes.causal and sizes.num_queries != sizes.num_keys:
        return "there are fewer queries than keys"
    if v.shape[3] != q.shape[3]:
        return f"values have a width of {v.shape[3]}, not {q.shape[3]}"
    if q.shape[3] % 8 or q.shape[3] > 128:
        return f"head_dim is {q.shape[3]}, not a multiple of 8 up to 128"
    return ""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(q: Array, k: Array, v: Array, sizes: _Sizes) -> tuple[Array, Array]:
    """Returns output and log-sum-exp; q is `[batch, kv_heads, group, queries, dim]`."""
    return _forward(q, k, v, sizes)[0]


def _forward(
    q: Array, k: Array, v: Array, sizes: _Sizes
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    padded = _pad(q, 3, sizes.rows), _pad(k, 2, sizes.tile), _pad(v, 2, sizes.tile)
    wide = np.promote_types(q.dtype, np.float32)
    lead = q.shape[:3]
    width = v.shape[3]

    def row(index: Array) -> tuple[Array, Array]:
        queries = _cut(padded[0], index, 3, sizes.rows)

        def column(other: Array, state: SoftmaxState) -> SoftmaxState:
            scores, mask = _scores(queries, padded[1], index, other, sizes)
            weights, state = online_softmax.update_softmax(state, scores, mask)
            values = _cut(padded[2], other, 2, sizes.tile)
            part = jnp.einsum(
                "bhgqk,bhkd->bhgqd",
                weights.astype(values.dtype),
                values,
                preferred_element_type=wide,
            )
            return state._replace(out=state.out + part)

        state = online_softmax.init_softmax((*lead, sizes.rows), width, q.dtype)
        state = jax.tree.map(lambda x: devices.varying_like(x, *padded), state)
        # First and end of the tiles of keys that this tile of queries attends to.
        last = jnp.asarray(-(-sizes.num_keys // sizes.tile), jnp.int32)
        first = jnp.zeros((), jnp.int32)
        if sizes.causal:
            ahead = sizes.num_keys - sizes.num_queries
            last = jnp.minimum(
                last, ((index + 1) * sizes.tile - 1 + ahead) // sizes.tile + 1
            )
            if sizes.window is not None:
                oldest = index * sizes.rows + ahead - sizes.window + 1
                first = jnp.maximum(oldest, 0) // sizes.tile
        state = lax.fori_loop(first, last, column, state)
        return online_softmax.normalize_softmax(state, None, q.dtype)

    num = padded[0].shape[3] // sizes.rows
    out, lse = lax.map(row, jnp.arange(num, dtype=jnp.int32))
    out, lse = (_joined(x, 3)[:, :, :, : sizes.num_queries] for x in (out, lse))
    return (out, lse), (q, k, v, out, lse)


def _backward(
    sizes: _Sizes, saved: tuple[Array, ...], grads: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    q, k, v, out, lse = saved
    wide = lse.dtype
    d_out, d_lse = grads
    # A query without keys has zero weights, so any finite log-sum-exp is correct.
    lse = jnp.where(jnp.isneginf(lse), jnp.zeros_like(lse), lse)
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_lse
    q, d_out, lse, delta = (_pad(x, 3, sizes.rows) for x in (q, d_out, lse, delta))
    k = _pad(k, 2, sizes.tile)
    v = _pad(v, 2, sizes.tile)

    def column(d_q: Array, other: Array) -> tuple[Array, tuple[Array, Array]]:
        keys, values = (_cut(x, other, 2, sizes.tile) for x in (k, v))

        def row(index: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_q, d_k, d_v = carry
            queries, d_o = (_cut(x, index, 3, sizes.rows) for x in (q, d_out))
            scores, mask = _scores(queries, k, index, other, sizes)
            weights = jnp.exp(scores - _cut(lse, index, 3, sizes.rows)[..., None])
            weights = jnp.where(mask, weights, jnp.zeros((), wide))
            d_w = jnp.einsum(
                "bhgqd,bhkd->bhgqk", d_o, values, preferred_element_type=wide
            )
            d_s = weights * (d_w - _cut(delta, index, 3, sizes.rows)[..., None])
            if sizes.softcap is not None:  # the derivative of the bound
                d_s = d_s * (1 - jnp.square(scores / sizes.softcap))
            d_s = (d_s * jnp.asarray(sizes.scale, wide)).astype(q.dtype)
            d_v += jnp.einsum(
                "bhgqk,bhgqd->bhkd",
                weights.astype(q.dtype),
                d_o,
                preferred_element_type=wide,
            )
            d_k += jnp.einsum(
                "bhgqk,bhgqd->bhkd", d_s, queries, preferred_element_type=wide
            )
            part = jnp.einsum(
                "bhgqk,bhkd->bhgqd", d_s, keys, preferred_element_type=wide
            )
            at = index * sizes.rows
            part += lax.dynamic_slice_in_dim(d_q, at, sizes.rows, axis=3)
            return lax.dynamic_update_slice_in_dim(d_q, part, at, axis=3), d_k, d_v

        empty = [
            devices.varying_like(jnp.zeros(x.shape, wide), q, k, v, d_out)
            for x in (keys, values)
        ]
        # First and end of the tiles of queries that attend to this tile of keys.
        last = jnp.asarray(-(-sizes.num_queries // sizes.rows), jnp.int32)
        first = jnp.zeros((), jnp.int32)
        if sizes.causal:
            ahead = sizes.num_keys - sizes.num_queries
            first = jnp.maximum(other * sizes.tile - ahead, 0) // sizes.rows
            if sizes.window is not None:
                newest = (other + 1) * sizes.tile - 1 + sizes.window - 1 - ahead
                last = jnp.minimum(last, jnp.maximum(newest, -1) // sizes.rows + 1)
        d_q, d_k, d_v = lax.fori_loop(first, last, row, (d_q, *empty))
        return d_q, (d_k, d_v)

    num = k.shape[2] // sizes.tile
    zeros = devices.varying_like(jnp.zeros(q.shape, wide), q, k, v, d_out)
    d_q, (d_k, d_v) = lax.scan(column, zeros, jnp.arange(num, dtype=jnp.int32))
    d_k, d_v = (_joined(x, 2)[:, :, : sizes.num_keys] for x in (d_k, d_v))
    d_q = d_q[:, :, :, : sizes.num_queries]
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


_attend.defvjp(_forward, _backward)


def _scores(
    queries: Array, k: Array, index: Array, other: Array, sizes: _Sizes
) -> tuple[Array, Array]:
    """Returns the scores of a tile and their mask."""
    wide = np.promote_types(queries.dtype, np.float32)
    keys = _cut(k, other, 2, sizes.tile)
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", queries, keys, preferred_element_type=wide)
    query = index * sizes.rows + jnp.arange(sizes.rows, dtype=jnp.int32)[:, None]
    key = other * sizes.tile + jnp.arange(sizes.tile, dtype=jnp.int32)[None, :]
    mask = _visible_pairs(query, key, sizes)[None, None, None]
    scores = scores * jnp.asarray(sizes.scale, wide)
    if sizes.softcap is not None:
        scores = sizes.softcap * jnp.tanh(scores / sizes.softcap)
    return scores, mask


def _visible_pairs(query: Array, key: Array, sizes: _Sizes) -> Array:
    """Returns the mask of pairs of a query (rows) and a key (columns)."""
    mask = (key < sizes.num_keys) & (query < sizes.num_queries)
    if sizes.causal:
        behind = query + sizes.num_keys - sizes.num_queries - key
        mask &= behind >= 0
        if sizes.window is not None:
            mask &= behind < sizes.window
    return mask


def _cut(x: Array, index: Array, axis: int, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis=axis)


def _pad(x: Array, axis: int, tile: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % tile)
    return jnp.pad(x, widths)


def _joined(x: Array, axis: int) -> Array:
    """Concatenates tiles, stacked on the leading axis, along `axis`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
