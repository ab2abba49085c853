"""Compiled programs, kept from one command to the next."""

import os
import re
from collections.abc import MutableMapping

from jaxkv import files

MIN_COMPILE_TIME_S = 0.2
"""Programs that compile faster are not worth a file."""


def keep_programs(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes JAX keep what it compiles, so that a second start takes a fraction.

    To be called before jax is imported; whoever has set a folder, or imported jax by
    then, is not overruled. The folder is `jaxkv` under `$XDG_CACHE_HOME` or `~/.cache`
    and may be deleted at any time.

    Args:
      environ: the environment to change.
    """
    if "JAX_COMPILATION_CACHE_DIR" in environ:
        return
    environ["JAX_COMPILATION_CACHE_DIR"] = str(files.cache_folder(environ))
    environ.setdefault(
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(MIN_COMPILE_TIME_S)
    )


def explain(warning: str, environ: MutableMapping[str, str] = os.environ) -> str:
    """Says what is to be done where JAX cannot keep programs, or read those kept.

    Args:
      warning: any warning; another one is given back.
      environ: the environment that names the folder.

    Returns:
      A line that is the same for all programs.
    """
    if not re.match("Error (reading|writing) persistent compilation cache", warning):
        return warning
    folder = environ.get("JAX_COMPILATION_CACHE_DIR", "the cache of compiled programs")
    system = re.search(r"\[Errno \d+\] ([^:]*)", warning)
    reason = system[1] if system else "what is there is broken"
    return (
        f"{folder}: no place for compiled programs: {reason}; every start compiles "
        "anew, until it is deleted or JAX_COMPILATION_CACHE_DIR names another folder"
    )
