"""Trains the sides of `rivals`: the same rates tried, a trunk, a branch per horizon.

A trunk at the best rate is left at four fifths of every horizon by a branch whose rate
falls to zero, so that each loss is that of a finished run (Hägele et al. 2024,
arXiv:2405.18392, section 3).
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.framework import Floats, Ints, Record, Table, column
from experiments.training.rivals.settings import REFERENCE, Config, Side, side
from jaxkv.models import transformer
from jaxkv.progress import QUIET, Progress
from scaling.corpora import streams
from scaling.frontiers import best_runs
from scaling.frontiers.best_runs import Curve, Ratio
from scaling.sweeps import Finished, Workers, executors, learning_rates
from scaling.training import TrainConfig, architectures, objectives, steps_taken

NUM_TRIALS = 5
"""Learning rates that every side tries at every size: three, and two where they lead.

One rule for all: while the best is an edge, the next rate lies beyond it, else beside
it. A side whose best is an edge at last is said to be so in the report.
"""


COMPUTE = {"exact": "flops", "6ND": "flops_6nd"}
"""How compute is counted: columns of `SideRuns`."""


class SideRuns(Table):
    """Finished runs, a row each; `side` counts in `Result.sides`."""

    side: Ints = column("who")
    size: Ints = column("what the shape came near to")
    seed: Ints = column("of parameters and the order of the text")
    num_params: Ints = column("all of them")
    num_params_non_embedding: Ints = column("those that are compared")
    hidden_size: Ints = column("of the model")
    num_tokens: Ints = column("trained on")
    flops: Floats = column("compute, exactly")
    flops_6nd: Floats = column("as 6 N D")
    loss: Floats = column("of held-out windows, nats per token")
    loss_se: Floats = column("its standard error")
    learning_rate: Floats = column("the best that was tried")
    seconds: Floats = column("beside whatever else was trained at the time")


class Trials(Table):
    """Learning rates tried, and the losses that they led to."""

    side: Ints = column("counts in `Result.sides`")
    size: Ints = column("what the shape came near to")
    learning_rate: Floats = column("tried")
    loss: Floats = column("of the short run")


class Differences(Table):
    """Loss of a side less the reference's: longest runs of equal size, same windows."""

    side: np.ndarray = column("counts in `Result.sides`; in reports, its name")
    size: Ints = column("of both", heading="parameters", form="{:,}")
    difference: Floats = column("mean over the seeds", heading="nats", form="{:+.4f}")
    se: Floats = column(
        "its standard error by chance of the held-out text alone",
        heading="standard error",
        form="{:.4f}",
    )
    by_seed: Float[np.ndarray, "rows seeds"] = column(
        "that of each seed, whose text came to both sides in the same order",
        heading="seed by seed",
        form=lambda each: ", ".join(f"{x:+.4f}" for x in each),
    )


class PositionLosses(Record):
    """Loss by place in the window, of each side's longest runs of its largest size."""

    place: Float[np.ndarray, " bins"] = column("tokens seen, the middle of each bin")
    loss: Float[np.ndarray, "sides bins"] = column("mean over the bin")
    gain: Float[np.ndarray, " sides"] = column(
        "mean loss over the second quarter of the window minus that over the last"
    )
    gain_se: Float[np.ndarray, " sides"] = column(
        "by windows; most of it is how hard the text is at one place and the other, "
        "and common to all sides"
    )
    lead: Float[np.ndarray, " sides"] = column("the reference's gain minus this side's")
    lead_se: Float[np.ndarray, " sides"] = column("by windows that both have scored")


class Result(Record):
    """All runs, and what was read off them; the reference is the first side."""

    sides: np.ndarray = column("their names")
    runs: SideRuns = column("all that ended")
    trials: Trials = column("before them")
    differences: Differences = column("at equal size and tokens")
    places: PositionLosses = column("where in the window who is better")
    curves: Curve = column("through the frontier of each side, exact compute")
    ratios: Ratio = column("by how compute is counted, and side; the first is itself")


