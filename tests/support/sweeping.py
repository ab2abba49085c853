"""A small sweep: two widths, two lengths, two rates."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxkv.models import ModelConfig
from jaxkv.progress import Progress
from scaling.corpora import Corpus, CorpusConfig
from scaling.sweeps import (
    FinishedRun,
    SweepConfig,
    SweepOutcome,
    make_record,
    open_on_device,
    train_config,
)
from scaling.sweeps.folder import SweepFolder
from scaling.sweeps.planning import next_groups
from scaling.training import StreamScore
from tests.support import texts
from tests.support.shapes import SMALL


def model(width: int) -> ModelConfig:
    return dataclasses.replace(
        SMALL, hidden_size=width, num_q_heads=1, mlp_size=16, max_positions=16
    )


def config(folder: Path, **changes: Any) -> SweepConfig:
    """Returns a config of the sweep over a text in a folder, with some changes."""
    pattern = texts.write_functions(folder / "text")
    settings: dict[str, Any] = {
        "num_tokens": (32 * 20, 32 * 40),
        "max_extensions": 1,
        "models": (model(8), model(16)),
    }
    return SweepConfig(
        corpus=CorpusConfig(pattern=pattern, held_out=0.2),
        learning_rates=(1e-2, 2e-2),
        base_width=8,
        batch_size=2,
        seq_len=16,
        warmup_steps=4,
        min_steps=1,
        num_eval_windows=8,
        mode="loop",
        **settings | changes,
    )


class PretendedTrainer(NamedTuple):
    """Writes the records of a sweep without a training.

    Attributes:
      corpus: text of the sweep.
      most_runs: number of new runs after which a call is stopped.
    """

    corpus: Corpus
    most_runs: int = 1000

    def __call__(
        self, config: SweepConfig, out: Path, *, progress: Progress
    ) -> SweepOutcome:
        folder = SweepFolder(out)
        digest = self.corpus.digest
        folder.write_header(
            {
                "config": dataclasses.asdict(config),
                "mode": "loop",
                "reason": "",
                "corpus_digest": digest,
            }
        )
        before = len(folder.known)
        try:
            for group in next_groups(config, folder.known, digest):
                for cell in group.cells:
                    for lane in group.lanes:
                        if len(folder.known) == before + self.most_runs:
                            return SweepOutcome(out, [], 0, True, 0.0)
                        run = train_config(config, cell, lane)
                        loss = self._loss(run.model, run.num_steps * run.batch_size)
                        score = StreamScore(loss, 0.0, 1, *[np.full(1, loss)] * 3)
                        finished = FinishedRun(run, "done", score, [], 0.0, None)
                        record = make_record(config, self.corpus, finished)
                        folder.add(record.record, record.curve)
        finally:
            folder.close()
        return SweepOutcome(out, [], 0, False, 0.0)

    def _loss(self, shape: Any, num_windows: int) -> float:
        """Returns a loss by a law, with a deviation that is fixed for each run."""
        width = shape.hidden_size
        off = 1 + 0.002 * np.sin(7.0 * width + num_windows)
        return float((1.7 + 3.0 * width**-0.8 + 4.0 * num_windows**-0.4) * off)


def pretend_trainer(config: SweepConfig, most_runs: int = 1000) -> PretendedTrainer:
    """Returns a trainer that pretends, for the text of a sweep."""
    return PretendedTrainer(open_on_device(config.corpus), most_runs)
