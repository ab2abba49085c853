"""`jaxkv serve`: a process that answers over HTTP until a signal."""

import contextlib
import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http import client
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxkv.memory import linear_eviction
from jaxkv.report import RunTrace
from jaxkv.scheduling import format_linear_score, linear_score
from tests.support import engines, folders
from tests.support.commands import Command, assert_refused

HAS_EXTRA = all(map(importlib.util.find_spec, ("fastapi", "uvicorn")))
KEY = "a-secret-key"


@pytest.mark.parametrize(
    ("missing", "flags", "line"),
    [
        ("uvicorn", "", "jaxkv serve needs {}: pip install 'jaxkv[serve]'"),
        (
            "ray",
            "--decode 1",
            "disaggregated serving needs {}: pip install 'jaxkv[ray]'",
        ),
    ],
)
def test_a_missing_extra_is_named(
    jaxkv: Command, monkeypatch: pytest.MonkeyPatch, missing: str, flags: str, line: str
) -> None:
    find = importlib.util.find_spec

    def without(name: str, *args: Any) -> Any:
        return None if name == missing else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    if missing == "uvicorn" and find("fastapi") is None:
        missing = "fastapi"
    words = f"serve {folders.TOKENIZED} --port 0 {flags}"
    assert_refused(jaxkv, words, line.format(missing))


@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra 'serve'")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--api-key short", "--api-key must have at least 8 characters"),
        ("--port 65536", "--port 65536: must be in [0, 65535]"),
        ("--api-key eight-88 --port 65536", "--port 65536: must be in [0, 65535]"),
        ("--grace-s -1", "--grace-s -1.0: must be in [0, 86400]"),
        ("--deadline-s 0", "--deadline-s 0.0: must be in [0.001, 86400]"),
        ("--max-requests 0", "--max-requests 0: must be in [1, 1000000]"),
        ("--drafts 2", "--drafts 2: needs --speculate"),
        ("--max-length 2000", "--max-length 2000: must be in [2, 128]"),
        ("--max-length 0", "--max-length 0: must be in [2, 128]"),
        ("--max-slots 0", "--max-slots 0: must be in [1, 1000000]"),
        ("--token-budget 4", "token_budget=4"),
        ("--policy no.py:Mine", "no.py: no such file"),
        ("--policy quickest", "policy=quickest must be one of fcfs, vllm"),
        ("--queue-head 512", "--queue-head 512: must be in [1, 511]"),
        (
            "--host no.such.host.invalid",
            "no.such.host.invalid:8000 cannot be listened on: ",
        ),
    ],
)
def test_invalid_serve_options_are_rejected_in_one_line(
    jaxkv: Command, words: str, line: str
) -> None:
    assert_refused(jaxkv, f"serve {folders.TOKENIZED} {words}", line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"max_slot": 4}', "unknown field 'max_slot'"),
        ('{"max_slots": "4"}', "max_slots: '4' is not"),
        ('{"max_slots": 0}', "--max-slots 0: must be in"),
        ('{"dtype": "float8"}', "dtype: 'float8' is not"),
        ("[1]", "holds list, not an object"),
        ('{"loading": {}}', "'loading' is not an option of a config file"),
    ],
)
def test_a_config_file_is_validated_like_flags(
    jaxkv: Command, tmp_path: Path, text: str, line: str
) -> None:
    file = tmp_path / "serve.json"
    file.write_text(text)
    words = f"serve {folders.TOKENIZED} --host no.such.host.invalid --config {file}"
    assert_refused(jaxkv, words, line)


