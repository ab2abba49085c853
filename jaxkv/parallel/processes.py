"""Several processes that run one program: JAX's distributed runtime.

All processes run the same program on the same inputs, each with its devices of the
mesh, on one machine or several. The first process writes files; any process may request
a stop (`gather_numbers`), and all processes stop together.
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
"""Coordinator argument for a cluster: the environment of Slurm, Open MPI or cloud TPUs,
or `JAX_COORDINATOR_ADDRESS` and its like, sets address, number and index of the
processes."""
HEARTBEAT_TIMEOUT_S = 20
"""Seconds without a heartbeat after which a process counts as lost, and all end."""
TIMEOUT_S = 60
"""Seconds that a process waits for all processes to start, and to end."""

_UNLIMITED_S = 10**6
"""Start-up timeout of JAX in seconds, longer than `TIMEOUT_S`."""


class _Joined(NamedTuple):
    """Number of processes, and index of this one."""

    num: int = 1
    index: int = 0


_joined = _Joined()


def join_processes(
    coordinator: str, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the processes of a program, before JAX has initialised its devices.

    Args:
      coordinator: host and port, such as 127.0.0.1:4000, where the first process
        listens; or `CLUSTER`, without the remaining arguments.
      num_processes: number of processes, at least 1.
      process_id: index of this process, in [0, num_processes).

    Raises:
      ValueError: a number is missing or out of range; the coordinator does not respond;
        or not all processes join.
    """
    how: dict[str, Any] = {
        "heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT_S,
        "shutdown_timeout_seconds": TIMEOUT_S,
    }
    if coordinator == CLUSTER:
        if num_processes is not None or process_id is not None:
            raise ValueError(f"{coordinator=} sets num_processes and process_id")
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
            jax.distributed.initialize(**how, initialization_timeout=_UNLIMITED_S)
        except (RuntimeError, ValueError) as error:
            failed.append(error)

    # JAX's own timeout would end the process with a stack trace. The thread keeps
    # waiting for missing processes while this process ends.
    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if thread.is_alive():
        num = how.get("num_processes", "the cluster's")
        raise ValueError(
            f"{coordinator=}: not all of {num} processes have joined after "
            f"{TIMEOUT_S} s; start each one with this address and its own index"
        )
    if failed:
        reason = str(failed[0]).strip().partition("\n")[0]
        raise ValueError(f"{coordinator=}: {reason}") from failed[0]
    global _joined
    if num_processes is None or process_id is None:
        _joined = _Joined(jax.process_count(), jax.process_index())
    else:  # JAX has not initialised its devices, so CPU devices may still be set
        _joined = _Joined(num_processes, process_id)


def _wait_for(host: str, port: int) -> None:
    """Waits until the coordinator listens; JAX's own client would end the process.

    Raises:
      ValueError: it does not listen after `TIMEOUT_S`.
    """
    end = time.monotonic() + TIMEOUT_S
    reason = ""
    while time.monotonic() < end:
        try:
            with contextlib.closing(socket.create_connection((host, port), timeout=5)):
                return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.2)
    raise ValueError(
        f"coordinator='{host}:{port}': no response after {TIMEOUT_S} s: {reason}; "
        "start process 0 with this address"
    )


def num_processes() -> int:
    """Returns the number of processes; 1 without `join_processes`."""
    return _joined.num


def is_first() -> bool:
    """Returns True in the process that writes files and prints."""
    return _joined.index == 0


@validation.checks_numbers()
def check_all_used(num_devices: int) -> None:
    """Checks that a mesh of the first devices includes a device of every process.

    Raises:
      ValueError: a process has no device; the message has the numbers.
    """
    used = {device.process_index for device in jax.devices()[:num_devices]}
    if len(used) < num_processes():
        raise ValueError(
            f"a mesh of {num_devices} devices leaves some of {num_processes()} "
            f"processes without one; each has {jax.local_device_count()}"
        )


def broadcast_from_first[T](tree: T) -> T:
    """Returns the first process's values on all processes; equal shapes are required.

    Every process must call this function.
    """
    if num_processes() == 1:
        return tree
    from jax.experimental import multihost_utils

    def bits(x: np.ndarray) -> np.ndarray:
        # A sum over processes would turn -0.0 into 0.0.
        is_float = jnp.issubdtype(x.dtype, jnp.floating) and x.itemsize <= 4
        return x.view(f"u{x.itemsize}") if is_float else x

    local_tree = jax.tree.map(np.asarray, tree)
    first_tree = multihost_utils.broadcast_one_to_all(jax.tree.map(bits, local_tree))

    def back(x: np.ndarray, like: np.ndarray) -> np.ndarray:
        return x if bits(like) is like else x.view(like.dtype)

    return jax.tree.map(back, first_tree, local_tree)


@validation.checks_numbers(number=(-validation.INT32, validation.INT32))
def gather_numbers(number: int) -> list[int]:
    """Returns the numbers of all processes, in order.

    Every process must call this function.
    """
    if num_processes() == 1:
        return [number]
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(np.int32(number)).tolist()
