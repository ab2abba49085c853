"""Compiled programs, kept from one command to the next."""

import os
from collections.abc import MutableMapping
from pathlib import Path

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
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(base) / "jaxkv")
    environ.setdefault(
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(MIN_COMPILE_TIME_S)
    )
