"""Pages: writes compared with a NumPy reference, and sentinels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxkv import memory
from jaxkv.memory import kv_pages
from jaxkv.memory.kv_layout import DEFAULT_LAYOUT
from jaxkv.memory.kv_pages import Pages, Rows
from jaxkv.memory.page_parts import CONTEXT
from jaxkv.memory.page_pool import NO_PAGE
from tests.support.trees import assert_same, ints

LAYERS = 3
NUM_PAGES = 20
KV_HEADS = 2
HEAD_DIM = 4
SLOTS = 5


write = jax.jit(DEFAULT_LAYOUT.write)


def make_pages(page_size: int, dtype: str = "float32") -> Pages:
    """Returns pages with distinct numbers that no test writes."""
    pages = memory.make_pages(
        num_layers=LAYERS,
        num_pages=NUM_PAGES,
        num_kv_heads=KV_HEADS,
        page_size=page_size,
        head_dim=HEAD_DIM,
        dtype=dtype,
    )
    count = -1 - jnp.arange(pages.k.size, dtype=jnp.float32).reshape(pages.k.shape)
    return Pages(count.astype(dtype), (2 * count).astype(dtype), DEFAULT_LAYOUT)


def make_rows(position, slot, page_ids) -> Rows:
    return Rows(
        token=jnp.zeros_like(position),
        position=position,
        slot=slot,
        page_ids=page_ids,
        logit_rows=ints(NO_PAGE),
    )


def draw(seed: int, page_size: int, *, one_each: bool) -> tuple[Rows, dict]:
    """Returns rows with padding, unmapped and invalid places, and their K and V."""
    rng = np.random.default_rng(seed)
    columns = 3
    page_ids = rng.permutation(NUM_PAGES)[: SLOTS * columns].reshape(SLOTS, columns)
    page_ids[rng.random(page_ids.shape) < 0.2] = NO_PAGE
    page_ids[0, 0] = NUM_PAGES - 1  # the page that a wrapped -1 would reach
    page_ids[1:][page_ids[1:] == NUM_PAGES - 1] = NO_PAGE
    max_position = columns * page_size + 2
    if one_each:
        slot = np.arange(SLOTS)
        position = rng.integers(0, max_position, SLOTS)
    else:
        place = rng.permutation(SLOTS * max_position)[: 4 * SLOTS]  # no place twice
        slot = place // max_position
        position = place % max_position
    position[rng.random(position.size) < 0.2] = -1
    shape = (position.size, KV_HEADS, HEAD_DIM)
    new = {name: rng.normal(size=shape).astype(np.float32) for name in "kv"}
    rows = make_rows(
        ints(*position),
        None if one_each else jnp.asarray(slot, "int32"),
        jnp.asarray(page_ids, "int32"),
    )
    return rows, new


def write_reference(
    old: np.ndarray, layer: int, new: np.ndarray, rows: Rows
) -> np.ndarray:
    """Writes one row after another with NumPy."""
    after = old.copy()
    page_size = old.shape[3]
    page_ids = np.asarray(rows.page_ids)
    positions = np.asarray(rows.position).tolist()
    slots = range(len(positions)) if rows.slot is None else rows.slot.tolist()
    for i, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        if position < 0 or position // page_size >= page_ids.shape[1]:
            continue
        page = page_ids[slot, position // page_size]
        if page != NO_PAGE:
            after[layer, page, :, position % page_size] = new[i]
    return after


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("one_each", [False, True], ids=["packed", "row i is slot i"])
def test_write_equals_reference(page_size: int, one_each: bool) -> None:
    for seed in range(8):
        rows, new = draw(seed, page_size, one_each=one_each)
        pages = make_pages(page_size)
        layer = seed % LAYERS
        after = write(pages, jnp.int32(layer), new["k"], new["v"], rows)
        for name in "kv":
            old = getattr(pages, name)
            leaf = getattr(after, name)
            wanted = write_reference(np.asarray(old), layer, new[name], rows)
            np.testing.assert_array_equal(leaf, wanted)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_sentinels_write_no_page(layer: int) -> None:
    """Writes neither the last page nor, after an offset, one of another layer."""
    pages = make_pages(4)
    page_ids = jnp.full((3, 2), NO_PAGE, jnp.int32)
    nowhere = [
        make_rows(ints(-1, -1, -1), ints(0, 1, 2), page_ids.at[:, 1].set(0)),
        make_rows(ints(0, 4, 7), ints(0, 1, 2), page_ids),  # unmapped
        make_rows(ints(8, 9, 400), ints(0, 1, 2), page_ids.at[:].set(0)),  # past it
        make_rows(ints(0, 0, 0), ints(-1, 3, 99), page_ids.at[:].set(0)),  # no slot
        make_rows(ints(0, 1, 2), None, page_ids.at[:].set(NUM_PAGES)),  # no page
    ]
    ones = jnp.ones((3, KV_HEADS, HEAD_DIM), jnp.float32)
    for rows in nowhere:
        after = write(pages, jnp.int32(layer), ones, ones, rows)
        np.testing.assert_array_equal(after.k, pages.k)
        np.testing.assert_array_equal(after.v, pages.v)


def test_values_are_cast_to_the_type_of_the_pages() -> None:
    pages = make_pages(4, "bfloat16")
    rows = make_rows(ints(0), None, ints(2).reshape(1, 1))
    new = jnp.full((1, KV_HEADS, HEAD_DIM), 1 + 2**-9, jnp.float32)
    after = DEFAULT_LAYOUT.write(pages, 0, new, new, rows)
    assert after.k.dtype == jnp.bfloat16
    assert (after.k[0, 2, :, 0] == 1).all()


def test_flattened_view_offsets_layers() -> None:
    pages = make_pages(4)
    page_ids = ints(0, 19, NO_PAGE, NUM_PAGES, 5)
    view = kv_pages.flatten_layers(pages)
    assert view.k.shape == (LAYERS * NUM_PAGES, KV_HEADS, 4, HEAD_DIM)
    for layer in range(LAYERS):
        ids = kv_pages.flat_ids(page_ids, layer, num_layers=LAYERS, num_pages=NUM_PAGES)
        base = layer * NUM_PAGES
        end = LAYERS * NUM_PAGES
        assert ids.tolist() == [base, base + 19, end, end, base + 5]
        mapped = jnp.asarray([0, 1, 4])
        np.testing.assert_array_equal(
            view.v[ids[mapped]], pages.v[layer, page_ids[mapped]]
        )


def test_rows_without_slots_must_be_a_multiple() -> None:
    rows = make_rows(ints(0, 1), None, jnp.zeros((3, 1), jnp.int32))
    with pytest.raises(
        ValueError, match="num_rows=2 must be a multiple of num_slots=3"
    ):
        kv_pages.locate(rows, page_size=4)


def test_tokens_move_between_devices_that_divide_a_page() -> None:
    """Page 0 is a page as any other, and tokens may come from another device."""
    pages = make_pages(4)
    page_ids = ints(0, 2, 3, NO_PAGE).reshape(2, 2)
    source = ints(0, 3, 6, 1, 2, -1).reshape(2, 3)
    target = ints(2, 1, 5, 0, 3, -1).reshape(2, 3)
    part = PartitionSpec(None, None, None, CONTEXT)
    full = PartitionSpec()
    divided = jax.shard_map(
        memory.move_tokens,
        mesh=jax.make_mesh((2,), (CONTEXT,), axis_types=(AxisType.Auto,)),
        in_specs=(part, full, full, full),
        out_specs=part,
        check_vma=False,
    )
    places = (page_ids, source, target)
    assert_same(jax.jit(divided)(pages, *places), memory.move_tokens(pages, *places))
