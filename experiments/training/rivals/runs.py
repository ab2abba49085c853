"""Trains the sides of `rivals`: learning rates, a trunk, and a branch per horizon.

At four fifths of every horizon, a branch leaves the trunk at the best rate and decays
its learning rate to 0, so that each loss is that of a finished run (Hägele et al. 2024,
arXiv:2405.18392, section 3).
"""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments import lab
from experiments.training.rivals.settings import REFERENCE, Config, Side, side
from jaxkv.models import Params
from scaling.corpora import Corpus
from scaling.frontiers import (
    ComputeRatio,
    FrontierCurve,
    FrontierFit,
    compare_best_runs,
    evaluate_fit,
    fit_best_runs,
    resample_fits,
)
from scaling.sweeps import FinishedRun, Workers, next_rate, open_on_device
from scaling.training import (
    TrainConfig,
    count_model_parameters,
    resize_model,
    score_stream,
    steps_taken,
    stream_windows,
)

NUM_TRIALS = 5
"""Learning rates that every side tries at every size: 3, then 2 more.

While the best rate is at the end of the grid, the next one extends the grid; otherwise
it is next to the best. The report shows a side whose best rate remains at the end.
"""


COMPUTE = {"exact": "flops", "6ND": "flops_6nd"}
"""Ways to count compute, with the columns of `SideRuns`."""


class SideRuns(lab.ResultTable):
    """Finished runs; `side` is an index into `Result.sides`."""

    side: lab.Ints = lab.column("index of the side")
    size: lab.Ints = lab.column("target number of parameters")
    seed: lab.Ints = lab.column("seed of parameters and data order")
    num_params: lab.Ints = lab.column("all parameters")
    num_params_non_embedding: lab.Ints = lab.column("parameters outside embeddings")
    hidden_size: lab.Ints = lab.column("hidden size")
    num_tokens: lab.Ints = lab.column("trained tokens")
    flops: lab.Floats = lab.column("exact compute")
    flops_6nd: lab.Floats = lab.column("compute as 6 N D")
    loss: lab.Floats = lab.column("nats per token of held-out windows")
    loss_se: lab.Floats = lab.column("standard error of the loss")
    learning_rate: lab.Floats = lab.column("best tried rate")
    seconds: lab.Floats = lab.column("training time with other runs on the machine")


class Trials(lab.ResultTable):
    """Tried learning rates and their losses."""

    side: lab.Ints = lab.column("index into `Result.sides`")
    size: lab.Ints = lab.column("target number of parameters")
    learning_rate: lab.Floats = lab.column("tried rate")
    loss: lab.Floats = lab.column("loss of the short run")


class Differences(lab.ResultTable):
    """Loss of a side less the reference's, longest runs of equal size."""

    side: np.ndarray = lab.column("index into `Result.sides`; in reports, the name")
    size: lab.Ints = lab.column("size of both", heading="parameters", form="{:,}")
    difference: lab.Floats = lab.column(
        "mean over the seeds", heading="nats", form="{:+.4f}"
    )
    se: lab.Floats = lab.column(
        "standard error due to the held-out text",
        heading="standard error",
        form="{:.4f}",
    )
    by_seed: Float[np.ndarray, "rows seeds"] = lab.column(
        "difference of each seed, with the same data order for both sides",
        heading="seed by seed",
        form=lambda differences: ", ".join(f"{x:+.4f}" for x in differences),
    )


class PositionLosses(lab.ResultRecord):
    """Loss by position in the window, longest runs of each side's largest size."""

    place: Float[np.ndarray, " bins"] = lab.column(
        "tokens of context, middle of the bin"
    )
    loss: Float[np.ndarray, "sides bins"] = lab.column("mean over the bin")
    gain: Float[np.ndarray, " sides"] = lab.column(
        "mean loss of the second quarter of the window less that of the last quarter"
    )
    gain_se: Float[np.ndarray, " sides"] = lab.column(
        "standard error over windows; mostly the difficulty of the text, common to "
        "all sides"
    )
    lead: Float[np.ndarray, " sides"] = lab.column("the reference's gain less this one")
    lead_se: Float[np.ndarray, " sides"] = lab.column(
        "standard error over common windows"
    )


class Result(lab.ResultRecord):
    """Runs and comparisons; the reference is the first side."""

    sides: np.ndarray = lab.column("names of the sides")
    runs: SideRuns = lab.column("finished runs")
    trials: Trials = lab.column("learning rate trials")
    differences: Differences = lab.column("at equal size and tokens")
    places: PositionLosses = lab.column("by position in the window")
    curves: FrontierCurve = lab.column("through each side's frontier, exact compute")
    ratios: ComputeRatio = lab.column(
        "by way to count compute, and side; the first is itself"
    )


class SideResult(NamedTuple):
    """Runs of one side at one size.

    Attributes:
      rows: values by column of `SideRuns` for each seed and horizon.
      trials: tried rates and their losses.
      losses: nats of every held-out token of each seed's longest run.
    """

    rows: list[dict[str, float]]
    trials: list[tuple[float, float]]
    losses: Float[np.ndarray, "seeds windows seq"]


def steps_per_side(config: Config) -> int:
    """Returns the training steps of one side at one size, trials included."""
    run_steps = steps_taken(config.horizons, [_cooldown(x) for x in config.horizons])
    return NUM_TRIALS * config.trial_steps + len(config.seeds) * run_steps


class TokenLosses(NamedTuple):
    """Nats of every token of the held-out windows."""

    losses: Float[np.ndarray, "windows seq"]

    @property
    def loss(self) -> float:
        """Mean over all tokens."""
        return float(self.losses.mean())


