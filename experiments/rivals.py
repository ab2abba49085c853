"""Does the transformer win over its rivals, and at what compute to equal loss?

LSTM against transformer, SGD against Adam, one and four layers against two, learned
against rotary positions: all at equal parameters outside embeddings, on the same text
in the same order, with as many learning rates tried on each side at every size. Each
side is a curve through the best of its runs by compute, so the verdict is a ratio of
compute with its interval, not the outcome of two runs.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from experiments import rivals_drawing, rivals_fits, rivals_sides, rivals_telling
from experiments.progress import QUIET, Progress
from experiments.rivals_fits import Curve, Ratio
from experiments.rivals_sides import REFERENCE
from scaling import corpora

PANELS = (2, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which sides, at which sizes, for how long."""

    corpus: corpora.CorpusConfig = corpora.STANDARD_LIBRARY
    """What is learned."""
    sides: tuple[str, ...] = ("lstm", "sgd", "1 layer", "4 layers", "learned positions")
    """Who is compared with the transformer of two layers."""
    sizes: tuple[int, ...] = (4_320, 9_552, 16_832, 26_160)
    """Parameters outside embeddings; to be compared exactly, what an LSTM can have."""
    few_sizes: tuple[int, ...] = (4_320, 9_552, 26_160)
    """Those of the sides after the first; among `sizes`."""
    head_dim: int = 8
    """Of every transformer's heads."""
    batch_size: int = 8
    """Windows per step."""
    seq_len: int = 256
    """Predictions per window."""
    horizons: tuple[int, ...] = (160, 240, 400, 640)
    """Steps of the finished runs."""
    trial_steps: int = 100
    """Steps of a run that tries a learning rate."""
    warmup_steps: int = 20
    """Of every run."""
    num_windows: int = 256
    """Held-out windows that are scored."""
    num_resamples: int = 400
    """Of the fits."""
    seed: int = 0
    """Of parameters and the order of the text."""

    def __post_init__(self) -> None:
        """Refuses what cannot be compared."""
        if not self.sides or len({*self.sides}) < len(self.sides):
            raise ValueError(f"{self.sides=} must be different names, at least one")
        for name in self.sides:
            rivals_sides.side(name, vocab_size=2, seq_len=1, head_dim=2)
        if not {*self.few_sizes} <= {*self.sizes} or not self.few_sizes:
            raise ValueError(f"{self.few_sizes=} must be among {self.sizes=}")
        if [*self.horizons] != sorted({*self.horizons}) or min(self.horizons) < 5:
            raise ValueError(f"{self.horizons=} must rise from at least 5")
        if self.seq_len < 4 or self.num_windows < 2 or self.num_resamples < 2:
            raise ValueError(
                f"{self.seq_len=} must be at least 4, {self.num_windows=} and "
                f"{self.num_resamples=} 2"
            )


CONFIGS = {
    "smoke": Config(
        corpus=corpora.CorpusConfig(held_out=0.02),
        sides=("lstm",),
        sizes=(1_136,),
        few_sizes=(1_136,),
        head_dim=4,
        batch_size=4,
        seq_len=32,
        horizons=(5, 10, 20),
        trial_steps=5,
        warmup_steps=2,
        num_windows=8,
        num_resamples=20,
    ),
    "cpu": Config(),
    "gpu": Config(
        sides=("lstm", "1 layer", "4 layers"),
        sizes=(66_432, 263_936, 1_052_160),
        few_sizes=(66_432, 263_936, 1_052_160),
        head_dim=32,
        batch_size=64,
        seq_len=512,
        horizons=(100, 200, 400, 800),
        trial_steps=200,
    ),
}


class Runs(NamedTuple):
    """Finished runs, a row each; `side` counts in `Result.sides`."""

    side: np.ndarray
    size: np.ndarray
    """What the shape came near to."""
    num_params: np.ndarray
    num_params_non_embedding: np.ndarray
    hidden_size: np.ndarray
    num_tokens: np.ndarray
    flops: np.ndarray
    flops_6nd: np.ndarray
    loss: np.ndarray
    """Of held-out windows, nats per token."""
    loss_se: np.ndarray
    learning_rate: np.ndarray
    seconds: np.ndarray


class Trials(NamedTuple):
    """Learning rates tried, and the losses that they led to."""

    side: np.ndarray
    size: np.ndarray
    learning_rate: np.ndarray
    loss: np.ndarray


class Differences(NamedTuple):
    """Loss of a side minus the reference's, longest runs of equal size, same windows.

    The standard error is of the text; it leaves out another seed's difference.
    """

    side: np.ndarray
    size: np.ndarray
    difference: np.ndarray
    se: np.ndarray


class Places(NamedTuple):
    """Loss by place in the window, of each side's longest run of its largest size.

    Attributes:
      place: tokens seen, the middle of each bin.
      loss: mean over the bin, `[sides, bins]`.
      gain: mean loss over the second quarter of the window minus that over the last.
      gain_se: its standard error.
    """

    place: np.ndarray
    loss: np.ndarray
    gain: np.ndarray
    gain_se: np.ndarray