def test_flags_override_the_config_file(jaxkv: Command, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    file.write_text('{"host": "first.invalid", "port": 81, "seed": 3}')
    words = f"serve {folders.TOKENIZED} --config {file}"
    assert_refused(jaxkv, words, "first.invalid:81 cannot be listened on: ")
    words = f"{words} --host second.invalid"
    assert_refused(jaxkv, words, "second.invalid:81 cannot be listened on: ")


class Server:
    """A process of `jaxkv serve`, after it has printed its status."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        self.status = json.loads(line)
        self.address = "127.0.0.1", int(self.status["url"].rpartition(":")[2])

    def connect(self) -> client.HTTPConnection:
        return client.HTTPConnection(*self.address, timeout=60)

    def begin(self, **fields: Any) -> client.HTTPConnection:
        connection = self.connect()
        head = {"Authorization": f"Bearer {KEY}"}
        connection.request("POST", "/v1/completions", json.dumps(fields), head)
        return connection

    def text(self, **fields: Any) -> str:
        with contextlib.closing(self.begin(**fields)) as connection:
            response = connection.getresponse()
            document = json.loads(response.read())
        assert response.status == 200, document
        return document["choices"][0]["text"]

    def metric(self, name: str) -> float:
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", "/metrics")
            rows = connection.getresponse().read().decode().splitlines()
        return float(dict(row.rsplit(" ", 1) for row in rows).get(name, 0))

    def wait_until_idle(self) -> None:
        end = time.monotonic() + 60
        names = "jaxkv_in_progress", "jaxkv_backend_running"
        while any(map(self.metric, names)):
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra 'serve'")
def test_a_server_survives_its_clients_and_stops_on_a_signal(
    tmp_path: Path, popen: Callable[..., subprocess.Popen[str]]
) -> None:
    model = engines.save_tiny_model(tmp_path / "tiny", max_positions=4096)
    code = (
        "import os, resource, sys\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        f"os.environ['JAXKV_API_KEY'] = {KEY!r}\n"
        "from jaxkv.cli import main\n"
        "sys.exit(main.main())"
    )
    flags = "--port 0 --json --grace-s 0.5 --max-length 4000 --max-slots 4".split()
    trace_flags = "--trace", str(tmp_path / "trace.npz")
    server = Server(popen("-c", code, "serve", model, *flags, *trace_flags))
    assert server.status.keys() == {"url", "model", "pid"}  # the key was given
    assert (server.status["model"], server.status["pid"]) == (
        "tiny",
        server.process.pid,
    )
    request = dict(prompt="def f(", max_tokens=12, seed=5)
    text = server.text(**request)
    # Clients that leave, before and after the first token.
    endless = dict(prompt="x", max_tokens=3900, ignore_eos=True)
    for stream in (False, True):
        connections = [server.begin(**endless, stream=stream) for _ in range(6)]
        if stream:
            assert connections[0].getresponse().read(6) == b"data: "
        for connection in connections:
            connection.close()
    server.wait_until_idle()
    assert server.metric("jaxkv_disconnects_total") == 12
    # 1,100 idle connections; the process may open 256 files.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = hard == resource.RLIM_INFINITY or hard > 2600
    resource.setrlimit(resource.RLIMIT_NOFILE, (2500 if room else soft, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for i in range(1100 if room else 200):
            idle = stack.enter_context(socket.create_connection(server.address))
            idle.sendall(b"POST /v1/comp" * (i % 2))
        begin = time.monotonic()
        assert server.text(**request) == text
        assert time.monotonic() - begin < 5
    assert server.process.poll() is None
    # Requests in progress at the stop get one clear error.
    connection = server.begin(**endless, stream=True)
    response = connection.getresponse()
    assert response.read(6) == b"data: "
    server.process.send_signal(signal.SIGTERM)
    *_, last = response.read().decode().strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == (
        "the server is stopping"
    )
    connection.close()
    out, err = server.process.communicate(timeout=60)
    assert (server.process.returncode, out) == (143, "")
    # A compilation on a busy machine can exceed the 5 s after which it is logged.
    [line] = [x for x in err.splitlines() if not x.startswith("jaxkv: compiling, ")]
    assert line.startswith("[")
    trace = RunTrace.read(tmp_path / "trace.npz")
    answers = {x.prompt: x.answers[0] for x in trace.requests}
    assert answers["def f("] == text
    assert answers["x"]


MINE = """
from jaxkv.scheduling import linear_score

def shortest():
    return linear_score(admission={"new_tokens": 1.0})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["mine.py:shortest"], [None, "mine.py:shortest", "mine.json"]]
)
@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra 'serve'")
def test_a_policy_file_changes_the_order_and_no_answer(
    tmp_path: Path, popen: Callable[..., subprocess.Popen[str]], names: list
) -> None:
    """One slot: of two waiting requests, the shorter one is answered first."""
    model = engines.save_tiny_model(tmp_path / "tiny", max_positions=2048)
    (tmp_path / "mine.py").write_text(MINE)
    policy = linear_score(admission={"new_tokens": 1.0})
    rule = linear_eviction(recency=0.5, page_ms=3)
    (tmp_path / "mine.json").write_text(format_linear_score(policy, rule))
    code = "import sys; from jaxkv.cli import main; sys.exit(main.main())"
    flags = "--port 0 --json --max-length 2000 --max-slots 1 --api-key".split()
    texts = []
    for name in names:
        more = [] if name is None else ["--policy", f"{tmp_path}/{name}"]
        server = Server(popen("-c", code, "serve", model, *flags, KEY, *more))
        first = server.begin(prompt="x", max_tokens=1500, ignore_eos=True)
        wait_for(lambda server=server: server.metric("jaxkv_backend_running") == 1)
        order: list[str] = []
        answers: dict[str, str] = {}

        def ask(prompt: str, server: Server, order: list, answers: dict) -> None:
            answers[prompt] = server.text(prompt=prompt, max_tokens=40, temperature=0)
            order.append(prompt)

        threads = []
        for number, prompt in enumerate(("a much longer prompt " * 8, "short"), 1):
            threads.append(
                threading.Thread(target=ask, args=(prompt, server, order, answers))
            )
            threads[-1].start()
            wait_for(
                lambda server=server, number=number: (
                    server.metric("jaxkv_in_progress") == 1 + number
                )
            )
        assert first.getresponse().status == 200
        first.close()
        for thread in threads:
            thread.join(60)
        expected = ["a", "short"] if name is None else ["short", "a"]
        assert [x.split()[0] for x in order] == expected
        texts.append(answers)
        server.process.send_signal(signal.SIGTERM)
        server.process.communicate(timeout=60)
    assert all(x == texts[0] for x in texts)


