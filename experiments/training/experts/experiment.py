"""What does a mixture of experts gain over a dense model of equal active compute?

Pairs of one width: a dense model, and a mixture whose tokens meet as many weights. They
see the same text in the same order, at learning rates tried alike at the smallest
widths, and are scored on the same held-out windows. A power law of loss against the
compute of each kind, and how much more of it the dense models need for equal loss.

The mixture holds more weights, which this count of compute does not see: memory, and in
serving the bytes of every expert that some token of the batch meets.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from experiments.training.experts import drawing, fits, report, runs
from experiments.training.experts.runs import PAIR, Job, Kind, Run, Shapes
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from scaling.corpora import corpora
from scaling.sweeps import executors, workers

PANELS = (1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which models, on which text."""

    widths: tuple[int, ...] = (16, 24, 32, 40, 48)
    """Hidden sizes, ascending multiples of 8; a pair of models each."""
    num_tuned: int = 2
    """Widths, the smallest ones, at which both kinds try every learning rate."""
    learning_rates: tuple[float, ...] = (6e-3, 1.2e-2, 2.4e-2, 4.8e-2)
    """Peaks at the smallest width; at another they are smaller by as much as it is
    wider (Yang et al. 2022, arXiv:2203.03466, table 3). Each kind uses the one that is
    best for it at the tuned widths."""
    num_repeated: int = 5
    """Widths, the smallest ones, with a second seed."""
    shapes: Shapes = runs.SHAPES
    corpus: corpora.CorpusConfig = corpora.STANDARD_LIBRARY
    num_threads: int = 2
    """Models that are trained at a time: while one is compiled on a core the other has
    work for the next. The numbers do not depend on it."""
    num_windows: int = 512
    """Held-out windows that are scored."""
    num_resamples: int = 1000
    """Resamples of the runs, for the intervals."""

    def __post_init__(self) -> None:
        """Refuses what cannot be compared."""
        if sorted(set(self.widths)) != [*self.widths] or len(self.widths) < 3:
            raise ValueError(f"{self.widths=} must be three or more, ascending")
        if any(width < 8 or width % 8 for width in self.widths):
            raise ValueError(f"{self.widths=} must be multiples of 8")
        if not self.learning_rates or min(self.learning_rates) <= 0:
            raise ValueError(f"{self.learning_rates=} must be above 0, one or more")
        for name in ("num_tuned", "num_repeated"):
            if not 0 <= getattr(self, name) <= len(self.widths):
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, widths]")
        if len(self.learning_rates) > 1 and not self.num_tuned:
            raise ValueError("several learning rates need num_tuned of at least 1")
        validation.at_least(self, "num_threads")
        if self.num_windows < 2 or self.num_resamples < 2:
            raise ValueError(
                f"{self.num_windows=} and {self.num_resamples=} must be at least 2"
            )


_SMALL = Shapes(num_layers=1, num_experts=4, seq_len=32, tokens_per_param=1.0)
CONFIGS = {
    "smoke": Config(
        widths=(8, 16, 24),
        num_tuned=0,
        learning_rates=(1e-2,),
        num_repeated=0,
        shapes=_SMALL,
        num_windows=16,
        num_resamples=50,
    ),
    "cpu": Config(),
    "gpu": Config(
        widths=(64, 96, 128, 192, 256),
        learning_rates=(3e-3, 6e-3, 1.2e-2),
        num_repeated=2,
        shapes=Shapes(num_layers=4, num_experts=16, batch_size=64, seq_len=256),
        num_windows=4096,
        num_threads=1,
    ),
}


