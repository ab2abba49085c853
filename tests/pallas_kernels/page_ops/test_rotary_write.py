"""Rotary positions fused with the write of K and V: reference and emulated kernel."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import devices, row_packing
from pallas_kernels.bench import compile_function, unavailable_reason
from pallas_kernels.devices import Target
from pallas_kernels.page_ops import (
    RotaryCosSin,
    query_rows,
    rotary_write_mosaic_gpu,
    write_rotated_kv,
)
from tests.support import emulating
from tests.support.mutation import replace

NUM_LAYERS = 3
NUM_PAGES = 6
PAGE_SIZE = 16
OF_LAYER: Any = {"layer": jnp.int32(1), "num_layers": NUM_LAYERS}
PAGE = (0, 3, -1, NUM_PAGES, 2, 2)
PLACE = (1, 15, 0, 7, PAGE_SIZE, -1)
"""Places of rows: two are valid, four are not."""


class Case(NamedTuple):
    qkv: Any
    cos_sin: Any
    k_pages: Any
    v_pages: Any
    page_ids: Any
    offsets: Any
    packing: Any


def make(
    kv_heads: int = 4, group: int = 2, head_dim: int = 64, dtype: Any = jnp.bfloat16
) -> Case:
    rng = np.random.default_rng(kv_heads + group + head_dim)
    rows = len(PAGE)
    pages = NUM_LAYERS * NUM_PAGES, kv_heads, PAGE_SIZE, head_dim
    angles = rng.uniform(0, 7, (rows, head_dim // 2)).astype(np.float32)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    return Case(
        qkv=normal(rows, kv_heads, group + 2, head_dim),
        cos_sin=RotaryCosSin(
            *(
                turn[query_rows(rows, kv_heads * group)].reshape(
                    rows, kv_heads, group, -1
                )
                for turn in (jnp.cos(angles), jnp.sin(angles))
            )
        ),
        k_pages=normal(*pages),
        v_pages=normal(*pages),
        page_ids=jnp.asarray(PAGE, jnp.int32),
        offsets=jnp.asarray(PLACE, jnp.int32),
        packing=row_packing.pack_rows(
            jnp.asarray([0, 0, 0, 0, 2, 2], jnp.int32),
            jnp.asarray([1, 1, 1, 0, 1, 1], bool),
            num_slots=3,
            tokens=2,
        ),
    )


def emulate(case: Case) -> Any:
    with emulating.emulator_of_races() as interpret:
        run = jax.jit(
            rotary_write_mosaic_gpu.write_rotated_kv_mosaic_gpu,
            static_argnames=("num_layers", "interpret"),
        )
        options: Any = {"packing": case.packing, "interpret": interpret} | OF_LAYER
        q, packed, *pages = jax.block_until_ready(run(*case[:-1], **options))
        return q, only_rows(case, packed), *pages


def only_rows(case: Case, packed: Any) -> Any:
    """Packed queries with zeros outside the rows, which the kernel leaves undefined."""
    group = case.qkv.shape[2] - 2
    unpacked = row_packing.unpack_rows(packed, case.packing, group=group, fill=0.0)
    kv_heads = packed.shape[1]
    return row_packing.pack_queries(unpacked, case.packing, kv_heads=kv_heads)


def refer(case: Case) -> Any:
    run = jax.jit(write_rotated_kv, static_argnames="num_layers")
    return run(*case[:-1], packing=case.packing, **OF_LAYER)


def test_the_reference_rotates_and_writes_row_by_row() -> None:
    case = make(kv_heads=2, group=3, head_dim=8, dtype=jnp.float32)
    outputs = write_rotated_kv(*case[:-1], packing=case.packing, **OF_LAYER)
    x = np.asarray(case.qkv, np.float64)
    # Pairs as complex numbers, multiplied by the unit number of their angle.
    cos, sin = (np.asarray(turn[:, :1, :1], np.float64) for turn in case.cos_sin)
    turned = (x[..., :4] + 1j * x[..., 4:]) * (cos + 1j * sin)
    turned = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(outputs.q, turned[:, :, :3], atol=1e-6)
    # Slot 0 has three rows, two of them in the first block; slot 2 has two.
    assert outputs.packed_q is not None
    packed = np.asarray(outputs.packed_q)[:, :, :6].reshape(-1, 2, 2, 3, 8)
    for block, rows in enumerate([(0, 1), (2,), (4, 5)]):
        for token, row in enumerate(rows):
            np.testing.assert_allclose(
                packed[block, :, token], turned[row, :, :3], atol=1e-6
            )
    k = np.asarray(case.k_pages).copy()
    v = np.asarray(case.v_pages).copy()
    for row in (0, 1):
        k[NUM_PAGES + PAGE[row], :, PLACE[row]] = turned[row, :, 3]
        v[NUM_PAGES + PAGE[row], :, PLACE[row]] = x[row, :, 4]
    np.testing.assert_allclose(outputs.k_pages, k, atol=1e-6)
    np.testing.assert_array_equal(outputs.v_pages, v)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "dtype"),
    [
        (4, 3, 64, jnp.bfloat16),
        pytest.param(2, 1, 128, jnp.float16, marks=pytest.mark.thorough),
        pytest.param(1, 4, 256, jnp.bfloat16, marks=pytest.mark.thorough),
    ],
)
def test_the_kernel_has_the_reference_s_bits(
    kv_heads: int, group: int, head_dim: int, dtype: Any
) -> None:
    case = make(kv_heads, group, head_dim, dtype)
    expected = refer(case)
    for kernel_leaf, expected_leaf in zip(emulate(case), expected, strict=True):
        assert kernel_leaf.dtype == expected_leaf.dtype
        assert np.asarray(kernel_leaf).tobytes() == np.asarray(expected_leaf).tobytes()


BUGS = {
    "read before it has come": ("plgpu.barrier_wait(arrived)", "None"),
    "taken before it is seen": ("plgpu.commit_smem()", "None"),
    "left before it is gone": ("plgpu.wait_smem_to_gmem(0)", "None"),
    "turned the other way": (" - second * sin", " + second * sin"),
    "the value turned for the key": ("(k_low, group, low)", "(k_low, group + 1, low)"),
    "a place out of range": ("jnp.logical_and(is_page, is_place)", "is_page"),
    "a page out of range": ("jnp.logical_and(is_page, is_place)", "is_place"),
    "a page of the first layer": ("layer[0] * layer_pages + ", ""),
    "a page of the next layer": ("page < layer_pages", "page < num_pages"),
    "halves the wrong way round": ("place, low]", "place, high]"),
    "packed in another row's place": ("pl.ds(token * group, group)", "pl.ds(0, group)"),
}


def fails(case: Case, expected: Any) -> bool:
    """Returns True if the emulator raises an error or the bits differ."""
    try:
        kernel_outputs = emulate(case)
    except (RuntimeError, ValueError) as error:
        return bool(re.search(rf"{emulating.NOTICED}|CpuCallback", str(error)))
    pairs = zip(kernel_outputs, expected, strict=True)
    return any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_detected(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make()
    kernel = rotary_write_mosaic_gpu
    expected = refer(case)
    assert not fails(case, expected)
    changed = emulating.mutant(kernel, dict([BUGS[bug]]))
    name = "write_rotated_kv_mosaic_gpu"
    replace(monkeypatch, kernel, name, getattr(changed, name))
    assert fails(case, expected)


def uses_kernel(case: Case, **options: Any) -> bool:
    def call(*arrays: Any) -> Any:
        return write_rotated_kv(*arrays, **options)

    return "mpmd_map" in str(jax.make_jaxpr(call)(*case[:-1]))


def test_the_public_function_uses_the_kernel_if_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not uses_kernel(make())
    hopper = Target("gpu", "NVIDIA H200", 132, "9.0")
    replace(monkeypatch, devices, "current_target", lambda: hopper)
    assert uses_kernel(make())
    assert not uses_kernel(make(), implementation="reference")
    # Three heads of 64 are 96 pairs, fewer than the threads of a warpgroup.
    for refused, line in (
        (make(kv_heads=3), r"kv_heads=3 times half of head_dim=64 must be a multiple"),
        (make(dtype=jnp.float32), r"qkv.dtype=.*float32.* must both be bfloat16"),
    ):
        assert not uses_kernel(refused)
        with pytest.raises(ValueError, match=line):
            uses_kernel(refused, implementation="mosaic_gpu")


@pytest.mark.thorough
@pytest.mark.skipif(unavailable_reason() is not None, reason="no compiler for GPUs")
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"), [(8, 4, 128), (2, 8, 128), (4, 3, 64)]
)
def test_it_compiles_in_place_without_spills(
    kv_heads: int, group: int, head_dim: int
) -> None:
    case = make(kv_heads, group, head_dim)
    run = rotary_write_mosaic_gpu.write_rotated_kv_mosaic_gpu

    def pack_too(*arrays: Any) -> Any:
        return run(*arrays[:-1], packing=arrays[-1])

    report = compile_function(pack_too, *case, donate_argnums=(2, 3))
    [kernel] = report.kernels
    assert kernel.spill_stores == kernel.spill_loads == 0
    assert kernel.instructions["tma_store"] == 7
    assert report.alias_bytes == 2 * case.k_pages.nbytes
    assert "copy(" not in report.text
