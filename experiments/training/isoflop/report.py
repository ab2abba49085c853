"""Claims, metrics and tables of `isoflop`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments import lab
from experiments.training.isoflop.outcomes import Result

CLAIMS = lab.claims_file(__file__)
PUBLISHED_EXPONENT: float = CLAIMS.published("exponent")
"""Published exponent of the compute-optimal size, about one half."""


@CLAIMS.judge
def claims(result: Result) -> Iterator[lab.MeasuredValue]:
    """Compares minima, exponent and prediction with expected values."""
    stats = metrics(result)
    ends = [stats[f"exponent_{x}"] for x in ("low", "high")]
    yield lab.measured("minima", stats["interior_minima"])
    yield lab.measured(
        "exponent", max(ends, key=lambda x: abs(x - PUBLISHED_EXPONENT)), **stats
    )
    yield lab.measured("cosine", -stats["cosine_excess"], **stats)
    if result.truth:
        missed = abs(stats["log_linear_error_share"])
        share = abs(stats["error_share"])
        yield lab.measured("prediction", share, log_linear_miss=missed, **stats)
        yield lab.measured("interval", float(stats["is_inside"]), **stats)


_PREDICTED = (
    *("largest_fitted_flops", "best_fitted_loss", "predicted", "level", "low", "high"),
    *("log_linear", "seed_spread"),
)
"""Keys of `prediction.json` that are reported under the same name."""


def metrics(result: Result) -> dict[str, Any]:
    """Returns metrics of the sweep, the prediction and the held-out run."""
    predicted = result.predicted
    fit = json.loads(result.fit.document)
    by_method = {x["method"]: x for x in fit["frontiers"]}
    parabola = by_method["parabola"]
    rows = [json.loads(line) for line in result.runs.splitlines()]
    cosine = json.loads(result.cosine)
    ratios = np.array(cosine["log_ratios"])
    envelopes = [x for x in cosine["frontiers"] if x["method"] == "envelope"]
    a = parabola["a"] if parabola["a"] is not None else np.nan
    low, high = parabola["a_interval"] or (np.nan, np.nan)
    stats = {
        "runs": len(rows),
        "diverged": sum(row["status"] == "diverged" for row in rows),
        "budgets": parabola["num_budgets"],
        "interior_minima": parabola["num_minima"],
        "exponent": a,
        "exponent_low": low,
        "exponent_high": high,
        "envelope_exponent": envelopes[0]["a"] if envelopes else None,
        "cosine_runs": ratios.size,
        "cosine_excess": float(ratios.mean()),
        "cosine_excess_se": float(ratios.std(ddof=1) / ratios.size**0.5),
        "law_exponent": fit["exponents"]["a"],
        "law": fit["law"],
        "held_out_width": predicted["width"],
        "held_out_params": predicted["num_params"],
        "held_out_tokens": predicted["num_tokens"],
        "held_out_flops": predicted["flops"],
        "held_out_factor": predicted["flops"] / predicted["largest_fitted_flops"],
        **{name: predicted[name] for name in _PREDICTED},
        "seconds_of_fitted_runs": sum(row["seconds"] for row in rows),
    }
    if not result.truth:
        return stats
    truth = result.truth["loss"]
    gain = predicted["best_fitted_loss"] - truth
    return stats | {
        "truth": truth,
        "tried": result.truth["tried"],
        "truth_se": result.truth["loss_se"],
        "truth_seconds": result.truth["seconds"],
        "gain": gain,
        "error_share": (predicted["predicted"] - truth) / gain,
        "log_linear_error_share": (predicted["log_linear"] - truth) / gain,
        "is_inside": bool(predicted["low"] <= truth <= predicted["high"]),
    }


def summary(result: Result) -> list[lab.ReportPart]:
    """Returns tables of the approaches, the budgets and the prediction."""
    stats = metrics(result)
    return [_approaches(result, stats), _budgets(result), _prediction(result, stats)]


def _approaches(result: Result, stats: dict[str, Any]) -> lab.Sheet:
    fit = json.loads(result.fit.document)
    cosine = json.loads(result.cosine)
    every = [(frontier, "cosine") for frontier in cosine["frontiers"]]
    every += [(frontier, "constant, then falling") for frontier in fit["frontiers"]]
    rows = [
        (
            "1" if frontier["method"] == "envelope" else "2",
            frontier["method"],
            schedule,
            f"{frontier['num_minima']} of {frontier['num_budgets']}",
            _with_interval(frontier["a"], frontier["a_interval"]),
            _with_interval(frontier["b"], frontier["b_interval"]),
        )
        for frontier, schedule in every
    ]
    a, b = (
        _with_interval(fit["exponents"][x], fit["exponent_intervals"].get(x))
        for x in ("a", "b")
    )
    rows.append(("3", fit["law"], "constant, then falling", "-", a, b))
    heads = ("approach", "method", "learning rate", "minima", "N* ~ C^a", "D* ~ C^b")
    rows.sort(key=lambda row: row[0])
    note = (
        f"{stats['level']:.0%} intervals by resampling runs. Every size was trained "
        "for every length twice: with a constant rate that then decays to zero, at "
        "several rates, and with a cosine schedule at one rate. Envelopes are of "
        "training losses; that of constant rates is taken before the decay and is not "
        f"comparable with the other. Losses under a cosine differ by "
        f"{100 * stats['cosine_excess']:+.2f} % from the best constant rate, standard "
        f"error {100 * stats['cosine_excess_se']:.2f} %. " + fit["shift"]
    )
    return lab.Sheet("three approaches", heads, rows, note)


def _budgets(result: Result) -> lab.Sheet:
    optima = result.optima
    rows = []
    at = [*optima.methods].index("parabola")
    minima = zip(
        optima.num_params[at], optima.num_tokens[at], optima.loss[at], strict=True
    )
    for i, (n, d, loss) in enumerate(minima):
        subset = result.fit.group == i
        cells = ["none", "", "", ""]
        if np.isfinite(n):
            cells = [lab.format_number(float(n)), lab.format_number(float(d))]
            cells += [f"{d / n:.3g}", f"{loss:.4f}"]
        num_sizes = len(np.unique(result.fit.num_params[subset]))
        lowest = result.fit.loss[subset].min()
        flops = f"{optima.flops[i]:.3g}"
        rows.append((flops, str(num_sizes), *cells, f"{lowest:.4f}"))
    heads = ("C", "sizes", "N*", "D*", "D*/N*", "L*", "best run")
    return lab.Sheet("budgets", heads, rows, "Minima of parabolas through all sizes.")


def _prediction(result: Result, stats: dict[str, Any]) -> lab.Sheet:
    predicted = result.predicted
    size = f"{predicted['num_params']:,} parameters"
    value, low, high = (predicted[x] for x in ("predicted", "low", "high"))
    rows = [
        ("predicted at", predicted["made_at"]),
        ("model", f"width {predicted['width']}, {size}"),
        ("tokens", f"{predicted['num_tokens']:,}"),
        ("compute", f"{predicted['flops']:.3g} FLOP"),
        ("over the largest fitted", f"{stats['held_out_factor']:.3g}"),
        ("learning rate", f"{predicted['learning_rate']:.4g}"),
        ("predicted, three laws averaged", f"{value:.4f} ({low:.4f} to {high:.4f})"),
        ("by a log-linear law", f"{predicted['log_linear']:.4f}"),
        *((f"by {name}", f"{x:.4f}") for name, x in predicted["by_law"].items()),
        *(
            (f"{name} on the largest budgets", f"off by {100 * x:.2f} %")
            for name, x in predicted["rollout_errors"].items()
        ),
        ("best of the fitted", f"{predicted['best_fitted_loss']:.4f}"),
    ]
    if result.truth:
        linear = stats["log_linear_error_share"]
        rows += [
            *(
                (f"at rate {rate:.4g}", "diverged" if x is None else f"{x:.4f}")
                for rate, x in stats["tried"]
            ),
            ("held-out run", f"{stats['truth']:.4f}"),
            ("error, share of the gain", f"{100 * stats['error_share']:+.1f} %"),
            ("log-linear law's", f"{100 * linear:+.1f} %"),
            ("inside the interval", "yes" if stats["is_inside"] else "no"),
        ]
    return lab.Sheet("the predicted run", ("", ""), rows, predicted["conventions"])


def _with_interval(value: float | None, interval: Sequence[float | None]) -> str:
    if value is None:
        return "none"
    if not interval or any(x is None for x in interval):
        return f"{value:.3f}"
    return f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"
