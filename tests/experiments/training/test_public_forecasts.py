"""Forecasts scored on public runs: splits, claims recomputed, missing tables."""

import csv
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

from experiments.framework import load_experiment
from experiments.training.public_forecasts import experiment, splits
from jaxkv.report import field_values, read_run
from scaling.logs import LADDER_TASKS, RunSize
from tests.support import smoke, traces
from tests.support.folders import RECORDS, ROOT
from tests.support.refusals import refused


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def digest(fitted: list[str], scored: list[str]) -> str:
    lines = {f"fitted\t{x}" for x in fitted} | {f"scored\t{x}" for x in scored}
    assert len(lines) == len(fitted) + len(scored)
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def test_committed_splits_are_those_of_the_public_tables() -> None:
    committed = json.loads(experiment.SPLITS_FILE.read_text())
    assert {*committed} == {split.name for split in splits.SPLITS}
    ladder = traces.find(f"losses2026/{splits.LADDER}")
    names = [row["run"] for row in read_rows(ladder)]
    large = [x for x in names if x.startswith("3B-")]
    small = [x for x in names if x.startswith(("190M-", "370M-"))]
    assert committed["3B from 190M to 1B"] == digest([*{*names} - {*large}], large)
    assert committed[splits.TWO_SIZES] == digest(small, large)
    rows = read_rows(traces.find(f"losses2026/{splits.DENSE}"))
    longest = {row["N"]: 0.0 for row in rows}
    for row in rows:
        longest[row["N"]] = max(longest[row["N"]], float(row["D"]))
    parts: tuple[list[str], list[str]] = ([], [])
    for row in rows:
        name = " ".join(f"{float(row[x]):.6g}" for x in ("N", "D", "lr", "bs"))
        parts[float(row["D"]) == longest[row["N"]]].append(name)
    assert committed["dense, most tokens from fewer"] == digest(*parts)


def test_fitted_and_scored_runs_are_disjoint() -> None:
    sizes = [RunSize(n, d) for n in (2e8, 4e8, 1e9, 3e9) for d in (4e9, 8e9, 5e10)]
    for split in splits.SPLITS:
        is_fitted, is_scored = split.divide(sizes)
        assert is_fitted.any()
        assert is_scored.any() == (split.name != splits.ALL_SIZES)
        assert not (is_fitted & is_scored).any()
    assert splits.digest_rows(["a"], ["b"]) == digest(["a"], ["b"])


@pytest.mark.slow
def test_claims_are_recomputed_from_the_tables(tmp_path: Path) -> None:
    """Errors of the line and of the copied mean pair, in plain Python."""
    result = smoke.run("public_forecasts").result
    values = smoke.measured_values(experiment.claims(result))
    splits.simulate_tables(tmp_path)
    rows = read_rows(tmp_path / splits.LADDER)
    name = "3B from 190M to 1B"
    errors = []
    for task in LADDER_TASKS.values():
        points = []
        for row in rows:
            size, multiple = row["run"].removesuffix("xC").split("-")
            n = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
            flops = 6 * n * 20 * n * float(multiple)
            accuracy = math.fsum(
                weight * float(row[x])
                for weight, x in zip(task.weights, task.accuracy, strict=True)
            )
            points.append((math.log(flops), accuracy, size == "3B"))
        small = [(x, y) for x, y, is_large in points if not is_large]
        mean_x, mean_y = (sum(x) / len(small) for x in zip(*small, strict=True))
        slope = sum((x - mean_x) * (y - mean_y) for x, y in small)
        slope /= sum((x - mean_x) ** 2 for x, _ in small)
        for x, y, is_large in points:
            if is_large:
                line = min(max(mean_y + slope * (x - mean_x), 0), 1)
                errors.append(abs(line / y - 1))
    part = result.accuracies.where(split=name)
    assert np.mean(part.line_error) == pytest.approx(sum(errors) / len(errors))
    error = sum(abs(x["accuracy"] / x["measured"] - 1) for x in part.rows()) / len(part)
    assert values[f"accuracy of {name}: mean relative error"] == pytest.approx(
        100 * error
    )
    cells: dict[tuple[float, float], list[tuple[float, float, float]]] = {}
    for row in read_rows(tmp_path / splits.DENSE):
        loss, rate, batch = (float(row[x]) for x in ("loss", "lr", "bs"))
        runs = cells.setdefault((float(row["N"]), float(row["D"])), [])
        runs.append((loss, math.log(rate), math.log(batch)))
    best = [min(runs) for (n, _), runs in cells.items() if n < 5e8]
    mean = [sum(x) / len(best) for x in zip(*best, strict=True)]
    lost = []
    for (n, _), runs in cells.items():
        if n > 5e8:
            near = min(runs, key=lambda run: math.dist(run[1:], mean[1:]))
            lost.append(100 * (near[0] / min(runs)[0] - 1))
    part = result.cells.where(split="dense 537M from 429M")
    assert sorted(part.mean_pair) == pytest.approx(sorted(lost))


