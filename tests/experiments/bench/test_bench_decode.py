"""The decode benchmark: rows, peers, and host share."""

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench.decode import experiment, jaxkv_engine
from experiments.framework import load_experiment
from experiments.harness import (
    MODEL_PEERS,
    CallTimes,
    host_share,
    load_benchmark_model,
)
from experiments.harness.peers import peer_process
from jaxkv import memory
from jaxkv.progress import Quiet
from jaxkv.sampling import Sampling
from tests.support import smoke
from tests.support.commands import Command, document

KEYS = {
    *("implementation", "batch", "prompt_tokens", "output_tokens"),
    *("prefill_tokens_per_s", "decode_tokens_per_s", "step_s", "host_share"),
    *("compile_s", "peak_bytes", "ratio"),
}

# A peer that answers at once, with the protocol of `peer_main`.
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
    num, reads = asked["output_tokens"], asked["reads"]
    batch = len(asked["prompts"])
    print(json.dumps({
        "prefill_s": 0.5, "decode_s": 2.0, "num_decoded": batch * num,
        "tokens": [[0] * reads] * batch, "occupancy": 1.0, "peak_bytes": 7,
    }), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the peer script by a fake; returns the interpreter."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(peer_process, "MAIN", tmp_path / "fake.py")
    return Path(sys.executable)


def peer(python: Path, kind: str, folder: Path) -> experiment.PeerEngine:
    return experiment.PeerEngine(
        "transformers", python, MODEL_PEERS["transformers"][0], kind, folder
    )


@pytest.mark.slow
def test_jaxkv_and_installed_peers_are_timed(fake: Path, jaxkv: Command) -> None:
    args = ("bench", "decode", "smoke", "--out", "run", "--peer-python", str(fake))
    report = document(jaxkv, *args)
    rows, (*_, ours_too, theirs_too) = report["rows"], report["details"]
    assert [(row["implementation"], row["batch"]) for row in rows] == [
        ("jaxkv", 1),
        ("transformers", 1),
        ("jaxkv", 2),
        ("transformers", 2),
    ]
    ours, peer_rows = rows[2:]
    assert all(row.keys() >= KEYS for row in rows)
    assert 0 <= ours["host_share"] <= 1
    assert ours_too["absent"] == "llama.cpp: No module named 'llama_cpp'"
    assert ours["compile_s"] > 0
    assert ours["step_s"] == pytest.approx(2 / ours["decode_tokens_per_s"])
    assert ours["peak_bytes"] > 1e7
    assert theirs_too["version"] == "SHA256SUMS config.json model.safetensors"
    assert peer_rows["decode_tokens_per_s"] == 2 * 16 / 2.0
    assert peer_rows["prefill_tokens_per_s"] == 2 * 8 / 0.5
    assert peer_rows["ratio"] == peer_rows["prefill_ratio"] == 1
    assert ours["ratio"] == pytest.approx(ours["decode_tokens_per_s"] / 16)
    assert ours["ratio_range"] == [ours["ratio"]] * 2  # of one round
    assert ours["occupancy"] == peer_rows["occupancy"] == 1
    assert ours["first_token_s"] == pytest.approx(16 / ours["prefill_tokens_per_s"])
    spent = [ours[x] for x in ("products_s", "attention_s", "sampling_s")]
    assert sum(spent) == pytest.approx(ours["step_s"])
    assert ours["fraction"] == pytest.approx(ours["floor_s"] / ours["step_s"])
    assert ours_too["batch"] == theirs_too["batch"] == 2
    assert Path("run/figure.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_stopped_run_has_complete_cases() -> None:
    class Impatient(Quiet):
        """Stops when the second batch size begins."""

        def track(self, items: Any, label: str, unit: str) -> Any:
            for case, turn in items:
                if case[0] == 2:
                    return
                yield case, turn

    (study,) = load_experiment("bench_decode").studies
    rows = experiment.run(experiment.CONFIGS["smoke"], Impatient())
    assert [row["batch"] for row in rows] == [1]
    assert rows[0]["ratio"] is None
    for partial_rows in (rows, []):
        assert smoke.draw(study, partial_rows)


def test_a_broken_peer_is_one_line(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    with (
        peer(fake, "Transformers", tmp_path / "broken") as peer_rows,
        pytest.raises(ValueError, match="transformers: ended early: out of luck"),
    ):
        peer_rows.measure([[1]], 2, 1.0, 1)


def test_an_interpreter_without_peers_is_rejected(fake: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be started"):
        peer(tmp_path / "no-python", "Transformers", tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="it is installed here"
)
def test_the_real_script_reports_missing_libraries(tmp_path: Path) -> None:
    for _, kind in MODEL_PEERS.values():
        with (
            pytest.raises(ValueError, match=r"transformers: No module named '[tl]"),
            peer(Path(sys.executable), kind, tmp_path),
        ):
            pass


def test_host_share_equals_hand_computed_value() -> None:
    calls = [
        CallTimes(dispatched_s=0.0, ready_s=10.0, drained_s=10.0, has_rows=True),
        # Dispatched before the first call was ready: no gap.
        CallTimes(dispatched_s=5.0, ready_s=20.0, drained_s=21.0, has_rows=True),
        # The device drained finished sequences for 1 s.
        CallTimes(dispatched_s=15.0, ready_s=30.0, drained_s=30.0, has_rows=True),
        # The host dispatched 2 s late.
        CallTimes(dispatched_s=32.0, ready_s=40.0, drained_s=40.0, has_rows=True),
        # A call without rows.
        CallTimes(dispatched_s=49.0, ready_s=50.0, drained_s=50.0, has_rows=False),
    ]
    assert host_share(calls) == pytest.approx(3 / 30)
    assert host_share(calls[:1]) is None


def info(num_emitted: list[list[int]]) -> Any:
    """Returns the fields of a call's step info that are counted: `[steps, slots]`."""
    return types.SimpleNamespace(num_emitted=np.array(num_emitted))


def test_only_calls_with_full_decode_batches_are_counted() -> None:
    calls = [
        CallTimes(dispatched_s=0.0, ready_s=at, drained_s=at, has_rows=at < 11)
        for at in (1.0, 3.0, 6.0, 10.0, 11.0)
    ]
    infos = [
        info([[1, 1], [1, 1]]),  # the start is unknown
        info([[1, 1], [2, 1]]),  # counted, 2 s: a draft was accepted
        info([[1, 1], [1, 0]]),  # one had finished
        info([[1, 1], [1, 1]]),  # counted, 4 s
        info([[0, 0], [0, 0]]),  # no rows: excluded from the occupancy
    ]
    decode_count = jaxkv_engine.count_full_batches(calls, infos)
    assert decode_count == jaxkv_engine.DecodeCount(
        6.0, 9, 0.9375
    )  # of 16 slots in 8 steps 15
    with pytest.raises(ValueError, match="no call has every sequence decoding"):
        jaxkv_engine.count_full_batches(calls[2:3], infos[2:3])


@pytest.mark.slow
def test_skipped_prefill_gives_the_state_of_a_real_prefill() -> None:
    """Checks lengths after skipped prefill, and that pages are unchanged."""
    config = dataclasses.replace(experiment.CONFIGS["smoke"], prompt_tokens=8)
    model = load_benchmark_model(config.model, config.dtype)
    bounds = experiment._bounds(config, 2, 8)
    one = jaxkv_engine.JaxkvEngine(model, bounds, "float32")
    engine = one._engine
    before = jax.tree.map(np.array, engine.state.pages)
    for name in range(2):
        engine.submit([5] * 8, Sampling.greedy(max_tokens=4), request_id=name)
    jaxkv_engine.skip_prefill(
        engine, jaxkv_engine.NoOpForward(model.config.vocab_size), 16
    )
    state = engine.state
    np.testing.assert_array_equal(state.table.length, [8, 8])
    for leaf, held in zip(*map(jax.tree.leaves, (state.pages, before)), strict=True):
        np.testing.assert_array_equal(leaf, held)
        assert float(jnp.std(leaf)) == pytest.approx(1, abs=0.1)
    live = state.slots.sequence >= 0
    size = bounds.page_size
    faults = memory.violations(state.pool, state.table, live, page_size=size)
    assert not any(map(int, jax.tree.leaves(faults)))
    num_told = sum(len(event.tokens) for event in engine.stream())
    assert num_told == 2 * 4


def test_ratio_is_the_median_of_round_ratios_with_range() -> None:
    rates = {"jaxkv": [1.0, 4.0, 3.0], "a": [2.0, 1.0, 3.0], "b": [1.0, 2.0, 1.0]}
    assert experiment._ratio(rates, "jaxkv") == (1.0, [0.5, 2.0])
    assert experiment._ratio(rates | {"jaxkv": []}, "jaxkv") == (None, None)


def test_too_few_model_positions_are_rejected() -> None:
    config = experiment.Config(model="random-tiny", contexts=(128, 1000))
    with pytest.raises(ValueError, match="1000 tokens of context"):
        experiment.run(config)
