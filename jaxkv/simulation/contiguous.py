"""Contiguous reservations: what serving did before pages, to compare with.

Every request gets one run of token places when it is admitted, for all that it may ever
hold, from a buddy allocator: blocks of a power of two of leaves (the pages of
`Capacity`, which are never shared here), aligned to their size. The pool is the binary
expansion of its size, in regions of at most `leaves_per_region`.

Which blocks are free is a bitmap of leaves: a block is free iff its aligned run is, and
two free buddies are one block. So nothing is split or merged, and `vmap` sweeps rules.

Source: Kwon et al. 2023, arXiv:2309.06180, section 6.1 (Orca with reservations);
Knowlton 1965, doi:10.1145/365628.365655 (buddies).
"""

from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkv import arrays, validation
from jaxkv.ledger import NO_SEQUENCE
from jaxkv.memory import pages_for

type Rule = Literal["max", "pow2", "oracle"]
"""How much is reserved for a request, see `asked`."""

RULES: tuple[str, ...] = get_args(Rule.__value__)


class Reservation(NamedTuple):
    """How much is reserved, and in what pool."""

    rule: Int32[Array, ""]
    """Index into `RULES`."""
    idle: Bool[Array, "regions leaves"]
    """The leaves of an idle pool, whose size may be no multiple of a region's."""


def reservation(rule: Rule, *, num_leaves: int, leaves_per_region: int) -> Reservation:
    """Makes a `Reservation`.

    Args:
      rule: how much is reserved.
      num_leaves: leaves in the pool, `Capacity.num_pages`. 15,728 places in leaves of
        16: 983.
      leaves_per_region: of the largest block, a power of two: 2,048 places are 128.

    Raises:
      ValueError: a parameter is out of its range.
    """
    if rule not in RULES:
        raise ValueError(f"{rule=} must be one of {', '.join(RULES)}")
    num_leaves = validation.integer("num_leaves", num_leaves, low=1)
    leaves_per_region = validation.integer("leaves_per_region", leaves_per_region)
    if leaves_per_region < 1 or leaves_per_region & (leaves_per_region - 1):
        raise ValueError(f"{leaves_per_region=} must be a power of two")
    num_regions = -(-num_leaves // leaves_per_region)
    leaves = np.arange(num_regions * leaves_per_region) < num_leaves
    return Reservation(
        rule=jnp.asarray(RULES.index(rule), jnp.int32),
        idle=jnp.asarray(leaves.reshape(num_regions, leaves_per_region)),
    )


def asked(
    rule: Int32[Array, ""],
    prompt: Int32[Array, " n"],
    output: Int32[Array, " n"],
    max_length: Int32[Array, ""],
) -> Int32[Array, " n"]:
    """Token places reserved for each request, before they are rounded to a block.

      max     the longest sequence there may be
      pow2    its prompt, and its answer rounded up to a power of two: 25 becomes 32
      oracle  its prompt and answer, as if their length were known

    Args:
      rule: index into `RULES`.
      prompt: tokens, at least 1.
      output: tokens, at least 1.
      max_length: tokens; nobody gets more.
    """
    rounded = jnp.where(rule == RULES.index("pow2"), _two_to(_log2_up(output)), output)
    places = jnp.minimum(prompt + rounded, max_length)
    return jnp.where(rule == RULES.index("max"), max_length, places)


def order_of(
    places: Int32[Array, " n"], leaf_places: Int32[Array, ""]
) -> Int32[Array, " n"]:
    """The order of the smallest block that has the places: it has 2^order leaves."""
    return _log2_up(pages_for(places, page_size=leaf_places))


def free_leaves(
    idle: Bool[Array, "regions leaves"],
    start: Int32[Array, " blocks"],
    num: Int32[Array, " blocks"],
) -> Bool[Array, "regions leaves"]:
    """The leaves of an idle pool that no block covers.

    `start` is the first leaf of each block, `NO_SEQUENCE` for none, and `num` its
    leaves.
    """
    edges = jnp.zeros((idle.size + 1,), jnp.int32)
    edges = arrays.put(edges, start, 1, "add")
    edges = arrays.put(
        edges, jnp.where(start >= 0, start + num, NO_SEQUENCE), -1, "add"
    )
    depth = jnp.cumsum(edges[:-1], dtype=jnp.int32)
    return idle & (depth == 0).reshape(idle.shape)


def place(
    free: Bool[Array, "regions leaves"], order: Int32[Array, ""]
) -> Int32[Array, ""]:
    """Finds a block: in the smallest free one that fits, at the lowest address.

    Returns:
      Its first leaf, NO_SEQUENCE if there is none.
    """
    found = _orders(free).ravel()
    key = jnp.where(found >= order, found, jnp.iinfo(jnp.int32).max)
    start = jnp.argmin(key).astype(jnp.int32)  # of equal ones the first
    return jnp.where(found[start] >= order, start, NO_SEQUENCE)


def largest(idle: Bool[Array, "regions leaves"]) -> Int32[Array, ""]:
    """The order of the largest block that an idle pool has."""
    return jnp.max(_orders(idle))


def place_in_order(
    free: Bool[Array, "regions leaves"],
    order: Int32[Array, " head"],
    waits: Bool[Array, " head"],
) -> Int32[Array, " head"]:
    """Finds blocks for those who wait, in order, until one does not fit.

    Nobody waits behind one who does not.

    Returns:
      First leaves, NO_SEQUENCE for those who get none.
    """
    num = jnp.sum(waits, dtype=jnp.int32)
    head = jnp.arange(order.shape[0], dtype=jnp.int32)
    leaf = jnp.arange(free.size, dtype=jnp.int32).reshape(free.shape)

    def goes_on(carry: tuple[Array, ...]) -> Bool[Array, ""]:
        return carry[0] < num

    def body(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        k, free, starts = carry
        start, size = place(free, order[k]), _two_to(order[k])
        taken = (start >= 0) & (leaf >= start) & (leaf < start + size)
        starts = jnp.where(head == k, start, starts)
        return jnp.where(start >= 0, k + 1, num), free & ~taken, starts

    first = jnp.zeros((), jnp.int32), free, jnp.full_like(order, NO_SEQUENCE)
    return lax.while_loop(goes_on, body, first)[-1]


def _orders(free: Bool[Array, "regions leaves"]) -> Int32[Array, "regions leaves"]:
    """The order of the largest free block that each leaf lies in, -1 if it is taken."""
    runs = [free]
    while runs[-1].shape[1] > 1:
        runs.append(runs[-1].reshape(free.shape[0], -1, 2).all(axis=2))
    orders = jnp.full_like(runs[-1], -1, jnp.int32)
    for k, run in reversed(list(enumerate(runs))):
        shape = (free.shape[0], orders.shape[1], run.shape[1] // orders.shape[1])
        wider = jnp.broadcast_to(orders[:, :, None], shape).reshape(run.shape)
        orders = jnp.where(wider >= 0, wider, jnp.where(run, k, -1))
    return orders


def _log2_up(values: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """ceil(log2(values)) of values of at least 1."""
    return 32 - lax.clz(values - 1)


def _two_to(order: Int32[Array, "..."]) -> Int32[Array, "..."]:
    return jnp.left_shift(jnp.ones_like(order), order)
