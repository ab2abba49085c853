"""Several processes that are one program: JAX's own runtime, on one machine or many.

All run the same program on the same inputs, each with its devices of the mesh. The
first one writes files; any of them may ask to stop (`gather_numbers`), and
all stop together.
"""

import contextlib
import socket
import threading
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import validation

CLUSTER = "cluster"
"""For a coordinator: who and how many there are says the cluster's environment, that of
Slurm, Open MPI or a cloud's TPUs, say, or `JAX_COORDINATOR_ADDRESS` and its like."""
HEARTBEAT_TIMEOUT_S = 20
"""Seconds without a word after which a process counts as lost, and ends all."""
TIMEOUT_S = 60
"""Seconds that a process waits for the others to begin, and to end."""

_NEVER_S = 10**6
"""Seconds that JAX waits for the others: longer than we do."""


class _Joined(NamedTuple):
    """What this process is among the others."""

    num: int = 1
    index: int = 0


_joined = _Joined()


def join_processes(
    coordinator: str, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the processes of a program, before JAX has looked for devices.

    Args:
      coordinator: host and port, such as 127.0.0.1:4000, where the first process
        listens; or `CLUSTER`, then without the rest.
      num_processes: how many there are, at least 1.
      process_id: which one this is, in [0, num_processes).

    Raises:
      ValueError: a number is missing or out of range; nobody answers there; or not
        all come.
    """
    how: dict[str, Any] = {
        "heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT_S,
        "shutdown_timeout_seconds": TIMEOUT_S,
    }
    if coordinator == CLUSTER:
        if num_processes is not None or process_id is not None:
            raise ValueError(f"{coordinator=} says itself how many processes there are")
    else:
        if num_processes is None or process_id is None:
            raise ValueError(f"{coordinator=} needs num_processes and process_id")
        validation.integer("num_processes", num_processes, low=1)
        validation.integer(
            "process_id",
            process_id,
            below=num_processes,
            hint=f"in [0, {num_processes - 1}]",
        )
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(
                f"{coordinator=} must be host:port, such as 127.0.0.1:4000, or "
                f"{CLUSTER!r}"
            )
        if process_id:
            _wait_for(host.strip("[]"), int(port))
        how |= {
            "coordinator_address": coordinator,
            "num_processes": num_processes,
            "process_id": process_id,
        }
    failed: list[Exception] = []

    def begin() -> None:
        try:
            jax.distributed.initialize(**how, initialization_timeout=_NEVER_S)
        except (RuntimeError, ValueError) as error:
            failed.append(error)

    # JAX's own time-out would end the process with a trace. The thread goes on waiting
    # for processes that do not come: this one should end.
    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if thread.is_alive():
        num = how.get("num_processes", "the cluster's")
        raise ValueError(
            f"{coordinator=}: not all of {num} processes have come after {TIMEOUT_S} "
            "s; is each started, with this address and a number of its own?"
        )
    if failed:
        reason = str(failed[0]).strip().partition("\n")[0]
        raise ValueError(f"{coordinator=}: {reason}") from failed[0]
    global _joined
    if num_processes is None or process_id is None:
        _joined = _Joined(jax.process_count(), jax.process_index())
    else:  # JAX has not looked for devices yet, and may be told how many a CPU is
        _joined = _Joined(num_processes, process_id)


def _wait_for(host: str, port: int) -> None:
    """Waits until somebody listens; JAX's own client would end the process.

    Raises:
      ValueError: nobody does.
    """
    end, reason = time.monotonic() + TIMEOUT_S, ""
    while time.monotonic() < end:
        try:
            with contextlib.closing(socket.create_connection((host, port), timeout=5)):
                return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.2)
    raise ValueError(
        f"coordinator='{host}:{port}': nobody answers after {TIMEOUT_S} s: {reason}; "
        "is process 0 started, with this address?"
    )


def num() -> int:
    """How many processes were joined; 1 without `join_processes`."""
    return _joined.num


def is_first() -> bool:
    """Whether this process writes files, and speaks."""
    return _joined.index == 0


def check_all_used(num_devices: int) -> None:
    """Refuses a mesh of the first devices that leaves a process without one.

    Raises:
      ValueError: names the number.
    """
    used = {device.process_index for device in jax.devices()[:num_devices]}
    if len(used) < num():
        raise ValueError(
            f"a mesh of {num_devices} devices leaves some of {num()} processes without "
            f"one; each has {jax.local_device_count()}"
        )


def broadcast_from_first[T](tree: T) -> T:
    """What the first process has, on every one; arrays and numbers, shaped alike.

    Every process must call it.
    """
    if num() == 1:
        return tree
    from jax.experimental import multihost_utils

    def bits(x: np.ndarray) -> np.ndarray:
        # A sum over processes would turn -0.0 into 0.0.
        is_float = jnp.issubdtype(x.dtype, jnp.floating) and x.itemsize <= 4
        return x.view(f"u{x.itemsize}") if is_float else x

    own = jax.tree.map(np.asarray, tree)
    given = multihost_utils.broadcast_one_to_all(jax.tree.map(bits, own))

    def back(x: np.ndarray, like: np.ndarray) -> np.ndarray:
        return x if bits(like) is like else x.view(like.dtype)

    return jax.tree.map(back, given, own)


def gather_numbers(number: int) -> list[int]:
    """Returns the numbers of all processes, in their order.

    Every process must call it.
    """
    if num() == 1:
        return [number]
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(np.int32(number)).tolist()
