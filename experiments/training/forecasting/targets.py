"""The truth of a forecast: targets trained after it, and its scores."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments import lab
from experiments.training.forecasting import ladder, methods
from jaxkv.report import Experiment
from scaling import training
from scaling.sweeps import Cell, Lane, open_on_device, score_run, train_config


class TargetsConfig(lab.ConfigRecord):
    """The forecast whose targets are trained."""

    ladder: str = "experiments/records/forecast_ladder"
    """Run folder of the ladder."""
    protocol: str = "protocol.toml"
    """Its protocol."""
    folder: str = "runs/forecast_targets"
    """Folder of the training runs, which an interrupted experiment continues."""


TARGETS_CONFIGS = {
    "targets": TargetsConfig(),
    "targets_smoke": TargetsConfig(
        ladder="runs/ladder_smoke",
        protocol="protocol_smoke.toml",
        folder="runs/targets_smoke",
    ),
}


class TargetRuns(lab.ResultTable):
    """Runs of the targets."""

    corpus: lab.Texts = lab.column("corpus")
    factor: lab.Floats = lab.column("compute over the largest budget of the ladder")
    flops: lab.Floats = lab.column("exact FLOPs")
    seed: lab.Ints = lab.column("seed")
    loss: lab.Floats = lab.column("held-out nats per token")
    loss_se: lab.Floats = lab.column("standard error of the loss")


class ForecastScores(lab.ResultTable):
    """Scores of the forecasts, of each seed of a target or of a rolling origin."""

    corpus: lab.Texts = lab.column("corpus")
    truth: lab.Texts = lab.column("targets, or rolling origin within the ladder")
    method: lab.Texts = lab.column("method")
    factor: lab.Floats = lab.column("compute over the largest that the fit saw")
    error: lab.Floats = lab.column("ln(forecast / observed), at the median")
    is_covered: lab.Bools = lab.column("True if inside the interval")
    crps: lab.Floats = lab.column("continuous ranked probability score in ln L")


class TargetsResult(lab.ResultRecord):
    """Runs and scores, with the hashes of what came before."""

    forecast: str = lab.column("the forecast, as it was")
    chain: str = lab.column("hashes of protocol, runs, forecast and targets")
    runs: TargetRuns = lab.column("runs of the targets")
    scores: ForecastScores = lab.column("scores of all forecasts")


def check_chain(
    protocol: ladder.Protocol, ladder_result: ladder.LadderResult
) -> dict[str, Any]:
    """Returns the forecast of a ladder whose hashes are right.

    Raises:
      ValueError: the protocol or the runs are not those of the forecast.
    """
    document = json.loads(ladder_result.forecast)
    for name, digest in (
        ("protocol_sha256", protocol.sha256),
        ("runs_sha256", ladder.sha256(ladder_result.runs)),
    ):
        if document[name] != digest:
            raise ValueError(
                f"{name}={digest} differs from the forecast's {document[name]}"
            )
    return document


def run(config: TargetsConfig, progress: lab.Progress = lab.QUIET) -> TargetsResult:
    """Trains the targets of a ladder and scores its forecast."""
    protocol = ladder.read_protocol(config.protocol)
    experiment = Experiment("forecasting", "", (ladder.LADDER,))
    ladder_result = lab.read_run(Path(config.ladder), experiment).result
    document = check_chain(protocol, ladder_result)
    seeds = protocol.fields["target_seeds"]
    jobs = [(target, seed) for target in document["targets"] for seed in seeds]
    rows = []
    for target, seed in progress.track(jobs, "targets", "runs"):
        name = f"{target['corpus']}-{target['factor']:g}-{seed}"
        score = _train(protocol, target, seed, Path(config.folder, name), progress)
        if progress.stopped:
            break
        place = (target["corpus"], target["factor"], target["flops"], seed)
        rows.append((*place, score.loss, score.loss_se))
    runs = TargetRuns.of(rows)
    chain = {x: document[x] for x in ("protocol_sha256", "runs_sha256")}
    chain["forecast_sha256"] = ladder.sha256(ladder_result.forecast)
    chain["targets_sha256"] = ladder.sha256(lab.dumps([*map(str, rows)]))
    return TargetsResult(
        forecast=ladder_result.forecast,
        chain=lab.dumps(chain),
        runs=runs,
        scores=score_targets(document, runs, protocol.fields["level"]),
    )


def _train(
    protocol: ladder.Protocol,
    target: dict[str, Any],
    seed: int,
    folder: Path,
    progress: lab.Progress,
) -> Any:
    """Trains and scores one target by the ladder's settings."""
    sweep = protocol.sweep(target["corpus"])
    model = protocol.model(target["corpus"], target["width"])
    cell = Cell(model, target["num_steps"])
    run = train_config(sweep, cell, Lane(target["learning_rate"], seed))
    trained = training.train(run, folder, progress=progress)
    return score_run(sweep, open_on_device(sweep.corpus), run, trained.params)


