"""Attention states put together: parts of items that were cut, and sinks.

A state is the softmax-weighted values over some keys and the log of the sum of
exponentials of their scores.

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
"""Implementations by name; `None` takes the best one for the platform."""


class PartialStates(NamedTuple):
    """What the programs of decode leave of packed rows, log-sum-exps in base 2."""

    out: Float32[Array, "blocks kv_heads block_rows head_dim"]
    """Results of the items that no cut went through; the others hold anything."""
    lse: Float32[Array, "blocks kv_heads block_rows"]
    part_out: Float32[Array, "programs 2 block_rows head_dim"]
    """Partial states of every program; unused ones hold anything."""
    part_lse: Float32[Array, "programs 2 block_rows"]


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
    """Merges what was cut, and brings the output of packed rows back to rows.

    Args:
      states: of all items.
      ends: those of `stream_k.StreamKSchedule`, which say whose they are.
      packing: where the rows lie.
      group: query heads that share a KV head, static.
      tiling: that of the schedule, static.
      dtype: of the output.
      implementation: None, or a name that must serve this call.

    Returns:
      The output of each row, 0 where it sees nothing; log-sum-exps of packed rows,
      -inf there.

    Raises:
      ValueError: an implementation that is unknown or does not run here.
    """
    if devices.choose_implementation(implementation, lambda: None) == "mosaic_gpu":
        from pallas_kernels.paged_attention.hopper import merge

        return merge.merge_and_unpack_mosaic_gpu(
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
    """Merges the partial states of items that were cut: what `hopper.merge` means.

    The sums are products with a matrix of zeros and ones: a scatter-add would sum in
    another order each time. log-sum-exps are in base 2, -inf where nothing was seen.

    Args:
      states: of all items.
      parts: whose they are, see `stream_k.all_item_programs`.

    Returns:
      Results of all items: 0 and -inf of those without tiles.
    """
    out, lse, part_out, part_lse = states
    (programs, _, rows, head_dim), shape = part_out.shape, out.shape
    first, last = parts[:, 0, None], parts[:, 1, None]
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
    # Of items without tiles, the sums are those over no parts.
    is_whole = (first == last).reshape(*shape[:2], 1)
    lse = jnp.where(is_whole, lse, (jnp.log2(total) + top).reshape(shape[:3]))
    return jnp.where(is_whole[..., None], out, mixed.reshape(shape)), lse
