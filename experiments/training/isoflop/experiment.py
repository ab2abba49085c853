"""Fits isoFLOP curves of small models, and predicts the loss of a larger one.

Many small models are trained on real text: each size for several budgets and learning
rates, and once more for each budget with a cosine schedule. Three approaches estimate
the compute-optimal size and number of tokens. The fitted law then predicts the loss of
a run with 10 times the largest compute, with an interval; the prediction is saved
before that run is trained.

Source: Hoffmann et al. 2022, arXiv:2203.15556, section 3; the lectures' three panels.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from experiments import lab
from experiments.training.isoflop import drawing, held_out, prediction, report
from experiments.training.isoflop.outcomes import (
    BestRates,
    CurvePoints,
    LawOptima,
    Result,
    stack_frontiers,
)
from jaxkv.files import folder_or_temporary, write_atomically
from scaling import sweeps
from scaling.cli import FitConfig, fit_log, frontier_json, optimum_at
from scaling.corpora import CorpusConfig
from scaling.fits import from_json
from scaling.frontiers import ENVELOPE, find_frontiers
from scaling.logs import Log, read_log
from scaling.sweeps import (
    BASE_WIDTH,
    ISOFLOP,
    FamilySweep,
    SweepConfig,
    optimal_rates,
    run_logged_sweep,
)

COSINE = "cosine"
"""Subfolder of the sweep with the runs under a cosine schedule."""
SMOOTHING = 0.05
"""Decades of FLOPs over which training curves are averaged for their envelope."""
PREDICTION = "prediction.json"


class Config(FamilySweep):
    """Sizes and budgets to fit, and the size of the held-out run."""

    held_out_factor: Annotated[float, lab.Range(1, ends="(]")] = 10.0
    """Compute of the predicted run over the largest budget."""
    bootstrap: Annotated[int, lab.Range(2)] = 2000
    """Resamples for intervals."""
    level: Annotated[float, lab.Range(0, 1, "()")] = 0.9
    """Probability of the intervals."""
    folder: str = ""
    """Folder of runs to resume a sweep from; empty: not kept."""
    keep_models: bool = False
    """True to keep the trained models in that folder, for serving."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        lab.Entries(3).check("budgets", self.budgets)
        if self.keep_models and not self.folder:
            raise ValueError(f"keep_models={self.keep_models!r} needs a folder")
        _ = self.sweep  # validates the remaining fields


