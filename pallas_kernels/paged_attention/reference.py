"""Reference attention over pages in plain JAX, also the implementation on CPUs.

All functions loop over blocks of `BLOCK_SIZE` positions with the online softmax, from
the first to the last block that any row attends to. Other blocks change no bit of a
row. Masked positions may hold any value, NaN included, and pages without a position
that a row attends to are not read.

The range of blocks is known only on the device, and reverse-mode differentiation needs
loops of static length: derivatives are those of loops over all positions of the table.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import devices, online_softmax
from pallas_kernels.online_softmax import ScoreTransform, SoftmaxState
from pallas_kernels.paged_attention import page_blocks
from pallas_kernels.paged_attention.page_blocks import PagedKV, RowView

BLOCK_SIZE = 64
"""Positions that are gathered and summed together."""
MAX_BLOCK_SIZE = 256
"""Block size for few rows, where starting an operation costs more than its work, and
for many rows over positions that all of them attend to, without a mask."""
FEW_SLOTS = 4
FEW_QUERIES = 6
"""Numbers of slots, and of queries of a KV head, up to which a CPU is faster with
matrix-vector products than with matrix products."""
POSITION_TILE = 64
MAX_TILE = 128
"""Rows of one slot that share a gather in `attend_per_tile`; `MAX_TILE` if slots have
on average so many rows. Wide blocks are used with `MAX_TILE` only."""
RUN_QUERIES = 8
LONG_RUN_QUERIES = 32
"""Queries of a KV head in each product of `attend_per_run`, at least: few to decode,
and for many rows of a sequence, where `choose_run_queries` allows it."""
QUERY_MULTIPLE = 8
"""Divisor of the number of queries of a run. CPUs compute exponentials of numbers
beyond the last full vector by other instructions, with other rounding."""
RUN_BATCH = 8
"""Runs that share a loop over blocks."""
MAX_SINGLE_RUNS = 2
"""Number of runs up to which each has its own loop."""

SCORE_DIMS = "shqd,shtd->shqt"
OUTPUT_DIMS = "shqt,shtd->shqd"
"""Products of queries with a block of keys, and of weights with a block of values."""


def differentiable[T](attend: Callable[..., T], *trees: object) -> T:
    """Calls `attend`; its derivatives are those of its form with static loops.

    `attend` takes the trees and `is_bounded`, which is True under differentiation.
    """
    leaves, kind = jax.tree.flatten(trees)
    is_array = [isinstance(x, Array | np.ndarray) for x in leaves]
    arrays = [x for x, mask in zip(leaves, is_array, strict=True) if mask]

    def run(is_bounded: bool, *arrays: Array) -> T:
        array_iterator = iter(arrays)
        mixed = zip(leaves, is_array, strict=True)
        operands = kind.unflatten(
            [next(array_iterator) if mask else x for x, mask in mixed]
        )
        return attend(*operands, is_bounded=is_bounded)

    plain = jax.custom_jvp(functools.partial(run, False))

    @plain.defjvp
    def tangents_of(
        arrays: Sequence[Array], tangents: Sequence[ArrayLike]
    ) -> tuple[T, T]:
        bounded = functools.partial(run, True)
        return plain(*arrays), jax.jvp(bounded, arrays, tangents)[1]

    return plain(*arrays)


def _loop[T](
    begin: Array | int,
    end: Array,
    body: Callable[[Array, T], T],
    carry: T,
    *,
    at_most: int,
    is_bounded: bool,
) -> T:
    """Runs `lax.fori_loop`; if `is_bounded`, a scan over `at_most` trips, static."""
    if not is_bounded:
        return lax.fori_loop(begin, end, body, carry)

    def one(carry: T, step: Array) -> tuple[T, None]:
        index = begin + step
        run = functools.partial(body, index)
        return lax.cond(index < end, run, lambda carry: carry, carry), None

    return lax.scan(one, carry, jnp.arange(at_most, dtype=jnp.int32))[0]


def attend_per_slot(
    q: Float[Array, "rows kv_heads group head_dim"],
    memory: PagedKV,
    view: RowView,
    terms: ScoreTransform,
    *,
    block_size: int = BLOCK_SIZE,
    one_by_one: bool = False,
    is_bounded: bool = False,
) -> tuple[
    Float[Array, "rows kv_heads group value_width"], Float[Array, "rows kv_heads group"]
]:
    """Attends with one gather of pages for each slot; slots have equally many rows.

    If `one_by_one`, queries are multiplied one after another.

    Returns the output and the log-sum-exp.
    """
    rows, kv_heads, group, head_dim = q.shape
    num_slots = view.page_ids.shape[0]
    rows_per_slot = rows // num_slots
    if view.context is not None and rows_per_slot > 1:
        view = view._replace(context=jnp.repeat(view.context, rows_per_slot))
    last = _last_seen(view)
    first = _first_seen(view)
    slopes = None if terms.slopes is None else terms.slopes[None, :, None, :, None]
    sinks = None if terms.sinks is None else terms.sinks[None, :, None, :]
    dtype = page_blocks.product_dtype(q.dtype, memory)
    queries = q.astype(dtype).reshape(
        num_slots, rows_per_slot, kv_heads, group, head_dim
    )
    queries = queries.swapaxes(1, 2).reshape(num_slots, kv_heads, -1, head_dim)
    multiply = _one_by_one if one_by_one else _at_once

    def block(index: Array, state: SoftmaxState) -> SoftmaxState:
        places = index * block_size + jnp.arange(block_size, dtype=jnp.int32)
        mask = _visible(places, view).reshape(num_slots, rows_per_slot, block_size)
        used = jnp.any(mask, axis=1)
        read = page_blocks.read_block(
            memory, view.page_ids, index, used, dtype, clean_keys=is_bounded
        )
        scales = [_expand(x, (2, 3)) for x in (read.k_scales, read.v_scales)]
        products = multiply(SCORE_DIMS, queries, read.k, state.top.dtype)
        products = products.reshape(*state.top.shape, block_size)
        distance = places[None, :] - view.positions[:, None]
        distance = distance.reshape(num_slots, 1, rows_per_slot, 1, block_size)
        scores = online_softmax.transform_scores(
            products, terms, slopes=slopes, distance=distance, k_scales=scales[0]
        )
        weights, state = online_softmax.update_softmax(
            state, scores, mask[:, None, :, None, :]
        )
        weights = online_softmax.scale_weights(weights, scales[1]).astype(dtype)
        weights = weights.reshape(num_slots, kv_heads, -1, block_size)
        out = multiply(OUTPUT_DIMS, weights, read.v, state.out.dtype)
        return state._replace(out=state.out + out.reshape(state.out.shape))

    shape = num_slots, kv_heads, rows_per_slot, group
    num_places = view.page_ids.shape[1] * memory.k.shape[2]
    state = _loop(
        jnp.min(jnp.where(last >= 0, first, jnp.iinfo(jnp.int32).max)) // block_size,
        jnp.max(last) // block_size + 1,
        block,
        online_softmax.init_softmax(shape, memory.output_width, q.dtype),
        at_most=-(-num_places // block_size),
        is_bounded=is_bounded,
    )
    out, lse = online_softmax.normalize_softmax(state, sinks, q.dtype)
    out = out.swapaxes(1, 2)
    lse = lse.swapaxes(1, 2)
    return out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


def attend_per_tile(
    q: Float[Array, "rows kv_heads group head_dim"],
    memory: PagedKV,
    view: RowView,
    terms: ScoreTransform,
    *,
    is_bounded: bool = False,
) -> tuple[
    Float[Array, "rows kv_heads group value_width"], Float[Array, "rows kv_heads group"]
]:
    """Attends with one gather of pages for each tile of rows of a slot: prompt chunks.

    Returns the output and the log-sum-exp.
    """
    assert view.slots is not None
    rows, kv_heads, group, head_dim = q.shape
    size = MAX_TILE if rows >= MAX_TILE * view.page_ids.shape[0] else POSITION_TILE
    is_wide = size == MAX_TILE and view.window is None
    num_places = view.page_ids.shape[1] * memory.k.shape[2]
    starts, num_tiles = _tiles(view.slots, size)
    # Padding lets the last tile read a full one; padded rows have slot -1.
    pad = lambda x, fill: jnp.pad(  # noqa: E731
        x,
        [(0, size)] + [(0, 0)] * (x.ndim - 1),
        constant_values=jnp.asarray(fill, x.dtype),
    )
    q = pad(q, 0)
    slots = pad(view.slots, -1)
    positions = pad(view.positions, -1)
    ancestors = None if view.ancestors is None else pad(view.ancestors, False)
    # Queries of a KV head are on one axis: XLA's loops over two axes are slower.
    slopes = terms.slopes
    sinks = terms.sinks
    slopes = None if slopes is None else jnp.repeat(slopes, size, axis=1)[:, :, None]
    sinks = None if sinks is None else jnp.repeat(sinks, size, axis=1)
    dtype = page_blocks.product_dtype(q.dtype, memory)
    factor = 1.0
    if math.frexp(terms.scale)[0] == 0.5 and dtype != np.float16:
        # Scaling by a power of two is exact, and queries are fewer than products.
        factor = terms.scale
        terms = terms._replace(scale=1.0)

    def tile(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        cut = lambda x: lax.dynamic_slice_in_dim(x, starts[index], size)  # noqa: E731
        slot = slots[starts[index]]
        is_row = cut(slots) == slot
        tile_view = RowView(
            page_ids=lax.dynamic_slice_in_dim(view.page_ids, slot, 1),
            positions=jnp.where(is_row, cut(positions), -1),
            context=None if view.context is None else view.context[slot][None],
            ancestors=None if ancestors is None else cut(ancestors) & is_row[:, None],
            window=view.window,
        )
        last = jnp.max(_last_seen(tile_view))
        # Rows without a key would have positions before the first one.
        first = jnp.min(jnp.where(is_row, _first_seen(tile_view), positions.max()))
        first = jnp.maximum(first, 0)
        queries = cut(q).astype(dtype).transpose(1, 2, 0, 3)
        queries = queries.reshape(kv_heads, group * size, head_dim)
        queries = queries * jnp.asarray(factor, dtype)

        def block(
            width: int, all_see: bool, index: Array, state: SoftmaxState
        ) -> SoftmaxState:
            places = index * width + jnp.arange(width, dtype=jnp.int32)
            mask = None
            used = jnp.ones((1, width), jnp.bool_)
            if not all_see:
                mask = _visible(places, tile_view)
                used = jnp.any(mask, axis=0, keepdims=True)
                mask = jnp.tile(mask, (group, 1))[None]
            read = page_blocks.read_block(
                memory, tile_view.page_ids, index, used, dtype, clean_keys=is_bounded
            )
            scales = [_expand(x, 2) for x in (read.k_scales, read.v_scales)]
            products = jnp.einsum(
                "hqd,htd->hqt",
                queries,
                read.k[0],
                preferred_element_type=state.top.dtype,
            )
            distance = places[None, :] - jnp.tile(tile_view.positions, group)[:, None]
            scores = online_softmax.transform_scores(
                products,
                terms,
                slopes=slopes,
                distance=distance[None],
                k_scales=None if scales[0] is None else scales[0][0],
            )
            weights, state = online_softmax.update_softmax(state, scores, mask)
            v_scales = None if scales[1] is None else scales[1][0]
            weights = online_softmax.scale_weights(weights, v_scales).astype(dtype)
            out = jnp.einsum(
                "hqt,htd->hqd",
                weights,
                read.v[0],
                preferred_element_type=state.out.dtype,
            )
            return state._replace(out=state.out + out)

        shape = kv_heads, group * size
        state = online_softmax.init_softmax(shape, memory.output_width, q.dtype)
        begin = first // BLOCK_SIZE
        end = last // BLOCK_SIZE + 1
        if is_wide:
            # Number of leading positions that each row attends to.
            if tile_view.ancestors is None or tile_view.context is None:
                num_visible = tile_view.positions + 1
            else:
                has_tree = (tile_view.positions >= 0) & (tile_view.context >= 0)
                num_visible = jnp.where(
                    has_tree, tile_view.context, tile_view.positions + 1
                )
            seen_by_all = jnp.min(jnp.where(is_row, num_visible, end * BLOCK_SIZE))
            num_wide = seen_by_all // MAX_BLOCK_SIZE
            wide = functools.partial(block, MAX_BLOCK_SIZE, True)
            max_blocks = num_places // MAX_BLOCK_SIZE
            state = _loop(
                0, num_wide, wide, state, at_most=max_blocks, is_bounded=is_bounded
            )
            begin = num_wide * (MAX_BLOCK_SIZE // BLOCK_SIZE)
        state = _loop(
            begin,
            end,
            functools.partial(block, BLOCK_SIZE, False),
            state,
            at_most=-(-num_places // BLOCK_SIZE),
            is_bounded=is_bounded,
        )
        out, lse = online_softmax.normalize_softmax(state, sinks, q.dtype)
        out, lse = (x.reshape(kv_heads, group, size, *x.shape[2:]) for x in (out, lse))
        results = out.transpose(2, 0, 1, 3), lse.transpose(2, 0, 1)

        def put(buffer: Array, part: Array) -> Array:
            mask = is_row.reshape(size, *(1,) * (buffer.ndim - 1))
            part = jnp.where(mask, part, cut(buffer))
            return lax.dynamic_update_slice_in_dim(buffer, part, starts[index], axis=0)

        return put(carry[0], results[0]), put(carry[1], results[1])

    wide = np.promote_types(q.dtype, np.float32)
    empty = (
        jnp.zeros((*q.shape[:3], memory.output_width), q.dtype),
        jnp.full((rows + size, kv_heads, group), -jnp.inf, wide),
    )
    # A slot's last tile may be partial.
    max_tiles = min(rows, rows // size + view.page_ids.shape[0])
    out, lse = _loop(
        0, num_tiles, tile, empty, at_most=max_tiles, is_bounded=is_bounded
    )
    return out[:rows], lse[:rows]


def attend_per_run(
    q: Float[Array, "rows kv_heads group head_dim"],
    memory: PagedKV,
    view: RowView,
    terms: ScoreTransform,
    *,
    run_queries: int = RUN_QUERIES,
    is_bounded: bool = False,
) -> tuple[
    Float[Array, "rows kv_heads group value_width"], Float[Array, "rows kv_heads group"]
]:
    """Attends with one gather of pages for each run of rows of a slot; batch-invariant.

    A run has at most `run_queries` queries for each KV head, padded with zeros to a
    multiple of `QUERY_MULTIPLE`. Every product is that of one run and one block of
    positions, so the bits of a row do not depend on other rows. Rows and runs beyond
    the last cost no work.

    Returns the output and the log-sum-exp.
    """
    rows, kv_heads, group, head_dim = q.shape
    num_slots = view.page_ids.shape[0]
    slots = view.slots
    if slots is None:
        slots = jnp.arange(rows, dtype=jnp.int32) // (rows // num_slots)
    size = max(1, run_queries // group)
    num_places = view.page_ids.shape[1] * memory.k.shape[2]
    starts, num_runs = _tiles(slots, size)
    max_runs = min(rows, rows // size + num_slots)
    slopes = terms.slopes
    sinks = terms.sinks
    # Queries of a KV head are on one axis: those of the first row, of the second, ...
    num_zeros = -size * group % QUERY_MULTIPLE
    num_queries = size * group + num_zeros

    def pad(x: Array, axis: int) -> Array:
        """Appends zeros to the queries of a run."""
        widths = [(0, num_zeros if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths) if num_zeros else x

    if slopes is not None:
        slopes = pad(jnp.tile(slopes, (1, size))[None, :, :, None], 2)
    if sinks is not None:
        sinks = pad(jnp.tile(sinks, (1, size))[None], 2)
    dtype = page_blocks.product_dtype(q.dtype, memory)
    wide = np.promote_types(q.dtype, np.float32)
    lowest = jnp.asarray(jnp.finfo(wide).min, wide)

    def attend(
        num: int, index: Array, carry: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Attends from runs `num * index` to `num * (index + 1)`."""
        run = num * index + jnp.arange(num, dtype=jnp.int32)
        first_row = starts[jnp.minimum(run, rows - 1)]
        row = first_row[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
        slot = slots[first_row]
        is_row = (row < rows) & (run < num_runs)[:, None]
        row = jnp.minimum(row, rows - 1)
        is_row &= slots[row] == slot[:, None]
        slot = jnp.maximum(slot, 0)
        row = row.reshape(-1)
        run_view = RowView(
            page_ids=view.page_ids[slot],
            positions=jnp.where(is_row.reshape(-1), view.positions[row], -1),
            context=None
            if view.context is None
            else jnp.repeat(view.context[slot], size),
            ancestors=None if view.ancestors is None else view.ancestors[row],
            window=view.window,
        )
        last = jnp.where(is_row.reshape(-1), _last_seen(run_view), -1)
        first = jnp.where(last >= 0, _first_seen(run_view), num_places)
        queries = q[row].astype(dtype).reshape(num, size, kv_heads, group, head_dim)
        queries = queries.swapaxes(1, 2).reshape(num, kv_heads, -1, head_dim)
        queries = pad(queries, 2)

        def block(index: Array, state: SoftmaxState) -> SoftmaxState:
            places = index * BLOCK_SIZE + jnp.arange(BLOCK_SIZE, dtype=jnp.int32)
            mask = _visible(places, run_view).reshape(num, size, BLOCK_SIZE)
            mask &= is_row[:, :, None]
            used = jnp.any(mask, axis=1)
            read = page_blocks.read_block(
                memory, run_view.page_ids, index, used, dtype, clean_keys=is_bounded
            )
            scales = [_expand(x, 2) for x in (read.k_scales, read.v_scales)]
            products = _at_once(SCORE_DIMS, queries, read.k, wide)
            distance = places[None, :] - run_view.positions[:, None]
            distance = distance.reshape(num, 1, size, BLOCK_SIZE)
            scores = online_softmax.transform_scores(
                products,
                terms,
                slopes=slopes,
                distance=pad(jnp.repeat(distance, group, axis=2), 2),
                k_scales=scales[0],
            )
            mask = pad(jnp.repeat(mask, group, axis=1)[:, None], 2)
            scores = jnp.where(mask, scores, lowest)
            top = jnp.maximum(state.top, scores.max(-1))
            # Weights of a query before its first key are finite, and decay to 0.
            weights = jnp.exp(scores - top[..., None])
            decay = jnp.exp(state.top - top)
            total = state.total * decay + _add_halves(weights)
            if scales[1] is not None:  # of masked positions, they may be NaN
                weights = jnp.where(mask, weights, 0)
                weights = online_softmax.scale_weights(weights, scales[1])
            weights = weights.astype(dtype)
            out = _at_once(OUTPUT_DIMS, weights, read.v, wide)
            return SoftmaxState(top, total, state.out * decay[..., None] + out)

        shape = num, kv_heads, num_queries
        state = _loop(
            jnp.min(first) // BLOCK_SIZE,
            jnp.max(last) // BLOCK_SIZE + 1,
            block,
            online_softmax.init_softmax(shape, memory.output_width, q.dtype),
            at_most=-(-num_places // BLOCK_SIZE),
            is_bounded=is_bounded,
        )
        has_keys = state.top > lowest
        state = state._replace(total=jnp.where(has_keys, state.total, 0))
        results = online_softmax.normalize_softmax(state, sinks, q.dtype)
        put = functools.partial(lax.dynamic_update_slice_in_dim, axis=0)
        return (
            put(carry[0], results[0], num * index),
            put(carry[1], results[1], num * index),
        )

    room = -(-max_runs // RUN_BATCH) * RUN_BATCH
    shape = room, kv_heads, num_queries
    results = (
        jnp.zeros((*shape, memory.output_width), q.dtype),
        jnp.full(shape, -jnp.inf, wide),
    )
    is_few = num_runs <= MAX_SINGLE_RUNS
    for num, is_used in ((RUN_BATCH, ~is_few), (1, is_few)):
        results = _loop(
            0,
            jnp.where(is_used, (num_runs + num - 1) // num, 0),
            functools.partial(attend, num),
            results,
            at_most=-(-max_runs // num),
            is_bounded=is_bounded,
        )
    # Run of each row, and place of the row in it.
    row = jnp.arange(rows, dtype=jnp.int32)
    is_start = jnp.arange(max_runs, dtype=jnp.int32) < num_runs
    before = is_start[None, :] & (starts[None, :max_runs] <= row[:, None])
    run = jnp.maximum(jnp.sum(before, axis=1, dtype=jnp.int32) - 1, 0)
    place = jnp.clip(row - starts[run], 0, size - 1)
    out, lse = (
        x[:, :, : size * group].reshape(*x.shape[:2], size, group, *x.shape[3:])
        for x in results
    )
    out, lse = (x[run, :, place] for x in (out, lse))
    is_row = (slots >= 0)[:, None, None]
    return jnp.where(is_row[..., None], out, 0), jnp.where(is_row, lse, -jnp.inf)


def choose_run_queries(
    q: Float[Array, "rows q_heads head_dim"] | jax.ShapeDtypeStruct, memory: PagedKV
) -> int:
    """Returns `LONG_RUN_QUERIES` if a query has the same bits as with `RUN_QUERIES`.

    Products are the only part of `attend_per_run` whose bits may depend on the number
    of queries: XLA chooses the order of their sums by shape, type and processor. So
    products of random numbers are compared, of several runs and of one. Programs are
    compiled in the first call for some sizes and types.

    Args:
      q: queries; only their heads, width and dtype matter.
      memory: keys and values; only their heads, widths and dtypes matter.

    Returns:
      `LONG_RUN_QUERIES`, or `RUN_QUERIES` if bits differ, if runs of both numbers have
      one row, or if the program is for another platform than JAX's default.
    """
    kv_heads = memory.k.shape[1]
    group = q.shape[1] // kv_heads
    short, long = (
        -(-max(1, x // group) * group // QUERY_MULTIPLE) * QUERY_MULTIPLE
        for x in (RUN_QUERIES, LONG_RUN_QUERIES)
    )
    is_present = devices.current_target().platform == jax.default_backend()
    if long % short or long == short or not is_present:
        return RUN_QUERIES
    dtype = page_blocks.product_dtype(q.dtype, memory)
    wide = np.promote_types(q.dtype, np.float32)
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=(RUN_BATCH, kv_heads, *shape)).astype(dtype)

    def multiply(dims: str, queries: np.ndarray, block: np.ndarray, size: int) -> bytes:
        parts = [
            _compiled_at_once(dims, *jax.device_put((part, block)), wide)
            for part in np.split(queries, long // size, axis=2)
        ]
        return np.concatenate(jax.device_get(parts), axis=2).tobytes()

    with jax.ensure_compile_time_eval():
        for dims, width, block in (
            (SCORE_DIMS, q.shape[2], draw(BLOCK_SIZE, q.shape[2])),
            (OUTPUT_DIMS, BLOCK_SIZE, draw(BLOCK_SIZE, memory.output_width)),
        ):
            queries = draw(long, width)
            expected = multiply(dims, queries, block, short)
            several = multiply(dims, queries, block, long)
            one = multiply(dims, queries[:1], block[:1], long)
            if several != expected or not expected.startswith(one):
                return RUN_QUERIES
    return LONG_RUN_QUERIES


def _add_halves(x: Float[Array, "*lead places"]) -> Float[Array, "*lead"]:
    """Sums the last axis, of a power of two, in an order that no shape changes."""
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


def _at_once(dims: str, queries: Array, block: Array, dtype: np.dtype) -> Array:
    return jnp.einsum(dims, queries, block, preferred_element_type=dtype)


_compiled_at_once = jax.jit(_at_once, static_argnums=(0, 3))


def _one_by_one(dims: str, queries: Array, block: Array, dtype: np.dtype) -> Array:
    """Multiplies as `_at_once`, by matrix-vector products, which pack no operands."""
    dims = dims.replace("q", "")
    products = [
        _at_once(dims, queries[:, :, i], block, dtype) for i in range(queries.shape[2])
    ]
    return jnp.stack(products, axis=2)


def _tiles(
    slots: Int[Array, " rows"], size: int
) -> tuple[Int[Array, " rows"], Int[Array, ""]]:
    """Returns the first rows of the tiles, in order, and the number of tiles."""
    rows = slots.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)
    previous = jnp.concatenate([jnp.full((1,), -1, slots.dtype), slots[:-1]])
    begin = lax.cummax(jnp.where(slots != previous, row, 0))
    # Not by positions: rows before the first with a key may be padding rows.
    starts = (slots >= 0) & ((row - begin) % size == 0)
    place = jnp.where(starts, jnp.cumsum(starts, dtype=jnp.int32) - 1, rows)
    order = jnp.zeros((rows,), jnp.int32).at[place].set(row, mode="drop")
    return order, jnp.sum(starts, dtype=jnp.int32)


def _last_seen(view: RowView) -> Int[Array, " rows"]:
    """Returns the last position each row may attend to; -1 for padding rows."""
    if view.ancestors is None or view.context is None:
        return view.positions
    columns = jnp.arange(1, view.ancestors.shape[1] + 1, dtype=jnp.int32)
    kin = jnp.max(jnp.where(view.ancestors, columns, 0), axis=1)
    is_kin = (view.positions >= 0) & (view.context >= 0)
    return jnp.where(is_kin, view.context - 1 + kin, view.positions)


def _first_seen(view: RowView) -> Int[Array, " rows"]:
    if view.window is None:
        return jnp.zeros_like(view.positions)
    return jnp.maximum(view.positions - view.window + 1, 0)


def _visible(
    places: Int[Array, " places"], view: RowView
) -> Bool[Array, "rows places"]:
    """Returns the mask of each row's positions; `context` may have one entry."""
    place = places[None, :]
    position = view.positions[:, None]
    mask = place <= position
    if view.ancestors is not None and view.context is not None:
        context = view.context[:, None]
        column = place - context
        inside = (column >= 0) & (column < view.ancestors.shape[1])
        column = jnp.broadcast_to(column, (position.shape[0], places.shape[0]))
        kin = jnp.take_along_axis(view.ancestors, jnp.where(inside, column, 0), axis=1)
        kin = ((column < 0) | (kin & inside)) & (position >= 0)
        mask = jnp.where(context >= 0, kin, mask)
    if view.window is not None:
        mask &= place > position - view.window
    return mask


def _expand(x: Array | None, axes: int | tuple[int, ...]) -> Array | None:
    return None if x is None else jnp.expand_dims(x, axes)
