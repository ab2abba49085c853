"""Scores forecasts of accuracy, learning rate and batch on runs that were not fitted.

Public tables: OLMo's ladder (Bhagia et al. 2024, arXiv:2412.04403) and Step Law's runs
(Li et al. 2025, arXiv:2503.04715). A split names the fitted and the scored rows;
`splits.json` has the SHA-256 of both lists. `jaxkv fit TABLE --law downstream` and
`--law hyperparameters` make the same fits for any table.
"""

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments import lab
from experiments.training.public_forecasts.splits import (
    ALL_SIZES,
    LADDER,
    SPLITS,
    TWO_SIZES,
    Split,
    digest_rows,
    simulate_tables,
)
from experiments.training.public_forecasts.tables import (
    CHOICES,
    AccuracyTable,
    CellTable,
    Result,
    SplitTable,
)
from scaling import forecasts
from scaling.cli import find_published
from scaling.logs import (
    LADDER_TASKS,
    RunSize,
    TaskRuns,
    parse_run_size,
    read_task_runs,
    read_tuned_runs,
)

SIMULATED = "simulated"
TARGETS = ("7B:4T", "13B:5T")
"""Runs to forecast from all sizes of the ladder, whose metrics are not in the table."""
SPLITS_FILE = Path(__file__).with_name("splits.json")
MAX_LOST = 0.2
"""Bar of the mean loss lost in %, as in `claims.toml`."""


class Config(lab.ConfigRecord):
    """The tables."""

    folder: str = ""
    """Folder with the tables; `simulated` for simulated ones. By default the folder
    `losses2026` of published data. Splits whose table is missing are skipped."""


