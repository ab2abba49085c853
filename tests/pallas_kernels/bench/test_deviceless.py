"""Compilation for an absent GPU, and the errors without the compiler."""

import dataclasses
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv import memory
from jaxkv.engine import Speculation
from jaxkv.memory import DEFAULT_LAYOUT, Pages
from jaxkv.speculation import Lookahead, NGram, SharedNoiseVerifier
from pallas_kernels import devices
from pallas_kernels.bench import deviceless
from pallas_kernels.page_ops import copy_mosaic_gpu, copy_pages
from tests.support import engine_programs

WHY_NOT = deviceless.unavailable_reason()
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(dims, dtype)


def ids(num: int) -> Any:
    return shape(num, dtype=jnp.int32)


def test_a_missing_plugin_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "CUDA plugin is not installed" in str(deviceless.unavailable_reason())
    with pytest.raises(RuntimeError, match="CUDA plugin is not installed"):
        deviceless.compile_function(jnp.sin, shape(3))


def test_a_missing_libdevice_raises_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without libdevice the compiler would abort the process."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ptxas").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(deviceless, "_TOOLKITS", ())
    monkeypatch.setattr(deviceless, "_is_installed", lambda name: "nvidia" not in name)
    assert "no CUDA toolkit" in str(deviceless.unavailable_reason())
    (tmp_path / "nvvm" / "libdevice").mkdir(parents=True)
    (tmp_path / "nvvm" / "libdevice" / "libdevice.10.bc").touch()
    assert deviceless.unavailable_reason() is None


@needs_compiler
def test_the_page_copy_needs_little_memory() -> None:
    # 32 layers of 1000 pages of 16 tokens; 64 pages of all layers are copied at once.
    pool = shape(32 * 1000, 8, 16, 128)
    before = dict(os.environ)
    report = deviceless.compile_function(
        copy_mosaic_gpu.copy_pages_mosaic_gpu,
        pool,
        ids(64 * 32),
        ids(64 * 32),
        donate_argnums=0,
    )
    assert dict(os.environ) == before
    (kernel,) = report.kernels
    assert kernel.name.startswith("copy_part")
    assert 0 < kernel.registers <= 32
    assert kernel.spill_stores == kernel.spill_loads == 0
    assert kernel.smem_bytes == 32_768
    assert kernel.instructions["tma_load"] == kernel.instructions["tma_store"] == 1
    assert kernel.instructions["wgmma"] == 0
    # In place, without temporary memory.
    assert report.temp_bytes == 0
    assert report.alias_bytes == 32 * 1000 * 8 * 16 * 128 * 2
    assert " copy(" not in report.text


@needs_compiler
def test_the_implementation_depends_on_the_target() -> None:
    targets = []

    def copy(pages: Any, source: Any, target: Any) -> Any:
        targets.append(devices.current_target())
        return copy_pages(
            pages, source, target, disjoint=True, implementation="mosaic_gpu"
        )

    arguments = (shape(99, 2, 16, 64), ids(3), ids(3))
    report = deviceless.compile_function(copy, *arguments, donate_argnums=0)
    assert [kernel.name[:9] for kernel in report.kernels] == ["copy_part"]
    assert targets[0] == devices.Target("gpu", "NVIDIA H200", 132, "9.0")
    assert devices.current_target().platform == "cpu"


@needs_compiler
def test_pages_of_more_than_two_to_the_31_numbers() -> None:
    pool = shape(200_000, 8, 16, 128)
    report = deviceless.compile_function(
        copy_mosaic_gpu.copy_pages_mosaic_gpu, pool, ids(8), ids(8), donate_argnums=0
    )
    assert report.alias_bytes == 200_000 * 8 * 16 * 128 * 2
    assert report.temp_bytes == 0


@needs_compiler
def test_a_copy_by_gather_and_scatter_takes_memory() -> None:
    """The kernel's reference shows that the measurement above can differ."""
    pool = shape(32 * 1000, 8, 16, 128)
    report = deviceless.compile_function(
        lambda *args: copy_pages(*args, implementation="reference"),
        pool,
        ids(64 * 32),
        ids(64 * 32),
        donate_argnums=0,
    )
    assert not report.kernels
    assert report.temp_bytes >= 64 * 32 * 8 * 16 * 128 * 2


