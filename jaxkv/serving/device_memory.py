"""How much memory is free where arrays will lie, asked before they are made.

A pool beyond it would end the process on many machines, without a word: Linux hands out
memory that is not there, and kills whoever then writes to it.
"""

from pathlib import Path
from typing import Any

import jax

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def num_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def free_bytes() -> int | None:
    """Bytes that are free on the default device; None where nobody says."""
    device = jax.config.jax_default_device or jax.local_devices()[0]
    stats = device.memory_stats() if isinstance(device, jax.Device) else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    known = [x for x in (_free_on_host(), _free_in_group()) if x is not None]
    return min(known, default=None)


def check_free_memory(tree: Any, what: str) -> None:
    """Refuses arrays for which there is no room.

    Args:
      tree: their shapes.
      what: what a message calls them, and how to make them smaller.

    Raises:
      ValueError: they need more than there is.
    """
    needed, free = num_bytes(tree), free_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"{needed:,} bytes are needed and {free:,} are free for {what}"
        )


def _free_on_host() -> int | None:
    """What Linux could give without swapping."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _free_in_group() -> int | None:
    """What the control group of a container has left; files it caches can go."""
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        used = int((_GROUP / "memory.current").read_text())
        stat = (_GROUP / "memory.stat").read_text().splitlines()
        cached = sum(int(x.split()[1]) for x in stat if x.startswith("inactive_file "))
        return int(limit) - used + cached
    except (OSError, ValueError):  # no group, or "max"
        return None
