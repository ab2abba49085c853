"""Measures how the best learning rate depends on the width of a model.

Models of several widths are trained on real text for two numbers of tokens, each at
learning rates a factor of 2 apart, until the best one is not at the end of the grid.
The optimum of each follows from a parabola, and a power law of width and tokens is
fitted to the optima.

Source: the form is that of Li et al. 2025 (Step Law), arXiv:2503.04715, section 3.
"""

from collections.abc import Iterator
from typing import Annotated

import numpy as np

from experiments import lab
from jaxkv import files
from scaling.corpora import STANDARD_LIBRARY, CorpusConfig
from scaling.sweeps import (
    BASE_WIDTH,
    RatePowers,
    SweepConfig,
    fit_powers,
    make_sweep,
    optimal_rates,
    run_logged_sweep,
)


class Config(lab.ConfigRecord):
    """Widths, tokens and learning rates."""

    widths: Annotated[tuple[int, ...], lab.Entries(2)]
    num_tokens: Annotated[tuple[int, ...], lab.Entries(2)]
    """Trained tokens; each width is trained on each."""
    num_layers: int = 2
    corpus: CorpusConfig = STANDARD_LIBRARY
    learning_rates: Annotated[tuple[float, ...], lab.Entries(2)] = (
        1.5e-3,
        3e-3,
        6e-3,
        1.2e-2,
    )
    """Learning rates of width 32; other widths scale them by 32 / width, and add rates
    beyond the best one if it is at the end of the grid."""
    max_extensions: int = 3
    batch_size: int = 8
    seq_len: int = 64
    warmup_steps: int = 50
    num_eval_windows: int = 1024
    seed: int = 0
    level: Annotated[float, lab.Range(0, 1, "()")] = 0.9
    """Probability of the intervals."""
    folder: str = ""
    """Folder of runs to resume a sweep from; empty: not kept."""

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        _ = self.sweep  # validates the remaining fields

    @property
    def sweep(self) -> SweepConfig:
        """Sweep of the runs."""
        return make_sweep(vars(self) | {"seeds": (self.seed,), "min_steps": 1})


