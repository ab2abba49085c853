"""The decode benchmark: its rows, its peers, and what it calls the host's share."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.bench import peer_process
from experiments.bench.decode import experiment, ours
from experiments.bench.decode.ours import CallTimes
from experiments.framework import registry
from jaxkv.progress import Quiet
from tests.support import smoke
from tests.support.commands import Command, document

KEYS = {
    *("implementation", "batch", "prompt_tokens", "output_tokens"),
    *("prefill_tokens_per_s", "decode_tokens_per_s", "step_s", "host_share"),
    *("compile_s", "peak_bytes", "ratio"),
}

# A peer that answers at once, in the words of `peer_main`.
FAKE = """
import json, os, sys
kind, folder = sys.argv[2:4]
if kind == "LlamaCpp":
    print(json.dumps({"absent": "No module named 'llama_cpp'"}))
    sys.exit()
files = sorted(os.listdir(folder))
print(json.dumps({"version": " ".join(files)}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "broken" in folder:
        sys.exit("out of luck\\n")
    num = asked["output_tokens"]
    batch = len(asked["prompts"])
    print(json.dumps({
        "prefill_s": 0.5, "decode_s": 2.0, "num_decoded": batch * (num - 1),
        "tokens": [[0] * num] * batch, "peak_bytes": 7,
    }), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the fake in the script's place; returns the interpreter."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(peer_process, "MAIN", tmp_path / "fake.py")
    return Path(sys.executable)


def peer(python: Path, kind: str, folder: Path) -> experiment.Peer:
    return experiment.Peer("transformers", python, experiment.SCRIPT, kind, folder)


@pytest.mark.slow
def test_it_times_itself_and_the_peers_that_are_there(
    fake: Path, jaxkv: Command
) -> None:
    args = ("bench", "decode", "smoke", "--out", "run", "--peer-python", str(fake))
    found = document(jaxkv, *args)
    rows, (*_, ours_too, theirs_too) = found["rows"], found["details"]
    assert [(row["implementation"], row["batch"]) for row in rows] == [
        *(("jaxkv", 1), ("transformers", 1), ("jaxkv", 2), ("transformers", 2))
    ]
    ours, theirs = rows[2:]
    assert all(row.keys() >= KEYS for row in rows)
    assert 0 <= ours["host_share"] <= 1
    assert ours_too["absent"] == "llama.cpp: No module named 'llama_cpp'"
    assert ours["compile_s"] > 0
    assert ours["step_s"] == pytest.approx(2 / ours["decode_tokens_per_s"])
    assert ours["peak_bytes"] > 1e7
    assert theirs_too["version"] == "config.json model.safetensors"
    assert theirs["decode_tokens_per_s"] == 2 * 15 / 2.0
    assert theirs["prefill_tokens_per_s"] == 2 * 8 / 0.5
    assert theirs["ratio"] == theirs["prefill_ratio"] == 1
    assert ours["ratio"] == pytest.approx(ours["decode_tokens_per_s"] / 15)
    assert ours_too["same_answers"] == 1
    assert ours_too["batch"] == theirs_too["batch"] == 2
    assert Path("run/figure.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_stopped_early_it_keeps_whole_batch_sizes() -> None:
    class Impatient(Quiet):
        """Stops when the second batch size begins."""

        def track(self, items: Any, label: str, unit: str) -> Any:
            for batch, turn in items:
                if batch == 2:
                    return
                yield batch, turn

    (study,) = registry.load("bench_decode").studies
    rows = experiment.run(experiment.CONFIGS["smoke"], Impatient())
    assert [row["batch"] for row in rows] == [1]
    assert rows[0]["ratio"] is None
    for kept in (rows, []):
        assert smoke.draw(study, kept)


def test_a_broken_peer_is_one_line(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    with (
        peer(fake, "Transformers", tmp_path / "broken") as theirs,
        pytest.raises(ValueError, match="transformers: ended early: out of luck"),
    ):
        theirs.measure([[1]], 2)


def test_an_interpreter_without_peers_is_refused(fake: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be started"):
        peer(tmp_path / "no-python", "Transformers", tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="it is installed here"
)
def test_the_real_script_says_what_is_missing(tmp_path: Path) -> None:
    for kind in experiment.KINDS.values():
        with (
            pytest.raises(ValueError, match=r"transformers: No module named '[tl]"),
            peer(Path(sys.executable), kind, tmp_path),
        ):
            pass


def test_the_hosts_share_worked_by_hand() -> None:
    calls = [
        CallTimes(dispatched_s=0.0, ready_s=10.0, drained_s=10.0, fed=True),
        # Under way before the first was ready: no gap.
        CallTimes(dispatched_s=5.0, ready_s=20.0, drained_s=21.0, fed=True),
        # The device handed out finished sequences for a second.
        CallTimes(dispatched_s=15.0, ready_s=30.0, drained_s=30.0, fed=True),
        # The host came two seconds late.
        CallTimes(dispatched_s=32.0, ready_s=40.0, drained_s=40.0, fed=True),
        # Nothing was left to do.
        CallTimes(dispatched_s=49.0, ready_s=50.0, drained_s=50.0, fed=False),
    ]
    assert ours.host_share(calls) == pytest.approx(3 / 30)
    assert ours.host_share(calls[:1]) is None


def test_the_model_must_hold_the_tokens() -> None:
    config = experiment.Config(model="random-tiny", prompt_tokens=1000)
    with pytest.raises(ValueError, match="max_positions=1024"):
        experiment.run(config)
