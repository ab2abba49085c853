"""Does the transformer win over its rivals, and at what compute to equal loss?

LSTM against transformer, SGD against Adam, one, four and six layers against two,
learned against rotary positions: all at equal parameters outside embeddings, on the
same text in the same order, with as many learning rates tried on each side at every
size and as many seeds. Each side is a curve through the best of its runs by compute, so
the verdict is a ratio of compute with its interval, not the outcome of two runs.
"""

import dataclasses
import functools

from experiments.training.rivals import drawing, outcomes, report, runs
from experiments.training.rivals.outcomes import Result
from experiments.training.rivals.sides import REFERENCE, side
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from scaling.corpora import corpora
from scaling.sweeps import executors, workers

PANELS = (2, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which sides, at which sizes, for how long."""

    corpus: corpora.CorpusConfig = corpora.STANDARD_LIBRARY
    """What is learned."""
    sides: tuple[str, ...] = (
        *("lstm", "sgd", "1 layer", "4 layers", "6 layers", "learned positions"),
    )
    """Who is compared with the transformer of two layers."""
    sizes: tuple[int, ...] = (4_320, 9_552, 26_160)
    """Parameters outside embeddings; to be compared exactly, what an LSTM can have."""
    head_dim: int = 8
    """Of every transformer's heads."""
    batch_size: int = 8
    """Windows per step."""
    seq_len: int = 256
    """Predictions per window."""
    horizons: tuple[int, ...] = (160, 240, 360, 540)
    """Steps of the finished runs."""
    trial_steps: int = 100
    """Steps of a run that tries a learning rate."""
    warmup_steps: int = 20
    """Of every run."""
    num_windows: int = 256
    """Held-out windows that are scored."""
    num_resamples: int = 400
    """Of the fits."""
    seeds: tuple[int, ...] = (0, 1)
    """Of parameters and the order of the text: every side has all runs with each of
    them. The rate is chosen with the first."""
    num_threads: int = 2
    """Pairs of side and size that are trained at a time: a core that waits for another
    in a small model's step has work then. The numbers do not depend on it."""

    def __post_init__(self) -> None:
        """Refuses what cannot be compared."""
        if not self.sides or len({*self.sides}) < len(self.sides):
            raise ValueError(f"{self.sides=} must be different names, at least one")
        for name in self.sides:
            side(name, vocab_size=2, seq_len=1, head_dim=2)
        if not self.sizes or len({*self.sizes}) < len(self.sizes):
            raise ValueError(f"{self.sizes=} must be different, at least one")
        if [*self.horizons] != sorted({*self.horizons}) or min(self.horizons) < 5:
            raise ValueError(f"{self.horizons=} must rise from at least 5")
        validation.within(
            self,
            "warmup_steps",
            low=0,
            high=min(self.trial_steps, self.horizons[0]),
        )
        if (
            not self.seeds
            or len({*self.seeds}) < len(self.seeds)
            or min(self.seeds) < 0
        ):
            raise ValueError(f"{self.seeds=} must be different, at least one, from 0")
        validation.at_least(self, "num_threads")
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
        sides=("lstm", "1 layer", "4 layers", "6 layers"),
        sizes=(66_432, 263_936, 1_052_160),
        head_dim=32,
        batch_size=64,
        seq_len=512,
        horizons=(100, 200, 400, 800),
        trial_steps=200,
        num_threads=1,
    ),
}


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Trains all sides; ended early, it has the pairs of side and size done by then."""
    names = (REFERENCE, *config.sides)
    corpus = executors.open_corpus(config.corpus)
    sides = [
        side(
            name,
            vocab_size=corpus.vocab_size,
            seq_len=config.seq_len,
            head_dim=config.head_dim,
        )
        for name in names
    ]
    budget = runs.Budget(
        **{name: getattr(config, name) for name in runs.Budget._fields}
    )
    plan = [(i, size) for i in range(len(sides)) for size in config.sizes]
    all_workers = workers.Workers(
        corpus,
        functools.partial(runs.score, corpus, budget),
        progress,
        num_steps=len(plan) * budget.num_steps(),
        num_threads=config.num_threads,
    )

    def train(pair: tuple[int, int]) -> tuple[tuple[int, int], runs.Trained]:
        i, size = pair
        return pair, runs.train(sides[i], size, budget, all_workers)

    trained = dict(all_workers.map(train, plan))
    return outcomes.collect(
        *(names, trained),
        seq_len=config.seq_len,
        num_resamples=config.num_resamples,
    )


plot = drawing.plot
claims = report.claims
metrics = report.metrics
summary = report.summary
