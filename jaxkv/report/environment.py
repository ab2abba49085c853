"""Environment of a run: versions, devices, processor, commit."""

import contextlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_REPORTED_PACKAGES = (
    "jaxkv",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
)

_WITHOUT_RECORDS = ":(top,exclude)experiments/records"
"""Path for git without results: several records are made by the same code."""


def describe_machine() -> dict[str, Any]:
    """Returns the machine and the software versions as JSON values.

    Devices are listed only if jax is already imported, because listing them initializes
    them.

    Returns:
      `versions` by package, `platform`, `cpu`, `num_cpus`, `memory_bytes` (None if the
      system does not report it), `devices`, `commit` (None outside git; suffix "+" if
      files differ from the commit), `xla_flags` and `started_at` (UTC).
    """
    versions = {"python": platform.python_version()}
    for name in _REPORTED_PACKAGES:
        # jaxkv has no version in a plain checkout; the commit identifies it.
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    lines = []
    memory_bytes = None
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    with contextlib.suppress(AttributeError, ValueError, OSError):
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": versions,
        "platform": platform.platform(),
        "cpu": next(names, platform.processor() or platform.machine()),
        "num_cpus": num_cpus(),
        "memory_bytes": memory_bytes,
        "devices": device_names(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def num_cpus() -> int:
    """Returns the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_names() -> list[str]:
    """Returns the devices as "platform: kind"; empty if jax is not imported."""
    jax = sys.modules.get("jax")
    return [f"{x.platform}: {x.device_kind}" for x in jax.devices()] if jax else []


def _commit() -> str | None:
    def git(*args: str) -> str:
        folder = Path(__file__).parent
        command = ["git", "-C", str(folder), *args]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return None  # installed into an unrelated checkout
        changes = git("status", "--porcelain", "--", ":/", _WITHOUT_RECORDS)
        return git("rev-parse", "HEAD") + ("+" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return None
