"""`jaxkv replay`, and the options of `jaxkv serve` that keep incidents."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv import Sampling
from jaxkv.cli import generate, serve
from jaxkv.server import IncidentRecorder, incident_recorder
from tests.support.commands import Command, assert_refused, document, words
from tests.support.folders import ROOT, TOKENIZED

HAS_EXTRA = all(map(importlib.util.find_spec, ("fastapi", "uvicorn")))
BOUNDS: dict[str, Any] = {
    "max_slots": 2,
    "num_pages": 16,
    "max_length": 64,
    "token_budget": 16,
    "steps_per_call": 2,
    "queue_head": 8,
}


def make_recorder(folder: Path, **options: Any) -> IncidentRecorder:
    """Returns the recorder of `jaxkv serve`, with an objective that breaks at once."""
    read = generate.read_model(str(TOKENIZED), generate.ModelOptions())
    engine = generate.load_engine(read, generate.ModelOptions(), **BOUNDS)
    chosen = serve.ServeOptions(keep_incidents=folder, objective_ttft=1e-6, **options)
    return serve.make_recorder(engine, read, chosen, BOUNDS)


FCFS_FILE = "from jaxkv.scheduling import fcfs"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An incident without calls."""
    recorder = make_recorder(tmp_path / "incidents")
    return write_empty(recorder)


def write_empty(recorder: IncidentRecorder) -> Path:
    recorder._write(recorder.engine.state, [], [], {})
    [folder] = recorder.folder.iterdir()
    return folder


def test_a_policy_file_that_only_the_incident_names_is_not_executed(
    jaxkv: Command, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    trace = tmp_path / "executed"
    text = f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n{FCFS_FILE}\n"
    file.write_text(text)
    recorder = make_recorder(tmp_path / "incidents")
    recorder._origin = recorder._origin._replace(policy=f"{file}:fcfs")
    folder = write_empty(recorder)
    assert_refused(jaxkv, f"replay {folder}", "must be named as well, by --policy")
    assert not trace.exists()
    named = f"replay {folder} --policy {file}:fcfs"
    assert_refused(jaxkv, named, "has no calls")
    assert trace.exists()


@pytest.mark.slow
def test_a_replay_prints_latencies_and_who_gained(
    jaxkv: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_recorder, "CALLS_BETWEEN", 4)
    recorder = make_recorder(tmp_path, keep_prompts=True)
    engine = recorder.engine
    rng = np.random.default_rng(2)
    for i in range(10):
        prompt = rng.integers(5, 60, int(rng.integers(2, 20))).tolist()
        engine.submit(
            prompt, Sampling(max_tokens=int(rng.integers(4, 30))), request_id=i
        )
    while engine.has_pending():
        engine.step()
        recorder.observe(tuple(engine.tracker.events))
        engine.tracker.events.clear()
    recorder.close()
    folder = str(sorted(tmp_path.iterdir())[0])
    name = "shortest-remaining"
    result = document(jaxkv, "replay", folder, "--policy", name)
    calls = result["replay"]
    assert calls["num_calls"] == calls["num_equal_calls"] > 0
    assert calls["num_answers"] == calls["num_equal_answers"] > 0
    assert [row["policy"] for row in result["policies"]] == ["fcfs", name]
    own, other = result["policies"]
    assert own["num_gained"] == own["num_lost"] == own["num_open"] == 0
    assert other["same_tokens"]
    # Gains and losses, counted from the times of the requests.
    pairs = [row["latency_s"] for row in result["requests"]]
    changes = np.array([x[name] / x["fcfs"] - 1 for x in pairs if x["fcfs"] > 0])
    assert other["num_gained"] == (changes < -0.01).sum()
    assert other["num_lost"] == (changes > 0.01).sum()
    assert other["num_gained"] > 0
    mean = np.mean([x[name] for x in pairs])
    np.testing.assert_allclose(other["latency_mean_s"], mean, rtol=1e-9)
    text = words(jaxkv, "replay", folder, "--policy", name)
    assert "answers with equal tokens" in text
    assert "largest gains and losses" in text


def test_incidents_that_cannot_be_replayed_are_refused(
    jaxkv: Command, empty: Path, tmp_path: Path
) -> None:
    assert_refused(jaxkv, "replay", "SNAPSHOT is missing: the folder of an incident")
    assert_refused(jaxkv, f"replay {tmp_path / 'absent'}", "no such incident")
    assert_refused(jaxkv, f"replay {tmp_path}", "is no incident")
    line = "policy=shortest must be one of fcfs, "
    assert_refused(jaxkv, f"replay {empty} --policy shortest", line)
    assert_refused(jaxkv, f"replay {empty}", "has no calls")
    line = "is of another model: "
    assert_refused(jaxkv, f"replay {empty} --model stdlib-bytes", line)
    model = tmp_path / "model"
    shutil.copytree(TOKENIZED, model)
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes() + b"\0")
    assert_refused(jaxkv, f"replay {empty} --model {model}", f"{weights.name} of ")
    path = empty / "incident.json"
    path.write_text(path.read_text().replace("fcfs", "fcfz"))
    assert_refused(jaxkv, f"replay {empty}", "incident.json: is damaged")


@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra 'serve'")
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--keep-incidents x", "x: needs --objective-ttft S or --objective-tpot S"),
        ("--objective-ttft 1", "--objective-ttft: needs --keep-incidents DIR"),
        ("--keep-prompts", "--keep-prompts: needs --keep-incidents DIR"),
        (
            "--keep-incidents x --objective-tpot 0",
            "--objective-tpot 0: must be above 0 and below 1e6",
        ),
        (
            "--keep-incidents x --objective-tpot 1 --max-incidents 0",
            "--max-incidents 0: must be in [1, 1000000]",
        ),
        (
            "--keep-incidents x --objective-tpot 1 --speculate ngram",
            "x: needs --keep-prompts with --speculate or --max-beams",
        ),
        (
            "--keep-incidents x --objective-tpot 1 --parallel tp=2",
            "x: is not supported with --parallel",
        ),
    ],
)
def test_invalid_incident_options_are_refused(
    jaxkv: Command, flags: str, line: str
) -> None:
    assert_refused(jaxkv, f"serve {TOKENIZED} --port 0 {flags}", line)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_EXTRA, reason="needs the extra 'serve'")
def test_a_server_keeps_incidents_that_replay_token_for_token(
    jaxkv: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "incidents"
    flags = f"--port 0 --json --max-slots 2 --max-length 64 --keep-incidents {folder}"
    flags += " --objective-ttft 0.00001 --keep-prompts --grace-s 5"
    environment = os.environ | {
        "JAXKV_API_KEY": "a-secret-key",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jaxkv.cli.main",
            "serve",
            str(TOKENIZED),
            *flags.split(),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        status = json.loads(process.stdout.readline())

        def ask(i: int) -> None:
            request = urllib.request.Request(
                f"{status['url']}/v1/completions",
                json.dumps(
                    {"prompt": [5 + i, 6, 7], "max_tokens": 20, "ignore_eos": True}
                ).encode(),
                {
                    "Authorization": "Bearer a-secret-key",
                    "Content-Type": "application/json",
                },
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                assert response.status == 200

        for _ in range(2):
            threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 143, err
    finally:
        process.kill()
    paths = sorted(folder.iterdir())
    assert paths
    calls = document(jaxkv, "replay", str(paths[-1]))["replay"]
    assert calls["num_calls"] == calls["num_equal_calls"] > 0
    assert calls["num_answers"] == calls["num_equal_answers"] > 0
