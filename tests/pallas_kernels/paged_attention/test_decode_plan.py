"""The plan of the decode kernel against a plain Python schedule of tiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import row_packing
from pallas_kernels.paged_attention import decode_plan, stream_k
from pallas_kernels.paged_attention.stream_k import Tiling

MAKE_PLAN = jax.jit(
    decode_plan.plan_decode,
    static_argnames=("num_slots", "kv_heads", "group", "tiling", "window"),
)
PARTS = jax.jit(stream_k.all_item_programs, static_argnames=("kv_heads", "tiling"))


def ints(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values), jnp.int32)


def line_of(low: list[int], high: list[int], kv_heads: int, tile: int) -> list[tuple]:
    """All tiles as (block, head, tile within the item, tiles of the item)."""
    line = []
    for block, (begin, end) in enumerate(zip(low, high, strict=True)):
        count = -(-end // tile) - begin // tile if end > begin else 0
        for head in range(kv_heads):
            line += [(block, head, t, count) for t in range(count)]
    return line


def check_schedule(
    low: list[int], high: list[int], kv_heads: int, tiling: Tiling
) -> None:
    cut = jax.jit(stream_k.split_tiles, static_argnames=("kv_heads", "tiling"))
    got = jax.tree.map(
        np.asarray, cut(ints(low), ints(high), kv_heads=kv_heads, tiling=tiling)
    )
    line = line_of(low, high, kv_heads, tiling.tile)
    programs = tiling.num_programs
    live = [block for block in range(len(low)) if high[block] > low[block]]
    first, num = map(
        np.asarray, stream_k.tile_range(ints(low), ints(high), tiling.tile)
    )
    assert (first == np.asarray(low) // tiling.tile).all()
    assert num.sum() * kv_heads == len(line)
    assert (got.ends == np.cumsum(num) * kv_heads).all()
    for block, other in zip([-1, *live], live, strict=False):
        assert block < 0 or got.after[block] == other
    # The stretches cover the line, in order and evenly.
    cuts = np.asarray(
        stream_k.stretch_begin(jnp.int32(len(line)), ints(range(programs + 1)), tiling)
    )
    sizes = np.diff(cuts)
    busy = min(programs, max(1, len(line) // tiling.min_tiles))
    assert cuts[0] == 0
    assert cuts[-1] == len(line)
    assert (sizes[busy:] == 0).all()
    assert sizes[:busy].max() - sizes[:busy].min() <= 1
    holders: list[list[int]] = [[] for _ in range(len(low) * kv_heads)]
    for program in range(programs):
        stretch = line[cuts[program] : cuts[program + 1]]
        assert 0 <= got.begin[program] < len(low)
        if stretch:
            block = int(got.begin[program])
            inside = cuts[program] - got.ends[block] + num[block] * kv_heads
            assert (block, *divmod(inside, num[block])) == stretch[0][:3]
        for block, head, *_ in stretch:
            holders[block * kv_heads + head].append(program)
    expected = [[held[0], held[-1]] if held else [0, -1] for held in holders]
    parts = PARTS(ints(got.ends), kv_heads=kv_heads, tiling=tiling)
    assert parts.tolist() == expected


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "programs"),
    [
        ([0, 0], 2, 3),
        ([1], 1, 4),
        # Fewer tiles than programs, with empty ones between.
        ([0, 1, 0, 63, 64, 65, 0], 2, 4),
        ([64] * 6, 2, 3),
        ([64 * 4], 3, 4),
        ([100_000], 8, 132),
        # Totals around a multiple of the programs.
        *(
            ([64 * (12 * rounds + over - 4), 64 * 3, 0, 17], 1, 12)
            for rounds in (1, 5)
            for over in (-1, 0, 1)
        ),
    ],
)
def test_schedules_equal_plain_python(lengths, kv_heads, programs) -> None:
    zeros = [0] * len(lengths)
    check_schedule(zeros, lengths, kv_heads, Tiling(num_programs=programs))


@pytest.mark.thorough
def test_random_spans() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        blocks = int(rng.integers(1, 4)) * 4
        high = rng.integers(0, 700, blocks) * rng.integers(0, 2, blocks)
        low = (high * rng.random(blocks)).astype(int)
        tiling = Tiling(num_programs=7, min_tiles=int(rng.integers(1, 3)))
        check_schedule(low.tolist(), high.tolist(), 2, tiling)


def test_random_rows_are_packed_in_order_and_come_back() -> None:
    rng = np.random.default_rng(1)
    num_rows = 24
    num_slots = 6
    tokens = 3
    group = 2
    kv_heads = 3
    head_dim = 4
    sizes = {"num_slots": num_slots, "tokens": tokens}
    pack = jax.jit(functools.partial(row_packing.pack_rows, **sizes))
    lay_out = jax.jit(functools.partial(row_packing.pack_queries, kv_heads=kv_heads))
    unpack = jax.jit(functools.partial(row_packing.unpack_rows, group=group, fill=-1.0))
    for _ in range(40):
        slots = np.repeat(rng.permutation(num_slots), 4)
        live = rng.random(num_rows) < rng.random()
        slots = np.where(live, slots, rng.integers(-1, 9, num_rows))
        got = pack(ints(slots), jnp.asarray(live))
        # The model: the live rows of a slot in order, `tokens` at a time.
        rows_of: dict[int, list[int]] = {}
        for row in np.flatnonzero(live).tolist():
            rows_of.setdefault(int(slots[row]), []).append(row)
        expected = [
            (key, rows_of[key][i : i + tokens])
            for key in rows_of
            for i in range(0, len(rows_of[key]), tokens)
        ]
        num_blocks = got.row.shape[0]
        assert len(expected) <= num_blocks
        row, slot, block, token = (np.asarray(x) for x in got)
        for i in range(num_blocks):
            key, rows = expected[i] if i < len(expected) else (0, [])
            assert slot[i] == key
            assert row[i].tolist() == rows + [num_rows] * (tokens - len(rows))
            assert (block[rows] == i).all()
            assert token[rows].tolist() == list(range(len(rows)))
        assert (block[~live] == num_blocks).all()
        q = rng.standard_normal((num_rows, kv_heads * group, head_dim), np.float32)
        blocks = np.array(lay_out(jnp.asarray(q), got))
        assert blocks.shape == (num_blocks, kv_heads, 8, head_dim)
        blocks[:, :, tokens * group :] = np.nan
        back = np.asarray(unpack(jnp.asarray(blocks), got))
        np.testing.assert_array_equal(back[live], q[live])
        assert (back[~live] == -1).all()


def test_rows_of_a_block() -> None:
    sizes = [(1, 1), (1, 8), (3, 5), (16, 4), (1, 64), (17, 4), (2, 64)]
    expected = [8, 8, 16, 64, 64, 128, 128]
    got = [row_packing.num_block_rows(tokens=t, group=g) for t, g in sizes]
    assert got == expected


def test_spans_of_a_block_are_those_of_its_rows() -> None:
    """Two slots with chunks, a padding row, a window: computed by hand."""
    plan = MAKE_PLAN(
        ints([6, 7, 8, -1, 100]),
        ints([1, 1, 1, -1, 0]),
        num_slots=2,
        kv_heads=1,
        group=32,
        tiling=Tiling(num_programs=2),
        window=5,
    )
    assert plan.packing.row.tolist() == [[0, 1], [2, 5], [4, 5]]
    assert plan.low.tolist() == [2, 4, 96]
    assert plan.high.tolist() == [8, 9, 101]
    assert plan.inner_low.tolist() == [3, 4, 96]
    assert plan.inner_high.tolist() == [7, 9, 101]
    assert plan.rows[0, :, 0].tolist() == [2, 7, 6]
    assert plan.rows[0, :, 32].tolist() == [3, 8, 7]
    assert stream_k.tile_range(plan.low, plan.high, 64)[0].tolist() == [0, 0, 1]


def test_spans_of_a_tree() -> None:
    """A tree of three nodes over 10 places: the root, and two branches."""
    ancestors = jnp.asarray([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    plan = MAKE_PLAN(
        ints([10, 11, 11]),
        ints([0, 0, 0]),
        num_slots=1,
        kv_heads=1,
        group=8,
        tiling=Tiling(num_programs=2),
        context=ints([10]),
        ancestors=ancestors,
    )
    assert (plan.low.item(), plan.high.item()) == (0, 13)
    assert (plan.inner_low.item(), plan.inner_high.item()) == (0, 10)
    assert (
        plan.rows[0, decode_plan.END_POSITION, ::8].tolist() == [10, 10, 10] + [0] * 5
    )
    assert plan.rows[0, decode_plan.ANCESTOR_WORDS, ::8].tolist() == [1, 3, 5] + [0] * 5


def test_a_slot_without_a_tree_next_to_one_is_causal() -> None:
    ancestors = jnp.asarray([[0, 0], [0, 0], [1, 0], [1, 1]], bool)
    plan = MAKE_PLAN(
        ints([5, 6, 10, 11]),
        ints([0, 0, 1, 1]),
        num_slots=2,
        kv_heads=1,
        group=8,
        tiling=Tiling(num_programs=2),
        context=ints([-1, 10]),
        ancestors=ancestors,
    )
    assert (plan.low.tolist(), plan.high.tolist()) == ([0, 0], [7, 12])
    assert plan.rows[0, decode_plan.END_POSITION, ::8].tolist()[:2] == [6, 7]
    assert plan.rows[1, decode_plan.END_POSITION, ::8].tolist()[:2] == [10, 10]
    assert plan.rows[:, decode_plan.ANCESTOR_WORDS, ::8].tolist() == [
        [0] * 8,
        [1, 3] + [0] * 6,
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [("tile", 96), ("block_rows", 32), ("stages", 0), ("num_programs", 0)],
)
def test_sizes_out_of_range_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}={value} must be"):
        Tiling(**{field: value})


def test_a_group_that_no_block_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="group=65 must be in"):
        decode_plan.plan_decode(
            ints([0]), None, num_slots=1, kv_heads=1, group=65, tiling=Tiling()
        )


@pytest.mark.parametrize(
    ("head_dim", "block_rows", "stages", "q_stages"),
    [
        (64, 64, 8, 2),
        (128, 64, 4, 2),
        (256, 64, 2, 1),
        (128, 128, 3, 1),
        (256, 128, 2, 1),
        (64, 128, 8, 2),
    ],
)
def test_default_tilings_fill_the_shared_memory(
    head_dim: int, block_rows: int, stages: int, q_stages: int
) -> None:
    tiling = stream_k.default_decode_tiling(head_dim=head_dim, block_rows=block_rows)
    assert tiling.tile == 64
    assert (tiling.stages, tiling.q_stages) == (stages, q_stages)