class Result(NamedTuple):
    """All runs, and what was fitted to them."""

    kind: np.ndarray
    width: np.ndarray
    learning_rate: np.ndarray
    seed: np.ndarray
    num_params: np.ndarray
    num_active: np.ndarray
    num_tokens: np.ndarray
    flops: np.ndarray
    loss: np.ndarray
    loss_se: np.ndarray
    seconds: np.ndarray
    is_fitted: np.ndarray
    """Runs at their kind's chosen rate; not those without the balancing loss."""
    loads: np.ndarray
    """[2, mixtures, experts] of the pair trained with and without the balancing loss:
    share of held-out tokens over the mean, so 1 if even."""
    curve_flops: np.ndarray
    curve_loss: np.ndarray
    """[2, points, 3]: dense and mixture; the fitted law and its 90 % interval."""
    slope: np.ndarray
    """[2, 3]: exponent of compute, negative, with its interval."""
    ratio: np.ndarray
    """[3]: compute that the dense models need over the mixtures', in the middle of the
    losses that both reached, with its interval."""
    routing_error: float
    """Largest difference between the shares of a trained router and the formula."""


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Trains all pairs, then fits; ended early, it has the runs that are done."""
    found: list[Run] = []
    router = None
    plan = _Plan(config, found)
    corpus = executors.open_corpus(config.corpus)
    all_workers = workers.Workers(
        corpus,
        functools.partial(runs.score, corpus, config.num_windows),
        progress,
        num_steps=plan.num_steps(),
        num_threads=config.num_threads,
    )
    train = functools.partial(
        runs.train,
        shapes=config.shapes,
        corpus=config.corpus,
        workers=all_workers,
    )
    # What is trained after the tuning follows from all of it.
    for jobs in (plan.tuning, plan.rest):
        for done, params in all_workers.map(train, jobs()):
            found.append(done)
            if done.kind == "mixture":
                router = params["layers"][0]["mixture"]["router"]["weight"]
    error = np.nan
    if router is not None:
        error = fits.routing_error(np.asarray(router), top_k=config.shapes.top_k)
    return _collect(config, found, plan, error)


class _Plan:
    """What is to be trained next, given what was."""

    def __init__(self, config: Config, found: list[Run]):
        self.config, self.found = config, found

    def rate(self, kind: Kind, width: int) -> float:
        """A kind's learning rate at a width: best at the tuned widths, on average."""
        rates = self.config.learning_rates
        like: Kind = "dense" if kind == "dense" else "mixture"
        tuned = self.config.widths[: self.config.num_tuned]
        by = {(r.kind, r.width, r.learning_rate, r.seed): r.loss for r in self.found}
        losses = [
            [by.get((like, w, self.scaled(rate, w), 0), np.inf) for w in tuned]
            for rate in rates
        ]
        best = int(np.argmin([np.mean(x) for x in losses])) if tuned else 0
        return self.scaled(rates[best], width)

    def scaled(self, rate: float, width: int) -> float:
        """A rate of the smallest width, at another."""
        return rate * self.config.widths[0] / width

    def tuning(self) -> list[Job]:
        """Kind, width, rate and seed of the runs that decide on the rates."""
        return [
            (kind, width, self.scaled(rate, width), 0)
            for width in self.config.widths[: self.config.num_tuned]
            for rate in self.config.learning_rates
            for kind in PAIR
        ]

    def rest(self) -> list[Job]:
        """The other runs, at the rate that each kind is given by then."""
        widths, num = self.config.widths, self.config.num_tuned
        jobs: list[Job] = [
            (kind, width, self.rate(kind, width), seed)
            for seed, chosen in enumerate(
                (widths[num:], widths[: self.config.num_repeated])
            )
            for width in chosen
            for kind in PAIR
        ]
        free: Kind = "unbalanced"
        return [*jobs, (free, self.shown, self.rate(free, self.shown), 0)]

    def num_steps(self) -> int:
        """Steps of all runs."""
        jobs = (*self.tuning(), *self.rest())
        return sum(runs.num_steps(width, self.config.shapes) for _, width, *_ in jobs)

    @property
    def shown(self) -> int:
        """The width whose loads are compared."""
        return self.config.widths[len(self.config.widths) // 2]


def _collect(config: Config, found: list[Run], plan: _Plan, error: float) -> Result:
    rows = {
        name: np.array([getattr(r, name) for r in found])
        for name in Run._fields
        if name != "loads"
    }
    chosen = [
        r.kind != "unbalanced" and r.learning_rate == plan.rate(r.kind, r.width)
        for r in found
    ]
    by = {(r.kind, r.width): r.loads for r in reversed(found) if r.seed == 0}
    names: list[tuple[Kind, int]] = [
        ("mixture", plan.shown),
        ("unbalanced", plan.shown),
    ]
    loads = np.zeros((2, 0, 0))
    if all(name in by for name in names):
        loads = np.stack([by[name] for name in names])
        loads = loads / loads.mean(axis=2, keepdims=True)
    fitted, used = fits.NOTHING, np.array(chosen, bool)
    if len({(r.kind, r.width) for r in found}) >= 2 * len(config.widths):
        fitted = fits.fit_both(
            *(rows[name][used] for name in ("kind", "flops", "loss")),
            num_resamples=config.num_resamples,
        )
    return Result(
        **rows,
        is_fitted=used,
        loads=loads,
        curve_flops=fitted.flops,
        curve_loss=fitted.curves,
        slope=fitted.slopes,
        ratio=fitted.ratio,
        routing_error=error,
    )


plot = drawing.plot
claims = report.claims
metrics = report.metrics
summary = report.summary
