"""Numbers of pages that requests need: formulas shared by engine and simulator.

All formulas use counts of tokens only. Arrays of requests have shape [requests]; arrays
of sequences have shape [requests, sequences] or broadcast to it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from jaxkv import validation

type Size = int | Int[Array, ""]
"""A number of tokens or pages, known when a program is traced or when it runs."""


@validation.checks_numbers()
def pages_for(
    places: Int32[Array, "..."], *, page_size: int | Int32[Array, "..."]
) -> Int32[Array, "..."]:
    """Returns the pages that hold `places` tokens: ceil(places / page_size).

    Args:
      places: number of token places, in [0, 2**24] if `page_size` is an array.
      page_size: token places in a page (the block size in vLLM).
    """
    if isinstance(page_size, int):
        return -(-places // page_size)
    # CPUs vectorise the division of floats, not of integers. The quotient of two
    # integers that float32 holds exactly never rounds to a whole number unless it is
    # one.
    ratio = places.astype(jnp.float32) / page_size.astype(jnp.float32)
    return jnp.ceil(ratio).astype(jnp.int32)


@validation.checks_numbers()
def max_pages(
    prompt: Int32[Array, "*n"], limit: Int32[Array, "*n"], *, page_size: Size
) -> tuple[Int32[Array, "*n"], Int32[Array, "*n"]]:
    """Returns the largest number of pages of a request: shared, and of each sequence.

    The full pages of the prompt are shared. `limit` is the length at which a sequence
    ends; the last of its tokens needs no place.
    """
    shared = prompt // page_size
    return shared, pages_for(limit - 1, page_size=page_size) - shared


@validation.checks_numbers()
def pages_to_start(
    num_tokens: Int32[Array, "#requests sequences"],
    common: Int32[Array, " requests"],
    waits: Bool[Array, "requests sequences"],
    *,
    page_size: Size,
) -> Int32[Array, " requests"]:
    """Returns the pages that all known tokens of a request take without cached pages.

    The full pages of the `common` tokens count once.

    Args:
      num_tokens: token places that each sequence needs.
      common: length of the prefix that all sequences of a request share.
      waits: True for entries that are sequences of the request.
      page_size: token places in a page.
    """
    full = common // page_size
    num_pages = jnp.where(waits, pages_for(num_tokens, page_size=page_size), 0)
    # Two sums without further dependencies fuse into one kernel.
    total = jnp.sum(num_pages, axis=1, dtype=jnp.int32)
    return total - full * (jnp.sum(waits, axis=1, dtype=jnp.int32) - 1)


@validation.checks_numbers()
def pages_to_resume(
    num_tokens: Int32[Array, "#requests sequences"],
    common: Int32[Array, "#requests #sequences"],
    swapped: Int32[Array, "#requests sequences"],
    num_swapped_pages: Int32[Array, " requests"],
    waits: Bool[Array, "requests sequences"],
    *,
    page_size: Size,
    num_pages: Size,
) -> Int32[Array, " requests"]:
    """Returns the pages that a swapped-out request takes to be swapped in and continue.

    The result is at most `num_pages`, so that an idle engine can serve any request.

    Args:
      num_tokens: number of tokens of each sequence, including those still to be
        computed.
      common: length of the prefix that all sequences of the request share.
      swapped: tokens of each sequence that are swapped out.
      num_swapped_pages: pages that hold the swapped tokens, shared ones counted once.
      waits: True for entries that are sequences of the request.
      page_size: token places in a page.
      num_pages: pages in the pool.
    """
    # A sequence that waits to be forked has only the full common pages.
    num_resident = pages_for(swapped, page_size=page_size)
    have = jnp.where(swapped > 0, num_resident, common // page_size)
    growth = jnp.maximum(pages_for(num_tokens, page_size=page_size) - have, 0)
    growth = jnp.sum(jnp.where(waits, growth, 0), axis=1, dtype=jnp.int32)
    # Sequences with a partial page may share it; then all but one copy it.
    partial = jnp.sum(waits & (swapped % page_size > 0), axis=1, dtype=jnp.int32)
    wanted = num_swapped_pages + growth + jnp.maximum(partial - 1, 0)
    return jnp.minimum(wanted, num_pages)


@validation.checks_numbers()
def missing_pages(
    have: Int32[Array, "*n"], want: Int32[Array, "*n"], *, page_size: Size
) -> Int32[Array, "*n"]:
    """Returns the pages to add for `want` places to a sequence that has `have` places.

    The result is 0 if `want` is at most `have`.
    """
    pages = pages_for(jnp.maximum(have, want), page_size=page_size)
    return pages - pages_for(have, page_size=page_size)


@validation.checks_numbers()
def own_tokens(
    length: Int32[Array, "*n"], others: Int32[Array, "*n"], *, page_size: Size
) -> Int32[Array, "*n"]:
    """Returns the tokens of each sequence that are not on shared pages.

    `others` is the number of pages counted for another sequence.
    """
    return jnp.maximum(length - others * page_size, 0)


@validation.checks_numbers()
def first_window_page(
    length: Int32[Array, "*n"], *, window: Size, page_size: Size
) -> Int32[Array, "*n"]:
    """Returns the first page of a sequence that a token after `length` tokens reads.

    A token at position p reads the keys at positions above p - window.
    """
    return jnp.maximum(length - window + 1, 0) // page_size


@validation.checks_numbers()
def max_window_pages(
    num_slots: int, *, window: int, page_size: int, token_budget: int, max_length: int
) -> int:
    """Returns the largest number of pages with keys that a step reads or writes.

    A slot with n rows has at most ceil((window + n - 2) / page_size) + 1 such pages, in
    a layer with a window, and no more than `max_length` tokens have. All slots together
    have at most `token_budget` rows.
    """
    per_slot = -(-max(window - 2, 0) // page_size) + 2
    pages_per_slot = -(-max_length // page_size)
    return min(
        num_slots * per_slot + token_budget // page_size, num_slots * pages_per_slot
    )
