"""Invariants of pool and page tables, checked after every step and before writes."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.memory import demand, page_pool, page_table
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.page_table import Table


class Violations(NamedTuple):
    """Number of violations of each invariant; all 0 in a sound state."""

    i1: Int32[Array, ""]
    """Pages whose reference count is not the number of their uses plus pins."""
    i2: Int32[Array, ""]
    """Violations of conservation, see `page_pool.count_pool_faults`."""
    i3: Int32[Array, ""]
    """Shared pages that would be written, see `shared_writes`."""
    i4: Int32[Array, ""]
    """Table entries that do not fit the slot's length, and impossible lengths."""
    i5: Int32[Array, ""]
    """Empty slots that have a length, reserved places or a page."""
    i7: Int32[Array, ""]
    """Faults of the prefix cache, see `prefix_cache.count_prefix_faults`."""
    swap: Int32[Array, ""]
    """Faults of the swap buffer, see `swap_buffer.count_swap_faults`."""
    states: Int32[Array, ""]
    """Faults of the recurrent states, see `state_pool.count_state_faults`."""


class InvariantError(RuntimeError):
    """A state violates an invariant: a bug of this program, not invalid input."""


_MEANING = {
    "i1": "I1 (pages whose count is not their uses in tables plus their pins: {})",
    "i2": "I2 (breaches of the conservation of pages: {})",
    "i3": "I3 (shared pages that would be written: {})",
    "i4": "I4 (table entries or lengths that do not fit: {})",
    "i5": "I5 (empty slots with a length or a page: {})",
    "i7": "I7 (faults of the prefix cache: {})",
    "swap": "those of the swap buffer (faults: {})",
    "states": "those of the recurrent states (faults: {})",
}


@validation.checks_numbers(first_step=0)
def raise_if_violated(violations: Violations, *, first_step: int = 0) -> None:
    """Raises an error if a step violated an invariant.

    Args:
      violations: violations of one step, or of several steps stacked along the first
        axis.
      first_step: number of the first step.

    Raises:
      InvariantError: one line with the first step that violated an invariant, and
        which.
    """
    counts = np.stack([np.atleast_1d(x) for x in violations], axis=1)
    broken = np.flatnonzero(counts.any(axis=1))
    if not broken.size:
        return
    nums = zip(violations._fields, counts[broken[0]].tolist(), strict=True)
    faults = ", ".join(_MEANING[name].format(num) for name, num in nums if num)
    raise InvariantError(f"step {first_step + broken[0]} broke invariants: {faults}")


@validation.checks_numbers()
def violations(
    pool: Pool,
    table: Table,
    live: Bool[Array, " slots"],
    *,
    page_size: int,
    pins: Int32[Array, " pages"] | Bool[Array, " pages"] | None = None,
    first: Int32[Array, " slots"] | None = None,
) -> Violations:
    """Counts violations of the invariants of pool and tables.

    I1: the reference count of a page is the number of its entries in live rows plus its
    pins, which are uses outside the table. I2: the free pages are those with count
    zero. I4: a row has distinct pages in columns `first` to ceil((length + ahead) /
    page_size), and `NO_PAGE` elsewhere, and neither number is negative. I5: a slot that
    is not live is empty. `first` is 0, or the first column within the window of the
    next token in the table of layers with a window, see `demand.first_window_page`.

    Reads every page and sorts every row: for tests and debug mode. I3, I7, `swap`
    and `states` have functions of their own and are 0 here.
    """
    (total,) = pool.ref.shape
    _, pages_per_slot = table.page_ids.shape
    have = page_table.num_pages(table, page_size=page_size)
    place = jnp.arange(pages_per_slot, dtype=jnp.int32)[None, :]
    valid = place < have[:, None]
    if first is not None:
        valid &= place >= first[:, None]
    held = jnp.zeros_like(pool.ref) if pins is None else pins.astype(jnp.int32)
    used = jnp.where(valid & live[:, None], table.page_ids, NO_PAGE)
    held = arrays.put(held, used, 1, "add")
    is_page = (table.page_ids >= 0) & (table.page_ids < total)
    misplaced = jnp.where(valid, ~is_page, table.page_ids != NO_PAGE)
    row = jnp.sort(jnp.where(valid & is_page, table.page_ids, NO_PAGE), axis=1)
    repeated = (row[:, 1:] == row[:, :-1]) & (row[:, 1:] != NO_PAGE)
    impossible = (table.length < 0) | (table.ahead < 0) | (have > pages_per_slot)

    mapped = jnp.any(table.page_ids != NO_PAGE, axis=1)
    ghost = ~live & ((table.length != 0) | (table.ahead != 0) | mapped)
    count = partial(jnp.sum, dtype=jnp.int32)
    return Violations(
        i1=count(held != pool.ref),
        i2=page_pool.count_pool_faults(pool),
        i3=jnp.zeros((), jnp.int32),
        i4=count(misplaced) + count(repeated) + count(impossible),
        i5=count(ghost),
        i7=jnp.zeros((), jnp.int32),
        swap=jnp.zeros((), jnp.int32),
        states=jnp.zeros((), jnp.int32),
    )


@validation.checks_numbers()
def shared_writes(
    pool: Pool, table: Table, num_rows: Int32[Array, " slots"], *, page_size: int
) -> Int32[Array, ""]:
    """Counts the pages that a step may not write (I3); 0 if the step is sound.

    A page that a step writes has a reference count of one and is mapped by the slot
    that writes. Call this function after pages are reserved and before the `num_rows`
    of each slot are written, from its length on.

    Returns:
      Number of table entries to be written whose page is missing or has another count.
    """
    first = table.length // page_size
    end = demand.pages_for(table.length + num_rows, page_size=page_size)
    place = jnp.arange(table.page_ids.shape[1], dtype=jnp.int32)[None, :]
    written = (place >= first[:, None]) & (place < end[:, None])
    written &= (num_rows > 0)[:, None]
    owners = arrays.take(pool.ref, table.page_ids, fill=0)
    outside = jnp.where(num_rows > 0, jnp.maximum(end - place.shape[1], 0), 0)
    count = partial(jnp.sum, dtype=jnp.int32)
    return count(written & (owners != 1)) + count(outside)
