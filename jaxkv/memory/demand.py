"""Pages that requests need: the formulas that engine and simulation share.

All on counts of tokens, so that they hold wherever the pages lie. Arrays of requests
have shape [requests], those of their sequences [requests, sequences] or what broadcasts
to it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

type Size = int | Int[Array, ""]


def pages_for(
    places: Int32[Array, "..."], *, page_size: int | Int32[Array, "..."]
) -> Int32[Array, "..."]:
    """Counts the pages that hold `places` token places: ceil(places / page_size).

    Args:
      places: from 0 to 2**24 where `page_size` is an array.
      page_size: token places in a page.
    """
    if isinstance(page_size, int):
        return -(-places // page_size)
    # Processors divide vectors of floats, but integers one by one; a quotient of two
    # that float32 holds exactly is never rounded to a whole number that it is not.
    ratio = places.astype(jnp.float32) / page_size.astype(jnp.float32)
    return jnp.ceil(ratio).astype(jnp.int32)


def at_most(
    prompt: Int32[Array, "*n"], limit: Int32[Array, "*n"], *, page_size: Size
) -> tuple[Int32[Array, "*n"], Int32[Array, "*n"]]:
    """Pages that sequences of one request can hold: shared by all, and of each alone.

    The full pages of the prompt are shared; of the tokens at which a sequence ends, its
    limit, the last one is never fed.
    """
    shared = prompt // page_size
    return shared, pages_for(limit - 1, page_size=page_size) - shared


def to_begin(
    known: Int32[Array, "#requests sequences"],
    common: Int32[Array, " requests"],
    waits: Bool[Array, "requests sequences"],
    *,
    page_size: Size,
) -> Int32[Array, " requests"]:
    """Pages that all tokens known of a request take, if none of them is in the pool.

    `known` are the token places that each sequence needs, and `waits` says which
    entries are sequences of the request. The full pages of the `common` tokens, with
    which all of them begin, count once; there are none for a sequence that is alone.
    """
    full = common // page_size
    each = jnp.where(waits, pages_for(known, page_size=page_size), 0)
    # Two sums that hang on nothing else are one kernel.
    total = jnp.sum(each, axis=1, dtype=jnp.int32)
    return total - full * (jnp.sum(waits, axis=1, dtype=jnp.int32) - 1)


def to_come_back(
    known: Int32[Array, "#requests sequences"],
    common: Int32[Array, "#requests #sequences"],
    swapped: Int32[Array, "#requests sequences"],
    num_swapped_pages: Int32[Array, " requests"],
    waits: Bool[Array, "requests sequences"],
    *,
    page_size: Size,
    num_pages: Size,
) -> Int32[Array, " requests"]:
    """Pages that a request takes when it is swapped in and goes on.

    Never more than the pool has, so that the first in an idle engine is served.

    Args:
      known: tokens that each sequence has to feed in all.
      common: tokens with which all sequences of each one's request begin.
      swapped: tokens of each sequence that are swapped out.
      num_swapped_pages: pages that hold those, shared ones once.
      waits: which entries are sequences of the request.
      page_size: token places in a page.
      num_pages: pages in the pool.
    """
    # Who waits to be forked has nothing yet, but all common pages that are full.
    own = pages_for(swapped, page_size=page_size)
    have = jnp.where(swapped > 0, own, common // page_size)
    growth = jnp.maximum(pages_for(known, page_size=page_size) - have, 0)
    growth = jnp.sum(jnp.where(waits, growth, 0), axis=1, dtype=jnp.int32)
    # All but one of those with a partial page may share it, and copy it.
    partial = jnp.sum(waits & (swapped % page_size > 0), axis=1, dtype=jnp.int32)
    wanted = num_swapped_pages + growth + jnp.maximum(partial - 1, 0)
    return jnp.minimum(wanted, num_pages)


def growth(
    have: Int32[Array, "*n"], want: Int32[Array, "*n"], *, page_size: Size
) -> Int32[Array, "*n"]:
    """Pages that are missing for so many token places; none where there are as many."""
    pages = pages_for(jnp.maximum(have, want), page_size=page_size)
    return pages - pages_for(have, page_size=page_size)


def own_tokens(
    length: Int32[Array, "*n"], others: Int32[Array, "*n"], *, page_size: Size
) -> Int32[Array, "*n"]:
    """Tokens of each sequence beyond those on the pages that others account for."""
    return jnp.maximum(length - others * page_size, 0)
