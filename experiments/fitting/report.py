"""What a fit says: the keys of its document, and tables and sentences for a person."""

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.fitting.result import Result
from experiments.framework import ReportPart, Sheet, units
from experiments.framework.report import numbered_list
from scaling.fits import FitResult, goodness
from scaling.frontiers import Frontier, find, parabola

MAX_ROWS = 25
"""Held-out runs in a table; the largest by compute where there are more."""

KEYS = (
    "law",
    "coefficients",
    "intervals",
    "exponents",
    "exponent_intervals",
    "objective",
    "num_points",
    "status",
    "distinct_minima",
    "condition_number",
    "bounds_hit",
    "warnings",
    "held_out",
    "residual_sizes",
)
"""Of each fit in the document; `fit.json` has the others too."""


OPTIONAL = ("group", "fixed", "bounds")
"""And these, where there are such."""


def metrics(result: Result) -> dict[str, Any]:
    """The keys of the first fit; `fits` has all where there are several."""
    document = json.loads(result.document)
    fits = [_keys(document)] + [_keys(each) for each in document["others"]]
    by = {"by": document["by"]} if "by" in document else {}
    return {
        **fits[0],
        "warnings": fits[0]["warnings"] + document.get("log_warnings", []),
        **by,
        **({"fits": fits} if len(fits) > 1 or by else {}),
        "count": document["count"],
        "notes": document["notes"],
        "frontiers": document["frontiers"],
        "frontier_warnings": document["frontier_warnings"],
    }


def summary(result: Result) -> list[ReportPart]:
    """Tables of coefficients, laws, frontiers and held-out runs; doubts in words."""
    document = json.loads(result.document)
    fits = [document, *document["others"]]
    parts: list[ReportPart] = [_coefficients(fit) for fit in fits]
    parts.append(_laws(fits, document["scored"]))
    if document["frontiers"]:
        parts.append(_frontiers(document))
    if not result.is_fitted.all():
        parts.append(_held_out(result))
    names: dict[str, list[str]] = {}
    for fit in fits:
        for line in fit["warnings"]:
            names.setdefault(line, []).append(_name(fit))
    warnings = [f"{', '.join(several)}: {line}" for line, several in names.items()]
    warnings = document.get("log_warnings", []) + warnings
    parts.append(numbered_list("warnings", warnings + document["frontier_warnings"]))
    return [*parts, numbered_list("how the log was read", document["notes"])]


def _keys(fit: dict[str, Any]) -> dict[str, Any]:
    return {key: fit[key] for key in KEYS} | {
        key: fit[key] for key in OPTIONAL if fit.get(key)
    }


def _name(fit: dict[str, Any]) -> str:
    """The law, and the group that it was fitted to."""
    return f"{fit['law']}, {fit['group']}" if "group" in fit else fit["law"]


def _coefficients(fit: dict[str, Any]) -> Sheet:
    given, intervals = fit.get("fixed", {}), fit["intervals"]
    rows = [
        (x, _short(y), "given" if x in given else _interval(intervals.get(x), y))
        for x, y in fit["coefficients"].items()
    ]
    intervals = fit["exponent_intervals"]
    rows += [
        (_OPTIMA[x], _short(y), _interval(intervals.get(x), share=True))
        for x, y in fit["exponents"].items()
    ]
    level = f"{fit['level']:.0%} interval"
    note = f"{fit['formula']}. {fit['source']}."
    return Sheet(_name(fit), ("coefficient", "value", level), rows, note)


_OPTIMA = {"a": "a: N* ~ C^a", "b": "b: D* ~ C^b"}


def _laws(fits: Sequence[dict[str, Any]], scored: str) -> Sheet:
    pairs = [(fit, fit["held_out"] or {}) for fit in fits]
    rows = [
        (
            _name(fit),
            units.format_number(fit["num_points"]),
            units.format_number(fit["objective"]),
            goodness.percentages([*fit["residual_sizes"].values()]),
            fit["status"],
            units.format_number(fit["distinct_minima"]),
            units.format_number(fit["condition_number"]),
            units.format_number(held.get("num_points")),
            _percent(held.get("mean_error")),
            _percent(held.get("worst_error")),
            _percent(held.get("last_error"), "+"),
            units.format_percent(held.get("covered")),
        )
        for fit, held in pairs
    ]
    heads = (
        "law",
        "runs",
        "objective",
        "off by: half, 90 %, all",
        "status",
        "minima",
        "condition",
        "held-out runs",
        "mean error",
        "worst",
        "largest run",
        "inside 90 %",
    )
    note = (
        f"{scored} Errors are of ln(fitted / seen); the sign is the largest run's. "
        "Half of the fitted runs are off by less than the first number, nine tenths by "
        "less than the second."
    )
    return Sheet("laws", heads, rows, note)


def _frontiers(document: dict[str, Any]) -> Sheet:
    rows = [
        (
            ", ".join(filter(None, (each["method"], each.get("group")))),
            f"{each['num_minima']} of {each['num_budgets']}",
            units.format_number(each["a"]),
            _interval(each["a_interval"], share=True),
            units.format_number(each["b"]),
            units.format_number(each["loss_exponent"]),
        )
        for each in document["frontiers"]
    ]
    heads = ("method", "minima", "a", "interval of a", "b", "of L*")
    note = "N* ~ C^a, D* ~ C^b, by least squares through the minima. "
    return Sheet("optima", heads, rows, note + document["shift"])


