"""Pages: writing against a twin in numpy, sentinels, and staying in place."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.memory import kv_pages
from jaxkv.memory.kv_pages import Pages, Rows
from jaxkv.memory.page_pool import NO_PAGE

LAYERS, NUM_PAGES, KV_HEADS, HEAD_DIM, SLOTS = 3, 20, 2, 4, 5


write, gather = jax.jit(kv_pages.write), jax.jit(kv_pages.gather)


def ints(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def make_pages(page_size: int, dtype: str = "float32") -> Pages:
    """Pages full of numbers that no test writes, all different."""
    pages = kv_pages.make_pages(
        num_layers=LAYERS,
        num_pages=NUM_PAGES,
        num_kv_heads=KV_HEADS,
        page_size=page_size,
        head_dim=HEAD_DIM,
        dtype=dtype,
    )
    count = -1 - jnp.arange(pages.k.size, dtype=jnp.float32).reshape(pages.k.shape)
    return Pages(k=count.astype(dtype), v=(2 * count).astype(dtype))


def make_rows(position, slot, page_ids) -> Rows:
    return Rows(
        token=jnp.zeros_like(position),
        position=position,
        slot=slot,
        page_ids=page_ids,
        logit_rows=ints(NO_PAGE),
    )


def draw(seed: int, page_size: int, *, one_each: bool) -> tuple[Rows, dict]:
    """Rows with padding, unmapped places and places past the table, and their K, V."""
    rng = np.random.default_rng(seed)
    columns = 3
    page_ids = rng.permutation(NUM_PAGES)[: SLOTS * columns].reshape(SLOTS, columns)
    page_ids[rng.random(page_ids.shape) < 0.2] = NO_PAGE
    page_ids[0, 0] = NUM_PAGES - 1  # the page that a wrapped -1 would reach
    page_ids[1:][page_ids[1:] == NUM_PAGES - 1] = NO_PAGE
    most = columns * page_size + 2
    if one_each:
        slot, position = np.arange(SLOTS), rng.integers(0, most, SLOTS)
    else:
        place = rng.permutation(SLOTS * most)[: 4 * SLOTS]  # no place twice
        slot, position = place // most, place % most
    position[rng.random(position.size) < 0.2] = -1
    shape = (position.size, KV_HEADS, HEAD_DIM)
    new = {name: rng.normal(size=shape).astype(np.float32) for name in "kv"}
    rows = make_rows(
        ints(*position),
        None if one_each else jnp.asarray(slot, "int32"),
        jnp.asarray(page_ids, "int32"),
    )
    return rows, new


def write_twin(old: np.ndarray, layer: int, new: np.ndarray, rows: Rows) -> np.ndarray:
    """One row after the other, with plain integers."""
    after, page_size = old.copy(), old.shape[3]
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
def test_write_equals_the_twin(page_size: int, one_each: bool) -> None:
    for seed in range(8):
        rows, new = draw(seed, page_size, one_each=one_each)
        pages, layer = make_pages(page_size), seed % LAYERS
        after = write(pages, jnp.int32(layer), new["k"], new["v"], rows)
        for name in "kv":
            old, found = getattr(pages, name), getattr(after, name)
            wanted = write_twin(np.asarray(old), layer, new[name], rows)
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_no_sentinel_reaches_any_page(layer: int) -> None:
    """Neither the last page nor, after an offset, a page of another layer."""
    pages, page_ids = make_pages(4), jnp.full((3, 2), NO_PAGE, jnp.int32)
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


def test_one_place_of_one_page_of_one_layer_is_written() -> None:
    pages = make_pages(4)
    rows = make_rows(ints(6), ints(1), ints(0, 1, 19, 18).reshape(2, 2))
    new = jnp.ones((1, KV_HEADS, HEAD_DIM), jnp.float32)
    after = write(pages, 1, new, 3 * new, rows)
    assert (after.k[1, 18, :, 2] == 1).all()
    assert (after.v[1, 18, :, 2] == 3).all()
    assert int(jnp.sum(after.k != pages.k)) == KV_HEADS * HEAD_DIM
    assert int(jnp.sum(after.v != pages.v)) == KV_HEADS * HEAD_DIM


def test_locate_names_page_and_offset() -> None:
    page_ids = ints(7, 3, NO_PAGE, 5, NO_PAGE, NO_PAGE).reshape(2, 3)
    rows = make_rows(ints(0, 7, 8, 2, 4, -1, 12), ints(0, 0, 0, 1, 1, 1, 0), page_ids)
    page, offset = kv_pages.locate(rows, page_size=4)
    assert page.tolist() == [7, 3, NO_PAGE, 5, NO_PAGE, NO_PAGE, NO_PAGE]
    assert offset[:5].tolist() == [0, 3, 0, 2, 0]


def test_values_are_cast_to_the_type_of_the_pages() -> None:
    pages = make_pages(4, "bfloat16")
    rows = make_rows(ints(0), None, ints(2).reshape(1, 1))
    new = jnp.full((1, KV_HEADS, HEAD_DIM), 1 + 2**-9, jnp.float32)
    after = kv_pages.write(pages, 0, new, new, rows)
    assert after.k.dtype == jnp.bfloat16
    assert (after.k[0, 2, :, 0] == 1).all()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_gather_returns_what_was_written_in_token_order(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    page_ids = jnp.asarray(rng.permutation(NUM_PAGES)[:6].reshape(2, 3), jnp.int32)
    page_ids = page_ids.at[1, 2].set(NO_PAGE)
    tokens = 3 * page_size
    new = rng.normal(size=(2, 2, tokens, KV_HEADS, HEAD_DIM)).astype(np.float32)
    pages = make_pages(page_size)
    for slot in range(2):
        order = rng.permutation(tokens)
        rows = make_rows(ints(*order), jnp.full(tokens, slot, jnp.int32), page_ids)
        k, v = jnp.asarray(new[:, slot][:, order])
        pages = write(pages, 2, k, v, rows)
    new[:, 1, 2 * page_size :] = 0
    found = gather(pages, jnp.int32(2), page_ids)
    np.testing.assert_array_equal(found, new)


def test_the_flat_view_holds_each_layer_at_its_offset() -> None:
    pages = make_pages(4)
    page_ids = ints(0, 19, NO_PAGE, NUM_PAGES, 5)
    view = kv_pages.flat(pages)
    assert view.k.shape == (LAYERS * NUM_PAGES, KV_HEADS, 4, HEAD_DIM)
    for layer in range(LAYERS):
        ids = kv_pages.flat_ids(page_ids, layer, num_layers=LAYERS, num_pages=NUM_PAGES)
        base, end = layer * NUM_PAGES, LAYERS * NUM_PAGES
        assert ids.tolist() == [base, base + 19, end, end, base + 5]
        mapped = jnp.asarray([0, 1, 4])
        np.testing.assert_array_equal(
            view.v[ids[mapped]], pages.v[layer, page_ids[mapped]]
        )


def test_vmap_equals_single_runs() -> None:
    runs = []
    for seed in range(4):
        rows, new = draw(seed, 4, one_each=False)
        pages = jax.tree.map(lambda leaf, n=seed: leaf + n, make_pages(4))
        runs.append((pages, jnp.int32(seed % LAYERS), new["k"], new["v"], rows))
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *runs)
    after = jax.jit(jax.vmap(kv_pages.write))(*together)
    for i, run in enumerate(runs):
        for one, many in zip(write(*run), after, strict=True):
            np.testing.assert_array_equal(many[i], one)


@pytest.mark.parametrize(
    "name", ["num_layers", "num_pages", "num_kv_heads", "page_size", "head_dim"]
)
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes: dict[str, Any] = dict.fromkeys(
        ["num_layers", "num_pages", "num_kv_heads", "page_size", "head_dim"], 1
    )
    with pytest.raises(ValueError, match="dtype='int32' must be a floating type"):
        kv_pages.make_pages(**sizes, dtype="int32")
    sizes[name] = 0
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        kv_pages.make_pages(**sizes, dtype="float32")


def test_rows_without_slots_must_be_as_many_as_slots() -> None:
    rows = make_rows(ints(0, 1), None, jnp.zeros((3, 1), jnp.int32))
    with pytest.raises(ValueError, match="num_rows=2 must be num_slots=3"):
        kv_pages.locate(rows, page_size=4)


BIG_LAYERS, BIG_SLOTS, BIG_COLUMNS = 4, 8, 4
PAGE = (4, 16, 64)  # kv_heads, page_size, head_dim


def one_layer(pages: Pages, layer, x: jax.Array, rows: Rows) -> tuple[Pages, jax.Array]:
    """Writes, then reads through the flat view, as attention does."""
    new = jnp.broadcast_to(x[:, None, None], (BIG_SLOTS, PAGE[0], PAGE[2]))
    pages = kv_pages.write(pages, layer, new, new, rows)
    ids = kv_pages.flat_ids(
        rows.page_ids, layer, num_layers=BIG_LAYERS, num_pages=pages.num_pages
    )
    view = kv_pages.flat(pages)
    k, v = (leaf.at[ids].get(mode="fill", fill_value=0) for leaf in view)
    return pages, jnp.sum(k * v, axis=(1, 2, 3, 4)).astype(x.dtype)


def only_write(pages: Pages, x: jax.Array, rows: Rows) -> tuple[Pages, jax.Array]:
    new = jnp.broadcast_to(x[:, None, None], (BIG_SLOTS, PAGE[0], PAGE[2]))
    return kv_pages.write(pages, 1, new, new, rows), x


def unrolled(pages: Pages, x: jax.Array, rows: Rows) -> tuple[Pages, jax.Array]:
    for layer in range(BIG_LAYERS):
        pages, x = one_layer(pages, layer, x, rows)
    return pages, x


def scanned(pages: Pages, x: jax.Array, rows: Rows) -> tuple[Pages, jax.Array]:
    def body(carry, layer):
        return one_layer(carry[0], layer, carry[1], rows), None

    layers = jnp.arange(BIG_LAYERS, dtype=jnp.int32)
    return jax.lax.scan(body, (pages, x), layers)[0]


def scanned_over(pages: Pages, x: jax.Array, rows: Rows) -> tuple[Pages, jax.Array]:
    """The layout to avoid: pages as scanned input and output."""

    def body(x, leaves):
        new = jnp.broadcast_to(x[:, None, None], (BIG_SLOTS, PAGE[0], PAGE[2]))
        one = jax.tree.map(lambda leaf: leaf[None], leaves)
        one = kv_pages.write(one, 0, new, new, rows)
        k, v = kv_pages.gather(one, 0, rows.page_ids)
        x = jnp.sum(k * v, axis=(1, 2, 3)).astype(x.dtype)
        return x, jax.tree.map(lambda leaf: leaf[0], one)

    x, pages = jax.lax.scan(body, x, pages)
    return pages, x


def footprint(run, dtype: str, num_pages: int, steps: int = 3) -> tuple[int, int, int]:
    """Bytes of the pages and of temporaries, and copies of a layer or more.

    Lowered from shapes alone, so that even large pools cost nothing.
    """

    @partial(jax.jit, donate_argnums=0)
    def decode(pages, x, rows):
        def step(_, carry):
            pages, x, position = carry
            pages, x = run(pages, x, rows._replace(position=position))
            return pages, jnp.tanh(x), position + 1

        carry = (pages, x, rows.position)
        return jax.lax.fori_loop(0, steps, step, carry)[:2]

    shape = (BIG_LAYERS, num_pages, *PAGE)

    def arguments() -> tuple[Pages, jax.Array, Rows]:
        row = jnp.zeros(BIG_SLOTS, jnp.int32)
        page_ids = jnp.zeros((BIG_SLOTS, BIG_COLUMNS), jnp.int32)
        pages = Pages(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
        return pages, row.astype(jnp.float32), make_rows(row, None, page_ids)

    compiled = decode.lower(*jax.eval_shape(arguments)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    copied = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", str(compiled.as_text()))
    sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in copied]
    copies = sum(size >= np.prod(shape[1:]) for size in sizes)
    pool_bytes = 2 * np.prod(shape) * jnp.dtype(dtype).itemsize
    return int(pool_bytes), memory.temp_size_in_bytes, int(copies)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("run", [only_write, unrolled, scanned])
def test_the_pages_stay_in_place(run, dtype: str) -> None:
    small, large = (footprint(run, dtype, n) for n in (512, 4096))
    assert large[2] == 0
    assert large[1] - small[1] < 0.05 * (large[0] - small[0])
    assert large[1] < 0.05 * large[0]


def test_a_copy_would_be_seen() -> None:
    """The same measure on the layout that is known to copy."""
    small, large = (footprint(scanned_over, "float32", n) for n in (512, 4096))
    assert large[2] > 0
    assert large[1] - small[1] > 0.5 * (large[0] - small[0])
