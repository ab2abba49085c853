"""Persistent cache of compiled programs, for a faster second start."""

import os
import re
from collections.abc import MutableMapping

from jaxkv import files

MIN_COMPILE_TIME_S = 0.2
"""Compile time below which a program is not cached, in s."""


def enable_program_cache(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes JAX cache compiled programs on disk, so that a second start is faster.

    Must be called before jax is imported. Has no effect if a cache folder is already
    set. The folder is `jaxkv` under `$XDG_CACHE_HOME` or `~/.cache` and may be deleted
    at any time.

    Args:
      environ: environment to change.
    """
    if "JAX_COMPILATION_CACHE_DIR" in environ:
        return
    environ["JAX_COMPILATION_CACHE_DIR"] = str(files.cache_folder(environ))
    environ.setdefault(
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(MIN_COMPILE_TIME_S)
    )


def explain_cache_warning(
    warning: str, environ: MutableMapping[str, str] = os.environ
) -> str:
    """Returns a remedy for a warning that JAX cannot read or write its cache.

    Args:
      warning: any warning; a warning about another subject is returned unchanged.
      environ: environment with the cache folder.

    Returns:
      One line, equal for all programs; "" for a program that XLA cannot serialize
      (training steps, whose products are oneDNN's), about which a user can do nothing.
    """
    if not re.match("Error (reading|writing) persistent compilation cache", warning):
        return warning
    if warning.startswith("Error writing") and "std::bad_alloc" in warning:
        return ""
    folder = environ.get("JAX_COMPILATION_CACHE_DIR", "the cache of compiled programs")
    system = re.search(r"\[Errno \d+\] ([^:]*)", warning)
    reason = system[1] if system else "its files are damaged"
    return (
        f"{folder}: cannot cache compiled programs: {reason}; every start compiles "
        "again until it is deleted or JAX_COMPILATION_CACHE_DIR names another folder"
    )
