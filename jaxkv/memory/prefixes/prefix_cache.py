"""The prefix cache: full pages that later requests find by their tokens.

An entry is a page. Its tokens and the page before it (its parent) are stored under its
page id, and a cached page is pinned: it has one more use in the pool. It therefore
outlives the sequences that used it, until it is evicted.

A page is found by a hash of its tokens and of all tokens before, in buckets of
`BUCKET_SIZE` pages. The hash only selects the bucket: a hit also compares tokens,
parent and salt, so hash collisions cannot give a wrong hit; an adversary could at most
fill one bucket. The parent was found in the same way, so equal tokens and parents mean
equal sequences.

The parent of a cached page is always cached (I7, see `count_prefix_faults`): a page
enters after its parent, and `prefix_eviction` evicts leaves first. A sequence that uses
a cached page uses all pages before it. The cost of an operation depends on the number
of pages in its arguments, never on the size of the pool.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from jaxkv import arrays, validation
from jaxkv.memory import page_pool
from jaxkv.memory.page_pool import NO_PAGE, Pool
from jaxkv.memory.prefixes import idle_pages
from jaxkv.memory.prefixes.idle_pages import IdlePages

BUCKET_SIZE = 8
"""Pages in a bucket. There are two to four buckets for each page: if all pages are
cached and each new page replaces an evicted one, fewer than one in ten million finds
its bucket full."""


_LANES = np.array([0x243F6A88, 0x85A308D3], np.uint32)
"""Constants that make the two words of a hash differ: binary digits of pi."""
_GOLDEN = np.uint32(0x9E3779B9)
"""Multiplier of token places in the hash; odd, so its multiples repeat after 2**32."""

_ENTERED = 0
_HASH = slice(1, 3)
_PARENT = 3
_SALT = 4
"""Columns of `PrefixCache.content`; the tokens are the last ones."""


class PrefixCache(NamedTuple):
    """The prefix cache: cached pages, and the hash table that finds them."""

    buckets: Int32[Array, "buckets ways"]
    """Cached pages by the low bits of their hash; `NO_PAGE` where empty."""
    depth: Int32[Array, " pages"]
    """Number of pages before it; `NO_PAGE` if the page is not cached, in which case the
    fields below are undefined."""
    content: Int32[Array, "pages page_size_and_5"]
    """Values fixed from entry to eviction, in one array since they are written
    together: tick of entry, two words of hash, parent, salt, tokens (see the
    properties). Words of uint32 are stored as int32 with the same bits."""
    last_used: Int32[Array, " pages"]
    """Tick at which a sequence last released the page, if any has."""
    num_uses: Int32[Array, " pages"]
    """Number of sequences that started on the page, filled it, or matched it later."""
    idle: IdlePages
    """Cached pages that no sequence uses, in the order of eviction."""
    num_pinned: Int32[Array, ""]
    """Number of cached pages."""
    tick: Int32[Array, ""]
    """Counter of entries and releases, modulo 2**32."""

    # For tests and debug mode: these properties read every page.
    @property
    def pinned(self) -> Bool[Array, " pages"]:
        """True for cached pages."""
        return self.depth >= 0

    @property
    def entered(self) -> Int32[Array, " pages"]:
        """Tick of entry."""
        return self.content[..., _ENTERED]

    @property
    def hash(self) -> UInt32[Array, "pages 2"]:
        """Hash of the salt and of all tokens up to the end of the page."""
        return self.content[..., _HASH].astype("uint32")

    @property
    def parent(self) -> Int32[Array, " pages"]:
        """Cached page of the preceding tokens; `NO_PAGE` on a sequence's first page."""
        return self.content[..., _PARENT]

    @property
    def salt(self) -> UInt32[Array, " pages"]:
        """Salt that separates sequences with the same tokens, such as a tenant's."""
        return self.content[..., _SALT].astype("uint32")

    @property
    def tokens(self) -> Int32[Array, "pages page_size"]:
        """Tokens whose K and V the page holds."""
        return self.content[..., _SALT + 1 :]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.content.shape[-1] - _SALT - 1


