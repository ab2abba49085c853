"""The training benchmark: its rows, and equal training of all systems."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from experiments.bench.train import experiment, peers
from experiments.framework import load_experiment
from experiments.harness.peers import peer_process
from tests.support import smoke
from tests.support.commands import Command, document
from tests.support.impatience import Impatient

KEYS = {
    *("implementation", "width", "tokens_per_s", "flops_per_s", "compile_s", "ratio")
}

# A peer that answers at once, with the protocol of `peer_main`.
FAKE = """
import json, sys, zipfile
if sys.argv[2] == "CompiledTrainer":
    print(json.dumps({"absent": "no compiler"}))
    sys.exit()
print(json.dumps({"version": "torch 0"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    reply = {"tokens_per_s": 100.0}
    if "file" in asked:
        names = zipfile.ZipFile(asked["file"]).namelist()
        assert "layers.0.qkv.weight.npy" in names and "windows.npy" in names
        reply = {"losses": [0.0] * 4, "compile_s": 0.0, "optimizer": "fused"}
    print(json.dumps(reply), flush=True)
"""


@pytest.mark.thorough
def test_rows_with_a_peer(jaxkv: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("fake.py").write_text(FAKE)
    monkeypatch.setattr(peer_process, "MAIN", Path("fake.py").resolve())
    args = ("bench", "train", "smoke", "--out", "run", "--peer-python", sys.executable)
    report = document(jaxkv, *args)
    ours, peer_rows = report["rows"]
    assert set(ours) == set(peer_rows) == KEYS
    assert [ours["implementation"], peer_rows["implementation"]] == ["jaxkv", "PyTorch"]
    assert peer_rows["tokens_per_s"] == 100
    assert peer_rows["ratio"] == 1
    assert ours["ratio"] == pytest.approx(ours["tokens_per_s"] / 100)
    assert ours["width"] == 8
    assert ours["compile_s"] > 0
    # By hand: 6 per weight of a product, and causal attention's 16 / 2 keys a query:
    # 4 operations a feature and key forward, 12 with the gradients.
    matmul = 2 * 12 * 8 * 8 + 257 * 8
    flops = 6 * matmul + 12 * 2 * 8 * 16 / 2
    assert ours["flops_per_s"] == pytest.approx(flops * ours["tokens_per_s"])
    details, other = report["details"]
    assert details["absent"] == "PyTorch, compiled: no compiler"
    assert details["mfu"] is None
    assert details["ceiling_flops_per_s"] > 1e8
    # The fake has losses of 0; the loss of jaxkv at the start is that of a guess.
    assert other["loss_gap"] == pytest.approx(5.549, abs=0.06)
    assert Path("run/figure.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_stopped_run_has_complete_widths() -> None:
    config = experiment.Config(
        width=(8, 16), head_dim=4, batch_size=2, seq_len=8, rounds=1, seconds=0.01
    )
    rows = experiment.run(config, Impatient("training"))
    assert [row["width"] for row in rows] == [8]
    assert rows[0]["ratio"] is None
    (study,) = load_experiment("bench_train").studies
    for partial_rows in (rows, []):
        assert smoke.draw(study, partial_rows)
        assert bool(experiment.summary(partial_rows)) == bool(partial_rows)


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="it is installed here"
)
def test_the_real_script_reports_missing_libraries() -> None:
    rival = peers.PyTorchTrainer(
        "PyTorch", Path(sys.executable), peers.PEER_SCRIPT, "EagerTrainer"
    )
    with pytest.raises(ValueError, match="PyTorch: No module named 'torch'"), rival:
        pass


@pytest.mark.slow
def test_pytorch_trains_the_same_model() -> None:
    if not (python := os.environ.get("JAXKV_PEER_PYTHON")):
        pytest.skip("JAXKV_PEER_PYTHON names no Python with torch")
    config = experiment.Config(
        width=(16,), rounds=1, seconds=0.1, peer_python=Path(python)
    )
    rows = experiment.run(config)
    assert max(row["loss_gap"] for row in rows) < 1e-5
