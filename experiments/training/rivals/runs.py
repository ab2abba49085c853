"""Trains the sides of `rivals`: the same rates tried, a trunk, a branch per horizon.

A trunk at the best rate is left at four fifths of every horizon by a branch whose rate
falls to zero, so that each loss is that of a finished run (Hägele et al. 2024,
arXiv:2405.18392, section 3).
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.training.rivals.sides import Side
from scaling.corpora import Corpus
from scaling.training import Schedule, architectures, objectives
from scaling.training.step import TrainState, compiled, init


class Budget(NamedTuple):
    """What every run of every side has alike.

    Attributes:
      batch_size: windows per step.
      seq_len: predictions per window.
      horizons: steps of the finished runs, rising.
      trial_steps: steps of a run that only tries a rate.
      warmup_steps: of all runs.
      num_windows: held-out windows that are scored.
      seeds: of parameters and the order of the text; the first chooses the rate.
    """

    batch_size: int
    seq_len: int
    horizons: tuple[int, ...]
    trial_steps: int
    warmup_steps: int
    num_windows: int
    seeds: tuple[int, ...]

    def num_steps(self) -> int:
        """Steps that one side takes at one size, trials included."""
        branches = sum(h - _left(h) for h in self.horizons)
        whole = _left(self.horizons[-1]) + branches
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


def train(
    side: Side,
    num_params: int,
    corpus: Corpus,
    budget: Budget,
    told: Callable[[int, str], bool],
) -> Trained | None:
    """Tunes the rate, then trains to every horizon.

    Args:
      side: what to train.
      num_params: outside embeddings, what its shape comes near to.
      corpus: text, held-out text.
      budget: the same for all sides.
      told: called after each piece of training with its steps and what to show;
        returns whether to stop.

    Returns:
      The runs; None if it was told to stop before they were finished.
    """
    run = _Runs(side, num_params, corpus, budget)
    trials: list[tuple[float, float]] = []
    rates, seed = list(side.rates), budget.seeds[0]
    start = run.start(seed)
    for count in range(NUM_TRIALS):
        if count == len(rates):
            rates.append(next_rate(trials))
        end = run.finished(start, (0, budget.trial_steps), rates[count], seed)
        loss = run.score(end)
        trials.append((rates[count], loss))
        shown = f"{side.name}, {num_params:,}: rate {rates[count]:.2g}, loss {loss:.3f}"
        if told(budget.trial_steps, shown):
            return None
    finite = [trial for trial in trials if np.isfinite(trial[1])]
    rate = min(finite or trials, key=lambda trial: trial[1])[0]
    rows, longest = [], []
    for seed in budget.seeds:
        state, done, losses = run.start(seed), 0, np.zeros((0, 0))
        for horizon in budget.horizons:
            started, left = time.monotonic(), _left(horizon)
            part = (done, left, budget.horizons[-1])
            state = run.steps(state, part, rate, seed)
            branch = run.finished(state, (left, horizon), rate, seed)
            losses = run.losses(branch)
            seconds = time.monotonic() - started
            rows.append({"seed": seed} | run.row(horizon, rate, losses, seconds))
            shown = f"{side.name}, {num_params:,}: {losses.mean():.3f} at {horizon}"
            if told(horizon - done, shown):
                return None
            done = left
        longest.append(losses)
    return Trained(rows, trials, np.array(longest))


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


def _left(horizon: int) -> int:
    """Where the branch to a horizon leaves the trunk."""
    return horizon - max(1, horizon // 5)


class _Runs:
    """Compiled once for a side and size; every schedule is an argument."""

    def __init__(self, side: Side, num_params: int, corpus: Corpus, budget: Budget):
        base: Any = side.base
        self.model = architectures.sized(base, num_params)
        self.side, self.corpus, self.budget = side, corpus, budget
        self.call = compiled(
            self.model, side.optimizer, budget.batch_size, budget.seq_len
        )
        self.stream = jnp.asarray(corpus.stream)
        self.windows = objectives.stream_windows(
            corpus.held_out, seq_len=budget.seq_len, num_windows=budget.num_windows
        )
        self.token_losses = jax.jit(
            functools.partial(objectives.token_losses, model=self.model)
        )

    def start(self, seed: int) -> TrainState:
        return init(self.model, self.side.optimizer, jnp.int32(seed))

    def steps(
        self, state: Any, part: tuple[int, int, int], rate: float, seed: int, fall=0
    ) -> Any:
        """Goes from one step to another on a schedule that ends at the third."""
        start, until, end = part
        if start == until:
            return state
        counts = (self.budget.warmup_steps, fall, end)
        schedule = Schedule(
            jnp.float32(rate),
            *map(jnp.int32, counts),
            final_share=jnp.float32(0),
            is_cosine=jnp.bool_(False),
        )
        count = jnp.int32(until - start)
        return self.call(state, self.stream, schedule, jnp.int32(seed), count)[0]

    def finished(
        self, state: Any, part: tuple[int, int], rate: float, seed: int
    ) -> Any:
        """Takes a state to the end of a schedule that falls over its last fifth."""
        fall = part[1] - _left(part[1])
        return self.steps(state, (*part, part[1]), rate, seed, fall)

    def losses(self, state: Any) -> np.ndarray:
        # Few at a time: what lies between stays in a processor's cache.
        size, parts = 16, []
        for start in range(0, len(self.windows), size):
            batch = self.windows[start : start + size]
            whole = np.pad(batch, ((0, size - len(batch)), (0, 0)))
            found = self.token_losses(state.params, jnp.asarray(whole))
            parts.append(np.asarray(found, np.float64)[: len(batch)])
        return np.concatenate(parts)

    def score(self, state: Any) -> float:
        return float(self.losses(state).mean())

    def row(self, horizon: int, rate: float, losses: Any, seconds: float) -> dict:
        budget, counts = self.budget, architectures.parameters(self.model)
        tokens = horizon * budget.batch_size * budget.seq_len
        step = architectures.training_flops(
            self.model, batch=budget.batch_size, sequence=budget.seq_len
        )
        means = losses.mean(1)
        return {
            "num_params": counts.total,
            "num_params_non_embedding": counts.non_embedding,
            "hidden_size": self.model.hidden_size,
            "num_tokens": tokens,
            "flops": float(step) * horizon,
            "flops_6nd": 6.0 * counts.non_embedding * tokens,
            "loss": float(means.mean()),
            "loss_se": float(means.std(ddof=1) / np.sqrt(len(means))),
            "learning_rate": rate,
            "seconds": seconds,
        }
