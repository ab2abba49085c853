"""The prefix cache: full pages, found again by the tokens they hold.

An entry is a page. What the page holds, and which page comes before it, stands at its
page id; to be cached means to be pinned, by one use more in the pool. So a cached page
outlives the sequences that used it, until it is evicted.

A page is found by a hash of its tokens and of all tokens before, in buckets of `WAYS`
pages. The hash only says where to look: a hit compares tokens, parent and salt, so the
hash need not withstand an adversary, who could at most fill one bucket. Since
the parent is a page that was found the same way, equal tokens and equal parents mean
equal sequences, and no sequence is ever answered from the tokens of another.

The parent of a cached page is always cached (I7, see `unsound`): a page enters after
its parent, and `jaxkv.eviction` takes leaves first. Whoever uses a cached page uses all
pages before it. What an operation costs depends on the pages it asks for, never on the
size of the pool.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from jaxkv import arrays
from jaxkv.memory import idle_pages, page_pool
from jaxkv.memory.idle_pages import IdlePages
from jaxkv.memory.page_pool import NO_PAGE, Pool

WAYS = 8
"""Pages in a bucket. There are two to four buckets for each page: where all pages are
cached, and each new one enters for an evicted one, less than one in ten million finds
its bucket full."""


_LANES = np.array([0x243F6A88, 0x85A308D3], np.uint32)
"""Sets the two words of a hash apart. Binary digits of pi."""
_GOLDEN = np.uint32(0x9E3779B9)
"""Sets the places in a page apart: odd, so that its multiples repeat after 2**32."""

_ENTERED, _HASH, _PARENT, _SALT = 0, slice(1, 3), 3, 4
"""Where in a row of `Prefixes.content` each stands; the tokens come last."""


class Prefixes(NamedTuple):
    """The cached pages, and where to look for them."""

    buckets: Int32[Array, "buckets ways"]
    """The cached pages, by the low bits of their hash; `NO_PAGE` where empty."""
    depth: Int32[Array, " pages"]
    """Pages before it; `NO_PAGE` where the page is not cached. There, the fields that
    follow mean nothing."""
    content: Int32[Array, "pages page_size_and_5"]
    """What a page has from its entry to its eviction, side by side since it is written
    together: the tick of entry, two words of hash, parent, salt, tokens; the properties
    say more. Words of uint32 stand as the int32 of the same bits."""
    last_used: Int32[Array, " pages"]
    """Tick at which a sequence last let go of it, if one has."""
    num_uses: Int32[Array, " pages"]
    """Times that a sequence started on it, filled it or came upon it."""
    idle: IdlePages
    """Those that no sequence uses, in the order in which they are evicted."""
    num_pinned: Int32[Array, ""]
    """How many are cached."""
    tick: Int32[Array, ""]
    """Times that pages entered, or were let go. May wrap: it counts modulo 2**32."""

    # For tests and debug mode: they look at every page.
    @property
    def pinned(self) -> Bool[Array, " pages"]:
        """Pages that are cached."""
        return self.depth >= 0

    @property
    def entered(self) -> Int32[Array, " pages"]:
        """Tick at which it entered."""
        return self.content[..., _ENTERED]

    @property
    def hash(self) -> UInt32[Array, "pages 2"]:
        """Hash of all tokens up to the end of the page, and of the salt."""
        return self.content[..., _HASH].astype("uint32")

    @property
    def parent(self) -> Int32[Array, " pages"]:
        """Cached page of the tokens before; `NO_PAGE` on a sequence's first page."""
        return self.content[..., _PARENT]

    @property
    def salt(self) -> UInt32[Array, " pages"]:
        """Tenant, or whatever else keeps sequences apart that have the same tokens."""
        return self.content[..., _SALT].astype("uint32")

    @property
    def tokens(self) -> Int32[Array, "pages page_size"]:
        """Tokens whose K and V the page holds."""
        return self.content[..., _SALT + 1 :]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.content.shape[-1] - _SALT - 1


