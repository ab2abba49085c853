"""Disaggregated serving on a Ray cluster: one for the whole module."""

import asyncio
import collections
import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from jaxkv import Sampling
from jaxkv.disaggregation import (
    RequestCancelledError,
    RouterConfig,
    Service,
    ServiceLostError,
    WorkerSpec,
    worker,
)
from tests.support.disaggregated import ENGINE, draw_prompts, until, wanted, workers
from tests.support.folders import ROOT, TOKENIZED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs the extra jaxkv[ray]"
    ),
]
ASK = Sampling(max_tokens=10, temperature=1.0, ignore_eos=True)
LONG = Sampling(max_tokens=40, temperature=1.0, ignore_eos=True)
CONFIG = RouterConfig(heartbeat_s=5.0, deadline_s=120.0)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(
        TOKENIZED, prefill=1, decode=2, engine=ENGINE, config=CONFIG
    ) as instance:
        yield instance


def test_a_service_answers_as_one_engine(service: Service) -> None:
    prompts = draw_prompts(0, 12)
    answers = service.generate(prompts, ASK)
    assert [x.completion.tokens for x in answers] == wanted(prompts, ASK)
    assert any(x.transfer.num_bytes for x in answers)
    events = [*service.events(prompts[0], ASK, key_id=0)]
    streamed = [token for x in events for token in x.tokens]
    assert streamed == answers[0].completion.tokens
    assert "".join(x.text for x in events) == answers[0].completion.text

    async def both() -> None:
        async for event in service.stream("hello", ASK, key_id=1):
            assert event.request_id > 0
        future = service.answer("hello", ASK, key_id=1)
        answer = await asyncio.wrap_future(future)
        assert answer.completion.text is not None

    asyncio.run(both())
    with pytest.raises(ValueError, match="max_length"):
        service.generate([[5] * 70], ASK)


def test_requests_end_by_cancellation_and_deadline(service: Service) -> None:
    stream = service.events([5, 6, 7], Sampling(max_tokens=60, ignore_eos=True))
    service.cancel(next(stream).request_id)
    with contextlib.suppress(RequestCancelledError):
        for _ in stream:
            pass
    with pytest.raises(TimeoutError, match="deadline_s=1e-06 passed"):
        service.generate([[5, 6, 7]], LONG, deadline_s=1e-6)
    future = service.answer([5, 6, 7], LONG)
    future.cancel()
    until(lambda: service.status()["running"] == 0)


def test_memory_and_descriptors_do_not_grow(service: Service) -> None:
    pids = [service.pid, *(x["pid"] for x in workers(service))]
    prompts = draw_prompts(6, 100)

    def measure() -> tuple[list[int], list[float]]:
        processes = [psutil.Process(pid) for pid in pids]
        return [x.num_fds() for x in processes], [
            x.memory_info().rss for x in processes
        ]

    service.generate(prompts, ASK)
    fds, rss = measure()
    for _ in range(5):
        service.generate(prompts, ASK)
    fds_after, rss_after = measure()
    assert np.max(np.subtract(fds_after, fds)) <= 8
    assert np.max(np.subtract(rss_after, rss)) < 40 * 2**20


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_only_costs_time(service: Service, role: str) -> None:
    prompts = draw_prompts(1, 24)
    futures = [service.answer(x, LONG, key_id=i) for i, x in enumerate(prompts)]
    [dead, *_] = workers(service, role)
    os.kill(dead["pid"], signal.SIGKILL)
    answers = [x.result(timeout=120) for x in futures]
    assert [x.completion.tokens for x in answers] == wanted(prompts, LONG)
    until(lambda: len(workers(service)) == 3)
    assert dead["pid"] not in [x["pid"] for x in workers(service)]


def test_a_router_that_was_stopped_loses_neither_requests_nor_workers(
    service: Service,
) -> None:
    prompts = draw_prompts(7, 24)
    pids = {x["pid"] for x in workers(service)}
    futures = [service.answer(x, LONG, key_id=i) for i, x in enumerate(prompts)]
    until(lambda: service.status()["running"] > 0)
    os.kill(service.pid, signal.SIGSTOP)
    time.sleep(worker.ROUTER_TIMEOUT_S + 3)  # the workers have cancelled the requests
    os.kill(service.pid, signal.SIGCONT)
    answers = [x.result(timeout=120) for x in futures]
    assert [x.completion.tokens for x in answers] == wanted(prompts, LONG)
    assert any(x.num_attempts > 1 for x in answers)
    assert {x["pid"] for x in workers(service)} == pids