def wait_for(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--decode 0", "--decode 0: must be at least 1"),
        ("--prefill 1", "--decode None: must be at least 1"),
        ("--decode 1 --trace t.npz", "--trace: is not supported with --decode"),
        ("--decode 1 --prefill -1", "--prefill -1: must be at least 0"),
        ("--service mine", "--address and --service must name the workers"),
        ("--decode 1 --address x:1", "needs the cluster's token in RAY_AUTH_TOKEN"),
    ],
)
@pytest.mark.skipif(not HAS_EXTRA or not HAS_RAY, reason="needs extras 'serve', 'ray'")
def test_invalid_worker_options_are_rejected_in_one_line(
    jaxkv: Command, words: str, line: str
) -> None:
    assert_refused(jaxkv, f"serve {folders.TOKENIZED} --port 0 {words}", line)


WITHOUT_EXTRAS = """
import sys
for name in ("ray", "fastapi", "uvicorn", "pyarrow"):
    sys.modules[name] = None
import jaxkv
from jaxkv import disaggregation, server
from jaxkv.cli import main

for package in (jaxkv, disaggregation):
    for name in package.__all__:
        getattr(package, name)
assert server.AsyncEngine and server.Backend
for line in sys.argv[1:]:
    print(main.main(line.split()))
"""


@pytest.mark.slow
def test_commands_work_without_extras_and_name_missing_ones(tmp_path: Path) -> None:
    (tmp_path / "log.parquet").write_bytes(b"PAR1" * 4)
    model = folders.TOKENIZED
    ran = subprocess.run(
        [
            *(sys.executable, "-c", WITHOUT_EXTRAS),
            "cost llama-2-7b --json",
            f"generate {model} --prompt a --max-tokens 2 --json",
            f"serve {model}",
            f"serve {model} --decode 1",
            f"fit {tmp_path}/log.parquet",
            f"sweep smoke --out {tmp_path}/sweep --executor ray",
        ],
        cwd=folders.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    statuses = [x for x in ran.stdout.splitlines() if x in "02"]
    assert statuses == ["0", "0", "2", "2", "2", "2"], ran.stderr
    lines = [x for x in ran.stderr.splitlines() if "pip install" in x]
    extras = [x.rpartition("pip install ")[2] for x in lines]
    assert extras == [
        f"'jaxkv[{extra}]'" for extra in ("serve", "ray", "tables", "ray")
    ], ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.skipif(not HAS_EXTRA or not HAS_RAY, reason="needs extras 'serve', 'ray'")
def test_a_signal_ends_the_command_while_its_workers_start(
    tmp_path: Path, popen: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    model = Path(engines.save_tiny_model(tmp_path / "tiny", max_positions=64))
    # A pipe without a writer: opening the weights never returns.
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    flags = "--port 0 --max-length 64 --decode 2 --prefill 1".split()
    code = "import sys; from jaxkv.cli import main; sys.exit(main.main())"
    process = popen("-c", code, "serve", str(model), *flags)
    command = psutil.Process(process.pid)

    def loading() -> list[psutil.Process]:
        """Workers that have imported JAX."""
        workers = []
        for child in command.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "ray::" in child.name() and any(
                    "jaxlib" in x.path for x in child.memory_maps()
                ):
                    workers.append(child)
        return workers

    end = time.monotonic() + 120
    while len(loading()) < 3:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.2)
    processes = command.children(recursive=True)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, "")
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@pytest.mark.slow
@pytest.mark.skipif(not HAS_EXTRA or not HAS_RAY, reason="needs extras 'serve', 'ray'")
def test_ray_workers_answer_over_http(
    tmp_path: Path,
    popen: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = engines.save_tiny_model(tmp_path / "tiny", max_positions=64)
    monkeypatch.setenv("JAXKV_API_KEY", KEY)
    flags = "--port 0 --json --max-length 64 --decode 1 --prefill 1 --name own".split()
    code = "import sys; from jaxkv.cli import main; sys.exit(main.main())"
    server = Server(popen("-c", code, "serve", model, *flags))
    roles = {x["role"]: x for x in server.status["workers"]}
    assert {*roles} == {"prefill", "decode"}
    request = dict(prompt="def f(x): return x + 1", max_tokens=12, seed=5)
    text = server.text(**request)
    with contextlib.closing(server.connect()) as connection:
        head = {"Authorization": f"Bearer {KEY}"}
        connection.request("GET", "/v1/models", headers=head)
        [listed] = json.loads(connection.getresponse().read())["data"]
    assert listed["id"] == server.status["model"] == "own"
    os.kill(roles["decode"]["pid"], signal.SIGKILL)
    assert server.text(**request) == text
    # The loss of the head is one line, and no process is left.
    router = psutil.Process(server.status["router_pid"])
    children = router.children(recursive=True)
    [head] = [x for x in children if x.name() == "gcs_server"]
    head.kill()
    _, err = server.process.communicate(timeout=90)
    assert server.process.returncode in (1, 2)
    assert "the router's process has ended" in err.strip().splitlines()[-1]
    psutil.wait_procs([router, *children], timeout=60)
    assert not [x for x in (router, *children) if x.is_running()]