def make_prefixes(num_pages: int, page_size: int) -> Prefixes:
    """Makes an empty cache, of 4 (page_size + 26 to 43) bytes for each page.

    Raises:
      ValueError: a size is below 1.
    """
    if num_pages < 1:
        raise ValueError(f"{num_pages=} must be at least 1")
    if page_size < 1:
        raise ValueError(f"{page_size=} must be at least 1")
    num_buckets = 2 << (num_pages - 1).bit_length()
    return Prefixes(
        buckets=jnp.full((num_buckets, WAYS), NO_PAGE, jnp.int32),
        depth=jnp.full(num_pages, NO_PAGE, jnp.int32),
        content=jnp.zeros((num_pages, _SALT + 1 + page_size), jnp.int32),
        last_used=jnp.zeros(num_pages, jnp.int32),
        num_uses=jnp.zeros(num_pages, jnp.int32),
        idle=idle_pages.make_idle_pages(num_pages),
        num_pinned=jnp.zeros((), jnp.int32),
        tick=jnp.zeros((), jnp.int32),
    )


def lookup(
    cache: Prefixes,
    parent: Int32[Array, " n"],
    tokens: Int32[Array, "n page_size"],
    salt: UInt32[Array, " n"],
) -> Int32[Array, " n"]:
    """Finds the cached page that holds exactly these tokens after that page.

    The parent is the cached page of the tokens before, `NO_PAGE` at the start of a
    sequence. A page is found under the salt that it was entered with only; `NO_PAGE`
    where there is none.
    """
    hashed = _hash(cache, parent, tokens, salt)
    return _find(cache, hashed, _named(parent, tokens, salt))