@pytest.mark.thorough
def test_splits_without_their_table_are_skipped(tmp_path: Path) -> None:
    with refused(f"folder='{tmp_path}/no' must be a folder with tables"):
        experiment.run(experiment.Config(folder=f"{tmp_path}/no"))
    splits.simulate_tables(tmp_path)
    (tmp_path / splits.LADDER).unlink()
    (tmp_path / splits.DENSE).unlink()
    result = experiment.run(experiment.Config(folder=str(tmp_path)))
    missing = [split.name for split in splits.SPLITS if split.table != splits.MIXTURES]
    skipped = result.splits.at(result.splits.skipped != "")
    assert skipped.split.tolist() == missing
    assert {*skipped.skipped} == {f"no {splits.LADDER}", f"no {splits.DENSE}"}
    assert {*result.cells.split} == {"mixtures, 8B tokens from 4B"}
    assert len(experiment.claims(result)) == 3
    assert len(experiment.STUDY.report_parts(result)) == 3
    assert smoke.draw(experiment.STUDY, result)


@pytest.mark.slow
def test_the_record_is_that_of_the_public_tables() -> None:
    folder = traces.find(f"losses2026/{splits.LADDER}").parent
    result = experiment.run(experiment.Config(folder=str(folder)))
    name = "public_forecasts"
    recorded = read_run(RECORDS / name, load_experiment(name)).result
    assert result.splits.digest.tolist() == recorded.splits.digest.tolist()
    assert result.splits.is_committed.all()
    for table in ("accuracies", "cells"):
        old = field_values(getattr(recorded, table))
        for column, new in field_values(getattr(result, table)).items():
            if new.dtype.kind == "f":
                np.testing.assert_allclose(new, old[column], rtol=1e-3, err_msg=column)
            else:
                assert new.tolist() == old[column].tolist()


def test_the_tutorial_has_the_numbers_of_the_record() -> None:
    name = "public_forecasts"
    result = read_run(RECORDS / name, load_experiment(name)).result
    page = (ROOT / "docs/tutorials/forecasts.md").read_text("utf-8")
    for part in experiment.by_split(result.accuracies).values():
        numbers = [f"{100 * x.mean():.2f} %" for x in (part.error, part.line_error)]
        assert f"| {' | '.join(numbers)} |" in page
    for part in experiment.by_split(result.cells).values():
        numbers = [f"{getattr(part, x).mean():.2f} %" for x in experiment.CHOICES]
        assert f"| {' | '.join(numbers)} |" in page
    forecast = result.accuracies.where(split=splits.ALL_SIZES)
    for x in forecast.where(run="13B:5T").rows():
        assert f"| {x['accuracy']:.3f} | {x['low']:.3f} to {x['high']:.3f} |" in page
