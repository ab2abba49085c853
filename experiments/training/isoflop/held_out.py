"""The run that was foreseen, trained after the prediction stands.

As every size and length that was fitted, it has several learning rates, and the best of
them is what it is worth.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from experiments.framework import config_json, environment, run_folder
from experiments.training.isoflop.settings import Settings, shape
from jaxkv.models import checkpoints, transformer
from jaxkv.models.config import ModelConfig
from jaxkv.progress import Progress
from jaxkv.text import tokenizer
from scaling.corpora import Corpus
from scaling.sweeps import branching, executors, grid
from scaling.sweeps.sweep import model_folder
from scaling.training import TrainConfig
from scaling.training import train as training_train
from scaling.training.train import Result

FILE = "held_out.json"
"""The best run's record, and what the others came to."""


class Truth(NamedTuple):
    """What came of the run.

    Attributes:
      record: as in `FILE`; None if it was stopped before.
      curve: FLOPs and training loss of the best run.
    """

    record: dict[str, Any] | None
    curve: list[tuple[float, float]]


def train(
    config: Settings, folder: Path, prediction: dict[str, Any], progress: Progress
) -> Truth:
    """Trains the run at every rate, or reads what it gave.

    Args:
      config: the experiment.
      folder: of its sweep; each rate has a folder within, and is taken up there.
      prediction: what `prediction.json` holds.
      progress: watches, and may stop it.
    """
    sweep, path = config.sweep, folder / FILE
    model = shape(prediction["width"], config.num_layers, config.seq_len)
    cell = grid.Cell(model, prediction["num_steps"])
    runs, results = [], []
    for i, rate in enumerate(prediction["learning_rates"]):
        lane = grid.Lane(rate, config.seeds[0])
        runs.append(_reporting(grid.train_config(sweep, cell, lane)))
        at = folder / "held_out" / str(i)
        results.append(training_train.train(runs[-1], at, progress=progress))
        if results[-1].status == "stopped":
            return Truth(None, [])
    if not path.exists():
        corpus = executors.open_corpus(sweep.corpus)
        records = [
            _record(config, corpus, run, result)
            for run, result in zip(runs, results, strict=True)
        ]
        tried = [(record["learning_rate"], record["loss"]) for record in records]
        best = min(records, key=lambda x: (x["loss"] is None, x["loss"] or 0.0))
        run_folder.write(path, config_json.dumps(best | {"tried": tried}))
    record = json.loads(path.read_text("utf-8"))
    rates = [run.learning_rate for run in runs]
    run, result = [*zip(runs, results, strict=True)][
        rates.index(record["learning_rate"])
    ]
    if config.keep_models and record["status"] == "done":
        _save(model_folder(folder, "held_out"), model, result.params)
    per_token = grid.count(model, config.seq_len).flops_per_token
    curve = [
        (x["tokens"] * per_token, x["loss"])
        for x in result.curve
        if x["step"] % run.report_every == 0  # a shorter stretch is mostly noise
    ]
    return Truth(record, curve)


def _record(
    config: Settings, corpus: Corpus, run: TrainConfig, result: Result
) -> dict[str, Any]:
    """Scores a run, and writes it down as a sweep's are."""
    is_done = result.status == "done"
    score = None
    if is_done:
        score = executors.score(config.sweep, corpus, run, result.params)
    finished = branching.Finished(
        run=run,
        status="done" if is_done else "diverged",
        score=score,
        curve=[],
        seconds=result.curve[-1]["duration_s"] if result.curve else 0.0,
        params=None,
    )
    record = executors.made(config.sweep, corpus, finished).record
    return record | {"commit": environment.describe()["commit"]}


def _save(folder: Path, model: ModelConfig, params: transformer.Params) -> None:
    checkpoints.save_model(
        folder,
        model,
        params,
        tokenizer=tokenizer.ByteTokenizer(model.vocab_size),
        overwrite=True,
    )


def _reporting(run: TrainConfig) -> TrainConfig:
    """Has a run report some hundred times, and be saved now and then."""
    every = max(10, run.num_steps // 300)
    return dataclasses.replace(run, report_every=every, checkpoint_every=20 * every)
