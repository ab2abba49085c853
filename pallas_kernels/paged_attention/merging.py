"""Attention states put together: parts of items that were cut, and sinks.

A state is the softmax-weighted values over some keys and the log of the sum of
exponentials of their scores.

Source: Dao et al. 2022, arXiv:2205.14135, section 3.1.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int


def add_sinks(
    out: Float32[Array, "rows q_heads head_dim"],
    lse: Float32[Array, "rows q_heads"],
    sinks: Float[Array, " q_heads"],
) -> tuple[Float32[Array, "rows q_heads head_dim"], Float32[Array, "rows q_heads"]]:
    """Adds one score a head, its sink, that takes weight and brings no value.

    Output and log-sum-exp, a natural one, are those over the keys, then over keys and
    sink; 0 and -inf where there was no key, sink or not.
    """
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32)[None, :])
    total = jnp.where(jnp.isneginf(lse), -jnp.inf, total)
    share = jnp.exp(lse - jnp.where(jnp.isneginf(total), 0.0, total))
    return out * share[..., None], total


def merge_parts(
    out: Float32[Array, "blocks kv_heads block_rows head_dim"],
    lse: Float32[Array, "blocks kv_heads block_rows"],
    part_out: Float32[Array, "programs 2 block_rows head_dim"],
    part_lse: Float32[Array, "programs 2 block_rows"],
    cut_of: Int[Array, "programs 2"],
    cut_items: Int[Array, " programs"],
) -> tuple[
    Float32[Array, "blocks kv_heads block_rows head_dim"],
    Float32[Array, "blocks kv_heads block_rows"],
]:
    """Merges the partial states of items that were cut, in the order of the line.

    The sums are products with a matrix of zeros and ones: a scatter-add would sum in
    another order each time. log-sum-exps are in base 2, -inf where nothing was seen.

    Args:
      out: results of the items that no cut went through; the others hold anything.
      lse: likewise.
      part_out: partial states of every program; unused ones hold anything.
      part_lse: likewise.
      cut_of: cut item that each of them belongs to, see `stream_k.Schedule`.
      cut_items: those items.

    Returns:
      Results of all items that have tiles.
    """
    (num_blocks, kv_heads, rows, head_dim), num_programs = out.shape, cut_of.shape[0]
    num_items = num_blocks * kv_heads
    cut_of = cut_of.reshape(-1)
    used = cut_of < num_programs
    index = jnp.arange(num_programs, dtype=jnp.int32)
    member = cut_of[None, :] == index[:, None]  # [cut items, parts]
    state_lse = jnp.where(used[:, None], part_lse.reshape(-1, rows), -jnp.inf)
    state_out = jnp.where(
        used[:, None, None], part_out.reshape(-1, rows, head_dim), 0.0
    )
    top = jnp.max(
        jnp.where(member[..., None], state_lse[None], -jnp.inf), axis=1
    )  # [cut items, rows]
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weight = jnp.exp2(state_lse - top[jnp.where(used, cut_of, 0)])
    weight = jnp.where(used[:, None], weight, 0.0)
    sum_parts = functools.partial(
        jnp.einsum, "ip,pr...->ir...", member.astype(jnp.float32), precision="highest"
    )
    total = sum_parts(weight)
    some = jnp.where(total > 0, total, 1.0)
    mixed = sum_parts(weight[..., None] * state_out) / some[..., None]
    out = out.reshape(num_items, rows, head_dim)
    out = out.at[cut_items].set(mixed, mode="drop")
    lse = lse.reshape(num_items, rows)
    lse = lse.at[cut_items].set(jnp.log2(total) + top, mode="drop")
    return (
        out.reshape(num_blocks, kv_heads, rows, head_dim),
        lse.reshape(num_blocks, kv_heads, rows),
    )
