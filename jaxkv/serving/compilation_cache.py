"""Persistent compilation cache of JAX, enabled where none is configured.

Without a cache folder JAX compiles an engine's programs in every process, which takes
seconds at every start of a notebook. `Engine.load` sets a folder.
"""

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Generator

import jax

from jaxkv import files

MAX_BYTES = 2**30
"""Size of the folder above which JAX deletes the least recently used programs."""
MIN_COMPILE_TIME_S = 0.1
"""Programs that compile in less time are not stored."""
NOTICE_S = 5.0
"""Seconds of compilation after which a notice is printed."""

_OFF = "JAX_ENABLE_COMPILATION_CACHE=false"


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
    try:
        folder = files.cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        is_usable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        is_usable = False
    if not is_usable:
        return
    config.update("jax_compilation_cache_dir", str(folder))
    _set_default("jax_persistent_cache_min_compile_time_secs", 1.0, MIN_COMPILE_TIME_S)
    # JAX bounds the size where this package is installed.
    if importlib.util.find_spec("filelock") is not None:
        _set_default("jax_compilation_cache_max_size", -1, MAX_BYTES)
    _report(f"compiled programs are kept in {folder}; {_OFF} disables this")


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
