"""Random faults on two nodes: a request ends correctly, or with one error in time."""

import contextlib
import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxkv import Sampling
from jaxkv.disaggregation import (
    RouterConfig,
    Service,
    ServiceLostError,
    WorkerLostError,
)
from tests.support import disaggregated, ray_nodes
from tests.support.folders import TOKENIZED
from tests.support.ray_nodes import Nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs the extra jaxkv[ray]"
    ),
]
LONG = Sampling(max_tokens=40, temperature=1.0, ignore_eos=True)
DEADLINE_S = 90.0
CONFIG = RouterConfig(heartbeat_s=5.0, deadline_s=DEADLINE_S, max_attempts=8)
ALLOWED = (TimeoutError, WorkerLostError, ServiceLostError)
NUM_SCHEDULES = 20
FAULTS = ("kill worker", "stop worker", "kill router", "kill node", "add node")


class Cluster:
    """Two nodes, and two services that share their workers."""

    def __init__(self, nodes: Nodes):
        self.nodes = nodes
        self.how: dict[str, Any] = {
            "address": nodes.address,
            "name": "shared",
            "config": CONFIG,
        }
        self.first = Service(
            TOKENIZED, prefill=1, decode=2, engine=disaggregated.ENGINE, **self.how
        )
        self.second = self.join()
        self.has_lost_router = False
        self.stopped: list[int] = []

    def join(self) -> Service:
        return Service(TOKENIZED, prefill=0, decode=0, **self.how)

    def close(self) -> None:
        self.second.close()
        self.first.close()

    def cause(self, fault: str, rng: np.random.Generator) -> None:
        """Causes a fault."""
        if fault == "kill router":
            os.kill(self.second.pid, signal.SIGKILL)
            self.has_lost_router = True
        elif fault == "kill node":
            others = [x for x in self.nodes.nodes[1:] if x.poll() is None]
            if others:
                self.nodes.kill(others[-1])
        elif fault == "add node":
            self.nodes.add()
        else:
            pids = [x["pid"] for x in disaggregated.workers(self.first)]
            pid = int(rng.choice(pids)) if pids else None
            if pid is not None and fault == "kill worker":
                os.kill(pid, signal.SIGKILL)
            elif pid is not None:
                os.kill(pid, signal.SIGSTOP)
                self.stopped.append(pid)

    def mend(self) -> None:
        """Restarts ended workers and nodes, and waits for them."""
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()
        if self.has_lost_router:
            self.second.close()
            self.second = self.join()
            self.has_lost_router = False
        if not [x for x in self.nodes.nodes[1:] if x.poll() is None]:
            self.nodes.add()
        disaggregated.until(lambda: len(disaggregated.workers(self.first)) >= 3, 120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_nodes.started(2) as nodes:
        instance = Cluster(nodes)
        try:
            yield instance
        finally:
            instance.close()


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_faults_only_cost_time(cluster: Cluster, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = disaggregated.draw_prompts(100 + seed, 24)
    wanted = disaggregated.wanted(prompts, LONG)
    begun = time.monotonic()
    futures = [
        [one.answer(x, LONG, key_id=i) for i, x in enumerate(prompts)]
        for one in (cluster.first, cluster.second)
    ]
    faults = rng.choice(FAULTS, 2, replace=False)
    for fault in faults:
        time.sleep(rng.uniform(0.0, 1.0))
        cluster.cause(str(fault), rng)
    num_right = 0
    for service, service_futures in zip(("first", "second"), futures, strict=True):
        for i, future in enumerate(service_futures):
            left = begun + DEADLINE_S + 10 - time.monotonic()
            error = future.exception(timeout=left)
            if error is None:
                assert future.result().completion.tokens == wanted[i]
                num_right += 1
            else:
                assert isinstance(error, ALLOWED), (service, faults, error)
                # The end of one router does not affect the other.
                lost = isinstance(error, ServiceLostError)
                assert not (lost and service == "first"), (faults, error)
    assert num_right > 0
    cluster.mend()
    answers = cluster.first.generate(prompts[:4], LONG)
    assert [x.completion.tokens for x in answers] == wanted[:4]


def test_a_stopped_worker_and_a_lost_node_are_recovered_within_60_s(
    cluster: Cluster,
) -> None:
    """Also after a minute in which a worker was stopped."""
    [pid, *_] = [x["pid"] for x in disaggregated.workers(cluster.first)]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(60)
    with contextlib.suppress(
        ProcessLookupError
    ):  # it was killed, and a new one started
        os.kill(pid, signal.SIGCONT)
    disaggregated.until(lambda: len(disaggregated.workers(cluster.first)) >= 3, 30)
    cluster.nodes.add()
    [*_, last] = [x for x in cluster.nodes.nodes if x.poll() is None]
    cluster.nodes.kill(last)
    disaggregated.until(lambda: len(disaggregated.workers(cluster.first)) >= 3, 60)
    cluster.mend()
