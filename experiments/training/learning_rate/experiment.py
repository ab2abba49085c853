"""How does the best learning rate change with the width of a model?

Models of several widths are trained on real text for two numbers of tokens, each at
rates a factor of two apart, until the best one lies between others. The optimum of each
is read off a parabola, and a power of the width times one of the tokens goes through
them.

Source: the form is that of Li et al. 2025 (Step Law), arXiv:2503.04715, section 3.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.framework import Claim, Part, Sheet, judge, units
from experiments.harness import sweep_tables
from experiments.plotting import style
from experiments.training.isoflop import prediction, settings
from jaxkv import validation
from jaxkv.progress import QUIET, Progress
from scaling.corpora import corpora
from scaling.fits import intervals
from scaling.sweeps import SweepConfig

PANELS = (1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which widths, how many tokens, which rates."""

    widths: tuple[int, ...]
    num_tokens: tuple[int, ...]
    """Of a run; each width is trained on each."""
    num_layers: int = 2
    corpus: corpora.CorpusConfig = corpora.STANDARD_LIBRARY
    learning_rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
    """For a width of 32; others have them times 32 / width, and more beyond the best
    where it is the last one."""
    max_extensions: int = 3
    batch_size: int = 8
    seq_len: int = 64
    warmup_steps: int = 50
    num_eval_windows: int = 1024
    seed: int = 0
    level: float = 0.9
    """Probability of the intervals."""
    folder: str = ""
    """Where runs are kept, for a sweep to be taken up; empty: not kept."""

    def __post_init__(self) -> None:
        """Refuses what no power goes through."""
        if len(self.widths) < 2 or len(self.num_tokens) < 2:
            raise ValueError(f"{self.widths=}, {self.num_tokens=} must be at least two")
        if len(self.learning_rates) < 2:
            raise ValueError(f"{self.learning_rates=} must be at least two")
        validation.within(self, "level", low=0, high=1, ends="()")
        _ = self.sweep  # refuses the rest

    @property
    def sweep(self) -> SweepConfig:
        """The grid of runs."""
        return SweepConfig(
            models=tuple(
                settings.shape(width, self.num_layers, self.seq_len)
                for width in self.widths
            ),
            corpus=self.corpus,
            num_tokens=self.num_tokens,
            learning_rates=self.learning_rates,
            base_width=settings.BASE_WIDTH,
            max_extensions=self.max_extensions,
            seeds=(self.seed,),
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            warmup_steps=self.warmup_steps,
            min_steps=1,
            num_eval_windows=self.num_eval_windows,
        )


CONFIGS = {
    "smoke": Config(
        widths=(4, 8),
        num_tokens=(4096, 8192),
        num_layers=1,
        corpus=corpora.CorpusConfig(held_out=0.02),
        learning_rates=(8e-3, 1.6e-2),
        max_extensions=1,
        seq_len=32,
        warmup_steps=2,
        num_eval_windows=32,
    ),
    "cpu": Config(
        widths=(8, 16, 32, 64),
        num_tokens=(2**17, 2**19),
        folder="runs/learning-rate-cpu",
    ),
    "gpu": Config(
        widths=(64, 128, 256, 512),
        num_tokens=(2**22, 2**24),
        num_layers=4,
        batch_size=64,
        seq_len=256,
        folder="runs/learning-rate-gpu",
    ),
}


class Powers(NamedTuple):
    """`rate = coefficient width^of_width tokens^of_tokens`, with half intervals.

    Not numbers where there are too few optima.
    """

    coefficient: float
    of_width: float
    of_width_half: float
    of_tokens: float
    of_tokens_half: float