class Result(NamedTuple):
    """All runs, and what was read off them; the reference is the first side."""

    sides: np.ndarray
    runs: Runs
    trials: Trials
    differences: Differences
    places: Places
    curves: Curve
    """Through the frontier of each side, `[sides, points]`, exact compute."""
    ratios: Ratio
    """`[2, sides, points]`: exact compute, then 6 N D; the reference against itself."""


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Trains all sides; ended early, it has the pairs of side and size done by then."""
    from experiments import rivals_runs

    names = (REFERENCE, *config.sides)
    corpus = corpora.open(config.corpus)
    sides = [
        rivals_sides.side(
            name,
            vocab_size=corpus.vocab_size,
            seq_len=config.seq_len,
            head_dim=config.head_dim,
        )
        for name in names
    ]
    budget = rivals_runs.Budget(
        **{name: getattr(config, name) for name in rivals_runs.Budget._fields}
    )
    plan = [
        (i, size)
        for i in range(len(sides))
        for size in (config.sizes if i < 2 else config.few_sizes)
    ]
    update = progress.bar("training", len(plan) * budget.num_steps(), "steps")
    done = 0

    def told(steps: int, shown: str) -> bool:
        nonlocal done
        done += steps
        update(done)
        progress.show(shown)
        return progress.stopped

    trained = {}
    for i, size in plan:
        if (found := rivals_runs.train(sides[i], size, corpus, budget, told)) is None:
            break
        trained[i, size] = found
    return _result(names, trained, config)


def _result(names: tuple[str, ...], trained: dict, config: Config) -> Result:
    rows = [
        {"side": i, "size": size} | row
        for (i, size), found in trained.items()
        for row in found.rows
    ]
    trials = [
        (i, size, *trial) for (i, size), x in trained.items() for trial in x.trials
    ]
    fits = {
        size: [
            rivals_fits.fit([row for row in rows if row["side"] == i], size)
            for i in range(len(names))
        ]
        for size in rivals_fits.SIZES
    }
    again = {
        size: [
            rivals_fits.resampled(
                *([row for row in rows if row["side"] == i], size),
                *(config.num_resamples, config.seed + i),
            )
            for i in range(len(names))
        ]
        for size in rivals_fits.SIZES
    }
    ratios = [
        rivals_fits.ratio(fits[size][0], side, (again[size][0], drawn))
        for size in rivals_fits.SIZES
        for side, drawn in zip(fits[size], again[size], strict=True)
    ]
    shape = (len(rivals_fits.SIZES), len(names))
    parts = [np.array(part) for part in zip(*ratios, strict=True)]
    curves = [rivals_fits.curve(each) for each in fits["exact"]]
    return Result(
        np.array(names),
        Runs(*(np.array([row[name] for row in rows]) for name in Runs._fields)),
        Trials(*(np.array(x) for x in zip(*trials, strict=True)))
        if trials
        else Trials(*np.zeros((4, 0))),
        _differences(trained),
        _places(trained, len(names), config.seq_len),
        Curve(*(np.array(part) for part in zip(*curves, strict=True))),
        Ratio(*(part.reshape(*shape, *part.shape[1:]) for part in parts)),
    )


def _differences(trained: dict) -> Differences:
    found = []
    for (i, size), each in trained.items():
        if i and (0, size) in trained:
            apart = (each.losses - trained[0, size].losses).mean(1)
            se = apart.std(ddof=1) / np.sqrt(len(apart))
            found.append((i, size, apart.mean(), se))
    return Differences(*np.array(found, float).reshape(-1, 4).T)


def _places(trained: dict, num_sides: int, seq_len: int) -> Places:
    edges = np.unique(np.geomspace(1, seq_len + 1, 17).round().astype(int)) - 1
    middle = np.sqrt((edges[:-1] + 1.0) * edges[1:])
    loss = np.full((num_sides, len(middle)), np.nan)
    gain, gain_se = np.full((2, num_sides), np.nan)
    quarter = seq_len // 4
    for i in range(num_sides):
        sizes = [size for j, size in trained if j == i]
        if not sizes:
            continue
        losses = trained[i, max(sizes)].losses
        parts = itertools.pairwise(edges)
        loss[i] = [losses[:, low:high].mean() for low, high in parts]
        early, late = losses[:, quarter : 2 * quarter], losses[:, -quarter:]
        each = early.mean(1) - late.mean(1)
        gain[i], gain_se[i] = each.mean(), each.std(ddof=1) / np.sqrt(len(each))
    return Places(middle, loss, gain, gain_se)


plot = rivals_drawing.plot
claims = rivals_telling.claims
metrics = rivals_telling.metrics
summary = rivals_telling.summary
