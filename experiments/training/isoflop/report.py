"""What `isoflop` says: what must hold, its numbers, and tables for a person."""

import json
from typing import Any

import numpy as np

from experiments.framework import Claim, Part, Sheet, judge, units
from experiments.training.isoflop.outcomes import Result

RANGE = (0.35, 0.65)
"""Where the exponent of N* should lie: around one half, as far as tiny models say."""
MAX_ERROR_SHARE = 0.2
MAX_EXCESS = 0.01
_LECTURE = "the lectures, compute trade-off: best N and D of a budget by small runs"
_CHINCHILLA = "Hoffmann et al. 2022, arXiv:2203.15556, table 2"


def claims(result: Result) -> list[Claim]:
    """Holds the minima, the exponent and the prediction against what they should be."""
    found = metrics(result)
    a, low, high = (found[x] for x in ("exponent", "exponent_low", "exponent_high"))
    middle, half = sum(RANGE) / 2, (RANGE[1] - RANGE[0]) / 2
    said = [
        judge(
            "budgets whose best size lies between others, in a U that opens upward",
            source=_LECTURE,
            published=3,
            ours=found["interior_minima"],
            unit="budgets",
            relation="at_least",
        ),
        judge(
            "the best size grows with about the square root of the compute",
            source=f"{_CHINCHILLA}: 0.49 by isoFLOP curves",
            published=middle,
            ours=a,
            unit="1",
            tolerance=half,
            note=f"By parabolas; 90 % interval {low:.3f} to {high:.3f}.",
        ),
        judge(
            "and so say both ends of its interval",
            source=_CHINCHILLA,
            published=half,
            ours=max(abs(low - middle), abs(high - middle)),
            unit="1",
            relation="at_most",
            note="The distance of the farther end from one half.",
        ),
    ]
    said.append(
        judge(
            "a rate that is constant and then falls ends as low as a cosine",
            source="Hägele et al. 2024, arXiv:2405.18392, section 4",
            published=MAX_EXCESS,
            ours=-found["cosine_excess"],
            unit="1",
            relation="at_most",
            note=(
                "Mean of ln(best loss of several such rates / loss under one cosine), "
                f"{found['cosine_runs']} sizes and lengths; standard error "
                f"{found['cosine_excess_se']:.4f}."
            ),
        )
    )
    if "error_share" not in found:
        return said
    return [
        *said,
        judge(
            "the law foresees a larger run's loss, as a share of what it gains",
            source=_LECTURE,
            published=MAX_ERROR_SHARE,
            ours=abs(found["error_share"]),
            unit="1",
            relation="at_most",
            note=(
                f"{found['held_out_factor']:.3g} times the compute; foreseen "
                f"{found['predicted']:.4f}, came {found['truth']:.4f}, the best that "
                f"was fitted {found['best_fitted_loss']:.4f}; a log-linear law misses "
                f"by {abs(found['log_linear_error_share']):.3g}."
            ),
        ),
        judge(
            "the truth lies in the 90 % interval that was told before",
            source=_LECTURE,
            published=1,
            ours=float(found["is_inside"]),
            unit="1",
            note=f"{found['low']:.4f} to {found['high']:.4f}.",
        ),
    ]


def metrics(result: Result) -> dict[str, Any]:
    """Gathers the numbers."""
    foreseen, fit = json.loads(result.prediction), json.loads(result.fit.document)
    by_method = {x["method"]: x for x in fit["frontiers"]}
    parabola = by_method["parabola"]
    rows = [json.loads(line) for line in result.runs.splitlines()]
    cosine = json.loads(result.cosine)
    ratios = np.array(cosine["log_ratios"])
    envelopes = [x for x in cosine["frontiers"] if x["method"] == "envelope"]
    a = parabola["a"] if parabola["a"] is not None else np.nan
    low, high = parabola["a_interval"] or (np.nan, np.nan)
    found = {
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
        "largest_fitted_flops": foreseen["largest_fitted_flops"],
        "best_fitted_loss": foreseen["best_fitted_loss"],
        "held_out_width": foreseen["width"],
        "held_out_params": foreseen["num_params"],
        "held_out_tokens": foreseen["num_tokens"],
        "held_out_flops": foreseen["flops"],
        "held_out_factor": foreseen["flops"] / foreseen["largest_fitted_flops"],
        "predicted": foreseen["predicted"],
        "level": foreseen["level"],
        "low": foreseen["low"],
        "high": foreseen["high"],
        "log_linear": foreseen["log_linear"],
        "seed_spread": foreseen["seed_spread"],
        "seconds_of_fitted_runs": sum(row["seconds"] for row in rows),
    }
    held_out = json.loads(result.held_out) if result.held_out else {}
    if held_out.get("loss") is None:
        return found
    truth = held_out["loss"]
    gain = foreseen["best_fitted_loss"] - truth
    return found | {
        "truth": truth,
        "tried": held_out["tried"],
        "truth_se": held_out["loss_se"],
        "truth_seconds": held_out["seconds"],
        "gain": gain,
        "error_share": (foreseen["predicted"] - truth) / gain,
        "log_linear_error_share": (foreseen["log_linear"] - truth) / gain,
        "is_inside": bool(foreseen["low"] <= truth <= foreseen["high"]),
    }


