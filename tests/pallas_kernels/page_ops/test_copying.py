"""Copies of pages: the public function against numpy, all layers, and in place."""

import inspect
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import memory
from jaxkv.memory import DEFAULT_LAYOUT, NO_PAGE, Pages, Rows
from pallas_kernels.page_ops import write_rows
from pallas_kernels.page_ops.copy import copy_pages
from tests.support.trees import ints

pytestmark = pytest.mark.usefixtures("full_optimization")

NUM_PAGES = 12


def numbered(*shape: int) -> jax.Array:
    return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)


def copy_twin(pages: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """Copies entry by entry, always from the old pages."""
    after = pages.copy()
    for read, written in zip(np.asarray(source), np.asarray(target), strict=True):
        if 0 <= read < len(pages) and 0 <= written < len(pages):
            after[written] = pages[read]
    return after


@pytest.mark.parametrize("shape", [(), (3,), (2, 4, 3)])
def test_random_copies_equal_the_twin(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    pages = numbered(NUM_PAGES, *shape)
    copy = jax.jit(copy_pages)
    for _ in range(50):
        # Targets are distinct, sources often; both may be out of range.
        source = rng.integers(-3, NUM_PAGES + 3, 7).astype(np.int32)
        target = rng.permutation(np.arange(-3, NUM_PAGES + 3))[:7].astype(np.int32)
        expected = copy_twin(np.asarray(pages), source, target)
        np.testing.assert_array_equal(copy(pages, source, target), expected)


def test_sources_are_read_before_targets_are_written() -> None:
    pages = numbered(4, 2)
    after = copy_pages(pages, ints(0, 1, 2), ints(1, 2, 0))
    np.testing.assert_array_equal(after, pages[ints(2, 0, 1, 3)])


def test_pages_come_from_another_array() -> None:
    pages = numbered(4, 2)
    other = -numbered(6, 2)
    after = copy_pages(pages, ints(5, -1, 6, 0), ints(1, 2, 3, 9), origin=other)
    np.testing.assert_array_equal(after, pages.at[1].set(other[5]))
    with pytest.raises(ValueError, match="must be pages"):
        copy_pages(pages, ints(0), ints(1), origin=numbered(4, 3))


def test_an_implementation_that_cannot_serve_is_refused() -> None:
    arrays: Any = (numbered(4, 2), ints(0), ints(1))
    with pytest.raises(ValueError, match="the device is a cpu, not a GPU"):
        copy_pages(*arrays, implementation="mosaic_gpu")
    # Without the type checks of the tests, like a user's call.
    copy = inspect.unwrap(copy_pages)
    with pytest.raises(ValueError, match="implementation='triton' must be None, 'ref"):
        copy(*arrays, implementation="triton")


def test_a_single_row_is_written_to_its_place_only() -> None:
    pages = numbered(NUM_PAGES, 2, 4, 5)
    new = -numbered(1, 2, 5)
    after, _ = write_rows(pages, ints(3), ints(2), new)
    np.testing.assert_array_equal(after, pages.at[3, :, 2].set(new[0]))


def make_pages(num_layers: int = 3, page_size: int = 4) -> Pages:
    k = numbered(num_layers, NUM_PAGES, 2, page_size, 5)
    return Pages(k, -1 - k, DEFAULT_LAYOUT)


def test_a_copy_reaches_every_layer_and_no_other_page() -> None:
    pages = make_pages()
    copy = jax.jit(memory.copy)
    # A sentinel must not reach the last page, nor, with an offset, another layer.
    source = ints(0, NO_PAGE, 5, 7, NO_PAGE, 3)
    target = ints(4, 2, NO_PAGE, 11, NO_PAGE, 1)
    after = copy(pages, source, target)
    for old, new in zip(*map(jax.tree.leaves, (pages, after)), strict=True):
        for layer in range(3):
            expected = copy_twin(np.asarray(old[layer]), source, target)
            np.testing.assert_array_equal(new[layer], expected)
    none = ints(*[NO_PAGE] * 6)
    after = copy(pages, source, none)
    for old, new in zip(*map(jax.tree.leaves, (pages, after)), strict=True):
        np.testing.assert_array_equal(new, old)


def test_many_copies_in_several_turns() -> None:
    rng = np.random.default_rng(1)
    copy = jax.jit(memory.copy)
    num_pages = 5 * NUM_PAGES
    pages = Pages(
        numbered(2, num_pages, 1, 2, 3), numbered(2, num_pages, 1, 2, 3), DEFAULT_LAYOUT
    )
    for chance in (0.0, 0.1, 0.5, 1.0):
        ids = rng.permutation(num_pages).astype(np.int32)
        source = ids[: num_pages // 2]
        target = ids[num_pages // 2 :]
        source = np.where(rng.random(source.size) < chance, source, NO_PAGE)
        after = copy(pages, source, target)
        for old, new in zip(*map(jax.tree.leaves, (pages, after)), strict=True):
            for layer in range(2):
                expected = copy_twin(np.asarray(old[layer]), source, target)
                np.testing.assert_array_equal(new[layer], expected)


def lower(steps: int, num_pages: int, dtype: str) -> tuple[Any, Pages]:
    """A program that copies, then writes, in every step; lowered from shapes."""
    shape = (4, num_pages, 4, 16, 64)
    leaf: Any = jax.ShapeDtypeStruct(shape, dtype)
    row = jax.ShapeDtypeStruct((8,), jnp.int32)

    @partial(jax.jit, donate_argnums=0)
    def run(pages: Pages, source: jax.Array, target: jax.Array) -> Pages:
        def step(i: jax.Array, pages: Pages) -> Pages:
            pages = memory.copy(pages, source + i, jnp.where(i > 1, target, NO_PAGE))
            rows = Rows(
                token=source,
                position=jnp.zeros_like(source),
                slot=None,
                page_ids=target[:, None],
                logit_rows=source,
            )
            new = jnp.ones((8, 4, 64), jnp.float32)
            return pages.layout.write(pages, 1, new, new, rows)

        return jax.lax.fori_loop(0, steps, step, pages)

    pages = Pages(leaf, leaf, DEFAULT_LAYOUT)
    return run.lower(pages, row, row).compile(), pages


@pytest.mark.parametrize(("steps", "dtype"), [(1, "float32"), (5, "bfloat16")])
def test_the_pages_stay_in_place(steps: int, dtype: str) -> None:
    programs = [lower(steps, num_pages, dtype) for num_pages in (512, 4096)]
    temporary = [p.memory_analysis().temp_size_in_bytes for p, _ in programs]
    assert temporary[1] - temporary[0] < 1e5  # less than 470 MB of pages
    for program, pages in programs:
        size = jax.tree.leaves(pages)[0].size
        for dims in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", program.as_text()):
            assert np.prod([int(n) for n in dims.split(",")]) < size
