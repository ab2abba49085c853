"""Carries `isoflop` out: the sweep, its fit, the prediction, and then the truth."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cli.fit import command, frontiers
from experiments.framework import config_json, run_folder
from experiments.harness import sweep_tables
from experiments.training.isoflop import held_out, horizons, outcomes
from experiments.training.isoflop.outcomes import Line, Points, Rates, Result
from experiments.training.isoflop.prediction import (
    choose_law,
    foresee,
    optimal_rates,
    rows_of,
)
from experiments.training.isoflop.settings import Settings
from jaxkv.progress import QUIET, Progress
from scaling.fits import result
from scaling.frontiers import Frontier
from scaling.laws import published
from scaling.logs.log import Log, read
from scaling.sweeps.sweep import Outcome

PREDICTION = "prediction.json"


def run(config: Settings, progress: Progress) -> Result:
    """Runs the experiment, or takes up what its folder holds."""
    if config.folder:
        return _run(config, Path(config.folder), progress)
    with tempfile.TemporaryDirectory() as folder:
        return _run(config, Path(folder), progress)


def _run(config: Settings, folder: Path, progress: Progress) -> Result:
    for sweep in (_sweep, horizons.sweep):
        outcome = sweep(config, folder, progress)
        if outcome.is_stopped:
            raise KeyboardInterrupt(
                f"stopped; {len(outcome.records)} runs are in {outcome.log}, and the "
                "same command goes on"
                if config.folder
                else "interrupted before anything could be fitted"
            )
    progress.show("fitting")
    errors = choose_law(folder, config.budgets)
    fit = command.run(
        command.Config(
            log=str(folder),
            law=",".join(errors),
            bootstrap=config.bootstrap,
            level=config.level,
            smoothing=horizons.SMOOTHING,
        ),
        progress,
    )
    log, cosine = read(folder), read(folder / horizons.FOLDER)
    resampled = horizons.find(config, cosine, config.bootstrap, progress)
    prediction = _prediction(config, folder, fit.document, errors)
    progress.show(
        f"width {prediction['width']} for {prediction['num_steps']:,} steps: "
        f"{prediction['predicted']:.4f} foreseen"
    )
    truth = held_out.train(config, folder, prediction, progress)
    groups = horizons.find(config, log, 0, QUIET).frontiers
    rates = optimal_rates(rows_of(folder))
    return Result(
        runs=(folder / "runs.jsonl").read_text("utf-8"),
        header=(folder / "sweep.json").read_text("utf-8"),
        prediction=config_json.dumps(prediction),
        held_out="" if truth.record is None else config_json.dumps(truth.record),
        held_out_flops=np.array([x for x, _ in truth.curve]),
        held_out_loss=np.array([y for _, y in truth.curve]),
        fit=fit,
        cosine=config_json.dumps(horizons.document(config, folder, resampled)),
        curves=_points(cosine),
        optima=outcomes.optima([x for x in groups if not _is_envelope(x)]),
        envelope=outcomes.only(
            outcomes.optima([x for x in resampled.frontiers if _is_envelope(x)])
        ),
        surface=_surface(fit.document, log, prediction["flops"]),
        rates=Rates(*np.array(rates, float).reshape(-1, 3).T),
    )


def _sweep(config: Settings, folder: Path, progress: Progress) -> Outcome:
    return sweep_tables.run(config.sweep, folder, progress)


def _is_envelope(found: Frontier) -> bool:
    return found.method == frontiers.ENVELOPE


def _surface(document: str, log: Log, flops: float) -> Line:
    """The optimum of the law, from the smallest run to the one that is foreseen."""
    fit = result.from_json(document)
    n, d, c = (log.columns[x] for x in ("num_params", "num_tokens", "flops"))
    x = np.geomspace(c.min() / 2, 1.5 * flops, 60)
    # C is not 6 N D of all parameters: attention and the head count, norms do not.
    by_6nd = 6 * x / float(np.median(c / (n * d)))
    best = published.optimum(fit.find_law(), fit.coefficients, by_6nd)
    return Line(x, *(np.asarray(each, float) for each in best))


def _prediction(
    config: Settings, folder: Path, document: str, errors: dict[str, float]
) -> dict[str, Any]:
    """Writes the prediction down, unless it stands there from the same runs.

    Raises:
      ValueError: it stands there from others, and the truth is out.
    """
    path = folder / PREDICTION
    made = foresee(config, folder, document, errors)
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        if {**before, "made_at": ""} == json.loads(
            config_json.dumps({**made, "made_at": ""})
        ):
            return before
        if (folder / held_out.FILE).exists():
            raise ValueError(
                f"{path}: was made from other runs or another config, and its truth is "
                "known; name another folder"
            )
    run_folder.write(path, config_json.dumps(made))
    return json.loads(path.read_text("utf-8"))


def _points(log: Log) -> Points:
    curves = log.curves
    assert curves is not None
    return Points(
        curves.labels(),
        *(curves.columns[x] for x in ("num_params", "num_tokens", "flops", "loss")),
    )