@validation.checks_numbers()
def make_prefix_cache(num_pages: int, page_size: int) -> PrefixCache:
    """Makes an empty prefix cache of 4 (page_size + 26 to 43) bytes per page.

    Raises:
      ValueError: a size is not an integer of at least 1.
    """
    num_buckets = 2 << (num_pages - 1).bit_length()
    return PrefixCache(
        buckets=jnp.full((num_buckets, BUCKET_SIZE), NO_PAGE, jnp.int32),
        depth=jnp.full(num_pages, NO_PAGE, jnp.int32),
        content=jnp.zeros((num_pages, _SALT + 1 + page_size), jnp.int32),
        last_used=jnp.zeros(num_pages, jnp.int32),
        num_uses=jnp.zeros(num_pages, jnp.int32),
        idle=idle_pages.make_idle_pages(num_pages),
        num_pinned=jnp.zeros((), jnp.int32),
        tick=jnp.zeros((), jnp.int32),
    )


def lookup(
    cache: PrefixCache,
    parent: Int32[Array, " n"],
    tokens: Int32[Array, "n page_size"],
    salt: UInt32[Array, " n"],
) -> Int32[Array, " n"]:
    """Returns the cached page with these tokens after a given page, or `NO_PAGE`.

    `parent` is the cached page of the preceding tokens, `NO_PAGE` at the start of a
    sequence. A page is found only under the salt of its entry.
    """
    hashed = _hash(cache, parent, tokens, salt)
    return _find(cache, hashed, _content_key(parent, tokens, salt))


