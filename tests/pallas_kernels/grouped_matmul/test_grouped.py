"""The public grouped product on a CPU, and the blocks of rows."""

import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import devices
from pallas_kernels.devices import Target
from pallas_kernels.grouped_matmul import api
from pallas_kernels.grouped_matmul import blocks as grouped_matmul_blocks
from pallas_kernels.grouped_matmul.api import grouped_matmul
from tests.support.grouped_cases import (
    Case,
    assert_within_rule,
    exact,
    make_case,
    plain,
    wide,
)
from tests.support.marks import one_quick
from tests.support.mutation import replace

pytestmark = pytest.mark.usefixtures("full_optimization")

CASES = {
    "some empty": make_case([3, 0, 17, 1, 0, 9], num_rows=37, dtype="float32"),
    "one has all": make_case([0, 0, 70], dtype="float32", width=48, num_columns=24),
    "no group has rows": make_case([0, 0], num_rows=5, dtype="float32"),
    "more groups than rows": make_case([0, 1, 0, 0, 0, 0, 1, 0], num_rows=3),
    "around a block": make_case([63, 64, 65, 200], dtype="float16"),
}
A100 = Target("gpu", "NVIDIA A100-SXM4-40GB", 108, "8.0")
HOPPER = Target("gpu", "NVIDIA H200", 132, "9.0")


def product(case: Case, **options: Any) -> jax.Array:
    run = jax.jit(lambda *arrays: grouped_matmul(*arrays, **options))
    return run(case.x, case.w, case.group_sizes)


@pytest.mark.parametrize("name", one_quick(CASES))
def test_it_equals_a_loop_over_groups(name: str) -> None:
    case = CASES[name]
    out = product(case)
    assert out.dtype == case.x.dtype
    assert_within_rule(out, exact(case), plain(case))


def test_sums_may_be_wider_than_the_operands() -> None:
    case = CASES["more groups than rows"]
    out = product(case, preferred_element_type="float32")
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact(case), atol=1e-5)


def test_other_gpus_use_the_ragged_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use XLA's ragged product, which runs here, too."""
    replace(monkeypatch, devices, "current_target", lambda: A100)
    case = CASES["some empty"]
    assert "ragged_dot" in str(jax.make_jaxpr(grouped_matmul)(*vars(case).values()))
    assert_within_rule(product(case), exact(case), plain(case))
    assert_gradients(case)


@pytest.mark.parametrize("name", ["some empty", "one has all", "no group has rows"])
def test_gradients_equal_the_formula(name: str) -> None:
    assert_gradients(CASES[name])


def assert_gradients(case: Case) -> None:
    """Gradients of a weighted sum of all results; rows without a group have none."""
    scale = np.random.default_rng(1).normal(size=(len(case.x), case.w.shape[2]))
    scale[sum(case.group_sizes) :] = np.nan

    def weighted(x: jax.Array, w: jax.Array, scale: jax.Array) -> Any:
        out, back = jax.vjp(lambda x, w: grouped_matmul(x, w, case.group_sizes), x, w)
        return back(scale.astype(out.dtype))

    scale = jnp.asarray(scale, jnp.float32)
    of_x, of_w = jax.jit(weighted)(case.x, case.w, scale)
    wanted_x = np.zeros(case.x.shape)
    wanted_w = np.zeros(case.w.shape)
    for group, run in enumerate(case.runs()):
        wanted_x[run] = wide(scale)[run] @ wide(case.w)[group].T
        wanted_w[group] = wide(case.x)[run].T @ wide(scale)[run]
    np.testing.assert_allclose(of_x, wanted_x, atol=1e-5)
    np.testing.assert_allclose(of_w, wanted_w, atol=2e-5)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    case = make_case([20, 0, 41, 30], width=96, num_columns=40, dtype="float32")
    full = np.asarray(product(case, numerics="reproducible"))
    group = np.repeat(np.arange(4), case.group_sizes)
    rng = np.random.default_rng(0)
    for count in (1, 60):
        subset = rng.permutation(91)[:count]
        subset = subset[np.argsort(group[subset], kind="stable")]
        sizes = jnp.asarray(np.bincount(group[subset], minlength=4), jnp.int32)
        few = Case(x=case.x[subset], w=case.w, group_sizes=sizes)
        out = np.asarray(product(few, numerics="reproducible"))
        assert (out == full[subset]).all()


def test_vmap_equals_single_runs() -> None:
    case = make_case([3, 4, 9], dtype="float32")
    sizes = jnp.asarray([[3, 4, 9], [0, 16, 0]], jnp.int32)
    both = jax.jit(jax.vmap(grouped_matmul, in_axes=(None, None, 0)))(
        case.x, case.w, sizes
    )
    for out, size in zip(both, sizes, strict=True):
        alone = Case(x=case.x, w=case.w, group_sizes=size)
        assert_within_rule(out, exact(alone), plain(alone))


def test_a_cpu_needs_memory_for_one_group() -> None:
    """XLA's own product copies rows for every group, and multiplies all of them."""
    case = make_case([16] * 16, width=128, num_columns=256, dtype="float32")
    arrays = case.x, case.w, case.group_sizes

    def temp_bytes(run: Any) -> int:
        memory = jax.jit(run).lower(*arrays).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    one_group = case.w[0].nbytes
    assert temp_bytes(grouped_matmul) < 1.5 * one_group
    assert temp_bytes(jax.lax.ragged_dot) > 8 * one_group