class SideResult(NamedTuple):
    """What one side did at one size.

    Attributes:
      rows: a dict of numbers for each seed and horizon, of the columns of `SideRuns`.
      trials: the rates tried, with the loss of each.
      losses: nats of every held-out token, of each seed's longest run.
    """

    rows: list[dict[str, Any]]
    trials: list[tuple[float, float]]
    losses: Float[np.ndarray, "seeds windows seq"]


def steps_per_side(config: Config) -> int:
    """Steps that one side takes at one size, trials included."""
    whole = steps_taken(config.horizons, [_cooldown(x) for x in config.horizons])
    return NUM_TRIALS * config.trial_steps + len(config.seeds) * whole


class TokenLosses(NamedTuple):
    """Nats of every token of the held-out windows."""

    losses: Float[np.ndarray, "windows seq"]

    @property
    def loss(self) -> float:
        """Their mean."""
        return float(self.losses.mean())


def score_tokens(
    corpus: streams.Corpus, config: Config, run: TrainConfig, params: transformer.Params
) -> TokenLosses:
    """Scores a run, few windows at a time: they stay in a processor's cache."""
    found = objectives.score_stream(
        params,
        corpus.held_out,
        model=run.model,
        seq_len=config.seq_len,
        num_windows=config.num_windows,
        batch_size=16,
    )
    return TokenLosses(found.losses)


def train_side(
    side: Side, num_params: int, config: Config, workers: Workers
) -> SideResult:
    """Tunes the rate, then trains to every horizon.

    Args:
      side: what to train.
      num_params: outside embeddings, what its shape comes near to.
      config: the same for all sides.
      workers: trains, and scores with `score_tokens`.

    Raises:
      branching.Stopped: somebody asked to stop before all was finished.
    """
    base: Any = side.base
    model = architectures.sized(base, num_params)
    name = f"{side.name}, {num_params:,}"

    def asked(num_steps: int, rate: float, seed: int) -> TrainConfig:
        return TrainConfig(
            model=model,
            corpus=config.corpus,
            optimizer=side.optimizer,
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            num_steps=num_steps,
            learning_rate=rate,
            warmup_steps=config.warmup_steps,
            cooldown_steps=_cooldown(num_steps),
            seed=seed,
        )

    def shown(end: Finished) -> str:
        run = end.run
        return f"{name}: {end.loss:.3f} at {run.num_steps}, {run.learning_rate:.2g}"

    trials: list[tuple[float, float]] = []
    rates = list(side.rates)
    for count in range(NUM_TRIALS):
        if count == len(rates):
            rates.append(learning_rates.next_rate(trials))
        trial = asked(config.trial_steps, rates[count], config.seeds[0])
        [end] = workers.train([trial], shown)
        trials.append((rates[count], end.loss))
    rate = min(trials, key=lambda trial: np.nan_to_num(trial[1], nan=np.inf))[0]
    windows = objectives.stream_windows(
        workers.corpus.held_out, seq_len=config.seq_len, num_windows=config.num_windows
    )
    diverged = np.full((len(windows), config.seq_len), np.nan)
    rows, longest = [], []
    for seed in config.seeds:
        losses = diverged
        runs = [asked(horizon, rate, seed) for horizon in config.horizons]
        for end in workers.train(runs, shown):
            losses = diverged if end.score is None else end.score.losses
            rows.append({"size": num_params} | _row(end, losses))
        longest.append(losses)
    return SideResult(rows, trials, np.array(longest))


