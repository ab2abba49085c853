"""Attention over scattered pages, and reference loops in float64."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import (
    AttentionImplementation,
    AttentionState,
    KernelTilings,
    PagedKV,
    RowView,
    ScoreTransform,
    make_plan,
    paged_attention,
)


def attend_arrays(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    page_ids: jax.Array,
    positions: jax.Array,
    slots: jax.Array | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: jax.Array | None = None,
    sinks: jax.Array | None = None,
    window: int | None = None,
    context: jax.Array | None = None,
    ancestors: jax.Array | None = None,
    numerics: Literal["fast", "reproducible"] = "fast",
    implementation: AttentionImplementation | None = None,
    tiling: KernelTilings | None = None,
    long_runs: bool = False,
    function: Callable[..., AttentionState] = paged_attention,
    **pages: Any,
) -> AttentionState:
    """Calls `paged_attention`, or `function`, with the arrays of a `Case`."""
    kv = PagedKV(k_pages, v_pages, **pages)
    rows = RowView(page_ids, positions, slots, context, ancestors, window)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    scoring = ScoreTransform(scale, softcap, alibi, sinks)
    plan = None
    if tiling is not None:
        plan = make_plan(
            q,
            k_pages,
            rows,
            value_width=kv.output_width,
            implementation=implementation,
            tiling=tiling,
        )
    return function(
        q,
        kv,
        rows,
        scoring,
        plan=plan,
        numerics=numerics,
        long_runs=long_runs,
        implementation=implementation,
    )


attend = jax.jit(
    attend_arrays,
    static_argnames=(
        "scale",
        "window",
        "softcap",
        "numerics",
        "long_runs",
        "implementation",
    ),
)


NOWHERE = (-1, -7, 10**6, 2**31 - 1)
"""Invalid page ids."""


class Case(NamedTuple):
    """Arguments of the attention function, in its order, as NumPy arrays."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray | None


def oracle(
    case: Case,
    *,
    context: np.ndarray | None = None,
    ancestors: np.ndarray | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    narrow: Callable[[np.ndarray], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Reference attention by loops over rows, heads and keys, in float64.

    With `narrow`, weights and outputs are rounded by it.
    """
    rounded = narrow or np.asarray
    rows, q_heads, head_dim = case.q.shape
    kv_heads, page_size = case.k_pages.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    value_width = case.v_pages.shape[3]
    out = np.zeros((rows, q_heads, value_width))
    lse = np.full((rows, q_heads), -np.inf)
    for row in np.flatnonzero(case.positions >= 0):
        slot = row if case.slots is None else case.slots[row]
        position = case.positions[row]
        if ancestors is None:
            places = np.arange(position + 1)
        else:
            assert context is not None
            places = np.arange(context[slot] + ancestors.shape[1])
            kin = places[context[slot] :] - context[slot]
            mask = np.concatenate([np.ones(context[slot], bool), ancestors[row, kin]])
            places = places[mask]
        if window is not None:
            places = places[places > position - window]
        if not len(places):
            continue
        pages = case.page_ids[slot, places // page_size]
        for head in range(q_heads):
            address = pages, head // (q_heads // kv_heads), places % page_size
            keys = case.k_pages[address]
            values = case.v_pages[address]
            scores = keys.astype(float) @ case.q[row, head].astype(float) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if alibi is not None:
                scores = scores + alibi[head] * (places - position)
            if sinks is not None:  # one more key, whose value is 0
                scores = np.append(scores, sinks[head])
                values = np.append(values, np.zeros((1, value_width)), axis=0)
            weights = np.exp(scores - scores.max())
            out[row, head] = rounded(weights) @ values.astype(float) / weights.sum()
            lse[row, head] = scores.max() + np.log(weights.sum())
    return rounded(out), lse


def plain(case: Case, dtype: str, **features: Any) -> tuple[np.ndarray, np.ndarray]:
    """Plain attention with weights and outputs rounded to a type.

    The reference for accuracy: an implementation must be about as accurate.
    """

    def narrow(x: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32), np.float64)

    return oracle(case, narrow=narrow, **features)


def make_case(
    rng: np.random.Generator,
    runs: list[tuple[int, int]],
    *,
    page_size: int = 4,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 8,
    padding: int = 0,
    decode: bool = False,
    window: int | None = None,
) -> Case:
    """Makes rows over sequences in scattered pages, with NaN where no row may read.

    Args:
      rng: random generator.
      runs: position of the first row, and number of rows, of each slot.
      page_size: tokens per page.
      kv_heads: number of KV heads.
      group: query heads per KV head.
      head_dim: size of a head.
      padding: rows without a slot, inserted between the runs.
      decode: True if row i belongs to slot i.
      window: attention window; places before it have NaN as well, and pages with only
        such places are not mapped; None means no window.
    """
    lengths = [start + num if num else 0 for start, num in runs]
    num_pages = [-(-length // page_size) for length in lengths]
    width = max(num_pages) + 2
    total = sum(num_pages) + 3
    free = rng.permutation(total).tolist()
    page_ids = rng.choice(NOWHERE, (len(runs), width)).astype(np.int32)
    shape = (total, kv_heads, page_size, head_dim)
    k_pages, v_pages = (np.full(shape, np.nan, np.float32) for _ in range(2))
    for slot, num in enumerate(num_pages):
        begin = 0 if window is None else max(0, runs[slot][0] - window + 1)
        columns = slice(min(begin // page_size, num), num)
        page_ids[slot, columns] = [free.pop() for _ in page_ids[slot, columns]]
        places = np.arange(begin, lengths[slot])
        address = page_ids[slot, places // page_size], slice(None), places % page_size
        for pages in (k_pages, v_pages):
            pages[address] = rng.normal(size=(len(places), kv_heads, head_dim))
    # A stale id beyond the end, of a page that another slot uses.
    page_ids[0, -1] = page_ids[-1, 0]

    chunks = [
        [(slot, start + row) for row in range(num)]
        for slot, (start, num) in enumerate(runs)
    ]
    if decode:
        assert all(num <= 1 for _, num in runs)
        rows = [chunk[0] if chunk else (-1, -1) for chunk in chunks]
    else:
        order = rng.permutation(len(chunks))
        gaps = rng.multinomial(padding, np.ones(len(chunks) + 1) / (len(chunks) + 1))
        rows = [(-1, -1)] * gaps[-1]
        for gap, index in zip(gaps[:-1], order, strict=True):
            rows = rows + [(-1, -1)] * gap + chunks[index]
    slots, positions = np.array(rows, np.int32).T
    q = rng.normal(size=(len(rows), kv_heads * group, head_dim)).astype(np.float32)
    return Case(q, k_pages, v_pages, page_ids, positions, None if decode else slots)


def check(state: AttentionState, expected: tuple, tolerance: float = 2e-5) -> None:
    """Compares; rows without keys must have exact zeros and infinities."""
    out, lse = expected
    assert np.isfinite(state.out).all()
    np.testing.assert_allclose(state.out, out, rtol=0, atol=tolerance)
    np.testing.assert_allclose(state.lse, lse, rtol=0, atol=tolerance)
    assert not np.asarray(state.out)[np.isneginf(lse)].any()


def assert_same(a: AttentionState, b: AttentionState) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)
