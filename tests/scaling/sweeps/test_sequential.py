"""Sequences of training runs, each chosen after the one before."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxkv.report import config_dumps
from scaling.cli.runs.proposals import NextOptions
from scaling.cli.runs.train_next import train_runs
from scaling.sweeps import (
    SweepCandidate,
    SweepConfig,
    list_candidates,
    run_sweep,
    train_in_sequence,
)
from scaling.sweeps.folder import SweepFolder
from tests.support import sweeping
from tests.support.commands import Command, assert_refused
from tests.support.impatience import Stopping


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SweepConfig:
    """Twelve cells: three widths by four lengths."""
    return sweeping.config(
        tmp_path_factory.mktemp("sequence"),
        models=tuple(sweeping.model(width) for width in (8, 16, 24)),
        num_tokens=tuple(32 * n for n in (20, 40, 80, 160)),
        max_extensions=0,
    )


def records(folder: Path) -> list[tuple[str, float]]:
    opened = SweepFolder(folder)
    opened.close()
    return [(row["run_id"], row["flops"]) for row in opened.known.values()]


def last_of(candidates: Sequence[SweepCandidate], remaining: float) -> int:
    return len(candidates) - 1


def test_candidates_are_the_cells_of_the_sweep(config: SweepConfig) -> None:
    candidates = list_candidates(config)
    assert len(candidates) == 12
    flops = [candidate.flops for candidate in candidates]
    assert flops == sorted(flops)
    repeated = dataclasses.replace(config, seeds=(0, 1, 2), num_repeated=1)
    more = {(x.num_params, x.num_tokens): x.flops for x in list_candidates(repeated)}
    smallest = min(num_params for num_params, _ in more)
    for x in candidates:
        # Two rates, and two more seeds of the best rate of the first model.
        ratio = 2.0 if x.num_params == smallest else 1.0
        assert more[x.num_params, x.num_tokens] == pytest.approx(ratio * x.flops)


def test_a_sequence_stays_within_its_budget_and_continues(
    config: SweepConfig, tmp_path: Path
) -> None:
    trainer = sweeping.pretend_trainer(config)
    candidates = list_candidates(config)
    budget = candidates[-1].flops + 1.5 * candidates[0].flops
    whole = tmp_path / "whole"
    trained = [*train_in_sequence(config, whole, last_of, budget=budget, train=trainer)]
    # The largest cell, then the largest one that still fits.
    assert trained[0] == candidates[-1]
    assert 0 < budget - sum(x.flops for x in trained) < candidates[0].flops
    assert sum(flops for _, flops in records(whole)) == pytest.approx(
        sum(x.flops for x in trained)
    )
    # Stopped after each run, so that cells are left with one of their two rates.
    stopped = tmp_path / "stopped"
    slow = sweeping.pretend_trainer(config, most_runs=1)
    for _ in range(2 * len(trained) + 1):
        [*train_in_sequence(config, stopped, last_of, budget=budget, train=slow)]
    assert records(stopped) == records(whole)
    assert not [*train_in_sequence(config, whole, last_of, budget=budget)]
    never = Stopping(0)
    after = train_in_sequence(
        config, tmp_path / "new", last_of, budget=budget, progress=never
    )
    assert not [*after]
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="budget=0 must be in"):
        [*train_in_sequence(config, whole, last_of, budget=0)]


def test_bad_options_of_a_sequence_are_refused(
    jaxkv: Command, config: SweepConfig
) -> None:
    Path("sweep.json").write_text(config_dumps(config))
    called = "next log --train sweep.json"
    assert_refused(jaxkv, called, "--train needs --budget")
    assert_refused(jaxkv, f"{called} --budget 1 --law kaplan-n", "must have an optimum")
    assert_refused(jaxkv, "next log --train large --budget 1", "config")


@pytest.mark.slow
def test_proposed_runs_are_trained_after_the_cheapest(
    config: SweepConfig, tmp_path: Path
) -> None:
    """Ten runs are pretended; the proposed two are trained."""
    log = tmp_path / "log"
    (tmp_path / "sweep.json").write_text(config_dumps(config))
    candidates = list_candidates(config)
    options = NextOptions(
        train=str(tmp_path / "sweep.json"),
        budget=sum(x.flops for x in candidates[:10]),
        bootstrap=100,
    )
    first = train_runs(str(log), options, sweeping.pretend_trainer(config))
    assert [run["rule"] for run in first.document["runs"]] == ["cheapest"] * 10
    assert first.document["standard_error"] > 0
    budget = sum(x.flops for x in candidates)
    more = dataclasses.replace(options, budget=budget)
    second = train_runs(str(log), more, run_sweep)
    runs = second.document["runs"]
    assert [run["rule"] for run in runs] == ["next", "next"]
    assert runs[0]["standard_error"] == pytest.approx(first.document["standard_error"])
    assert {(x["num_params"], x["num_tokens"]) for x in runs} == {
        (x.num_params, x.num_tokens) for x in candidates[10:]
    }
    opened = SweepFolder(log)
    opened.close()
    rows = [*opened.known.values()]
    assert len(rows) == 2 * len(candidates)
    assert all(row["status"] == "done" for row in rows)
    assert all(row["seconds"] > 0 for row in rows[20:])
    again = train_runs(str(log), more)
    assert again.document["runs"] == []
    assert again.status == 0
