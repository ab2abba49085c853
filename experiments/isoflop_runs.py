"""Carries `isoflop` out: the sweep, its fit, the prediction, and then the truth."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments import (
    documents,
    environment,
    fit_frontiers,
    fitting_logs,
    isoflop_foreseeing,
    isoflop_horizons,
    isoflop_outcomes,
    store,
    sweep_tables,
)
from experiments.isoflop_outcomes import Line, Points, Rates, Result
from experiments.isoflop_settings import Settings, shape
from experiments.progress import QUIET, Progress
from jaxkv import checkpoints, tokenizing
from scaling import (
    branching,
    executing,
    fit_results,
    laws,
    logs,
    objectives,
    sweep_grids,
    sweeps,
    training,
)
from scaling.frontiers import Frontier
from scaling.recipes import TrainConfig

PREDICTION, HELD_OUT = "prediction.json", "held_out.json"


def run(config: Settings, progress: Progress) -> Result:
    """Runs the experiment, or takes up what its folder holds."""
    if config.folder:
        return _run(config, Path(config.folder), progress)
    with tempfile.TemporaryDirectory() as folder:
        return _run(config, Path(folder), progress)


def _run(config: Settings, folder: Path, progress: Progress) -> Result:
    for sweep in (_sweep, isoflop_horizons.sweep):
        outcome = sweep(config, folder, progress)
        if outcome.is_stopped:
            raise KeyboardInterrupt(
                f"stopped; {len(outcome.records)} runs are in {outcome.log}, and the "
                "same command goes on"
                if config.folder
                else "interrupted before anything could be fitted"
            )
    progress.show("fitting")
    errors = isoflop_foreseeing.choose_law(folder, config.budgets)
    fit = fitting_logs.run(
        fitting_logs.Config(
            log=str(folder),
            law=",".join(errors),
            bootstrap=config.bootstrap,
            level=config.level,
            smoothing=isoflop_horizons.SMOOTHING,
        ),
        progress,
    )
    log, cosine = logs.read(folder), logs.read(folder / isoflop_horizons.FOLDER)
    resampled = isoflop_horizons.find(config, cosine, config.bootstrap, progress)
    prediction = _prediction(config, folder, fit.document, errors)
    progress.show(
        f"width {prediction['width']} for {prediction['num_steps']:,} steps: "
        f"{prediction['predicted']:.4f} foreseen"
    )
    held_out, curve = _truth(config, folder, prediction, progress)
    groups = isoflop_horizons.find(config, log, 0, QUIET).frontiers
    rates = isoflop_foreseeing.optimal_rates(isoflop_foreseeing.rows_of(folder))
    return Result(
        runs=(folder / "runs.jsonl").read_text("utf-8"),
        header=(folder / "sweep.json").read_text("utf-8"),
        prediction=documents.dumps(prediction),
        held_out="" if held_out is None else documents.dumps(held_out),
        held_out_flops=np.array([x for x, _ in curve]),
        held_out_loss=np.array([y for _, y in curve]),
        fit=fit,
        cosine=documents.dumps(isoflop_horizons.document(config, folder, resampled)),
        curves=_points(cosine),
        optima=isoflop_outcomes.optima([x for x in groups if not _is_envelope(x)]),
        envelope=isoflop_outcomes.only(
            isoflop_outcomes.optima([x for x in resampled.frontiers if _is_envelope(x)])
        ),
        surface=_surface(fit.document, log, prediction["flops"]),
        rates=Rates(*np.array(rates, float).reshape(-1, 3).T),
    )


def _sweep(config: Settings, folder: Path, progress: Progress) -> sweeps.Outcome:
    return sweep_tables.run(config.sweep, folder, progress)


def _is_envelope(found: Frontier) -> bool:
    return found.method == fit_frontiers.ENVELOPE


def _surface(document: str, log: logs.Log, flops: float) -> Line:
    """The optimum of the law, from the smallest run to the one that is foreseen."""
    fit = fit_results.from_json(document)
    n, d, c = (log.columns[x] for x in ("num_params", "num_tokens", "flops"))
    x = np.geomspace(c.min() / 2, 1.5 * flops, 60)
    # C is not 6 N D of all parameters: attention and the head count, norms do not.
    by_6nd = 6 * x / float(np.median(c / (n * d)))
    best = laws.optimum(fit.find_law(), fit.coefficients, by_6nd)
    return Line(x, *(np.asarray(each, float) for each in best))


def _prediction(
    config: Settings, folder: Path, document: str, errors: dict[str, float]
) -> dict[str, Any]:
    """Writes the prediction down, unless it stands there from the same runs.

    Raises:
      ValueError: it stands there from others, and the truth is out.
    """
    path = folder / PREDICTION
    made = isoflop_foreseeing.foresee(config, folder, document, errors)
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        if {**before, "made_at": ""} == json.loads(
            documents.dumps({**made, "made_at": ""})
        ):
            return before
        if (folder / HELD_OUT).exists():
            raise ValueError(
                f"{path}: was made from other runs or another config, and its truth is "
                "known; name another folder"
            )
    store.write(path, documents.dumps(made))
    return json.loads(path.read_text("utf-8"))


def _truth(
    config: Settings, folder: Path, prediction: dict[str, Any], progress: Progress
) -> tuple[dict[str, Any] | None, list[tuple[float, float]]]:
    """Trains the run that was foreseen, or reads what it gave."""
    sweep = config.sweep
    model = shape(prediction["width"], config.num_layers, config.seq_len)
    cell = sweep_grids.Cell(model, prediction["num_steps"])
    lane = sweep_grids.Lane(prediction["learning_rate"], config.seeds[0])
    run = sweep_grids.train_config(sweep, cell, lane)
    trained = training.train(_reporting(run), folder / "held_out", progress=progress)
    per_token = sweep_grids.count(model, config.seq_len).flops_per_token
    whole = _reporting(run).report_every  # a shorter stretch is mostly noise
    curve = [
        (x["tokens"] * per_token, x["loss"])
        for x in trained.curve
        if x["step"] % whole == 0
    ]
    path = folder / HELD_OUT
    if path.exists():
        return json.loads(path.read_text("utf-8")), curve
    if trained.status == "stopped":
        return None, curve
    corpus = executing.open_corpus(sweep)
    score = objectives.score_stream(
        trained.params,
        corpus.held_out,
        model=model,
        seq_len=run.seq_len,
        num_windows=config.num_eval_windows,
    )
    finished = branching.Finished(
        run=run,
        status="done" if trained.status == "done" else "diverged",
        score=score if trained.status == "done" else None,
        curve=[],
        seconds=trained.curve[-1]["duration_s"] if trained.curve else 0.0,
        params=None,
    )
    record = executing.made(sweep, corpus, finished).record
    record["commit"] = environment.describe()["commit"]
    store.write(path, documents.dumps(record))
    if config.keep_models and trained.status == "done":
        checkpoints.save_model(
            sweeps.model_folder(folder, "held_out"),
            model,
            trained.params,
            tokenizer=tokenizing.ByteTokenizer(model.vocab_size),
            overwrite=True,
        )
    return json.loads(path.read_text("utf-8")), curve


def _reporting(run: TrainConfig) -> TrainConfig:
    """Has a run report some hundred times, and be saved now and then."""
    every = max(10, run.num_steps // 300)
    return dataclasses.replace(run, report_every=every, checkpoint_every=20 * every)


def _points(log: logs.Log) -> Points:
    curves = log.curves
    assert curves is not None
    return Points(
        curves.labels(),
        *(curves.columns[x] for x in ("num_params", "num_tokens", "flops", "loss")),
    )
