"""Predictions of server stages: the peers' inputs and answers, and the rows."""

import csv
import json
import os
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.bench.simulate import peer_script, server_stages
from experiments.bench.simulate.server_stages import Config
from scaling.calibration import ServerPosterior, read_measured_stages
from tests.support.commands import Command, assert_refused
from tests.support.folders import GOLDEN
from tests.support.mutation import replace

STAGES = GOLDEN / "vllm_stages.csv"
FAKE_BLIS = """#!/usr/bin/env python3
import csv, json, sys
flags = dict(word[2:].split("=", 1) for word in sys.argv[2:])
config = json.load(open(flags["model-config-folder"] + "/config.json"))
assert config["architectures"] == ["LlamaForCausalLM"], config
assert (flags["hardware"], flags["tp"]) == ("H100", "1")
rows = [*csv.DictReader(open(flags["trace-data"]))]
times = [
    {"request_id": i, "e2e_us": 1000 * int(row["output_tokens"]), "ttft_us": 10 * i}
    for i, row in enumerate(rows)
]
json.dump(times, open(flags["results-path"], "w"))
"""


@pytest.fixture
def question() -> dict[str, Any]:
    """Returns the question of a stage, as a peer reads it."""
    stage, _ = read_measured_stages(STAGES)
    return json.loads(json.dumps(server_stages.make_question(stage)))


@pytest.fixture
def blis(tmp_path: Path) -> Path:
    """Returns a folder with a program that answers like BLIS."""
    program = tmp_path / "blis"
    program.write_text(FAKE_BLIS)
    program.chmod(0o755)
    return tmp_path