def test_workers_join_restart_and_leave(service: Service) -> None:
    spec = WorkerSpec(role="decode", folder=str(TOKENIZED), engine=ENGINE)
    name = service.add_worker(spec)
    assert len(workers(service, "decode")) == 3
    prompts = draw_prompts(2, 12)
    futures = [service.answer(x, LONG, key_id=i) for i, x in enumerate(prompts)]
    new = service.restart_worker(name)
    service.remove_worker(new)
    answers = [x.result(timeout=120) for x in futures]
    assert [x.completion.tokens for x in answers] == wanted(prompts, LONG)
    assert len(workers(service, "decode")) == 2
    wrong = WorkerSpec(role="decode", folder=str(TOKENIZED), engine={"max_length": 1})
    with pytest.raises(ValueError, match=r"did not start: .*max_length=1"):
        service.add_worker(wrong)
    other = WorkerSpec(
        role="decode", folder=str(TOKENIZED), engine=ENGINE | {"page_size": 8}
    )
    with pytest.raises(ValueError, match="must serve one model: layout="):
        service.add_worker(other)


def processes_of(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


class Port(NamedTuple):
    """A port that a process listens on."""

    process: str
    pid: int
    address: str
    number: int


def ports_of(pid: int) -> list[Port]:
    """Ports that a router and its children listen on; UDP ones as well."""
    ports = []
    for process in processes_of(pid):
        with contextlib.suppress(psutil.Error):
            name = "the router" if process.pid == pid else process.name()
            for connection in process.net_connections("inet"):
                if (
                    connection.status == psutil.CONN_LISTEN
                    or connection.type == socket.SOCK_DGRAM
                ):
                    ports.append(Port(name, process.pid, *connection.laddr))
    return ports


def test_the_page_lists_the_ports_that_are_open(service: Service) -> None:
    page = (ROOT / "jaxkv/disaggregation/README.md").read_text("utf-8")
    listed = {}
    for row in page.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) == 4 and cells[1][:1].isdigit():
            names = re.findall("`([^` ]+)`", cells[0]) or cells[:1]
            listed |= {name: (int(cells[1][0]), cells[2]) for name in names}
    host = service.info["head"].rpartition(":")[0]
    interfaces = {"::": "all", "0.0.0.0": "all", host: "the node's address"}
    sockets = collections.Counter(port[:3] for port in ports_of(service.pid))
    for (process, _, address), num in sockets.items():
        assert (num, interfaces.get(address, address)) == listed.get(process), process
    names = {process for process, *_ in sockets}
    assert {"gcs_server", "raylet", "ray::Worker", "the router"} <= names


def test_garbage_and_idle_connections_delay_no_request(service: Service) -> None:
    every = {"::": "127.0.0.1", "0.0.0.0": "127.0.0.1"}
    ports = [(every.get(x.address, x.address), x.number) for x in ports_of(service.pid)]
    assert len(ports) > 5
    idle: list[socket.socket] = []
    stop = threading.Event()

    def throw_garbage() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set():
            for port in ports:
                with contextlib.suppress(OSError):
                    with socket.create_connection(port, 1) as one:
                        one.sendall(rng.bytes(256))
            time.sleep(0.05)

    thrower = threading.Thread(target=throw_garbage)
    thrower.start()
    try:
        for i in range(1100):
            with contextlib.suppress(OSError):
                port = ports[i % len(ports)]
                idle.append(socket.create_connection(port, 1))
        prompts = draw_prompts(3, 12)
        answers = service.generate(prompts, ASK, deadline_s=60.0)
        assert [x.completion.tokens for x in answers] == wanted(prompts, ASK)
        assert [x.num_attempts for x in answers] == [1] * len(answers)
    finally:
        stop.set()
        thrower.join()
        for one in idle:
            one.close()


TRY_WITHOUT_TOKEN = """
import os, sys
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = "w" * 64
import ray
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)
from ray.util import list_named_actors
print("inside", list_named_actors(all_namespaces=True))
"""


def test_requests_without_the_token_get_no_answer(service: Service) -> None:
    command = [sys.executable, "-c", TRY_WITHOUT_TOKEN]
    command += [service.info["head"], service.info["service"]]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert tried.returncode != 0
    assert "inside" not in tried.stdout
    prompts = draw_prompts(4, 4)
    answers = service.generate(prompts, ASK)
    assert [x.completion.tokens for x in answers] == wanted(prompts, ASK)


