"""Processes that start together compile their programs once."""

import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxkv.serving.compiling import compilation_cache


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    yield tmp_path / "programs"
    jax.config.update("jax_compilation_cache_dir", before)


def test_one_compiles_and_the_rest_wait_for_it(cache: Path) -> None:
    events: list[str] = []
    is_compiling = threading.Event()
    may_end = threading.Event()

    def first() -> None:
        with compilation_cache.compile_once("a"):
            is_compiling.set()
            may_end.wait(20)
            events.append("first")

    def later() -> None:
        with compilation_cache.compile_once("a"):
            events.append("later")

    with concurrent.futures.ThreadPoolExecutor() as pool:
        calls = [pool.submit(first)]
        assert is_compiling.wait(20)
        calls += [pool.submit(later) for _ in range(2)]
        with compilation_cache.compile_once("b"):  # other programs do not wait
            events.append("other")
        assert concurrent.futures.wait(calls, 0.3).done == set()
        may_end.set()
        for call in calls:
            call.result(20)
    assert events == ["other", "first", "later", "later"]
    assert len([*cache.iterdir()]) == 2


@pytest.mark.usefixtures("cache")
def test_a_failed_compilation_leaves_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no program"):
        with compilation_cache.compile_once("a"):
            raise ValueError("no program")
    monkeypatch.setattr(compilation_cache, "LOCK_WAIT_S", 0.2)
    with compilation_cache.compile_once("a"), compilation_cache.compile_once("a"):
        pass  # the wait for the outer one has an end


def test_without_a_usable_folder_nothing_waits(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_bytes(b"")  # a file
    for configured in (str(cache), None):
        jax.config.update("jax_compilation_cache_dir", configured)
        with compilation_cache.compile_once("a"), compilation_cache.compile_once("a"):
            pass
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert compilation_cache.usable_folder() is None
    assert compilation_cache.usable_folder(str(cache.parent)) == cache.parent