def match(
    cache: Prefixes,
    tokens: Int32[Array, "n max_length"],
    num_tokens: Int32[Array, " n"],
    salt: UInt32[Array, " n"],
    wanted: Bool[Array, " n"],
) -> Int32[Array, "n pages_per_slot"]:
    """Finds the longest cached prefix of every sequence, in full pages.

    At least one token is always left to compute, since the next one is drawn from its
    logits. Columns are looked up in turn for all sequences at once, until nobody finds
    more; if nobody wants a match, nothing runs, and who does not matches nothing. Of
    each sequence `num_tokens` are known, in [0, max_length]; beyond stands anything.

    Returns:
      The page ids, in token order and `NO_PAGE` beyond, as wide as a row of a table of
      `max_length` places. No use is added: `page_pool.share` them in the same step.
    """
    page_size = cache.page_size
    rows, max_length = tokens.shape
    ids = jnp.full((rows, -(-max_length // page_size)), NO_PAGE, jnp.int32)
    if max_length <= page_size:  # one token is left, and no full page
        return ids
    most = jnp.where(wanted, (num_tokens - 1) // page_size, 0)

    def growing(carry: tuple[Array, ...]) -> Array:
        column, most, _, _ = carry
        return jnp.any(column < most)

    def grow(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        column, most, last, ids = carry
        page = lax.dynamic_slice_in_dim(tokens, column * page_size, page_size, axis=1)
        found = jnp.where(column < most, lookup(cache, last, page, salt), NO_PAGE)
        most = jnp.where(found == NO_PAGE, 0, most)
        ids = lax.dynamic_update_slice_in_dim(ids, found[:, None], column, axis=1)
        return column + 1, most, found, ids

    first = (jnp.zeros((), jnp.int32), most, jnp.full(rows, NO_PAGE, jnp.int32), ids)
    return lax.while_loop(growing, grow, first)[3]


def enter(
    cache: Prefixes,
    pool: Pool,
    page_ids: Int32[Array, " n"],
    parent: Int32[Array, " n"],
    tokens: Int32[Array, "n page_size"],
    salt: UInt32[Array, " n"],
) -> tuple[Prefixes, Pool, Int32[Array, " n"]]:
    """Caches pages that have just been filled, unless their content is cached already.

    Of several rows with the same content the first one enters. A row does not enter if
    its parent is not cached under its salt, if its bucket is full, or if by chance an
    earlier row has the same hash; then nobody finds its page, and that is all.

    Args:
      cache: the cached pages.
      pool: the pool that holds the pages.
      page_ids: the page that each row has filled, used by the row and not cached yet,
        or `NO_PAGE`.
      parent: page of the tokens before, used by the row too; `NO_PAGE` at the start of
        a sequence.
      tokens: tokens of the page, all accepted.
      salt: of each row's sequence.

    Returns:
      The new cache and pool, each page that entered with one use more; and for each
      row the cached page with its content: its own, if that entered; another, which the
      caller should put in the place of its own, see `eviction.use`; or `NO_PAGE`, where
      none is cached.
    """
    cache, entered, cached = enter_unpinned(cache, page_ids, parent, tokens, salt)
    return cache, page_pool.share(pool, entered), cached


def enter_unpinned(
    cache: Prefixes,
    page_ids: Int32[Array, " n"],
    parent: Int32[Array, " n"],
    tokens: Int32[Array, "n page_size"],
    salt: UInt32[Array, " n"],
) -> tuple[Prefixes, Int32[Array, " n"], Int32[Array, " n"]]:
    """As `enter`, for a caller that changes the pool's counts all at once.

    Returns:
      The new cache; the pages that have entered, `NO_PAGE` at other rows, each of which
      the caller shares; and what `enter` tells of each row.
    """
    hashed, named = _hash(cache, parent, tokens, salt), _named(parent, tokens, salt)
    asked = (page_ids != NO_PAGE) & _reachable(cache, parent, salt)
    found = _find(cache, hashed, named)
    missing = asked & (found == NO_PAGE)

    # Of the missing rows with one hash the first enters.
    row = jnp.arange(len(missing), dtype=jnp.int32)
    alike = jnp.all(hashed[:, None, :] == hashed[None, :, :], axis=2)
    alike &= missing[None, :]
    first = jnp.min(jnp.where(alike, row[None, :], len(missing)), axis=1)
    new = missing & (first == row)
    # The k-th new row of a bucket takes its k-th empty way; -1 where there is none.
    bucket = bucket_of(cache, hashed)
    rivals = (row[None, :] < row[:, None]) & new[None, :]
    rivals &= bucket[:, None] == bucket[None, :]
    rank = jnp.sum(rivals, axis=1, dtype=jnp.int32)
    empty = arrays.take(cache.buckets, bucket, fill=0) == NO_PAGE
    place = jnp.cumsum(empty, axis=1, dtype=jnp.int32) - 1
    way = way_of(empty & (place == rank[:, None]) & new[:, None])
    entered = jnp.where(way >= 0, page_ids, NO_PAGE)
    depth = arrays.take(cache.depth, parent, fill=NO_PAGE) + 1
    tick, idle = cache.tick + 1, cache.idle
    ticks = jnp.broadcast_to(tick, (page_ids.size, 1))
    content = jnp.concatenate([ticks, hashed.astype(jnp.int32), named], axis=1)
    cache = cache._replace(
        buckets=arrays.put(cache.buckets, (bucket, way), entered, "set"),
        depth=arrays.put(cache.depth, entered, depth, "set"),
        content=arrays.put(cache.content, entered, content, "set"),
        num_uses=arrays.put(cache.num_uses, entered, 1, "set"),
        idle=idle._replace(ranked=arrays.put(idle.ranked, entered, False, "set")),
        num_pinned=cache.num_pinned + jnp.sum(entered != NO_PAGE, dtype=jnp.int32),
        tick=tick,
    )
    # What was missing stands now where the first row of its hash entered, if that row
    # holds the same: what a lookup in the new cache would find.
    same = jnp.all(arrays.take(named, first, fill=0) == named, axis=1)
    mine = arrays.take(entered, jnp.where(same, first, NO_PAGE), fill=NO_PAGE)
    cached = jnp.where(asked, jnp.where(missing, mine, found), NO_PAGE)
    return cache, entered, cached


def unsound(cache: Prefixes, pool: Pool) -> Int32[Array, ""]:
    """Counts what breaks the invariant of the cache (I7): 0 on a sound one.

    The parent of a cached page is cached, under the same salt and one level up; its
    hash is that of its content; a lookup of the content finds it, so no two pages have
    the same; the buckets hold nothing but cached pages, each once; and the pool counts
    the pin. Idle are those with no use beside it, in their order, see
    `idle_pages.count_idle_faults`; the parent of a page in use is in use. Looks up
    every page: for tests and debug mode. `invariants.violations`, with
    `pinned` as its pins, checks that all uses are counted.

    Returns:
      Cached pages of which one of these is not so, plus entries in excess, plus faults
      of the order.
    """
    pinned, parent, salt = cache.pinned, cache.parent, cache.salt
    page = jnp.arange(pinned.size, dtype=jnp.int32)
    content = (parent, cache.tokens, salt)
    hashed = _hash(cache, *content)
    found = _find(cache, hashed, _named(*content))
    wrong = (
        ~_reachable(cache, parent, salt)
        | (cache.depth != arrays.take(cache.depth, parent, fill=NO_PAGE) + 1)
        | jnp.any(cache.hash != hashed, axis=1)
        | (found != page)
        | (pool.ref < 1)
        | ((pool.ref > 1) & (arrays.take(pool.ref, parent, fill=2) == 1))
    )
    num_entries = jnp.sum(cache.buckets != NO_PAGE, dtype=jnp.int32)
    num_pinned = jnp.sum(pinned, dtype=jnp.int32)
    return (
        jnp.sum(pinned & wrong, dtype=jnp.int32)
        + jnp.abs(num_entries - num_pinned)
        + jnp.abs(cache.num_pinned - num_pinned)
        + idle_pages.count_idle_faults(
            cache.idle, cache.depth, parent, pinned & (pool.ref == 1)
        )
    )


def bucket_of(cache: Prefixes, hashed: UInt32[Array, "n 2"]) -> Int32[Array, " n"]:
    """Says in which bucket a page stands. The number of buckets is a power of two."""
    return (hashed[:, 0] % len(cache.buckets)).astype(jnp.int32)


def is_cached(cache: Prefixes, ids: Int32[Array, "..."]) -> Bool[Array, "..."]:
    """Says which pages are cached; `NO_PAGE` is not."""
    return arrays.take(cache.depth, ids, fill=NO_PAGE) >= 0


def entry_tick(cache: Prefixes, ids: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Tick at which each page entered, 0 for `NO_PAGE`."""
    return arrays.take(cache.content, (ids, _ENTERED), fill=0)


def hash_of(cache: Prefixes, ids: Int32[Array, " n"]) -> UInt32[Array, "n 2"]:
    """Hash of each cached page, 0 for `NO_PAGE`."""
    return arrays.take(cache.content, ids, fill=0)[:, _HASH].astype(jnp.uint32)


def way_of(chosen: Bool[Array, "n ways"]) -> Int32[Array, " n"]:
    """Says which way of its bucket each row has chosen, -1 for none."""
    way = jnp.argmax(chosen, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(chosen, axis=1), way, -1)


def _hash(cache: Prefixes, parent: Array, tokens: Array, salt: Array) -> Array:
    """Hashes pages of tokens after their parents."""
    before = hash_of(cache, parent)
    first = (parent == NO_PAGE)[:, None]
    return extend_hash(jnp.where(first, empty_hash(salt), before), tokens)


def _reachable(cache: Prefixes, parent: Array, salt: Array) -> Array:
    """Says whether a page may enter: after none, or after one cached under its salt."""
    theirs = arrays.take(cache.content, (parent, _SALT), fill=0)
    known = is_cached(cache, parent) & (theirs.astype(jnp.uint32) == salt)
    return known | (parent == NO_PAGE)


def _named(parent: Array, tokens: Array, salt: Array) -> Int32[Array, "n _"]:
    """What no two cached pages have in common, as it stands in `Prefixes.content`."""
    heads = jnp.stack([parent, salt.astype(jnp.int32)], axis=1)
    return jnp.concatenate([heads, tokens], axis=1)


def _find(cache: Prefixes, hashed: Array, named: Array) -> Array:
    """Finds the page with this content in the bucket that the hash names."""
    ids = arrays.take(cache.buckets, bucket_of(cache, hashed), fill=NO_PAGE)
    theirs = arrays.take(cache.content, ids, fill=0)[:, :, _PARENT:]
    same = jnp.all(theirs == named[:, None, :], axis=2)
    return jnp.max(jnp.where(same, ids, NO_PAGE), axis=1)


def empty_hash(salt: UInt32[Array, " n"]) -> UInt32[Array, "n 2"]:
    """Hashes the empty sequence under each salt."""
    return _scramble(salt[:, None] ^ _LANES[None, :])


def extend_hash(
    before: UInt32[Array, "n 2"], tokens: Int32[Array, "n page_size"]
) -> UInt32[Array, "n 2"]:
    """Hashes sequences that go on by one page.

    Args:
      before: hash of the tokens before the page.
      tokens: tokens of the page, in order.

    Returns:
      The hashes, of 64 bits in two words. They depend on every token, its place and
      all pages before, and are the same on every machine.
    """
    # Every place permutes the token ids in its own way. Then the words can be summed,
    # in any order, where a hash that takes its tokens in turn would need a loop.
    place = jnp.arange(tokens.shape[1], dtype=jnp.uint32) * _GOLDEN
    mask = _scramble(place[:, None] ^ _LANES[None, :])
    words = _scramble(tokens.astype(jnp.uint32)[:, :, None] ^ mask[None, :, :])
    return _scramble(before + jnp.sum(words, axis=1, dtype=jnp.uint32))


def _scramble(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Permutes the 32-bit words so that each bit depends on all.

    Source: the finaliser of Appleby's MurmurHash3 (2011), in the public domain.
    """
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))
