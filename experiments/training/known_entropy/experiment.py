"""Trains models on a language of known entropy.

Small transformers learn a language with an exact entropy, a mixture of distributions
given the last 1, 2 and 3 tokens. A loss below the floor would show a leak. Predictors
that see fewer tokens have higher floors, which the losses pass in turn. The Chinchilla
law is fitted with its floor free, and must either find the true floor or report that it
is not identified. In addition, the lectures' first law is tested without a network: an
estimate by counting costs (V - 1) / 2D nats per token.
"""

from collections.abc import Iterator

import numpy as np

from experiments import lab
from experiments.training.known_entropy.runs import Config, LanguageRuns, train_language
from scaling import corpora, fits
from scaling.corpora import LanguageConfig, optimal_loss, zipf_probabilities
from scaling.laws import find_law

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


class ChinchillaFit(lab.ResultRecord):
    """Fitted Chinchilla law with 90 % intervals."""

    floor: float = lab.column("floor E in nats per token")
    floor_low: float = lab.column("lower end of its interval")
    floor_high: float = lab.column("upper end of its interval")
    alpha: float = lab.column("exponent of the parameters")
    alpha_low: float = lab.column("lower end of its interval")
    alpha_high: float = lab.column("upper end of its interval")
    beta: float = lab.column("exponent of the tokens")
    beta_low: float = lab.column("lower end of its interval")
    beta_high: float = lab.column("upper end of its interval")
    identified: bool = lab.column("True if the fit has no warning about its floor")
    warnings: str = lab.column("warnings of the fit")
    num_points: int = lab.column("fitted runs")

    def covers(self, floor: float) -> bool:
        """Returns True if the interval is bounded and contains a floor."""
        bounded = bool(np.isfinite([self.floor_low, self.floor_high]).all())
        return bounded and self.floor_low <= floor <= self.floor_high


class CountingExcess(lab.ResultRecord):
    """Excess loss of estimates by counting."""

    num_tokens: np.ndarray = lab.column("counted tokens")
    excess: np.ndarray = lab.column("mean nats per token above the entropy")
    excess_se: np.ndarray = lab.column("standard error of the excess")
    entropy: float = lab.column("entropy of the source")
    num_free: int = lab.column("free parameters of the source, V - 1")
    slope: float = lab.column("slope of ln excess against ln tokens, by a power law")
    slope_low: float = lab.column("lower end of its 90 % interval")
    slope_high: float = lab.column("upper end of its 90 % interval")


