"""Compares mixtures of experts with dense models of equal active compute.

For each width a dense model and a mixture of equal active parameters are trained. Both
see the same text in the same order, with learning rates tuned in the same way at the
smallest widths, and are scored on the same held-out windows. A power law of loss by
compute is fitted to each kind, which gives the compute ratio at equal loss.

The mixture has more parameters, which active compute does not count: they need memory,
and serving reads every expert that a token of the batch is routed to.
"""

import contextlib
import functools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments import lab
from experiments.harness import (
    RATE_HEADS,
    direction_verdict,
    format_interval,
    format_rates,
    judge_direction,
)
from experiments.training.experts import runs
from experiments.training.experts.runs import PAIR, Config, Shapes, TrainingRun
from jaxkv import models
from jaxkv.models import Experts
from scaling.fits import Objective, bootstrap, compare, predict
from scaling.fits import fit as fit_law
from scaling.laws import find_law
from scaling.sweeps import Workers, open_on_device

CONFIGS = {
    "smoke": Config(
        widths=(8, 16, 24),
        num_tuned=0,
        learning_rates=(1e-2,),
        num_repeated=0,
        shapes=Shapes(num_layers=1, num_experts=4, seq_len=32, tokens_per_param=1.0),
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
BALANCING = ("with", "without")


class PairRuns(lab.ResultTable):
    """All training runs."""

    kind: lab.Texts = lab.column("a `runs.Kind`")
    width: lab.Ints = lab.column("hidden size")
    learning_rate: lab.Floats = lab.column(
        "peak at that width", heading="rate", form="{:.2g}"
    )
    seed: lab.Ints = lab.column("seed of parameters and data order")
    num_params: lab.Ints = lab.column("parameters of all experts", heading="parameters")
    num_active: lab.Ints = lab.column("active parameters of a token", heading="active")
    num_tokens: lab.Ints = lab.column("trained tokens", heading="tokens")
    flops: lab.Floats = lab.column(
        "active FLOPs, causal attention",
        heading="compute",
        form=lab.format_flops,
    )
    loss: lab.Floats = lab.column("nats per token of held-out text", form="{:.3f}")
    loss_se: lab.Floats = lab.column(
        "of the loss", heading="standard error", form="{:.3f}"
    )
    seconds: lab.Floats = lab.column(
        "of training", heading="time", form=lab.format_seconds
    )
    is_fitted: lab.Bools = lab.column(
        "True at the chosen rate, unless without the balancing loss", heading="fitted"
    )


class Laws(lab.ResultTable):
    """Power laws of loss by compute, with 90 % intervals."""

    kind: lab.Texts = lab.column("dense or mixture")
    runs: lab.Ints = lab.column("fitted runs")
    exponent: lab.Floats = lab.column("exponent of compute, negative", form="{:.3f}")
    low: lab.Floats = lab.column("lower end of its interval", form="{:.3f}")
    high: lab.Floats = lab.column("upper end of its interval", form="{:.3f}")


class LoadImbalance(lab.ResultTable):
    """Load imbalance of the experts of two runs, relative to the mean load."""

    balancing: lab.Texts = lab.column(
        "with or without the loss", heading="balancing loss"
    )
    layer: lab.Ints = lab.column("layer, from 1")
    busiest: lab.Floats = lab.column("largest load of an expert", form="{:.2f}")
    variation: lab.Floats = lab.column("standard deviation of loads", form="{:.2f}")
    idle: lab.Floats = lab.column(
        "without tokens", heading="idle experts", form=lab.format_percent
    )


class Result(lab.ResultRecord):
    """All runs, fitted laws, and expert loads."""

    runs: PairRuns = lab.column("finished runs", prefix="")
    loads: Float[np.ndarray, "2 mixtures experts"] = lab.column(
        "with and without the balancing loss: share of held-out tokens over the mean, "
        "1 if even"
    )
    curve_flops: np.ndarray = lab.column("compute of the drawn laws")
    curve_loss: Float[np.ndarray, "2 points 3"] = lab.column(
        "dense and mixture: fitted law and its 90 % interval"
    )
    slope: Float[np.ndarray, "2 3"] = lab.column(
        "exponent of compute, with its interval"
    )
    ratio: Float[np.ndarray, "3"] = lab.column(
        "compute of dense models over that of mixtures at the middle of the losses "
        "that both reached, with its interval"
    )
    routing_error: float = lab.column(
        "largest difference between the shares of a trained router and the formula"
    )

    @property
    @lab.computed_column()
    def laws(self) -> Laws:
        """Fitted law of each kind."""
        counts = [len(self.runs.where(kind=kind, is_fitted=True)) for kind in PAIR]
        return Laws(np.array(PAIR), np.array(counts), *self.slope.T)

    @property
    @lab.computed_column()
    def imbalance(self) -> LoadImbalance:
        """Load imbalance by layer; empty if stopped before."""
        rows = []
        for name, loads in zip(BALANCING, self.loads, strict=True):
            if not loads.size:
                continue
            one = models.imbalance(jnp.asarray(loads, jnp.float32))
            for layer, values in enumerate(zip(*one, strict=True), 1):
                rows.append((name, layer, *map(float, values)))
        return LoadImbalance.of(rows)


def run(config: Config, progress: lab.Progress = lab.QUIET) -> Result:
    """Trains all pairs, then fits; if stopped, keeps the finished runs."""
    training_runs: list[TrainingRun] = []
    corpus = open_on_device(config.corpus)
    jobs = (*runs.tuning_jobs(config), *runs.remaining_jobs(config, ()))
    workers = Workers(
        corpus,
        functools.partial(runs.score_mixture, corpus, config.num_windows),
        progress,
        num_steps=sum(
            runs.steps_for_width(width, config.shapes) for _, width, *_ in jobs
        ),
        num_threads=config.num_threads,
    )
    train = functools.partial(runs.train_expert_model, config=config, workers=workers)
    training_runs += workers.map(train, runs.tuning_jobs(config))
    # The rates of the remaining jobs follow from the tuning runs.
    training_runs += workers.map(train, runs.remaining_jobs(config, training_runs))
    rates = runs.best_rates(config, training_runs)
    rows = [
        row | {"is_fitted": kind in PAIR and rate == config.scaled(rates[kind], width)}
        for row in (training_run.row for training_run in training_runs)
        for kind, width, rate in [(row["kind"], row["width"], row["learning_rate"])]
    ]
    all_runs = PairRuns.of(rows)
    top_k = config.shapes.top_k
    is_whole = len({(x["kind"], x["width"]) for x in rows}) >= 2 * len(config.widths)
    routers = [x.score.router for x in training_runs if x.row["kind"] == "mixture"]
    # Loads relative to their mean; empty unless both kinds were trained.
    by_kind = [
        [run.score.loads for run in training_runs if run.is_of(kind, config.shown)]
        for kind in ("mixture", "unbalanced")
    ]
    loads = np.zeros((2, 0, 0))
    if all(by_kind):
        loads = np.stack([first for first, *_ in by_kind])
        loads = loads / loads.mean(axis=2, keepdims=True)
    return Result(
        runs=all_runs,
        **fit_both(all_runs, config.num_resamples if is_whole else 0),
        loads=loads,
        routing_error=routing_error(routers[-1], top_k=top_k) if routers else np.nan,
    )


def fit_both(fitted: PairRuns, num_resamples: int) -> dict[str, np.ndarray]:
    """Fits a power law of compute to each kind; returns NaN without resamples."""
    curves = np.full((2, 0, 3), np.nan)
    slopes = np.full((2, 3), np.nan)
    grid = np.zeros(0)
    ratio = np.full(3, np.nan)
    if num_resamples:
        used = fitted.where(is_fitted=True)
        law = find_law("power").over("flops")
        grid = np.geomspace(used.flops.min(), used.flops.max(), 50)
        curves = np.full((2, 50, 3), np.nan)
        fits = []
        for i, subset in enumerate(used.where(kind=kind) for kind in PAIR):
            data = {"flops": subset.flops, "loss": subset.loss}
            one = fit_law(law, data, objective=Objective("mse"))
            one = bootstrap(one, data, num_resamples=num_resamples)
            curves[i] = np.stack(predict(one, {"flops": grid}, "confidence"), 1)
            low, high = one.intervals["b"]
            slopes[i] = (-one.coefficients["b"], -high, -low)
            fits.append(one)
        dense, mixture = fits
        with contextlib.suppress(ValueError):  # no loss that both reached
            both = compare(mixture, dense)
            ratio = np.stack(both[1:])[:, len(both.loss) // 2]
    curve_arrays = {"curve_flops": grid, "curve_loss": curves}
    return curve_arrays | {"slope": slopes, "ratio": ratio}


def routing_error(router: np.ndarray, *, top_k: int) -> float:
    """Compares the shares of a router with the lecture's formula in float64.

    Args:
      router: weights, `[experts, hidden]`.
      top_k: experts per token.

    Returns:
      The largest difference over 4,096 random inputs. The share of expert i among the
      chosen set T is g_i = p_i / sum_{j in T} p_j with p = softmax(W x).
    """
    x = np.random.default_rng(0).normal(size=(4096, router.shape[1])).astype("f4")
    scores = (x.astype("f8") @ router.T.astype("f8")).astype("f4")
    rules = Experts(num_experts=len(router), top_k=top_k, size=1)
    routing = models.route(jnp.asarray(scores), rules)
    p = np.exp(scores.astype("f8"))
    p /= p.sum(axis=1, keepdims=True)
    chosen = np.argsort(-p, axis=1, kind="stable")[:, :top_k]
    of_chosen = np.take_along_axis(p, chosen, axis=1)
    wanted = np.zeros_like(p)
    shares = np.zeros_like(p)
    np.put_along_axis(wanted, chosen, of_chosen / of_chosen.sum(1, keepdims=True), 1)
    np.put_along_axis(shares, np.asarray(routing.expert), np.asarray(routing.share), 1)
    return float(np.abs(shares - wanted).max())


@lab.claims_file(__file__).judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares routing, gain and balance with expected and published values."""
    yield lab.measured("shares", result.routing_error)
    ratio, *ends = result.ratio.tolist()
    shown = judge_direction(*ends)
    yield lab.measured(
        "gain",
        ratio,
        direction=direction_verdict(shown),
        interval=format_interval(*ends),
        shown=shown,
    )
    if result.loads.size:
        balanced, free = result.loads.max(axis=2).mean(axis=1).tolist()
        yield lab.measured("balance", balanced, published=free)


def metrics(result: Result) -> dict[str, object]:
    """Returns laws, the compute ratio, the imbalance, and every run."""
    names = ("ratio", "ratio_low", "ratio_high")
    ratios = dict(zip(names, result.ratio.tolist(), strict=True))
    return lab.metrics(result) | ratios


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of laws, gain, imbalance and runs."""
    ratio, *ends = result.ratio
    gain = (format_interval(*ends), judge_direction(*ends))
    rates = _rates(result.runs)
    return [
        result.laws.sheet(
            "laws of loss by active compute, factor * FLOP ^ exponent",
            note="Fitted to the runs at each kind's best learning rate; 90 % intervals "
            "by resampling runs, including seeds.",
        ),
        lab.Sheet(
            "compute of dense models over the mixtures', to equal loss",
            ("ratio", "90 %", "mixtures need less"),
            [(f"{ratio:.2f}", *gain)],
            "At the middle of the losses that both reached. Active compute leaves out "
            "experts that a token is not routed to.",
        ),
        result.imbalance.sheet(
            "load of the experts, held-out tokens",
            note="Largest load and standard deviation over the mean, for one pair of "
            "runs. A token's shares differ from the formula by at most "
            f"{result.routing_error:.1e}.",
        ),
        *([rates] if rates.rows else []),
        result.runs.sheet(
            "runs",
            note="The standard error is that of the held-out text, shared by all runs.",
        ),
    ]


def _rates(pair_runs: PairRuns) -> lab.Sheet:
    """Returns a table of the rates tried with the first seed, if there were several."""
    rows = []
    for kind in PAIR:
        for width in sorted(pair_runs.distinct("width")):
            subset = pair_runs.where(kind=kind, width=width, seed=0)
            if len(subset) > 1:
                taken = subset.where(is_fitted=True).learning_rate[0]
                cells = format_rates(subset.learning_rate, subset.loss, taken)
                rows.append((kind, str(width), *cells))
    return lab.Sheet(
        "learning rates tried",
        ("kind", "width", *RATE_HEADS),
        rows,
        "The chosen rate is the best on average over the tuned widths; other widths "
        "use it in inverse proportion to their size.",
    )


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws the runs with their laws, and the expert loads of a pair."""
    from matplotlib import ticker

    left, right = axes
    for i, kind in enumerate(PAIR):
        subset = result.runs.where(kind=kind)
        fitted, other_rates = (subset.where(is_fitted=x) for x in (True, False))
        lab.draw_curve(left, fitted.flops, fitted.loss, kind, kind, linestyle="")
        look = {"linestyle": "", "marker": "x"}
        lab.draw_curve(
            left, other_rates.flops, other_rates.loss, kind, alpha=0.5, **look
        )
        if result.curve_flops.size:
            at, low, high = result.curve_loss[i].T
            lab.draw_curve(left, result.curve_flops, at, kind, marker="")
            color = lab.system_style(kind).color
            lab.shade_band(left, result.curve_flops, low, high, color, 0.15)
    left.plot([], [], "x", color="0.5", label="other rates")
    title = "Loss by compute, laws with 90 % intervals"
    if result.curve_flops.size:
        losses = [result.curve_loss[i][-1, 0] for i in range(len(PAIR))]
        ends = [f"{kind} {loss:.2f}" for kind, loss in zip(PAIR, losses, strict=True)]
        title = f"With most compute: {', '.join(ends)} nats/byte (bands: 90 %)"
    x = "training compute [FLOP]"
    y = "held-out loss [nats/byte]"
    lab.set_labels(left, title, x, y, xscale="log", yscale="log")
    lab.label_wide_log_axis(left.xaxis)
    lab.label_log_axis(left.yaxis)
    left.legend()
    peak = []
    for name, loads in zip(BALANCING, result.loads, strict=True):
        system = f"{name} balancing"
        peak.append(float(np.max(loads, initial=0.0)))
        for layer, load in enumerate(loads, 1):
            place = range(1, len(load) + 1)
            label = f"{system}, layer {layer}"
            look = {"linestyle": ("-", "--", ":", "-.")[(layer - 1) % 4]}
            lab.draw_curve(right, place, np.sort(load)[::-1], system, label, **look)
    lab.draw_reference_line(right, 1, "mean")
    right.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    title = f"The busiest expert has {peak[0]:.1f} times the mean load with balancing, "
    title += f"{peak[1]:.1f} without"
    lab.set_labels(right, title, "expert, busiest first [1]", "load / mean [ratio]")
    right.set_ylim(bottom=0)
    if result.loads.size:
        right.legend()


STUDY = lab.Study(
    CONFIGS, Result, run, plot, claims, summary, metrics, panels=lab.Panels(1, 2, 3.8)
)