CONFIGS = {
    "smoke": Config(
        widths=(4, 8),
        num_tokens=(4096, 8192),
        num_layers=1,
        corpus=CorpusConfig(held_out=0.02),
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


class RateRuns(lab.ResultTable):
    """Finished runs."""

    width: lab.Floats = lab.column("hidden size")
    num_tokens: lab.Floats = lab.column("trained tokens")
    learning_rate: lab.Floats = lab.column("peak learning rate")
    loss: lab.Floats = lab.column("nats per token of held-out text")


class OptimalRates(lab.ResultTable):
    """Best learning rate of every width and number of tokens that has one."""

    width: lab.Floats = lab.column("hidden size", form="{:.0f}")
    num_tokens: lab.Floats = lab.column("trained", heading="tokens", form="{:,.0f}")
    rate: lab.Floats = lab.column("best rate", heading="best rate", form="{:.3g}")

    @property
    @lab.computed_column(heading="times width / 32", form="{:.3g}")
    def relative(self) -> np.ndarray:
        """Equivalent learning rate of the base width."""
        return self.rate * self.width / BASE_WIDTH


class Result(lab.ResultRecord):
    """Finished runs, optima, and the fitted power law."""

    runs: RateRuns = lab.column("finished runs", prefix="")
    best: OptimalRates = lab.column("optima inside the grid", prefix="best_")
    powers: RatePowers = lab.column("power law through the optima")
    level: float = lab.column("probability of the intervals")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Trains or resumes the sweep, then fits; if stopped, uses the finished runs."""
    with files.folder_or_temporary(config.folder) as folder:
        records = run_logged_sweep(config.sweep, folder, progress).records
    rows = [row for row in records if row["status"] == "done"]
    names = ("hidden_size", "num_tokens", "learning_rate", "loss")
    best = OptimalRates.of(optimal_rates(rows) if rows else [])
    return Result(
        runs=RateRuns.of([row[name] for name in names] for row in rows),
        best=best,
        powers=fit_powers(best.width, best.num_tokens, best.rate, level=config.level),
        level=config.level,
    )


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws loss by learning rate, and the best rate by width."""
    left, right = axes
    runs = result.runs
    powers = result.powers
    tokens = np.unique(runs.num_tokens)
    widths = np.unique(runs.width)
    shades = lab.sequential_colors(np.log(widths))
    for i, (width, color) in enumerate(zip(widths, shades, strict=True)):
        for line, number in zip(("--", "-"), (tokens[0], tokens[-1]), strict=True):
            subset = runs.where(width=width, num_tokens=number)
            subset = subset.at(np.argsort(subset.learning_rate))
            label = f"width {width:.0f}" if line == "-" else None
            look = {"color": color, "marker": "os^dvP"[i % 6], "linestyle": line}
            left.plot(subset.learning_rate, subset.loss, label=label, **look)
    title = "Held-out loss by learning rate"
    if len(runs):
        best = [runs.where(width=x, num_tokens=tokens[-1]) for x in widths]
        rates = [x.learning_rate[int(np.nanargmin(x.loss))] for x in best]
        title = (
            f"Best rate: {rates[0]:.2g} at width {widths[0]:.0f}, {rates[-1]:.2g} at "
        )
        title += f"width {widths[-1]:.0f}"
        words = zip(("--", "-"), (tokens[0], tokens[-1]), strict=True)
        for line, number in words:
            label = f"{number:,.0f} tokens"
            left.plot([], [], color="0.45", linestyle=line, label=label)
    x = "learning rate [1]"
    y = "held-out loss [nats/token]"
    lab.set_labels(left, title, x, y, xscale="log")
    is_known = bool(np.isfinite(powers.of_width))
    looks = zip(tokens, ((5, "o"), (1, "s"), (3, "^"), (6, "d")), strict=False)
    for number, (color, mark) in looks:
        subset = result.best.where(num_tokens=number)
        look = {"marker": mark, "linestyle": "", "markersize": 6}
        lab.draw_curve(
            right, subset.width, subset.rate, color, f"{number:,.0f} tokens", **look
        )
        if is_known:
            x = np.geomspace(*widths[[0, -1]])
            law = powers.coefficient * x**powers.of_width * number**powers.of_tokens
            lab.draw_curve(right, x, law, color, marker="")
    title = (
        f"Best rate falls as width^{powers.of_width:.2f} tokens^{powers.of_tokens:.2f}"
    )
    title = title if is_known else "Best learning rate: too few optima"
    x = "width [features]"
    y = "best learning rate [1]"
    lab.set_labels(right, title, x, y, xscale="log", yscale="log")
    lab.label_log_axis(right.yaxis)
    right.set_xticks(widths, [f"{width:.0f}" for width in widths])
    right.set_xticks([], minor=True)
    for ax in axes:
        ax.legend()


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares the exponents with published rules."""
    powers = result.powers
    if not np.isfinite(powers.of_width):
        return
    exponent = powers.of_width
    half = powers.of_width_half
    yield lab.measured("width", exponent, tolerance=half, half=half, level=result.level)
    exponent = powers.of_tokens
    half = powers.of_tokens_half
    yield lab.measured("tokens", exponent + half, exponent=exponent, half=half)


def metrics(result: Result) -> dict[str, object]:
    """Returns the exponents with the half widths of their intervals."""
    powers = result.powers._asdict()
    del powers["coefficient"]
    return {
        "runs": len(result.runs),
        "optima": len(result.best),
        **{f"exponent_{name}": x for name, x in powers.items()},
    }


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of the power law and the optima."""
    numbers = [lab.format_named(*item) for item in metrics(result).items()]
    powers = lab.Sheet("powers through the optima", ("", ""), numbers)
    return [powers, result.best.sheet("optima")]


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, metrics, panels=lab.Panels(1, 2, 3.8)
)
