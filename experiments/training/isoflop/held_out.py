"""Trains the held-out run after the prediction was saved.

Like every fitted size and length, the run is trained at several learning rates, of
which the best counts.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from experiments import lab
from jaxkv import files
from jaxkv.models import save_model
from jaxkv.text import ByteTokenizer
from scaling import training
from scaling.sweeps import (
    Cell,
    FinishedRun,
    Lane,
    count_cost,
    family_shape,
    make_record,
    open_on_device,
    run_model_folder,
    score_run,
    train_config,
)
from scaling.training import TrainConfig, TrainResult

HELD_OUT_FILE = "held_out.json"
"""Record of the best run, and the losses of all rates."""


class HeldOutRun(NamedTuple):
    """Result of the held-out run.

    Attributes:
      record: record as in `HELD_OUT_FILE`; None if training was stopped.
      curve: FLOPs and training loss of the best run.
    """

    record: dict[str, Any] | None
    curve: list[tuple[float, float]]


def train_held_out(
    config: Any, folder: Path, prediction: dict[str, Any], progress: lab.Progress
) -> HeldOutRun:
    """Trains the run at every learning rate, or reads its results.

    Args:
      config: config of the experiment.
      folder: folder of its sweep; each rate has a subfolder, from which it resumes.
      prediction: content of `prediction.json`.
      progress: receives progress; may stop.
    """
    sweep = config.sweep
    path = folder / HELD_OUT_FILE
    model = family_shape(prediction["width"], config.num_layers, config.seq_len)
    cell = Cell(model, prediction["num_steps"])
    tried: dict[float, tuple[TrainConfig, TrainResult]] = {}
    for i, rate in enumerate(prediction["learning_rates"]):
        run = train_config(sweep, cell, Lane(rate, config.seeds[0]))
        every = max(10, run.num_steps // 300)
        run = dataclasses.replace(run, report_every=every, checkpoint_every=20 * every)
        at = folder / "held_out" / str(i)
        tried[rate] = run, training.train(run, at, progress=progress)
        if tried[rate][1].status == "stopped":
            return HeldOutRun(None, [])
    if not path.exists():
        corpus = open_on_device(sweep.corpus)
        records = []
        for run, result in tried.values():
            is_done = result.status == "done"
            score = None
            if is_done:
                score = score_run(sweep, corpus, run, result.params)
            seconds = result.curve[-1]["duration_s"] if result.curve else 0.0
            status = "done" if is_done else "diverged"
            ended = FinishedRun(run, status, score, [], seconds, None)
            commit = {"commit": lab.describe_machine()["commit"]}
            records.append(make_record(sweep, corpus, ended).record | commit)
        losses = [(record["learning_rate"], record["loss"]) for record in records]
        best = min(records, key=lambda x: (x["loss"] is None, x["loss"] or 0.0))
        files.write_atomically(path, lab.dumps(best | {"tried": losses}))
    record = json.loads(path.read_text("utf-8"))
    run, result = tried[record["learning_rate"]]
    if config.keep_models and record["status"] == "done":
        save_model(
            run_model_folder(folder, "held_out"),
            model,
            result.params,
            tokenizer=ByteTokenizer(model.vocab_size),
            overwrite=True,
        )
    per_token = count_cost(model, config.seq_len).flops_per_token
    curve = [
        (x["tokens"] * per_token, x["loss"])
        for x in result.curve
        if x["step"] % run.report_every == 0  # shorter intervals are mostly noise
    ]
    return HeldOutRun(record, curve)
