"""Attention over pages as one would write it first: gather all, then two products.

The measure of everything else: an implementation must be faster than this, and not much
less exact in the same type.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import attention


def gather_attention(
    q: Float[Array, "rows q_heads head_dim"],
    k_pages: Float[Array, "pages kv_heads page_size head_dim"],
    v_pages: Float[Array, "pages kv_heads page_size head_dim"],
    page_ids: Int[Array, "rows pages_per_slot"],
    positions: Int[Array, " rows"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "rows q_heads head_dim"], Float[Array, "rows q_heads"]]:
    """Attends from one row a slot, without a thought for memory.

    Args:
      q: queries.
      k_pages: keys, finite even where nobody looks.
      v_pages: values, likewise.
      page_ids: page of every place / page_size; all within the pages.
      positions: last place that each row sees, at least 0.
      scale: factor on the products; None means head_dim ** -0.5.
      softcap: bound of the scores; None means none.

    Returns:
      The output and the natural log-sum-exp; products and weights in the type of q,
      scores and sums in float32 at least.
    """
    rows, q_heads, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    k, v = (
        jnp.repeat(
            pages[page_ids].swapaxes(2, 3).reshape(rows, -1, kv_heads, head_dim),
            q_heads // kv_heads,
            axis=2,
        )
        for pages in (k_pages, v_pages)
    )
    wide = np.promote_types(q.dtype, np.float32)
    scores = jnp.einsum("rhd,rthd->rht", q, k, preferred_element_type=wide)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    place = jnp.arange(k.shape[1], dtype=jnp.int32)
    seen = place[None, None, :] <= positions[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("rht,rthd->rhd", weights, v)
    return out, jax.nn.logsumexp(scores, axis=-1)


class Comparison(NamedTuple):
    """Times of one call each, in seconds."""

    gather_s: float
    """Of `gather_attention`."""
    door_s: float
    """Of `attention.paged_attention`."""

    @property
    def speedup(self) -> float:
        """How many times faster the door is."""
        return self.gather_s / self.door_s


def compare(
    *,
    batch: int = 8,
    context: int = 1024,
    q_heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    dtype: DTypeLike = "float32",
    repeats: int = 9,
) -> Comparison:
    """Times decoding through the door against gathering, on the default device.

    Args:
      batch: sequences, one row each.
      context: tokens of each.
      q_heads: query heads.
      kv_heads: KV heads.
      head_dim: size of a head.
      page_size: token places in a page.
      dtype: of queries and pages.
      repeats: calls of each; they take turns and the fastest counts.

    Returns:
      The fastest call of each.
    """
    rng, pages_each = np.random.default_rng(0), -(-context // page_size)
    num_pages = batch * pages_each
    shape = (num_pages, kv_heads, page_size, head_dim)
    k, v = (jnp.asarray(rng.normal(size=shape), dtype) for _ in "kv")
    q = jnp.asarray(rng.normal(size=(batch, q_heads, head_dim)), dtype)
    ids = jnp.asarray(rng.permutation(num_pages).reshape(batch, -1), jnp.int32)
    positions = jnp.full((batch,), context - 1, jnp.int32)
    functions = jax.jit(gather_attention), jax.jit(attention.paged_attention)
    for function in functions:
        jax.block_until_ready(function(q, k, v, ids, positions))

    def seconds(function: Callable) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(function(q, k, v, ids, positions))
        return time.perf_counter() - begin

    turns = [[seconds(function) for function in functions] for _ in range(repeats)]
    return Comparison(*(min(times) for times in zip(*turns, strict=True)))
