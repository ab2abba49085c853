"""Sweeps on a Ray cluster of two local nodes equal those of one process."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaling.sweeps import run_sweep
from scaling.sweeps.grid import SweepConfig
from tests.support import sweeping
from tests.support.folders import ROOT

HAS_RAY = importlib.util.find_spec("ray") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # warnings of ray
]


def config(folder: Path) -> SweepConfig:
    return sweeping.config(folder, num_tokens=(32 * 10, 32 * 20), max_extensions=0)


@pytest.fixture
def cluster() -> Iterator[str]:
    if not HAS_RAY:
        pytest.skip("ray is not installed: pip install 'jaxkv[ray]'")
    import ray
    from ray.cluster_utils import Cluster

    ray_cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    ray_cluster.add_node(num_cpus=1)
    yield ray_cluster.address
    ray.shutdown()
    ray_cluster.shutdown()


def test_two_nodes_find_what_one_process_finds(cluster: str, tmp_path: Path) -> None:
    import ray

    local_config = config(tmp_path)
    ray_config = dataclasses.replace(local_config, executor="ray", ray_address=cluster)
    local = run_sweep(local_config, tmp_path / "here")
    remote = run_sweep(ray_config, tmp_path / "there")
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    losses = [
        {row["run_id"]: (row["status"], row["loss"]) for row in outcome.records}
        for outcome in (local, remote)
    ]
    assert len(losses[0]) == 8
    assert losses[0].keys() == losses[1].keys()
    for run_id, (status, loss) in losses[0].items():
        assert losses[1][run_id] == (status, pytest.approx(loss, rel=1e-4))
    header = json.loads((tmp_path / "there" / "sweep.json").read_text())
    assert header["executor"] == "ray"
    assert run_sweep(ray_config, tmp_path / "there").skipped == 8


_LIST_PORTS = """
import sys
from pathlib import Path
import psutil
from scaling.sweeps.executors import connect_ray
from tests.support import sweeping
connect_ray(sweeping.config(Path(sys.argv[1]), executor="ray"))
for process in psutil.Process().children(recursive=True):
    for port in process.net_connections("inet"):
        if port.status == psutil.CONN_LISTEN:
            print(process.pid, *port.laddr)
"""


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
def test_a_cluster_that_a_sweep_starts_opens_no_port_for_metrics(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIST_PORTS, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"RAY_ADDRESS": "local"},
    )
    ports = [line.split() for line in done.stdout.splitlines()]
    assert len(ports) >= 3, done.stderr
    assert not [port for port in ports if port[1] == "0.0.0.0" or port[2] == "44217"]


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_a_sweep_raises_an_error(tmp_path: Path) -> None:
    ray_config = dataclasses.replace(config(tmp_path), executor="ray")
    with pytest.raises(ValueError, match="ray is missing"):
        run_sweep(ray_config, tmp_path / "out")