def test_two_services_share_workers(service: Service) -> None:
    token = psutil.Process(service.pid).environ()["RAY_AUTH_TOKEN"]
    os.environ["RAY_AUTH_TOKEN"] = token
    try:
        how: dict[str, Any] = {"address": service.info["head"]}
        how |= {"name": service.info["service"], "config": CONFIG}
        with Service(TOKENIZED, prefill=0, decode=0, **how) as second:
            assert {x["name"] for x in workers(second)} == {
                x["name"] for x in workers(service)
            }
            prompts = draw_prompts(5, 24)
            futures = [
                [one.answer(x, LONG, key_id=i) for i, x in enumerate(prompts)]
                for one in (service, second)
            ]
            # The end of a router does not affect the other.
            os.kill(second.pid, signal.SIGKILL)
            answers = [x.result(timeout=120) for x in futures[0]]
            assert [x.completion.tokens for x in answers] == wanted(prompts, LONG)
            ends = [x.exception(timeout=30) for x in futures[1]]
            assert {type(x) for x in ends} <= {ServiceLostError, type(None)}
            with pytest.raises(ServiceLostError, match="has ended with status -9"):
                second.status()
        assert len(workers(service)) == 3
    finally:
        del os.environ["RAY_AUTH_TOKEN"]


ENDLESS = """
import sys, time
from jaxkv.disaggregation import Service
if __name__ == "__main__":
    with Service(sys.argv[1], prefill=0, decode=1, engine=eval(sys.argv[2])) as service:
        print(service.pid, service._scratch, flush=True)
        time.sleep(600)
"""


def test_no_process_is_left_after_the_users_process_is_killed() -> None:
    command = [sys.executable, "-c", ENDLESS, str(TOKENIZED), repr(ENGINE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        pid, scratch = user.stdout.readline().split()
        left = processes_of(int(pid))
        names = {x.name() for x in left}
        assert "raylet" in names
        # Ray's own processes; workers have JAX and a model.
        ours = [x for x in left if "ray::Worker" not in " ".join(x.cmdline())]
        assert sum(x.memory_full_info().uss for x in ours) < 600 * 2**20
        user.kill()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
    until(lambda: not Path(scratch).exists())


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "jaxkv/disaggregation/README.md").read_text("utf-8")
    program = page.partition("```python\n")[2].partition("```")[0]
    path = tmp_path / "program.py"
    path.write_text(program, "utf-8")
    ran = subprocess.run(
        [sys.executable, str(path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert "Transfer(num_bytes=" in ran.stdout


def test_workers_share_programs_where_the_users_cache_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders: list[str] = []

    def refuse(*_: Any, env: dict[str, str], **__: Any) -> Any:
        folders.append(env.get("JAX_COMPILATION_CACHE_DIR", ""))
        raise OSError("no process")

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    (tmp_path / "file").touch()
    for name, cache in (
        ("XDG_CACHE_HOME", tmp_path),
        ("XDG_CACHE_HOME", tmp_path / "file"),
        ("JAX_COMPILATION_CACHE_DIR", tmp_path / "file"),
        ("JAX_COMPILATION_CACHE_DIR", tmp_path),
    ):
        monkeypatch.setenv(name, str(cache))
        with pytest.raises(OSError, match="no process"):
            Service(TOKENIZED)
    assert folders[::3] == ["", str(tmp_path)]
    assert all(folder.endswith("/programs") for folder in folders[1:3])


def test_services_that_cannot_start_are_refused() -> None:
    with pytest.raises(ValueError, match=r"address='x:1' needs the cluster's token"):
        Service(TOKENIZED, address="x:1")


def test_a_lost_head_ends_in_one_clear_error(service: Service) -> None:
    """The last test of the module, whose cluster it ends."""
    scratch = Path(service._scratch)
    future = service.answer([5, 6, 7], Sampling(max_tokens=50, ignore_eos=True))
    left = processes_of(service.pid)
    [head] = [x for x in left if x.name() == "gcs_server"]
    head.kill()
    assert isinstance(future.exception(timeout=60), ServiceLostError | type(None))
    assert service.wait(60.0)
    with pytest.raises(ServiceLostError, match="the router's process has ended"):
        service.status()
    service.close()
    assert not scratch.exists()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
