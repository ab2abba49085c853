"""Persistent compilation cache of JAX, enabled where none is configured.

Without a cache folder JAX compiles an engine's programs in every process, which takes
seconds at every start of a notebook. `Engine.load` sets a folder.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxkv import files

MAX_CACHE_BYTES = 2**30
"""Size of the folder above which JAX deletes the least recently used programs."""
MIN_COMPILE_TIME_S = 0.1
"""Programs that compile in less time are not stored."""
NOTICE_S = 5.0
"""Seconds of compilation after which a notice is printed."""
LOCK_WAIT_S = 120.0
"""Longest wait in s for another process that compiles the same programs."""

_DISABLING_VARIABLE = "JAX_ENABLE_COMPILATION_CACHE=false"


def keep_programs() -> None:
    """Sets JAX's persistent compilation cache, unless it is configured or disabled.

    The folder is `files.cache_folder()`. A message on standard error names it, once in
    a process. A folder that cannot be written to is not used.
    """
    config = jax.config
    is_chosen = (
        "JAX_COMPILATION_CACHE_DIR" in os.environ
        or config.jax_compilation_cache_dir is not None
    )
    if is_chosen or not config.values["jax_enable_compilation_cache"]:
        return
    if (folder := usable_folder()) is None:
        return
    config.update("jax_compilation_cache_dir", str(folder))
    _set_default("jax_persistent_cache_min_compile_time_secs", 1.0, MIN_COMPILE_TIME_S)
    # JAX bounds the size where this package is installed.
    if importlib.util.find_spec("filelock") is not None:
        _set_default("jax_compilation_cache_max_size", -1, MAX_CACHE_BYTES)
    _report(
        f"compiled programs are kept in {folder}; {_DISABLING_VARIABLE} disables this"
    )


def usable_folder(configured: str = "") -> Path | None:
    """Returns the folder of the cache, made if missing; None if it cannot be written.

    Args:
      configured: path of the folder; empty means `files.cache_folder()`.
    """
    try:
        folder = Path(configured) if configured else files.cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK | os.X_OK) else None
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None


@contextlib.contextmanager
def compile_once(programs: str) -> Generator[None]:
    """Lets one process compile while others that start with it wait for the cache.

    Processes on few cores would otherwise compile the same programs side by side, each
    slower by their number. Has no effect without a cache, after `LOCK_WAIT_S`, or once
    a process has compiled these programs.

    Args:
      programs: text that is equal for equal programs.
    """
    cache = jax.config.jax_compilation_cache_dir
    if cache is None or not jax.config.values["jax_enable_compilation_cache"]:
        yield
        return
    path = Path(cache, f"{hashlib.sha256(programs.encode()).hexdigest()}.compiled")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the folder is remote, or cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
            mark = stack.enter_context(path.open("a+b"))
            deadline_s = time.monotonic() + LOCK_WAIT_S
            # A mark with content: all programs are in the cache.
            while not path.stat().st_size and time.monotonic() < deadline_s:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.1)
        yield
        with contextlib.suppress(OSError):
            path.write_bytes(b"1")


_lock = threading.RLock()


@contextlib.contextmanager
def without_program_cache() -> Generator[None]:
    """Disables JAX's cache, so that a first call or compilation compiles."""
    with _lock:
        folder = jax.config.jax_compilation_cache_dir
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
        try:
            yield
        finally:
            jax.config.update("jax_compilation_cache_dir", folder)
            compilation_cache.reset_cache()


@contextlib.contextmanager
def notify_if_slow() -> Generator[None]:
    """Prints a notice if the context lasts longer than `NOTICE_S`."""
    notice = f"compiling, which takes more than {NOTICE_S:g} s"
    if jax.config.jax_compilation_cache_dir is not None:
        notice += "; the next start of the same configuration takes less"
    timer = threading.Timer(NOTICE_S, _report, [notice])
    timer.daemon = True
    try:
        timer.start()
        yield
    finally:
        timer.cancel()


def _set_default(name: str, default: float, value: float) -> None:
    """Sets a JAX option that has its default value and no environment variable."""
    if name.upper() not in os.environ and jax.config.values[name] == default:
        jax.config.update(name, value)


def _report(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        print("jaxkv:", line, file=sys.stderr, flush=True)
