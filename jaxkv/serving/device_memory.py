"""Free memory of the device or host, checked before arrays are made.

On many machines a pool that is too large would end the process without a message: Linux
grants memory that it does not have, and kills the process that writes to it.
"""

from pathlib import Path

import jax
from jaxtyping import PyTree

from jaxkv.arrays import ArrayOrShape

_MEMINFO = Path("/proc/meminfo")
_CGROUP_FOLDER = Path("/sys/fs/cgroup")


def num_bytes(tree: PyTree[ArrayOrShape]) -> int:
    """Returns the bytes of a tree of arrays, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def free_bytes() -> int | None:
    """Returns the free bytes of the default device; None if unknown."""
    device = jax.config.jax_default_device or jax.local_devices()[0]
    stats = device.memory_stats() if isinstance(device, jax.Device) else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    readings = [x for x in (_free_on_host(), _free_in_group()) if x is not None]
    return min(readings, default=None)


def check_free_memory(tree: PyTree[ArrayOrShape], name: str) -> None:
    """Raises an error if arrays do not fit into the free memory.

    Args:
      tree: shapes of the arrays.
      name: their name in the error message, with the settings that shrink them.

    Raises:
      ValueError: the arrays need more memory than is free.
    """
    needed = num_bytes(tree)
    free = free_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"{needed:,} bytes are needed and {free:,} are free for {name}"
        )


def _free_on_host() -> int | None:
    """Returns the bytes that Linux can provide without swapping."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    available_kib = [
        line.split()[1] for line in lines if line.startswith("MemAvailable:")
    ]
    return int(available_kib[0]) * 1024 if available_kib else None


def _free_in_group() -> int | None:
    """Returns the bytes left in a container's control group, cached files excluded."""
    try:
        limit = (_CGROUP_FOLDER / "memory.max").read_text().strip()
        used = int((_CGROUP_FOLDER / "memory.current").read_text())
        stat = (_CGROUP_FOLDER / "memory.stat").read_text().splitlines()
        cached = sum(int(x.split()[1]) for x in stat if x.startswith("inactive_file "))
        return int(limit) - used + cached
    except (OSError, ValueError):  # no group, or "max"
        return None
