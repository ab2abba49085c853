"""`isoflop` under a cosine: every size at every length, each a schedule of its own.

The published envelope is of such curves: at its end each has a rate that is decayed.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cli.fit import frontiers
from experiments.harness import sweep_tables
from experiments.training.isoflop import prediction
from experiments.training.isoflop.settings import BASE_WIDTH, Settings
from jaxkv.progress import Progress
from scaling.logs.log import Log
from scaling.sweeps import SweepConfig
from scaling.sweeps.sweep import Outcome

FOLDER = "cosine"
"""Within the folder of the sweep."""
SMOOTHING = 0.05
"""Decades of FLOPs over which training curves are averaged for their envelope."""


def sweep(config: Settings, folder: Path, progress: Progress) -> Outcome:
    """Trains the cells of a finished sweep anew, at one rate for a width."""
    rows = prediction.rows_of(folder)
    return sweep_tables.run(grid(config, rows), folder / FOLDER, progress)


def grid(config: Settings, rows: list[dict[str, Any]]) -> SweepConfig:
    """Makes the grid: that of the sweep, at the rate of a middle length.

    Args:
      config: the experiment.
      rows: the runs of its sweep.
    """
    middle = math.exp(np.mean(np.log([row["num_tokens"] for row in rows])))
    rate, (of_width, _) = prediction.learning_rate(rows, BASE_WIDTH, round(middle))
    return dataclasses.replace(
        config.sweep,
        schedule="cosine",
        learning_rates=(rate,),
        rate_exponent=float(f"{-of_width:.4g}"),
        seeds=config.seeds[:1],
        num_repeated=0,
        keep_models=False,
    )


def find(
    config: Settings, log: Log, resamples: int, progress: Progress
) -> frontiers.Found:
    """Finds what runs say of the optimum by approaches 1 and 2."""
    return frontiers.find(
        log,
        tolerance=0.1,
        smoothing=SMOOTHING,
        resamples=resamples,
        level=config.level,
        seed=0,
        progress=progress,
    )


def document(config: Settings, folder: Path, found: frontiers.Found) -> dict[str, Any]:
    """Says how the runs under a cosine compare with the others.

    Args:
      config: the experiment.
      folder: of its sweep.
      found: as `find` gives it for the runs under a cosine.

    Returns:
      What `cosine.json` holds: `frontiers`; and `log_ratios`, of the loss under a
      cosine over that of the best run of the same size and length whose rate was
      constant and then fell, natural logarithms.
    """
    best: dict[tuple[int, int], float] = {}
    for row in prediction.rows_of(folder):
        if row["seed"] == config.seeds[0]:
            at = row["num_params"], row["num_steps"]
            best[at] = min(best.get(at, math.inf), row["loss"])
    ratios = [
        math.log(row["loss"] / best[row["num_params"], row["num_steps"]])
        for row in prediction.rows_of(folder / FOLDER)
    ]
    rows = [frontiers.to_json(each) for each in found.frontiers]
    return {"frontiers": rows, "log_ratios": ratios}
