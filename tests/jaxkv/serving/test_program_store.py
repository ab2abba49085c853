"""Programs are found in files by what they are traced from, or not at all."""

import functools
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from weakref import WeakValueDictionary

import jax
import numpy as np
import pytest

from jaxkv import arrays, scheduling, validation
from jaxkv.engine import state as engine_state
from jaxkv.memory import page_pool
from jaxkv.models import layers
from jaxkv.serving.compiling import program_store
from tests.support.folders import ROOT

MARKS = np.array([True, False, True])
FIRST = jax.jit(arrays.marked_indices, static_argnames="num")


class Pair(NamedTuple):
    """A type that the project does not know."""

    one: np.ndarray


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of programs, in a process with old source files."""
    monkeypatch.setattr(program_store, "is_enabled", True)
    monkeypatch.setattr(program_store, "_START_S", float("inf"))
    monkeypatch.setattr(program_store, "_loaded", WeakValueDictionary())
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def compile_first(num: object = 2, marks: object = MARKS) -> Callable:
    """Compiles as a new process would."""
    program_store._loaded.clear()
    return program_store.compile_program(FIRST, {"num": num}, marks)


def num_stored(folder: Path) -> int:
    return len([*folder.glob("*.program")])


def test_a_stored_program_is_not_traced_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_first()
    assert num_stored(folder) == 1
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    again = compile_first()
    assert again is not first
    np.testing.assert_array_equal(again(MARKS), [0, 2])


def test_a_program_lives_as_long_as_it_is_used() -> None:
    first = compile_first()
    again = program_store.compile_program(FIRST, {"num": 2}, MARKS)
    assert again is first
    del first, again
    gc.collect()
    assert not program_store._loaded


def test_other_arguments_are_other_programs(folder: Path) -> None:
    compile_first()
    compile_first(num=3)
    compile_first(marks=MARKS[:2])
    compile_first(marks=MARKS.astype(np.int32))
    assert num_stored(folder) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ROW_TILE", 64),
        ("settings", "highest"),
        ("sources", "another"),
        # Functions that are the project's own, in another's place.
        ("page_pool.share", page_pool.release),
        ("page_pool.allocate", page_pool.allocate_at),
        ("page_pool.Pool.__repr__", page_pool.release),
    ],
)
def test_changed_constants_settings_and_sources_change_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    compile_first()
    before = jax.config.values["jax_default_matmul_precision"]
    if name == "settings":
        jax.config.update("jax_default_matmul_precision", value)
    elif name == "sources":
        monkeypatch.setattr(program_store, "_digest_files", lambda paths: value)
    elif name.startswith("page_pool."):
        monkeypatch.setattr(f"jaxkv.memory.{name}", value)
    else:
        monkeypatch.setattr(layers, name, value)
    key = program_store._key(FIRST, {"num": 2}, ((MARKS,), {}))
    jax.config.update("jax_default_matmul_precision", before)
    assert key is not None
    assert not (folder / f"{key}.program").exists()


def test_a_damaged_file_is_replaced(folder: Path) -> None:
    compile_first()
    [path] = folder.glob("*.program")
    whole = path.read_bytes()
    for damage in (b"", whole[:100], b"x" * len(whole)):
        path.write_bytes(damage)
        np.testing.assert_array_equal(compile_first()(MARKS), [0, 2])
        assert path.read_bytes() != damage


def test_old_programs_are_deleted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_store, "MAX_PROGRAMS", 1)
    compile_first(num=2)
    compile_first(num=3)
    assert num_stored(folder) == 1


def ours(x: jax.Array) -> jax.Array:
    return x


@pytest.mark.parametrize(
    ("function", "static", "argument"),
    [
        (ours, {}, MARKS),
        (arrays.number_marked, {"num": ours}, MARKS),
        (arrays.number_marked, {"num": functools.partial(ours)}, MARKS),
        # A function within a function: its code does not tell what it captured.
        (arrays.number_marked, {"num": validation.checks_numbers()}, MARKS),
        (arrays.number_marked, {"num": object()}, MARKS),
        (arrays.number_marked, {}, Pair(MARKS)),
        (arrays.number_marked, {}, jax.tree_util.Partial(ours, MARKS)),
    ],
)
def test_what_is_not_of_the_project_has_no_key(
    function: Callable, static: dict[str, object], argument: object
) -> None:
    assert program_store._key(jax.jit(function), static, argument) is None


def test_what_is_of_the_project_has_a_key() -> None:
    static = {
        "num": functools.partial(arrays.number_marked),
        "config": engine_state.EngineConfig(num_pages=8),
        "kinds": engine_state.ALL_KINDS,
        "dtype": np.dtype("float32"),
    }
    function = jax.jit(arrays.number_marked)
    for policy in (scheduling.fcfs(), scheduling.static(), scheduling.vllm_scheduler()):
        assert program_store._key(function, static, policy) is not None


@functools.wraps(page_pool.share)
def wrapped(*args: object) -> None:
    """Has the name and module of what it replaces."""


@pytest.mark.parametrize("value", [ours, wrapped, Pair, mock.Mock()])
def test_a_replaced_function_leaves_all_programs_to_jax(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    monkeypatch.setattr(page_pool, "share", value)
    np.testing.assert_array_equal(compile_first()(MARKS), [0, 2])
    assert not num_stored(folder)


def test_source_files_that_changed_since_the_start_leave_all_to_jax(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_store, "_START_S", 0.0)
    np.testing.assert_array_equal(compile_first()(MARKS), [0, 2])
    assert not num_stored(folder)


SERVE = """
import jaxkv
engine = jaxkv.Engine.load("stdlib-bytes", max_slots=2, num_pages=8, max_length=32)
[done] = engine.generate([[1, 2, 3]], jaxkv.Sampling.greedy(max_tokens=4))
print(done.tokens)
"""


@pytest.mark.slow
def test_a_second_process_finds_all_programs_of_an_engine(tmp_path: Path) -> None:
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    variables = os.environ | cache | {"PYTHONPATH": str(ROOT)}
    outputs = []
    stored = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SERVE],
            env=variables,
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(done.stdout)
        stored.append({path.name for path in tmp_path.glob("cache/*.program")})
    assert outputs[0] == outputs[1]
    # `submit`, the steps of greedy requests, and `drain`.
    assert len(stored[0]) == 3
    assert stored[1] == stored[0]
