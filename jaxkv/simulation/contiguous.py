"""Contiguous KV reservations: the baseline that paged memory is compared with.

At admission, each request gets one contiguous block of token places for its largest
possible length, from a buddy allocator. A leaf is a page of `Capacity`, never shared
here; a block has a power of two of leaves and is aligned to its size. The pool is
divided into regions of at most `leaves_per_region` leaves.

Free memory is a bitmap of leaves: a block is free if all of its leaves are. Blocks are
therefore never split or merged explicitly, and `vmap` can sweep the rules.

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
"""Rule for the size of a reservation, see `reserved_places`."""

RESERVATION_RULES: tuple[str, ...] = get_args(Rule.__value__)


class Reservation(NamedTuple):
    """A rule for reservations, and the pool."""

    rule: Int32[Array, ""]
    """Index into `RESERVATION_RULES`."""
    idle: Bool[Array, "regions leaves"]
    """Mask of the leaves that exist; the last region may be incomplete."""


def reservation(rule: Rule, *, num_leaves: int, leaves_per_region: int) -> Reservation:
    """Makes a `Reservation`.

    Args:
      rule: rule for the size of a reservation, one of `RESERVATION_RULES`.
      num_leaves: leaves in the pool, equal to `Capacity.num_pages`; for example 983
        leaves of 16 places for 15,728 places.
      leaves_per_region: leaves of the largest block, a power of two; for example 128
        leaves of 16 places for 2,048 places.

    Raises:
      ValueError: a parameter is out of its range.
    """
    if rule not in RESERVATION_RULES:
        raise ValueError(f"{rule=} must be one of {', '.join(RESERVATION_RULES)}")
    num_leaves = validation.integer("num_leaves", num_leaves, low=1)
    leaves_per_region = validation.integer("leaves_per_region", leaves_per_region)
    if leaves_per_region < 1 or leaves_per_region & (leaves_per_region - 1):
        raise ValueError(f"{leaves_per_region=} must be a power of two")
    num_regions = -(-num_leaves // leaves_per_region)
    leaves = np.arange(num_regions * leaves_per_region) < num_leaves
    return Reservation(
        rule=jnp.asarray(RESERVATION_RULES.index(rule), jnp.int32),
        idle=jnp.asarray(leaves.reshape(num_regions, leaves_per_region)),
    )


def reserved_places(
    rule: Int32[Array, ""],
    prompt: Int32[Array, " n"],
    output: Int32[Array, " n"],
    max_length: Int32[Array, ""],
) -> Int32[Array, " n"]:
    """Returns the token places to reserve for each request, before block rounding.

      max     `max_length`
      pow2    the prompt, plus the answer rounded up to a power of two (25 to 32)
      oracle  the exact length of prompt plus answer

    Args:
      rule: index into `RESERVATION_RULES`.
      prompt: prompt length in tokens, at least 1.
      output: answer length in tokens, at least 1.
      max_length: largest reservation in tokens.
    """
    rounded = jnp.where(
        rule == RESERVATION_RULES.index("pow2"), _two_to(_log2_up(output)), output
    )
    places = jnp.minimum(prompt + rounded, max_length)
    return jnp.where(rule == RESERVATION_RULES.index("max"), max_length, places)


def block_order(
    places: Int32[Array, " n"], leaf_places: Int32[Array, ""]
) -> Int32[Array, " n"]:
    """Returns the order of the smallest block with so many places: 2^order leaves."""
    return _log2_up(pages_for(places, page_size=leaf_places))


def free_leaves(
    idle: Bool[Array, "regions leaves"],
    start: Int32[Array, " blocks"],
    num: Int32[Array, " blocks"],
) -> Bool[Array, "regions leaves"]:
    """Returns a mask of the free leaves.

    Args:
      idle: mask of the leaves that exist.
      start: first leaf of each allocated block, or `NO_SEQUENCE`.
      num: number of leaves of each block.
    """
    edges = jnp.zeros((idle.size + 1,), jnp.int32)
    edges = arrays.put(edges, start, 1, "add")
    edges = arrays.put(
        edges, jnp.where(start >= 0, start + num, NO_SEQUENCE), -1, "add"
    )
    depth = jnp.cumsum(edges[:-1], dtype=jnp.int32)
    return idle & (depth == 0).reshape(idle.shape)


def find_block(
    free: Bool[Array, "regions leaves"], order: Int32[Array, ""]
) -> Int32[Array, ""]:
    """Finds a block in the smallest free block that fits, at the lowest address.

    Returns:
      Its first leaf, or `NO_SEQUENCE` if there is none.
    """
    orders = _orders(free).ravel()
    key = jnp.where(orders >= order, orders, jnp.iinfo(jnp.int32).max)
    start = jnp.argmin(key).astype(jnp.int32)  # the first of equal keys
    return jnp.where(orders[start] >= order, start, NO_SEQUENCE)


def largest_order(idle: Bool[Array, "regions leaves"]) -> Int32[Array, ""]:
    """Returns the order of the largest block of an idle pool."""
    return jnp.max(_orders(idle))


def find_blocks(
    free: Bool[Array, "regions leaves"],
    order: Int32[Array, " head"],
    waits: Bool[Array, " head"],
) -> Int32[Array, " head"]:
    """Finds blocks for waiting requests in order, until one does not fit.

    Args:
      free: mask of the free leaves.
      order: order of the block of each request.
      waits: mask of the waiting requests, which come first.

    Returns:
      The first leaf of each block, or `NO_SEQUENCE`.
    """
    num = jnp.sum(waits, dtype=jnp.int32)
    head = jnp.arange(order.shape[0], dtype=jnp.int32)
    leaf = jnp.arange(free.size, dtype=jnp.int32).reshape(free.shape)

    def goes_on(carry: tuple[Array, ...]) -> Bool[Array, ""]:
        return carry[0] < num

    def body(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        k, free, starts = carry
        start = find_block(free, order[k])
        size = _two_to(order[k])
        taken = (start >= 0) & (leaf >= start) & (leaf < start + size)
        starts = jnp.where(head == k, start, starts)
        return jnp.where(start >= 0, k + 1, num), free & ~taken, starts

    first = jnp.zeros((), jnp.int32), free, jnp.full_like(order, NO_SEQUENCE)
    return lax.while_loop(goes_on, body, first)[-1]


def _orders(free: Bool[Array, "regions leaves"]) -> Int32[Array, "regions leaves"]:
    """Returns the order of the largest free block with each leaf; -1 if it is taken."""
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
