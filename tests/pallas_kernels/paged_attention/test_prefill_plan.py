"""The plan of long chunks, against a plan computed row by row."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import prefill_plan
from pallas_kernels.paged_attention.prefill_plan import PrefillPlan
from pallas_kernels.paged_attention.stream_k import Tiling

TILING = Tiling(num_programs=3, tile=64, block_rows=128)
FIELDS = ("slot", "row", "low", "high", "first_kv", "inner", "num_inner", "num_kv")


class Made(NamedTuple):
    """A plan, its lines by name."""

    position: np.ndarray
    tile_of: np.ndarray
    slot: np.ndarray
    row: np.ndarray
    begin_row: np.ndarray
    end_row: np.ndarray
    is_full: np.ndarray
    low: np.ndarray
    high: np.ndarray
    first_kv: np.ndarray
    inner: np.ndarray
    num_inner: np.ndarray
    num_kv: np.ndarray

    @property
    def num_used(self) -> int:
        return int(np.sum(self.num_kv > 0))


def lay_out(
    chunks: list[tuple[int, int, int]], num_rows: int
) -> tuple[np.ndarray, ...]:
    """Positions and slots of chunks (slot, context, rows); padding is (-1, 0, rows)."""
    positions = np.full(num_rows, -1)
    slots = np.full(num_rows, -1)
    at = 0
    for slot, context, rows in chunks:
        if slot >= 0:
            positions[at : at + rows] = context + np.arange(rows)
            slots[at : at + rows] = slot
        at += rows
    assert at <= num_rows
    return positions, slots


def make(positions: np.ndarray, slots: np.ndarray, **options: Any) -> Made:
    def plan(positions: jax.Array, slots: jax.Array) -> PrefillPlan:
        sizes: dict[str, Any] = {"num_slots": 4, "few": 32, "tiling": TILING} | options
        return prefill_plan.plan_prefill(positions, slots, **sizes)

    plan_arrays = jax.jit(plan)(
        *(jnp.asarray(x, jnp.int32) for x in (positions, slots))
    )
    plan_arrays = jax.tree.map(np.asarray, plan_arrays)
    lines = {
        name: plan_arrays.tiles[getattr(prefill_plan, name.upper())]
        for name in Made._fields[2:]
    }
    lines["is_full"] = plan_arrays.tiles[prefill_plan.IS_FULL :][:2].T
    return Made(plan_arrays.position, plan_arrays.tile_of, **lines)


def test_a_plan_computed_by_hand() -> None:
    # Slot 1 has too few rows. Slot 2 begins at row 35: its first tile at 32, with 125
    # of its rows, then one at 160 with 25. Slot 3 begins at 190, its tile at 184.
    chunks = [(1, 9, 32), (-1, 0, 3), (2, 100, 150), (-1, 0, 5), (3, 0, 40)]
    plan = make(*lay_out(chunks, 312))
    rows = {name: getattr(plan, name)[:3].tolist() for name in FIELDS}
    assert plan.num_used == 3
    assert rows == {
        "slot": [2, 2, 3],
        "row": [32, 160, 184],
        # 125 rows at 100 to 224 and 25 rows at 225 to 249.
        "low": [0, 0, 0],
        "high": [225, 250, 40],
        "first_kv": [0, 0, 0],
        "inner": [0, 0, 0],
        "num_inner": [1, 3, 0],
        "num_kv": [4, 4, 1],
    }
    assert plan.begin_row[:3].tolist() == [35, 160, 190]
    assert plan.end_row[:3].tolist() == [160, 185, 230]
    assert plan.is_full[:3].tolist() == [[0, 1], [0, 0], [0, 0]]
    assert (plan.num_kv[3:] == 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_in_one_tile(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = int(rng.choice([8, 100, 400, 513]))
    few = int(rng.choice([0, 7, 32]))
    window = [None, 90][seed % 2]
    cuts = np.sort(rng.integers(0, num_rows + 1, 8))
    owner = [0, -1, 1, -1, 2, 3, -1]
    sizes = np.diff(cuts)
    lead = [(-1, 0, int(cuts[0]))]
    chunks = [
        (slot, int(rng.integers(0, 300)), int(size))
        for slot, size in zip(owner, sizes, strict=True)
    ]
    positions, slots = lay_out(lead + chunks, num_rows)
    if num_rows > 100:  # padding within a chunk
        positions[rng.integers(0, num_rows, 9)] = -1
    plan = make(positions, slots, few=few, window=window)
    tile_counts = np.zeros(num_rows, int)
    counts = [np.sum((slots == slot) & (positions >= 0)) for slot in range(4)]
    for tile in range(plan.num_used):
        slot = int(plan.slot[tile])
        row = int(plan.row[tile])
        assert row % 8 == 0
        assert row + 128 <= prefill_plan.num_padded(num_rows)
        tile_rows = np.arange(int(plan.begin_row[tile]), int(plan.end_row[tile]))
        tile_rows = tile_rows[positions[tile_rows] >= 0]
        assert set(slots[tile_rows]) == {slot}
        assert counts[slot] > few
        assert (plan.tile_of[tile_rows] == tile).all()
        assert (plan.position[tile_rows] == positions[tile_rows]).all()
        assert row <= tile_rows.min()
        assert tile_rows.max() < row + 128
        tile_counts[tile_rows] += 1
        for half in range(2):
            inside = (tile_rows - row) // 64 == half
            assert plan.is_full[tile, half] == (inside.sum() == 64)
        check_keys(plan, tile, positions[tile_rows], window)
    is_prefill = [counts[slot] > few if slot >= 0 else False for slot in slots]
    expected = np.where(is_prefill, positions >= 0, False)
    np.testing.assert_array_equal(tile_counts, expected)
    assert (plan.tile_of[~expected] == len(plan.row)).all()
    used = plan.num_kv[: plan.num_used]
    assert (used > 0).all()
    assert (np.diff(used) <= 0).all()


def check_keys(
    plan: Made, tile: int, positions: np.ndarray, window: int | None
) -> None:
    """Checks the tiles of keys that some row sees, and those that need no mask."""
    place = np.arange(64 * 20)
    sees = place[None, :] <= positions[:, None]
    if window is not None:
        sees &= place[None, :] > positions[:, None] - window
    any_tile = sees.any(0).reshape(-1, 64).any(1)
    all_tile = sees.all(0).reshape(-1, 64).all(1)
    first = int(plan.first_kv[tile])
    inner = int(plan.inner[tile])
    tiles = np.arange(20, dtype=np.int32)
    actual = (tiles >= first) & (tiles < first + plan.num_kv[tile])
    np.testing.assert_array_equal(actual, any_tile)
    actual = (tiles >= inner) & (tiles < inner + plan.num_inner[tile])
    np.testing.assert_array_equal(actual, all_tile)
    assert plan.low[tile] == np.flatnonzero(sees.any(0))[0]
    assert plan.high[tile] == positions.max() + 1


def test_the_bound_on_tiles() -> None:
    assert prefill_plan.max_tiles(num_rows=512, num_slots=4, few=32) == 8
    assert prefill_plan.max_tiles(num_rows=20, num_slots=4, few=32) == 1