@pytest.mark.parametrize(("align", "block_rows"), [(1, 16), (8, 8), (8, 64)])
def test_blocks_cover_every_row_once(align: int, block_rows: int) -> None:
    rng = np.random.default_rng(0)
    num_rows = 150
    cut = functools.partial(
        grouped_matmul_blocks.split_row_blocks,
        num_rows=num_rows,
        block_rows=block_rows,
        align=align,
    )
    cut = jax.jit(cut)
    for _ in range(20):
        sizes = rng.integers(0, 38, 4) * rng.integers(0, 2, 4)
        blocks = cut(jnp.asarray(sizes, jnp.int32))
        assert int(blocks.num) <= len(blocks.group)
        owner = np.full(num_rows, -1)
        for i in range(int(blocks.num)):
            group, first, begin, end = (int(x[i]) for x in blocks[:4])
            assert first % align == 0
            assert first <= begin < end <= first + block_rows
            assert (owner[begin:end] == -1).all()
            owner[begin:end] = group
            assert (group < len(sizes)) == (i < int(blocks.num_grouped))
        ranks = np.repeat(np.arange(len(sizes)), sizes)
        padding = np.full(num_rows - len(ranks), len(sizes))
        np.testing.assert_array_equal(owner, [*ranks, *padding])


def test_the_bound_on_blocks_is_reached() -> None:
    # Groups that begin a row before a multiple of 8, one row too long for the block.
    sizes = jnp.asarray([7, 10, 6, 10], jnp.int32)
    blocks = grouped_matmul_blocks.split_row_blocks(
        sizes, num_rows=33, block_rows=8, align=8
    )
    assert int(blocks.num) == 1 + 3 + 1 + 3
    assert len(blocks.group) == (33 + 5 * 14) // 8


def test_no_rows_and_no_groups() -> None:
    none = jnp.zeros((0,), jnp.int32)
    w = jnp.ones((2, 4, 5), jnp.float32)
    assert grouped_matmul(w[0, :0, :4], w, jnp.zeros(2, jnp.int32)).shape == (0, 5)
    x = jnp.full((3, 4), jnp.nan, jnp.float32)
    assert not grouped_matmul(x, w[:0], none).any()
    gradient = jax.grad(lambda w: grouped_matmul(x, w, none).sum())(w[:0])
    assert gradient.shape == (0, 4, 5)


X, W, SIZES = (jnp.zeros(shape, "bfloat16") for shape in ((8, 64), (2, 64, 128), (2,)))
SIZES = SIZES.astype(jnp.int32)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        (
            (X[:, :32], W, SIZES),
            {},
            "x.shape=(8, 32) must be [rows, width] and w.shape",
        ),
        ((X, W, SIZES[:1]), {}, "group_sizes.shape=(1,) must be (2,), one for each"),
        ((X.astype("float32"), W, SIZES), {}, "must be w.dtype=dtype(bfloat16)"),
        (
            (X.astype("int32"), W.astype("int32"), SIZES),
            {},
            "must be a floating type of 16 bits or more",
        ),
        ((X, W, SIZES), {"preferred_element_type": "int32"}, "must be a floating type"),
        ((X, W, SIZES), {"implementation": "triton"}, "implementation='triton' must"),
        ((X, W, SIZES), {"numerics": "exact"}, "numerics='exact' must be 'fast' or"),
        (
            (X, W, SIZES),
            {"implementation": "mosaic_gpu"},
            "the device is a cpu, not a GPU; 'reference' takes it",
        ),
    ],
)
def test_inconsistent_arguments_are_refused(
    arrays: Any, options: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the type checks of the tests.
    unchecked: Any = inspect.unwrap(grouped_matmul)
    replace(
        monkeypatch,
        api,
        "choose_grouped_matmul",
        inspect.unwrap(api.choose_grouped_matmul),
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        unchecked(*arrays, **options)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({}, {"numerics": "reproducible"}, "numerics='reproducible' needs blocks"),
        ({"dtype": "float32"}, {}, "must be bfloat16 or float16"),
        ({"width": 96}, {}, "width=96 must be a positive multiple of 64"),
        ({"columns": 72}, {}, "columns=72 must be a positive multiple of 64"),
        ({"groups": 0}, {}, "w.shape[0]=0 must be at least 1"),
        ({}, {"preferred_element_type": "float64"}, "must have 16 or 32 bits"),
    ],
)
def test_the_reference_serves_unsupported_calls(
    changed: Any, options: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, devices, "current_target", lambda: HOPPER)
    sizes = {"dtype": "bfloat16", "width": 64, "columns": 128, "groups": 3} | changed
    x = jax.ShapeDtypeStruct((10, sizes["width"]), sizes["dtype"])
    w = jax.ShapeDtypeStruct(
        (sizes["groups"], sizes["width"], sizes["columns"]), sizes["dtype"]
    )
    assert api.choose_grouped_matmul(x, w, **options) == "reference"
    with pytest.raises(ValueError, match=re.escape(message)):
        api.choose_grouped_matmul(x, w, implementation="mosaic_gpu", **options)
