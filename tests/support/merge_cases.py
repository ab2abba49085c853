"""Partial states of the decode kernel, with NaN in all unused entries."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels import row_packing
from pallas_kernels.paged_attention import (
    DecodePlan,
    PartialStates,
    decode_plan,
    merge_and_unpack,
    stream_k,
)
from pallas_kernels.paged_attention.stream_k import Tiling

PROGRAMS = 7


class Case(NamedTuple):
    """Arguments of `merging.merge_and_unpack`."""

    states: Any
    plan: DecodePlan
    group: int
    tiling: Tiling

    @property
    def parts(self) -> np.ndarray:
        """Returns the first and last program of each item."""
        return parts_of(self.plan, self.tiling)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Returns the array arguments."""
        return self.states, self.plan.schedule.ends, self.plan.packing

    def by_twin(self) -> tuple[Any, Any]:
        """Returns the result of plain `jnp`."""
        return merge_and_unpack(
            *self.arrays, group=self.group, tiling=self.tiling, dtype=jnp.float32
        )


def parts_of(plan: DecodePlan, tiling: Tiling) -> np.ndarray:
    """Returns the first and last program of each item, for two KV heads."""
    return np.asarray(
        stream_k.all_item_programs(plan.schedule.ends, kv_heads=2, tiling=tiling)
    )


def make(
    positions: Any,
    slots: Any,
    *,
    num_slots: int,
    group: int,
    head_dim: int,
    block_rows: int = 64,
    **trees: Any,
) -> Case:
    """Makes a plan of two KV heads, and states with NaN in unwritten entries."""
    tiling = Tiling(num_programs=PROGRAMS, stages=2, block_rows=block_rows)
    plan = decode_plan.plan_decode(
        jnp.asarray(positions, jnp.int32),
        None if slots is None else jnp.asarray(slots, jnp.int32),
        num_slots=num_slots,
        kv_heads=2,
        group=group,
        tiling=tiling,
        **trees,
    )
    num_blocks, tokens = plan.packing.row.shape
    size = row_packing.num_block_rows(tokens=tokens, group=group)
    rng = np.random.default_rng(group)
    items = (num_blocks, 2, size)
    programs = (PROGRAMS, 2, size)
    out, part_out = (rng.normal(size=(*x, head_dim)) for x in (items, programs))
    lse, part_lse = (4 * rng.normal(size=x) for x in (items, programs))
    parts = parts_of(plan, tiling)
    is_single_part = (parts[:, 0] == parts[:, 1]).reshape(num_blocks, 2)
    out[~is_single_part] = np.nan
    lse[~is_single_part] = np.nan
    written = np.zeros((PROGRAMS, 2), bool)
    for first, last in parts[parts[:, 0] < parts[:, 1]]:
        written[first, 1] = written[first + 1 : last + 1, 0] = True
    part_out[~written] = np.nan
    part_lse[~written] = np.nan
    # A row without keys in one part of its item.
    part_lse[written.nonzero()[0][0], 1, 0] = -np.inf
    states = (jnp.asarray(x, jnp.float32) for x in (out, lse, part_out, part_lse))
    return Case(PartialStates(*states), plan, group, tiling)