class Result(lab.ResultRecord):
    """Losses, floors and fits."""

    runs: LanguageRuns = lab.column("runs on the language")
    optima: np.ndarray = lab.column(
        "least loss given the last 0, 1, 2, ... tokens; the last is the floor"
    )
    floor_se: float = lab.column("standard error of the floor")
    fit: ChinchillaFit = lab.column("fit of the long runs")
    fit_all: ChinchillaFit = lab.column("fit of all runs")
    source_loss: float = lab.column(
        "loss of the smallest model on the independent source"
    )
    source_excess: float = lab.column("its excess over the entropy of the same tokens")
    counts: CountingExcess = lab.column("counting of that source")


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Trains, counts and fits."""
    optimum = optimal_loss(config.language)
    counts = score_counting(config.source, config.counted, config.repeats)
    longest = (config.source.num_tokens,)
    smallest = train_language(
        config.source, config.widths[:1], longest, config, progress
    )
    runs = train_language(
        config.language, config.widths, config.lengths, config, progress
    )
    late = runs.num_tokens >= config.fitted_from
    return Result(
        runs=runs,
        optima=np.array([*optimum.by_order[:-1], optimum.floor]),
        floor_se=optimum.floor_se,
        fit=fit_runs(runs, late, config.num_resamples),
        fit_all=fit_runs(runs, np.ones_like(late), config.num_resamples),
        source_loss=float(smallest.loss[0]) if len(smallest) else np.nan,
        source_excess=float(smallest.excess[0]) if len(smallest) else np.nan,
        counts=counts,
    )


def score_counting(
    source: LanguageConfig, lengths: tuple[int, ...], repeats: int
) -> CountingExcess:
    """Estimates the source from texts of every length, and scores the estimates.

    An estimate of V probabilities from D independent tokens costs `(V - 1) / (2 D)`
    nats per token above the entropy: half a nat for every free parameter. Counts start
    at one half, the optimum in first order for any source (Krichevsky and Trofimov
    1981).
    """
    probs = zipf_probabilities(source.vocab_size, source.exponent)
    entropy = corpora.entropy(probs)
    random = np.random.default_rng([source.seed, 4])
    means = []
    errors = []
    for length in lengths:
        counts = random.multinomial(length, probs, size=repeats) + 0.5
        estimated = counts / counts.sum(1, keepdims=True)
        excess = -np.log(estimated) @ probs - entropy
        means.append(excess.mean())
        errors.append(excess.std(ddof=1) / repeats**0.5)
    tokens = np.array(lengths, float)
    excess = np.array(means)
    law = find_law("power")
    data = {"num_tokens": tokens, "loss": excess}
    power = fits.fit(law.over("num_tokens"), data, objective=fits.Objective("mse"))
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
    """Fits the law with its floor free; returns NaN if there are too few runs."""
    chosen = chosen & np.isfinite(runs.loss)
    if len({*runs.width[chosen]}) < 2 or chosen.sum() < 6:
        return ChinchillaFit(
            *[float("nan")] * 9, False, "too few runs", int(chosen.sum())
        )
    names = ("num_params", "num_tokens", "loss")
    data = {name: getattr(runs, name)[chosen] for name in names}
    fit = fits.fit(find_law("chinchilla"), data)
    fit = fits.bootstrap(fit, data, num_resamples=num_resamples)
    ends: list[float] = []
    for name in ("E", "alpha", "beta"):
        ends += [fit.coefficients[name], *fit.intervals[name]]
    has_floor_warning = any(
        warning.startswith(("E=", "E ")) for warning in fit.warnings
    )
    free = any(abs(direction.get("E", 0)) > 0.1 for direction in fit.flat_directions)
    return ChinchillaFit(
        *ends,
        identified=not (has_floor_warning or free),
        warnings="; ".join(fit.warnings),
        num_points=fit.num_points,
    )


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws losses by tokens with the entropies, and the excess of counting."""
    left, right = np.ravel(axes)
    runs = result.runs
    names = ["0 tokens", "1 token", "2 tokens", "3 tokens"]
    lines = zip(result.optima, ("-.", ":", (0, (5, 1)), (0, (1, 1))), strict=False)
    for context, (optimum, line) in enumerate(lines):
        last = context == len(result.optima) - 1
        look = {"color": "0" if last else "0.45", "linestyle": "-" if last else line}
        label = "entropy" if last else f"context of {names[context]}"
        left.axhline(optimum, label=label, linewidth=1, zorder=0, **look)
    widths = runs.distinct("width")
    marks = zip(widths, lab.sequential_colors(np.arange(len(widths))), strict=True)
    for i, (width, color) in enumerate(marks):
        subset = runs.where(width=width)
        look = {"color": color, "marker": "os^dvP"[i % 6]}
        label = f"{subset.num_params[0]:,} parameters"
        left.plot(subset.num_tokens, subset.loss, label=label, **look)
    title = "Loss of models, and the entropy below it"
    if np.isfinite(runs.loss).any() and len(result.optima):
        title = f"The best model ends at {np.nanmin(runs.loss):.3f} nats/token, "
        title += f"{np.nanmin(runs.loss) - result.optima[-1]:.3f} above the entropy"
    x = "tokens trained on [tokens]"
    y = "loss [nats/token]"
    lab.set_labels(left, title, x, y, xscale="log")
    left.legend()
    counts = result.counts
    exact = counts.num_free / 2 / counts.num_tokens
    lab.draw_curve(
        right, counts.num_tokens, exact, 0, "formula", marker="", linewidth=1
    )
    lab.draw_curve(right, counts.num_tokens, counts.excess, 5, "counted", linestyle="")
    title = f"Counting approaches the entropy with slope {counts.slope:.3f}"
    x = "tokens counted [tokens]"
    y = "loss - entropy [nats/token]"
    lab.set_labels(right, title, x, y, xscale="log", yscale="log")
    right.legend()


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares every loss with the floor, and the fits with the truth."""
    runs = result.runs
    counts = result.counts
    floor = float(result.optima[-1])
    if not np.isfinite(runs.loss).any():
        return
    far = (runs.loss - floor) / np.hypot(runs.loss_se, result.floor_se)
    yield lab.measured("floor", float(np.nanmin(far)))
    yield lab.measured("paired", float(np.nanmin(runs.excess / runs.excess_se)))
    yield lab.measured("source", 1 + result.source_excess / counts.entropy)
    yield lab.measured("slope", counts.slope)
    tokens = float(counts.num_tokens[-1])
    last = tokens * counts.excess[-1]
    slack = 4 * tokens * counts.excess_se[-1]
    yield lab.measured("size", last, published=counts.num_free / 2, tolerance=slack)
    for which, law in {"long runs": result.fit, "all runs": result.fit_all}.items():
        honest = float(law.covers(floor) or not law.identified)
        status = "identified" if law.identified else "not identified"
        yield lab.measured(
            "fitted", honest, which=which, fit=law, truth=floor, status=status
        )


def metrics(result: Result) -> dict[str, object]:
    """Returns the floor, the fits and the best run."""
    runs = result.runs
    best = {"best_loss": None, "best_num_params": None}
    if np.isfinite(runs.loss).any():
        at = np.nanargmin(runs.loss)
        best = {"best_loss": runs.loss[at], "best_num_params": runs.num_params[at]}
    return {
        "floor": float(result.optima[-1]),
        "optima": {
            f"who sees {context}": loss for context, loss in enumerate(result.optima)
        },
        **best,
        "fit": lab.metrics(result.fit),
        "fit_all": lab.metrics(result.fit_all),
        "source_excess": result.source_excess,
        "counting_slope": result.counts.slope,
    }


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, metrics=metrics, panels=lab.Panels(2, 1, 3.6)
)