CONFIGS = {
    "smoke": Config(
        widths=(4, 8, 16),
        budgets=(1e9, 1.6e9, 2.5e9),
        num_layers=1,
        corpus=CorpusConfig(held_out=0.02),
        learning_rates=(1e-2,),
        seeds=(0, 1),
        num_repeated=1,
        seq_len=32,
        warmup_steps=5,
        min_steps=10,
        tokens_per_param=(0.0, math.inf),
        num_eval_windows=32,
        held_out_factor=2.0,
        bootstrap=20,
    ),
    **{
        name: Config(**vars(sweep), folder=f"runs/isoflop-{name}", keep_models=True)
        for name, sweep in ISOFLOP.items()
    },
}


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Trains, fits, predicts, and trains the predicted run.

    Runs that exist in the config's folder are resumed.
    """
    with folder_or_temporary(config.folder) as folder:
        return _run(config, folder, progress)


def _run(config: Config, folder: Path, progress: lab.Progress) -> Result:
    rows = _train(config, config.sweep, folder, progress)
    under_cosine = _train(config, cosine_sweep(config, rows), folder / COSINE, progress)
    progress.show("fitting")
    log = read_log(folder)
    cosine = read_log(folder / COSINE)
    assert cosine.curves is not None
    errors = prediction.choose_law(log, config.budgets)
    fit = fit_log(
        FitConfig(
            log=str(folder),
            law=",".join(errors),
            bootstrap=config.bootstrap,
            level=config.level,
            smoothing=SMOOTHING,
        ),
        progress,
    )

    how: Any = {"tolerance": 0.1, "smoothing": SMOOTHING, "level": config.level}
    frontier_set = find_frontiers(
        cosine, resamples=config.bootstrap, progress=progress, **how
    )
    by_cosine = frontier_set.frontiers
    predicted = _predict(config, log, rows, fit.document, errors)
    progress.show(
        f"width {predicted['width']} for {predicted['num_steps']:,} steps: "
        f"{predicted['predicted']:.4f} predicted"
    )
    truth = held_out.train_held_out(config, folder, predicted, progress)
    decayed = find_frontiers(log, resamples=0, **how).frontiers
    curves = cosine.curves.columns
    rates = optimal_rates(rows)
    # From the smallest run to the predicted one.
    min_flops = log.columns["flops"].min() / 2
    budgets = np.geomspace(min_flops, 1.5 * predicted["flops"], 60)
    law = from_json(fit.document)
    surface = optimum_at(law, log.columns, budgets)
    return Result(
        runs=(folder / "runs.jsonl").read_text("utf-8"),
        header=(folder / "sweep.json").read_text("utf-8"),
        prediction=lab.dumps(predicted),
        held_out="" if truth.record is None else lab.dumps(truth.record),
        held_out_flops=np.array([x for x, _ in truth.curve]),
        held_out_loss=np.array([y for _, y in truth.curve]),
        fit=fit,
        cosine=lab.dumps(
            {
                "frontiers": [frontier_json(frontier) for frontier in by_cosine],
                "log_ratios": cosine_ratios(rows, under_cosine, config.seeds[0]),
            }
        ),
        curves=CurvePoints(
            cosine.curves.labels(),
            *(curves[x] for x in ("num_params", "num_tokens", "flops", "loss")),
        ),
        optima=stack_frontiers([x for x in decayed if x.method != ENVELOPE]),
        envelope=stack_frontiers(
            [x for x in by_cosine if x.method == ENVELOPE], is_one=True
        ),
        surface=LawOptima(budgets, *(np.asarray(x, float) for x in surface)),
        rates=BestRates(*np.array(rates, float).reshape(-1, 3).T),
    )


def _train(
    config: Config, sweep: SweepConfig, folder: Path, progress: lab.Progress
) -> Sequence[Mapping[str, Any]]:
    """Runs or resumes a sweep; returns the records of finished runs."""
    outcome = run_logged_sweep(sweep, folder, progress)
    if outcome.is_stopped:
        raise KeyboardInterrupt(
            f"stopped; {len(outcome.records)} runs are in {outcome.log}, and the "
            "same command goes on"
            if config.folder
            else "interrupted before a fit"
        )
    return [row for row in outcome.records if row["status"] == "done"]


def cosine_sweep(config: Config, rows: Sequence[Mapping[str, Any]]) -> SweepConfig:
    """Returns a sweep of every size and length, each with its own cosine schedule.

    The published envelope is of such curves: each ends at a decayed rate. There is one
    learning rate per width.

    Args:
      config: the experiment.
      rows: runs of its sweep; the learning rate is that of their middle length.
    """
    middle = math.exp(np.mean(np.log([row["num_tokens"] for row in rows])))
    rate, (of_width, _) = sweeps.extrapolate(rows, BASE_WIDTH, round(middle))
    return dataclasses.replace(
        config.sweep,
        schedule="cosine",
        learning_rates=(rate,),
        rate_exponent=float(f"{-of_width:.4g}"),
        seeds=config.seeds[:1],
        num_repeated=0,
        keep_models=False,
    )


def cosine_ratios(
    rows: Sequence[Mapping[str, Any]],
    under_cosine: Sequence[Mapping[str, Any]],
    seed: int,
) -> list[float]:
    """Returns the excess loss of a cosine schedule for each size and length.

    Returns:
      ln(loss under a cosine / loss of the best run of the same size and length with a
      constant rate that then decays).
    """
    best: dict[tuple[int, int], float] = {}
    for row in rows:
        if row["seed"] == seed:
            at = row["num_params"], row["num_steps"]
            best[at] = min(best.get(at, math.inf), row["loss"])
    return [
        math.log(row["loss"] / best[row["num_params"], row["num_steps"]])
        for row in under_cosine
    ]


def _predict(
    config: Config,
    log: Log,
    rows: Sequence[Mapping[str, Any]],
    document: str,
    errors: dict[str, float],
) -> dict[str, Any]:
    """Saves the prediction, unless an equal one from the same runs exists.

    Raises:
      ValueError: another prediction exists, and its held-out run was trained.
    """
    path = log.source / PREDICTION
    prediction_document = prediction.predict_held_out(
        config, log, rows, document, errors
    )
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        undated = json.loads(lab.dumps({**prediction_document, "made_at": ""}))
        if {**before, "made_at": ""} == undated:
            return before
        if (log.source / held_out.HELD_OUT_FILE).exists():
            raise ValueError(
                f"{path}: was made from other runs or another config, and its truth is "
                "known; choose another folder"
            )
    write_atomically(path, lab.dumps(prediction_document))
    return json.loads(path.read_text("utf-8"))


def files(result: Result) -> dict[str, str]:
    """Returns the log and the fit, which `jaxkv fit` and `plan` read."""
    return {
        "runs.jsonl": result.runs,
        "sweep.json": result.header,
        "cosine.json": result.cosine,
        "prediction.json": result.prediction,
        "fit.json": result.fit.document,
    }


STUDY = lab.Study(
    CONFIGS,
    Result,
    run,
    drawing.plot,
    report.claims,
    report.summary,
    report.metrics,
    panels=lab.Panels(3, 2, 3.9),
    files=files,
)