def _held_out(result: Result) -> Sheet:
    held = np.flatnonzero(~result.is_fitted)
    shown = held[np.argsort(-result.flops[held], kind="stable")][:MAX_ROWS]
    rows = []
    for i in shown:
        cells = [units.format_number(int(result.row[i]))]
        sizes = (result.num_params, result.num_tokens, result.flops)
        cells += [f"{x[i]:.3g}" if np.isfinite(x[i]) else "-" for x in sizes]
        cells.append(units.format_number(float(result.loss[i])))
        for predicted in result.predicted:
            off = float(np.log(predicted[i] / result.loss[i]))
            cells.append(f"{predicted[i]:.4g} ({_percent(off, '+')})")
        rows.append(cells)
    left = len(held) - len(shown)
    note = f"And {left} smaller ones." if left else ""
    heads = ("row", "N", "D", "C", "seen", *(str(law) for law in result.laws))
    return Sheet("held-out runs", heads, rows, note)


def _interval(
    pair: Sequence[float | None] | None,
    value: float | None = None,
    *,
    share: bool = False,
) -> str:
    """Writes an interval; "unknown" where it leaves nearly everything open.

    Args:
      pair: the ends; None where there is no interval.
      value: the estimate.
      share: whether the number can only be in (0, 1).
    """
    if pair is None:
        return "-"
    low, high = (math.nan if x is None else x for x in pair)
    if not is_informative(low, high, value) or (share and high - low > _OPEN):
        return "unknown"
    return f"{_short(low)} to {_short(high)}"


_OPEN = 0.9
"""Width of an interval of an exponent in (0, 1) that leaves it open."""
_FAR = 1e4
"""Ratio of an end of an interval to the estimate from which it leaves it open."""


def is_informative(low: float, high: float, value: float | None = None) -> bool:
    """Whether an interval has finite ends, the upper one within reach."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return False
    most = max(abs(low), abs(high))
    return value is None or most <= _FAR * max(abs(value), 1e-3)


def _short(value: float | None) -> str:
    """Four digits; unlike counts, coefficients are not written in full."""
    return "-" if value is None else f"{value:.4g}"


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.2f} %"


def frontier_json(each: Frontier) -> dict[str, Any]:
    """Writes a frontier down as JSON values."""
    laws = {"a": each.num_params, "b": each.num_tokens, "loss_exponent": each.loss}
    return {
        "method": each.method,
        **{name: law and law.exponent for name, law in laws.items()},
        **{f"{name}_interval": law and law.interval for name, law in laws.items()},
        "num_minima": int((each.minima.reason[0] == 0).sum()),
        "num_budgets": len(each.flops),
        "num_resamples": each.num_resamples,
    }


def expected_shift(found: find.Found) -> str:
    """Says how far the parabola's vertices lie from the minima of the fitted surface.

    Returns:
      A sentence; empty where there is no parabola or no correction.
    """
    by_name = {each.method: each.minima for each in found.frontiers}
    if found.exponents is None:
        return ""
    with np.errstate(invalid="ignore"):
        ratio = (
            by_name[find.PARABOLA].num_params[0] / by_name[find.CORRECTED].num_params[0]
        )
    ratio = ratio[np.isfinite(ratio)]
    if not ratio.size:
        return ""
    alpha, beta = found.exponents
    off = 100 * (np.exp(np.log(ratio).mean()) - 1)
    centred = 100 * (10 ** parabola.vertex_shift(alpha, beta, 1.0, 9) - 1)
    return (
        f"The surface by projection has alpha {alpha:.3f} and beta {beta:.3f}: there "
        f"parabolas through these sizes put N* {off:+.1f} % off ({centred:+.1f} % "
        "through 9 centred ones over two decades); `parabola, corrected` takes it out."
    )


def disjoint_intervals(fits: Sequence[FitResult], found: find.Found) -> list[str]:
    """Warns where methods give the optimum's growth intervals that do not overlap.

    Args:
      fits: of laws; one without an optimum, or at a wall, is not compared.
      found: the frontiers with intervals; an envelope, whose runs are not decayed, is
        left out. Where they contradict each other, a warning of theirs tells.
    """
    laws = [
        (fit.law, fit.exponents["a"], fit.exponent_intervals["a"])
        for fit in fits
        if "a" in fit.exponent_intervals and not fit.bounds_hit
    ]
    methods = [
        (each.method, each.num_params.exponent, each.num_params.interval)
        for each in found.frontiers
        if each.num_params and each.num_params.interval and each.method != find.ENVELOPE
    ]
    if any("contradict each other" in line for line in found.doubts):
        pairs = [*itertools.combinations(laws, 2), *itertools.product(laws, methods)]
    else:
        pairs = [*itertools.combinations([*laws, *methods], 2)]
    apart = [
        pair
        for pair in pairs
        if abs(pair[0][1] - pair[1][1]) > _NEAR
        and max(pair[0][2][0], pair[1][2][0]) > min(pair[0][2][1], pair[1][2][1])
    ]
    if not apart:
        return []
    listed = "; ".join(
        f"{name} {value:.3f} ({low:.3f} to {high:.3f})"
        for name, value, (low, high) in dict.fromkeys(x for pair in apart for x in pair)
    )
    return [f"intervals of a, N* ~ C^a, do not overlap: {listed}"]


_NEAR = 0.02
"""Difference of exponents that never matters."""
