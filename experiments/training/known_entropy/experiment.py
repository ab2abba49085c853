"""Do models approach a language's entropy as the law says, and never pass it?

Small transformers learn a language whose entropy is exact: a mixture of what follows
the last one, two and three tokens. No loss may lie below the floor, which would mean a
leak; readers of fewer tokens have floors of their own, which the losses pass one by
one. The Chinchilla law is fitted to the losses with its own floor free, and must find
the true one or say that it cannot. Beside it the lectures' first law, without any
network: who counts an independent source pays (V - 1) / 2D nats.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.framework import Ours, Record, beside, column, ours, table
from experiments.plotting import style
from experiments.training.known_entropy.runs import Config, LanguageRuns, train_language
from jaxkv.progress import QUIET, Progress
from scaling.corpora.languages import LanguageConfig, language, markov
from scaling.fits import fit
from scaling.laws import published

PANELS, PANEL_SIZE_INCHES = (2, 1), (6.8, 3.6)

CONFIGS = {
    "cpu": Config(),
    "smoke": Config(
        language=LanguageConfig(kind="kgram", num_tokens=2**15, num_held_out=2**14),
        source=LanguageConfig(kind="zipf", num_tokens=2**15, num_held_out=2**14),
        widths=(8, 16),
        num_layers=1,
        lengths=(2**12, 2**13, 2**14, 2**15),
        fitted_from=0,
        num_windows=256,
        num_resamples=50,
        repeats=200,
    ),
    "gpu": Config(
        language=LanguageConfig(
            kind="kgram",
            vocab_size=64,
            mixture=(0.35, 0.35, 0.30),
            num_tokens=2**26,
            num_held_out=2**20,
        ),
        widths=(16, 32, 64, 128, 256, 512),
        lengths=tuple(2**n for n in range(20, 27)),
        fitted_from=2**22,
        learning_rate=0.01,
        batch_size=128,
        seq_len=64,
        num_windows=2**13,
    ),
}


class ChinchillaFit(Record):
    """The Chinchilla law of the losses, with 90 % intervals."""

    floor: float = column("it found, E, in nats per token")
    floor_low: float = column("where its interval begins")
    floor_high: float = column("where it ends")
    alpha: float = column("exponent of the parameters")
    alpha_low: float = column("where its interval begins")
    alpha_high: float = column("where it ends")
    beta: float = column("exponent of the tokens")
    beta_low: float = column("where its interval begins")
    beta_high: float = column("where it ends")
    identified: bool = column("whether the fit finds nothing to doubt about its floor")
    warnings: str = column("its doubts in words")
    num_points: int = column("runs fitted")

    def covers(self, floor: float) -> bool:
        """Whether the interval is bounded and holds a floor."""
        bounded = bool(np.isfinite([self.floor_low, self.floor_high]).all())
        return bounded and self.floor_low <= floor <= self.floor_high


class CountingExcess(Record):
    """Excess losses of counting."""

    num_tokens: np.ndarray = column("counted")
    excess: np.ndarray = column("mean nats per token over the entropy")
    excess_se: np.ndarray = column("its standard error")
    entropy: float = column("of the source")
    num_free: int = column("its free parameters, V - 1")
    slope: float = column("of ln excess against ln tokens, by a power law")
    slope_low: float = column("where its 90 % interval begins")
    slope_high: float = column("where it ends")


class Result(Record):
    """Losses, floors, fits."""

    runs: LanguageRuns = column("on the language")
    optima: np.ndarray = column(
        "least loss of readers of the last 0, 1, 2, ... tokens; the last is the floor"
    )
    floor_se: float = column("standard error of that")
    fit: ChinchillaFit = column("of the runs long enough")
    fit_all: ChinchillaFit = column("of all runs")
    source_loss: float = column("of the smallest model on the independent source")
    source_excess: float = column("over its entropy on the same tokens")
    counts: CountingExcess = column("of that source")


def run(config: Config, progress: Progress = QUIET) -> Result:
    """Trains, counts and fits."""
    known = language.optima(config.language)
    counts = score_counting(config.source, config.counted, config.repeats)
    longest = (config.source.num_tokens,)
    alone = train_language(config.source, config.widths[:1], longest, config, progress)
    runs = train_language(
        config.language, config.widths, config.lengths, config, progress
    )
    late = runs.num_tokens >= config.fitted_from
    return Result(
        runs=runs,
        optima=np.array([*known.by_order[:-1], known.floor]),
        floor_se=known.floor_se,
        fit=fit_runs(runs, late, config.num_resamples),
        fit_all=fit_runs(runs, np.ones_like(late), config.num_resamples),
        source_loss=float(alone.loss[0]) if len(alone) else np.nan,
        source_excess=float(alone.excess[0]) if len(alone) else np.nan,
        counts=counts,
    )


def score_counting(
    source: LanguageConfig, lengths: tuple[int, ...], repeats: int
) -> CountingExcess:
    """Counts texts of every length, and scores the counts by the true source.

    Who estimates V probabilities from D independent tokens needs, beyond the entropy,
    `(V - 1) / (2 D)` nats for the next token: half a nat for every free parameter. A
    count starts at one half, which is the least that costs no more, in the first
    order, for any source (Krichevsky and Trofimov 1981).
    """
    probs = language.zipf(source.vocab_size, source.exponent)
    entropy = markov.entropy(probs)
    random = np.random.default_rng([source.seed, 4])
    means, errors = [], []
    for length in lengths:
        counts = random.multinomial(length, probs, size=repeats) + 0.5
        estimated = counts / counts.sum(1, keepdims=True)
        excess = -np.log(estimated) @ probs - entropy
        means.append(excess.mean())
        errors.append(excess.std(ddof=1) / repeats**0.5)
    tokens, excess = np.array(lengths, float), np.array(means)
    law, data = published.find("power"), {"num_tokens": tokens, "loss": excess}
    power = fit.fit(law.over("num_tokens"), data, loss="mse")
    low, high = power.intervals["b"]
    return CountingExcess(
        num_tokens=tokens,
        excess=excess,
        excess_se=np.array(errors),
        entropy=entropy,
        num_free=source.vocab_size - 1,
        slope=-power.coefficients["b"],
        slope_low=-high,
        slope_high=-low,
    )


def fit_runs(
    runs: LanguageRuns, chosen: np.ndarray, num_resamples: int
) -> ChinchillaFit:
    """Fits the law with its floor free; nothing where the runs are too few."""
    chosen = chosen & np.isfinite(runs.loss)
    if len({*runs.width[chosen]}) < 2 or chosen.sum() < 6:
        return ChinchillaFit(
            *[float("nan")] * 9, False, "too few runs", int(chosen.sum())
        )
    names = ("num_params", "num_tokens", "loss")
    data = {name: getattr(runs, name)[chosen] for name in names}
    found = fit.fit(published.find("chinchilla"), data, bootstrap=num_resamples)
    ends: list[float] = []
    for name in ("E", "alpha", "beta"):
        ends += [found.coefficients[name], *found.intervals[name]]
    said = any(warning.startswith(("E=", "E ")) for warning in found.warnings)
    free = any(abs(way.get("E", 0)) > 0.1 for way in found.flat_directions)
    return ChinchillaFit(
        *ends,
        identified=not (said or free),
        warnings="; ".join(found.warnings),
        num_points=found.num_points,
    )


def plot(axes: Any, result: Result) -> None:
    """Draws losses with the ladder, and what counting costs."""
    left, right = np.ravel(axes)
    runs, names = result.runs, ["nothing", "1 token", "2 tokens", "3 tokens"]
    lines = zip(result.optima, ("-.", ":", (0, (5, 1)), (0, (1, 1))), strict=False)
    for seen, (optimum, line) in enumerate(lines):
        last = seen == len(result.optima) - 1
        look = {"color": "0" if last else "0.45", "linestyle": "-" if last else line}
        label = "entropy" if last else f"reader of {names[seen]}"
        left.axhline(optimum, label=label, linewidth=1, zorder=0, **look)
    widths = runs.distinct("width")
    marks = zip(widths, style.shades(np.arange(len(widths))), strict=True)
    for i, (width, color) in enumerate(marks):
        mine = runs.where(width=width)
        look = {"color": color, "marker": "os^dvP"[i % 6]}
        label = f"{mine.num_params[0]:,} parameters"
        left.plot(mine.num_tokens, mine.loss, label=label, **look)
    title = "Loss of models, and the entropy below it"
    if np.isfinite(runs.loss).any() and len(result.optima):
        title = f"The best model ends at {np.nanmin(runs.loss):.3f} nats/token, "
        title += f"{np.nanmin(runs.loss) - result.optima[-1]:.3f} above the entropy"
    x, y = "tokens trained on [tokens]", "loss [nats/token]"
    style.titled(left, title, x, y, xscale="log")
    left.legend()
    counts = result.counts
    exact = counts.num_free / 2 / counts.num_tokens
    style.curve(right, counts.num_tokens, exact, 0, "formula", marker="", linewidth=1)
    style.curve(right, counts.num_tokens, counts.excess, 5, "counted", linestyle="")
    title = f"Counting comes near the entropy with slope {counts.slope:.3f}"
    x, y = "tokens counted [tokens]", "loss - entropy [nats/token]"
    style.titled(right, title, x, y, xscale="log", yscale="log")
    right.legend()


@beside(__file__).judges
def claims(result: Result) -> Iterator[Ours]:
    """Holds every loss against the floor, and the fits against the truth."""
    runs, counts, floor = result.runs, result.counts, float(result.optima[-1])
    if not np.isfinite(runs.loss).any():
        return
    far = (runs.loss - floor) / np.hypot(runs.loss_se, result.floor_se)
    yield ours("floor", float(np.nanmin(far)))
    yield ours("paired", float(np.nanmin(runs.excess / runs.excess_se)))
    yield ours("source", 1 + result.source_excess / counts.entropy)
    yield ours("slope", counts.slope)
    tokens = float(counts.num_tokens[-1])
    last, slack = tokens * counts.excess[-1], 4 * tokens * counts.excess_se[-1]
    yield ours("size", last, published=counts.num_free / 2, tolerance=slack)
    for which, law in {"long runs": result.fit, "all runs": result.fit_all}.items():
        honest = float(law.covers(floor) or not law.identified)
        said = "identified" if law.identified else "not identified"
        yield ours("fitted", honest, which=which, fit=law, truth=floor, said=said)


def metrics(result: Result) -> dict[str, Any]:
    """Gives the floor, the fits and the best run."""
    runs, best = result.runs, {"best_loss": None, "best_num_params": None}
    if np.isfinite(runs.loss).any():
        at = np.nanargmin(runs.loss)
        best = {"best_loss": runs.loss[at], "best_num_params": runs.num_params[at]}
    return {
        "floor": float(result.optima[-1]),
        "optima": {f"who sees {seen}": loss for seen, loss in enumerate(result.optima)},
        **best,
        "fit": table.metrics(result.fit),
        "fit_all": table.metrics(result.fit_all),
        "source_excess": result.source_excess,
        "counting_slope": result.counts.slope,
    }
