"""The page copy kernel, emulated with race detection, against the reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice

from pallas_kernels import devices
from pallas_kernels.devices import Target
from pallas_kernels.page_ops import copy_mosaic_gpu
from pallas_kernels.page_ops.copy import copy_pages
from tests.support.mutation import replace
from tests.support.trees import ints

EMULATED = plgpu.InterpretGPUParams(detect_races=True)
NUM_PAGES = 12


def make_pages(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    """Random bits, including NaN patterns: a copy must preserve them."""
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, 8), np.uint8)
    width = jnp.dtype(dtype).itemsize
    return jnp.asarray(bits[..., :width].copy().view(dtype)[..., 0])


def assert_same_bits(a: jax.Array, b: jax.Array) -> None:
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def copy(pages: jax.Array, source: Any, target: Any, **options: Any) -> jax.Array:
    run = jax.jit(
        lambda *arrays: copy_mosaic_gpu.copy_pages_mosaic_gpu(
            *arrays, interpret=EMULATED, **options
        )
    )
    try:
        after = run(pages, source, target)
        after.block_until_ready()
    except BaseException:
        interpreter.reset_gpu_interpret_mode_state()
        raise
    assert not interpreter.get_races().races_found, "a race"
    return after


@pytest.mark.parametrize(
    ("shape", "dtype", "part_bytes"),
    [
        ((2, 16, 64), jnp.bfloat16, 32_768),  # one part
        ((2, 16, 64), jnp.float32, 2048),  # four parts
        ((3, 8, 40), jnp.float32, 1000),  # the part size does not divide the page
        ((1, 16, 8), jnp.int8, 128),  # one line
        ((64,), jnp.float32, 32_768),
    ],
)
def test_it_equals_the_reference(
    shape: tuple[int, ...], dtype: Any, part_bytes: int
) -> None:
    pages = make_pages((NUM_PAGES, *shape), dtype)
    # Unused entries have page ids out of range: source, target, or both.
    source = ints(1, -1, 3, NUM_PAGES, 5, 2, -7)
    target = ints(4, 0, 6, 7, -1, 8, -7)
    after = copy(pages, source, target, part_bytes=part_bytes)
    assert_same_bits(after, copy_pages(pages, source, target))


def test_pages_come_from_another_array() -> None:
    pages = make_pages((NUM_PAGES, 4, 32), jnp.float32)
    origin = make_pages((5, 4, 32), jnp.float32, seed=1)
    # The same page may be read and written, because the arrays differ.
    source = ints(0, 4, 5, 2)
    target = ints(4, 0, 3, NUM_PAGES)
    after = copy(pages, source, target, origin=origin)
    expected = copy_pages(pages, source, target, origin=origin)
    assert_same_bits(after, expected)


def test_vmap_equals_single_runs() -> None:
    pages = make_pages((2, NUM_PAGES, 32), jnp.float32)
    source = jnp.stack([ints(1, 2), ints(-1, 5)])
    target = jnp.stack([ints(3, 4)] * 2)
    run = lambda *x: copy_mosaic_gpu.copy_pages_mosaic_gpu(*x, interpret=EMULATED)  # noqa: E731
    both = jax.jit(jax.vmap(run))(pages, source, target)
    assert not interpreter.get_races().races_found
    for i in range(2):
        assert_same_bits(both[i], copy_pages(pages[i], source[i], target[i]))


def test_nothing_to_copy() -> None:
    pages = make_pages((NUM_PAGES, 32), jnp.float32)
    assert_same_bits(copy(pages, ints(), ints()), pages)
    assert_same_bits(copy(pages, ints(-1, NUM_PAGES), ints(3, 4)), pages)


def test_a_chain_of_copies_is_a_race() -> None:
    pages = make_pages((NUM_PAGES, 32), jnp.float32)
    # jax 0.11 records a race, 0.12 raises an error.
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=r"(?i)race"):
        copy(pages, ints(1, 4), ints(4, 5))
    interpreter.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize("left_out", ["barrier_wait", "wait_smem_to_gmem"])
def test_a_missing_wait_is_detected(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = make_pages((NUM_PAGES, 32), jnp.float32)
    monkeypatch.setattr(copy_mosaic_gpu.plgpu, left_out, lambda *args: None)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        copy(pages, ints(1), ints(4))
    interpreter.reset_gpu_interpret_mode_state()


def test_pages_of_an_odd_size_are_refused() -> None:
    with pytest.raises(ValueError, match="page_bytes=132 must be a positive multiple"):
        copy(make_pages((3, 33), jnp.float32), ints(0), ints(1))


def test_it_lowers_for_a_gpu() -> None:
    pages = jax.ShapeDtypeStruct((NUM_PAGES, 8, 16, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((6,), jnp.int32)
    traced = jax.jit(copy_mosaic_gpu.copy_pages_mosaic_gpu).trace(pages, ids, ids)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_public_function_uses_the_kernel_if_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hopper = Target("gpu", "NVIDIA H200", 132, "9.0")
    replace(monkeypatch, devices, "current_target", lambda: hopper)
    shapes = ((4, 32), (2,), (2,))
    arrays: Any = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]

    def uses_kernel(*arrays: Any, **options: Any) -> bool:
        copy = lambda *arrays: copy_pages(*arrays, **options)  # noqa: E731
        return "mpmd_map" in str(jax.make_jaxpr(copy)(*arrays))

    assert uses_kernel(*arrays, disjoint=True)
    assert uses_kernel(*arrays, origin=jnp.zeros((7, 32), jnp.int32))
    assert not uses_kernel(*arrays)
    assert not uses_kernel(*arrays, disjoint=True, implementation="reference")
    odd = jax.ShapeDtypeStruct((4, 33), jnp.int32)
    assert not uses_kernel(odd, *arrays[1:], disjoint=True)
    with pytest.raises(ValueError, match="set `disjoint`"):
        uses_kernel(*arrays, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="page_bytes=132 must be"):
        uses_kernel(odd, *arrays[1:], disjoint=True, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA H200", "9.0"),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA GH200 480GB", "9.0"),
        ("NVIDIA A100-SXM4-40GB", ""),
        ("NVIDIA B200", ""),
    ],
)
def test_a_mesh_names_its_devices(kind: str, capability: str) -> None:
    device = AbstractDevice(device_kind=kind, num_cores=7, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert devices.current_target() == Target("gpu", kind, 7, capability)