def score_tokens(
    corpus: Corpus, config: Config, run: TrainConfig, params: Params
) -> TokenLosses:
    """Scores a run in small batches, which fit a processor's cache."""
    score = score_stream(
        params,
        corpus.held_out,
        model=run.model,
        seq_len=config.seq_len,
        num_windows=config.num_windows,
        batch_size=16,
    )
    return TokenLosses(score.losses)


def train_side(
    side: Side, num_params: int, config: Config, workers: Workers
) -> SideResult:
    """Tunes the learning rate, then trains to every horizon.

    Args:
      side: architecture and optimizer.
      num_params: target number of parameters outside embeddings.
      config: config of all sides.
      workers: workers that train, and score with `score_tokens`.

    Raises:
      branching.Stopped: training was stopped before its end.
    """
    base: Any = side.base
    model = resize_model(base, num_params)
    name = f"{side.name}, {num_params:,}"

    def train_config(num_steps: int, rate: float, seed: int) -> TrainConfig:
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

    def shown(end: FinishedRun) -> str:
        run = end.run
        return f"{name}: {end.loss:.3f} at {run.num_steps}, {run.learning_rate:.2g}"

    trials: list[tuple[float, float]] = []
    rates = list(side.rates)
    for count in range(NUM_TRIALS):
        if count == len(rates):
            rates.append(next_rate(trials))
        trial = train_config(config.trial_steps, rates[count], config.seeds[0])
        [end] = workers.train([trial], shown)
        trials.append((rates[count], end.loss))
    rate = min(trials, key=lambda trial: np.nan_to_num(trial[1], nan=np.inf))[0]
    windows = stream_windows(
        workers.corpus.held_out, seq_len=config.seq_len, num_windows=config.num_windows
    )
    diverged = np.full((len(windows), config.seq_len), np.nan)
    rows = []
    longest = []
    for seed in config.seeds:
        losses = diverged
        runs = [train_config(horizon, rate, seed) for horizon in config.horizons]
        for end in workers.train(runs, shown):
            losses = diverged if end.score is None else end.score.losses
            rows.append({"size": num_params} | _row(end, losses))
        longest.append(losses)
    return SideResult(rows, trials, np.array(longest))


def _cooldown(num_steps: int) -> int:
    """Returns the steps of the cooldown, the last fifth of a run."""
    return max(1, num_steps // 5)


def _row(end: FinishedRun, losses: np.ndarray) -> dict[str, float]:
    run = end.run
    counts = count_model_parameters(run.model)
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
"""Results by side and size."""


def collect(names: Sequence[str], trained: SideResults, config: Config) -> Result:
    """Collects a result from the trained pairs, which may be incomplete."""
    rows = [{"side": i} | row for (i, _), x in trained.items() for row in x.rows]
    trials = [(*pair, *trial) for pair, x in trained.items() for trial in x.trials]
    runs = SideRuns.of(rows)
    # Each side's curve through its best runs, and curves of resampled trunks.
    fits: dict[str, list[tuple[FrontierFit | None, list[FrontierFit | None]]]] = {
        x: [] for x in COMPUTE.values()
    }
    for compute, side_fits in fits.items():
        for i in range(len(names)):
            subset = runs.where(side=i)
            points = getattr(subset, compute), subset.loss
            trunks = np.stack([subset.size, subset.seed], 1)
            resamples = resample_fits(
                *points, trunks, count=config.num_resamples, seed=i
            )
            side_fits.append((fit_best_runs(*points), resamples))
    difference_rows = []
    for (i, size), size_runs in trained.items():
        if i and (0, size) in trained:
            less = (size_runs.losses - trained[0, size].losses).mean(2)
            difference_rows.append((i, size, *_mean(less.mean(0)), less.mean(1)))
    versus = ("the transformer", "this side")
    ratios = [
        _stacked(
            compare_best_runs(pairs[0][0], fit, (pairs[0][1], resamples), names=versus)
            for fit, resamples in pairs
        )
        for pairs in fits.values()
    ]
    exact = fits[COMPUTE["exact"]]
    return Result(
        sides=np.array(names),
        runs=runs,
        trials=Trials.of(trials),
        differences=Differences.of(difference_rows),
        places=_places(trained, len(names), config.seq_len),
        curves=_stacked(evaluate_fit(fit) for fit, _ in exact),
        ratios=_stacked(ratios),
    )


def _stacked[T: tuple](tuples: Iterable[T]) -> T:
    """Stacks NamedTuples of arrays."""
    listed = [*tuples]
    return type(listed[0])(*map(np.stack, zip(*listed, strict=True)))


def _places(trained: SideResults, num_sides: int, seq_len: int) -> PositionLosses:
    edges = np.unique(np.geomspace(1, seq_len + 1, 17).round().astype(int)) - 1
    middle = np.sqrt((edges[:-1] + 1.0) * edges[1:])
    loss = np.full((num_sides, len(middle)), np.nan)
    gains = np.full((4, num_sides), np.nan)
    quarter = seq_len // 4
    reference = None
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
    """Returns the mean over windows and its standard error."""
    se = windows.std(ddof=1) / np.sqrt(len(windows))
    return float(windows.mean()), float(se)


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Trains all sides; if stopped, keeps the finished pairs of side and size."""
    names = (REFERENCE, *config.sides)
    corpus = open_on_device(config.corpus)
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

    side_results = dict(all_workers.map(trained, plan))
    return collect(names, side_results, config)