class Result(NamedTuple):
    """All runs that ended, and the optima.

    Attributes:
      width: of each run.
      num_tokens: alike.
      learning_rate: alike.
      loss: alike, of held-out text, nats per token.
      best_width: of each optimum.
      best_num_tokens: alike.
      best_rate: alike.
      powers: through the optima.
      level: probability of the intervals.
    """

    width: np.ndarray
    num_tokens: np.ndarray
    learning_rate: np.ndarray
    loss: np.ndarray
    best_width: np.ndarray
    best_num_tokens: np.ndarray
    best_rate: np.ndarray
    powers: Powers
    level: float


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Trains, or takes up what the folder holds; stopped, it uses what there is."""
    if config.folder:
        return _run(config, Path(config.folder), progress)
    with tempfile.TemporaryDirectory() as folder:
        return _run(config, Path(folder), progress)


def _run(config: Config, folder: Path, progress: Progress) -> Result:
    outcome = sweep_tables.run(config.sweep, folder, progress)
    rows = [row for row in outcome.records if row["status"] == "done"]
    found = prediction.optimal_rates(rows) if rows else []
    width, tokens, rate = np.array(found, float).reshape(-1, 3).T
    names = ("hidden_size", "num_tokens", "learning_rate", "loss")
    return Result(
        *(np.array([row[name] for row in rows], float) for name in names),
        best_width=width,
        best_num_tokens=tokens,
        best_rate=rate,
        powers=fit(width, tokens, rate, config.level),
        level=config.level,
    )


def fit(
    width: np.ndarray, num_tokens: np.ndarray, rate: np.ndarray, level: float
) -> Powers:
    """Lays powers through optima by least squares in logarithms.

    Args:
      width: of each optimum.
      num_tokens: of each.
      rate: of each.
      level: of the intervals, which are Student's.
    """
    design = np.stack([np.ones(len(rate)), np.log(width), np.log(num_tokens)], 1)
    freedom = len(rate) - 3
    if freedom < 1 or np.linalg.matrix_rank(design) < 3:
        return Powers(*[float("nan")] * 5)
    found = np.linalg.lstsq(design, np.log(rate), rcond=None)[0]
    residuals = np.log(rate) - design @ found
    covariance = np.linalg.inv(design.T @ design) * (residuals @ residuals) / freedom
    half = intervals.student(level, freedom) * np.sqrt(np.diagonal(covariance))
    return Powers(
        float(np.exp(found[0])),
        *(float(x) for pair in zip(found[1:], half[1:], strict=True) for x in pair),
    )


def plot(axes: Any, result: Result) -> None:
    """Draws loss against rate, and the best rate against width."""
    left, right = axes
    tokens = np.unique(result.num_tokens)
    widths = np.unique(result.width)
    for i, width in enumerate(widths):
        for line, number in zip(("--", "-"), (tokens[0], tokens[-1]), strict=True):
            mine = np.flatnonzero(
                (result.width == width) & (result.num_tokens == number)
            )
            mine = mine[np.argsort(result.learning_rate[mine])]
            x, y = result.learning_rate[mine], result.loss[mine]
            color = style.colors()[(i + 1) % 8]
            label = f"width {width:.0f}" if line == "-" else None
            left.plot(x, y, line + "o", color=color, label=label, linewidth=0.8)
    left.set(xscale="log", xlabel="learning rate", ylabel="held-out loss [nats/token]")
    left.set_title(f"{tokens[-1]:,.0f} tokens (dashed: {tokens[0]:,.0f})")
    left.legend(loc="best")
    powers = result.powers
    for i, number in enumerate(tokens):
        mine = result.best_num_tokens == number
        color, label = style.colors()[i + 1], f"{number:,.0f} tokens"
        x, y = result.best_width[mine], result.best_rate[mine]
        right.plot(x, y, "o", color=color, label=label)
        if np.isfinite(powers.of_width):
            x = np.geomspace(widths[0], widths[-1], 20)
            y = powers.coefficient * x**powers.of_width * number**powers.of_tokens
            right.plot(x, y, color=color, linewidth=0.8)
    right.set(xscale="log", yscale="log", xlabel="width", ylabel="best learning rate")
    right.set_xticks(widths, [f"{width:.0f}" for width in widths])
    right.set_xticks([], minor=True)
    right.set_title(
        f"rate ~ width^{powers.of_width:.2f} tokens^{powers.of_tokens:.2f}"
        if np.isfinite(powers.of_width)
        else "too few optima"
    )
    right.legend(loc="best")


def claims(result: Result) -> list[Claim]:
    """Holds the exponent of the width against what a published rule says."""
    powers = result.powers
    if not np.isfinite(powers.of_width):
        return []
    ends = f"{powers.of_width_half:.2f}"
    return [
        judge(
            "Adam's best learning rate falls as one over the width",
            source="Yang et al. 2022, arXiv:2203.03466, table 3, hidden matrices",
            published=-1.0,
            ours=powers.of_width,
            unit="1",
            tolerance=powers.of_width_half,
            note=f"{result.level:.0%} interval +- {ends}; one rate for all parameters.",
        ),
        judge(
            "the best rate falls where training is longer",
            source="Bjorck et al. 2024, arXiv:2409.19913, section 3",
            published=0.0,
            ours=powers.of_tokens + powers.of_tokens_half,
            unit="1",
            relation="at_most",
            note=f"Upper end of the exponent of the tokens, {powers.of_tokens:.2f} +- "
            f"{powers.of_tokens_half:.2f}: it must exclude zero.",
        ),
    ]


def metrics(result: Result) -> dict[str, Any]:
    """Gives the exponents with the half widths of their intervals."""
    powers = result.powers
    return {
        "runs": len(result.loss),
        "optima": len(result.best_rate),
        "exponent_of_width": powers.of_width,
        "exponent_of_width_half": powers.of_width_half,
        "exponent_of_tokens": powers.of_tokens,
        "exponent_of_tokens_half": powers.of_tokens_half,
    }


def summary(result: Result) -> list[Part]:
    """Lists the optima."""
    rows = [
        (f"{width:.0f}", f"{tokens:,.0f}", f"{rate:.3g}", f"{rate * width / 32:.3g}")
        for width, tokens, rate in zip(
            *(result.best_width, result.best_num_tokens, result.best_rate), strict=True
        )
    ]
    numbers = [units.named(*item) for item in metrics(result).items()]
    return [
        Sheet("powers through the optima", ("", ""), numbers),
        Sheet("optima", ("width", "tokens", "best rate", "times width / 32"), rows),
    ]