def test_a_question_has_the_requests_that_jaxkv_simulates(
    question: dict[str, Any],
) -> None:
    arrival_us, prompt, cached, output, is_measured = map(
        np.array, zip(*question["requests"], strict=True)
    )
    measured_us = arrival_us[is_measured]
    assert 8e6 <= measured_us.min() < 8.3e6
    assert 32.7e6 < measured_us.max() < 33e6
    assert np.all(np.diff(arrival_us) >= 0)
    assert set(output.tolist()) == {41}
    # A repeated prompt lacks the tokens after its last full block.
    again = slice(question["num_prompts"], None)
    np.testing.assert_array_equal(cached[again], (prompt[again] - 1) // 16 * 16)
    assert question["config"]["num_hidden_layers"] == 32


def test_a_trace_shares_whole_prompts(question: dict[str, Any], tmp_path: Path) -> None:
    peer_script.write_trace(tmp_path, question)
    with (tmp_path / "trace.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == len(question["requests"])
    groups: dict[str, set[int]] = {}
    for row, (arrival_us, prompt, cached, output, _) in zip(
        rows, question["requests"], strict=True
    ):
        shared = int(row["prefix_length"])
        num_unshared = int(row["input_tokens"])
        assert shared + num_unshared == prompt
        assert 1 <= num_unshared <= 16
        assert shared >= cached
        assert int(row["arrival_time_us"]) == arrival_us
        assert int(row["output_tokens"]) == output
        groups.setdefault(row["prefix_group"], set()).add(prompt)
    assert len(groups) == question["num_prompts"]
    assert all(len(lengths) == 1 for lengths in groups.values())
    # Without a prefix cache, no prompt is shared.
    bare = [
        [a, prompt, 0, output, m] for a, prompt, _, output, m in question["requests"]
    ]
    peer_script.write_trace(tmp_path, question | {"requests": bare})
    with (tmp_path / "trace.csv").open() as file:
        assert {row["prefix_length"] for row in csv.DictReader(file)} == {"0"}


def test_blis_answers_for_the_measured_requests(
    question: dict[str, Any], blis: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(blis.parent)
    answers = peer_script.Blis(blis.name, "roofline").answer(question)
    measured_indices = [i for i, x in enumerate(question["requests"]) if x[4]]
    assert answers["end_to_end_s"] == pytest.approx(0.041)
    assert answers["first_token_s"] == pytest.approx(
        10e-6 * statistics.median(measured_indices)
    )
    assert 0 < answers["cpu_s"] < 10
    assert answers["seconds"] > 0
    (blis / "blis").write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    with pytest.raises(ValueError, match="blis: no such model"):
        peer_script.Blis(str(blis), "roofline").answer(question)
    os.remove(blis / "blis")
    with pytest.raises(ValueError, match="no program blis"):
        peer_script.Blis(str(blis), "roofline")


def test_a_batch_settles_at_rate_times_latency() -> None:
    calls: list[int] = []

    def estimate(batch: int) -> tuple[float, float]:
        calls.append(batch)
        return 1.5 + 0.05 * batch, 0.1 * batch

    # b = 8 (1.5 + 0.05 b) at b = 20.
    whole_s, first_s = peer_script.settle(estimate, 8, 128)
    assert whole_s == pytest.approx(2.5)
    assert first_s == pytest.approx(2.0)
    assert calls == sorted(calls)
    assert len(calls) < 12
    # An overloaded server has its largest batch.
    assert peer_script.settle(estimate, 40, 128)[0] == pytest.approx(7.9)
    # A batch has at least one request.
    assert peer_script.settle(lambda batch: (1.0, 0.0), 0.1, 128)[0] == 1.0


def test_stages_are_found_by_the_end_of_their_name() -> None:
    runs = str(STAGES)
    (server_stage,) = server_stages.find_stages(Config(runs=runs, stages=("7b/0",)))
    assert server_stage.model == "meta-llama/Llama-2-7b-hf"
    every = server_stages.find_stages(Config(runs=runs, stages=()))
    assert [stage.name for stage in every] == ["made-up-7b/0"]  # one is overloaded
    with pytest.raises(ValueError, match="'/9' must be the end of one of made-up-7b/0"):
        server_stages.find_stages(Config(runs=runs, stages=("/9",)))


def test_a_missing_table_is_refused(jaxkv: Command) -> None:
    assert_refused(jaxkv, "bench simulate stage --runs none.csv --out run", "none.csv")


def test_systems_are_compared_on_a_stage(
    blis: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(
        [(9.0, 9.0, 0.5, 0.02), (2.0, 3.0, 0.4, 0.019), (4.0, 5.0, 0.4, 0.019)]
    )

    def ours(posterior: ServerPosterior) -> dict[str, server_stages.System]:
        assert len(posterior.deviations) == 3
        return {"jaxkv": lambda stage: server_stages.StageAnswer(*next(answers))}

    replace(monkeypatch, server_stages, "_own_systems", ours)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    config = Config(runs=str(STAGES), stages=("7b/0",), draws=3, rounds=2, blis=blis)
    result = server_stages.run(config)
    table = result.answers
    names = ["jaxkv", "BLIS", "BLIS, roofline"]
    assert [name.partition(" (")[0] for name in table.system] == names
    # The first answer is apart; then medians of the rounds.
    assert (table.first_s[0], table.seconds[0], table.cpu_s[0]) == (9, 3, 4)
    assert table.ratio[0] == 1
    low = table.seconds[1] / 4
    high = table.seconds[1] / 2
    assert low < table.ratio[1] < high
    np.testing.assert_allclose(table.error, np.array([0.4, 0.041, 0.041]) / 0.5 - 1)
    np.testing.assert_allclose(table.first_error[0], 0, atol=1e-6)
    assert table.fitted[0].endswith("stages, without this one")
    assert "one load stage" in str(server_stages.summary(result)[0])


def test_a_peer_that_fails_has_its_reason(
    blis: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = server_stages.StageAnswer(1.0, 1.0, 0.5, 0.02)
    replace(
        monkeypatch,
        server_stages,
        "_own_systems",
        lambda x: {"jaxkv": lambda y: answer},
    )
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    (blis / "blis").write_text("#!/bin/sh\necho no config >&2\nexit 1\n")
    config = Config(runs=str(STAGES), stages=("7b/0",), rounds=1, blis=blis)
    answers = server_stages.run(config).answers
    assert np.isnan(answers.seconds[1:]).all()
    assert [reason.endswith("blis: no config") for reason in answers.absent] == [
        0,
        1,
        1,
    ]
