"""Keys and values in 8 bits: rounding, attention over them, engines that use them."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import memory, models
from jaxkv.engine import EngineConfig, EngineState, init
from jaxkv.memory import Pages, Rows, copy
from jaxkv.models import make_model_pages
from pallas_kernels import quantizing
from pallas_kernels.page_ops import write_rows
from tests.support import engines
from tests.support.attention_cases import (
    Case,
    attend_arrays,
    check,
    make_case,
    oracle,
    plain,
)

pytestmark = pytest.mark.usefixtures("full_optimization")

SLOW = pytest.mark.slow
KINDS: tuple[quantizing.Kind, ...] = ("int8", "fp8")
attend = jax.jit(
    attend_arrays, static_argnames=("window", "numerics", "implementation")
)
quantize = jax.jit(quantizing.quantize, static_argnames=("kind", "per"))


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("per", ["token", "page"])
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_to_the_nearest_number(kind: Any, per: Any) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, 2, 4, 32)) * 10.0 ** rng.integers(-6, 6, (6, 2, 1, 1))
    values = values.astype(np.float32)
    numbers, scales = quantize(values, kind, per=per)
    back = quantizing.dequantize(numbers, scales)
    assert back.dtype == scales.dtype == np.float32
    assert scales.shape == (values.shape[:3] if per == "token" else values.shape[:2])
    worth = np.expand_dims(wide(scales), tuple(range(scales.ndim, 4)))
    grid = np.arange(256, dtype=np.uint8)
    grid = grid.view(quantizing.FP8 if kind == "fp8" else np.int8).astype(float)
    grid = np.sort(grid[np.isfinite(grid) & (grid > -128 if kind == "int8" else True)])
    exact = wide(values) / worth
    numbers = wide(quantizing.as_number_type(numbers))
    nearest = np.abs(exact[..., None] - grid).min(-1)
    assert (np.abs(exact - numbers) <= nearest + 1e-4).all()
    # The largest number of a group becomes the largest of the type.
    axes = -1 if per == "token" else (-2, -1)
    assert (np.abs(numbers).max(axes) == (127 if kind == "int8" else 448)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_groups_at_the_limits(kind: Any) -> None:
    limits = [0.0, 1e-38, 1e-44, 3e38, -3e38, np.nan, 1.0]
    values = np.zeros((len(limits), 4), np.float32)
    values[:, 1] = limits
    back = np.asarray(quantizing.dequantize(*quantize(values, kind)))
    np.testing.assert_allclose(back[[0, 3, 4, 6]], values[[0, 3, 4, 6]], rtol=1e-6)
    assert not back[:3].any()
    assert np.isnan(back[5]).all()


def in_8_bits(case: Case, kind: Any, per: Any, dtype: Any = "float32") -> Any:
    """Pages in 8 bits, and the same case with the dequantized values.

    Unused places have the worst numbers and scales.
    """
    (k, k_scales), (v, v_scales) = (
        quantize(np.nan_to_num(x), kind, per=per) for x in (case.k_pages, case.v_pages)
    )
    meant = [
        np.where(np.isnan(x), np.nan, wide(quantizing.dequantize(*pair)))
        for x, pair in (
            (case.k_pages, (k, k_scales)),
            (case.v_pages, (v, v_scales)),
        )
    ]
    unused = np.isnan(case.k_pages)
    worst = -128 if kind == "int8" else 0x7F  # NaN
    k, v = (np.where(unused, np.asarray(worst, x.dtype), x) for x in (k, v))
    is_unused = unused.all(-1) if per == "token" else unused.all((-2, -1))
    k_scales, v_scales = (np.where(is_unused, np.nan, x) for x in (k_scales, v_scales))
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    scales = {name: x.astype(np.float32) for name, x in scales.items()}
    q = case.q.astype(dtype)
    exact = case._replace(q=q, k_pages=meant[0], v_pages=meant[1])
    return case._replace(q=q, k_pages=k, v_pages=v), scales, exact


@pytest.mark.thorough
@pytest.mark.parametrize("per", ["token", pytest.param("page", marks=SLOW)])
@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=SLOW)])
def test_attention_over_8_bits_equals_that_over_dequantized_values(
    kind: Any, per: Any
) -> None:
    rng = np.random.default_rng(1)
    window = 50
    sizes: dict[str, Any] = dict(page_size=16, head_dim=24, window=window)
    runs = [(0, 5), (90, 70), (0, 0), (130, 1)]
    narrow, scales, exact = in_8_bits(make_case(rng, runs, **sizes), kind, per)
    for numerics in ("fast", "reproducible"):
        state = attend(*narrow, window=window, numerics=numerics, **scales)
        check(state, oracle(exact, window=window))
    runs = [(start + num - 1, 1) if num else (0, 0) for start, num in runs]
    case = make_case(rng, runs, decode=True, **sizes)
    narrow, scales, exact = in_8_bits(case, kind, per)
    check(attend(*narrow, window=window, **scales), oracle(exact, window=window))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 24, 256])
def test_scales_of_pages_of_any_size(page_size: int) -> None:
    runs = [(start, 1) for start in (0, 63, 300)]
    case = make_case(np.random.default_rng(2), runs, page_size=page_size, decode=True)
    for per in ("token", "page"):
        narrow, scales, exact = in_8_bits(case, "int8", per)
        check(attend(*narrow, **scales), oracle(exact))


def error(state: Any, expected: Any) -> tuple[float, float]:
    off = np.abs(wide(state[0]) - expected[0])
    return float(off.max()), float(off.mean())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", *(pytest.param(x, marks=SLOW) for x in ("float16", "float32"))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_against_float64(kind: Any, dtype: Any) -> None:
    runs = [(length - 1, 1) for length in (1, 17, 64, 65, 300)]
    sizes: dict[str, Any] = dict(page_size=16, head_dim=128, group=4, decode=True)
    case = make_case(np.random.default_rng(3), runs, **sizes)
    for per in ("token", "page"):
        narrow, scales, exact = in_8_bits(case, kind, per, dtype)
        actual = attend(*narrow, **scales)
        assert actual.out.dtype == dtype
        k, v = (x.astype(jnp.dtype(dtype)) for x in exact[1:3])
        naive = plain(exact._replace(k_pages=k, v_pages=v), dtype)
        # Against the dequantized pages: the rule for 8 bits allows 4 and 3 times the
        # plain error. `attend` does not round values to the type of q, so 2 suffices.
        expected = oracle(exact)
        (top, mean), (plain_top, plain_mean) = (
            error(x, expected) for x in (actual, naive)
        )
        assert top <= 2 * plain_top + 1e-5
        assert mean <= 1.5 * plain_mean + 1e-5
        # Against the original values: the same rule, relative to plain 8-bit attention.
        before = oracle(case._replace(q=exact.q))
        (top, mean), (plain_top, plain_mean) = (
            error(x, before) for x in (actual, naive)
        )
        assert top <= 4 * plain_top + 1e-5
        assert mean <= 3 * plain_mean + 1e-5
        # int8 rounds to 1/127 of a group's largest number, fp8 to 1/16 of a value.
        assert mean < {"int8": 0.004, "fp8": 0.012}[kind]


@pytest.mark.thorough
def test_scales_must_fit_the_pages() -> None:
    case = make_case(np.random.default_rng(4), [(5, 1)], decode=True)
    narrow, scales, _ = in_8_bits(case, "int8", "token")
    with pytest.raises(ValueError, match="k_scales must be given for 8-bit pages"):
        attend(*narrow)
    with pytest.raises(ValueError, match="k_scales must be given for 8-bit pages"):
        attend(*case, **scales)
    # One scale per token for K, one per page for V.
    mixed = {"k_scales": scales["k_scales"], "v_scales": scales["v_scales"][..., 0]}
    attend(*narrow, **mixed)
    wrong: Any = dict(scales, v_scales=scales["v_scales"][..., :3])
    arrays: Any = {name: jnp.asarray(x) for name, x in wrong.items()}
    with pytest.raises(ValueError, match=r"v_scales.shape=\(\d+, 2, 3\) must be"):
        # Without the type checks of the tests, like a user's call.
        attend_arrays(*map(jnp.asarray, narrow[:5]), **arrays)
    with pytest.raises(ValueError, match="implementation='mosaic_gpu': "):
        attend(*narrow, **scales, implementation="mosaic_gpu")


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_write_reaches_its_place_and_no_other(kind: Any) -> None:
    rng = np.random.default_rng(5)
    shape = (7, 2, 4, 8)
    old = [rng.normal(size=shape).astype(np.float32) for _ in "kv"]
    new = [rng.normal(size=(6, 2, 8)).astype(np.float32) for _ in "kv"]
    page_ids = np.array([3, -1, 7, 0, 3, 2**31 - 1], np.int32)
    offsets = np.array([0, 1, 2, 3, 2, 0], np.int32)
    run = jax.jit(write_rows)
    written_rows = np.array([0, 3, 4])
    where = page_ids[written_rows], slice(None), offsets[written_rows]
    for held, rows in zip(old, new, strict=True):
        numbers = held
        scales = None
        if kind is not None:
            numbers, scales = quantize(held, kind)
        numbers_after, found_scales = run(
            numbers, page_ids, offsets, rows, scales=scales
        )
        numbers = np.array(numbers)
        if kind is not None:
            rows, worth = quantize(rows, kind)
            scales = np.array(scales)
            scales[where] = worth[written_rows]
            np.testing.assert_array_equal(found_scales, scales)
        numbers[where] = np.asarray(rows)[written_rows]
        np.testing.assert_array_equal(numbers_after, numbers)


def test_writes_name_the_scales_they_need() -> None:
    pages = jnp.zeros((3, 2, 4, 8), jnp.int8)
    row = jnp.ones((1, 2, 8), jnp.float32)
    where = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="scales must be given for 8-bit pages"):
        write_rows(pages, *where, row)


def make_small_pages(kind: Any, num_pages: int = 6) -> Pages:
    sizes: Any = dict(num_layers=2, num_pages=num_pages, num_kv_heads=2, page_size=4)
    return memory.make_pages(**sizes, head_dim=8, dtype="float32", kv_dtype=kind)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_pages_hold_what_is_written_and_move_with_their_scales(kind: Any) -> None:
    rng = np.random.default_rng(6)
    pages = make_small_pages(kind)
    assert pages.layout.kv_dtype == kind
    assert (pages.num_layers, pages.num_pages, pages.page_size) == (2, 6, 4)
    tokens = rng.normal(size=(2, 7, 2, 8)).astype(np.float32)
    position = jnp.arange(7, dtype=jnp.int32)
    page_ids = jnp.asarray([[4, 1]], jnp.int32)
    rows = Rows(position, position, jnp.zeros_like(position), page_ids, position)
    # One by one or all at once: later writes do not change the content of a page.
    at_once = jax.jit(pages.layout.write)(pages, 1, *tokens, rows)
    for index in range(7):
        one = rows._replace(position=jnp.where(position == index, position, -1))
        pages = jax.jit(pages.layout.write)(pages, 1, *tokens, one)
    for a, b in zip(jax.tree.leaves(pages), jax.tree.leaves(at_once), strict=True):
        np.testing.assert_array_equal(a, b)
    expected = [quantizing.dequantize(*quantize(x, kind)) for x in tokens]
    for x, page_values in zip(
        expected, pages.layout.read(pages, 1, page_ids), strict=True
    ):
        np.testing.assert_array_equal(page_values[0, :7], x)
        assert not page_values[0, 7:].any()
    copied = jax.jit(copy)(
        pages, jnp.asarray([4, 1], jnp.int32), jnp.asarray([0, 5], jnp.int32)
    )
    before, after = (
        x.layout.read(x, 1, jnp.asarray([ids], jnp.int32))
        for x, ids in ((pages, [4, 1]), (copied, [0, 5]))
    )
    np.testing.assert_array_equal(after, before)


CONFIG = EngineConfig(
    num_pages=40,
    page_size=4,
    max_slots=4,
    max_length=64,
    token_budget=64,
    steps_per_call=8,
    numerics="reproducible",
)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_attends_to_what_it_wrote_without_a_copy_of_the_pages(
    kind: Any,
) -> None:
    rng = np.random.default_rng(8)
    q, k, v = rng.normal(size=(3, 5, 2, 8)).astype(np.float32)
    position = jnp.arange(5, dtype=jnp.int32)
    slot = jnp.zeros(5, jnp.int32)
    rows = Rows(position, position, slot, jnp.asarray([[4, 1]], jnp.int32), position)
    attend = jax.jit(models.attend, donate_argnums=0, static_argnums=1)
    out, _ = attend(make_small_pages(kind), 1, q, k, v, rows)
    k, v = (
        np.asarray(quantizing.dequantize(*quantize(x, kind))).swapaxes(0, 1)[None]
        for x in (k, v)
    )
    where = np.zeros((1, 1), np.int32), np.asarray(position), np.asarray(slot)
    case = Case(q, k, v, *where)
    np.testing.assert_allclose(out, oracle(case)[0], rtol=0, atol=2e-5)

    pages = jax.eval_shape(lambda: make_small_pages(kind, 20_000))
    usage = attend.lower(pages, 1, q, q, q, rows).compile().memory_analysis()
    assert usage is not None
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    assert usage.temp_size_in_bytes < 0.05 * size
    assert usage.alias_size_in_bytes >= size


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_with_8_bits_answers_alike_in_any_batch(kind: Any) -> None:
    asks = engines.random_asks(np.random.default_rng(7), 6)
    one = dataclasses.replace(CONFIG, kv_dtype=kind, debug=True)
    # Other pages, other slots, and little memory, so that sequences are preempted.
    two = dataclasses.replace(one, num_pages=18, page_size=8, max_slots=3)
    runs = [
        engines.serve(asks, config, state=empty(config)).tokens for config in (one, two)
    ]
    assert runs[0] == runs[1]


def empty(config: EngineConfig) -> EngineState:
    """An idle engine; 8-bit integers have no NaN to fill its pages with."""
    return init(config, make_model_pages(engines.MODEL, config))


def test_pages_and_configuration_must_agree() -> None:
    pages = make_model_pages(engines.MODEL, CONFIG)
    config = dataclasses.replace(CONFIG, kv_dtype="int8")
    with pytest.raises(ValueError, match=r"='model' must be config\.kv_dtype='int8'"):
        init(config, pages)
    sizes: dict[str, Any] = dict.fromkeys(
        ["num_layers", "num_pages", "num_kv_heads", "page_size", "head_dim"], 1
    )
    with pytest.raises(ValueError, match="kv_dtype='int4' must be 'model', 'int8' or"):
        inspect.unwrap(memory.make_pages)(**sizes, dtype="float32", kv_dtype="int4")