@needs_compiler
def test_sharded_programs_exchange_data() -> None:
    """Arguments without a sharding are replicated; gathers are counted."""
    mesh = deviceless.make_h200_mesh({"row": 2, "column": 2})
    spec = PartitionSpec("row", "column")
    x = jax.ShapeDtypeStruct((64, 6), "float32", sharding=NamedSharding(mesh, spec))

    def of_device(x: Any, y: Any) -> Any:
        return jax.lax.psum(x, "column") * y[None]

    run = jax.shard_map(
        of_device, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
    )
    text = deviceless.compile_function(
        run, x, shape(3, dtype="float32"), mesh=mesh
    ).text
    reduce = re.findall(r"= (\S+) all-reduce(?:-start)?\(", text)
    assert [exchanged.partition("{")[0] for exchanged in reduce] == ["f32[32,3]"]
    # Replicated arguments are whole on every device; the compiler divides the rest.
    array_shape = jax.ShapeDtypeStruct((64, 6), "float32")
    text = deviceless.compile_function(lambda x: x * 2, array_shape, mesh=mesh).text
    assert "f32[64,6]" in text
    assert (
        "all-gather"
        in deviceless.compile_function(
            lambda x: jax.lax.with_sharding_constraint(
                x * 2, NamedSharding(mesh, PartitionSpec())
            ),
            x,
            mesh=mesh,
        ).text
    )


@needs_compiler
def test_copies_in_a_loop_are_in_place() -> None:
    def run(pages: Pages, source: Any, target: Any) -> Pages:
        def step(_: Any, pages: Pages) -> Pages:
            return memory.copy(pages, source, target)

        return jax.lax.fori_loop(0, 5, step, pages)

    # The kernel copies pages of 128 bytes, the reference pages of 64.
    for page_size, num_kernels in ((16, 2), (1, 0)):
        leaf = shape(4, 4096 * 16, 1, page_size, 32)
        pages = Pages(leaf, leaf, DEFAULT_LAYOUT)
        report = deviceless.compile_function(
            run, pages, ids(8), ids(8), donate_argnums=0
        )
        assert len(report.kernels) == num_kernels
        assert report.temp_bytes < 0.05 * engine_programs.bytes_of(pages)
        assert not engine_programs.large_copies(report.text, pages)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "max_drafts"),
    [(NGram(), 3), (Lookahead(columns=2, ngram=3, candidates=2, entries=8), 8)],
    ids=["chain", "tree"],
)
def test_an_engine_that_speculates_keeps_its_pages_in_place_on_an_h200(
    drafter: Any, max_drafts: int
) -> None:
    model = dataclasses.replace(engine_programs.MODEL, head_dim=64)
    config = dataclasses.replace(engine_programs.CONFIG, max_drafts=max_drafts)
    run, arguments, pages = engine_programs.steps(
        engine_programs.LARGE,
        model=model,
        config=config,
        dtype="bfloat16",
        speculation=Speculation(drafter, SharedNoiseVerifier()),
    )
    report = deviceless.compile_function(run, *arguments, donate_argnums=1)
    assert report.temp_bytes < 0.05 * engine_programs.bytes_of(pages)
    assert not engine_programs.large_copies(report.text, pages)
    names = {kernel.name.rpartition("_")[0] for kernel in report.kernels}
    assert names == {"copy_part", "decode_attention", "merge_one"}
    for kernel in report.kernels:
        assert kernel.spill_stores == kernel.spill_loads == 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head_dim", "token_budget", "attends"),
    [
        ("float32", 16, 64, set()),
        ("bfloat16", 64, 64, {"decode_attention", "merge_one"}),
        ("bfloat16", 64, 96, {"decode_attention", "merge_one", "prefill_attention"}),
    ],
)
def test_the_engine_keeps_its_pages_in_place_on_an_h200(
    dtype: str, head_dim: int, token_budget: int, attends: set[str]
) -> None:
    """The reference serves float32, the Hopper kernels the types that they support.

    64 rows of two query heads per KV head are few; more may hold a chunk.
    """
    model = dataclasses.replace(engine_programs.MODEL, head_dim=head_dim)
    config = dataclasses.replace(engine_programs.CONFIG, token_budget=token_budget)
    run, arguments, pages = engine_programs.steps(
        engine_programs.LARGE, model=model, config=config, dtype=dtype
    )
    report = deviceless.compile_function(run, *arguments, donate_argnums=1)
    assert report.temp_bytes < 0.05 * engine_programs.bytes_of(pages)
    assert not engine_programs.large_copies(report.text, pages)
    names = {kernel.name.rpartition("_")[0] for kernel in report.kernels}
    assert names == {"copy_part"} | attends
    for kernel in report.kernels:
        assert kernel.spill_stores == kernel.spill_loads == 0
        assert kernel.smem_bytes <= devices.SMEM_BYTES
