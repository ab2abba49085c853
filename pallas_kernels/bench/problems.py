"""Input arrays of a benchmark shape, and the expected results.

Keys, values and queries are normally distributed, pages have a random order in the
pool, and every position that must not be read holds NaN. Several page tables over one
pool let successive calls read different keys, so none of them is in the cache.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import quantizing
from pallas_kernels.bench.specs import GroupedSpec, Spec
from pallas_kernels.paged_attention import PagedKV, RowView, ScoreTransform

NUM_SPARE = 3
"""Pages of the pool that belong to no sequence."""
NUM_CHECKED = 4
"""Pairs of a sequence and a KV head that are checked."""
MAX_CHECKED_ROWS = 16
"""Rows that are checked in each pair."""
NUM_CHECKED_PRODUCTS = 64
"""Rows and columns of a grouped product that are checked."""
FEATURES = ("window", "softcap", "alibi", "sinks", "int8", "fp8")
"""Options of attention that a problem can have; the last two are 8-bit page types."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """Arguments of paged attention; `page_ids` has one more leading axis."""

    spec: Spec
    q: jax.Array
    """`[batch * rows, q_heads, head_dim]`."""
    k_pages: jax.Array
    """`[pages, kv_heads, page_size, head_dim]`."""
    v_pages: jax.Array | None
    """`[pages, kv_heads, page_size, head_dim]`; None over latent rows."""
    page_ids: jax.Array
    """`[turns, batch, pages_per_slot]`; no two tables share a page."""
    positions: jax.Array
    """`[batch * rows]`."""
    slots: jax.Array | None
    """`[batch * rows]`; None if every sequence has one row, or a tree."""
    context: jax.Array | None
    """`[batch]`; None without trees."""
    ancestors: jax.Array | None
    """`[batch * rows, rows]`; None without trees."""
    options: dict[str, Any]
    """Fields of `PagedKV`, `RowView` and `ScoreTransform` for the problem's feature,
    and the width of the values over latent rows."""

    @property
    def kv(self) -> PagedKV:
        """The pages."""
        options = self.options
        return PagedKV(
            self.k_pages,
            self.v_pages,
            options.get("k_scales"),
            options.get("v_scales"),
            options.get("value_width"),
        )

    @property
    def scoring(self) -> ScoreTransform:
        """The transform of the scores."""
        scale = self.spec.heads.head_dim**-0.5
        options = self.options
        return ScoreTransform(
            scale, options.get("softcap"), options.get("alibi"), options.get("sinks")
        )

    def view(self, page_ids: jax.Array) -> RowView:
        """Returns the view of the rows through a page table, `[batch, pages]`."""
        return RowView(
            page_ids,
            self.positions,
            self.slots,
            self.context,
            self.ancestors,
            self.options.get("window"),
        )

    @property
    def num_turns(self) -> int:
        """Number of page tables, which calls use in turn."""
        return self.page_ids.shape[0]

    def lengths(self) -> np.ndarray:
        """Returns the length of each sequence, its query rows included: `[batch]`."""
        return self.spec.contexts() + self.spec.rows

    @functools.cached_property
    def samples(self) -> list[tuple[np.ndarray, int, np.ndarray]]:
        """Rows, a KV head, and attention with the first table in float64."""
        spec = self.spec
        rng = np.random.default_rng(1)
        samples = []
        # The longest sequence is always among them.
        others = rng.integers(0, spec.batch, NUM_CHECKED - 1)
        rows = np.unique(np.linspace(0, spec.rows - 1, MAX_CHECKED_ROWS, dtype=int))
        for sequence in [spec.batch // 2, *others]:
            head = int(rng.integers(0, spec.heads.kv_heads))
            wanted = _attend(self, int(sequence), head, rows)
            samples.append((sequence * spec.rows + rows, head, wanted))
        return samples

    def attention_mask(
        self, sequence: int, rows: np.ndarray, length: int
    ) -> np.ndarray:
        """Returns a mask of the keys that rows attend to: `[rows, length]`."""
        context = self.spec.contexts()[sequence]
        place = np.arange(length)
        back = context + rows[:, None] - place
        if self.ancestors is None:
            mask = back >= 0
        else:
            kin = np.asarray(self.ancestors)[sequence * self.spec.rows + rows]
            mask = np.tile(place < context, (len(rows), 1))
            mask[:, context : context + self.spec.rows] = kin
        return mask & (back < self.options.get("window", np.inf))

    def error(self, out: jax.Array) -> float:
        """Returns the relative error of a result against float64, on samples.

        Args:
          out: attention with the first table, `[batch * rows, q_heads, value_width]`.

        Returns:
          Norm of the difference over the norm of the expected result; NaN if any is
          NaN.
        """
        off = norm = 0.0
        for row, head, wanted in self.samples:
            group = wanted.shape[1]
            row_heads = _wide(out[row])[:, head * group : (head + 1) * group]
            off += float(np.sum((row_heads - wanted) ** 2))
            norm += float(np.sum(wanted**2))
        return float(np.sqrt(off / norm))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyProblem:
    """Arguments of a copy of pages."""

    spec: Spec
    pages: jax.Array
    """`[2 * batch, kv_heads, page_size, head_dim]`."""
    source: jax.Array
    """`[batch]`; disjoint from the targets."""
    target: jax.Array
    """`[batch]`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedProblem:
    """Arguments of a grouped product; `group_sizes` has one more leading axis."""

    spec: GroupedSpec
    x: jax.Array
    """`[rows, width]`."""
    w: jax.Array
    """`[groups, width, columns]`."""
    group_sizes: jax.Array
    """`[turns, groups]`: expert choices are drawn independently in each turn."""

    @functools.cached_property
    def samples(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Some rows and columns, and their products in the first turn, in float64."""
        rng = np.random.default_rng(1)
        spec = self.spec
        ends = np.cumsum(np.asarray(self.group_sizes[0]))
        # At the edges of groups, and at random rows.
        edges = np.concatenate([ends - 1, ends, rng.integers(0, spec.num_rows, 99)])
        rows = np.unique(rng.permutation(edges)[:NUM_CHECKED_PRODUCTS])
        rows = rows[(rows >= 0) & (rows < spec.num_rows)]
        columns = rng.integers(0, spec.columns, NUM_CHECKED_PRODUCTS)
        group = np.searchsorted(ends, rows, side="right")
        weights = (_wide(self.w[i][:, columns]) for i in group)
        wanted = [_wide(self.x[row]) @ w for row, w in zip(rows, weights, strict=True)]
        return rows, columns, np.stack(wanted)

    def error(self, out: jax.Array) -> float:
        """Returns the relative error of a result against float64, on samples.

        Args:
          out: products of the first turn, `[rows, columns]`.

        Returns:
          Norm of the difference over the norm of the expected result; NaN if any is
          NaN.
        """
        rows, columns, wanted = self.samples
        off = _wide(out[rows][:, columns]) - wanted
        return float(np.linalg.norm(off) / np.linalg.norm(wanted))


def make_attention(
    spec: Spec, *, num_turns: int = 1, seed: int = 0, feature: str = ""
) -> AttentionProblem:
    """Draws the arrays of an attention spec.

    Args:
      spec: a spec of any kind but "copy".
      num_turns: number of page tables over disjoint pages.
      seed: seed of all random numbers.
      feature: one of `FEATURES`, or "".
    """
    rng = np.random.default_rng(seed)
    heads = spec.heads
    lengths = spec.contexts() + spec.rows
    page_ids, used = _lay_out(spec, lengths, num_turns, rng)
    keys = jax.random.split(jax.random.key(seed), 3)
    dtype = jnp.dtype(spec.dtype)
    shape = (*used.shape, heads.head_dim)
    shape = (shape[0], heads.kv_heads, *shape[1:])
    k, v = (_poisoned(key, used, shape, dtype) for key in keys[:2])
    by_head = jnp.arange(1, heads.q_heads + 1, dtype=jnp.float32) / heads.q_heads
    options: dict[str, Any] = {
        "window": {"window": 100},
        "softcap": {"softcap": 20.0},
        "alibi": {"alibi": -0.01 * by_head},
        "sinks": {"sinks": by_head},
    }.get(feature, {})
    if heads.value_width is not None:
        v = None
        options["value_width"] = heads.value_width
    if feature in quantizing.CODE_DTYPES:
        kind: Any = feature
        k, options["k_scales"] = quantizing.quantize(k, kind)
        if v is not None:
            v, options["v_scales"] = quantizing.quantize(v, kind)
    num_rows = spec.batch * spec.rows
    q = jax.random.normal(keys[2], (num_rows, heads.q_heads, heads.head_dim), dtype)
    slot = np.repeat(np.arange(spec.batch), spec.rows)
    column = np.tile(np.arange(spec.rows), spec.batch)
    context = ancestors = None
    is_dense = spec.rows == 1 or spec.kind == "tree"
    if spec.kind == "tree":
        context = jnp.asarray(spec.contexts(), jnp.int32)
        ancestors = jnp.asarray(_random_trees(spec, rng))
    return AttentionProblem(
        spec=spec,
        q=q,
        k_pages=k,
        v_pages=v,
        page_ids=jnp.asarray(page_ids, jnp.int32),
        positions=jnp.asarray(spec.contexts()[slot] + column, jnp.int32),
        slots=None if is_dense else jnp.asarray(slot, jnp.int32),
        context=context,
        ancestors=ancestors,
        options=options,
    )


def make_copy(spec: Spec, *, seed: int = 0) -> CopyProblem:
    """Draws the arrays of a copy spec.

    Args:
      spec: a spec of kind "copy".
      seed: seed of all random numbers.
    """
    ids = np.random.default_rng(seed).permutation(2 * spec.batch).astype(np.int32)
    shape = (spec.heads.kv_heads, spec.page_size, spec.heads.head_dim)
    key = jax.random.key(seed)
    dtype = jnp.dtype(spec.dtype)
    return CopyProblem(
        spec=spec,
        pages=jax.random.normal(key, (2 * spec.batch, *shape), dtype),
        source=jnp.asarray(ids[: spec.batch]),
        target=jnp.asarray(ids[spec.batch :]),
    )


def make_grouped(
    spec: GroupedSpec, *, num_turns: int = 1, seed: int = 0
) -> GroupedProblem:
    """Draws the arrays of a grouped spec; rows and products have unit variance.

    Args:
      spec: the shape.
      num_turns: number of draws of experts.
      seed: seed of rows and weights.
    """
    keys = jax.random.split(jax.random.key(seed))
    dtype = jnp.dtype(spec.dtype)
    shape = (spec.experts.groups, spec.width, spec.columns)
    scale = jnp.asarray(spec.width**-0.5, dtype)
    weights = jax.jit(lambda key: jax.random.normal(key, shape, dtype) * scale)
    sizes = np.stack([spec.group_sizes(turn) for turn in range(num_turns)])
    return GroupedProblem(
        spec=spec,
        x=jax.random.normal(keys[0], (spec.num_rows, spec.width), dtype),
        w=weights(keys[1]),
        group_sizes=jnp.asarray(sizes, jnp.int32),
    )


def make_problem(
    spec: Spec | GroupedSpec, *, num_turns: int
) -> AttentionProblem | CopyProblem | GroupedProblem:
    """Makes the problem of a spec of any kind; copies ignore `num_turns`."""
    if isinstance(spec, GroupedSpec):
        return make_grouped(spec, num_turns=num_turns)
    return (
        make_copy(spec)
        if spec.kind == "copy"
        else make_attention(spec, num_turns=num_turns)
    )


def _lay_out(
    spec: Spec, lengths: np.ndarray, num_turns: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns pages to every sequence; returns tables and a mask of used positions."""
    num_shared = spec.shared // spec.page_size
    counts = -(-lengths // spec.page_size)
    width = int(counts.max())
    num_owned = counts - num_shared
    num_pages = num_turns * (num_shared + int(num_owned.sum())) + NUM_SPARE
    free = iter(rng.permutation(num_pages))
    # Entries past the end of a sequence are out of range.
    page_ids = np.full((num_turns, spec.batch, width), num_pages)
    used = np.zeros((num_pages, spec.page_size), bool)
    for turn in page_ids:
        prefix = [next(free) for _ in range(num_shared)]
        for row, count, length in zip(turn, counts, lengths, strict=True):
            row[:num_shared] = prefix
            row[num_shared:count] = [next(free) for _ in range(count - num_shared)]
            used[row[:count]] = True
            used[row[count - 1], length - (count - 1) * spec.page_size :] = False
    return page_ids, used


@functools.partial(jax.jit, static_argnums=(2, 3))
def _poisoned(key: jax.Array, used: jax.Array, shape: tuple[int, ...], dtype: np.dtype):
    pages = jax.random.normal(key, shape, dtype)
    return jnp.where(used[:, None, :, None], pages, jnp.asarray(jnp.nan, dtype))


def _random_trees(spec: Spec, rng: np.random.Generator) -> np.ndarray:
    """Returns the ancestors of every row, itself included: `[batch * rows, rows]`."""
    masks = np.zeros((spec.batch, spec.rows, spec.rows), bool)
    for mask in masks:
        for row in range(spec.rows):
            if row:
                mask[row] = mask[rng.integers(0, row)]
            mask[row, row] = True
    return masks.reshape(-1, spec.rows)


def _attend(
    problem: AttentionProblem, sequence: int, head: int, rows: np.ndarray
) -> np.ndarray:
    """Returns attention of rows of a KV head: `[rows, group, value_width]`."""
    spec = problem.spec
    options = problem.options
    length = int(problem.lengths()[sequence])
    ids = problem.page_ids[0, sequence, : -(-length // spec.page_size)]

    def read(pages: jax.Array, scales: jax.Array | None) -> np.ndarray:
        page_block = pages[ids, head]
        if scales is not None:
            page_block = quantizing.dequantize(page_block, scales[ids, head])
        return _wide(page_block).reshape(-1, spec.heads.head_dim)[:length]

    k = read(problem.k_pages, options.get("k_scales"))
    v = k[:, : spec.heads.value_width]
    if problem.v_pages is not None:
        v = read(problem.v_pages, options.get("v_scales"))
    group = spec.heads.q_heads // spec.heads.kv_heads
    heads_of_group = slice(head * group, (head + 1) * group)
    q = _wide(problem.q[sequence * spec.rows + rows])[:, heads_of_group]
    scores = np.einsum("rgd,td->rgt", q, k) / np.sqrt(spec.heads.head_dim)
    if "softcap" in options:
        scores = options["softcap"] * np.tanh(scores / options["softcap"])
    if "alibi" in options:
        back = spec.contexts()[sequence] + rows[:, None] - np.arange(length)
        scores -= _wide(options["alibi"][heads_of_group])[:, None] * back[:, None]
    mask = problem.attention_mask(sequence, rows, length)
    scores = np.where(mask[:, None, :], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if "sinks" in options:  # a sink is one more key, with value 0
        total += np.exp(_wide(options["sinks"][heads_of_group])[:, None] - top)
    return np.einsum("rgt,td->rgd", weights, v) / total


def _wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)
