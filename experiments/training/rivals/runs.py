"""Trains the sides of `rivals`: the same rates tried, a trunk, a branch per horizon.

A trunk at the best rate is left at four fifths of every horizon by a branch whose rate
falls to zero, so that each loss is that of a finished run (Hägele et al. 2024,
arXiv:2405.18392, section 3).
"""

from typing import Any, NamedTuple

import numpy as np

from experiments.training.rivals.sides import Side
from jaxkv.models import transformer
from scaling.corpora import corpora, streams
from scaling.sweeps import Finished, Workers
from scaling.training import TrainConfig, architectures, objectives, steps_taken


class Budget(NamedTuple):
    """What every run of every side has alike.

    Attributes:
      corpus: what is learned.
      batch_size: windows per step.
      seq_len: predictions per window.
      horizons: steps of the finished runs, rising.
      trial_steps: steps of a run that only tries a rate.
      warmup_steps: of all runs.
      num_windows: held-out windows that are scored.
      seeds: of parameters and the order of the text; the first chooses the rate.
    """

    corpus: corpora.CorpusConfig
    batch_size: int
    seq_len: int
    horizons: tuple[int, ...]
    trial_steps: int
    warmup_steps: int
    num_windows: int
    seeds: tuple[int, ...]

    def num_steps(self) -> int:
        """Steps that one side takes at one size, trials included."""
        whole = steps_taken(self.horizons, [_cooldown(h) for h in self.horizons])
        return NUM_TRIALS * self.trial_steps + len(self.seeds) * whole


class Trained(NamedTuple):
    """What one side did at one size.

    Attributes:
      rows: a dict of numbers for each seed and horizon.
      trials: the rates tried, with the loss of each.
      losses: nats of every held-out token, of each seed's longest run,
        `[seeds, windows, seq]`.
    """

    rows: list[dict[str, Any]]
    trials: list[tuple[float, float]]
    losses: np.ndarray


NUM_TRIALS = 5
"""Learning rates that every side tries at every size: three, and two where they lead.

One rule for all: while the best is an edge, the next rate lies beyond it, else beside
it. A side whose best is an edge at last is said to be so in the report.
"""


class TokenLosses(NamedTuple):
    """Nats of every token of the held-out windows, `[windows, seq]`."""

    losses: np.ndarray

    @property
    def loss(self) -> float:
        """Their mean."""
        return float(self.losses.mean())


def score(
    corpus: streams.Corpus, budget: Budget, run: TrainConfig, params: transformer.Params
) -> TokenLosses:
    """Scores a run, few windows at a time: they stay in a processor's cache."""
    losses = objectives.stream_losses(
        params,
        corpus.held_out,
        model=run.model,
        seq_len=budget.seq_len,
        num_windows=budget.num_windows,
        batch_size=16,
    )
    return TokenLosses(losses)


def train(side: Side, num_params: int, budget: Budget, workers: Workers) -> Trained:
    """Tunes the rate, then trains to every horizon.

    Args:
      side: what to train.
      num_params: outside embeddings, what its shape comes near to.
      budget: the same for all sides.
      workers: trains, and scores with `score`.

    Raises:
      branching.Stopped: somebody asked to stop before all was finished.
    """
    base: Any = side.base
    model = architectures.sized(base, num_params)
    name = f"{side.name}, {num_params:,}"

    def config(num_steps: int, rate: float, seed: int) -> TrainConfig:
        return TrainConfig(
            model=model,
            corpus=budget.corpus,
            optimizer=side.optimizer,
            batch_size=budget.batch_size,
            seq_len=budget.seq_len,
            num_steps=num_steps,
            learning_rate=rate,
            warmup_steps=budget.warmup_steps,
            cooldown_steps=_cooldown(num_steps),
            seed=seed,
        )

    def tried(end: Finished) -> str:
        return f"{name}: rate {end.run.learning_rate:.2g}, loss {_loss(end):.3f}"

    def trained(end: Finished) -> str:
        return f"{name}: {_loss(end):.3f} at {end.run.num_steps}"

    trials: list[tuple[float, float]] = []
    rates = list(side.rates)
    for count in range(NUM_TRIALS):
        if count == len(rates):
            rates.append(next_rate(trials))
        trial = config(budget.trial_steps, rates[count], budget.seeds[0])
        [end] = workers.train([trial], tried)
        trials.append((rates[count], _loss(end)))
    finite = [trial for trial in trials if np.isfinite(trial[1])]
    rate = min(finite or trials, key=lambda trial: trial[1])[0]
    windows = objectives.stream_windows(
        workers.corpus.held_out, seq_len=budget.seq_len, num_windows=budget.num_windows
    )
    rows, longest = [], []
    for seed in budget.seeds:
        losses = np.full((len(windows), budget.seq_len), np.nan)
        runs = [config(horizon, rate, seed) for horizon in budget.horizons]
        for end in workers.train(runs, trained):
            losses = np.full_like(losses, np.nan)
            if end.score is not None:
                losses = end.score.losses
            rows.append({"seed": seed} | _row(end, losses))
        longest.append(losses)
    return Trained(rows, trials, np.array(longest))


def _loss(end: Finished) -> float:
    return np.nan if end.score is None else end.score.loss


def next_rate(trials: list[tuple[float, float]]) -> float:
    """The next rate to try: beyond the best if that is an edge, else beside it.

    An edge is left by the grid's own factor. Between two rates goes the trial on
    the side of the better neighbour, halfway in the logarithm.
    """
    rates, losses = zip(*sorted(trials), strict=True)
    losses = [loss if np.isfinite(loss) else np.inf for loss in losses]
    best = int(np.argmin(losses))
    if best == 0:
        return rates[0] ** 2 / rates[1]
    if best == len(rates) - 1:
        return rates[-1] ** 2 / rates[-2]
    beside = best - 1 if losses[best - 1] < losses[best + 1] else best + 1
    return float(np.sqrt(rates[best] * rates[beside]))


def _cooldown(num_steps: int) -> int:
    """Steps in which a run's rate falls, its last fifth."""
    return max(1, num_steps // 5)


def _row(end: Finished, losses: np.ndarray) -> dict[str, Any]:
    run = end.run
    counts = architectures.parameters(run.model)
    tokens = run.num_steps * run.batch_size * run.seq_len
    step = architectures.training_flops(
        run.model, batch=run.batch_size, sequence=run.seq_len
    )
    means = losses.mean(1)
    return {
        "num_params": counts.total,
        "num_params_non_embedding": counts.non_embedding,
        "hidden_size": run.model.hidden_size,
        "num_tokens": tokens,
        "flops": float(step) * run.num_steps,
        "flops_6nd": 6.0 * counts.non_embedding * tokens,
        "loss": float(means.mean()),
        "loss_se": float(means.std(ddof=1) / np.sqrt(len(means))),
        "learning_rate": run.learning_rate,
        "seconds": end.seconds,
    }