def match(
    cache: PrefixCache,
    tokens: Int32[Array, "n max_length"],
    num_tokens: Int32[Array, " n"],
    salt: UInt32[Array, " n"],
    wanted: Bool[Array, " n"],
) -> Int32[Array, "n pages_per_slot"]:
    """Returns the longest cached prefix of every sequence, in full pages.

    At least one token remains to be computed, since its logits give the next token.
    Columns are looked up in turn, for all sequences at once, until no sequence matches
    more. If no sequence is `wanted`, no lookup runs.

    Args:
      cache: the prefix cache.
      tokens: tokens of each sequence, arbitrary beyond `num_tokens`.
      num_tokens: number of known tokens of each sequence, in [0, max_length].
      salt: salt of each sequence.
      wanted: True for sequences to match; no page is matched for the remaining ones.

    Returns:
      The page ids in token order, padded with `NO_PAGE` to the width of a table of
      `max_length` places. No use is added: call `page_pool.share` in the same step.
    """
    page_size = cache.page_size
    rows, max_length = tokens.shape
    ids = jnp.full((rows, -(-max_length // page_size)), NO_PAGE, jnp.int32)
    if max_length <= page_size:  # one token is left, and no full page
        return ids
    num_columns = jnp.where(wanted, (num_tokens - 1) // page_size, 0)

    def growing(carry: tuple[Array, ...]) -> Array:
        column, num_columns, _, _ = carry
        return jnp.any(column < num_columns)

    def grow(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        column, num_columns, last, ids = carry
        page = lax.dynamic_slice_in_dim(tokens, column * page_size, page_size, axis=1)
        page_ids = jnp.where(
            column < num_columns, lookup(cache, last, page, salt), NO_PAGE
        )
        num_columns = jnp.where(page_ids == NO_PAGE, 0, num_columns)
        ids = lax.dynamic_update_slice_in_dim(ids, page_ids[:, None], column, axis=1)
        return column + 1, num_columns, page_ids, ids

    first = (
        jnp.zeros((), jnp.int32),
        num_columns,
        jnp.full(rows, NO_PAGE, jnp.int32),
        ids,
    )
    return lax.while_loop(growing, grow, first)[3]


def insert(
    cache: PrefixCache,
    pool: Pool,
    page_ids: Int32[Array, " n"],
    parent: Int32[Array, " n"],
    tokens: Int32[Array, "n page_size"],
    salt: UInt32[Array, " n"],
) -> tuple[PrefixCache, Pool, Int32[Array, " n"]]:
    """Caches pages that have just been filled, unless their content is cached already.

    Of several rows with the same content the first one enters. A row does not enter if
    its parent is not cached under its salt, if its bucket is full, or if an earlier row
    happens to have the same hash; its page then cannot be found later.

    Args:
      cache: the prefix cache.
      pool: the pool that holds the pages.
      page_ids: page that each row has filled, used by the row and not cached, or
        `NO_PAGE`.
      parent: page of the preceding tokens, used by the row too; `NO_PAGE` at the start
        of a sequence.
      tokens: tokens of the page, all accepted.
      salt: salt of each row's sequence.

    Returns:
      The new cache and pool, in which entered pages have one more use; and for each row
      the cached page with its content: its own page, if that entered; another page,
      which the caller should map instead, see `prefix_eviction.mark_used`; or
      `NO_PAGE`, if none is cached.
    """
    cache, entered, cached = insert_unpinned(cache, page_ids, parent, tokens, salt)
    return cache, page_pool.share(pool, entered), cached


def insert_unpinned(
    cache: PrefixCache,
    page_ids: Int32[Array, " n"],
    parent: Int32[Array, " n"],
    tokens: Int32[Array, "n page_size"],
    salt: UInt32[Array, " n"],
) -> tuple[PrefixCache, Int32[Array, " n"], Int32[Array, " n"]]:
    """Enters pages as `insert` does, without the change of the pool's counts.

    Returns:
      The new cache; the pages that have entered, `NO_PAGE` at other rows, each of which
      the caller shares; and the cached page of each row, as in `insert`.
    """
    hashed = _hash(cache, parent, tokens, salt)
    key = _content_key(parent, tokens, salt)
    is_asked = (page_ids != NO_PAGE) & _can_enter(cache, parent, salt)
    cached_pages = _find(cache, hashed, key)
    missing = is_asked & (cached_pages == NO_PAGE)

    # Of the missing rows with one hash the first one enters.
    row = jnp.arange(len(missing), dtype=jnp.int32)
    same_hash = jnp.all(hashed[:, None, :] == hashed[None, :, :], axis=2)
    same_hash &= missing[None, :]
    first = jnp.min(jnp.where(same_hash, row[None, :], len(missing)), axis=1)
    new = missing & (first == row)
    # New row k of a bucket takes its empty way k; -1 if there is none.
    bucket = bucket_of(cache, hashed)
    rivals = (row[None, :] < row[:, None]) & new[None, :]
    rivals &= bucket[:, None] == bucket[None, :]
    rank = jnp.sum(rivals, axis=1, dtype=jnp.int32)
    empty = arrays.take(cache.buckets, bucket, fill=0) == NO_PAGE
    place = jnp.cumsum(empty, axis=1, dtype=jnp.int32) - 1
    bucket_way = way_of(empty & (place == rank[:, None]) & new[:, None])
    entered = jnp.where(bucket_way >= 0, page_ids, NO_PAGE)
    depth = arrays.take(cache.depth, parent, fill=NO_PAGE) + 1
    tick = cache.tick + 1
    idle = cache.idle
    ticks = jnp.broadcast_to(tick, (page_ids.size, 1))
    content = jnp.concatenate([ticks, hashed.astype(jnp.int32), key], axis=1)
    cache = cache._replace(
        buckets=arrays.put(cache.buckets, (bucket, bucket_way), entered, "set"),
        depth=arrays.put(cache.depth, entered, depth, "set"),
        content=arrays.put(cache.content, entered, content, "set"),
        num_uses=arrays.put(cache.num_uses, entered, 1, "set"),
        idle=idle._replace(ranked=arrays.put(idle.ranked, entered, False, "set")),
        num_pinned=cache.num_pinned + jnp.sum(entered != NO_PAGE, dtype=jnp.int32),
        tick=tick,
    )
    # A missing row finds its content where the first row of its hash entered, if that
    # row has the same content, as a lookup in the new cache would.
    same = jnp.all(arrays.take(key, first, fill=0) == key, axis=1)
    new_page = arrays.take(entered, jnp.where(same, first, NO_PAGE), fill=NO_PAGE)
    cached = jnp.where(is_asked, jnp.where(missing, new_page, cached_pages), NO_PAGE)
    return cache, entered, cached


def replace_tokens(
    cache: PrefixCache, tokens: Int32[Array, "pages page_size"]
) -> PrefixCache:
    """Replaces the tokens of all cached pages, and the hashes that find them.

    Pages that are not cached lose their former content. The order of eviction and all
    counts stay. Reads every page, level by level.

    Args:
      cache: the prefix cache.
      tokens: tokens of each page; pages of equal parents must differ as before.

    Raises:
      ValueError: a bucket is full, so that a page could not be found.
    """
    depth = np.asarray(cache.depth)
    content = np.where(depth[:, None] >= 0, np.asarray(cache.content), 0)
    new_tokens = np.where(depth[:, None] >= 0, np.asarray(tokens), 0)
    content[:, _SALT + 1 :] = new_tokens
    parent = content[:, _PARENT]
    for level in range(depth.max(initial=-1) + 1):
        pages = np.flatnonzero(depth == level)
        hashed = np.asarray(
            _hash(
                cache._replace(content=jnp.asarray(content)),
                jnp.asarray(parent[pages]),
                jnp.asarray(new_tokens[pages]),
                jnp.asarray(content[pages, _SALT]).astype(jnp.uint32),
            )
        )
        content[pages, _HASH] = hashed.astype(np.int32)
    buckets = np.full(cache.buckets.shape, NO_PAGE, np.int32)
    pages = np.flatnonzero(depth >= 0)
    words = jnp.asarray(content[pages, _HASH]).astype(jnp.uint32)
    for page, bucket in zip(pages, np.asarray(bucket_of(cache, words)), strict=True):
        empty = np.flatnonzero(buckets[bucket] == NO_PAGE)
        if not empty.size:
            raise ValueError(f"bucket {bucket} has more than {BUCKET_SIZE} pages")
        buckets[bucket, empty[0]] = page
    return cache._replace(
        content=jnp.asarray(content, jnp.int32), buckets=jnp.asarray(buckets)
    )


def count_prefix_faults(cache: PrefixCache, pool: Pool) -> Int32[Array, ""]:
    """Counts violations of the invariant of the prefix cache (I7); 0 if it is sound.

    The parent of a cached page is cached under the same salt at one less depth; the
    hash of a page is that of its content; a lookup of its content finds it, so no two
    pages have the same content; the buckets hold the cached pages only, each once; and
    the pool counts the pin. The idle pages are those without a further use, in order,
    see `idle_pages.count_idle_faults`; the parent of a page in use is in use. Looks up
    every page: for tests and debug mode. `invariants.violations`, with `pinned` as its
    pins, checks the counts of uses.

    Returns:
      Number of cached pages that violate one of these, plus surplus entries, plus
      faults of the order.
    """
    pinned = cache.pinned
    parent = cache.parent
    salt = cache.salt
    page = jnp.arange(pinned.size, dtype=jnp.int32)
    content = (parent, cache.tokens, salt)
    hashed = _hash(cache, *content)
    cached_pages = _find(cache, hashed, _content_key(*content))
    wrong = (
        ~_can_enter(cache, parent, salt)
        | (cache.depth != arrays.take(cache.depth, parent, fill=NO_PAGE) + 1)
        | jnp.any(cache.hash != hashed, axis=1)
        | (cached_pages != page)
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


def bucket_of(cache: PrefixCache, hashed: UInt32[Array, "n 2"]) -> Int32[Array, " n"]:
    """Returns the bucket of each hash. The number of buckets is a power of two."""
    return (hashed[:, 0] % len(cache.buckets)).astype(jnp.int32)


def is_cached(cache: PrefixCache, ids: Int32[Array, "..."]) -> Bool[Array, "..."]:
    """Returns True for cached pages, False for `NO_PAGE`."""
    return arrays.take(cache.depth, ids, fill=NO_PAGE) >= 0


def entry_tick(cache: PrefixCache, ids: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Returns the tick at which each page entered, 0 for `NO_PAGE`."""
    return arrays.take(cache.content, (ids, _ENTERED), fill=0)


def hash_of(cache: PrefixCache, ids: Int32[Array, " n"]) -> UInt32[Array, "n 2"]:
    """Returns the hash of each cached page, 0 for `NO_PAGE`."""
    return arrays.take(cache.content, ids, fill=0)[:, _HASH].astype(jnp.uint32)


def way_of(chosen: Bool[Array, "n ways"]) -> Int32[Array, " n"]:
    """Returns the chosen way of each row's bucket, -1 if none is chosen."""
    column = jnp.argmax(chosen, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(chosen, axis=1), column, -1)


def _hash(cache: PrefixCache, parent: Array, tokens: Array, salt: Array) -> Array:
    """Hashes pages of tokens after their parents."""
    before = hash_of(cache, parent)
    first = (parent == NO_PAGE)[:, None]
    return extend_hash(jnp.where(first, empty_hash(salt), before), tokens)


def _can_enter(cache: PrefixCache, parent: Array, salt: Array) -> Array:
    """Returns True if the parent is `NO_PAGE` or is cached under the same salt."""
    parent_salt = arrays.take(cache.content, (parent, _SALT), fill=0)
    has_parent = is_cached(cache, parent) & (parent_salt.astype(jnp.uint32) == salt)
    return has_parent | (parent == NO_PAGE)


def _content_key(parent: Array, tokens: Array, salt: Array) -> Int32[Array, "n _"]:
    """Returns the unique key of a page, as columns of `PrefixCache.content`."""
    heads = jnp.stack([parent, salt.astype(jnp.int32)], axis=1)
    return jnp.concatenate([heads, tokens], axis=1)


def _find(cache: PrefixCache, hashed: Array, key: Array) -> Array:
    """Returns the page with this content in the bucket of the hash."""
    ids = arrays.take(cache.buckets, bucket_of(cache, hashed), fill=NO_PAGE)
    keys = arrays.take(cache.content, ids, fill=0)[:, :, _PARENT:]
    same = jnp.all(keys == key[:, None, :], axis=2)
    return jnp.max(jnp.where(same, ids, NO_PAGE), axis=1)


def empty_hash(salt: UInt32[Array, " n"]) -> UInt32[Array, "n 2"]:
    """Hashes the empty sequence under each salt."""
    return _scramble(salt[:, None] ^ _LANES[None, :])


def extend_hash(
    before: UInt32[Array, "n 2"], tokens: Int32[Array, "n page_size"]
) -> UInt32[Array, "n 2"]:
    """Hashes sequences that continue by one page.

    Args:
      before: hash of the tokens before the page.
      tokens: tokens of the page, in order.

    Returns:
      Hashes of 64 bits in two words. They depend on every token, its place and all
      pages before, and are equal on every machine.
    """
    # Each place permutes the token ids differently, so that the words can be summed in
    # any order; a sequential hash of the tokens would need a loop.
    place = jnp.arange(tokens.shape[1], dtype=jnp.uint32) * _GOLDEN
    mask = _scramble(place[:, None] ^ _LANES[None, :])
    words = _scramble(tokens.astype(jnp.uint32)[:, :, None] ^ mask[None, :, :])
    return _scramble(before + jnp.sum(words, axis=1, dtype=jnp.uint32))


def _scramble(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Permutes 32-bit words so that each output bit depends on all input bits.

    Source: the finaliser of Appleby's MurmurHash3 (2011), in the public domain.
    """
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))
