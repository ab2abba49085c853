"""A Ray cluster of several nodes on this machine, each in its own process group."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import psutil

STORE_BYTES = 100 * 2**20


class Nodes:
    """Starts and ends nodes; use `started`."""

    def __init__(self) -> None:
        self.scratch = tempfile.mkdtemp(prefix="jaxkv-nodes-", dir="/tmp")
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{one.getsockname()[1]}"
        self.token = secrets.token_hex(32)
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "10",
            "RAY_enable_metrics_collection": "0",
        }

    def add(self) -> subprocess.Popen[bytes]:
        """Starts a node, the head first, and waits until it is up."""
        host, port = self.address.split(":")
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block"]
        command += ["--node-ip-address", host, "--num-cpus", "2"]
        command += ["--object-store-memory", str(STORE_BYTES)]
        if not self.nodes:
            command += ["--head", "--port", port, "--temp-dir", self.scratch]
            command += ["--include-dashboard", "false"]
        else:
            command += ["--address", self.address]
        node = subprocess.Popen(
            command,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.nodes.append(node)
        end = time.monotonic() + 90
        while not self.raylet(node):
            assert node.poll() is None
            assert time.monotonic() < end
            time.sleep(0.2)
        return node

    def raylet(self, node: subprocess.Popen[bytes]) -> psutil.Process | None:
        """Returns the raylet of a node; None until it has started."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(node.pid).children(recursive=True):
                if process.name() == "raylet":
                    return process
        return None

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """Kills a node by SIGKILL to its raylet."""
        if (raylet := self.raylet(node)) is not None:
            raylet.kill()
        self.remove(node)

    def remove(self, node: subprocess.Popen[bytes]) -> None:
        """Ends a node."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(node.pid, signal.SIGTERM)
        try:
            node.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()

    def close(self) -> None:
        """Ends all nodes, the head last."""
        for node in reversed(self.nodes):
            if node.poll() is None:
                self.remove(node)
        for process in psutil.process_iter(["cmdline"]):
            if any(self.scratch in word for word in process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)


@contextlib.contextmanager
def started(num: int) -> Generator[Nodes]:
    """Starts a cluster of `num` nodes, with its token in this process's environment."""
    nodes = Nodes()
    before = dict(os.environ)
    os.environ.update(nodes.environment)
    try:
        for _ in range(num):
            nodes.add()
        yield nodes
    finally:
        nodes.close()
        for name in nodes.environment:
            os.environ.pop(name, None)
        os.environ.update(
            {key: x for key, x in before.items() if key in nodes.environment}
        )