CONFIGS = {"real": Config(), "smoke": Config(folder=SIMULATED)}


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Fits and scores each split whose table is in the folder."""
    splits, accuracies, cells = [], [], []
    committed = json.loads(SPLITS_FILE.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as simulated:
        folder = Path(config.folder)
        if config.folder == SIMULATED:
            folder = Path(simulated)
            simulate_tables(folder)
        elif not config.folder:
            (path,) = find_published("folder=''", [f"losses2026/{LADDER}"])
            folder = path.parent
        if not folder.is_dir():
            raise ValueError(f"folder={config.folder!r} must be a folder with tables")
        for split in progress.track(SPLITS, "splits", "splits"):
            path = folder / split.table
            if not path.is_file():
                splits.append((split.name, 0, 0, "", False, f"no {split.table}"))
                continue
            is_ladder = split.table == LADDER
            score = score_tasks if is_ladder else score_cells
            fitted, scored, rows = score(split, path)
            digest = digest_rows(fitted, scored)
            is_committed = digest == committed[split.name]
            numbers = (len(fitted), len(scored), digest, is_committed)
            splits.append((split.name, *numbers, ""))
            (accuracies if is_ladder else cells).extend(rows)
    table = CellTable.of(cells)
    return Result(
        not config.folder,
        AccuracyTable.of(accuracies),
        table.at(np.argsort(-table.error, kind="stable")),
        SplitTable.of(splits),
    )


type Scores = tuple[list[str], list[str], list[tuple]]
"""Names of fitted and of scored runs, and the rows of a table."""


def score_tasks(split: Split, path: Path) -> Scores:
    """Forecasts the accuracies of the scored runs, or of `TARGETS`."""
    runs = read_task_runs(path)
    sizes = map(RunSize, runs.num_params.tolist(), runs.num_tokens.tolist())
    is_fitted, is_scored = split.divide(sizes)
    fitted = runs.select(is_fitted)
    scored = runs.select(is_scored)
    if split.name == ALL_SIZES:
        unknown = {task: np.full(len(TARGETS), np.nan) for task in LADDER_TASKS}
        n, d = np.array([parse_run_size(x) for x in TARGETS]).T
        scored = TaskRuns(TARGETS, n, d, unknown, unknown, np.ones(len(TARGETS), bool))
    fit = forecasts.fit_tasks(tuple(LADDER_TASKS.values()), fitted)
    predictions = forecasts.predict_tasks(fit, scored.num_params, scored.num_tokens)
    rows = []
    for i, run in enumerate(scored.names):
        for task, x in predictions.items():
            columns = x.accuracy, x.low, x.high, x.log_linear, scored.accuracy[task]
            rows.append((split.name, run, task, *(values[i] for values in columns)))
    return [*fitted.names], [*scored.names], rows


def score_cells(split: Split, path: Path) -> Scores:
    """Forecasts the best pair of the scored cells."""
    cells, _ = read_tuned_runs(path)
    is_fitted, is_scored = split.divide(cell.size for cell in cells)
    fitted, scored = (
        list(itertools.compress(cells, mask)) for mask in (is_fitted, is_scored)
    )
    fit = forecasts.fit_rate_batch(fitted)
    rows = []
    for cell in scored:
        best = forecasts.predict_rate_batch(fit, cell.size)
        pairs = forecasts.choose_pairs(fit, fitted, cell.size)
        rate = (best.rate, *best.rate_interval, cell.rate[cell.best])
        batch = (best.batch, *best.batch_interval, cell.batch[cell.best])
        lost = [
            100 * forecasts.score_pair(cell, *pairs[x]).lost for x in CHOICES.values()
        ]
        rows.append((split.name, cell.size.label, *rate, *batch, *lost))
    fitted_names, scored_names = (
        [
            " ".join(f"{x:.6g}" for x in (*cell.size, *pair))
            for cell in part
            for pair in zip(cell.rate, cell.batch, strict=True)
        ]
        for part in (fitted, scored)
    )
    return fitted_names, scored_names, rows


def by_split[T: AccuracyTable | CellTable](table: T) -> dict[str, T]:
    """Returns the scored rows by split, the largest mean error first."""
    parts = {name: table.where(split=name) for name in table.distinct("split")}
    means = {name: float(part.error.mean()) for name, part in parts.items()}
    order = sorted(means, key=means.__getitem__, reverse=True)
    return {name: parts[name] for name in order if np.isfinite(means[name])}


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws errors of accuracies, and the loss lost by each choice of a pair."""
    top, bottom = axes
    tasks = by_split(result.accuracies)
    places = np.arange(len(tasks))
    for shift, name, label, color in (
        (-0.2, "error", "two-stage law", lab.BLUE),
        (0.2, "line_error", "line over ln(compute)", lab.ORANGE),
    ):
        errors = [100 * getattr(x, name).mean() for x in tasks.values()]
        top.barh(places + shift, errors, 0.38, color=lab.colors()[color], label=label)
    x = "mean relative error [%]"
    lab.set_labels(top, "Accuracy of larger runs, eight tasks of OLMo's ladder", x, "")
    cells = by_split(result.cells)
    places = np.arange(len(cells))
    looks = zip("os^D", (lab.BLUE, lab.ORANGE, lab.GREEN, lab.RED), strict=True)
    for (name, label), (mark, color) in zip(CHOICES.items(), looks, strict=True):
        lost = [getattr(x, name).mean() for x in cells.values()]
        look = {"marker": mark, "linestyle": "", "markersize": 8}
        lab.draw_curve(bottom, lost, places, color, label, **look)
    lab.draw_reference_line(bottom, MAX_LOST, "bar", along="y")
    title = "Loss lost by the forecast of rate and batch"
    x = "loss above the lowest of the cell [%]"
    lab.set_labels(bottom, title, x, "", xscale="log")
    lab.label_log_axis(bottom.xaxis)
    for ax, parts in ((top, tasks), (bottom, cells)):
        ax.set_yticks(range(len(parts)), [*parts])
        ax.set_ylim(max(len(parts), 1) - 0.5, -0.5)
        ax.legend()


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares each split with its rivals, worst first."""
    remarks = {split.name: split.remark for split in SPLITS}
    for name, part in by_split(result.accuracies).items():
        words: dict[str, Any] = {"split": name, "num": len(part)}
        words["remark"] = remarks[name]
        error, line = (100 * float(x.mean()) for x in (part.error, part.line_error))
        yield lab.measured("accuracy", error, published=line, **words)
        share = float(part.is_covered.mean())
        yield lab.measured("covered", share, differs=name == TWO_SIZES, **words)
    for name, part in by_split(result.cells).items():
        lost = {x: float(getattr(part, x).mean()) for x in CHOICES}
        rate, batch = part.factors
        words = {"split": name, "num": len(part), "rate": rate, "batch": batch}
        words["remark"] = remarks[name]
        yield lab.measured("lost", lost["error"], law=lost["published"], **words)
        for rival in ("nearest_cell", "mean_pair"):
            yield lab.measured(rival, lost["error"], published=lost[rival], **words)
    if result.is_public:
        scored = result.splits.where(skipped="")
        yield lab.measured("split", float(scored.is_committed.mean()))


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns scores by split, by task and by cell, worst first, and forecasts."""
    tasks = by_split(result.accuracies)

    def percent(values: np.ndarray, digits: int = 2) -> str:
        return f"{values.mean():.{digits}f} %"

    scores = lab.Sheet(
        "accuracy",
        ["split", "two-stage", "log-linear", "in 90 % intervals"],
        [
            [
                name,
                percent(100 * x.error),
                percent(100 * x.line_error),
                f"{x.is_covered.sum()} of {len(x)}",
            ]
            for name, x in tasks.items()
        ],
        "Mean relative error of the accuracies of eight tasks, worst first.",
    )
    by_task = {
        task: [x.where(task=task) for x in tasks.values()]
        for task in (LADDER_TASKS if tasks else ())
    }
    order = sorted(by_task, key=lambda x: -sum(y.error.mean() for y in by_task[x]))
    task_scores = lab.Sheet(
        "accuracy by task",
        ["task", *tasks],
        [
            [task]
            + [
                f"{percent(100 * x.error)} ({percent(100 * x.line_error)})"
                for x in by_task[task]
            ]
            for task in order
        ],
        "Log-linear in brackets; the largest sum of errors first.",
    )
    forecast = result.accuracies.where(split=ALL_SIZES).sheet(
        "forecasts from all sizes of the ladder",
        *("run", "task", "accuracy", "low", "high", "log_linear"),
        note="90 % intervals.",
    )
    heads = ["split", "cells", *CHOICES.values(), "rate off", "batch off"]
    lost = lab.Sheet(
        "loss lost",
        [*heads, "in 90 % intervals"],
        [
            [name, str(len(x)), *(percent(getattr(x, key), 3) for key in CHOICES)]
            + [f"{factor:.2f}" for factor in x.factors]
            + [f"{x.num_covered} of {2 * len(x)}"]
            for name, x in by_split(result.cells).items()
        ],
        "Mean loss of the measured pair nearest to the chosen one, over the lowest of "
        "its cell, worst first; factors of error to the best measured pair are "
        "geometric means. Step Law's constants were fitted to all dense cells.",
    )
    parts = (scores, task_scores, forecast, lost)
    return [x for x in parts if x.rows] + lab.sheets(result)


STUDY = lab.Study(CONFIGS, Result, run, plot, claims, summary, panels=lab.Panels(2, 1))
"""The study of forecasts on public runs."""
