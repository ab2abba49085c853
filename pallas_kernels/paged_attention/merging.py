"""Merges of attention states: partial states of shared items, and sinks.

A state is the softmax-weighted values over some keys and the log-sum-exp of their
scores.

Source: Dao et al. 2022, arXiv:2205.14135, section 3.1.
"""

import functools
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import devices, row_packing
from pallas_kernels.paged_attention import stream_k
from pallas_kernels.paged_attention.stream_k import Tiling
from pallas_kernels.row_packing import Packing

type MergeImplementation = Literal["reference", "mosaic_gpu"]
"""Names of implementations; `None` means the best one for the platform."""


class PartialStates(NamedTuple):
    """Output of the decode kernel for packed rows, with log-sum-exps in base 2."""

    out: Float32[Array, "blocks kv_heads block_rows head_dim"]
    """Results of items of a single program; undefined for other items."""
    lse: Float32[Array, "blocks kv_heads block_rows"]
    part_out: Float32[Array, "programs 2 block_rows head_dim"]
    """Partial states of every program; unused ones are undefined."""
    part_lse: Float32[Array, "programs 2 block_rows"]


def add_sinks(
    out: Float32[Array, "rows q_heads head_dim"],
    lse: Float32[Array, "rows q_heads"],
    sinks: Float[Array, " q_heads"],
) -> tuple[Float32[Array, "rows q_heads head_dim"], Float32[Array, "rows q_heads"]]:
    """Adds a sink to each head: the score of one more key with value 0.

    Output and natural log-sum-exp are over the keys, and then over keys and sink; 0 and
    -inf for rows without a key, even with a sink.
    """
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32)[None, :])
    total = jnp.where(jnp.isneginf(lse), -jnp.inf, total)
    share = jnp.exp(lse - jnp.where(jnp.isneginf(total), 0.0, total))
    return out * share[..., None], total


def merge_and_unpack(
    states: PartialStates,
    ends: Int32[Array, " blocks"],
    packing: Packing,
    *,
    group: int,
    tiling: Tiling,
    dtype: DTypeLike,
    implementation: MergeImplementation | None = None,
) -> tuple[
    Float[Array, "rows q_heads head_dim"],
    Float32[Array, "blocks kv_heads block_rows"],
]:
    """Merges partial states, and unpacks the output to rows.

    Args:
      states: states of all items.
      ends: `ends` of the `stream_k.StreamKSchedule`, from which the programs of an item
        follow.
      packing: packing of the rows.
      group: query heads of a KV head, static.
      tiling: tiling of the schedule, static.
      dtype: type of the output.
      implementation: None, or the name of a required one.

    Returns:
      The output of each row, 0 without a key, and log-sum-exps of packed rows, -inf
      without a key.

    Raises:
      ValueError: the requested implementation is unknown or does not run here.
    """
    if devices.choose_implementation(implementation, lambda: None) == "mosaic_gpu":
        from pallas_kernels.paged_attention.hopper import merge_and_unpack_mosaic_gpu

        return merge_and_unpack_mosaic_gpu(
            states, ends, packing, group=group, tiling=tiling, dtype=dtype
        )
    parts = stream_k.all_item_programs(
        ends, kv_heads=states.out.shape[1], tiling=tiling
    )
    out, lse = merge_parts(states, parts)
    merged = row_packing.unpack_rows(out, packing, group=group, fill=0.0)
    return merged.astype(dtype), lse


def merge_parts(
    states: PartialStates, parts: Int32[Array, "items 2"]
) -> tuple[
    Float32[Array, "blocks kv_heads block_rows head_dim"],
    Float32[Array, "blocks kv_heads block_rows"],
]:
    """Merges the partial states of items: the reference of `hopper.merge`.

    The sums are products with a 0-1 matrix: a scatter-add would sum in a
    nondeterministic order. Log-sum-exps are in base 2, -inf for rows without a key.

    Args:
      states: states of all items.
      parts: programs of each item, see `stream_k.all_item_programs`.

    Returns:
      Results of all items; 0 and -inf for those without tiles.
    """
    out, lse, part_out, part_lse = states
    (programs, _, rows, head_dim), shape = part_out.shape, out.shape
    first = parts[:, 0, None]
    last = parts[:, 1, None]
    program = jnp.arange(programs, dtype=jnp.int32)[None]
    begins = (program == first) & (first < last)
    goes_on = (program > first) & (program <= last)
    member = jnp.stack([goes_on, begins], axis=2).reshape(parts.shape[0], -1)
    used = jnp.any(member, axis=0)[:, None]
    part_lse = jnp.where(used, part_lse.reshape(-1, rows), -jnp.inf)
    part_out = jnp.where(used[..., None], part_out.reshape(-1, rows, head_dim), 0.0)
    top = jnp.max(jnp.where(member[..., None], part_lse[None], -jnp.inf), axis=1)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    sum_parts = functools.partial(
        jnp.einsum, "ip,p...->i...", member.astype(jnp.float32), precision="highest"
    )
    weight = jnp.exp2(part_lse - top[jnp.argmax(member, axis=0)])
    weight = jnp.where(used, weight, 0.0)
    total = sum_parts(weight)
    mixed = sum_parts(weight[..., None] * part_out)
    mixed = mixed / jnp.where(total > 0, total, 1.0)[..., None]
    # Items without tiles have empty sums.
    is_whole = (first == last).reshape(*shape[:2], 1)
    lse = jnp.where(is_whole, lse, (jnp.log2(total) + top).reshape(shape[:3]))
    return jnp.where(is_whole[..., None], out, mixed.reshape(shape)), lse