def _cooldown(num_steps: int) -> int:
    """Steps in which a run's rate falls, its last fifth."""
    return max(1, num_steps // 5)


def _row(end: Finished, losses: np.ndarray) -> dict[str, Any]:
    run = end.run
    counts = architectures.parameters(run.model)
    means = losses.mean(1)
    return {
        "seed": run.seed,
        "num_params": counts.total,
        "num_params_non_embedding": counts.non_embedding,
        "hidden_size": run.model.hidden_size,
        "num_tokens": run.num_tokens,
        "flops": run.flops,
        "flops_6nd": 6.0 * counts.non_embedding * run.num_tokens,
        "loss": float(means.mean()),
        "loss_se": float(means.std(ddof=1) / np.sqrt(len(means))),
        "learning_rate": run.learning_rate,
        "seconds": end.seconds,
    }


type SideResults = Mapping[tuple[int, int], SideResult]
"""What was trained, by side and size."""


def collect(names: Sequence[str], trained: SideResults, config: Config) -> Result:
    """Reads a result off what was trained, which may be a part of what was planned."""
    rows = [{"side": i} | row for (i, _), x in trained.items() for row in x.rows]
    trials = [(*pair, *trial) for pair, x in trained.items() for trial in x.trials]
    runs = SideRuns.of(rows)
    # Each side's curve through its best runs, and those through trunks drawn anew.
    fits: dict[str, list[tuple[Any, list[Any]]]] = {x: [] for x in COMPUTE.values()}
    for compute, found in fits.items():
        for i in range(len(names)):
            mine = runs.where(side=i)
            points = getattr(mine, compute), mine.loss
            trunks = np.stack([mine.size, mine.seed], 1)
            drawn = best_runs.resampled(
                *points, trunks, count=config.num_resamples, seed=i
            )
            found.append((best_runs.fit(*points), drawn))
    apart = []
    for (i, size), each in trained.items():
        if i and (0, size) in trained:
            less = (each.losses - trained[0, size].losses).mean(2)
            apart.append((i, size, *_mean(less.mean(0)), less.mean(1)))
    versus = ("the transformer", "this side")
    ratios = [
        _stacked(
            best_runs.compare(each[0][0], fit, (each[0][1], drawn), names=versus)
            for fit, drawn in each
        )
        for each in fits.values()
    ]
    exact = fits[COMPUTE["exact"]]
    return Result(
        sides=np.array(names),
        runs=runs,
        trials=Trials.of(trials),
        differences=Differences.of(apart),
        places=_places(trained, len(names), config.seq_len),
        curves=_stacked(best_runs.curve(fit) for fit, _ in exact),
        ratios=_stacked(ratios),
    )


def _stacked(each: Any) -> Any:
    """Stacks NamedTuples of arrays."""
    listed = [*each]
    return type(listed[0])(*map(np.stack, zip(*listed, strict=True)))


def _places(trained: SideResults, num_sides: int, seq_len: int) -> PositionLosses:
    edges = np.unique(np.geomspace(1, seq_len + 1, 17).round().astype(int)) - 1
    middle = np.sqrt((edges[:-1] + 1.0) * edges[1:])
    loss = np.full((num_sides, len(middle)), np.nan)
    gains = np.full((4, num_sides), np.nan)
    quarter, reference = seq_len // 4, None
    for i in range(num_sides):
        sizes = [size for j, size in trained if j == i]
        if not sizes:
            continue
        losses = trained[i, max(sizes)].losses.mean(0)
        parts = itertools.pairwise(edges)
        loss[i] = [losses[:, low:high].mean() for low, high in parts]
        gain = losses[:, quarter : 2 * quarter].mean(1) - losses[:, -quarter:].mean(1)
        reference = gain if i == 0 else reference
        gains[:2, i] = _mean(gain)
        if reference is not None:
            gains[2:, i] = _mean(reference - gain)
    return PositionLosses(middle, loss, *gains)


def _mean(windows: np.ndarray) -> tuple[float, float]:
    """The mean over windows, and its standard error."""
    se = windows.std(ddof=1) / np.sqrt(len(windows))
    return float(windows.mean()), float(se)


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Trains all sides; ended early, it has the pairs of side and size done by then."""
    names = (REFERENCE, *config.sides)
    corpus = executors.open_corpus(config.corpus)
    shape = {"vocab_size": corpus.vocab_size, "seq_len": config.seq_len}
    sides = [side(name, **shape, head_dim=config.head_dim) for name in names]
    plan = [(i, size) for i in range(len(sides)) for size in config.sizes]
    all_workers = Workers(
        corpus,
        functools.partial(score_tokens, corpus, config),
        progress,
        num_steps=len(plan) * steps_per_side(config),
        num_threads=config.num_threads,
    )

    def trained(pair: tuple[int, int]) -> tuple[tuple[int, int], SideResult]:
        i, size = pair
        return pair, train_side(sides[i], size, config, all_workers)

    found = dict(all_workers.map(trained, plan))
    return collect(names, found, config)
