"""Attention over pages as one would write it first: gather all, then two products.

The measure of exactness: an implementation may not be much less exact than this in the
same type. How much faster it is, `jaxkv bench kernels` says.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


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