def summary(result: Result) -> list[Part]:
    """Lays out the approaches, the budgets and the prediction."""
    return [_approaches(result), _budgets(result), _prediction(result)]


def _approaches(result: Result) -> Sheet:
    fit, cosine = json.loads(result.fit.document), json.loads(result.cosine)
    rows = []
    for each, schedule in (
        *((x, "cosine") for x in cosine["frontiers"]),
        *((x, "constant, then falling") for x in fit["frontiers"]),
    ):
        number = "1" if each["method"] == "envelope" else "2"
        rows.append(
            (
                number,
                each["method"],
                schedule,
                f"{each['num_minima']} of {each['num_budgets']}",
                _with_interval(each["a"], each["a_interval"]),
                _with_interval(each["b"], each["b_interval"]),
            )
        )
    a, b = (
        _with_interval(fit["exponents"][x], fit["exponent_intervals"].get(x))
        for x in ("a", "b")
    )
    rows.append(("3", fit["law"], "constant, then falling", "-", a, b))
    heads = ("approach", "method", "learning rate", "minima", "N* ~ C^a", "D* ~ C^b")
    rows.sort(key=lambda row: row[0])
    found = metrics(result)
    note = (
        f"{found['level']:.0%} intervals by resampling runs. Every size was trained "
        "for every length twice: with a rate that is constant and then falls to zero, "
        "at several rates, and with a cosine, at one. Envelopes are of training "
        "losses; that of constant rates sees them before the fall, and is comparable "
        f"with itself alone. Losses under a cosine are "
        f"{100 * found['cosine_excess']:+.2f} % off the best of the others, standard "
        f"error {100 * found['cosine_excess_se']:.2f} %. " + fit["shift"]
    )
    return Sheet("three approaches", heads, rows, note)


def _budgets(result: Result) -> Sheet:
    optima, rows = result.optima, []
    at = [*optima.methods].index("parabola")
    for i, flops in enumerate(optima.flops):
        mine = result.fit.group == i
        n, d, loss = (
            x[at][i] for x in (optima.num_params, optima.num_tokens, optima.loss)
        )
        is_there = np.isfinite(n)
        rows.append(
            (
                f"{flops:.3g}",
                str(len(np.unique(result.fit.num_params[mine]))),
                units.cell(float(n)) if is_there else "none",
                units.cell(float(d)) if is_there else "",
                f"{d / n:.3g}" if is_there else "",
                f"{loss:.4f}" if is_there else "",
                f"{result.fit.loss[mine].min():.4f}",
            )
        )
    heads = ("C", "sizes", "N*", "D*", "D*/N*", "L*", "best run")
    return Sheet("budgets", heads, rows, "Minima of parabolas through all sizes.")


def _prediction(result: Result) -> Sheet:
    foreseen, found = json.loads(result.prediction), metrics(result)
    rows = [
        ("said at", foreseen["made_at"]),
        ("model", f"width {foreseen['width']}, {foreseen['num_params']:,} parameters"),
        ("tokens", f"{foreseen['num_tokens']:,}"),
        ("compute", f"{foreseen['flops']:.3g} FLOP"),
        ("over the largest fitted", f"{found['held_out_factor']:.3g}"),
        ("learning rate", f"{foreseen['learning_rate']:.4g}"),
        (
            "foreseen, three laws averaged",
            f"{foreseen['predicted']:.4f} ({foreseen['low']:.4f} to "
            f"{foreseen['high']:.4f})",
        ),
        ("by a log-linear law", f"{foreseen['log_linear']:.4f}"),
        *((f"by {name}", f"{x:.4f}") for name, x in foreseen["by_law"].items()),
        *(
            (f"{name} on the largest budgets", f"off by {100 * x:.2f} %")
            for name, x in foreseen["rollout_errors"].items()
        ),
        ("best of the fitted", f"{foreseen['best_fitted_loss']:.4f}"),
    ]
    if "truth" in found:
        rows += [
            *((f"at rate {rate:.4g}", _loss(x)) for rate, x in found["tried"]),
            ("truth", f"{found['truth']:.4f}"),
            ("error, share of the gain", f"{100 * found['error_share']:+.1f} %"),
            (
                "log-linear law's",
                f"{100 * found['log_linear_error_share']:+.1f} %",
            ),
            ("inside the interval", "yes" if found["is_inside"] else "no"),
        ]
    return Sheet("the run that was foreseen", ("", ""), rows, foreseen["conventions"])


def _loss(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.4f}"


def _with_interval(value: float | None, interval: Any) -> str:
    if value is None:
        return "none"
    if not interval or any(x is None for x in interval):
        return f"{value:.3f}"
    return f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"