def score_targets(
    document: dict[str, Any], runs: TargetRuns, level: float
) -> ForecastScores:
    """Returns the scores of the targets and of the rolling origins."""
    rows = []
    for target in document["targets"]:
        place = {"corpus": target["corpus"], "factor": target["factor"]}
        for loss in runs.where(**place).loss:
            for method, quantiles in target["quantiles"].items():
                scored = methods.score_forecast(np.array(quantiles), loss, level)
                rows.append(
                    (target["corpus"], "targets", method, place["factor"], *scored)
                )
    for x in document["origins"]:
        scored = (x["error"], x["is_covered"], x["crps"])
        rows.append((x["corpus"], "rolling origin", x["method"], x["factor"], *scored))
    return ForecastScores.of(rows)


def summary(result: TargetsResult) -> list[lab.ReportPart]:
    """Returns the scores by corpus, truth and method."""
    rows = []
    for corpus, truth, group in _groups(result):
        for method in group.distinct("method"):
            selected = group.where(method=method)
            factors = selected.distinct("factor") if truth == "targets" else []
            errors = [
                f"{100 * selected.where(factor=x).error.mean():+.2f} %" for x in factors
            ]
            rows.append(
                (
                    corpus,
                    truth,
                    method,
                    ", ".join(errors) or "-",
                    f"{100 * np.abs(selected.error).mean():.2f} %",
                    f"{selected.is_covered.mean():.0%} of {len(selected)}",
                    f"{100 * selected.crps.mean():.3f}",
                )
            )
    heads = ("corpus", "truth", "method", "error by factor", "mean |error|")
    note = f"CRPS in hundredths of ln L. Hashes: {result.chain}"
    sheet = lab.Sheet("scores", (*heads, "inside", "CRPS"), rows, note)
    columns = {"corpus": "corpus", "times the compute": "factor", "seed": "seed"}
    columns |= {"loss": "loss", "standard error": "loss_se"}
    return [sheet, lab.row_sheet("targets", result.runs.rows(), columns)]


def _groups(result: TargetsResult) -> Iterator[tuple[str, str, ForecastScores]]:
    for corpus in result.scores.distinct("corpus"):
        for truth in ("targets", "rolling origin"):
            group = result.scores.where(corpus=corpus, truth=truth)
            if len(group):
                yield corpus, truth, group


@lab.claims_file(__file__).judge
def claims(result: TargetsResult) -> Iterator[lab.MeasuredValue]:
    """Judges skill, coverage and error of the law's forecast."""
    document = json.loads(result.forecast)
    law = next(iter(document["targets"][0]["quantiles"]))
    for corpus, truth, group in _groups(result):
        crps = {x: group.where(method=x).crps.mean() for x in group.distinct("method")}
        law_scores = group.where(method=law)
        words: dict[str, Any] = {
            "corpus": corpus,
            "truth": truth,
            "num": len(law_scores),
        }
        for rival in (x for x in crps if x != law):
            yield lab.measured("skill", crps[law] / crps[rival], rival=rival, **words)
        yield lab.measured(
            "forecast_covers", float(law_scores.is_covered.mean()), **words
        )


def plot(axes: np.ndarray, result: TargetsResult) -> None:
    """Draws the forecasts with the targets' losses, by corpus."""
    document = json.loads(result.forecast)
    for ax, corpus in zip(axes, result.runs.distinct("corpus"), strict=False):
        runs = result.runs.where(corpus=corpus)
        black = lab.colors()[lab.BLACK]
        # Left of the forecasts, so that neither hides the other.
        x = runs.flops / 1.35
        ax.plot(x, runs.loss, "_", color=black, markersize=9, label="measured")
        ladder.draw_forecasts(ax, corpus, document["targets"])
        factors = {x: f"{y:g}" for x, y in zip(runs.flops, runs.factor, strict=True)}
        ax.set_xticks([*factors], [*factors.values()], minor=False)
        ax.set_xticks([], minor=True)
        largest = "compute [times the largest of the ladder]"
        lab.set_labels(ax, corpus, largest, "loss [nats/token]")
        ax.legend()


TARGETS = lab.Study(
    TARGETS_CONFIGS,
    TargetsResult,
    run,
    plot,
    claims,
    summary,
    panels=lab.Panels(1, 2),
)
"""The study that trains the targets."""
