"""What do small models say of the best size for a budget, and of a larger one's loss?

Many small models are trained on real text, each size for several budgets and learning
rates, and once more for each budget under a cosine. Three approaches read the best size
and number of tokens off them; the law that is fitted to them then predicts the loss of
a run with ten times the compute of the largest, with an interval, and is written down
before that run is trained.

Source: Hoffmann et al. 2022, arXiv:2203.15556, section 3; the lectures' three panels.
"""

import dataclasses
import math
from typing import Any

from experiments.framework import Claim, Part
from experiments.training.isoflop import drawing, report, runs
from experiments.training.isoflop.outcomes import Result
from experiments.training.isoflop.settings import Settings
from jaxkv.progress import QUIET, Progress
from scaling.corpora import corpora

PANELS = (2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """The sizes and budgets of `isoflop`."""


CONFIGS = {
    "smoke": Config(
        widths=(4, 8, 16),
        budgets=(1e9, 1.6e9, 2.5e9),
        num_layers=1,
        corpus=corpora.CorpusConfig(held_out=0.02),
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
    "cpu": Config(
        widths=(6, 8, 12, 16, 24, 32, 48, 64, 96),
        budgets=(2.5e10, 6.25e10, 1.5625e11, 3.90625e11),
        # Earlier tries had seeds 0 to 4, and their truths changed the rules: these runs
        # are new to them.
        seeds=(5, 6),
        num_repeated=9,
        folder="runs/isoflop-cpu",
        keep_models=True,
    ),
    # Commands of under ten minutes each take up one another.
    "gpu": Config(
        widths=(24, 32, 48, 64, 96, 128, 192, 256),
        budgets=(1e13, 3e13, 1e14, 3e14),
        num_layers=4,
        batch_size=32,
        seq_len=256,
        warmup_steps=100,
        min_steps=300,
        num_eval_windows=1024,
        folder="runs/isoflop-gpu",
        keep_models=True,
    ),
}


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Trains, fits, foresees, and trains what was foreseen."""
    return runs.run(config, progress)


def plot(axes: Any, result: Result) -> None:
    """Draws curves, optima, isoFLOP curves, the prediction and the learning rates."""
    drawing.plot(axes, result)


def claims(result: Result) -> list[Claim]:
    """Holds what must hold against what came out."""
    return report.claims(result)


def metrics(result: Result) -> dict[str, Any]:
    """Names the numbers of the report."""
    return report.metrics(result)


def summary(result: Result) -> list[Part]:
    """Lays out the approaches, the budgets and the prediction."""
    return report.summary(result)


def files(result: Result) -> dict[str, str]:
    """Keeps the log beside, so that `jaxkv fit` and `plan` can go on from it."""
    return {
        "runs.jsonl": result.runs,
        "sweep.json": result.header,
        "cosine.json": result.cosine,
        "prediction.json": result.prediction,
        "fit.json": result.fit.document,
    }
