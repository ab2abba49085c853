"""Decoding without a scheduler, for research code: a cache, prefill and one step.

The caller chooses the sequences of each call; pages are allocated from a shared pool as
in the engine. All functions are pure and work inside the caller's `jit`, `vmap` and
`scan`. They are differentiable if K and V have a floating type of the model and
attention uses the reference implementation: on a CPU, and on a GPU with pages in
float32.
"""

import functools
from typing import NamedTuple, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int32, PyTree

from jaxkv import arrays, memory, validation
from jaxkv.memory import (
    NO_PAGE,
    Pages,
    Pool,
    Rows,
    Table,
    advance_lengths,
    gather_pages,
    make_pool,
    make_table,
    scatter_pages,
)
from jaxkv.models import Forward, ForwardResult, ModelConfig, Params
from pallas_kernels import devices


class Cache(NamedTuple):
    """The KV cache of several sequences, one per slot, in pages of a shared pool."""

    pages: Pages
    pool: Pool
    table: Table


def init_cache(pages: Pages, *, max_slots: int, max_length: int) -> Cache:
    """Makes an empty KV cache for `max_slots` sequences of `max_length` tokens at most.

    Programs that use the cache should donate it. `pages` are the K and V arrays of a
    model.

    Raises:
      ValueError: `max_slots` or `max_length` is below 1, or the model has recurrent
        layers, whose states only an engine keeps, or windows that release pages.
    """
    if pages.states is not None:
        raise ValueError(
            "models with recurrent layers must be served by an engine, see "
            "engine.run_steps: a cache of pages alone has no states to fork"
        )
    if pages.windowed is not None:
        raise ValueError("release_window_pages=True must be False without an engine")
    max_length = validation.integer("max_length", max_length, low=1)
    return Cache(
        pages,
        make_pool(pages.num_pages),
        make_table(max_slots, -(-max_length // pages.page_size)),
    )


def prefill(
    params: Params,
    cache: Cache,
    tokens: Int32[Array, "slots width"],
    lengths: Int32[Array, " slots"],
    *,
    forward: Forward,
) -> tuple[Float[Array, "slots vocab"], Cache, Bool[Array, ""]]:
    """Appends several tokens to each slot.

    Args:
      params: parameters of the model.
      cache: the cache.
      tokens: tokens to append, with arbitrary padding.
      lengths: number of tokens of each slot, in [0, width]; 0 skips the slot.
      forward: the model.

    Returns:
      Logits of each slot's last token, undefined for skipped slots; the cache; and True
      if there were enough pages and places. If False, no slot was changed, except for
      the content of places beyond its length.

    Raises:
      ValueError: the cache is longer than the model's learned positions (longer than
        rotary positions gives a warning at compile time), or a gradient is taken
        through 8-bit pages or through the GPU's kernels for 16-bit pages.
    """
    _check_length(cache, forward)
    params, cache, tokens, lengths = arrays.to_jax_arrays(
        (params, cache, tokens, lengths)
    )
    slots, width = tokens.shape
    cache, fed, enough = _reserve(cache, lengths)
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    used = place < fed[:, None]
    # Rows of a slot must be contiguous; padding may separate slots.
    slot = jnp.arange(slots, dtype=jnp.int32)[:, None]
    rows = Rows(
        token=tokens.reshape(-1),
        position=jnp.where(used, cache.table.length[:, None] + place, -1).reshape(-1),
        slot=jnp.where(used, slot, -1).reshape(-1),
        page_ids=cache.table.page_ids,
        logit_rows=jnp.where(fed > 0, slot[:, 0] * width + fed - 1, -1),
    )
    logits, cache = _feed(params, cache, rows, fed, forward)
    return logits, cache, enough


def decode_step(
    params: Params,
    cache: Cache,
    tokens: Int32[Array, " slots"],
    *,
    forward: Forward,
    active: Bool[Array, " slots"] | None = None,
) -> tuple[Float[Array, "slots vocab"], Cache, Bool[Array, ""]]:
    """Appends one token to each slot, or to each active slot.

    The remaining arguments, results and errors are those of `prefill`.
    """
    _check_length(cache, forward)
    params, cache, tokens, active = arrays.to_jax_arrays(
        (params, cache, tokens, active)
    )
    slots = tokens.shape[0]
    want = jnp.ones((slots,), jnp.int32) if active is None else active.astype(jnp.int32)
    cache, fed, enough = _reserve(cache, want)
    rows = Rows(
        token=tokens,
        position=jnp.where(fed > 0, cache.table.length, -1),
        slot=None,
        page_ids=cache.table.page_ids,
        logit_rows=jnp.where(fed > 0, jnp.arange(slots, dtype=jnp.int32), -1),
    )
    logits, cache = _feed(params, cache, rows, fed, forward)
    return logits, cache, enough


def _check_length(cache: Cache, forward: Forward) -> None:
    """Checks the smallest `max_length` from which this cache can have been made."""
    config = getattr(forward, "config", None)
    if isinstance(config, ModelConfig):
        full_pages = cache.table.page_ids.shape[1] - 1
        config.check_length(full_pages * cache.pages.page_size + 1, "cache_length")


def _reserve(
    cache: Cache, want: Int32[Array, " slots"]
) -> tuple[Cache, Int32[Array, " slots"], Bool[Array, ""]]:
    pool, table, copies, enough = memory.reserve(
        cache.pool,
        cache.table,
        jnp.where(want > 0, cache.table.length + want, 0),
        want,
        page_size=cache.pages.page_size,
        max_new_pages=cache.table.page_ids.shape[1],
    )
    # The caller may have forked slots.
    pages = _copy(cache.pages, copies.source, copies.target)
    return Cache(pages, pool, table), jnp.where(enough, want, 0), enough


@jax.custom_jvp
def _copy(
    pages: Pages, source: Int32[Array, " n"], target: Int32[Array, " n"]
) -> Pages:
    """Copies pages; the loop in `kv_pages.copy` has no reverse derivative."""
    return memory.copy(pages, source, target)


@_copy.defjvp
def _copy_tangents(primals: tuple, tangents: tuple) -> tuple[Pages, PyTree[ArrayLike]]:
    """Copies the tangents of the same pages."""
    pages, source, target = primals
    placed = jnp.where(source >= 0, target, NO_PAGE)

    def one_leaf(tangent: Array | np.ndarray) -> Array | np.ndarray:
        if tangent.dtype == jax.dtypes.float0:
            return tangent
        return scatter_pages(tangent, placed, gather_pages(tangent, source))

    return _copy(pages, source, target), jax.tree.map(one_leaf, tangents[0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _without_gradient(
    forward: Forward, why: str, params: Params, pages: Pages, rows: Rows
) -> ForwardResult:
    return forward(params, pages, rows)


@_without_gradient.defjvp
def _refuse_gradient(
    forward: Forward, why: str, primals: tuple, tangents: tuple
) -> Never:
    raise ValueError(why)


def _feed(
    params: Params,
    cache: Cache,
    rows: Rows,
    fed: Int32[Array, " slots"],
    forward: Forward,
) -> tuple[Array, Cache]:
    kv_dtype = cache.pages.layout.kv_dtype
    dtype = cache.pages.dtype
    why = None
    if kv_dtype != "model":
        why = (
            f"{kv_dtype=} has no gradient; kv_dtype must be 'model', "
            "K and V in the model's type"
        )
    elif devices.current_target().platform == "gpu" and dtype.itemsize < 4:
        why = (
            f"dtype={dtype.name!r} of K and V must be 'float32' for a gradient on a "
            "GPU, whose kernels of 16 bits have none"
        )
    if why is not None:
        forward = functools.partial(_without_gradient, forward, why)
    result = forward(params, cache.pages, rows)
    table = advance_lengths(cache.table, fed)
    return result.logits, cache._replace(pages=result.pages, table=table)
